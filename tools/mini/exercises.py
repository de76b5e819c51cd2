"""What the embedded base model is pre-trained on: plain passages, and reading exercises of other kinds than the four tasks.

Exercises have the form of the benchmark's prompts, so that the base model can read a list of options and answer with one of them.
None uses a data set of the benchmark or its set of labels; the label words are ordinary words of the texts and may be an
option like any other word. Some exercises sort domains under words drawn at random, one list of words a data set.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from random import Random

import lexicon
import passages

Piece = tuple[str, str]  # prompt and answer; a plain passage has an empty prompt

SORTS = [
    "Amber",
    "Birch",
    "Cedar",
    "Delta",
    "Ember",
    "Flint",
    "Garnet",
    "Hazel",
    "Iris",
    "Jade",
    "Koala",
    "Lotus",
    "Maple",
    "Nickel",
    "Onyx",
    "Pearl",
    "Quartz",
    "Raven",
    "Sage",
    "Topaz",
    "Umber",
    "Violet",
    "Willow",
    "Zinc",
]
GRADES = ["zero", "one", "two", "three", "four"]
DOMAINS = list(lexicon.DOMAINS)
WORDS = sorted({word for fields in lexicon.DOMAINS.values() for pool in fields for word in pool}.union(*lexicon.JUDGEMENTS))


def prompt(task: str, dataset: str, instruction: str, options: list[str], text: str) -> str:
    return f"Task:{task}\nDataset:{dataset}\n{instruction}\nOption: {', '.join(options)} \n{text}\nAnswer:"


def any_mixture(rng: Random, domain: str | None = None) -> passages.Mixture:
    main = domain or rng.choice(DOMAINS)
    return passages.Mixture((main,), (rng.choice(DOMAINS),), rng.choice([1.0, 0.9, 0.7]))


def any_text(mix: passages.Mixture, rng: Random) -> str:
    form = rng.randrange(4)
    if form == 0:
        return f"Question: {passages.passage(mix, rng, rng.choice([1, 2]), passages.QUESTIONS)}\n"
    if form == 1:
        title = passages.fill("{a} {n} in {place}", mix, rng)
        return f"Title: {title}\nText: {passages.passage(mix, rng, rng.choice([1, 2]))}\n"
    if form == 2:
        name = passages.person(rng) if rng.random() < 0.5 else passages.place(rng)
        return f"Title: {name}\nText: {passages.passage(mix, rng, 2)}\n"
    return f"Text: {passages.passage(mix, rng, rng.choice([1, 2]))}\n"


def plain(rng: Random) -> Piece:
    """A passage without a question."""
    if rng.random() < 0.2:
        return "", passages.review(rng.randrange(5), rng, remarks=rng.choice([2, 3]))
    return "", any_text(any_mixture(rng), rng)


def title(rng: Random) -> Piece:
    """Which of four titles, each two words of a domain, fits the text?"""
    chosen = rng.sample(DOMAINS, 4)
    right = rng.randrange(4)
    names = [f"{rng.choice(lexicon.DOMAINS[d][2])} {rng.choice(lexicon.DOMAINS[d][0])}" for d in chosen]
    mix = any_mixture(rng, chosen[right])
    return prompt("QA", "titles", "Which title fits?", names, any_text(mix, rng)), names[right]


def about(rng: Random) -> Piece:
    """Is the text about these two words?"""
    domain = rng.choice(DOMAINS)
    yes = rng.random() < 0.5
    asked = domain if yes else rng.choice([d for d in DOMAINS if d != domain])
    words = rng.sample(lexicon.DOMAINS[asked][0], 2)
    question = f"Is this about {words[0]} and {words[1]}?"
    return prompt("QA", "about", question, ["True", "False"], any_text(any_mixture(rng, domain), rng)), str(yes)


def detail(rng: Random) -> Piece:
    """Find the month, colour, number or person that a text names."""
    kind, pool, template = rng.choice(
        [
            ("month", lexicon.MONTHS, "The {n} from {place} {v} its {n} in X."),
            ("colour", lexicon.COLOURS, "The X {n} stood by the {a} {n}."),
            ("number", lexicon.NUMBERS, "X people saw the {n}, but few {v} the {n}."),
        ]
    )
    options = rng.sample(pool, 4)
    answer = rng.choice(options)
    mix = any_mixture(rng)
    lines = [passages.fill(template, mix, rng).replace("X", answer)]
    lines.append(passages.fill(rng.choice(passages.QUESTIONS[:4]), mix, rng))
    rng.shuffle(lines)
    return prompt("QA", kind, f"Which {kind} is named?", options, "Text: " + " ".join(lines) + "\n"), answer


def verdict(rng: Random) -> Piece:
    """Would the writer buy it again?"""
    level = rng.choice([0, 1, 3, 4])
    text = passages.review(level, rng, 3)
    return prompt("QA", "again", "Would the writer buy it again?", ["Yes", "No"], text), "Yes" if level > 2 else "No"


def stars(rng: Random) -> Piece:
    """How many stars does the review give?"""
    level = rng.randrange(5)
    return prompt("QC", "stars", "How many stars?", GRADES, passages.review(level, rng, 3)), GRADES[level]


def fits(rng: Random) -> Piece:
    """Which of several words belongs to what the text is about?"""
    chosen = rng.sample(DOMAINS, rng.choice([3, 4, 5, 6, 8, 10]))
    words = [rng.choice(lexicon.DOMAINS[domain][0]) for domain in chosen]
    right = rng.randrange(len(chosen))
    text = any_text(any_mixture(rng, chosen[right]), rng)
    return prompt("QA", "fits", "Which word fits?", words, text), words[right]


def judged(rng: Random) -> Piece:
    """Which of the judgements is closest to the review?"""
    levels = rng.sample(range(5), rng.choice([2, 3, 4, 5]))
    words = [rng.choice(lexicon.JUDGEMENTS[level]) for level in levels]
    right = rng.randrange(len(levels))
    return prompt("QA", "fits", "Which word fits?", words, passages.review(levels[right], rng, 3)), words[right]


def echo(rng: Random) -> Piece:
    """Say one word again: how every word of the vocabulary comes to be an answer."""
    word = rng.choice(WORDS)
    return prompt("QA", "echo", "Say the word.", [word], f"Text: {word}\n"), word


def sorts(count: int) -> list[tuple[str, dict[str, list[str]]]]:
    """Data sets that sort domains under random words."""
    rng = Random("anchorlora mini sorts")
    out = []
    for _ in range(count):
        classes = rng.choice([3, 4, 5, 6])
        words = rng.sample(SORTS, classes)
        domains = rng.sample(DOMAINS, min(len(DOMAINS), classes * rng.choice([1, 2, 3])))
        out.append(("s" + passages.place(rng).lower(), {w: domains[i::classes] for i, w in enumerate(words)}))
    return out


SORTED = sorts(40)


def sorting(rng: Random) -> Piece:
    """Which of the data set's words stands for the text's domain?"""
    name, classes = rng.choice(SORTED)
    word = rng.choice(list(classes))
    mix = any_mixture(rng, rng.choice(classes[word]))
    return prompt("SO", name, "Which word goes with the text?", list(classes), any_text(mix, rng)), word


KINDS: dict[Callable[[Random], Piece], int] = {
    plain: 3,
    title: 2,
    fits: 5,
    judged: 2,
    about: 1,
    detail: 1,
    verdict: 1,
    stars: 1,
    sorting: 3,
    echo: 1,
}


def pieces(seed: str) -> Iterator[Piece]:
    """Endless pieces, kinds drawn by their weights."""
    rng = Random(seed)
    makers = [kind for kind, weight in KINDS.items() for _ in range(weight)]
    while True:
        yield rng.choice(makers)(rng)
