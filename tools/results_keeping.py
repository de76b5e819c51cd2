"""The tables of docs/train.md, README.md and docs/package.md on what was kept, from the results of benchmarks/keeping.py."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from tabulate import tabulate

from anchorlora.scores import Paired
from anchorlora_lab.frontier.bench import read_records
from anchorlora_lab.frontier.tables import interval
from anchorlora_lab.report.figures.style import COLORS, REFERENCE, as_bytes
from anchorlora_lab.report.records import group_by, mean

ROOT = Path(__file__).parents[1]
SKILLS = {
    "labels": "topics of news",
    "card": "a fixed JSON card",
    "passage": "answers from a passage",
    "style": "a register that no prompt asks for",
    "topics": "sections of questions",
    "headline": "headlines",
    "names": "names in a text",
}
NEEDS = {
    "before": "",
    "plain PEFT": "nothing",
    "replay 5 %": "old examples, again and again",
    "replay equal memory": "200 old examples and 200 passages, again and again",
    "KL on own text": "a second model in memory",
    "OSF": "nothing; trains and stores full weights",
    "block": "nothing",
    "snapshot": "nothing",
    "keep old text": "200 old examples and 200 passages, once",
    "keep self": "nothing",
    "keep old text sensitive-core": "200 old examples and 200 passages, once",
    "keep old text fold-16": "200 old examples and 200 passages, once",
    "keep self sensitive-core": "nothing",
    "keep old text, same size": "200 old examples and 200 passages, once",
    "keep self, same size": "nothing",
    "OPLoRA": "nothing",
}
WORDS = {
    "before": "before",
    "plain PEFT": "the old adapter trained further, plain PEFT",
    "replay 5 %": "the same, replay of 5 %",
    "replay equal memory": "the same, replay of 200 old examples and 200 passages",
    "KL on own text": "the same, KL to the old model on its own text",
    "OSF": "PEFT's OSF on the merged model",
    "block": "a new block, unprotected",
    "snapshot": "a new block, averaged with the model before (`--method snapshot`)",
    "keep old text": "`--keep` old text",
    "keep self": "`--keep self`",
    "keep old text sensitive-core": "`--keep` old text `--method sensitive-core`",
    "keep old text fold-16": "`--keep` old text `--method fold-16`",
    "keep self sensitive-core": "`--keep self --method sensitive-core`",
    "keep old text, same size": "`--keep` old text `--same-size`",
    "keep self, same size": "`--keep self --same-size`",
    "OPLoRA": "`--method oplora`",
}
INSTEAD = {  # what a newcomer may use now, then what we offer: rows of README.md, each with what it is called there
    "before": "before the new task",
    "plain PEFT": "plain PEFT: the old adapter trained further",
    "replay 5 %": "the same, replay of 5 %",
    "KL on own text": "the same, KL self-distillation on its own text",
    "OSF": "PEFT's OSF",
    "block": "a second adapter next to the old one",
    "snapshot": "the same, averaged with the model before: snapshot",
    "keep self": "**`anchorlora train --keep self`**",
    "keep self sensitive-core": "**.. `--keep self --method sensitive-core`**",
    "keep old text": "**`anchorlora train --keep`** old text",
}
MEASURED = (("agnews", "exact_match"), ("dbpedia", "exact_match"), ("text", "loss"))
PAIRS = (
    ("keep self", "keep old text"),
    ("keep self", "block"),
    ("keep self", "plain PEFT"),
    ("keep self", "snapshot"),
    ("keep old text", "block"),
    ("keep old text", "plain PEFT"),
    ("keep old text", "replay 5 %"),
    ("keep old text", "replay equal memory"),
    ("keep self", "KL on own text"),
    ("keep self", "OSF"),
    ("snapshot", "block"),
    ("snapshot", "plain PEFT"),
    ("keep old text", "snapshot"),
    ("keep old text sensitive-core", "keep old text"),
    ("keep old text fold-16", "keep old text"),
    ("keep self sensitive-core", "keep self"),
    ("keep self sensitive-core", "snapshot"),
    ("keep self sensitive-core", "plain PEFT"),
    ("keep self sensitive-core", "keep old text"),
    ("keep self sensitive-core", "replay 5 %"),
    ("keep self sensitive-core", "replay equal memory"),
    ("replay equal memory", "replay 5 %"),
    ("keep old text, same size", "plain PEFT"),
    ("keep self, same size", "plain PEFT"),
    ("keep old text, same size", "replay 5 %"),
)


def scores(found: Sequence[dict[str, Any]], task: str, metric: str) -> list[float]:
    """Scores of all examples of all seeds."""
    unit = 100.0 if metric == "exact_match" else 1.0
    return [unit * value for each in sorted(found, key=lambda r: r["seed"]) for value in each["scores"][task][metric]]


def between(theirs: Sequence[dict[str, Any]], ours: Sequence[dict[str, Any]], task: str, metric: str) -> str:
    """The mean difference of ours, its 95 % interval over seeds and examples, and the difference of each seed."""
    seeds = sorted({r["seed"] for r in theirs} & {r["seed"] for r in ours})
    by_seed = [[scores([r for r in group if r["seed"] == seed], task, metric) for group in (theirs, ours)] for seed in seeds]
    differences = [[b - a for a, b in zip(was, now, strict=True)] for was, now in by_seed]
    low, high = (bound / 100 for bound in interval([{metric: each} for each in differences]))
    digits = 3 if metric == "loss" else 1
    each = ", ".join(f"{mean(values):+.{digits}f}" for values in differences)
    return f"{mean([mean(values) for values in differences]):+.{digits}f} ({low:+.{digits}f} to {high:+.{digits}f}; {each})"


def costs(found: Sequence[dict[str, Any]]) -> list[str]:
    """CPU seconds, peak memory and bytes stored, as far as they were measured."""
    seconds, peaks = ([r[key] for r in found if key in r] for key in ("cpu_seconds", "peak"))
    stored = mean([r["bytes"] for r in found])
    return [
        f"{mean(seconds):.0f}" if seconds else "",
        f"{mean(peaks) / 1e6:.0f}" if peaks else "",
        f"{stored / 1e6:.2f}" if stored else "",
    ]


def tables(results: dict[str, list[dict[str, Any]]]) -> str:
    """The table of variants, and the table of paired differences over the seeds that both have."""
    rows = []
    for name in WORDS:
        if name not in results:
            continue
        a, d, t = (mean(scores(results[name], *where)) for where in MEASURED)
        shown = [f"{a:.1f}", f"{d:.1f}", f"{t:.3f}", *costs(results[name])]
        rows.append([WORDS[name], NEEDS[name], str(len(results[name])), *shown])
    heads = [
        "variant",
        "needs",
        "seeds",
        "agnews, new, %",
        "dbpedia, old, %",
        "text, loss",
        "CPU seconds",
        "peak memory, MB",
        "stored, MB",
    ]
    first = tabulate(rows, heads, tablefmt="github", disable_numparse=True, colalign=("left", "left", *["right"] * 7))
    lines = []
    for pair in PAIRS:
        if not all(name in results for name in pair):
            continue
        seeds = set.intersection(*({r["seed"] for r in results[name]} for name in pair))
        ours, theirs = ([r for r in results[name] if r["seed"] in seeds] for name in pair)
        cells = [between(theirs, ours, *where) for where in MEASURED]
        lines.append([f"{WORDS[pair[0]]} against {WORDS[pair[1]]}", str(len(seeds)), *cells])
    heads = ["difference (95 % interval; each seed)", "seeds", "agnews, points", "dbpedia, points", "text, loss"]
    second = tabulate(lines, heads, tablefmt="github", disable_numparse=True, colalign=("left", *["right"] * 4))
    return f"{first}\n\n{second}\n"


def instead(results: dict[str, list[dict[str, Any]]]) -> str:
    """The table of README.md: what each way needs, learns, keeps and costs; intervals are paired with the model before."""
    rows = []
    for name, words in INSTEAD.items():
        if name not in results:
            continue
        found = results[name]
        new, old = (scores(found, *where) for where in MEASURED[:2])
        lost = ""
        if name != "before":
            lost = between(results["before"], found, *MEASURED[1])
        rows.append([words, NEEDS[name], f"{mean(new):.1f}", f"{mean(old):.1f}", lost, *costs(found)])
    heads = [
        "you use",
        "it needs",
        "new task, %",
        "old task, %",
        "old task, change (95 %; each seed)",
        "CPU s",
        "peak MB",
        "stored MB",
    ]
    return tabulate(rows, heads, tablefmt="github", disable_numparse=True, colalign=("left", "left", *["right"] * 6)) + "\n"


ABILITIES = {"instructions": "follows instructions", "facts": "facts", "choice": "multiple choice"}
ABOVE_BEFORE = 0.1  # what a skill must gain by plain LoRA to be averaged in
TIMED = {("passage", 2026), ("style", 7)}  # whose time and memory count; the command ran on another day than the others


def price() -> str:
    """What README's first command learns, keeps and costs, from the records of benchmarks/first_command.py."""
    records = read_records(ROOT / "results/first-command")
    by = {(r["variant"], r["skill"], r["seed"]): r for r in records}
    by |= {("before", *key[1:]): r for r in records if r["variant"] == "before" for key in by if key[1] == r["skill"]}
    clusters = [key[1:] for key in by if key[0] == "command"]
    called = {
        "before": "before",
        "peft": "plain LoRA at 0.0005, PEFT with Trainer",
        "plain": "the same by `train --method inc-lora`",
        "command": "**the command below**",
        "rival": "the same with `--method replay`",
        "kl": "the same with `--method replay-kl`, one own text for each chat",
    }
    found = {name: [by[(name, *cluster)] for cluster in clusters] for name in called}
    rows = []
    for name, words in called.items():
        answers = [[record["new"], *(record["old"][ability] for ability in ABILITIES)] for record in found[name]]
        rows.append([words, *(f"{100 * mean(map(mean, column)):.0f}" for column in zip(*answers, strict=True))])
        if name != "before":
            timed = [record for cluster, record in zip(clusters, found[name], strict=True) if cluster in TIMED]
            seconds, peaks = ([record[cost] for record in timed] for cost in ("cpu_seconds", "peak_bytes"))
            rows[-1] += [f"{mean(seconds) / 60:.1f}", f"{mean(peaks) / 1e9:.1f}"]
    heads = ["right answers, %", "new skill", *ABILITIES.values(), "CPU minutes", "peak memory, GB"]
    table = tabulate(rows, heads, tablefmt="github", disable_numparse=True, colalign=("left", *["right"] * 6))
    skills = list(dict.fromkeys(skill for skill, _ in clusters))
    before, plain, ours, kl = (found[name] for name in ("before", "plain", "command", "kl"))
    chance = next(r["chance"] for r in read_records(ROOT / "results/frontier/smollm2") if r["row"] == "before")
    return (
        f"{table}\n\nSmolLM2-135M-Instruct; means over {len(clusters)} runs (minutes and memory over {len(TIMED)}), "
        "each of 192 chats of a new skill "
        f"({', '.join(SKILLS[skill] for skill in skills)}); 40 new and 90 old test examples. "
        f"By chance, {chance['instructions']:.0f} % of instructions and {chance['choice']:.0f} % of choices are right.\n"
        f"95 % intervals, over runs and examples: the command learns {moved(ours, plain, 'new')} points against plain LoRA "
        f"and keeps {moved(ours, plain, 'old')}; old abilities moved by {moved(ours, before, 'old')}. "
        f"Against `replay-kl`, it learns {moved(ours, kl, 'new')} and keeps {moved(ours, kl, 'old')}.\n"
        "The method was chosen on topics and cards with seed 42, a start from 16 examples on all runs, "
        "four examples a step on these and on others, and the strength of the penalty with two other seeds.\n"
        f"{beside_plain('gemma3', 'On Gemma 3 270M, a base model')}\n"
        f"{beside_plain('held-out', 'On skills for which nothing was chosen ({})')} "
        f"{beside_plain('gemma3/held-out', 'On Gemma ({})')} "
        "There, sections of questions still cost some facts: of 50 %, 47 and 33 are left (plain LoRA 0).\n"
        f"{chain_in_words()}\n"
    )


