"""The model card: what it says of a record and an export, and that no text of theirs can act in it."""

import re

import pytest
from huggingface_hub import ModelCard
from ruamel.yaml import YAML

import records
from anchorlora.pages.card import as_text, as_yaml, card
from anchorlora.store.export import Base, Export, ExportedLayer, ExportedProtection, Logits, Source
from anchorlora.store.former import method_facts
from anchorlora.store.record import DataFile, MethodFacts

SOURCE = Source(kind="run", number=4, task="agnews", tasks=4, finished=True, adapter_sha256="b" * 64, dtype="F32")
VERSIONS = {name: "1.0" for name in ("anchorlora", "torch", "transformers", "peft", "safetensors")}
EVIL = (
    "x</details>\n---\n# <script>alert(1)</script> | a | **b** `c` [d](javascript:e) ![f](g) $h$ @all "
    "http://evil.example: y {{ 7*7 }}"
)


def exported(**changes):
    content = {
        "form": "cat",
        "dtype": "float32",
        "rank": 32,
        "asked_rank": None,
        "error": 0.0,
        "layers": [ExportedLayer(module=f"model.layers.{i}.self_attn.q_proj", rank=32, error=0.0) for i in range(2)],
        "protection": None,
        "logits": None,
        "source": SOURCE,
        "base": Base(name="org/base", hub="org/base", revision="abc"),
        "versions": VERSIONS,
        "max_lora_rank": 32,
    }
    return Export(**(content | changes))


def front_matter(text):
    head, body = re.fullmatch(r"---\n(.*?)\n---\n(.*)", text, re.S).groups()
    return YAML(typ="safe", pure=True).load(head), body


def test_the_front_matter_is_what_the_hub_reads():
    found, _ = front_matter(card(exported(), records.record()))
    assert found == {
        "library_name": "peft",
        "base_model": "org/base",
        "base_model_relation": "adapter",
        "pipeline_tag": "text-generation",
        "tags": ["anchorlora", "continual-learning", "lora", "sfor"],
    }
    data = ModelCard(card(exported(), records.record())).data
    assert (data.library_name, data.base_model) == ("peft", "org/base")


def test_license_and_data_sets_are_in_the_front_matter_and_stay_text():
    found, _ = front_matter(card(exported(license="apache-2.0", datasets=["org/data", EVIL]), None))
    assert found["license"] == "apache-2.0"
    assert found["datasets"] == ["org/data", " ".join(EVIL.split("\n"))]


def test_how_it_is_served_and_what_half_precision_does():
    kept = ExportedProtection(
        task="a", rho=1e-8, rho_exported=1e-8, bound=1e-7, chance=0.3, served={"float16": 1.2e-4, "bfloat16": None}
    )
    text = card(exported(protection=kept, max_lora_rank=64), None)
    assert "\nvllm serve org/base --enable-lora --max-lora-rank 64 --lora-modules adapter=path/to/this/folder\n" in text
    assert "Then rho is 1.2e-04 in float16 and - in bfloat16.\nServe in float16" in text
    merged = card(exported(form="merged", dtype="bfloat16", rank=None, max_lora_rank=None), None)
    assert "\nvllm serve path/to/this/folder\n" in merged
    assert "in float16" not in merged


def test_method_order_scores_drift_and_data_come_from_the_record():
    text = card(exported(), records.record())
    for said in (
        "the trained blocks as they are, factor for factor, in one ordinary PEFT adapter.",
        "# sfor: LoRA after task 4, agnews",
        "| definition | Shared() + ProjectGradient('A') + Freeze('B') + ProjectDisplacement('A') |",
        "| tasks, in order | dbpedia, amazon, yahoo, agnews |",
        "| base model | org/base, revision abc |",
        "| after | dbpedia | amazon | yahoo | agnews |\n|---|---:|---:|---:|---:|\n| dbpedia | 98.00 | | | |\n",
        "| agnews | 96.50 | 51.00 | 65.00 | 86.00 |",
        "AA 74.62, LA 75.50, BWT -1.17, FM 1.17.",
        "| agnews | 6.7e-09 | 1.0e-07 | yes | 7.0e-02 |",
        "Nothing: the stored factors are the trained ones.",
        "| TC/agnews/test.json | " + "a" * 64 + " | official bytes |",
        'AutoModelForCausalLM.from_pretrained("org/base", dtype="float32")',
    ):
        assert said in text, said
    assert text.endswith("\n")
    assert "\n\n\n" not in text


