"""What a chat template may do: end in time, write what it is given, and write the date of the run's first day."""

from datetime import datetime

import pytest
from transformers import AutoTokenizer

from anchorlora.data import Encoder, TextTask, examples_of, samples_of, templates, token_ids
from anchorlora.data.rendering import without_lead
from anchorlora.data.templates import refuse_deaf, render, stop_ids
from anchorlora.data.thoughts import extract_answer
from anchorlora.embedded import folder
from anchorlora.errors import InvalidValue

CHAT = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]
RANGE = "{% for i in range(99999) %}"
ENDLESS = 3 * RANGE + 3 * "{% endfor %}"
ASKING = "{% if add_generation_prompt %}[assistant] {% endif %}"
MARKED = "{% if m.role == 'assistant' %}{% generation %}{{ m.content }}{{ eos_token }}{% endgeneration %}"
MARKED += "{% else %}{{ m.content }}{% endif %}"
GREETED = "You are kind.\n{% for m in messages %}[{{ m.role }}]\n" + MARKED + "\n{% endfor %}"
TURNS = "{% for m in messages %}[{{ m.role }}] {{ m.content }}{{ eos_token }}\n{% endfor %}" + ASKING


@pytest.fixture
def tokenizer():
    return AutoTokenizer.from_pretrained(folder("embedded:mini", "base_model"))


def encoded(rows, tokenizer, max_tokens=200):
    samples = samples_of([(f"row {i}", row) for i, row in enumerate(rows, 1)], source="data")
    return list(TextTask("t").encoded(Encoder(tokenizer, max_tokens=max_tokens), examples_of(samples)))


def test_a_template_that_does_not_end_or_writes_too_much_is_refused(tokenizer, monkeypatch):
    monkeypatch.setattr(templates, "SECONDS", 0.3)
    tokenizer.chat_template = ENDLESS
    with pytest.raises(InvalidValue, match="row 1: the tokenizer's chat template does not end; fetch the tokenizer again"):
        render("row 1", CHAT, tokenizer)
    monkeypatch.setattr(templates, "SECONDS", 20.0)
    tokenizer.chat_template = "{{ 'a' * 20000000 }}"
    with pytest.raises(InvalidValue, match="writes 20,000,000 characters"):
        render("row 1", CHAT, tokenizer)


@pytest.mark.parametrize(
    ("template", "role"),
    [
        ("always the same", "user"),
        ("{% for m in messages %}{% if m.role == 'user' %}{{ m.content }}{% endif %}{% endfor %}", "assistant"),
    ],
)
def test_a_template_that_does_not_write_what_it_is_given_is_refused(template, role, tokenizer):
    tokenizer.chat_template = template
    with pytest.raises(InvalidValue, match=f"does not write the {role}'s message"):
        refuse_deaf(tokenizer)
    with pytest.raises(InvalidValue, match=f"row 1: the tokenizer's chat template does not write message . \\(role '{role}'\\)"):
        encoded([{"messages": CHAT}], tokenizer)


def test_a_template_that_writes_the_date_sees_the_day_that_is_set(tokenizer):
    tokenizer.chat_template = "{{ strftime_now('%d %b %Y') }} " + TURNS
    tokenizer.rendered_at = datetime(2024, 7, 26)
    assert render("row 1", CHAT, tokenizer).startswith("26 Jul 2024 [user] hi")


def test_of_two_messages_with_one_text_none_may_be_missing(tokenizer):
    tokenizer.chat_template = (
        "{% for m in messages %}{% if m.role != 'system' %}{{ m.content }}{{ eos_token }}{% endif %}{% endfor %}"
    )
    chat = [{"role": "system", "content": "hi"}, *CHAT]
    with pytest.raises(InvalidValue, match="does not write message 1"):
        encoded([{"messages": chat}], tokenizer)


@pytest.mark.parametrize("answered", [True, False])
@pytest.mark.parametrize("role", ["gpt", "model", "human", "Assistant", "USER", "AI"])
def test_a_role_by_another_name_is_refused_with_the_name_to_use(role, answered, tokenizer):
    """Also where the chat has no answer then: such rows were left out, and a role in capitals was learned as it stood."""
    tokenizer.chat_template = TURNS
    chat = [{"role": role, "content": "hi"}, *CHAT[1:]] if answered else [CHAT[0], {"role": role, "content": "hi"}]
    with pytest.raises(InvalidValue, match=f"row 1: role '{role}' of message [12] of messages is not known; call it '(user|ass)"):
        encoded([{"messages": chat}], tokenizer)


def test_a_long_prompt_keeps_its_head_and_its_end_and_cores_are_made_from_the_same_tokens(tokenizer):
    tokenizer.chat_template = TURNS
    long = " ".join(f"word{i}" for i in range(200))
    row = {"messages": [{"role": "system", "content": "be kind"}, {"role": "user", "content": long}, CHAT[1]]}
    (e,) = encoded([row], tokenizer, max_tokens=64)
    text = tokenizer.decode(e.prompt)
    assert e.cut
    assert len(e.prompt) + len(e.answer) == 64
    assert text.startswith("[system] be kind<end>\n[user]".replace("<end>", tokenizer.eos_token))
    assert text.rstrip().endswith("[assistant]")
    assert "word199" in text
    assert "word0 " not in text
    samples = samples_of([("row 1", row)], source="data")
    assert list(token_ids(samples, tokenizer, max_tokens=64)) == [[*e.prompt, *e.answer]]


