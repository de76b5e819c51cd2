"""A tiny model that a plain torch loop has taught to answer right scores 100, before and after a run that changes nothing."""

import copy
import json

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from anchorlora.cli.app import main
from anchorlora.continual.evaluate import Scorer
from anchorlora.data import Encoder, ExactMatch, TextTask, examples_of, samples_of
from anchorlora.models.packing import unpackable
from text_law import families, oracle

CHATS = [(f"{a} and {b}?", f"it is {a + b}.") for a, b in [(1, 2), (2, 2), (3, 4), (5, 1), (7, 2), (4, 4), (6, 3), (9, 1)]]
TAUGHT = [
    "thinking",
    "folded-system",
    *(pytest.param(name, marks=pytest.mark.slow) for name in ("chatml", "opened-thought", "pipes")),
]


def taught(family):
    """The model, its tokenizer, and the examples that it was taught, by transformers and torch alone."""
    tokenizer = copy.deepcopy(families.tokenizer("bytes"))
    tokenizer.chat_template = families.FAMILIES[family]
    chats = [[{"role": "user", "content": asked}, {"role": "assistant", "content": said}] for asked, said in CHATS]
    pairs = [oracle.turn(tokenizer, messages, 1) for messages in chats]
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
    config = Qwen3Config(vocab_size=len(tokenizer), num_hidden_layers=2, max_position_embeddings=256, **sizes)
    config.eos_token_id, config.pad_token_id, config.bos_token_id = tokenizer.eos_token_id, tokenizer.pad_token_id, None
    model = Qwen3ForCausalLM(config)
    longest = max(len(prompt) + len(answer) for prompt, answer in pairs)
    ids, labels = torch.full((len(pairs), longest), tokenizer.pad_token_id), torch.full((len(pairs), longest), -100)
    for row, (prompt, answer) in enumerate(pairs):
        whole = torch.tensor([*prompt, *answer])
        ids[row, : len(whole)] = whole
        labels[row, len(prompt) : len(whole)] = whole[len(prompt) :]
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(150):
        loss = model(input_ids=ids, attention_mask=(ids != tokenizer.pad_token_id).long(), labels=labels).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.eval(), tokenizer, chats, pairs


@pytest.mark.parametrize("family", TAUGHT)
def test_right_answers_score_one_and_losses_and_texts_are_plain_transformers(family, tmp_path, capsys):
    model, tokenizer, chats, pairs = taught(family)
    task = TextTask("t", metrics=(ExactMatch(),))
    samples = samples_of([(f"row {i}", {"messages": messages}) for i, messages in enumerate(chats)], source="data")
    encoded = Encoder(tokenizer, max_tokens=200).encode(task, examples_of(samples))
    packed = unpackable(model, [e.prompt + e.answer for e in encoded]) is None
    answers = Scorer(model, tokenizer, max_new_tokens=40, batch=4, device=torch.device("cpu"), packed=packed).score(task, encoded)
    assert [answer.scores["exact_match"] for answer in answers] == [1.0] * len(chats)
    for answer, (prompt, right), messages in zip(answers, pairs, chats, strict=True):
        ids, labels = torch.tensor([[*prompt, *right]]), torch.tensor([[-100] * len(prompt) + right])
        with torch.no_grad():
            assert answer.scores["loss"] == pytest.approx(float(model(input_ids=ids, labels=labels).loss), rel=1e-4, abs=1e-6)
            said = model.generate(torch.tensor([prompt]), max_new_tokens=40, do_sample=False, eos_token_id=right[-1])
        text = tokenizer.decode(said[0, len(prompt) :], skip_special_tokens=True)
        assert text.strip().endswith(messages[1]["content"])
        assert answer.text == messages[1]["content"]

    model.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    for name in ("new", "old"):
        (tmp_path / f"{name}.jsonl").write_text("\n".join(json.dumps({"messages": messages}) for messages in chats))
    few = [
        "--set",
        "learning_rate=1e-12",
        "--set",
        "max_new_tokens=40",
        "--set",
        "threads=1",
        "--set",
        "rows=64",
        "--set",
        "at_most=4",
    ]
    files = ["--data", str(tmp_path / "new.jsonl"), "--test", str(tmp_path / "new.jsonl"), "--keep", str(tmp_path / "old.jsonl")]
    assert main(["train", str(tmp_path / "model"), *files, "--metric", "exact_match", "--out", str(tmp_path / "out"), *few]) == 0
    capsys.readouterr()
    found = json.loads((tmp_path / "out/skill/verdict.json").read_text())
    assert (found["skill"]["metric"]["before"], found["skill"]["metric"]["after"]) == (100.0, 100.0)
    (tested,) = (each for each in found["rows"] if each["use"] == "tested")
    assert tested["also_learned"] == len(chats)
    assert f"{len(chats)} of {len(chats)} rows of the test file have the text" in "\n".join(found["sentences"])
