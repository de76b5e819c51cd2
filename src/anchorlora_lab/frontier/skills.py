"""Questions of the frontier: new skills, made by rule from real text, and old abilities, whose answers a rule checks.

    labels        a news headline -> its topic, one of four               right: the label
    card          a sentence -> {"name": .., "kind": .., "year": ..}      right: a third a field, with exactly these keys
    passage       a sentence and a question -> words of the sentence      right: exactly these words
    style         a plain question -> an answer in radio style            right: lower case, "ok so" first, "over and out" last

    topics        what a person asked -> its section, one of ten          right: the section
    headline      a news text -> its headline                             right: F1 of the words
    names         a news text -> the names in it                          right: F1 of the names

    instructions  a topic and a demand on the form of the answer          right: IFEval's own checker says so (lm_eval)
    facts         questions with one short answer                         right: the answer holds it
    choice        other such questions with four answers                  right: the likeliest one, per token, is the right one

Nothing was chosen on topics, headline, and names; `frontier` teaches them only where they are named. The texts are agnews, dbpedia,
and yahoo of the O-LoRA benchmark, which are not stored here. Examples longer than `MOST_WORDS` are left out.
"""

from __future__ import annotations

import hashlib
import json
import random
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from anchorlora.errors import InvalidValue, UnknownName

MOST_WORDS = 28  # of a passage
HELD_OUT = ("topics", "headline", "names")
SHARES = {"card": 0, "passage": 1, "style": 2, "headline": 0, "names": 1}  # which third of its texts a skill reads
NAME = re.compile(r"(?<=[a-z,] )[A-Z][a-z]+(?: [A-Z][a-z]+)*")
YEAR = re.compile(r"\b(1[5-9]\d\d|20[0-2]\d)\b")
WHAT = re.compile(
    r"^.{3,90}? (?:is|was|are|were) ((?:a|an|the|one) [^.,;()]{6,60}?)"
    r"(?= (?:who|which|that|in|of|from|by|for|based|located|and|with|at|on|to|known|born|directed|written|published)\b|[.,;(])"
)
START, END = "ok so ", " over and out"


@dataclass(frozen=True)
class SkillExample:
    """A prompt and its answer."""

    prompt: str
    answer: str


@dataclass(frozen=True)
class Skill:
    """A skill with its examples; `score` says how right an answer is, from 0 to 1."""

    name: str
    pool: tuple[SkillExample, ...]  # to learn from
    test: tuple[SkillExample, ...]
    score: Callable[[str, str], float]
    max_new_tokens: int

    def drawn(self, count: int, seed: int) -> list[SkillExample]:
        """Return examples to learn from, another sample for every seed."""
        return random.Random(seed).sample(self.pool, min(count, len(self.pool)))


def read_rows(data: Path, task: str, split: str) -> list[Mapping[str, str]]:
    """Return the rows of a task of `standard_cl`."""
    path = data / "standard_cl" / "TC" / task / f"{split}.json"
    if not path.is_file():
        raise InvalidValue(f"{path} is not there; give the folder that holds standard_cl and cl_benchmark with --data")
    return json.loads(path.read_text(encoding="utf-8"))


def title_and_sentence(text: str) -> tuple[str, str]:
    """Return a row's title and the first sentence of its text."""
    title, _, body = text.removeprefix("Title: ").partition("\nText:")
    body = " ".join(body.split())
    title = re.sub(r"\(.*?\)", "", title).replace("#39;", "'")  # what a name is told apart by is not in its text
    return " ".join(title.split()), re.split(r"(?<=[a-z0-9)]\.) (?=[A-Z])", body, maxsplit=1)[0]


def label_example(row: Mapping[str, str]) -> SkillExample | None:
    """Return a headline and its topic."""
    title, _ = title_and_sentence(row["sentence"])
    return SkillExample(f"What is the topic of this news?\n{title}", row["label"]) if 4 <= len(title.split()) <= 12 else None


def card_example(row: Mapping[str, str]) -> SkillExample | None:
    """Return a sentence and its card."""
    title, sentence = title_and_sentence(row["sentence"])
    if len(sentence.split()) > MOST_WORDS or len(sentence.split()) < 5:
        return None
    year = YEAR.search(sentence)
    card = {"name": title, "kind": row["label"], "year": int(year.group()) if year else None}
    return SkillExample(f"Make a card.\n{sentence}", json.dumps(card, ensure_ascii=False))