def moved(after: Sequence[dict[str, Any]], then: Sequence[dict[str, Any]], part: str) -> str:
    """The interval of one variant less another, over the new skills or over the old abilities."""
    scores = [
        ({a["skill"]: a["new"]}, {a["skill"]: b["new"]}) if part == "new" else (a["old"], b["old"])
        for a, b in zip(after, then, strict=True)
    ]
    low, high = interval([{n: [x - y for x, y in zip(a[n], b[n], strict=True)] for n in a} for a, b in scores])
    return f"{low:+.0f} to {high:+.0f}"


def beside_plain(folder: str, where: str) -> str:
    """What README's command and plain LoRA learn and keep over other runs; a skill that plain LoRA hardly learns is left out."""
    records = read_records(ROOT / "results/first-command" / folder)
    by = {(r["variant"], r["skill"], r["seed"]): r for r in records}
    first = {r["skill"]: r for r in records if r["variant"] == "before"}
    clusters = [tuple(cluster) for name, *cluster in by if name == "command" and ("plain", *cluster) in by]
    gains = {skill: [mean(by["plain", s, n]["new"]) - mean(first[s]["new"]) for s, n in clusters if s == skill] for skill in first}
    rise = {skill: mean(gained) for skill, gained in gains.items() if gained}
    learned = [skill for skill in rise if rise[skill] >= ABOVE_BEFORE]
    hardly = ", ".join(f"{SKILLS[skill]} ({100 * rise[skill]:+.0f} points)" for skill in rise if skill not in learned)
    pairs = [cluster for cluster in clusters if cluster[0] in learned]
    before = [first[skill] for skill, _ in pairs]
    plain, ours = ([by[(name, *cluster)] for cluster in pairs] for name in ("plain", "command"))
    ends = [100 * mean([mean(record["new"]) for record in records]) for records in (ours, plain)]
    return (
        f"{where.format(', '.join(SKILLS[skill] for skill in learned))}, the command learns {ends[0]:.0f} % "
        f"and plain LoRA {ends[1]:.0f} ({len(pairs)} runs; {moved(ours, plain, 'new')}); "
        f"old abilities move by {moved(ours, before, 'old')} and by {moved(plain, before, 'old')}."
        f"{f' Plain LoRA hardly learns {hardly}: left out.' if hardly else ''}"
    )


