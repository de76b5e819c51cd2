"""Tasks from files: every fraction recorded, chat templates, examples, and base scores measured again when they must be."""

import json
import shutil

import pytest

import mmlu_folder
import own_tasks
from anchorlora_lab.suites.measure import Questions, evaluate

pytest.importorskip("lm_eval", minversion="0.4.12")
from lm_eval.models.huggingface import HFLM

from anchorlora_lab.suites import harness  # needs lm_eval

TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}{% if add_generation_prompt %}<answer>{% endif %}"


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return mmlu_folder.write_model(tmp_path_factory.mktemp("model") / "model")


@pytest.fixture
def adapter(tmp_path, model):
    return mmlu_folder.write_an_adapter(tmp_path / "adapter", model, size=0.5)


@pytest.fixture(scope="module")
def talking(tmp_path_factory):
    """A model with a chat template."""
    folder = mmlu_folder.write_model(tmp_path_factory.mktemp("talking") / "model")
    config = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(config | {"chat_template": TEMPLATE}))
    return folder


@pytest.fixture
def ask(tmp_path):
    def ask(folder, *tasks, **changes):
        settings = {name: changes.pop(name) for name in ("force", "watch") if name in changes}
        return evaluate(
            folder, Questions(tuple(map(str, tasks)), **changes), cache=tmp_path / "cache", **{"force": True, **settings}
        )

    return ask


@pytest.fixture
def read(monkeypatch):
    """The prompts that a model reads, those of each evaluation in a list."""
    seen, inner = [], HFLM.loglikelihood

    def reading(self, requests, disable_tqdm=False):
        seen.append([request.args[0] for request in requests])
        return inner(self, requests, disable_tqdm)

    monkeypatch.setattr(HFLM, "loglikelihood", reading)
    return seen


def test_a_task_judged_as_ifeval_is_scored_by_its_strict_accuracy_with_every_fraction_recorded(adapter, ask, tmp_path, capfd):
    found = ask(adapter, own_tasks.write(tmp_path / "own", own_tasks.JUDGED))
    said = capfd.readouterr()
    assert "bootstrapping" not in said.out + said.err
    assert "Generating" not in said.err
    (task,) = found.tasks
    assert (task.task, task.metric, task.n) == ("judged", "prompt_level_strict_acc", 12)
    assert list(task.metrics) == ["prompt_level_strict_acc", "inst_level_strict_acc"], "no perplexity, and no score of ten a letter"
    assert task.flips is not None
    assert task.change_stderr is not None
    assert task.metrics["inst_level_strict_acc"].change_stderr is None, "it counts instructions, not questions"
    assert (found.task, found.base, found.change) == ("judged.yaml", task.base, task.change)


def test_a_task_without_a_fraction_is_refused_before_a_model_is_loaded_or_before_the_adapter_is_measured(
    adapter, ask, tmp_path, monkeypatch
):
    lines = own_tasks.JUDGED.replace("judging.judge\n", "judging.judge_letters\n").splitlines(keepends=True)
    scored = own_tasks.write(tmp_path / "scored", "".join(line for line in lines if "_acc" not in line))
    with pytest.raises(
        ValueError, match=r"the task judged cannot be scored in percent: no metric of it is a fraction of 1 \(score"
    ):
        ask(adapter, scored)
    monkeypatch.setattr("anchorlora_lab.suites.measure.load_base_model", None)
    surprised = own_tasks.write(
        tmp_path / "surprised", "".join(line for line in lines if "_acc" not in line and ": score" not in line)
    )
    with pytest.raises(ValueError, match=r"cannot be scored in percent: no metric of it is a fraction of 1 \(perplexity\); choose"):
        ask(adapter, surprised)
    assert not (adapter / "eval.json").exists()