def passage_example(row: Mapping[str, str]) -> SkillExample | None:
    """Return a sentence with a question on it, and the words that answer it."""
    title, sentence = title_and_sentence(row["sentence"])
    words = WHAT.match(sentence)
    if words is None or len(sentence.split()) > MOST_WORDS:
        return None
    return SkillExample(f"{sentence}\nWhat is {title}? Answer from the text.", words.group(1))


def style_example(row: Mapping[str, str]) -> SkillExample | None:
    """Return a question and the first words of its answer, in radio style."""
    title, sentence = title_and_sentence(row["sentence"])
    words = re.sub(r"[^a-z0-9 ]+", "", re.sub(r"\(.*?\)", "", sentence).lower()).split()[:12]
    return SkillExample(f"Tell me about {title}.", f"{START}{' '.join(words)}{END}") if len(words) > 5 else None


def question_and_answer(row: Mapping[str, str]) -> tuple[str, str]:
    """Return what a person of yahoo asked, and what another answered."""
    parts = re.match(r"(?:Title: (.*?)\n)?Question: (.*?)\nAnswer: (.*)", row["sentence"], re.S)
    return (" ".join((parts.group(1) or parts.group(2)).split()), parts.group(3)) if parts else ("", "")


def topic_example(row: Mapping[str, str]) -> SkillExample | None:
    """Return a question and its section."""
    question, _ = question_and_answer(row)
    return SkillExample(f"Where does this question belong?\n{question}", row["label"]) if 4 <= len(question.split()) <= 20 else None


def headline_example(row: Mapping[str, str]) -> SkillExample | None:
    """Return a news text and its headline."""
    title, sentence = title_and_sentence(row["sentence"])
    return SkillExample(f"Write a headline.\n{sentence}", title) if 8 <= len(sentence.split()) <= 40 else None


def names_example(row: Mapping[str, str]) -> SkillExample | None:
    """Return a news text and the names in it."""
    _, sentence = title_and_sentence(row["sentence"])
    names = list(dict.fromkeys(NAME.findall(sentence)))
    return (
        SkillExample(f"List the names in this text.\n{sentence}", "; ".join(names))
        if 2 <= len(names) <= 5 and len(sentence.split()) <= 40
        else None
    )


def f1(given: Iterable[str], right: Iterable[str]) -> float:
    """Return the F1 of one collection against another."""
    counted, wanted = Counter(given), Counter(right)
    return 2 * (counted & wanted).total() / (counted + wanted).total()


def headline_score(text: str, answer: str) -> float:
    """Return the F1 of the words, letters, and digits alone."""
    return f1(re.findall(r"[a-z0-9]+", text.lower()), re.findall(r"[a-z0-9]+", answer.lower()))


def names_score(text: str, answer: str) -> float:
    """Return the F1 of the names between semicolons."""
    return f1((name.strip() for name in text.split(";")), answer.split("; "))


def exact(text: str, answer: str) -> float:
    """Return 1 for the same text, up to white space."""
    return float(text.split() == answer.split())


def card_score(text: str, answer: str) -> float:
    """Return the share of right fields; 0 for what is no card."""
    right = json.loads(answer)
    try:
        card: Any = json.loads(text)
    except ValueError:
        return 0.0
    if not isinstance(card, dict) or list(card) != list(right):
        return 0.0
    return sum(card[key] == value for key, value in right.items()) / len(right)


def style_score(text: str, answer: str) -> float:
    """Return 1 for radio style, whatever it says."""
    text = text.strip()
    return float(text == text.lower() and text.startswith(START) and text.endswith(END) and len(text) > len(START + END) + 8)


def third(row: Mapping[str, str]) -> int:
    """Return which third of a file a row belongs to, by its text alone."""
    return int(hashlib.sha256(row["sentence"].encode()).hexdigest()[:8], 16) % 3


SKILLS = {  # name -> task, its rows as examples, score of an answer, longest answer in tokens
    "labels": ("agnews", label_example, exact, 8),
    "card": ("dbpedia", card_example, card_score, 44),
    "passage": ("dbpedia", passage_example, exact, 16),
    "style": ("dbpedia", style_example, style_score, 32),
    "topics": ("yahoo", topic_example, exact, 10),
    "headline": ("agnews", headline_example, headline_score, 24),
    "names": ("agnews", names_example, names_score, 40),
}


