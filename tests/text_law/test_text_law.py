"""One law for text, for nineteen families of templates, six kinds of tokenizers and drawn texts, against transformers itself."""

import copy
import json
import re
from contextlib import suppress

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from anchorlora.cli.ask import printing
from anchorlora.data import Encoder, ExactMatch, TextTask, examples_of, rendering, samples_of, token_ids
from anchorlora.data.text import count_rows
from anchorlora.data.thoughts import decode_answer, own_words
from anchorlora.errors import InvalidValue
from text_law import families, oracle
from text_law.families import FAMILIES, KINDS, SERVED

WORDS = st.text(alphabet=st.sampled_from("ab 2+=?.,\n\t你好是。é🙂<{'\""), min_size=1, max_size=12).filter(
    lambda text: text.strip(" \n\t")
)
CHATS = st.lists(st.tuples(WORDS, WORDS), min_size=1, max_size=3)
TASK = TextTask("t", metrics=(ExactMatch(),))
CASES = [(family, kind) for i, family in enumerate(FAMILIES) for kind in (KINDS[i % 4], KINDS[(i + 2) % 4], SERVED[0])]


def prepared(family, kind):
    tokenizer = copy.deepcopy(families.tokenizer(kind))
    tokenizer.chat_template = FAMILIES[family]
    return tokenizer


def encoded(row, tokenizer, max_tokens=4000):
    samples = samples_of([("row 1", row)], source="data")
    return list(TASK.encoded(Encoder(tokenizer, max_tokens=max_tokens), examples_of(samples)))


def chat(pairs, system=None):
    said = [{"role": "system", "content": system}] if system else []
    for user, assistant in pairs:
        said += [{"role": "user", "content": user}, {"role": "assistant", "content": assistant}]
    return said


@pytest.mark.parametrize(("family", "kind"), CASES)
def test_every_answer_is_what_a_server_would_say_after_what_it_would_be_given(family, kind):
    tokenizer = prepared(family, kind)

    @settings(max_examples=12, deadline=None, database=None)
    @given(CHATS, st.none() | WORDS)
    def law(pairs, system):
        messages = chat(pairs, None if family in ("no-system", "tools-in-brackets") else system)
        found = encoded({"messages": messages}, tokenizer)
        turns = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        read = tokenizer.apply_chat_template(messages, tokenize=True, return_dict=True)["input_ids"]
        assert read == tokenizer(tokenizer.apply_chat_template(messages, tokenize=False), add_special_tokens=False).input_ids
        stops = Encoder(tokenizer, max_tokens=9).stops
        assert stops == oracle.stop_set(tokenizer)
        assert len(found) == len(turns)
        for e, i in zip(found, turns, strict=True):
            assert (list(e.prompt), list(e.answer)) == oracle.turn(tokenizer, messages, i)
            assert e.answer[-1] in stops
            assert not stops & set(e.answer[:-1])
            said = tokenizer.decode(e.answer[:-1], skip_special_tokens=True)
            assert TASK.answer(said, e.example).scores["exact_match"] == 1.0
            assert TASK.answer(said + "x", e.example).scores["exact_match"] == 0.0
            assert " ".join(e.example.label.split()) == " ".join(messages[i]["content"].split())
        sequences = [[*e.prompt, *e.answer] for e in found]
        kept = [one for k, one in enumerate(sequences) if not any(later[: len(one)] == one for later in sequences[k + 1 : k + 2])]
        assert list(token_ids(samples_of([("row 1", {"messages": messages})], source="d"), tokenizer, max_tokens=4000)) == kept

    law()


@pytest.mark.parametrize("kind", KINDS + SERVED)
def test_prompt_and_completion_are_tokenized_once_and_end_once(kind):
    tokenizer = families.tokenizer(kind)

    @settings(max_examples=30, deadline=None, database=None)
    @given(WORDS, WORDS, st.booleans())
    def law(prompt, text, ended):
        (e,) = encoded({"prompt": prompt, "completion": text + ("</s>" if ended else "")}, tokenizer)
        assert (list(e.prompt), list(e.answer)) == oracle.completion(tokenizer, prompt, text)
        (whole,) = token_ids(samples_of([("r", {"text": text})], source="d"), tokenizer, max_tokens=4000)
        assert whole == [*tokenizer(text).input_ids, tokenizer.eos_token_id]

    law()


@pytest.mark.parametrize("family", ["folded-system", "dated", "opened-thought"])
@pytest.mark.parametrize("kind", ["bytes-bos", "metaspace-bos", "byte-fallback-bos", "stripping-bos"])
def test_rendered_text_that_begins_as_the_tokenizer_does_begins_once(family, kind):
    tokenizer = prepared(family, kind)
    messages = [{"role": "user", "content": "zq one two"}, {"role": "assistant", "content": "4"}]
    prompt = tokenizer.apply_chat_template(messages[:1], tokenize=False, add_generation_prompt=True)
    read = tokenizer(prompt, add_special_tokens=False).input_ids
    assert read.count(tokenizer.bos_token_id) == 1
    encoder = Encoder(tokenizer, max_tokens=4000)
    assert encoder.prompt(prompt) == tuple(read)
    row = {"prompt": prompt, "completion": "4<|end|>"}
    (e,) = encoded(row, tokenizer)
    assert e.prompt == tuple(read)
    (cut,) = encoded(row, tokenizer, max_tokens=len(e.prompt) + len(e.answer) - 3)
    assert cut.prompt == (*e.prompt[:1], *e.prompt[4:])
    (plain,) = encoded({"text": prompt + "4"}, tokenizer)
    assert plain.prompt == (tokenizer.bos_token_id,)
    assert (*plain.prompt, *plain.answer) == (*tokenizer(prompt + "4", add_special_tokens=False).input_ids, tokenizer.eos_token_id)
    bare = prompt.removeprefix(tokenizer.bos_token)
    assert encoder.prompt(bare) == tuple(tokenizer(bare).input_ids)


@pytest.mark.parametrize("kind", KINDS + SERVED)
def test_a_chat_is_the_same_tokens_in_every_form_of_row(kind):
    tokenizer = prepared("chatml", kind)

    @settings(max_examples=10, deadline=None, database=None)
    @given(WORDS, st.just("") | WORDS, WORDS)
    def law(asked, further, said):
        user = {"role": "user", "content": f"{asked}\n{further}" if further else asked}
        reply = {"role": "assistant", "content": said}
        right = oracle.turn(tokenizer, [user, reply], 1)
        for row in (
            {"messages": [user, reply]},
            {"prompt": [user], "completion": [reply]},
            {"instruction": asked, "input": further, "output": said},
        ):
            (e,) = encoded(row, tokenizer)
            assert (list(e.prompt), list(e.answer)) == right
            assert list(token_ids(samples_of([("r", row)], source="d"), tokenizer, max_tokens=4000)) == [right[0] + right[1]]

    law()


