"""Sentences and passages in English-like text, drawn from domains, with distractors and noise.

Every function takes its `random.Random`: the same seed gives the same text on every machine.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from random import Random

import lexicon

SENTENCES = [
    "The {a} {n} {v} the {n} near the {n}.",
    "{person} {v} a {n} and kept the {n}.",
    "The {n} was {a}, so the {n} {v} it {time}.",
    "Nobody {v} the {a} {n} before the {n} came.",
    "With a {n} and a {n}, {person} {v} in {month}.",
    "{time} the {n} of {place} {v} without a {n}.",
    "It was a {a} {n}, and the {n} was {a} too.",
    "{number} people saw the {n}, but few {v} the {n}.",
    "A {colour} {n} stood by the {a} {n}.",
    "{person} said the {n} was {a} and the {n} {v}.",
    "In {place} a {a} {n} {v} for {number} days.",
    "After the {n}, the {a} {n} {v} {time}.",
    "They {v} the {n} because the {n} was {a}.",
    "The {n} from {place} {v} its {n} in {month}.",
]
VOWEL = re.compile(r"\b([Aa]) ([aeiou])")
QUESTIONS = [
    "How do I know if my {n} is {a}?",
    "What is the best {n} for a {a} {n}?",
    "Why has my {n} {v} the {n} {time}?",
    "Can anyone tell me about the {n} and the {n}?",
    "My {n} {v} in {month}, should I get a {a} {n}?",
    "Does a {n} need a {n}, or is it too {a}?",
    "Where can I find a {a} {n} in {place}?",
    "Is it true that a {n} {v} because of the {n}?",
]


@dataclass(frozen=True)
class Mixture:
    """Where content words come from: mostly `main`, sometimes `other`, so that single words mislead."""

    main: tuple[str, ...]
    other: tuple[str, ...]
    purity: float

    def word(self, kind: int, rng: Random) -> str:
        pool = self.main if rng.random() < self.purity or not self.other else self.other
        return rng.choice(lexicon.DOMAINS[rng.choice(pool)][kind])


def person(rng: Random) -> str:
    return rng.choice(lexicon.PEOPLE_STARTS) + rng.choice(lexicon.PEOPLE_ENDS)


def place(rng: Random) -> str:
    return rng.choice(lexicon.PLACE_STARTS) + rng.choice(lexicon.PLACE_ENDS)


def fill(template: str, mixture: Mixture, rng: Random) -> str:
    """A template with every slot drawn anew.  "{n} {n}" gives two words."""
    draw = {
        "n": lambda: mixture.word(0, rng),
        "v": lambda: mixture.word(1, rng),
        "a": lambda: mixture.word(2, rng),
        "person": lambda: person(rng),
        "place": lambda: place(rng),
        "colour": lambda: rng.choice(lexicon.COLOURS),
        "number": lambda: rng.choice(lexicon.NUMBERS),
        "month": lambda: rng.choice(lexicon.MONTHS),
        "time": lambda: rng.choice(lexicon.TIMES),
    }
    out, rest = "", template
    while "{" in rest:
        before, _, rest = rest.partition("{")
        slot, _, rest = rest.partition("}")
        out += before + draw[slot]()
    text = VOWEL.sub(r"\1n \2", out + rest)
    return text[0].upper() + text[1:]


def passage(mixture: Mixture, rng: Random, sentences: int, templates: list[str] = SENTENCES) -> str:
    return " ".join(fill(rng.choice(templates), mixture, rng) for _ in range(sentences))


def review(level: int, rng: Random, remarks: int) -> str:
    """Remarks about a product whose judgement words scatter around `level` (0..4): neighbours overlap."""
    product = rng.choice(lexicon.PRODUCTS)
    said = []
    for _ in range(remarks):
        drawn = min(4, max(0, level + rng.choice([-1, 0, 0, 0, 1])))
        word = rng.choice(lexicon.JUDGEMENTS[drawn])
        part = rng.choice(lexicon.PARTS)
        degree = rng.choice(lexicon.DEGREES) + " " if rng.random() < 0.4 else ""
        said.append(
            rng.choice(
                [
                    f"The {part} is {degree}{word}.",
                    f"I find the {part} {degree}{word}.",
                    f"My {rng.choice(['sister', 'friend', 'neighbour'])} says the {product} is {degree}{word}.",
                    f"After {rng.choice(lexicon.NUMBERS)} weeks the {part} was {degree}{word}.",
                    f"It has a {degree}{word} {part}.",
                ]
            )
        )
    return f"Title: {rng.choice(lexicon.COLOURS)} {product}\nText: " + " ".join(said) + "\n"
