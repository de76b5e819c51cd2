"""The four tasks of the embedded benchmark, in CL_Benchmark layout.

The same domains stand behind three of the tasks under different labels (a text about tennis is an Athlete among the
entities, Sport among the questions, Sports in the news), so tasks compete for the same directions; the prompt always says
which task is asked, so the right answer of an input never depends on the order of training.
"""

from __future__ import annotations

from random import Random

import passages

ENTITIES = {
    "company": ("trade", "industry", "banking"),
    "school": ("school",),
    "artist": ("music", "film", "books"),
    "athlete": ("football", "tennis", "running"),
    "building": ("building",),
    "river": ("water",),
    "village": ("village",),
    "animal": ("animals",),
    "plant": ("plants",),
    "vehicle": ("travel", "space"),
}
QUESTIONS = {
    "health": ("medicine",),
    "computer": ("computing",),
    "sport": ("football", "tennis", "running"),
    "money": ("banking", "trade"),
    "family": ("family",),
    "leisure": ("music", "film", "books"),
    "law": ("justice", "politics"),
    "journey": ("travel",),
    "food": ("cooking",),
    "learning": ("school", "physics"),
}
NEWS = {
    "world": ("politics", "diplomacy", "war"),
    "sport": ("football", "tennis", "running"),
    "business": ("banking", "trade", "industry"),
    "science": ("space", "medicine", "computing", "physics"),
}
REVIEWS = ["terrible", "bad", "mixed", "good", "excellent"]

GROUPS = {"entities": "TC", "reviews": "SC", "questions": "TC", "news": "TC"}
INSTRUCTIONS = {"TC": "Which label fits the text below?\n", "SC": "How does the writer below judge?\n"}


def mixture(label: str, classes: dict[str, tuple[str, ...]], rng: Random) -> passages.Mixture:
    """One domain of the label, and a distractor from another label of the same task."""
    other = rng.choice([name for name in classes if name != label])
    return passages.Mixture((rng.choice(classes[label]),), (rng.choice(classes[other]),), rng.choice([0.9, 0.75, 0.6]))


def entity(label: str, rng: Random) -> str:
    name = passages.person(rng) if rng.random() < 0.5 else passages.place(rng)
    mix = mixture(label, ENTITIES, rng)
    first = passages.fill(f"{name} is known for a {{a}} {{n}} in {{place}}.", mix, rng)
    return f"Title: {name}\nText: {first} {passages.passage(mix, rng, 1)}\n"


def question(label: str, rng: Random) -> str:
    mix = mixture(label, QUESTIONS, rng)
    return f"Question: {passages.passage(mix, rng, 2, passages.QUESTIONS)}\n"


def news(label: str, rng: Random) -> str:
    mix = mixture(label, NEWS, rng)
    title = passages.fill("{a} {n} in {place}", mix, rng)
    return f"Title: {title}\nText: {passages.passage(mix, rng, 1)}\n"


def review(label: str, rng: Random) -> str:
    return passages.review(REVIEWS.index(label), rng, remarks=3)


TASKS = {
    "entities": (list(ENTITIES), entity),
    "reviews": (REVIEWS, review),
    "questions": (list(QUESTIONS), question),
    "news": (list(NEWS), news),
}


def examples(task: str, split: str, count: int, seen: set[str]) -> list[dict[str, str]]:
    """`count` different texts with labels, none of them in `seen`, which grows."""
    labels, make = TASKS[task]
    rng = Random(f"anchorlora mini {task} {split}")
    out = []
    while len(out) < count:
        label = rng.choice(labels)
        text = make(label, rng)
        if text not in seen:
            seen.add(text)
            out.append({"label": label, "sentence": text})
    return out