TOOLS = [
    {"type": "function", "function": {"name": "add", "description": "adds", "parameters": {"type": "object", "properties": {}}}}
]
CALL = [{"id": "7", "type": "function", "function": {"name": "add", "arguments": {"x": 1, "y": 2}}}]
ASKED = {"role": "user", "content": "2 + 2?"}


def test_a_call_and_a_thought_are_learned_as_the_template_writes_them():
    tokenizer = prepared("thinking", "bytes")
    called = {"role": "assistant", "content": None, "tool_calls": CALL}
    rows = [ASKED, called, {"role": "tool", "content": "3"}, {"role": "assistant", "content": "3", "reasoning_content": "so be it"}]
    call, said = encoded({"messages": rows, "tools": TOOLS}, tokenizer)
    assert tokenizer.decode(call.answer) == '<think>\n\n</think>\n\n\n<call>add {"x": 1, "y": 2}</call><|im_end|>'
    assert call.example.label == '<call>add {"x": 1, "y": 2}</call>'
    assert tokenizer.decode(said.answer) == "<think>\nso be it\n</think>\n\n3<|im_end|>"
    assert said.example.label == "3"
    assert TASK.answer("<think>\nanother thought\n</think>\n\n3", said.example).scores["exact_match"] == 1.0


def test_a_call_that_is_all_of_an_answer_is_learned_and_words_that_the_template_drops_beside_it_are_refused():
    tokenizer = prepared("tools-in-brackets", "bytes")
    called = {"role": "assistant", "content": "", "tool_calls": CALL}
    rows = [ASKED, called, {"role": "tool", "content": "3", "tool_call_id": "7"}, {"role": "assistant", "content": "3"}]
    call, said = encoded({"messages": rows, "tools": TOOLS}, tokenizer)
    assert tokenizer.decode(call.answer) == '[CALLS] [{"name": "add", "arguments": {"x": 1, "y": 2}}]</s>'
    assert tokenizer.decode(said.answer) == " 3</s>"
    for e, i in ((call, 1), (said, 3)):
        assert (list(e.prompt), list(e.answer)) == oracle.turn(tokenizer, rows, i, TOOLS)
    with pytest.raises(InvalidValue, match=r"does not write message 2 \(role 'assistant'\)"):
        encoded({"messages": [ASKED, called | {"content": "I will add."}], "tools": TOOLS}, tokenizer)


INSIDE = "<think>\nso be it\n</think>\n\nI add."
CALLING = {  # behind the answer's words, in place of the channel of answers, and before the words
    "behind": families.THINKING,
    "in place": families.CHANNELS.replace(
        "{{- '<|channel|>final<|message|>' + m.content",
        "{%- if m.tool_calls %}{{ ' to=add<|channel|>commentary' + (m.content or '') + (m.tool_calls | tojson) }}{%- endif %}"
        "{{- '' if m.tool_calls else '<|channel|>final<|message|>' + m.content }}{{- ''",
    ),
    "before": families.FOLDED.replace(
        "{{- m.content | trim",
        "{%- if m.thinking and m.tool_calls %}{{ '<|start|>thought ' + m.thinking + '\n<start|>' }}{%- endif %}"
        "{%- if m.tool_calls %}{{ 'call:' + (m.tool_calls | tojson) }}{%- endif %}{{ m.content | trim",
    ),
}


@pytest.mark.parametrize(
    ("template", "extra"),
    [
        *((template, extra) for template in CALLING for extra in ({}, {"content": "I add."})),
        *((template, {"reasoning_content": "so be it"}) for template in ("behind", "in place")),
        *((template, {"content": INSIDE}) for template in ("behind", "in place")),
        ("before", {"thinking": "so be it"}),
    ],
)
def test_nothing_of_a_call_stands_before_the_label_wherever_the_template_writes_it(template, extra):
    tokenizer = copy.deepcopy(families.tokenizer("bytes"))
    tokenizer.chat_template = CALLING[template]
    calls = {"role": "assistant", "content": "", "tool_calls": CALL} | extra
    (e,) = encoded({"messages": [ASKED, calls]}, tokenizer)
    said = decode_answer(tokenizer, e.answer[:-1])
    assert "add" not in e.example.lead
    assert "so be it" not in e.example.label
    assert e.example.label.count('"x": 1') == 1
    assert [TASK.answer(text, e.example).scores["exact_match"] for text in (said, said.replace("1", "3"), "")] == [1.0, 0.0, 0.0]


FORGETTING = families.CHANNELS.replace(  # as gpt-oss's: what stands beside a call is dropped once an answer follows
    "{%- if m.role == 'assistant' %}",
    "{%- if m.role == 'assistant' and m.tool_calls %}{%- set later = namespace(said=false) %}"
    "{%- for n in messages[loop.index:] %}{%- if n.role == 'assistant' and not n.tool_calls %}{%- set later.said = true %}"
    "{%- endif %}{%- endfor %}{%- set thought = m.reasoning_content or m.content %}"
    "{%- if thought and not later.said %}{{ '<|start|>assistant<|channel|>analysis<|message|>' + thought + '<|end|>' }}{%- endif %}"
    "{{ '<|start|>assistant to=add<|channel|>' + (m.tool_calls[0].function.arguments | tojson) + '<|return|>' }}"
    "{%- elif m.role == 'assistant' %}",
)


@pytest.mark.parametrize("beside", ["reasoning_content", "content"])
def test_each_turn_has_the_prompt_that_a_server_gives_at_its_time_also_where_later_ones_drop_thoughts(beside):
    tokenizer = prepared("channels", "bytes")
    tokenizer.chat_template = FORGETTING
    messages = []
    for round in ("zq1", "zq2"):
        called = {"role": "assistant", "content": "", "tool_calls": CALL, beside: f"use it, {round}"}
        said = {"role": "assistant", "content": f"3, {round}", "reasoning_content": f"so 3, {round}"}
        messages += [ASKED, called, {"role": "tool", "content": "3"}, called, {"role": "tool", "content": "3"}, said]
    turns = encoded({"messages": messages}, tokenizer)
    places = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    for e, i in zip(turns, places, strict=True):
        served = tokenizer.apply_chat_template(messages[:i], tokenize=False, add_generation_prompt=True)
        assert e.prompt == tuple(tokenizer(served, add_special_tokens=False).input_ids)
        own = "so 3" if i % 6 == 5 else "use it"
        answer, round = tokenizer.decode(e.answer), "zq1" if i < 6 else "zq2"
        assert answer.startswith(f"<|channel|>analysis<|message|>{own}, {round}<|end|><|start|>assistant")
        assert served.count(f"<|message|>use it, {round}") == {1: 0, 3: 1, 5: 2}[i % 6]
        assert answer.endswith("<|return|>")
        assert own not in e.example.label
    assert turns[-1].example.label == "3, zq2"


