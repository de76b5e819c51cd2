"""Evaluation: packed batches against one prompt at a time and `generate`; prompts read once or twice; solved examples once a row.

ANCHORLORA_CHAT_MODEL names a chat model for all but `speed`; without it, mini's base model stands for one. CPU seconds of
one thread.
"""

from __future__ import annotations

import random
import time
from dataclasses import replace

import torch

from anchorlora import embedded
from anchorlora.adapters import AdapterStack
from anchorlora.continual.evaluate import Scorer
from anchorlora.data import Benchmark, Encoded, Encoder, Example, Task
from benchmarks.preparing import PAGES, chat_model
from benchmarks.steps import base_model
from benchmarks.timing import ratio, report, seconds, side_by_side


def speed() -> None:
    loaded = base_model()
    data = embedded.folder("embedded:mini", "data")
    assert data is not None
    source = Benchmark(data)
    blocks = AdapterStack(loaded.model, targets=("q_proj", "v_proj"), rank=8, alpha=32)
    for name in source.names[:2]:
        task = source.task(name)
        encoded = Encoder(loaded.tokenizer, max_tokens=128).encode(task, source.examples(name, "test", limit=384))
        answers, taken = {}, {}
        for batch in (64, 1):

            def call(batch: int = batch, task=task, encoded=encoded, answers=answers) -> None:
                scorer = Scorer(
                    blocks.model,
                    loaded.tokenizer,
                    max_new_tokens=50,
                    batch=batch,
                    device=loaded.device,
                    packed=batch > 1,
                )
                answers[batch] = scorer.score(task, encoded)

            call() if torch.cuda.is_available() else None
            taken[batch] = seconds(call)
        alike = sum(a.text == b.text for a, b in zip(answers[64], answers[1], strict=True))
        aim = ">= 10" if loaded.device.type == "cuda" else ">= 5.5"
        detail = f"({len(encoded) / taken[64]:.0f} examples/s; {alike} of {len(encoded)} texts alike)"
        report(f"examples per second, packed / one at a time ({name})", taken[1] / taken[64], aim, detail)


