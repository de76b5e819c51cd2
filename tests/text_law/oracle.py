"""Right values from transformers alone: what a server is given, what it would say, and where it stops."""

import copy
import re


def turn(tokenizer, messages, i, tools=None):
    """Prompt and answer tokens of the assistant's message at place i, and the answer as a reader sees it."""
    how = {"tools": tools} if tools else {}

    def written(start):
        """What a server is given, and the answered chat, from a message on."""
        prompt = tokenizer.apply_chat_template(messages[start:i], tokenize=False, add_generation_prompt=True, **how)
        return prompt, tokenizer.apply_chat_template(messages[start : i + 1], tokenize=False, **how)

    prompt, whole = written(0)
    if messages[0]["role"] == "system" and not whole.startswith(prompt) and whole == written(1)[1]:
        before, whole = written(1)  # the system message is written where no answer follows; the answer is the same
        assert whole.startswith(before)
        whole = prompt + whole.removeprefix(before)
    opened, closed = re.search(r"<(\w+)>\n?\Z", prompt), re.search(r"<(\w+)>\n\n</\1>\n\n\Z", prompt)
    if not whole.startswith(prompt) and closed:
        before = prompt[: closed.start()]
        assert whole.startswith(before)
        whole = prompt + whole[len(before) :]
    elif not whole.startswith(prompt):
        assert opened, "the families differ in nothing else"
        before = prompt[: opened.start()]
        assert whole.startswith(before)
        answer = whole[len(before) :].lstrip("\n")
        whole = prompt + answer if answer.startswith(f"</{opened[1]}>") else f"{prompt}</{opened[1]}>\n\n{answer}"
    read = tokenizer(whole, add_special_tokens=False, return_offsets_mapping=True)
    first = next(k for k, (_, end) in enumerate(read.offset_mapping) if end > len(prompt))
    given, answer = read.input_ids[:first], read.input_ids[first:]
    served = tokenizer(prompt, add_special_tokens=False).input_ids
    if served != given:  # the server reads the prompt alone, and the answer's words follow
        inside = answer and read.offset_mapping[first][0] < len(prompt)
        rest = tokenizer(whole[len(prompt) :], add_special_tokens=False).input_ids if inside else answer
        if tokenizer.decode(served + rest) == tokenizer.decode(read.input_ids):
            given, answer = served, rest
    stops = stop_set(tokenizer, parts=isinstance(messages[i]["content"], list))
    at = next((k for k, token in enumerate(answer) if token in stops), None)
    answer = [*answer, tokenizer.eos_token_id] if at is None else answer[: at + 1]
    return given, answer


def stop_set(tokenizer, *, parts=False):
    chat = [{"role": "user", "content": "asked"}, {"role": "assistant", "content": "answered"}]
    if parts:
        chat = [message | {"content": [{"type": "text", "text": message["content"]}]} for message in chat]
    after = tokenizer.apply_chat_template(chat, tokenize=False).rpartition("answered")[2].strip()
    ended = re.match(r"<[^>]+>", after)
    token = tokenizer.convert_tokens_to_ids(ended[0]) if ended else None
    return {tokenizer.eos_token_id} | ({token} if token is not None else set())


def reaches(tokenizer, messages, i, key):
    """Whether a key of message i changes what the template writes: other words in its place give another text."""
    others = copy.deepcopy(messages)
    if key == "content":
        others[i]["content"] = "other words"
    else:
        del others[i][key]
    first, second = (tokenizer.apply_chat_template(chat, tokenize=False) for chat in (messages, others))
    return first != second


def completion(tokenizer, prompt, text):
    """The same of prompt and completion."""
    read = tokenizer(prompt + text, return_offsets_mapping=True)
    first = next((k for k, (_, end) in enumerate(read.offset_mapping) if end > len(prompt)), len(read.input_ids))
    answer = read.input_ids[first:]
    return read.input_ids[:first], answer if answer[-1:] == [tokenizer.eos_token_id] else [*answer, tokenizer.eos_token_id]
