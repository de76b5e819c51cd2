"""Every message on the troubleshooting page is one that the source still says."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/troubleshooting.md").read_text()
MESSAGES = re.findall(r"^```text\n(.*?)\n```$", PAGE, flags=re.S | re.M)
HOLE = "\0"


def text(node):
    """The text of a string as far as it is fixed, a hole for what is filled in."""
    match node:
        case ast.Constant(value=str(words)):
            return words
        case ast.JoinedStr(values=parts):
            return "".join(map(text, parts))
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            return text(left) + text(right)
    return HOLE


@pytest.fixture(scope="module")
def source():
    """All strings of the source, f-strings and sums of strings as one."""
    return {text(node) for file in (ROOT / "src").rglob("*.py") for node in ast.walk(ast.parse(file.read_text()))}


@pytest.mark.parametrize("message", MESSAGES)
def test_the_source_says_the_words_between_the_placeholders(message, source):
    parts = [part.strip(" ;:,()") for part in re.split(r"<[^<>]*>", message)]
    parts = [part for part in parts if len(part.split()) > 1]
    assert parts, "nothing but placeholders"
    assert [part for part in parts if not any(part in said for said in source)] == []


def test_every_message_is_on_the_page_once_and_has_an_answer():
    assert len(set(MESSAGES)) == len(MESSAGES) > 30
    after = re.split(r"^```text\n.*?\n```$", PAGE, flags=re.S | re.M)[1:]
    assert [message for message, words in zip(MESSAGES, after, strict=True) if len(words.split()) < 4] == []
