"""Equations, tables, figures and sections are cited by the numbers that the paper itself prints: counted once, listed here.

A citation anywhere in the sources or documents must be in the list, with the number that the list has for what it cites.
"""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]

# equation -> what it says
EQUATIONS = {
    3: "X = U S V^T, the feature rows",
    4: "the core V and its projector P",
    6: "the bilinear expansion of an effective change",
    7: "the response R = dW V",
    8: "D_old, D_eff and rho",
    9: "the companion path s dB A_0 V",
    10: "gradient projection",
    11: "B is frozen",
    12: "weight residual projection",
    14: "the penalty of O-LoRA",
    16: "retraction of a fresh block",
    17: "gradient projection of the current block",
    32: "the response on the wide basis",
    33: "bilinear stabilization regularization",
    35: "AA and LA",
    36: "BWT",
    37: "FM",
    38: "an effective change since the anchor",
    39: "D_eff and D_old of all layers",
    40: "D_new",
    41: "rho",
}
CITED = {
    "src/anchorlora/constraints/displacement.py": {"eq. 12"},
    "src/anchorlora/constraints/effective.py": {"eq. 32", "eq. 33"},
    "src/anchorlora/constraints/freeze.py": {"eq. 11"},
    "src/anchorlora/constraints/gradient.py": {"eq. 10", "eq. 17"},
    "src/anchorlora/constraints/overlap.py": {"eq. 14"},
    "src/anchorlora/constraints/retract.py": {"eq. 16"},
    "src/anchorlora/measurement/drift.py": {"eq. 38", "eq. 39", "eq. 40", "eq. 41"},
    "src/anchorlora/recipes/protocol.py": {"appendix B", "table 3"},  # protocol; orders
    "src/anchorlora_lab/grid/selection.py": {"appendix B.2"},  # method and evaluation protocol
    "src/anchorlora_lab/grid/plan.py": {"fig. 2"},  # microscopic dynamics
    "src/anchorlora/config.py": {"eq. 3", "eq. 4"},
    "src/anchorlora/features/store.py": {"appendix B.2", "eq. 3", "eq. 4"},
    "src/anchorlora/geometry/low_rank.py": {"eq. 6"},
    "src/anchorlora/geometry/spectrum.py": {"eq. 3", "eq. 4"},
    "src/anchorlora/scores.py": {"eq. 35", "eq. 36", "eq. 37"},
    "docs/protocol.md": {"eq. 35", "eq. 36", "eq. 37"},
    "docs/rule.md": {f"eq. {n}" for n in (3, 4, 6, 7, 8, 9, 10, 11, 12, 16, 17, 39, 40)},
    "tests/constraints/test_every_optimizer.py": {"appendix A.3"},  # a diagonal preconditioner leaves the subspace
}
NUMBERS = r"(\d+(?:(?:, | and | to |-)\d+)*)"


def cited(path: Path) -> set[str]:
    text = path.read_text(encoding="utf-8")
    runs = [numbers for _, numbers in re.findall(rf"(?i)\b(eqs?\.|equations?) {NUMBERS}", text)]
    if path.name == "rule.md":
        runs += [number for row in text.splitlines() if row.startswith("|") for number in re.findall(rf"\({NUMBERS}\)", row)]
    places = re.findall(r"(?i)\b(table|fig\.|section|appendix) ((?-i:[A-D])(?:\.\d+)?|\d+(?:\.\d+)*)\b", text)
    return {f"eq. {n}" for run in runs for n in every(run)} | {f"{kind.lower()} {where}" for kind, where in places}


def every(run: str) -> list[int]:
    """ "38 to 41", "38-41" and "32, 33 and 35" as numbers."""
    out: list[int] = []
    for link, number in re.findall(r"(, | and | to |-|^)(\d+)", run):
        out += range(out[-1] + 1, int(number) + 1) if link in (" to ", "-") else [int(number)]
    return out


def test_what_is_cited_of_the_paper_has_the_papers_number():
    sources = [*ROOT.glob("src/**/*.py"), *ROOT.glob("tests/**/*.py"), *ROOT.glob("docs/**/*.md"), ROOT / "README.md"]
    found = {str(path.relative_to(ROOT)): here for path in sources if path != Path(__file__) and (here := cited(path))}
    assert found == CITED
    assert {n for here in CITED.values() for n in here if n.startswith("eq.")} == {f"eq. {n}" for n in EQUATIONS}