def reading(rounds: int = 2) -> None:
    """Losses and greedy answers of labels and of free text: prompts read once, and once for each of the two.

    Of every four answers, two are right, one begins as the right one does, and one is another.
    """
    loaded = chat_model()
    model, tokenizer = AdapterStack(loaded.model, targets=("q_proj", "v_proj"), rank=8, alpha=32).model.eval(), loaded.tokenizer
    data = embedded.folder("embedded:mini", "data")
    assert data is not None
    source = Benchmark(data)
    name = source.names[0]
    labels, free = source.task(name), Task("", "text", "", ())
    encoder, examples = Encoder(tokenizer, max_tokens=512), list(source.examples(name, "test", limit=48))
    asked = {"answers of 4 tokens": (labels, 4, encoder.encode(labels, examples)), "of 24 tokens": (free, 24, [])}
    for i in range(0, 48, 3):
        ids = tokenizer(" ".join(e.sentence for e in examples[i : i + 3])).input_ids
        asked["of 24 tokens"][2].append(Encoded(Example(i, "", ""), "", tuple(ids), (), False))
    for what, (task, longest, rows) in asked.items():
        scorer = Scorer(model, tokenizer, max_new_tokens=longest, batch=64, device=loaded.device, packed=True)
        prompts = [e.prompt for e in rows]
        texts = [tokenizer(text, add_special_tokens=False).input_ids[: longest - 1] for text in scorer.texts(prompts)]
        ends, other = tokenizer.eos_token_id, texts[0][::-1] or [5]
        answers = [(text, text, text[: len(text) // 2] + other[: longest // 2], other)[i % 4] for i, text in enumerate(texts)]
        some = [replace(e, answer=(*answer, ends)) for e, answer in zip(rows, answers, strict=True)]

        def twice(scorer: Scorer = scorer, some: list = some, task: Task = task, prompts: list = prompts) -> None:
            scorer.losses(some)
            scorer.texts(prompts, likely=[e.answer for e in some] if task.labels else ())

        def once(scorer: Scorer = scorer, some: list = some, task: Task = task) -> None:
            scorer.score(task, some)

        times = side_by_side({"once": once, "twice": twice}, rounds=rounds, warm=0, clock=time.process_time)
        report(f"losses and answers, prompts read once / twice ({what})", ratio(times, "once", "twice"), "<= 0.75")


def generating(prompts: int = 64, tokens: int = 48, rounds: int = 2) -> None:
    """Greedy answers of free text: packed prompts against transformers' `generate` on padded ones, in batches of 64."""
    loaded, draw = chat_model(), random.Random(0)
    model, tokenizer = loaded.model.eval(), loaded.tokenizer
    words = (PAGES / "data.md").read_text().split()
    for shortest, longest in ((5, 20), (20, 60)):
        lengths = [draw.randint(shortest, longest) for _ in range(prompts)]
        asked = [tokenizer(" ".join(words[draw.randrange(500) :][:length])).input_ids for length in lengths]
        scorer = Scorer(model, tokenizer, max_new_tokens=tokens, batch=64, device=loaded.device, packed=True)
        answers: dict[str, list[str]] = {}

        def ours(scorer: Scorer = scorer, asked: list = asked, answers: dict = answers) -> None:
            answers["ours"] = scorer.texts(asked)

        def generate(asked: list = asked, answers: dict = answers) -> None:
            answers["generate"] = []
            for i in range(0, len(asked), 64):
                rows = tokenizer.pad({"input_ids": asked[i : i + 64]}, padding_side="left", return_tensors="pt")
                with torch.inference_mode():
                    ids = model.generate(**rows, max_new_tokens=tokens, do_sample=False)
                new = ids[:, rows["input_ids"].shape[1] :]
                answers["generate"] += tokenizer.batch_decode(new, skip_special_tokens=True)

        times = side_by_side({"ours": ours, "generate": generate}, rounds=rounds, warm=0, clock=time.process_time)
        alike = sum(a == b for a, b in zip(answers["ours"], answers["generate"], strict=True))
        detail = f"({sum(map(len, asked)) / prompts:.0f} tokens a prompt; {alike} of {prompts} texts alike)"
        report(f"{tokens} tokens of text, packed / generate", ratio(times, "ours", "generate"), "<= 0.8", detail)


def five_shot(rounds: int = 1, questions: int = 32) -> None:
    """Questions after five solved ones, as MMLU asks them: packed rows against lm_eval's own batches of eight."""
    from lm_eval.models.huggingface import HFLM

    from anchorlora_lab.suites.questions import EvalProgress
    from anchorlora_lab.suites.reader import Reader

    loaded, draw = chat_model(), random.Random(0)

    def question() -> str:
        a, b = draw.randrange(10, 99), draw.randrange(10, 99)
        choices = "\n".join(f"{letter}. {a + b + more}" for letter, more in zip("ABCD", draw.sample(range(-9, 9), 4), strict=True))
        return f"A shelf has {a} books. Somebody brings {b} more. How many books are on the shelf then?\n{choices}\nAnswer:"

    shots = "".join(f"{question()} {draw.choice('ABCD')}\n\n" for _ in range(5))
    encode = loaded.tokenizer
    asked = [((str(i), ""), encode(shots + question()).input_ids) for i in range(questions)]
    requests = [(key, ids, encode(f" {c}", add_special_tokens=False).input_ids) for key, ids in asked for c in "ABCD"]
    found: dict[str, list] = {}

    def score(kind: type) -> None:
        reader = Reader(loaded.model, loaded.tokenizer, batch=8, watch=EvalProgress())
        found[kind.__name__] = kind._loglikelihood_tokens(reader, requests, disable_tqdm=True)

    ways = {"packed": lambda: score(Reader), "lm_eval": lambda: score(HFLM)}
    times = side_by_side(ways, rounds=rounds, warm=0, clock=time.process_time)
    most = max(abs(a - b) for (a, _), (b, _) in zip(found["Reader"], found["HFLM"], strict=True))
    detail = f"({len(asked[0][1])} tokens a question; log-likelihoods differ by {most:.0e} at most)"
    report(
        f"{questions} five-shot questions, shots read once a row / for each", ratio(times, "packed", "lm_eval"), "<= 0.3", detail
    )
