"""`anchorlora ask`: one question to a model with its adapter, answered as a server would, token by token."""

from __future__ import annotations

import sys
from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import click

from anchorlora.cli.console import count_option, err, example, hide_loading
from anchorlora.errors import InvalidValue
from anchorlora.store.json import loads
from anchorlora.text import amount, shown

if TYPE_CHECKING:
    from transformers import TextStreamer

    from anchorlora.config import BaseModelSettings
    from anchorlora.data import Sample
    from anchorlora.models.load import LoadedModel
    from anchorlora.store.artifact import Artifact

STDIN = "-"
Form = Literal["chat", "instruction", "plain"]


@click.command(epilog=example('anchorlora ask runs/new "Where is my order?" --without'))
@click.argument("folder", metavar="RUN", type=click.Path(path_type=Path))
@click.argument("prompt")
@click.option("--without", is_flag=True, help="Also print the answer without the adapter.")
@click.option("--system", metavar="TEXT", help="A system message before the prompt.  [default: none]")
@count_option("--max-new-tokens", default=256, show_default=True, help="Longest answer, in tokens.")
@click.option(
    "--chat/--plain",
    default=None,
    help="Render the prompt with the chat template, or give it as it stands.  "
    "[default: as RUN's examples are; else a chat, if there is a template]",
)
@click.option("--model", help="The base model.  [default: what the run or the adapter names]")
@click.option("--trust-remote-code", metavar="COMMIT", help="Run the model's own code, as of this commit.  [default: run none]")
def ask(
    folder: Path,
    prompt: str,
    without: bool,
    system: str | None,
    max_new_tokens: int,
    chat: bool | None,
    model: str | None,
    trust_remote_code: str | None,
) -> None:
    """Answer PROMPT with an adapter, by greedy decoding.

    RUN is a run directory, one of its tasks, any PEFT adapter, or a merged export. PROMPT is a text, or - to read it from stdin.
    The answer streams to stdout and ends where a server would stop.
    """
    from anchorlora.adapters.files import read_adapter
    from anchorlora.models.load import template_note, tokenizer_of
    from anchorlora.models.session import Session
    from anchorlora.models.trust import asked_for
    from anchorlora.store.artifact import artifact_in

    text = _prompt_text(prompt)
    artifact = artifact_in(folder)
    adapter = None if artifact.kind == "model" else artifact.adapter
    if adapter is None and without:
        raise InvalidValue(f"--without leaves out the adapter, and {folder} holds a model's full weights; leave out --without")
    settings = asked_for(artifact.base_model(model), trust_remote_code, where=artifact.named_in(model))
    if settings.model is None:
        raise InvalidValue(f"{artifact.named_in(model)} names no base model; give it with --model")
    if adapter is not None:
        read_adapter(adapter, beside={})
    tokenizer = tokenizer_of(settings, adapter=adapter)
    sample = _left_example(artifact) if chat is None or (chat and system is None) else None
    form = _form(artifact, sample, tokenizer, chat=chat)
    ids = _prompt_ids(text, system, form, tokenizer)
    if form == "chat" and system is None and (missing := _system_note(sample)):
        err.print(missing)
    longest = _room(len(ids), max_new_tokens, settings)
    if note := template_note(settings, tokenizer, adapter):
        err.print(note)
    hide_loading()
    err.print(f"loading {settings.model} ...")
    session = Session(settings, adapter=adapter)
    adapted = session.loaded.model if adapter is None else session.adapted(adapter)
    if without:
        print("with the adapter:", flush=True)
    _answer(session.loaded, adapted, ids, longest=longest, asked=max_new_tokens)
    if without:
        print("\nwithout the adapter:", flush=True)
        _answer(session.loaded, session.bare().model, ids, longest=longest, asked=max_new_tokens)


def _answer(loaded: LoadedModel, adapted: Any, ids: list[int], *, longest: int, asked: int) -> None:
    """Print the answer to a prompt as it is generated, and say so if it is cut off."""
    from anchorlora.data.templates import stop_ids
    from anchorlora.models.load import ends_of

    stops = stop_ids(loaded.tokenizer, ends_of(loaded.model))
    inputs = loaded.tokenizer.pad({"input_ids": [ids]}, padding=False, return_tensors="pt").to(loaded.device)
    tokens = adapted.generate(**inputs, max_new_tokens=longest, streamer=printing(loaded.tokenizer, stops))[0].tolist()
    if not str(loaded.tokenizer.decode(tokens[len(ids) :], skip_special_tokens=True)).strip():
        err.print("(the answer is empty)")
    if tokens[-1] not in stops:
        err.print(f"(cut after {amount(longest, 'token')}{'; --max-new-tokens N allows more' if longest == asked else ''})")