CHAINS = {  # by the folder and the variant of the records
    ("first-command", "plain-chain"): "plain LoRA, trained further",
    ("first-command", "rival-chain"): "`--method replay`, with the earlier skills' examples",
    ("first-command", "command-chain"): "the default",
    ("first-command", "thirty-chain"): "the same with a penalty of 30 throughout",
    ("first-command/eight", "fold-16-chain"): "eight examples: `--method fold-16`",
    ("first-command/eight", "fold-64-replay-chain"): "eight examples: `--method fold-64-replay`",
    ("first-command/gemma3/eight", "plain-chain"): "Gemma 3 270M, eight examples: plain LoRA at 2e-4, trained further",
    ("first-command/gemma3/eight", "command-chain"): "Gemma 3 270M, eight examples: the default",
}


def chain_records(folder: str, variant: str) -> list[list[dict[str, Any]]]:
    """The records of each seed's chain."""
    records = [record for record in read_records(ROOT / "results" / folder) if record["variant"] == variant]
    return list(group_by(records, lambda record: record["seed"]).values())


def chain_in_words() -> str:
    """What three skills in a row leave of the first two, by the default and by plain LoRA."""
    ends = []
    for variant in ("plain-chain", "command-chain"):
        chains = chain_records("first-command", variant)
        taught = [mean([mean(chain[-1]["skills"][skill]) for chain in chains]) for skill in chains[0][-1]["skills"]]
        ends.append((", ".join(f"{100 * right:.0f}" for right in taught), seeds_in_words(len(chains))))
    (plain, others), (ours, seeds) = ends
    sizes = [record["stored_bytes"] / 1e6 for record in chains[0]]
    return (
        f"Three skills in a row (`--after`): {ours} % at the end ({seeds}), "
        f"plain LoRA trained further {plain} % ({others}). "
        f"Of the first skill, {first_kept(chains).replace(' ', ' % ', 1)} is kept, "
        f"and the adapter grows from {sizes[0]:.0f} to {sizes[-1]:.0f} MB."
    )