def test_all_answers_are_learned_that_transformers_would_learn_also_where_one_begins_the_chat(tokenizer):
    tokenizer.chat_template = GREETED + "{% if add_generation_prompt %}[assistant]\n{% endif %}"
    greeting = [{"role": "assistant", "content": "Hello, I am Kim."}]
    for chat in (greeting, [*greeting, *CHAT], [*CHAT, *CHAT], [*greeting, *CHAT, *CHAT]):
        read = tokenizer.apply_chat_template(chat, return_dict=True, return_assistant_tokens_mask=True)
        examples, learned = encoded([{"messages": chat}], tokenizer), set()
        for one in examples:
            assert [*one.prompt, *one.answer] == read["input_ids"][: len(one.prompt) + len(one.answer)]
            learned |= {*range(len(one.prompt), len(one.prompt) + len(one.answer))}
        assert learned == {i for i, marked in enumerate(read["assistant_masks"]) if marked}
        assert [one.example.label for one in examples] == [m["content"] for m in chat if m["role"] == "assistant"]


@pytest.mark.parametrize("answer", ["\nhello", "\n\nhello", "\n"])
def test_a_token_of_line_breaks_is_none_of_the_template(answer, tokenizer):
    """As Gemma's tokenizer has them: the template's line break and the answer's were one token of the prompt."""
    tokenizer.add_tokens(["\n\n", "\n\n\n"])
    tokenizer.chat_template = TURNS.replace("[assistant] ", "[assistant]\n").replace("}}] ", "}}]\n")
    chat = [CHAT[0], {"role": "assistant", "content": answer}]
    (e,) = encoded([{"messages": chat}], tokenizer)
    assert list(e.prompt) == tokenizer.apply_chat_template(chat[:1], add_generation_prompt=True, return_dict=True)["input_ids"]
    assert tokenizer.decode(e.answer) == answer + tokenizer.eos_token


def test_a_mark_of_a_message_that_nobody_reads_is_refused_with_the_one_that_is_read(tokenizer):
    tokenizer.chat_template = TURNS
    marked = {"messages": [CHAT[0], CHAT[1] | {"loss": False}, *CHAT]}
    with pytest.raises(
        InvalidValue, match="key 'loss' of message 2 .* if it says that the message is not learned, write \"train\": f"
    ):
        encoded([marked], tokenizer)


def test_a_template_that_writes_nothing_before_a_chat_has_its_first_token_as_prompt(tokenizer):
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{{ eos_token }}{% endfor %}"
    (one,) = encoded([{"messages": [{"role": "assistant", "content": "Hello, I am Kim."}]}], tokenizer)
    assert len(one.prompt) == 1
    assert tokenizer.decode([*one.prompt, *one.answer]) == f"Hello, I am Kim.{tokenizer.eos_token}"


def test_an_answer_ends_at_the_end_of_the_turn_where_that_is_not_the_tokenizers_end(tokenizer):
    turn = tokenizer.pad_token
    end = tokenizer.convert_tokens_to_ids(turn)
    tokenizer.chat_template = TURNS.replace("eos_token", f"'{turn}'")
    (e,) = encoded([{"messages": CHAT}], tokenizer)
    assert end != tokenizer.eos_token_id
    assert e.answer[-1] == end
    assert stop_ids(tokenizer, (7,)) == {end, tokenizer.eos_token_id, 7}


def test_a_thought_in_place_of_the_templates_empty_one_does_not_hide_the_answer():
    lead = "<think>\n\n</think>\n\n"
    assert without_lead(lead + "4", lead) == without_lead("<think>\nlong\n</think>\n\n4", lead) == without_lead("4", lead) == "4"


@pytest.mark.parametrize(
    ("text", "lead", "gold", "words"),
    [
        ("<think>\ntwo and two\n</think>\n4", "", "4", "4"),  # a model that thinks, where the template writes nothing
        ("<think>\na\n</think>\n4", "", "<think>b</think>4", "<think>\na\n</think>\n4"),  # a thought that is the answer's own
        ("<think>\ntwo and two\n</think>\n<call>4</call>", "", "<call>4</call>", "<call>4</call>"),
        ("<my:think>two and two</my:think>4", "", "4", "4"),
        ("<my:think>two and two</my:think>4", "</my:think>", "4", "4"),  # in place of none, which the template closes at once
        ("<b>4</b> is right", "", "4", "<b>4</b> is right"),
        ("final4", "final", "4", "4"),  # a channel of answers, as the tokenizer writes it without marks
        ("the final 4", "final", "4", "the final 4"),
    ],
)
def test_a_thought_of_the_models_own_is_no_part_of_what_it_answers(text, lead, gold, words):
    assert extract_answer(text, lead, gold) == words