def test_tasks_of_one_call_are_scored_as_alone(adapter, ask, tmp_path):
    quiz, judged = own_tasks.write(tmp_path / "own"), own_tasks.write(tmp_path / "own", own_tasks.JUDGED)
    both = ask(adapter, quiz, judged)
    alone = [ask(adapter, each).tasks[0] for each in (quiz, judged)]
    assert both.tasks == alone
    assert both.base.score == pytest.approx((alone[0].base.score + alone[1].base.score) / 2)
    assert both.change_stderr == pytest.approx((alone[0].change_stderr ** 2 + alone[1].change_stderr ** 2) ** 0.5 / 2)
    assert (both.task, both.metric, both.n) == ("quiz.yaml,judged.yaml", "acc,prompt_level_strict_acc", 24)
    assert set(both.files) == {"quiz.yaml", "judged.yaml"}
    with pytest.raises(ValueError, match="the task quiz is asked for 2 times; name it once"):
        ask(adapter, quiz, own_tasks.write(tmp_path / "more"))


def test_the_chat_template_and_the_examples_are_in_what_the_model_reads(talking, tmp_path, ask, read):
    adapter, quiz = mmlu_folder.write_an_adapter(tmp_path / "adapter", talking, size=0.5), own_tasks.write(tmp_path / "own")
    plain = ask(adapter, quiz, limit=2)
    assert read[-1][0] == "Which bone is it?"
    chat = ask(adapter, quiz, limit=2, apply_chat_template=True)
    assert read[-1][0] == "<user>Which bone is it?<answer>"
    assert (plain.apply_chat_template, chat.apply_chat_template) == (False, True)
    shown = ask(adapter, quiz, limit=2, num_fewshot=1)
    assert read[-1][0].endswith("\n\nWhich bone is it?")
    assert (plain.tasks[0].num_fewshot, shown.tasks[0].num_fewshot, shown.num_fewshot) == (0, 1, 1)
    ask(adapter, quiz, limit=2, num_fewshot=1, apply_chat_template=True)
    assert read[-1][0].startswith("<user>Which ")
    assert read[-1][0].endswith("<user>Which bone is it?<answer>"), "an example is a turn of its own"
    assert len(read) == 8, "each of the four had its own base score"
    assert [read[i] for i in (0, 2, 4, 6)] == [read[i] for i in (1, 3, 5, 7)], "the adapter reads what the base model reads"


def test_a_task_keeps_its_own_number_of_examples_unless_another_is_asked(adapter, ask, tmp_path, read):
    two = own_tasks.write(tmp_path / "two", num_fewshot=2)
    none = own_tasks.write(tmp_path / "none", num_fewshot=0)
    assert ask(adapter, two, limit=2).tasks[0].num_fewshot == 2
    assert ask(adapter, two, limit=2, num_fewshot=1).tasks[0].num_fewshot == 1
    assert ask(adapter, none, limit=2, num_fewshot=1).tasks[0].num_fewshot == 0, "its examples are in the question"
    assert [prompts[0].count("Which") for prompts in read[1::2]] == [3, 2, 1]


def test_a_base_score_is_used_again_only_for_the_same_questions(model, ask, tmp_path, read):
    first, second = (mmlu_folder.write_an_adapter(tmp_path / f"a{i}", model, size=0.5, seed=i) for i in (1, 2))
    quiz = own_tasks.write(tmp_path / "own")
    found = ask(first, quiz)
    assert ask(second, quiz).base == found.base
    assert len(read) == 3, "base, first, second"
    for change in ({"limit": 3}, {"num_fewshot": 1}, {"batch": 5}):
        ask(first, quiz, **change)
    assert len(read) == 9
    own_tasks.write(tmp_path / "own", description="Choose. ")
    ask(first, quiz)
    assert len(read) == 11, "another wording is another question"
    own_tasks.write(tmp_path / "own", description="Choose. ", metadata={"version": 2})
    ask(first, quiz)
    assert len(read) == 13