def seeds_in_words(count: int) -> str:
    return "1 seed" if count == 1 else f"{count} seeds"


def first_kept(chains: Sequence[Sequence[dict[str, Any]]]) -> str:
    """How many of a chain's first answers are right at its end, of 100 that were once they were learned, with an interval."""
    skill = chains[0][0]["skill"]
    then, now = ([mine[k]["skills"][skill] for mine in chains] for k in (0, -1))
    was = 100 * mean([mean(answers) for answers in then])
    lost = [{skill: [b - a for a, b in zip(first, last, strict=True)]} for first, last in zip(then, now, strict=True)]
    change = 100 * mean([mean(answers[skill]) for answers in lost])
    share, low, high = (100 * (1 + moved / was) for moved in (change, *interval(lost)))
    return f"{share:.1f} ({low:.1f} to {high:.1f})"


def chain() -> str:
    """What chains of skills on one adapter keep of each, from the records of benchmarks/first_command.py."""
    rows = []
    for (folder, name), words in CHAINS.items():
        chains = chain_records(folder, name)
        steps = [*zip(*chains, strict=True)]
        skills = [step[0]["skill"] for step in steps]
        cells = [
            ", ".join(f"{100 * mean([mean(r['skills'][s]) for r in step]):.0f}" for step in steps if s in step[0]["skills"])
            for s in skills
        ]
        old = [f"{100 * mean([mean([mean(values) for values in r['old'].values()]) for r in step]):.0f}" for step in steps]
        size, minutes = steps[-1][0]["stored_bytes"] / 1e6, sum(r["cpu_seconds"] for step in steps for r in step) / 60 / len(chains)
        kept = first_kept(chains)
        rows.append([words, len(chains), *cells, kept, ", ".join(old), f"{size:.0f}", f"{minutes:.0f}"])
    heads = ["", "seeds", *(f"{SKILLS[skill]}, %" for skill in skills), "first skill kept, %", "old abilities, %", "adapter, MB"]
    heads.append("CPU minutes")
    return tabulate(rows, heads, tablefmt="github", disable_numparse=True, colalign=("left", *["right"] * (len(heads) - 1))) + "\n"