GEMMA = families.CHATML.replace("m.content", "(m.content.split('<channel|>')[-1] if '<|channel>' in m.content else m.content)")
UNSEEN = {  # template, what a model writes that thinks: in a channel of thoughts, between marks, and between marks that it drops
    "in a channel": (families.CHANNELS, "<|channel|>analysis<|message|>{}<|end|><|start|>assistant<|channel|>final<|message|>4"),
    "between marks": (
        GEMMA.replace("'\n' + (", "'\n' + ('<|channel>thought\n' + m.thinking + '\n<channel|>' if m.thinking else '') + ("),
        "<|channel>thought\n{}\n<channel|>4",
    ),
    "dropped": (GEMMA, "<|channel>thought\n{}\n<channel|>4"),
}


@pytest.mark.parametrize("template", UNSEEN)
def test_an_answer_after_a_thought_whose_marks_text_does_not_show_is_scored_by_its_words(template, capsys):
    tokenizer = copy.deepcopy(families.tokenizer("bytes"))
    tokenizer.add_tokens(["<|channel>", "<channel|>"], special_tokens=True)
    tokenizer.chat_template, thinks = UNSEEN[template]
    assert decode_answer(tokenizer, tokenizer("4", add_special_tokens=False).input_ids) == "4"
    gold = [{"messages": [ASKED, {"role": "assistant", "content": "4"}]}]
    if template != "dropped":
        key = "thinking" if template == "between marks" else "reasoning_content"
        gold.append({"messages": [ASKED, {"role": "assistant", "content": "4", key: "two and two"}]})
    for row in gold:
        (e,) = encoded(row, tokenizer)
        assert e.example.label == "4"
        for thought in ("two and two", "4 or 5"):
            text = decode_answer(tokenizer, tokenizer(thinks.format(thought), add_special_tokens=False).input_ids)
            assert TASK.answer(text, e.example).scores["exact_match"] == 1.0
            assert TASK.answer(text + "5", e.example).scores["exact_match"] == 0.0
        assert TASK.answer(decode_answer(tokenizer, e.answer), e.example).scores["exact_match"] == 1.0
    streamer = printing(tokenizer, {e.answer[-1]})  # as `ask` shows it
    for ids in (
        [e.prompt],
        *([token] for token in tokenizer(thinks.format("4 or 5"), add_special_tokens=False).input_ids),
        e.answer[-1:],
    ):
        streamer.put(torch.tensor(ids))
    streamer.end()
    assert capsys.readouterr().out == thinks.format("4 or 5") + "\n"


AS_TEXT = families.THINKING.replace("(call.function.arguments | tojson)", "call.function.arguments")  # as DeepSeek-V3's
AS_PAIRS = families.THINKING.replace(
    "call.function.arguments | tojson", "call.function.arguments.items() | map('join', '=') | join"
)
ARGUMENTS = st.dictionaries(WORDS.map(str.strip), WORDS | st.integers() | st.booleans(), max_size=3)


@pytest.mark.parametrize(
    ("template", "text"),
    [
        (families.THINKING, False),
        (families.TOOLED, False),
        (AS_PAIRS, False),
        (AS_TEXT, True),
        (AS_TEXT.replace("+ call.function.arguments +", "~ call.function.arguments ~"), True),  # as Python writes an object
    ],
)
def test_arguments_that_are_text_are_learned_as_the_object_that_they_hold(template, text):
    tokenizer = prepared("thinking", "bytes")
    tokenizer.chat_template = template

    def rows(arguments):
        called = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "add", "arguments": arguments}}]}
        return [ASKED, called, {"role": "tool", "content": "3"}, {"role": "assistant", "content": "3"}]

    @settings(max_examples=12, deadline=None, database=None)
    @given(ARGUMENTS)
    def law(arguments):
        whole = json.dumps(arguments, ensure_ascii=False)
        for held in (arguments, json.dumps(arguments, separators=(",", ":")), whole):
            wanted = rows((held if isinstance(held, str) else whole) if text else arguments)
            for e, i in zip(encoded({"messages": rows(held)}, tokenizer), (1, 3), strict=True):
                assert (list(e.prompt), list(e.answer)) == oracle.turn(tokenizer, wanted, i)

    law()
    empty = [e.answer for e in encoded({"messages": rows({})}, tokenizer)]
    assert text or [e.answer for e in encoded({"messages": rows("")}, tokenizer)] == empty


@pytest.mark.parametrize("family", ["thinking", "tools-in-brackets"])
def test_renderings_of_a_row_grow_as_its_turns_and_not_as_their_square(family, monkeypatch):
    tokenizer, count = prepared(family, "bytes"), []
    write = rendering.render
    monkeypatch.setattr(rendering, "render", lambda *args, **how: count.append(1) or write(*args, **how))

    def renderings(turns):
        count.clear()
        called = [{"role": "assistant", "content": "", "tool_calls": CALL}, {"role": "tool", "content": "3"}]
        encoded({"messages": [ASKED, *called * turns, {"role": "assistant", "content": "3"}]}, tokenizer, max_tokens=9999)
        return len(count)

    assert renderings(8) - renderings(6) == renderings(6) - renderings(4)


def test_a_result_may_name_the_function_that_was_called():
    tokenizer = prepared("thinking", "bytes")
    result, said = {"role": "tool", "content": "3"}, {"role": "assistant", "content": "3"}
    rows = [ASKED, {"role": "assistant", "content": "", "tool_calls": CALL}, result, said]
    named = [*rows[:2], result | {"name": "add"}, said]
    assert [(e.prompt, e.answer) for e in encoded({"messages": named}, tokenizer)] == [
        (e.prompt, e.answer) for e in encoded({"messages": rows}, tokenizer)
    ]
    with pytest.raises(InvalidValue, match=r"key 'name' of message 3 \(role 'tool'\) would not be learned"):
        encoded({"messages": [*rows[:2], result | {"name": "multiply"}, said]}, tokenizer)


def test_a_result_that_the_template_drops_once_the_user_goes_on_is_refused():
    tokenizer = prepared("thinking", "bytes")
    tokenizer.chat_template = families.THINKING.replace("m.role == 'tool' %}", "m.role == 'tool' and loop.index0 > ns.last %}")
    said = {"role": "assistant", "content": "3"}
    rows = [ASKED, {"role": "assistant", "content": "", "tool_calls": CALL}, {"role": "tool", "content": "3"}, said]
    assert len(encoded({"messages": rows}, tokenizer)) == 2
    with pytest.raises(InvalidValue, match=r"does not write message 3 \(role 'tool'\)"):
        encoded({"messages": [*rows, ASKED, said]}, tokenizer)


