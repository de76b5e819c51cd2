"""The price of a skill: rows, tokens, steps, memory, and seconds of each phase at rates measured on the model itself.

    reading    a forward pass of a packed row: seconds a token        losses, and text that cores are made from
    learning   the same with the backward pass: seconds a token       training
    answering  a step of n rows: seconds a + b n                      answers
    writing    the same, as texts are drawn                           texts of the model's own

Answers are taken to be as long as they may be, so what ends early takes less. Those that a model knows are taken to be about as
long as the right ones: to the skill after training, to a skill before it, and of the model's own text. Nothing is written.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from statistics import mean
from typing import Any

import torch

from anchorlora import embedded
from anchorlora.adapters import AdapterStack, lora_layers
from anchorlora.config import Recipe
from anchorlora.constraints import AnswerSensitivity, GradientStart
from anchorlora.continual.batches import MicroBatch, micro_batch, packed_row, rows_of
from anchorlora.continual.data import longest_first
from anchorlora.continual.evaluate import ROWS, TOKENS
from anchorlora.data import Encoded, EncodedExamples, Encoder, TextTask, examples_of, read_samples
from anchorlora.devices import device_name
from anchorlora.geometry import Spectrum
from anchorlora.methods import Method
from anchorlora.models.drawing import DecodingState, draw
from anchorlora.models.load import cache_argument, cache_in, ends_of, pad_of
from anchorlora.models.own_text import BATCH, OWN_TOKENS, TOGETHER
from anchorlora.models.packing import packed as reading_packed
from anchorlora.models.packing import rows_at_once, unpackable
from anchorlora.models.session import Session
from anchorlora.runs.sizes import sizes
from anchorlora.text import amount
from anchorlora.train.budget import STEPS
from anchorlora.train.kept import OWN_SHARE, SHARE, Kept
from anchorlora.train.request import SELF, SkillRequest, leaves_cores, leaves_rows
from anchorlora.train.stages import Teaching, facts_of_run, parts_of

clock = time.perf_counter
CONTEXT, DRAWN = 128, 3  # tokens before the ones that are drawn to measure, and how many are
MEASURED = 384  # tokens of examples, at least, that are read to measure, unless a step has fewer
SHORT = 48  # tokens of each text that is read to see whether a model reads packed rows
TRIED = 9  # texts that are read to see whether a model reads packed rows: three, alone and packed twice
WRITTEN = (0.3, 0.9)  # of the most tokens, what a chat model writes as a user, and as an answer (SmolLM2-135M)


@dataclass(frozen=True)
class Phase:
    """One part of the work, and how long it takes."""

    what: str
    amount: str
    seconds: float


@dataclass(frozen=True)
class Price:
    """Rows, tokens, steps, memory and time that teaching a skill will take."""

    rows: list[dict[str, Any]]  # of each source of text, as skill/rows.json has them
    tokens: int  # of the training examples
    steps: int  # optimizer steps
    memory: int  # bytes
    device: str
    phases: list[Phase]

    @property
    def seconds(self) -> float:
        """Total over all phases."""
        return sum(phase.seconds for phase in self.phases)


@dataclass(frozen=True)
class Part:
    """Text that is tested: its rows, and how long they and their answers are."""

    name: str
    rows: int
    prompt: float  # mean tokens
    answer: float  # mean tokens of the right answers; 0 where none are generated
    text: float  # mean tokens of both
    read: bool = True  # whether cores are made of it; an earlier skill has them
    known: bool = False  # whether the model answers about as the right answers do


@dataclass(frozen=True)
class Rates:
    """Seconds that a model takes on this machine."""

    reading: float  # a token
    learning: float  # a token
    answering: tuple[float, float]  # a step of answers, and each row of it
    writing: tuple[float, float]  # a step of texts of its own, and each row of it; nothing where none are written
    spectra: float  # the directions of all layers' inputs
    shared: float  # tokens of examples that one that is read stands for, as they begin alike


def seconds_of_steps(rate: tuple[float, float], rows: int, steps: float, share: float) -> float:
    """Return the seconds of so many steps of so many answers or texts, which take that share of them on average."""
    return steps * (rate[0] + rate[1] * rows * share)


def price_of(teaching: Teaching, rows: list[dict[str, Any]]) -> Price:
    """Return the price of a request that has passed every check."""
    request, method, session, files = teaching.request, teaching.method, teaching.session, teaching.files
    began = clock()
    parts = parts_of(teaching, rows, teaching.adapted())
    loading = clock() - began
    recipe = request.recipe(teaching.folder, method, facts_of_run(teaching))
    adapted = session.adapted(request.adapter, targets=recipe.adapter.targets)
    settings = recipe.training
    encoder = Encoder(session.tokenizer, max_tokens=session.room(settings.max_tokens), ends=ends_of(adapted))
    task = files.task(request.name)
    train = files.encoded(request.name, "train", encoder)
    test = files.encoded(request.name, "test", encoder, limit=recipe.tasks.test_limit)
    rates = measure_rates(session, adapted, recipe, train, writes=SELF in request.keep)
    skill = _part(request.name, test, answered=task.answered)
    kept = [*_kept_parts(request, encoder, parts)]
    tokens, steps, length = sum(train.lengths), recipe.steps(len(train)), mean(train.lengths)
    phases = [Phase("loading the model", "", loading)]
    if SELF in request.keep:
        phases.append(_own_text(session, request, rates))
    for part in [part for part in kept if part.read]:
        if method.reads_past:
            what = f"reading what answers depend on in {part.name}"
            phases.append(_depended_on(what, method, _learned(part), part.text, rates))
        if leaves_cores(request, method):
            texts = min(recipe.features.rows, _learned(part))
            seconds = texts * part.text * rates.reading * rates.shared + rates.spectra
            phases.append(Phase(f"finding what to protect of {part.name}", amount(texts, "text"), seconds))
    evaluation = recipe.evaluation
    most = task.max_new_tokens or evaluation.max_new_tokens
    batch = TOKENS * evaluation.eval_batch
    for part in (skill, *kept):
        phases.append(_test_phase(f"testing {part.name} before", part, rates, most, batch))
    # a pass forward and backward over some examples, which reads a common beginning once, as training does
    starts = [min(part.examples, len(train)) for part in method.constraints if isinstance(part, GradientStart)]
    start = sum(count * length * rates.learning + 2 * rates.spectra for count in starts)
    ended = 0.0 if method.provided_cores is not None else rates.spectra  # cores of the task are made of rows where it ends
    phases.append(Phase("training", amount(steps, "step"), start + settings.epochs * tokens * rates.learning + ended))
    phases.append(_test_phase(f"testing {skill.name} after", skill, rates, min(most, skill.answer + 1), batch))
    for part in kept:
        phases.append(_test_phase(f"testing {part.name} after", part, rates, most, batch))
    if method.reads_past and not leaves_rows(request, method, recipe.adapter.rank):
        phases.append(_depended_on("reading what its answers depend on", method, len(train), length, rates))
    if leaves_cores(request, method):
        texts = min(recipe.features.rows, len(train))
        seconds = texts * length * rates.reading + rates.spectra
        phases.append(Phase("finding what a later skill must protect", amount(texts, "text"), seconds))
    if request.budget is not None:
        read = sum(part.rows * part.text for part in kept) * rates.reading * rates.shared
        phases.append(Phase("looking for the scale", f"at most {STEPS + 1} scales", (STEPS + 1) * read))
    if request.compare:
        twin = [p.seconds for p in phases if p.what == "training" or p.what.endswith(" after")]
        phases.append(Phase("the same without protection", "", sum(twin)))
    memory = sizes(recipe, tasks=1, cumulative=False, folder=embedded.folder(request.base_model.model or "", "base_model"))
    return Price(rows, tokens, steps, memory.peak + memory.host, device_name(session.loaded.device), phases)


def _learned(part: Part) -> int:
    """Return how many rows of what is kept are not held out."""
    return part.rows * ((OWN_SHARE if part.name == SELF else SHARE) - 1)


def _depended_on(what: str, method: Method, texts: int, tokens: float, rates: Rates) -> Phase:
    """Forward and backward passes, then products of all rows in float64, which take as long again."""
    texts = min(texts, sum(part.examples for part in method.constraints if isinstance(part, AnswerSensitivity)))
    return Phase(what, amount(texts, "text"), 2 * texts * tokens * rates.learning * rates.shared + 2 * rates.spectra)


def _part(name: str, examples: EncodedExamples, *, answered: bool, read: bool = True, known: bool = False) -> Part:
    prompts = [len(e.prompt) for e in examples]
    answers = [len(e.answer) for e in examples]
    return Part(name, len(prompts), mean(prompts), mean(answers) if answered else 0.0, mean(prompts) + mean(answers), read, known)


def _kept_parts(request: SkillRequest, encoder: Encoder, parts: Sequence[Kept]) -> Iterator[Part]:
    """Tests of each thing that is kept, the model's own text first: as it is not there yet, the longest."""
    for kept in sorted(parts, key=lambda part: part.source != SELF):
        if kept.source == SELF:
            chat = bool(encoder.tokenizer.chat_template)
            user, answer = (OWN_TOKENS * share for share in WRITTEN)
            yield Part(SELF, max(1, request.own // OWN_SHARE), user, answer * chat, user + answer, known=True)
        elif kept.probes:
            examples = encoder.encode(TextTask(kept.name), examples_of(read_samples(kept.probes)))
            answered = any(e.example.is_answer for e in examples)
            learned = kept.cores is not None or kept.memory is not None
            yield _part(kept.name, examples, answered=answered, read=bool(kept.unread) or not learned, known=learned)


def _own_text(session: Session, request: SkillRequest, rates: Rates) -> Phase:
    whole, rest = divmod(request.own, BATCH * TOGETHER)
    groups = [BATCH * TOGETHER] * whole + ([-(-rest // BATCH) * BATCH] if rest else [])
    seconds = sum(seconds_of_steps(rates.writing, rows, OWN_TOKENS, share) for rows in groups for share in WRITTEN)
    return Phase("writing texts of its own", f"{request.own:,} texts of at most {2 * OWN_TOKENS} tokens", seconds)


def _test_phase(what: str, part: Part, rates: Rates, most: float, batch: int) -> Phase:
    """Losses of all rows, and answers of so many tokens to batches of prompts, which go on from what was read for the losses."""
    seconds, work = (part.rows + TRIED) * part.text * rates.reading, amount(part.rows, "row")
    if part.answer:
        a_row = max(1, int(batch / max(1.0, part.prompt)))
        at_once = a_row * min(ROWS, -(-batch // TOKENS // a_row))
        whole, rest = divmod(part.rows, at_once)
        batches = [at_once] * whole + [rest] * (rest > 0)
        share = min(1.0, (part.answer + 1) / most) if part.known else 1.0
        seconds += sum(seconds_of_steps(rates.answering, rows, most, share) for rows in batches)
        work += f", answers of {'about' if most == part.answer + 1 else 'at most'} {amount(round(most), 'token')}"
    return Phase(what, work, seconds)


def measure_rates(session: Session, adapted: Any, recipe: Recipe, examples: EncodedExamples, *, writes: bool) -> Rates:
    """Measure a model for a few seconds; it is left without an adapter."""
    settings = recipe.training
    window = [examples[i] for i in range(min(len(examples), settings.window))]
    together = unpackable(adapted, [ids[:SHORT] for ids in longest_first(examples)], longest=max(examples.lengths)) is None
    most = settings.row_tokens if together else rows_at_once(adapted, settings.row_tokens)
    batches, tokens, shared = _measuring(session, window, most, together)
    with torch.no_grad():  # what is packed is kept for the backward pass
        reading = _mean_seconds(lambda: [_logits(adapted, batch) for batch in batches])
        cache = _context(adapted, session, 1)
        answering = _line(lambda rows: _step(adapted, session, rows, cache))
        writing = _line(lambda rows: _drawn_step(adapted, session, rows)) if writes else (0.0, 0.0)
    inputs = {(layer.rpartition(".")[0], part.in_features) for layer, part in lora_layers(adapted).items()}
    widths = [width for _, width in inputs]
    # the work grows with the cube of both sizes together
    rows = torch.randn(-(-recipe.features.rows // 2), -(-max(widths) // 2), device=session.loaded.device)
    spectra = 8 * _mean_seconds(lambda: Spectrum.of(rows, at_most=recipe.features.wide), times=1)
    spectra *= sum((width / max(widths)) ** 2 for width in widths)
    stack = AdapterStack(session.bare().model, recipe.adapter.targets, rank=recipe.adapter.rank, alpha=recipe.adapter.alpha)
    trained: Any = stack.model.train()

    def learn() -> None:
        for batch in batches:
            _logits(trained, batch).float().logsumexp(-1).mean().backward()
        trained.zero_grad()

    learning = _mean_seconds(learn)
    session.bare()
    return Rates(reading / tokens, learning / tokens, answering, writing, spectra, shared)


def _measuring(session: Session, window: Sequence[Encoded], most: int, together: bool) -> tuple[list[MicroBatch], float, float]:
    """Return the first rows of a step, how many tokens of its examples they stand for, and each of theirs."""

    def rows(examples: Sequence[Encoded]) -> list[MicroBatch]:
        make = packed_row if together else partial(micro_batch, pad=pad_of(session.tokenizer))
        return [make(group).to(session.loaded.device) for group in rows_of(examples, most, share=together)]

    def read(batches: Sequence[MicroBatch]) -> int:
        return sum(batch.inputs["input_ids"].numel() for batch in batches)

    sizes = list(accumulate(len(e.prompt) + len(e.answer) for e in window))
    first = rows(window[: 1 + sum(size < MEASURED for size in sizes)])
    shared = sizes[-1] / read(rows(window))
    return first, shared * read(first), shared


def _logits(model: Any, batch: MicroBatch) -> Any:
    with reading_packed(model, batch.layout, batch.kept):
        return batch.answer_logits(model(**batch.inputs, logits_to_keep=batch.keep, use_cache=False).logits)


def _line(step: Callable[[int], float]) -> tuple[float, float]:
    """Return the seconds of a step, and of each row of it, through two points."""
    few, many = BATCH // 2, 2 * BATCH
    at_few, at_many = step(few), step(many)
    a_row = max(0.0, (at_many - at_few) / (many - few))
    return max(0.0, at_few - few * a_row), a_row


def _context(model: Any, session: Session, rows: int) -> Any:
    """Return what attention keeps of a beginning, read in so many rows."""
    ids = torch.full((rows, CONTEXT), int(session.tokenizer.eos_token_id or 0), device=session.loaded.device)
    return cache_in(model(input_ids=ids, use_cache=True, logits_to_keep=1))


def _step(model: Any, session: Session, rows: int, beginning: Any) -> float:
    """Return the seconds of one step of so many answers, after a beginning."""
    device, token, cache = session.loaded.device, int(session.tokenizer.eos_token_id or 0), deepcopy(beginning)
    try:
        cache.batch_repeat_interleave(rows)
    except (AttributeError, NotImplementedError, TypeError):  # what the model keeps cannot be repeated
        cache = _context(model, session, rows)
    one, argument = torch.full((rows, 1), token, device=device), cache_argument(type(session.loaded.model).forward)

    def step() -> None:
        model(input_ids=one, use_cache=True, **{argument: cache}).logits.argmax(-1).tolist()

    return _mean_seconds(step, times=DRAWN)


def _drawn_step(model: Any, session: Session, rows: int) -> float:
    """Return the seconds of one step of so many texts of the model's own, as they are drawn."""
    beginning, drawn = [int(session.tokenizer.eos_token_id or 0)] * CONTEXT, list[float]()
    numbers = torch.full((rows, 1 + DRAWN), 0.5, dtype=torch.float64)
    draw(
        model,
        DecodingState.of(model, session.tokenizer, [beginning] * rows),
        numbers,
        stops=(),
        longest=1 + DRAWN,
        watch=lambda: drawn.append(clock()),  # each token of all rows has reached the process then
    )
    return (drawn[-1] - drawn[0]) / DRAWN


def _mean_seconds(what: Callable[[], Any], *, times: int = 2) -> float:
    seconds = []
    for _ in range(times):
        began = clock()
        what()
        if torch.accelerator.is_available():
            torch.accelerator.synchronize()
        seconds.append(clock() - began)
    return mean(seconds)
