"""MMLU from a folder as its authors published it, checked row by row, and lm-evaluation-harness's prompt for a row.

    dev/<subject>_dev.csv    test/<subject>_test.csv        no header: question, A, B, C, D, answer letter; 57 subjects

`task_config` and `GROUP` match lm_eval's own `tasks/mmlu/default` (wording, description, choices, metric, groups weighted by
size), so scores compare with those of `lm_eval --tasks mmlu`, which reads the same rows from the hub. Needs neither lm_eval nor
torch.
"""

from __future__ import annotations

import csv
import hashlib
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from anchorlora.errors import InvalidValue
from anchorlora.paths import nearest
from anchorlora.store.seal import sha256

NAME = "mmlu"
LETTERS = ("A", "B", "C", "D")
SPLITS = ("dev", "test")
SUBJECTS = """
    abstract_algebra anatomy astronomy business_ethics clinical_knowledge college_biology college_chemistry
    college_computer_science college_mathematics college_medicine college_physics computer_security conceptual_physics econometrics
    electrical_engineering elementary_mathematics formal_logic global_facts high_school_biology high_school_chemistry
    high_school_computer_science high_school_european_history high_school_geography high_school_government_and_politics
    high_school_macroeconomics high_school_mathematics high_school_microeconomics high_school_physics high_school_psychology
    high_school_statistics high_school_us_history high_school_world_history human_aging human_sexuality international_law
    jurisprudence logical_fallacies machine_learning management marketing medical_genetics miscellaneous moral_disputes
    moral_scenarios nutrition philosophy prehistory professional_accounting professional_law professional_medicine
    professional_psychology public_relations security_studies sociology us_foreign_policy virology world_religions
""".split()  # noqa: SIM905  # a list of 57 strings would be longer than the module
QUESTION = "{{question.strip()}}\n" + "".join(f"{x}. {{{{choices[{i}]}}}}\n" for i, x in enumerate(LETTERS)) + "Answer:"
GROUP = {
    "group": NAME,
    "task": [f"{NAME}_{subject}" for subject in SUBJECTS],
    "aggregate_metric_list": [{"metric": "acc", "weight_by_size": True}],
    "metadata": {"version": 2},
}


@dataclass(frozen=True)
class Mmlu:
    """The rows of an MMLU folder."""

    rows: Mapping[str, Mapping[str, list[dict[str, Any]]]]
    sha256: str  # hash of all files


def read_mmlu(folder: Path) -> Mmlu:
    """Read all rows of all subjects."""
    if not folder.is_dir():
        raise InvalidValue(f"{folder} is not a folder; give the MMLU folder that holds dev and test{nearest(folder)}")
    files = {(split, subject): folder / split / f"{subject}_{split}.csv" for split in SPLITS for subject in SUBJECTS}
    missing = [str(path.relative_to(folder)) for path in files.values() if not path.is_file()]
    if missing:
        named = ", ".join(missing[:3]) + (f" and {len(missing) - 3} more" if len(missing) > 3 else "")
        raise InvalidValue(f"{folder} is not all of MMLU, {len(missing)} of {len(files)} files are missing: {named}")
    total = hashlib.sha256()
    rows: dict[str, dict[str, list[dict[str, Any]]]] = {split: {} for split in SPLITS}
    for (split, subject), path in files.items():
        total.update(f"{split}/{path.name} {sha256(path)}\n".encode())
        rows[split][subject] = list(_rows(path))
        if not rows[split][subject]:
            raise InvalidValue(f"{path} holds no question")
    return Mmlu(rows, total.hexdigest())


def task_config(subject: str) -> dict[str, Any]:
    """Return the content of lm_eval's `_default_template_yaml` and `mmlu_<subject>.yaml`, without the source of the data."""
    return {
        "task": f"{NAME}_{subject}",
        "task_alias": subject,
        "test_split": "test",
        "fewshot_split": "dev",
        "fewshot_config": {"sampler": "first_n"},
        "output_type": "multiple_choice",
        "description": f"The following are multiple choice questions (with answers) about {subject.replace('_', ' ')}.\n\n",
        "doc_to_text": QUESTION,
        "doc_to_choice": list(LETTERS),
        "doc_to_target": "answer",
        "metric_list": [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}],
        "metadata": {"version": 1.0},
    }


def go_offline() -> None:
    """Tell the hub's libraries not to use the network; call before they are imported.  What the user has set stays."""
    for switch in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "TRANSFORMERS_OFFLINE"):
        os.environ.setdefault(switch, "1")


def _rows(path: Path) -> Iterator[dict[str, Any]]:
    line = 1
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            reader = csv.reader(file, strict=True)
            for columns in reader:
                yield _row(columns, f"{path}, line {line}")
                line = reader.line_num + 1  # a question may hold line breaks
    except (UnicodeDecodeError, csv.Error) as error:
        raise InvalidValue(f"{path}, line {line}: not readable as CSV in UTF-8: {error}") from None


def _row(columns: list[str], where: str) -> dict[str, Any]:
    if len(columns) != 6:
        raise InvalidValue(f"{where}: {len(columns)} columns, expected 6: question, A, B, C, D, answer letter")
    question, *choices, answer = columns
    if answer not in LETTERS:
        raise InvalidValue(f"{where}: the answer is {answer!r:.40}, expected A, B, C or D")
    return {"question": question, "choices": choices, "answer": LETTERS.index(answer)}