def printing(tokenizer: Any, stops: Collection[int]) -> TextStreamer:
    """Return the streamer that prints tokens as they come; special ones only where they alone end a thought."""
    from transformers import TextStreamer

    from anchorlora.data.thoughts import end_of_thought

    class Printed(TextStreamer):
        def put(self, value: Any) -> None:
            super().put(value if self.next_tokens_are_prompt else value[[int(token) not in stops for token in value]])

        def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
            print(shown(text), end="\n" if stream_end else "", flush=True)

    hidden = not end_of_thought(tokenizer, str(tokenizer.chat_template))
    return Printed(tokenizer, skip_prompt=True, skip_special_tokens=hidden)


def _prompt_text(prompt: str) -> str:
    """The prompt; one from stdin loses its byte order mark and the line break at its end."""
    from anchorlora.data.samples import is_unicode

    text = sys.stdin.read().removeprefix("\ufeff").removesuffix("\n") if prompt == STDIN else prompt
    if not text.strip():
        raise InvalidValue("the prompt is empty; give a text, or - and the text on stdin")
    if not is_unicode(text):
        raise InvalidValue("the prompt holds bytes that are not UTF-8; give Unicode text")
    return text


def _form(artifact: Artifact, sample: Sample | None, tokenizer: Any, *, chat: bool | None) -> Form:
    """How a prompt is given to the model: as asked for, or as the examples of a run are, or as a chat if there is a template."""
    if chat and not tokenizer.chat_template:
        raise InvalidValue("--chat needs a chat template, and the tokenizer has none; give the prompt as it stands with --plain")
    if chat is not None:
        return "chat" if chat else "plain"
    form = _form_of_examples(artifact, sample) or "chat"
    if tokenizer.chat_template:
        return "plain" if form == "plain" else "chat"
    return "instruction" if form == "instruction" else "plain"


def _form_of_examples(artifact: Artifact, sample: Sample | None) -> Form | None:
    """The form of a run's examples, from what a skill has left, else from the run's data; None if neither tells."""
    from anchorlora.data.sources import source_of

    if artifact.run is None or artifact.config is None or artifact.task is None:
        return None
    if sample is not None:
        return "plain" if isinstance(sample.content, str) else "instruction" if sample.plain else "chat"
    try:
        example = next(iter(source_of(artifact.config.recipe.tasks).examples(artifact.task, "test")))
    except (OSError, InvalidValue):  # the run's data is elsewhere now
        return None
    return "plain" if example.reply is None else "chat"


def _left_example(artifact: Artifact) -> Sample | None:
    """The first example that a skill has left; None where nothing was left."""
    from anchorlora.data import samples_of

    left = None if artifact.run is None else artifact.run.skill / "after/probes" / f"{artifact.task}.jsonl"
    if left is None or not left.is_file():
        return None
    line = left.read_text(encoding="utf-8").partition("\n")[0]
    return samples_of([(f"{left}, line 1", loads(line))], source=str(left))[0]


def _system_note(sample: Sample | None) -> str | None:
    """A sentence where the first example of a run has a system message, which a prompt does not get by itself."""
    first = sample.content[0] if sample and not isinstance(sample.content, str) else {}
    if first.get("role") != "system":
        return None
    return f"the run's examples have a system message, and this prompt has none; --system TEXT gives one: {first['content']!r:.100}"


def _prompt_ids(text: str, system: str | None, form: Form, tokenizer: Any) -> list[int]:
    """The tokens that a server would give the model."""
    from anchorlora.data import Encoder, Sample, chat_ids
    from anchorlora.data.forms.known import WITHOUT_INPUT

    if form == "chat":
        before = () if system is None else ({"role": "system", "content": system},)
        return chat_ids(Sample("the prompt", (*before, {"role": "user", "content": text})), tokenizer, answering=True)
    if system is not None:
        raise InvalidValue("--system needs a chat, and this prompt is given as it stands; write it into the prompt, or add --chat")
    text = WITHOUT_INPUT.format(instruction=text) if form == "instruction" else text
    return list(Encoder(tokenizer, max_tokens=sys.maxsize).prompt(text))


def _room(prompt: int, asked: int, settings: BaseModelSettings) -> int:
    """How many tokens an answer may have: as many as asked for, within what the model can read."""
    from anchorlora.models.load import empty_model

    width = getattr(empty_model(settings).config.get_text_config(), "max_position_embeddings", None)
    if width and prompt >= width:
        raise InvalidValue(f"the prompt takes {prompt} tokens, and {settings.model} reads at most {width}; shorten it")
    return min(asked, width - prompt) if width else asked