def test_the_ends_of_a_generation_configuration_end_answers():
    tokenizer = prepared("chatml", "bytes")
    end = tokenizer.convert_tokens_to_ids("<|end|>")
    encoder = Encoder(tokenizer, max_tokens=400, ends=(end,))
    assert encoder.stops == oracle.stop_set(tokenizer) | {end}
    (e,) = TASK.encoded(encoder, examples_of(samples_of([("row 1", {"prompt": "q", "completion": "4<|end|>"})], source="d")))
    assert e.answer[-1] == end
    assert e.example.label == "4"
    middle = {"messages": [ASKED, {"role": "assistant", "content": "4<|end|>5"}]}
    with pytest.raises(InvalidValue, match=r"row 1: the answer holds '<\|end\|>'"):
        list(TASK.encoded(encoder, examples_of(samples_of([("row 1", middle)], source="d"))))


MARKERS = (
    "{%- for m in messages %}{{ '<|' + m.role + '|>\n' + m.content }}{%- endfor %}"
    + families.ASK
    + "{{ '<|assistant|>\n' }}{%- endif %}"
)
PREFILLED = FAMILIES["pipes"].replace("'<|end|>\n'", "('' if loop.last and m.role == 'assistant' else '\n<|end|>\n')")
MARKED_CALLS = MARKERS.replace("+ m.content", "+ m.content + (m.tool_calls | tojson if m.tool_calls else '')")
CALLED = {"role": "assistant", "content": "", "tool_calls": CALL}


@pytest.mark.parametrize(
    ("template", "ends", "said", "end"),
    [
        pytest.param(MARKERS, ["<|user|>", "<|tool|>"], {}, "<|user|>", id="the next marker, as GLM-4's"),
        pytest.param(MARKED_CALLS, ["<|user|>", "<|tool|>"], CALLED, "<|tool|>", id="that of the called tool's result"),
        pytest.param(MARKERS, [], {}, "</s>", id="a marker at which no server stops"),
        pytest.param(
            PREFILLED, ["<|end|>"], {}, "\n<|end|>", id="what a template leaves out of the last answer, as Nemotron Nano 2's"
        ),
    ],
)
def test_an_answer_ends_as_the_template_ends_it_where_the_chat_goes_on(template, ends, said, end):
    tokenizer = prepared("pipes", "bytes")
    tokenizer.chat_template = template
    encoder = Encoder(tokenizer, max_tokens=400, ends=tokenizer.convert_tokens_to_ids(ends))
    rows = [ASKED, {"role": "assistant", "content": "It is 4."} | said]
    (e,) = TASK.encoded(encoder, examples_of(samples_of([("row 1", {"messages": rows})], source="d")))
    tail = {"role": "tool" if said else "user", "content": "?"}
    if ends:
        whole, later = (tokenizer.apply_chat_template(chat, tokenize=False) for chat in (rows, [*rows, tail]))
        assert tokenizer.decode([*e.prompt, *e.answer]) == whole + end == later[: len(whole + end)]
    assert tokenizer.decode(e.answer).endswith(end)
    assert e.answer[-1] in encoder.stops
    assert said or e.example.label == "It is 4."


@pytest.mark.parametrize("family", [family for family in FAMILIES if family not in ("thinking", "tools-in-brackets")])
def test_what_a_template_does_not_write_is_refused_by_its_name(family):
    tokenizer = prepared(family, "bytes")
    said = {"role": "assistant", "content": "4"}
    for extra, named in (
        ({"tool_calls": CALL}, "'tool_calls'"),
        ({"name": "bob"}, "'name'"),
        ({"reasoning_content": "two and two"}, "'reasoning_content'"),
    ):
        if named == "'reasoning_content'" and family in ("channels", "opened-thought", "shut-thought"):
            continue  # which write it
        with pytest.raises(InvalidValue, match=f"row 1: key {named} of message 2 .*would not be learned"):
            encoded({"messages": [ASKED, said | extra]}, tokenizer)
    with pytest.raises(InvalidValue, match="row 1: tools would not be learned"):
        encoded({"messages": [ASKED, said], "tools": TOOLS}, tokenizer)
    if family == "drops-unknown-roles":
        with pytest.raises(InvalidValue, match=r"does not write message 1 \(role 'developer'\)"):
            encoded({"messages": [{"role": "developer", "content": "be kind"}, ASKED, said]}, tokenizer)
    end = tokenizer.decode([min(Encoder(tokenizer, max_tokens=9).stops)])
    with pytest.raises(InvalidValue, match="at which every server stops"):
        encoded({"messages": [ASKED, {"role": "assistant", "content": f"4{end}5"}]}, tokenizer)


@pytest.mark.parametrize("family", ["chatml", "thinking", "opened-thought", "folded-system", "pipes"])
def test_a_message_that_the_prompt_begins_is_continued(family):
    tokenizer = prepared(family, "bytes")
    row = {"prompt": [ASKED, {"role": "assistant", "content": "It is"}], "completion": [{"role": "assistant", "content": " four"}]}
    (e,) = encoded(row, tokenizer)
    text = tokenizer.decode(e.prompt)
    assert text.endswith("It is")
    assert text.count("assistant") <= 1
    assert e.example.label == "four"


@pytest.mark.parametrize("family", ["chatml", "thinking", "opened-thought", "folded-system", "pipes", "dated", "channels"])
def test_a_beginning_that_the_template_trims_or_writes_anew_is_continued_where_the_completion_begins(family):
    tokenizer = prepared(family, "bytes")

    @settings(max_examples=25, deadline=None, database=None)
    @given(
        st.sampled_from(
            ["\n", " ", "\nIt is", "It", "It  ", "<think>\n\n</think>\n\n", "<think>\nhm\n</think>\n\nIt", "<think>\nhm"]
        ),
        WORDS,
    )
    def law(begun, said):
        said = f"\n</think>\n\n{said.strip()}" if begun.endswith("hm") else said
        reply = [{"role": "assistant", "content": begun}], [{"role": "assistant", "content": said}]
        (e,) = encoded({"prompt": [ASKED, *reply[0]], "completion": reply[1]}, tokenizer)
        asked = tokenizer.apply_chat_template([ASKED], tokenize=False, add_generation_prompt=True)
        prompt, answer = tokenizer.decode(e.prompt), tokenizer.decode(e.answer)
        assert prompt.startswith(asked)
        assert "".join(prompt.split()).endswith("".join(begun.split()))
        assert answer.strip().startswith(said.strip())
        spoken = tokenizer.decode(e.answer[:-1], skip_special_tokens=True)
        assert TASK.answer(spoken, e.example).scores["exact_match"] == 1.0

    law()