def test_an_earlier_task_is_scored_as_far_as_it_went():
    text = card(exported(source=SOURCE.model_copy(update={"number": 2, "task": "amazon"})), records.record())
    assert "AA 74.75, LA 75.00, BWT -0.50, FM 0.50." in text
    assert "| tasks, in order | dbpedia, amazon |" in text
    assert "| yahoo |" not in text


def test_what_a_form_cost_is_stated():
    costs = {
        "error": 0.0762,
        "protection": ExportedProtection(task="agnews", rho=5.8e-8, rho_exported=0.16, bound=2.3e-7, chance=0.32),
        "logits": Logits(sequences=8, tokens=256, largest=0.027, mean=0.0025, typical=0.099, changed=0.0117),
    }
    text = " ".join(card(exported(form="merged", dtype="bfloat16", rank=None, **costs), records.record()).split())
    for said in (
        "library_name: transformers",
        "base_model_relation: finetune",
        "Rounding to bfloat16 changed the update by 7.6e-02 of its size.",
        "was 5.8e-08 as trained and is 1.6e-01 as stored here (numerical tolerance 2.3e-07; rho of an unaligned change 3.2e-01)",
        "2.5e-03 on average and 2.7e-02 at most; the adapter itself changes them by 9.9e-02 (rms)",
        "The most likely token changes at 1.17% of the positions.",
        "| 0 | 32 | 0.0e+00 |",
    ):
        assert said in text, said


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"base": Base(name="folder", hub=None, revision=None)}, "`base_model` is not set above"),
        (
            {"base": Base(name="b", hub=None, revision=None, same=False)},
            "merged into a different model than the adapter was trained on",
        ),
        (
            {"source": SOURCE.model_copy(update={"finished": False, "number": 2})},
            "not finished when this was exported (task 2 of 4)",
        ),
        ({"source": SOURCE.model_copy(update={"kind": "adapter", "number": None})}, "came without a run's record"),
    ],
)
def test_what_is_not_known_is_said(changes, said):
    text = card(exported(**changes), None)
    assert said in text
    assert "## Scores" not in text
    assert "base_model:" not in text or changes.get("base") is None


def test_text_of_records_stays_text():
    fields = {
        "method": MethodFacts.model_validate(method_facts(EVIL, EVIL)),
        "recipe": EVIL,
        "versions": {EVIL: EVIL},
        "order": [EVIL] * 4,
    }
    record = records.record().model_copy(update={**fields, "data": {EVIL: DataFile(sha256=EVIL, kind=EVIL)}})
    source = SOURCE.model_copy(update={"task": EVIL})
    plain = card(exported(), records.record())
    text = card(exported(source=source, base=Base(name=EVIL, hub=None, revision=EVIL)), record)
    found, body = front_matter(text)
    assert found["tags"][-1] == " ".join(EVIL.split("\n"))
    assert set(found) <= {"library_name", "pipeline_tag", "tags"}
    assert "<script" not in body
    assert "</details>" not in body
    assert "](javascript" not in body.replace("\\]", "")
    assert "{{ 7*7 }}" in body.replace("\\", ""), "no template of theirs is run"
    assert [line for line in body.splitlines() if line.startswith("#")][1:] == [
        line for line in front_matter(plain)[1].splitlines() if line.startswith("#")
    ][1:]
    rows = [line for line in body.splitlines() if line.startswith("| ")]
    expected = [line for line in plain.splitlines() if line.startswith("| ")]
    cells = [len(re.findall(r"(?<!\\)\|", line)) for line in rows]
    assert cells == [len(re.findall(r"(?<!\\)\|", line)) for line in expected], "no cell begins or ends where it should not"


def test_escaping():
    assert as_text("a_b*c|d") == r"a\_b\*c\|d"
    assert as_text("<b>&") == "&lt;b&gt;&amp;"
    assert as_text("one\n\ntwo\u2028three\x85") == "one two three"
    assert as_text("http://x www.y") == r"http\://x www\.y"
    for evil in (EVIL, "a\u2028b", "\x85", "': [", '"\\', "\ud800"):
        assert isinstance(YAML(typ="safe", pure=True).load(f"k: {as_yaml(evil)}")["k"], str)
