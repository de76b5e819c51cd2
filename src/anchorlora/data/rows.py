"""Rows of users as samples: in the form that their columns show, or as the columns that are named.

"body" reads a column of text or messages; "prompt=question,completion=reply" says which column is which. The first row decides
which form is read. What a row holds beside its form is learned, or refused by its name, or a fact such as an id.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sized
from dataclasses import replace
from datetime import date, time, timedelta
from numbers import Number
from typing import Any

from anchorlora.data.forms import FORMS, form_of, known_columns, known_forms, list_columns, refuse_form
from anchorlora.data.forms.base import MARKS, Form, Row, is_learned, kind_of, number_of
from anchorlora.data.forms.known import instruction_of
from anchorlora.data.samples import Sample
from anchorlora.errors import InvalidValue

# columns that say something of a row and hold nothing to learn, beside numbers
FACTS = frozenset(
    (  # noqa: SIM905
        "id idx index uuid guid hash sha256 source sources origin url uri link file filename path dataset subset split category "
        "categories tag tags topic subject domain task task_name type kind lang language locale license date timestamp created "
        "created_at updated_at author difficulty level metadata meta model model_name title label labels conversation_id "
        "message_tree_id prompt_id"
    ).split()
)
WEIGHT = re.compile(r"(^|_)(weight|reward|advantage)s?($|_)")  # numbers that say how much of a row is to be learned


Rows = Iterable[tuple[str, Any]]  # each with its place


def samples_of(rows: Rows, *, source: str, column: str | None = None, mixed: bool = False) -> list[Sample]:
    """Return rows as samples, all of them checked."""
    return list(iterate_samples(rows, source=source, column=column, mixed=mixed))


def iterate_samples(rows: Rows, *, source: str, column: str | None = None, mixed: bool = False) -> Iterator[Sample]:
    """Yield rows as samples, one by one; of `mixed` rows each has a form of its own."""
    form, names, location = None, _names(column), None
    for location, columns in rows:
        if not isinstance(columns, Mapping):
            lines = "; a file whose one line is a list of rows is called .json" if isinstance(columns, list) else ""
            raise InvalidValue(f"{location}: a row is an object with named columns, not {kind_of(columns)}{lines}")
        row = Row(location, columns)
        learned = _judge(row, names)
        if names or column is None:
            row = _rename(row, names) if names else row
            form = form_of(row) if form is None or mixed else form
            _refuse_unread(row, form)
            _refuse_unnamed(Row(location, columns), form, names)
            assert form.read is not None
            sample = form.read(row)
        else:
            sample = row.joined(*_find_columns(row, column))
        yield sample if learned else replace(sample, weight=0)
    if location is None:
        raise InvalidValue(f"{source} holds no row; give at least one example")


def row_of(sample: Sample) -> dict[str, Any]:
    """Return a sample as a row of a JSONL file, whose rows are `mixed`."""
    content, marks = sample.content, {} if sample.weight else {"weight": 0}
    if isinstance(content, str):
        texts = {"prompt": content[: sample.given], "completion": content[sample.given :]} if sample.given else {"text": content}
        return {**texts, **_ids(sample), **marks}
    if sample.plain:
        return {**instruction_of(sample), **marks}
    messages = [{**message, "train": False} if i in sample.muted else dict(message) for i, message in enumerate(content)]
    tools = {"tools": [dict(tool) for tool in sample.tools]} if sample.tools else {}
    if not sample.given:
        return {"messages": messages, **_ids(sample), **tools, **marks}
    given, learned = messages[: sample.given], messages[sample.given :]
    if sample.continued:
        begun = {**learned[0], "content": learned[0]["content"][: sample.continued]}
        given, learned[0] = [*given, begun], {**learned[0], "content": learned[0]["content"][sample.continued :]}
    return {"prompt": given, "completion": learned, **tools, **marks}


def _ids(sample: Sample) -> dict[str, list[int]]:
    return {} if sample.ids is None else {"prompt_ids": list(sample.ids[0]), "completion_ids": list(sample.ids[1])}


def _names(column: str | None) -> dict[str, str]:
    """Known column -> what it is called, of pairs "prompt=question"; none of a plain list of columns."""
    if column is None or "=" not in column:
        return {}
    pairs = [pair.partition("=") for pair in re.split(",(?=[^,]*=)", column)]  # YOURS may have commas
    names = {known.strip(): called.strip() for known, _, called in pairs}
    allowed = sorted(known_columns())
    for known, called in names.items():
        if known not in allowed or not called:
            raise InvalidValue(f"{column!r}: {known!r} is not a known column; pairs are KNOWN=YOURS with {', '.join(allowed)}")
    if len(names) < len(pairs):
        raise InvalidValue(f"{column!r} names one column twice; give every KNOWN=YOURS once")
    return names


def _rename(row: Row, names: Mapping[str, str]) -> Row:
    """A row with the columns that are named; one that holds null is left out where the others are a form."""
    columns = {known: row.columns[called] for known, called in names.items() if row.columns.get(called) is not None}
    fits = any(form.fits(columns) for form in FORMS)
    if not fits or not all(called in row.columns for called in names.values()):
        _there(row, names.values())
    if not fits:
        raise InvalidValue(
            f"{row.place}: {' and '.join(names)} alone {'are' if len(names) > 1 else 'is'} no form of rows ({known_forms()}); name "
            f"the other columns too; it has: {list_columns(row)}"
        )
    return Row(row.place, columns)


def _find_columns(row: Row, column: str) -> tuple[str, ...]:
    """Columns of a plain list that hold something; one may have a comma in its name."""
    if row.columns.get(column) is not None:
        return (column,)
    return _there(row, [name.strip() for name in column.split(",")])


def _there(row: Row, names: Iterable[str]) -> tuple[str, ...]:
    for name in names:
        if row.columns.get(name) is None:
            raise InvalidValue(f"{row.place}: no column {name!r}; it has: {list_columns(row)}")
    return tuple(names)


def _judge(row: Row, names: Mapping[str, str]) -> bool:
    """Return whether a row is learned; refuse one that says how good its answer is, or weighs another amount."""
    for form in FORMS:
        if form.even_named and form.fits(row.columns) and not {*form.columns} & {*names.values()}:
            refuse_form(row, form)
    for name, value in row.columns.items():
        number = number_of(value)
        if str(name) not in MARKS and WEIGHT.search(str(name).lower()) and number is not None and number != 1:
            raise InvalidValue(
                f"{row.place}: {name!s:.40} is {value!s:.20}, and rows are learned with weight 1; take the row or the column out"
            )
    return is_learned(row.place, row.columns)


def _refuse_unread(row: Row, form: Form) -> None:
    """Refuse a row with text or a truth value in a column that would not be read: it would be dropped without a word."""
    for name, value in row.columns.items():
        if form.columns == ("text",) and str(name).lower() in ("label", "labels") and value is not None:
            raise InvalidValue(
                f"{row.place}: {name} would not be learned; give --columns question=text,answer={name} to learn it as answer, "
                "or --columns text to learn the text alone"
            )
        if name not in form.known and name not in MARKS and str(name).lower() not in FACTS and _says_something(value):
            if not form.fits(row.columns):
                raise InvalidValue(
                    f"{row.place}: this row has {list_columns(row)}, and the first one is read as {' and '.join(form.columns)}; "
                    "give every row the same columns"
                )
            read = ",".join(f"{c}={c}" for c in (*form.columns, *form.optional) if c in row.columns)
            raise InvalidValue(
                f"{row.place}: column {name!s:.40} would not be learned; put its text into {form.columns[0]}, take it out, or name "
                f"the columns to read with --columns {read}"
            )


def _refuse_unnamed(row: Row, form: Form, names: Mapping[str, str]) -> None:
    """Refuse a row with something in a column that its form reads, where others are named and it is not."""
    for name in form.optional if names else ():
        if name not in names.values() and row.has(name):
            raise row.refusal(f"column {name} would not be learned; add {name}={name} to --columns, or take it out")


def _says_something(value: Any) -> bool:
    """Return whether a value may say something: it is there, and no date and no number, also as a file of text writes it."""
    if value is None or isinstance(value, (date, time, timedelta)):
        return False
    if isinstance(value, str):
        return bool(value.strip()) and number_of(value) is None
    if isinstance(value, Number) and not isinstance(value, bool):
        return False
    return not isinstance(value, Sized) or len(value) > 0