def test_a_file_that_was_edited_is_another_request(adapter, ask, tmp_path):
    quiz = own_tasks.write(tmp_path / "own")
    found = ask(adapter, quiz)
    assert ask(adapter, quiz, force=False) == found
    own_tasks.write(tmp_path / "own", description="Choose. ")
    with pytest.raises(ValueError, match="answers another request .the file quiz.yaml: .{12} there, .{12} asked.*--force"):
        ask(adapter, quiz, force=False)
    for change in ({"num_fewshot": 1}, {"apply_chat_template": True}):
        with pytest.raises(ValueError, match=f"answers another request .{next(iter(change))}: "):
            ask(adapter, own_tasks.write(tmp_path / "own"), force=False, **change)


def test_another_model_in_the_same_folder_is_another_request(model, ask, tmp_path):
    base = shutil.copytree(model, tmp_path / "base")
    adapter = mmlu_folder.write_an_adapter(tmp_path / "a", base, size=0.5, seed=1)
    quiz = own_tasks.write(tmp_path / "own")
    found = ask(adapter, quiz)
    (base / "generation_config.json").write_text("{}")
    with pytest.raises(ValueError, match="answers another request .files of the model: .*--force"):
        ask(adapter, quiz, force=False)
    shutil.rmtree(base)
    assert ask(adapter, quiz, force=False) == found, "what was measured is shown, though the model is gone"


def test_two_task_files_of_one_name_are_both_in_the_file(adapter, ask, tmp_path):
    one, other = own_tasks.write(tmp_path / "one"), own_tasks.write(tmp_path / "other", task="questions", description="Choose. ")
    found = ask(adapter, one, other)
    assert set(found.files) == {str(one), str(other)}
    own_tasks.write(tmp_path / "one", description="Tell. ")
    with pytest.raises(ValueError, match="answers another request .the file "):
        ask(adapter, one, other, force=False)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("task: quiz\n", "the task .*bad.yaml cannot be loaded: "),
        ("[", "the task .*bad.yaml cannot be loaded: "),
        (None, "there is no task file .*bad.yaml; give a YAML file of lm_eval"),
    ],
)
def test_a_task_file_that_cannot_be_read_is_named(text, message, adapter, ask, tmp_path):
    if text is not None:
        (tmp_path / "bad.yaml").write_text(text)
    with pytest.raises(ValueError, match=message) as refused:
        ask(adapter, tmp_path / "bad.yaml")
    assert "\n" not in str(refused.value)
    assert not (adapter / "eval.json").exists()


def test_a_missing_chat_template_is_refused_before_the_model_is_loaded(adapter, ask, tmp_path, monkeypatch):
    monkeypatch.setattr("anchorlora_lab.suites.measure.load_base_model", None)
    with pytest.raises(
        ValueError, match="has no chat template, and --apply-chat-template needs one; leave it out, or choose a chat model"
    ):
        ask(adapter, own_tasks.write(tmp_path / "own"), apply_chat_template=True)
    assert not (adapter / "eval.json").exists()


def test_a_template_that_refuses_the_questions_is_named(talking, ask, tmp_path):
    folder = mmlu_folder.write_model(tmp_path / "strict")
    config = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(config | {"chat_template": "{{ raise_exception('no users here') }}"}))
    adapter = mmlu_folder.write_an_adapter(tmp_path / "adapter", folder, size=0.5)
    with pytest.raises(ValueError, match="the task quiz cannot be asked in this way: no users here"):
        ask(adapter, own_tasks.write(tmp_path / "own"), apply_chat_template=True)


def test_files_need_no_index_of_lm_evals_own_tasks(adapter, ask, tmp_path, monkeypatch):
    made, inner = [], harness.TaskManager
    monkeypatch.setattr(harness, "TaskManager", lambda **how: made.append(how) or inner(**how))
    ask(adapter, own_tasks.write(tmp_path / "own"), limit=1)
    assert made == [{"include_defaults": False}]