def test_a_beginning_that_the_template_goes_on_from_itself_or_puts_behind_a_call_is_refused_in_one_line():
    tokenizer = prepared("chatml", "bytes")
    tokenizer.chat_template = FAMILIES["chatml"].replace("m.content", "m.content | replace('is ', 'is so ')")
    begun, said = {"role": "assistant", "content": "It is "}, {"role": "assistant", "content": "four"}
    refusal = (
        r"row 1: message 2 \(role 'assistant'\) begins in the prompt with 'It is.*', .* one after the other; give the rendered"
    )
    with pytest.raises(InvalidValue, match=refusal):
        encoded({"prompt": [ASKED, begun], "completion": [said]}, tokenizer)
    tokenizer.chat_template = CALLING["before"]
    with pytest.raises(InvalidValue, match=refusal):
        encoded({"prompt": [ASKED, begun], "completion": [said | {"tool_calls": CALL}]}, tokenizer)
    tokenizer.chat_template = CALLING["behind"]
    (e,) = encoded({"prompt": [ASKED, begun], "completion": [said | {"tool_calls": CALL}]}, tokenizer)
    assert tokenizer.decode(e.prompt).endswith("It is ")
    assert e.example.label.startswith("four\n<call>add")


@pytest.mark.parametrize("family", ["chatml", "folded-system", "brackets", "default-system"])
def test_a_long_prompt_keeps_what_comes_before_the_users_words(family):
    tokenizer = prepared(family, "bytes-bos")
    long = " ".join(f"word{i}" for i in range(300))
    (whole,) = encoded({"messages": [{"role": "user", "content": long}, {"role": "assistant", "content": "4"}]}, tokenizer)
    (e,) = encoded(
        {"messages": [{"role": "user", "content": long}, {"role": "assistant", "content": "4"}]}, tokenizer, max_tokens=200
    )
    head = tokenizer.decode(whole.prompt).index("word0")
    assert e.cut
    assert len(e.prompt) + len(e.answer) == 200
    assert e.answer == whole.answer
    assert tokenizer.decode(e.prompt)[:head] == tokenizer.decode(whole.prompt)[:head]
    assert e.prompt[-20:] == whole.prompt[-20:]


@pytest.mark.parametrize("said", ["4", "  4", "\n4"])
def test_a_token_that_strips_what_follows_it_stays_in_the_prompt(said):
    tokenizer = prepared("pipes", "stripping-bos")
    (e,) = encoded({"messages": [ASKED, {"role": "assistant", "content": said}]}, tokenizer)
    served = tokenizer.apply_chat_template([ASKED], add_generation_prompt=True, return_dict=True)["input_ids"]
    assert list(e.prompt) == served
    assert tokenizer.decode(e.answer) == "4<|end|>"


@pytest.mark.parametrize(
    ("asked", "extra", "named"),
    [
        ("I am bob", {"name": "bob"}, "'name'"),
        ("add x 1 y 2", {"tool_calls": CALL}, "'tool_calls'"),
        ("2 + 2?", {"reasoning_content": "4"}, "'reasoning_content'"),
    ],
)
def test_a_key_is_refused_though_its_words_stand_elsewhere_in_the_chat(asked, extra, named):
    tokenizer = prepared("chatml", "bytes")
    messages = [{"role": "user", "content": asked}, {"role": "assistant", "content": "4"} | extra]
    assert not oracle.reaches(tokenizer, messages, 1, next(iter(extra)))
    with pytest.raises(InvalidValue, match=f"row 1: key {named} of message 2 .*would not be learned"):
        encoded({"messages": messages}, tokenizer)


@pytest.mark.parametrize(
    "messages",
    [
        [{"role": "developer", "content": "b"}, {"role": "user", "content": "a b a"}],
        [{"role": "user", "content": "q"}, {"role": "tool", "content": "4"}],
    ],
)
def test_a_dropped_message_is_refused_though_its_words_stand_elsewhere_in_the_chat(messages):
    tokenizer = prepared("drops-unknown-roles", "bytes")
    place = next(i for i, message in enumerate(messages) if message["role"] != "user")
    whole = [*messages, {"role": "assistant", "content": "4"}]
    assert not oracle.reaches(tokenizer, whole, place, "content")
    with pytest.raises(InvalidValue, match=f"does not write message {place + 1} .role '{messages[place]['role']}'"):
        encoded({"messages": whole}, tokenizer)


@pytest.mark.parametrize("family", [*families.PARTS, "chatml"])
def test_a_template_that_reads_content_in_parts_alone_is_given_parts_and_another_one_text(family):
    tokenizer = copy.deepcopy(families.tokenizer("bytes"))
    tokenizer.chat_template = (families.PARTS | FAMILIES)[family]

    def as_read(messages):
        if family == "chatml":
            return messages
        return [message | {"content": [{"type": "text", "text": message["content"]}]} for message in messages]

    @settings(max_examples=20, deadline=None, database=None)
    @given(CHATS, st.none() | WORDS)
    def law(pairs, system):
        messages = chat(pairs, system)
        found = encoded({"messages": messages}, tokenizer)
        turns = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        assert [(list(e.prompt), list(e.answer)) for e in found] == [oracle.turn(tokenizer, as_read(messages), i) for i in turns]
        assert [e.example.label.split() for e in found] == [messages[i]["content"].split() for i in turns]

    law()


THOUGHTS = st.text(alphabet=st.sampled_from("ab 2+=?.\n你🙂{'"), min_size=1, max_size=12).filter(
    lambda text: text.strip() == text != ""
)


@pytest.mark.parametrize("kind", KINDS + SERVED)
@pytest.mark.parametrize("template", ["THINKING", "KEPT", "CHANNELS", "SHUT"])
def test_a_thought_in_content_is_learned_as_one_in_a_key_of_its_own(template, kind):
    tokenizer = copy.deepcopy(families.tokenizer(kind))
    tokenizer.chat_template = getattr(families, template)

    @settings(max_examples=10, deadline=None, database=None)
    @given(st.lists(st.tuples(WORDS, THOUGHTS | st.just(""), THOUGHTS), min_size=1, max_size=2))
    def law(turns):
        inside, apart = [], []
        for asked, thought, said in turns:
            user = {"role": "user", "content": asked}
            inside += [user, {"role": "assistant", "content": f"<think>\n{thought}\n</think>\n\n{said}"}]
            apart += [user, {"role": "assistant", "content": said, "reasoning_content": thought}]
        found = encoded({"messages": inside}, tokenizer)
        for e, i in zip(found, range(1, len(apart), 2), strict=True):
            assert (list(e.prompt), list(e.answer)) == oracle.turn(tokenizer, apart, i)
            written = tokenizer.decode(e.prompt).rpartition("assistant")[2] + tokenizer.decode(e.answer)
            assert written.count("<think>") == (template != "CHANNELS")  # which has another mark
            assert e.example.label.split() == apart[i]["content"].split()

    law()


def test_a_thought_in_content_is_refused_where_the_template_writes_an_empty_one_and_takes_none():
    tokenizer = prepared("closed-thought", "bytes")
    thought = {"role": "assistant", "content": "<think>two and two</think>4"}
    with pytest.raises(InvalidValue, match=r"row 1: message 2 \(role 'assistant'\) holds a thought, and .* an empty one before it"):
        encoded({"messages": [ASKED, thought]}, tokenizer)
    bold = {"role": "assistant", "content": "<b>two</b> and two"}  # no thought of this template
    (e,) = encoded({"messages": [ASKED, bold]}, tokenizer)
    assert (list(e.prompt), list(e.answer)) == oracle.turn(tokenizer, [ASKED, bold], 1)


