"""Tasks of lm_eval as files, with rows on disk: multiple choice, and free answers judged as IFEval judges them."""

import json

import yaml

import mmlu_folder

CHOICE = """
task: quiz
dataset_path: json
output_type: multiple_choice
test_split: test
fewshot_split: test
doc_to_text: "Which {{q}}?"
doc_to_choice: ["A", "B", "C", "D"]
doc_to_target: a
metric_list:
  - {metric: acc, aggregation: mean, higher_is_better: true}
  - {metric: acc_norm, aggregation: mean, higher_is_better: true}
"""
JUDGED = """
task: judged
dataset_path: json
output_type: generate_until
test_split: test
doc_to_text: "Which {{q}}?"
doc_to_target: 0
generation_kwargs: {until: [], do_sample: false, max_gen_toks: 4}
process_results: !function judging.judge
metric_list:
  - {metric: perplexity, aggregation: perplexity, higher_is_better: false}
  - {metric: score, aggregation: mean, higher_is_better: true}
  - {metric: prompt_level_strict_acc, aggregation: mean, higher_is_better: true}
  - {metric: inst_level_strict_acc, aggregation: !function judging.over_instructions, higher_is_better: true}
"""
JUDGING = """
def judge(doc, results):
    text = results[0]
    kept = [len(text) % 2 == 0, len(text) > 3]
    return {
        "perplexity": -1.0,
        "score": 10.0 * len(text),
        "prompt_level_strict_acc": all(kept),
        "inst_level_strict_acc": kept,
    }


def judge_letters(doc, results):
    return {"perplexity": -1.0, "score": 10.0 * len(results[0])}


def over_instructions(items):
    flat = [each for item in items for each in item]
    return sum(flat) / len(flat)
"""


def write(folder, text=CHOICE, **changes):
    """The YAML file of a task, with its rows and its code beside it."""
    folder.mkdir(exist_ok=True)
    rows = [{"q": f"{word} is it", "a": i % 4} for i, word in enumerate(mmlu_folder.WORDS)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "judging.py").write_text(JUDGING)
    more = {"dataset_kwargs": {"data_files": {"test": str(folder / "rows.jsonl")}, "cache_dir": str(folder / "cache")}, **changes}
    name = f"{text.split()[1]}.yaml"
    (folder / name).write_text(text + yaml.safe_dump(more))
    return folder / name
