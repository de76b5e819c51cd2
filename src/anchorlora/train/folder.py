"""Read skill/ of a directory: facts, counts of rows, probes, scores, and answers before and after to some held-out examples."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from anchorlora.data import Example, TextFiles, TextSource
from anchorlora.data.sample_files import samples_in
from anchorlora.store.json import read_file
from anchorlora.store.predictions import read_predictions
from anchorlora.store.run_folder import SKILL, RunFolder
from anchorlora.store.seal import LARGEST_SEALED
from anchorlora.train.kept import PROBES, ROWS

SCORES, FACTS, BUDGET = "scores.json", "facts.json", "budget.json"
BEGIN_AGAIN = "begin again with another --out"
OF_SKILL = 5  # examples that are shown, and of each kept thing one


def probes_in(folder: Path, name: str) -> TextFiles:
    """Return the probes of something that is kept, as a task that is only tested."""
    path = str(folder / PROBES / f"{name}.jsonl")
    return TextFiles({name: TextSource(path, test=path, reader=partial(samples_in, mixed=True))})


def facts_in(folder: Path) -> dict[str, Any]:
    """Return the facts of `before/`."""
    return read_file(folder / "before" / FACTS, dict[str, Any], remedy=BEGIN_AGAIN)


def rows_in(folder: Path) -> list[dict[str, Any]]:
    """Return how many rows each source of text has, and how many of them have each property."""
    rows = read_file(folder / ROWS, list[dict[str, Any]], remedy=BEGIN_AGAIN, largest=LARGEST_SEALED)
    own = [part["rows"] for part in facts_in(folder)["kept"] if "rows" in part] if (folder / "before").is_dir() else []
    return rows + own


def scores_in(folder: Path, stage: str) -> dict[str, list[dict[str, Any]]]:
    """Return the scores of a stage."""
    return read_file(folder / stage / SCORES, dict[str, list[dict[str, Any]]], remedy=BEGIN_AGAIN, largest=LARGEST_SEALED)


def scores_after(run: Path, name: str) -> dict[str, list[dict[str, Any]]]:
    """Return the scores with the adapter that a run trained: of what is kept, and of the skill as the run tested it."""
    predictions = read_predictions(RunFolder(run).task(1, name).predictions)
    return scores_in(run / SKILL, "after") | {name: [row.model_dump() for row in predictions]}


def add_first(after: str | None, scores: Mapping[str, list[dict[str, Any]]]) -> None:
    """Add to the scores of what the run before kept already, row by row, the metrics that it had at first."""
    if after is None:
        return
    folder = Path(after) / SKILL
    then, names = scores_in(folder, "before"), {part["name"] for part in facts_in(folder)["kept"]}
    for name in scores.keys() & then.keys() & names:
        first = {(row["prompt_sha256"], row["gold"]): row.get("first", row["metrics"]) for row in then[name]}
        for row in scores[name]:
            metrics = first.get((row["prompt_sha256"], row["gold"]), {})
            if metrics.keys() == row["metrics"].keys():
                row["first"] = metrics


def budget_in(folder: Path) -> dict[str, Any] | None:
    """Return the outcome of the budget, or None if there was none."""
    file = folder / BUDGET
    return read_file(file, dict[str, Any], remedy=BEGIN_AGAIN) if file.is_file() else None


@dataclass(frozen=True)
class Answer:
    """One held-out example: what was asked, what the model answered before and after, and the right answer."""

    prompt: str
    before: str
    after: str
    right: str
    scores: tuple[float, float]  # of the two answers by the primary metric, from 0 to 1


@dataclass(frozen=True)
class Answers:
    """Answers to the examples of the skill, or of something that is kept."""

    name: str
    shown: tuple[Answer, ...]  # of the skill the first examples; of what is kept the first one whose answer changed, if one did
    examples: int  # of which answers were generated
    changed: int  # of them, whose answer is another now


def answers_of(out: Path, verdict: Mapping[str, Any]) -> list[Answers]:
    """Return answers of a skill and of each kept thing of its verdict; plain text has none."""
    folder = out / SKILL
    then, now = scores_in(folder, "before"), scores_after(out, verdict["name"])
    answers = []
    for part, stage in ((verdict, "after"), *((kept, "before") for kept in verdict["kept"])):
        name = part["name"]
        pairs = list(zip(then[name], now[name], strict=True))
        changed = [i for i, (before, after) in enumerate(pairs) if before["text"].strip() != after["text"].strip()]
        first = next(iter(changed), 0)
        start, stop = (0, OF_SKILL) if part is verdict else (first, first + 1)
        examples = list(probes_in(folder / stage, name).examples(name, "test", limit=stop))
        rows = list(zip(examples, pairs, strict=False))[start:]
        shown = [_answer(example, *pair) for example, pair in rows if example.is_answer]
        if shown:
            answers.append(Answers(part.get("title") or name, tuple(shown), len(pairs), len(changed)))
    return answers


def _answer(example: Example, before: Mapping[str, Any], after: Mapping[str, Any]) -> Answer:
    scores = tuple(next(iter(row["metrics"].values())) for row in (before, after))
    return Answer(_prompt(example), before["text"], after["text"], before["gold"], scores)


def _prompt(example: Example) -> str:
    """The prompt of an example: one message by its words alone, and several with their roles."""
    if not example.messages:
        return example.sentence or "(the chat begins)"
    if len(example.messages) == 1:
        return str(example.messages[0].get("content") or "")
    return "\n".join(f"{message['role']}: {message.get('content') or ''}" for message in example.messages)