@pytest.mark.parametrize("template", ["THINKING", "OPENED", "CLOSED", "CHATML"])
def test_a_call_in_content_is_the_answer_and_no_thought_though_the_template_has_its_tags(template):
    tokenizer = copy.deepcopy(families.tokenizer("bytes"))
    tokenizer.chat_template = getattr(families, template) + "{%- if tools %}<call></call>{%- endif %}"
    call, other = '<call>\n{"name": "add", "x": 1}\n</call>', '<call>\n{"name": "delete"}\n</call>'
    thought = {"reasoning_content": "two and two"} if template == "THINKING" else {}
    for extra in ({}, thought):
        (e,) = encoded({"messages": [ASKED, {"role": "assistant", "content": call} | extra]}, tokenizer)
        assert e.example.label == call
        assert [TASK.answer(said, e.example).scores["exact_match"] for said in (call, other, "")] == [1.0, 0.0, 0.0]


@pytest.mark.parametrize("prompt", ["<why></why>", "<my:why></my:why>", ""])
def test_a_tag_is_one_of_a_thought_where_the_template_closes_or_writes_one(prompt):
    tokenizer = prepared("chatml", "bytes")
    tokenizer.chat_template = FAMILIES["chatml"].replace("assistant\n'", f"assistant\n{prompt}'")
    if not prompt:
        tokenizer.chat_template = (
            "{%- for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}"
            "{%- if m.thinking %}{{ '<why>' + m.thinking + '</why>' }}{%- endif %}{{ m.content + '<|im_end|>\n' }}{%- endfor %}"
        )
    tag = re.match(r"<([\w:]+)>", prompt)
    why = tag[1] if tag else "why"
    assert own_words(f"<{why}>so</{why}> 4", tokenizer) == "4"
    assert own_words("<b>so</b> 4", tokenizer) == "<b>so</b> 4"


@pytest.mark.parametrize(
    "template", ["THINKING", "KEPT", "CLOSED", "OPENED", "CLOSING", "SHUT", "SPLITTING", "CHATML", "CHANNELS", "FOLDED"]
)
def test_an_answer_with_any_tags_of_a_thought_is_learned_with_one_thought_or_refused(template):
    tokenizer = copy.deepcopy(families.tokenizer("bytes"))
    tokenizer.chat_template = getattr(families, template)
    parts = st.sampled_from(["<think>", "</think>", "zq1", "zq2", "zq3", "\n"])

    def learned_once(said):
        (e,) = encoded({"messages": [ASKED, {"role": "assistant", "content": said}]}, tokenizer)
        text = tokenizer.decode(e.answer)
        opened = tokenizer.decode(e.prompt).rpartition("assistant")[2] + text
        assert [text.count(word) for word in ("zq1", "zq2", "zq3")] == [said.count(word) for word in ("zq1", "zq2", "zq3")]
        assert not re.search(r"<think>\s*(</think>\s*)?<think>", opened)
        assert opened.count("</think>") <= 1

    @settings(max_examples=30, deadline=None, database=None)
    @given(st.lists(parts, min_size=1, max_size=5, unique=True).map(" ".join).filter(lambda text: "zq" in text))
    def law(said):
        with suppress(InvalidValue):
            learned_once(said)

    law()


@pytest.mark.parametrize("template", ["THINKING", "OPENED", "SPLITTING"])
def test_an_answer_whose_words_end_a_thought_for_the_template_is_refused_with_remedies(template):
    tokenizer = copy.deepcopy(families.tokenizer("bytes"))
    tokenizer.chat_template = getattr(families, template)
    said = "Write </think> after it."
    for before in ("", "<think>\nso\n</think>\n\n"):
        with pytest.raises(
            InvalidValue,
            match=r"row 1: message 2 \(role 'assistant'\) holds '</think>' in its words, .* begin the message with <think>",
        ):
            encoded({"messages": [ASKED, {"role": "assistant", "content": before + said}]}, tokenizer)
    if template != "SPLITTING":  # which drops thoughts
        (e,) = encoded({"messages": [ASKED, {"role": "assistant", "content": f"<think>{said}"}]}, tokenizer)
        assert e.example.label == "after it."
    prompt = tokenizer.apply_chat_template([ASKED], tokenize=False, add_generation_prompt=True)
    (e,) = encoded({"prompt": prompt, "completion": said}, tokenizer)
    assert tokenizer.decode(e.answer) == f"{said}</s>"


def test_a_word_of_a_prompt_that_the_template_reads_and_takes_out_is_not_lost():
    tokenizer = prepared("chatml", "bytes")
    flags = "{{ 'short' if '/no' in messages[0].content else 'long' }}"
    tokenizer.chat_template = flags + FAMILIES["chatml"].replace("m.content", "m.content.replace('/no', '').replace('/yes', '')")
    for flag in ("/no", "/yes"):  # the second changes nothing, as SmolLM3's /think
        messages = [{"role": "system", "content": f"Be kind. {flag} Be {flag} wise."}, ASKED, {"role": "assistant", "content": "4"}]
        (e,) = encoded({"messages": messages}, tokenizer)
        assert (list(e.prompt), list(e.answer)) == oracle.turn(tokenizer, messages, 2)
    with pytest.raises(InvalidValue, match=r"leaves out '/no' of message 3 \(role 'assistant'\)"):
        encoded({"messages": [*messages[:2], {"role": "assistant", "content": "4 /no 5"}]}, tokenizer)
    tokenizer.chat_template = FAMILIES["chatml"].replace("m.content", "m.content[:15]")
    with pytest.raises(InvalidValue, match=r"leaves out 'Be' of message 1 \(role 'system'\)"):
        encoded({"messages": messages}, tokenizer)


def test_what_a_template_leaves_out_of_an_answer_is_named():
    tokenizer = copy.deepcopy(families.tokenizer("bytes"))
    tokenizer.chat_template = families.SPLITTING
    said = {"role": "assistant", "content": "<think>two and two</think>4"}
    with pytest.raises(
        InvalidValue, match=r"row 1: the tokenizer's chat template leaves out 'two' of message 2 \(role 'assistant'\)"
    ):
        encoded({"messages": [ASKED, said]}, tokenizer)


