"""The law of forms: whatever form a chat is written in, its tokens and labels are the same, and nothing of a row goes unsaid."""

import json

from hypothesis import given, settings
from hypothesis import strategies as st

from anchorlora.data import Encoder, TextTask, examples_of, samples_of
from anchorlora.data.rows import row_of
from anchorlora.errors import InvalidValue
from text_law import oracle

WORDS = st.text(alphabet=st.sampled_from("ab 2+?.,\n你好é🙂{'\""), min_size=1, max_size=12).filter(str.strip)
SPEAKER = {"system": "system", "user": "human", "assistant": "gpt"}
PAIRS = [("instruction", "output"), ("input", "output"), ("question", "answer"), ("question", "response"), ("prompt", "response")]
CANARY = "zq7"


@st.composite
def chats(draw):
    """Messages of a chat, and the places of the assistant's that are not learned; the last one always is."""
    messages = [{"role": "system", "content": draw(WORDS)}] if draw(st.booleans()) else []
    for _ in range(draw(st.integers(1, 3))):
        messages += [{"role": "user", "content": draw(WORDS)}, {"role": "assistant", "content": draw(WORDS)}]
    said = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    return messages, draw(st.sets(st.sampled_from(said[:-1]))) if said[:-1] else set()


def forms_of(messages, muted=frozenset()):
    """(row, the places of the messages that it teaches) in every form that can hold a chat."""
    learned = [i for i, message in enumerate(messages) if message["role"] == "assistant" and i not in muted]
    marks = [{"train": False, "weight": None} if i % 4 else {"weight": 0} for i in range(len(messages))]
    marked = [message | (marks[i] if i in muted else {}) for i, message in enumerate(messages)]
    turns = [{"from": SPEAKER[m["role"]], "value": m["content"], **{k: v for k, v in m.items() if k in marks[1]}} for m in marked]
    yield {"messages": marked}, learned
    yield {"conversations": turns}, learned
    yield {"conversations": marked}, learned
    yield {"prompt": marked[:-1], "completion": marked[-1:]}, learned[-1:]
    yield {"question": marked[:-1], "answer": marked[-1:]}, learned[-1:]
    system = {"system": messages[0]["content"]} if messages[0]["role"] == "system" else {}
    if system:
        yield {"conversations": turns[1:], **system}, learned
    texts = [message["content"] for message in messages[len(system) :]]
    if not muted:
        history = list(zip(texts[:-2:2], texts[1:-2:2], strict=True))
        yield {"instruction": texts[-2], "input": "", "output": texts[-1], "history": history, **system}, learned
    if len(texts) == 2:
        for asks, says in PAIRS:
            yield {asks: texts[0], says: texts[1], **system}, learned


def encoded(rows, tokenizer, **read):
    samples = samples_of([(f"row {i}", row) for i, row in enumerate(rows, 1)], source="d", **read)
    return list(TextTask("t").encoded(Encoder(tokenizer, max_tokens=4000), examples_of(samples)))


def encoded_or_refused(row, tokenizer):
    try:
        return encoded([row], tokenizer), ""
    except InvalidValue as refused:
        return [], str(refused)


def one_chat_is_the_same_in_every_form(tokenizer, count=25):
    @settings(max_examples=count, deadline=None, database=None)
    @given(chats())
    def law(chat):
        messages, muted = chat
        whole = tokenizer.apply_chat_template(messages, tokenize=True, return_dict=True)["input_ids"]
        for row, learned in forms_of(messages, muted):
            turns = encoded([row], tokenizer)
            right = [oracle.turn(tokenizer, messages, i) for i in learned]
            assert [(list(e.prompt), list(e.answer)) for e in turns] == right, row
            last = [*turns[-1].prompt, *turns[-1].answer]
            assert whole[: len(last)] == last
            assert not tokenizer.decode(whole[len(last) :]).strip(), "nothing but white space stands behind the last answer"
            (sample,) = samples_of([("row", row)], source="d")
            again = encoded([json.loads(json.dumps(row_of(sample)))], tokenizer)
            assert [(e.prompt, e.answer) for e in again] == [(e.prompt, e.answer) for e in turns], "as a kept row it is the same"

    law()


def nothing_of_a_row_goes_unsaid(tokenizer, count=150):
    values = st.sampled_from([CANARY, True, False, [CANARY], [{"role": "user", "content": CANARY}], {"inner": CANARY}])
    names = st.sampled_from(
        ["context", "system", "text", "input", "history", "tools", "messages", "accepted", "rejected", "name", "tool_calls", "loss"]
    )

    @settings(max_examples=count, deadline=None, database=None)
    @given(chats(), st.data())
    def law(chat, draw):
        messages, muted = chat
        row, _ = draw.draw(st.sampled_from(list(forms_of(messages, muted))))
        name, value = draw.draw(names), draw.draw(values)
        inside = [key for key in ("messages", "conversations") if key in row]
        if inside and draw.draw(st.booleans()):
            turns = row[inside[0]]
            i = draw.draw(st.integers(0, len(turns) - 1))
            row = row | {inside[0]: [*turns[:i], {**turns[i], name: value}, *turns[i + 1 :]]}
        elif not row.get(name):
            row = {**row, name: value}
        turns, refusal = encoded_or_refused(row, tokenizer)
        if refusal:
            assert name in refusal, (row, refusal)
        elif CANARY in json.dumps(value) and CANARY in json.dumps(row):
            assert any(CANARY in tokenizer.decode(e.prompt + e.answer) for e in turns), row
        else:
            assert name not in row or row[name] != value, row

    law()
