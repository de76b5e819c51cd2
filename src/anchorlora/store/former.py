"""Records of schemas 1 and 2 in the words of schema 3.

Until schema 2 a record said what its method was by the Python that makes it alone: "Shared() + ProjectGradient('A') + Freeze('B')".
Here its facts are read from the syntax tree, by the names that parts had then.
"""

from __future__ import annotations

import ast
from typing import Any

FORMER = {"backbone": "base_model", "illegal": "invalid", "sites": "layers", "quantised": "quantized"}  # names in schema 1


def upgraded(content: Any) -> Any:
    """Return the content of a record of schema 1 or 2 in the words of schema 3; anything else as it is."""
    if not isinstance(content, dict) or content.get("schema") not in (1, 2):
        return content
    if content["schema"] == 1:
        content = {FORMER.get(name, name): value for name, value in content.items()}
        if isinstance(protocol := content.get("protocol"), dict):
            content["protocol"] = {FORMER.get(name, name): value for name, value in protocol.items()}
            settings = content["protocol"].get("base_model")
            if isinstance(settings, dict):
                content["protocol"]["base_model"] = {FORMER.get(name, name): value for name, value in settings.items()}
    content = content | {"schema": 3}
    if isinstance(content.get("method"), str) and isinstance(content.get("definition"), str):
        definition = content.pop("definition")
        content["method"] = method_facts(content["method"], definition)
    return content


def method_facts(name: str, definition: str) -> dict[str, Any]:
    """Return what a record of schema 3 says of a method, from its definition."""
    terms = _terms(definition)
    plan, *others = [_kind(term) for term in terms] or [""]
    family = "shared" if plan == "Shared" else "cumulative"
    return {
        "name": name,
        "parts": [ast.unparse(term) for term in terms] or [definition],
        "family": family,
        "preserves": _preserves(plan, [term for term in terms[1:] if isinstance(term, ast.Call)]),
        "rehearses": "Rehearsal" in others,
        "grows": family == "cumulative" and plan != "FoldedPerTask",
    }


def _terms(definition: str) -> list[ast.expr]:
    """The terms of a sum, in order; none where it is no Python."""
    try:
        node = ast.parse(definition.strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return []
    terms: list[ast.expr] = []
    while isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        terms.append(node.right)
        node = node.left
    return [node, *reversed(terms)]


def _kind(term: ast.expr) -> str:
    """The class that a term calls, or ""."""
    return term.func.id if isinstance(term, ast.Call) and isinstance(term.func, ast.Name) else ""


def _preserves(plan: str, constraints: list[ast.Call]) -> list[str]:
    """The promises of methods of that time: see `anchorlora.methods.Preserves`."""
    closed = {name for call in constraints for name in _closes(call)}
    displacement, delta_b = "displacement" in closed, "delta_b" in closed
    state = plan.endswith("PerTask") and displacement and "start" in closed
    alone = plan in ("Shared", "PerTask", "FoldedPerTask")  # a layer changes only by what the current block adds
    closes = {
        "displacement": displacement,
        "state": state,
        "delta_b": delta_b,
        "response": alone and (state or (displacement and (delta_b or "delta_b_term" in closed))),
        "singular": alone and "singular" in closed,
    }
    return [name for name, kept in closes.items() if kept]


CLOSES = {
    ("ProjectDisplacement", "A"): ("displacement",),
    ("Freeze", "A"): ("displacement",),
    ("Freeze", "B"): ("delta_b",),
    ("Retract", "A"): ("start",),
    ("RankSplit", None): ("delta_b_term",),
    ("ProjectSingular", None): ("singular",),
}


def _closes(call: ast.Call) -> tuple[str, ...]:
    """The conditions that a constraint closed, unless it began after the second task."""
    settings = {part.arg: part.value.value for part in call.keywords if isinstance(part.value, ast.Constant)}
    first = settings.get("first_task", 2)
    if not isinstance(first, int) or first > 2:
        return ()
    factor = next((part.value for part in call.args if isinstance(part, ast.Constant) and isinstance(part.value, str)), None)
    return CLOSES.get((_kind(call), factor), ())