@pytest.mark.parametrize("closed", ["<think>\n\n</think>\n\n", "<think></think>", "<|channel>thought\n<channel|>"])
def test_a_thought_that_the_template_closes_in_the_prompt_alone_is_no_reason_to_refuse_an_answer_without_one(closed):
    tokenizer = prepared("chatml", "bytes")
    asking = tokenizer.chat_template.replace(
        "assistant\n' }}{%- endif %}", f"assistant\n{closed}' }}}}{{%- endif %}}".replace("\n", "\\n")
    )
    tokenizer.chat_template = asking
    (e,) = encoded({"messages": [ASKED, {"role": "assistant", "content": "4"}]}, tokenizer)
    assert list(e.prompt) == tokenizer.apply_chat_template([ASKED], add_generation_prompt=True, return_dict=True)["input_ids"]
    assert tokenizer.decode(e.prompt).endswith(f"assistant\n{closed}")
    assert tokenizer.decode(e.answer) == "4<|im_end|>"
    with pytest.raises(InvalidValue, match=r"row 1: .* an empty (thought, .* would never be written|one before it)"):
        encoded({"messages": [ASKED, {"role": "assistant", "content": "<think>two</think>4"}]}, tokenizer)
    thinking = asking.replace(
        "m.content",
        "('" + closed.replace("\n", "\\n").replace("</", "so</").replace("<c", "so<c") + "' if m.why else '') + m.content",
    )
    tokenizer.chat_template = thinking
    with pytest.raises(
        InvalidValue, match="row 1: .* ends a prompt with an empty thought, .* so this answer's would never be written"
    ):
        encoded({"messages": [ASKED, {"role": "assistant", "content": "4", "why": "so"}]}, tokenizer)


@pytest.mark.parametrize("family", ["thinking", "opened-thought", "closed-thought"])
def test_two_thoughts_of_one_message_are_refused(family):
    tokenizer = prepared(family, "bytes")
    both = {"role": "assistant", "content": "<think>two</think>4", "reasoning_content": "and two"}
    with pytest.raises(InvalidValue, match="row 1: message 2 .* and 'reasoning_content' holds another; keep one of them"):
        encoded({"messages": [ASKED, both]}, tokenizer)


@pytest.mark.parametrize(("extra", "named"), [({"name": "zed"}, "'name'"), ({"tool_calls": CALL}, "'tool_calls'")])
def test_a_key_of_a_given_message_of_the_assistant_is_refused_where_the_template_drops_it(extra, named):
    tokenizer = prepared("chatml", "bytes")
    given = [ASKED, {"role": "assistant", "content": "4"} | extra, {"role": "user", "content": "sure?"}]
    with pytest.raises(InvalidValue, match=f"row 1: key {named} of message 2 .*would not be learned"):
        encoded({"prompt": given, "completion": [{"role": "assistant", "content": "yes"}]}, tokenizer)


@pytest.mark.parametrize(
    ("system", "first"),
    [
        ("this is kind", "hi"),  # which the system message holds
        ("this is kind", "user"),  # which the turn's header holds
        ("this is kind", ""),
        ("this is a kind system that says what it is for, at length", "well now"),  # more than half of the room
    ],
)
def test_a_cut_prompt_keeps_all_of_the_system_message_and_the_turns_header(system, first):
    tokenizer = prepared("chatml", "bytes-bos")
    head = f"<|im_start|>system\n{system}<|im_end|>\n<|im_start|>user\n"
    long = " ".join(f"word{i}" for i in range(100))
    messages = [
        {"role": "system", "content": system},
        {"role": "user", "content": first},
        {"role": "assistant", "content": "yes"},
        {"role": "user", "content": long},
        {"role": "assistant", "content": "4"},
    ]
    room = 20 + len(tokenizer(head, add_special_tokens=False).input_ids)
    e = encoded({"messages": messages}, tokenizer, max_tokens=room)[-1]
    assert e.cut
    assert tokenizer.decode(e.answer) == "4<|im_end|>"
    assert len(e.prompt) + len(e.answer) == room
    assert tokenizer.decode(e.prompt).startswith(head)


@pytest.mark.parametrize("family", ["no-end-of-turn", "chatml", "folded-system"])
def test_a_prompt_that_is_one_token_too_long_keeps_its_head(family):
    tokenizer = prepared(family, "bytes-bos")
    tokenizer.chat_template = "{{ bos_token }}" + tokenizer.chat_template.replace("{{- bos_token or '' }}", "")
    row = {"messages": [{"role": "user", "content": "zq one two"}, {"role": "assistant", "content": "4"}]}
    (whole,) = encoded(row, tokenizer)
    size = len(whole.prompt) + len(whole.answer)
    assert encoded(row, tokenizer, max_tokens=size)[0] == whole
    head = tokenizer.decode(whole.prompt).index("zq")
    for less in (1, 2, 3):
        (e,) = encoded(row, tokenizer, max_tokens=size - less)
        assert (e.cut, len(e.prompt), e.answer) == (True, len(whole.prompt) - less, whole.answer)
        assert tokenizer.decode(e.prompt)[:head] == tokenizer.decode(whole.prompt)[:head]


def test_rows_are_counted_that_repeat_are_cut_have_no_answer_or_one_that_takes_all_the_room():
    tokenizer = prepared("chatml", "bytes")

    def row(asked, *said):
        return {"messages": [{"role": "user", "content": asked}, *({"role": "assistant", "content": each} for each in said)]}

    rows = [row("a", "b"), row("a", "b"), row("a", "c"), row("d"), row("long " * 90, "e"), row("f", "long " * 90), row("g", "")]
    samples = samples_of([(f"row {i}", each) for i, each in enumerate(rows, 1)], source="d")
    encoder = Encoder(tokenizer, max_tokens=60)
    found, unfit = count_rows("t", samples, encoder, measured=True)
    assert found == {
        "read": 7,
        "empty": 1,
        "repeated": 1,
        "together": 2,
        "cut": 2,
        "skipped": 1,
        "long": 1,
        "longest": 2,
        "unknown": 0,
        "characters": "",
        "split": {},
    }
    assert list(unfit) == [3, 5]
    with pytest.raises(
        InvalidValue, match="row 6: the answer takes .* raise max_tokens, which is --max-length of train, or leave the row out$"
    ):
        count_rows("t", samples, encoder)


@pytest.mark.parametrize("kind", ["metaspace-bos", "unigram", "silent"])
def test_a_character_that_the_tokenizer_does_not_know_is_refused_in_an_answer_and_counted_in_a_prompt(kind):
    tokenizer = families.deaf(kind)
    tokenizer.chat_template = FAMILIES["chatml"]
    some = st.text(alphabet=st.sampled_from("ab 2\nж漢🦊"), min_size=1, max_size=8).filter(str.strip)

    @settings(max_examples=60, deadline=None, database=None)
    @given(some, some, st.sampled_from(["rows", "chat", "text"]))
    def law(asked, said, form):
        row = {"prompt": asked, "completion": said}
        if form == "text":
            row = {"text": said}
        elif form == "chat":
            row = {"messages": [{"role": "user", "content": asked}, {"role": "assistant", "content": said}]}
        samples = samples_of([("row 1", row)], source="d")
        if any(c in said for c in "ж漢🦊"):
            with pytest.raises(
                InvalidValue, match="row 1: the answer holds '.*[ж漢🦊].*', which the tokenizer does not know"
            ) as refused:
                count_rows("t", samples, Encoder(tokenizer, max_tokens=200))
            assert "\n" not in str(refused.value)
            return
        found, _ = count_rows("t", samples, Encoder(tokenizer, max_tokens=200))
        lost = {c for c in "ж漢🦊" if c in asked} if form != "text" else set()
        assert found["unknown"] == bool(lost)
        assert set(found["characters"]) == lost

    law()