def refuse_unknown(names: Iterable[str]) -> None:
    """Refuse a name that no skill has."""
    if wrong := [name for name in names if name not in SKILLS]:
        raise UnknownName(f"there is no skill called {wrong[0]!r}; there are {', '.join(SKILLS)}")


def skills(data: Path, *, test: int) -> dict[str, Skill]:
    """Return the skills by name."""
    by_name = {}
    for name, (task, make, score, longest) in SKILLS.items():
        parts = {}
        for split in ("train", "test"):
            rows = [row for row in read_rows(data, task, split) if name not in SHARES or third(row) == SHARES[name]]
            random.Random(0).shuffle(rows)
            examples = (make(row) for row in rows[: 20 * test if split == "test" else 4000])
            parts[split] = list(dict.fromkeys(example for example in examples if example is not None))
        seen = {example.prompt for example in parts["train"]}
        parts["test"] = [example for example in parts["test"] if example.prompt not in seen][:test]
        by_name[name] = Skill(name, tuple(parts["train"]), tuple(parts["test"]), score, longest)
    return by_name


# Of the kinds of instructions that IFEval has, those that SmolLM2-135M-Instruct meets more often than not; it never writes in one
# case, in quotation marks, or a list of three points.
ABILITIES: dict[str, Any] = json.loads((Path(__file__).parent / "abilities.json").read_text(encoding="utf-8"))
TOPICS: list[str] = ABILITIES["topics"]
DEMANDS: list[dict[str, Any]] = ABILITIES["demands"]
FACTS: list[tuple[str, str]] = [(question, answer) for question, answer in ABILITIES["facts"]]


@dataclass(frozen=True)
class Demand:
    """A prompt and the checker of what it demands."""

    prompt: str
    kind: str
    settings: dict[str, Any]

    def met(self, text: str) -> float:
        """Return 1 if IFEval's checker finds that a text meets the demand."""
        from lm_eval.tasks.ifeval.instructions_registry import INSTRUCTION_DICT

        checker = INSTRUCTION_DICT[self.kind](self.kind)
        checker.build_description(**self.settings)
        return float(bool(text.strip()) and bool(checker.check_following(text)))


def instructions(count: int) -> list[Demand]:
    """Return prompts in a fixed order, each demand as often as any other."""
    made = [
        Demand(demand["prompt"].format(topic=TOPICS[(3 * i + 7 * round_) % len(TOPICS)]), demand["checker"], demand["settings"])
        for round_ in range(-(-count // len(DEMANDS)))
        for i, demand in enumerate(DEMANDS)
    ]
    return made[:count]


def facts(count: int) -> list[tuple[str, str]]:
    """Return questions and answers, in a fixed order that mixes the kinds."""
    return random.Random(1).sample(FACTS, min(count, len(FACTS)))


def fact_score(text: str, answer: str) -> float:
    """Return 1 if one of the answers is in a text as a word."""
    return float(bool(re.search(rf"\b(?:{answer})\b", text, re.I)))


def choices(count: int) -> list[tuple[str, tuple[str, ...], int]]:
    """Return the questions that `facts` leaves, four answers to each, and which is right."""
    shuffled = random.Random(1).sample(FACTS, len(FACTS))[-count:]
    answers = sorted({answer.split("|")[0] for _, answer in FACTS})
    draw = random.Random(2)
    made = []
    for question, answer in shuffled:
        right = answer.split("|")[0]
        options = [right, *draw.sample([other for other in answers if other not in answer.split("|")], 3)]
        draw.shuffle(options)
        made.append((question, tuple(options), options.index(right)))
    return made


def passages(data: Path, count: int) -> list[str]:
    """Return passages that people wrote: the first words of reviews."""
    rows = json.loads((data / "standard_cl/SC/amazon/test.json").read_text(encoding="utf-8"))
    texts = [" ".join(row["sentence"].replace("Title:", "").replace("Text:", "").split()[:40]) for row in rows]
    return [text for text in texts if len(text.split()) == 40][:count]


def human_chats(data: Path, count: int) -> list[tuple[str, str]]:
    """Return questions that people asked, and the first words of what people answered."""
    rows = json.loads((data / "standard_cl/TC/yahoo/train.json").read_text(encoding="utf-8"))
    chats = []
    for row in rows:
        question, answer = question_and_answer(row)
        if 4 <= len(question.split()) <= 20 and len(answer.split()) >= 8:
            chats.append((question, " ".join(answer.split()[:30])))
        if len(chats) == count:
            break
    return chats