STAGES = {
    "before": "after SFT, before DPO",
    "plain": "DPO, as TRL shows it",
    "lower rate": "the same at a fifth of the rate",
    "old pairs": "the same with 16 old examples and the SFT loss",
    "shared": "DPO, shared adapter protected",
    "fresh block": "DPO, fresh block protected",
}


def second_stage() -> str:
    """What DPO leaves of a skill that SFT taught, from the results of benchmarks/second_stage.py."""
    results = read("second-stage")
    known = set.intersection(*({r["seed"] for r in results[name]} for name in STAGES))
    rows = []
    for name, words in STAGES.items():
        found = [r for r in results[name] if r["seed"] in known]
        tests = [r["scores"] for r in found]
        margins = [a - b for t in tests for a, b in zip(t["chosen"], t["rejected"], strict=True)]
        cards, losses = (mean([mean(t[score]) for t in tests]) for score in ("card", "card_loss"))
        start = {r["seed"]: r["scores"]["card_loss"] for r in results[next(iter(STAGES))]}
        rises = [{"loss": [a - b for a, b in zip(r["scores"]["card_loss"], start[r["seed"]], strict=True)]} for r in found]
        low, high = (end / 100 for end in interval(rises))
        costs = [mean([r[cost] for r in found]) if cost in found[0] else None for cost in ("cpu_seconds", "rho")]
        after = (f"{cost:{form}}" if cost is not None else "" for cost, form in zip(costs, (".0f", ".0e"), strict=True))
        rise = f" ({low:+.3f} to {high:+.3f})" if rows else ""
        rows.append([words, f"{100 * cards:.0f}", f"{losses:.3f}{rise}", f"{mean(margins):.1f}", *after])
    heads = ["", "cards right, %", "loss of cards (rise, 95 %)", "preference, nats", "CPU s", "rho"]
    table = tabulate(rows, heads, tablefmt="github", disable_numparse=True, colalign=("left", *["right"] * 5))
    seeds = seeds_in_words(len(known))
    return f"{table}\n\n{seeds}, 100 test cards and 24 test pairs each; intervals over both.\n"


COMPARED = {  # as PEFT's comparison calls them
    "base": "before",
    "lora-rank32": "LoRA, rank 32",
    "lora-rank32-protected": "the same, protected by cores of its own text",
    "osf-default": "OSF, all linear layers",
    "full-finetuning": "full fine-tuning",
    "lora-rank64-rslora": "rank 64, rsLoRA",
    "lora-rank32-dora": "DoRA",
    "lora-rank32-lorafa": "LoRA-FA",
    "lora-rank32-riemannian": "Riemannian LoRA",
}