@pytest.mark.parametrize("kind", KINDS + SERVED)
def test_a_tokenizer_that_knows_every_byte_knows_every_character(kind):
    tokenizer = copy.deepcopy(families.tokenizer(kind))
    row = {"prompt": "ж漢 \u200d🦊\ufe0f?", "completion": " 🦊\u0301漢</s>"}
    if kind in ("metaspace-bos", "unigram"):
        with pytest.raises(InvalidValue, match="does not know"):
            encoded(row, tokenizer)
        return
    assert len(encoded(row, tokenizer)) == 1
    tokenizer.unk_token = tokenizer.eos_token  # as GPT-2's
    assert len(encoded(row, tokenizer)) == 1


@pytest.mark.parametrize("kind", KINDS + SERVED)
def test_prompts_that_a_server_reads_as_other_tokens_are_counted(kind):
    tokenizer = families.tokenizer(kind)
    some = st.text(alphabet=st.sampled_from("the old\n 2"), min_size=1, max_size=8)

    @settings(max_examples=150, deadline=None, database=None)
    @given(some, some.filter(str.strip))
    def law(asked, said):
        samples = samples_of([("row 1", {"prompt": asked, "completion": said})], source="d")
        encoder = Encoder(tokenizer, max_tokens=200)
        (e,) = TASK.encoded(encoder, examples_of(samples))
        found, _ = count_rows("t", samples, encoder)
        assert bool(found["split"]) == (tuple(tokenizer(asked).input_ids) != e.prompt)

    law()


@pytest.mark.parametrize("family", [family for family in FAMILIES if family != "tools-in-brackets"])
@pytest.mark.parametrize("kind", ["bytes", "unigram", "byte-fallback-bos", "stripping-bos"])
def test_chats_that_a_server_reads_as_other_tokens_are_counted(family, kind):
    tokenizer = prepared(family, kind)

    @settings(max_examples=12, deadline=None, database=None)
    @given(WORDS, WORDS)
    def law(asked, said):
        messages = chat([(asked, said)])
        samples = samples_of([("row 1", {"messages": messages})], source="d")
        encoder = Encoder(tokenizer, max_tokens=400)
        (e,) = TASK.encoded(encoder, examples_of(samples))
        found, _ = count_rows("t", samples, encoder)
        served = tokenizer.apply_chat_template(messages[:1], add_generation_prompt=True, return_dict=True)["input_ids"]
        assert bool(found["split"]) == (list(e.prompt) != served)

    law()


def test_what_is_split_is_said_with_its_remedy():
    tokenizer = prepared("pipes", "byte-fallback-bos")
    ways = {"Answer: ": "2 old", "Answer:\n": "\nold", "a b": "\n\nc", "the ol": "d stone"}
    rows = [{"prompt": prompt, "completion": said} for prompt, said in ways.items()]
    encoder = Encoder(tokenizer, max_tokens=400)
    found, _ = count_rows("t", samples_of([("r", row) for row in rows], source="d"), encoder)
    assert found["split"] == {"blank": 1, "white": 2, "word": 1}
    (moved,) = encoded({"prompt": "Answer:", "completion": " 2 old"}, tokenizer)
    assert moved.prompt == tuple(tokenizer("Answer:").input_ids)
    white = {"messages": [ASKED, {"role": "assistant", "content": "\n old"}]}
    found, _ = count_rows("t", samples_of([("r", white)], source="d"), encoder)
    assert found["split"] == {"white": 1}
    tokenizer.chat_template = FAMILIES["no-end-of-turn"].replace("'assistant:'", "'assistant: '")
    white = {"messages": [ASKED, {"role": "assistant", "content": "2 old"}]}
    found, _ = count_rows("t", samples_of([("r", white)], source="d"), encoder)
    assert found["split"] == {"template": 1}


def test_a_prompt_that_ends_in_a_run_of_blanks_is_trained_on_as_a_server_reads_it():
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # as GPT-2: the last blank before a word stands alone
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    made.train_from_iterator(
        ["a\n\n\n\n  \n"] * 9, trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet, show_progress=False)
    )
    made.add_special_tokens(families.SPECIAL)
    made.add_tokens(families.PLAIN)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=made, eos_token="</s>", pad_token="<pad>")
    for asked in ("a\n\n", "a\n\n\n", "a  \n\n", "a\n", "a"):
        (e,) = encoded({"prompt": asked, "completion": "a"}, tokenizer)
        assert list(e.prompt) == tokenizer(asked).input_ids
        assert tokenizer.decode(e.answer) == "a</s>"
    thinking = "{%- for m in messages %}{{ '<|' + m.role + '|>' }}"
    thinking += "{%- if m.role == 'assistant' %}{{ '<think>\n\n</think>\n\n' }}{%- endif %}{{ m.content + '<|end|>' }}{%- endfor %}"
    for prompt in ("<|assistant|>", "<|assistant|><think>\n", "<|assistant|><think>\n\n</think>\n\n"):
        tokenizer.chat_template = thinking + "{%- if add_generation_prompt %}{{ " + repr(prompt) + " }}{%- endif %}"
        (e,) = encoded({"messages": [ASKED, {"role": "assistant", "content": "  a"}]}, tokenizer)
        served = tokenizer.apply_chat_template([ASKED], add_generation_prompt=True, return_dict=True)["input_ids"]
        assert list(e.prompt) == served
        whole = tokenizer.apply_chat_template([ASKED, {"role": "assistant", "content": "  a"}], tokenize=False)
        assert tokenizer.decode([*e.prompt, *e.answer]) == whole


def test_a_turn_ends_where_a_server_stops_also_behind_another_mark_of_the_template():
    tokenizer = copy.deepcopy(families.tokenizer("bytes"))
    four = {"messages": [ASKED, {"role": "assistant", "content": "4"}]}
    tokenizer.chat_template = FAMILIES["pipes"] + "{%- if not add_generation_prompt %}{{ eos_token }}{%- endif %}"  # as Phi-3's
    (e,) = encoded(four, tokenizer)
    assert tokenizer.decode(e.answer) == "4<|end|>"
    tokenizer.eos_token = "<|im_end|>"
    for ended in ("<|end|><|im_end|>", "<|end|>\n<|im_end|>"):  # as Command R7B's
        tokenizer.chat_template = FAMILIES["pipes"].replace("<|end|>\n", ended + "\n")
        (e,) = encoded(four, tokenizer)
        assert tokenizer.decode(e.answer) == "4" + ended
