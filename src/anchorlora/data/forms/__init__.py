"""The forms of rows that `train`, `run`, `cores` and `eval` read.

A new form is a row of `known.py`, or a file of this package with its `FORMS`, and a test. From outside: `FORMS.append(Form(..))`.
"""

from __future__ import annotations

from importlib import import_module
from pkgutil import iter_modules

from anchorlora.data.forms.base import Form, Row
from anchorlora.errors import InvalidValue

FORMS: list[Form] = [
    form for module in iter_modules(__path__) for form in getattr(import_module(f"{__name__}.{module.name}"), "FORMS", ())
]


def form_of(row: Row) -> Form:
    """Return the form of a row: the one that reads most of its columns."""
    fitting = [form for form in FORMS if form.fits(row.columns)]
    for form in fitting:
        refuse_form(row, form)
    if not fitting:
        filled = {name for name in known_columns() if row.columns.get(name) is not None}
        for form in FORMS:
            if form.read and row.columns.keys() >= {*form.columns} and filled <= form.known:
                row.value(next(name for name in form.columns if row.columns[name] is None), object)
        names = "question=MINE,answer=MINE"
        if "instruction" in row.columns and len(row.columns) > 2:  # as in Dolly, whose `context` belongs to the question
            names = "instruction=instruction,input=MINE,output=MINE"
        remedy = f"name yours with --columns {names}, or prompt=MINE,completion=MINE as they stand"
        raise InvalidValue(f"{row.place}: no known column ({known_forms()}); it has: {list_columns(row)}; {remedy}")
    there = {name for name, value in row.columns.items() if value is not None}
    most = max(len(there & form.known) for form in fitting)
    best = [form for form in fitting if len(there & form.known) == most]
    if len(best) > 1:
        both = " or ".join(",".join(form.columns) for form in best)
        raise InvalidValue(f"{row.place}: ambiguous columns, {both} are possible; name one of them with --columns")
    return best[0]


def refuse_form(row: Row, form: Form) -> None:
    """Refuse a row of a form that cannot be learned."""
    if form.refuses:
        raise InvalidValue(f"{row.place}: {' and '.join(form.columns)} {form.refuses}")


def known_columns() -> frozenset[str]:
    """Return every column that some form reads."""
    return frozenset(name for form in FORMS if form.read for name in form.known)


def known_forms() -> str:
    """Return the columns of all forms that can be learned, in words."""
    return "; ".join(" and ".join(form.columns) for form in FORMS if form.read)


def list_columns(row: Row) -> str:
    """Return the columns of a row that hold something, for messages."""
    return ", ".join(f"{name!s:.40}" for name, value in list(row.columns.items())[:12] if value is not None) or "none"