def peft_comparison() -> str:
    """What eight configurations learn, lose and cost, from the results of benchmarks/peft_comparison/run.py."""
    found = {name: json.loads((ROOT / f"results/peft-comparison/{name}.json").read_text()) for name in (*COMPARED, "cores")}
    rows, start = [], found["base"]["text_loss"]
    for name, words in COMPARED.items():
        record = found[name]
        row = [words, f"{100 * mean(record['right']):.0f}", f"{mean(record['text_loss']):.3f}"]
        if "cpu_seconds" in record:
            low, high = Paired(start, record["text_loss"]).interval()
            row[-1] = f"{mean(record['text_loss']) - mean(start):+.3f} ({low:+.3f} to {high:+.3f})"
            seconds = record["setup_seconds"] + record["cpu_seconds"]
            row += [f"{seconds / 60:.1f}", f"{record['peak_bytes'] / 1e9:.1f}", f"{record['saved_bytes'] / 1e6:.0f}"]
        rows.append(row)
    heads = ["", "right, %", "rise of loss on news", "CPU minutes", "peak GB", "saved MB"]
    table = tabulate(rows, heads, tablefmt="github", disable_numparse=True, colalign=("left", *["right"] * 5))
    cores = found["cores"]["cpu_seconds"] / 60
    return f"{table}\n\nThe cores took {cores:.1f} more minutes. 100 entries, 40 texts, one seed. Before: its loss.\n"


def full_weights() -> str:
    """What protected full weights cost, from the results of benchmarks/full_weights.py."""
    words = {"plain": "full fine-tuning", "protected": "the same, protected", "osf": "PEFT's OSF (OSFT)"}
    rows = []
    for name, called in words.items():
        found = json.loads((ROOT / f"results/full-weights/{name}.json").read_text())
        step, setup, peak = found["step_seconds"], found["setup_seconds"], found["peak_bytes"] / 1e9
        rows.append([called, f"{step:.1f} s", f"{setup:.1f} s", f"{peak:.1f} GB"])
    heads = ["", "a step", "before the first", "peak"]
    return tabulate(rows, heads, tablefmt="github", disable_numparse=True, colalign=("left", *["right"] * 3)) + "\n"


def read(folder: str) -> dict[str, list[dict[str, Any]]]:
    """Name of a variant -> its results, one for each seed."""
    results: dict[str, list[dict[str, Any]]] = {}
    for file in sorted((ROOT / "results" / folder).glob("*.json")):
        found = json.loads(file.read_text())
        results.setdefault(found["variant"], []).append(found)
    return results


SHORT = {  # the rows of the picture
    "before": "before",
    "plain PEFT": "plain PEFT",
    "replay 5 %": "replay of 5 %",
    "block": "new block, unprotected",
    "snapshot": "averaged (snapshot)",
    "keep old text": "--keep old text",
    "keep self": "--keep self",
    "keep self sensitive-core": "--keep self, sensitive-core",
}


def picture(results: dict[str, list[dict[str, Any]]]) -> Figure:
    """Accuracy on the new task and on the old one, two bars for each way, on white paper: a page may be dark around it."""
    figure = Figure(figsize=(7.2, 4.6), layout="constrained", facecolor="white")
    at = figure.subplots()
    for row, name in enumerate(SHORT):
        values = [mean(scores(results[name], *where)) for where in MEASURED[:2]]
        at.barh((row - 0.2, row + 0.2), values, height=0.36, color=(REFERENCE, COLORS[1]))
        for place, value, word in zip((row - 0.2, row + 0.2), values, ("new", "old"), strict=True):
            at.annotate(f"{word} {value:.0f}", (value, place), xytext=(4, 0), textcoords="offset points", va="center", fontsize=9)
    at.set(yticks=range(len(SHORT)), yticklabels=list(SHORT.values()), xlim=(0, 100), xlabel="accuracy in %")
    at.invert_yaxis()
    at.spines[["top", "right"]].set_visible(False)
    return figure


def draw() -> None:
    """The picture of docs/results.md."""
    (ROOT / "docs/figures/keeping-linear.svg").write_bytes(as_bytes(picture(read("keeping-linear")), ("svg",))["svg"])


REGIONS: dict[str, Callable[[], str]] = {
    "keeping": lambda: tables(read("keeping")),
    "keeping-linear": lambda: tables(read("keeping-linear")),
    "kept": lambda: instead(read("keeping-linear")),
    "price": price,
    "chain": chain,
    "second-stage": second_stage,
    "peft-comparison": peft_comparison,
    "full-weights": full_weights,
}
