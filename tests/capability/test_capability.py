"""General capability: scores equal to those by hand, a base measured once, prompts equal to lm_eval's, wrong folders refused."""

import json
import shutil
import socket
import tempfile
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import mmlu_folder
import models
from anchorlora.adapters import attach, read_adapter
from anchorlora.config import BaseModelSettings
from anchorlora.errors import NotFinite
from anchorlora.models.load import load_base_model
from anchorlora_lab.suites import mmlu
from anchorlora_lab.suites.evaluation import Flips, read_evaluation
from anchorlora_lab.suites.measure import Questions, base_scores, cache_file, cache_folder, evaluate, ingredients, target_of
from anchorlora_lab.suites.questions import EvalProgress

lm_eval = pytest.importorskip("lm_eval", minversion="0.4.12")
from lm_eval.tasks._yaml_loader import load_yaml  # noqa: E402

from anchorlora_lab.suites import harness  # noqa: E402  # needs lm_eval, as the next
from anchorlora_lab.suites.reader import Reader, quiet, shared_rows  # noqa: E402

TEMPLATES = Path(lm_eval.__file__).parent / "tasks/mmlu/default"


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return mmlu_folder.write_folder(tmp_path_factory.mktemp("mmlu"))


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return mmlu_folder.write_model(tmp_path_factory.mktemp("model") / "model")


@pytest.fixture(scope="module")
def by_hand(data, model):
    return mmlu_folder.answers_by_hand(data, model)


@pytest.fixture
def adapter(tmp_path, model):
    return mmlu_folder.write_an_adapter(tmp_path / "adapter", model, size=0.5)


@pytest.fixture
def ask(data, tmp_path):
    """Measure a folder, with a cache of the test's own."""

    def ask(folder, **changes):
        settings = {name: changes.pop(name) for name in ("force", "model", "watch") if name in changes}
        return evaluate(folder, Questions(data=data, **changes), cache=tmp_path / "cache", **settings)

    return ask


@pytest.fixture
def calls(monkeypatch):
    """What was measured, as the names of the model classes."""
    seen, inner = [], harness.HarnessTask.score

    def counting(self, model, *given, **settings):
        seen.append(type(model).__name__)
        return inner(self, model, *given, **settings)

    monkeypatch.setattr(harness.HarnessTask, "score", counting)
    return seen


def percent(pairs):
    return 100 * sum(said == right for said, right in pairs) / len(pairs)


@pytest.mark.slow
def test_scores_equal_a_computation_by_hand_on_every_question(ask, adapter, data, model, by_hand):
    assert len({said for pairs in by_hand.values() for said, _ in pairs}) == 4, "the model answers questions differently"
    with_adapter = mmlu_folder.answers_by_hand(data, model, adapter=adapter)
    first = ask(adapter, limit=1)
    assert {name: part.base for name, part in first.tasks[0].parts.items()} == {
        f"mmlu_{s}": percent(p[:1]) for s, p in by_hand.items()
    }
    assert {name: part.after for name, part in first.tasks[0].parts.items()} == {
        f"mmlu_{s}": percent(p[:1]) for s, p in with_adapter.items()
    }
    whole = ask(adapter, force=True, batch=3)
    for subject in mmlu.SUBJECTS:
        part = whole.tasks[0].parts[f"mmlu_{subject}"]
        assert (part.n, part.base, part.after) == (2, percent(by_hand[subject]), percent(with_adapter[subject]))
    assert whole.n == 114
    assert whole.base.score == pytest.approx(percent([p for pairs in by_hand.values() for p in pairs]), abs=1e-12)
    assert whole.after.score == pytest.approx(percent([p for pairs in with_adapter.values() for p in pairs]), abs=1e-12)
    assert whole.change == pytest.approx(whole.after.score - whole.base.score)
    assert whole.change != 0, "this adapter breaks the model"
    assert (whole.num_fewshot, whole.tasks[0].num_fewshot, whole.cut) == (None, 0, 0)
    old, new = ([float(said == right) for pairs in each.values() for said, right in pairs] for each in (by_hand, with_adapter))
    flips = whole.tasks[0].flips
    assert (flips.right_to_wrong, flips.wrong_to_right) == tuple(
        list(zip(old, new, strict=True)).count(p) for p in ((1, 0), (0, 1))
    )
    differences = torch.tensor([[b - a for a, b in zip(old[i : i + 2], new[i : i + 2], strict=True)] for i in range(0, 114, 2)])
    by_subject = differences.var(dim=1).mean() / 114  # two questions a subject, so every subject weighs 1/57
    assert whole.change_stderr == pytest.approx(100 * float(by_subject.sqrt()))


@pytest.mark.slow
def test_the_base_is_measured_once_and_again_when_its_file_is_damaged(ask, adapter, tmp_path, model, calls):
    first = ask(adapter, limit=1)
    assert calls == ["Qwen3ForCausalLM", "PeftModelForCausalLM"]
    assert ask(adapter, limit=1) == first
    assert len(calls) == 2, "the same request is only read"
    other = mmlu_folder.write_an_adapter(tmp_path / "other", model, size=0.5, seed=1)
    assert ask(other, limit=1).base == first.base
    assert calls[2:] == ["PeftModelForCausalLM"], "another adapter on the same base"
    (kept,) = (tmp_path / "cache").iterdir()
    notes = []
    watch = EvalProgress(note=notes.append)
    for damage in ('{"key"', "[]"):
        kept.write_text(damage)
        assert ask(adapter, limit=1, force=True, watch=watch) == first
        assert 100 * json.loads(kept.read_text())["measured"]["metrics"]["acc"]["score"] == first.base.score
    assert calls[3:] == ["Qwen3ForCausalLM", "PeftModelForCausalLM"] * 2
    assert [line.partition("json is ")[2] for line in notes] == ["damaged; measuring the base score again"] * 2


def test_the_cache_key_changes_with_each_ingredient(model, tmp_path):
    base_model = load_base_model(BaseModelSettings(model=str(model)))
    asked = {"task": "mmlu", "requests": "d", "limit": None, "num_fewshot": None, "apply_chat_template": False, "batch": 8}
    used = ("lm_eval", "transformers", "torch")
    keys = [ingredients(base_model, asked, packages=used)]
    keys += [ingredients(replace(base_model, **{name: "other"}), asked, packages=used) for name in ("sha256", "dtype")]
    others = {"task": "x", "requests": "e", "limit": 5, "num_fewshot": 0, "apply_chat_template": True, "batch": 1}
    keys += [ingredients(base_model, asked | {name: value}, packages=used) for name, value in others.items()]
    stopping = SimpleNamespace(generation_config=SimpleNamespace(eos_token_id=[7]))
    keys += [ingredients(replace(base_model, model=stopping), asked, packages=used), keys[0] | {"device": "other"}]
    keys += [keys[0] | {"versions": keys[0]["versions"] | {name: "0"}} for name in ("lm_eval", "torch", "transformers")]
    assert len({cache_file(tmp_path, key) for key in keys}) == len(keys) == 14


def test_a_model_without_a_hash_is_measured_each_time(tmp_path):
    notes = []
    assert base_scores(tmp_path / "cache", {"model": None}, lambda: "measured", notes.append) == "measured"
    assert "not cached" in notes[0]
    assert not (tmp_path / "cache").exists()


def test_the_cache_lies_where_the_user_keeps_caches(monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert cache_folder() == Path("/somewhere/anchorlora")
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert cache_folder() == Path.home() / ".cache/anchorlora"
    for name in ("HOME", "XDG_CACHE_HOME"):  # a container's user who has no name
        monkeypatch.delenv(name)
    monkeypatch.setattr("pwd.getpwuid", {}.__getitem__)
    assert cache_folder() == Path(tempfile.gettempdir()) / "anchorlora"


def test_an_adapter_whose_output_factor_is_zero_changes_nothing_at_all(ask, tmp_path, model):
    found = ask(mmlu_folder.write_an_adapter(tmp_path / "zero", model, size=0.0))
    assert found.change == 0
    assert found.base == found.after
    assert all(part.base == part.after for part in found.tasks[0].parts.values())
    assert found.tasks[0].flips == Flips(right_to_wrong=0, wrong_to_right=0)
    assert found.change_stderr == 0
    assert found.dropped(0) == []
    assert found.largest_drops(5) == []


def test_no_network_is_used_with_a_folder(ask, adapter, monkeypatch):
    def refuse(*args, **kwargs):
        raise AssertionError("the network was asked")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    assert ask(adapter, limit=1).n == 57


@pytest.mark.slow
def test_eval_json_holds_what_is_promised_and_another_request_does_not_replace_it(ask, adapter, model):
    found = ask(adapter, limit=1)
    content = json.loads((adapter / "eval.json").read_text())
    assert list(content)[:4] == ["schema", "task", "metric", "limit"]
    assert list(content["tasks"][0])[:6] == ["task", "metric", "n", "num_fewshot", "base", "after"]
    assert (content["schema"], content["task"], content["metric"], content["limit"], content["n"]) == (3, "mmlu", "acc", 1, 57)
    assert content["base"] == {"score": found.base.score, "stderr": None}, "one question a subject has no standard error"
    assert set(content["versions"]) == {"lm_eval", "transformers", "torch", "anchorlora"}
    assert content["base_model"]["name"] == str(model)
    with pytest.raises(ValueError, match="answers another request .limit: 1 there, 2 asked.*--force"):
        ask(adapter, limit=2)
    assert ask(adapter, limit=2, force=True).base.stderr == pytest.approx(pooled(found=read_evaluation(adapter / "eval.json")))
    (adapter / "eval.json").write_text("{")
    with pytest.raises(ValueError, match=r"eval.json: not complete JSON: .*delete it and run `anchorlora eval` again"):
        ask(adapter, limit=2)


def pooled(found):
    """lm_eval's standard error of a mean over subjects of equal size n: sqrt(mean of the subjects' sample variances / N)."""
    p = torch.tensor([part.base / 100 for part in found.tasks[0].parts.values()])
    variances = 2 * p * (1 - p)  # sample variance of n = 2 zeros and ones, over n - 1
    return 100 * float((variances.mean() / found.n).sqrt())


def test_examples_come_from_dev(data, model):
    tasks = harness.task_of_folder(mmlu.read_mmlu(data))
    (task,) = (task for name, task in tasks.leaves.items() if name == "mmlu_virology")
    task.set_config(key="num_fewshot", value=1)
    with quiet():
        task.build_all_requests(limit=1)
    shown = task.instances[0].args[0]
    example = mmlu.read_mmlu(data).rows["dev"]["virology"][0]
    assert f"{example['question'].strip()}\nA. {example['choices'][0]}\n" in shown
    assert f"Answer: {'ABCD'[example['answer']]}\n\n" in shown


@pytest.mark.slow
def test_prompts_are_those_of_lm_evals_own_templates(data, monkeypatch):
    """The YAML files that lm_eval ships, over the same rows: every prompt, choice and target is ours, with an example too."""
    rows = mmlu.read_mmlu(data)
    ours = harness.task_of_folder(rows)
    monkeypatch.setattr(mmlu, "task_config", shipped)
    theirs = harness.task_of_folder(rows)
    for few_shot in (0, 1):
        for name in ours.leaves:
            assert requests(ours.leaves[name], few_shot) == requests(theirs.leaves[name], few_shot)
            assert ours.leaves[name].aggregation().keys() == theirs.leaves[name].aggregation().keys()
    own = [rows.rows["test"]["virology"][0][key] for key in ("question", "choices", "answer")]
    request = requests(ours.leaves["mmlu_virology"], 0)[0]
    assert request == (mmlu_folder.prompt("virology", [own[0], *own[1], "ABCD"[own[2]]]), " A", own[2])
    group = load_yaml(TEMPLATES / "_mmlu.yaml")
    assert (group["aggregate_metric_list"], group["metadata"]) == (mmlu.GROUP["aggregate_metric_list"], mmlu.GROUP["metadata"])
    assert {p.stem.removeprefix("mmlu_") for p in TEMPLATES.glob("mmlu_*.yaml")} == set(mmlu.SUBJECTS)


def shipped(subject):
    config = load_yaml(TEMPLATES / f"mmlu_{subject}.yaml")
    return {name: value for name, value in config.items() if name not in ("dataset_path", "dataset_name")}


def requests(task, few_shot):
    """(prompt, continuation, right answer) of every request."""
    task.set_config(key="num_fewshot", value=few_shot)
    task.set_fewshot_seed(seed=1)
    with quiet():
        task.build_all_requests()
    return [(*instance.args, task.doc_to_target(instance.doc)) for instance in task.instances]


def test_a_byte_order_mark_is_no_part_of_a_question(tmp_path):
    folder = mmlu_folder.write_folder(tmp_path / "mmlu")
    (folder / "test/anatomy_test.csv").write_text("Which?,a,b,c,d,A\n", encoding="utf-8-sig")
    assert mmlu.read_mmlu(folder).rows["test"]["anatomy"][0]["question"] == "Which?"


def test_a_missing_subject_is_named(tmp_path):
    folder = mmlu_folder.write_folder(tmp_path / "mmlu")
    (folder / "test/anatomy_test.csv").unlink()
    (folder / "dev/virology_dev.csv").unlink()
    with pytest.raises(ValueError, match=r"2 of 114 files are missing: dev/virology_dev.csv, test/anatomy_test.csv"):
        mmlu.read_mmlu(folder)
    with pytest.raises(ValueError, match=r"is not a folder; give the MMLU folder .*nearest: .*mmlu"):
        mmlu.read_mmlu(tmp_path / "mmlo")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("q,a,b,c,d,A\nq,a,b,c,d\n", r"line 2: 5 columns, expected 6"),
        ('"two\nlines",a,b,c,d,A\nq,a,b,c,d,E\n', r"line 3: the answer is 'E', expected A, B, C or D"),
        ("q,a,b,c,d,a\n", r"line 1: the answer is 'a'"),
        ('q,a,b,c,d,A\n"open,a,b,c,d,A\n', r"line 2: not readable as CSV"),
        ("", r"holds no question"),
    ],
)
def test_a_malformed_row_is_named_with_file_and_line(text, message, tmp_path):
    folder = mmlu_folder.write_folder(tmp_path / "mmlu")
    (folder / "test/anatomy_test.csv").write_text(text)
    with pytest.raises(ValueError, match=rf"anatomy_test.csv.*{message}"):
        mmlu.read_mmlu(folder)


def test_an_input_longer_than_the_model_is_counted(ask, model, tmp_path):
    short = tmp_path / "short"
    mmlu_folder.write_model(short)
    config = json.loads((short / "config.json").read_text())
    (short / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 16}))
    assert ask(mmlu_folder.write_an_adapter(tmp_path / "adapter", short, size=0.1), limit=1).cut == 57


def test_scores_that_are_nan_stop_the_measurement(ask, adapter, model):
    attached = load_base_model(BaseModelSettings(model=str(model)))
    with torch.no_grad():
        attached.model.lm_head.weight.fill_(float("nan"))
    reader = Reader(attached.model, attached.tokenizer, batch=1, watch=EvalProgress())
    with pytest.raises(NotFinite, match="NaN"):
        reader._model_call(torch.tensor([[1, 2]]))


@pytest.mark.parametrize("make", [models.qwen3, models.gpt2])
@given(drawn=st.randoms(use_true_random=False))
def test_packed_rows_score_what_lm_eval_scores_and_read_no_more_tokens(make, drawn):
    """Solved examples before drawn questions with drawn choices, some of them cut, some asked twice, some whole texts."""
    torch.manual_seed(drawn.randrange(1000))
    model, tokenizer = make(vocab=300).eval(), models.tokenizer(["a choice of words"], size=300)
    if make is models.gpt2:
        with torch.no_grad():
            for p in model.parameters():
                p.normal_(std=0.3)

    def ids(most, least=1):
        return [drawn.randrange(3, 300) for _ in range(drawn.randint(least, most))]

    requests = []
    for shots in (ids(40, 0), ids(40, 0)):
        for number in range(drawn.randint(1, 5)):
            context = shots + ids(12)
            choices = [ids(1 if number % 2 else 5) for _ in range(4)]
            requests += [((f"{len(requests)}", ""), context, choice) for choice in [*choices, choices[0]]]
    requests += [(None, [0], ids(60, 50)), (None, ids(90, 60), ids(9))]
    drawn.shuffle(requests)
    ours, theirs = (kind(model, tokenizer) for kind in (_Counting, _Plain))
    found, expected = (reader._loglikelihood_tokens(requests) for reader in (ours, theirs))
    assert [same for _, same in found] == [same for _, same in expected]
    assert [value for value, _ in found] == pytest.approx([value for value, _ in expected], abs=1e-3, rel=1e-4)
    assert ours.watch.done == ours.watch.total
    assert ours.read <= theirs.read
    assert ours.cut == len({(*c, *a[:-1]) for _, c, a in requests if len(c) + len(a) - 1 > 64})


class _Counting(Reader):
    """Counts the tokens that the model reads for scores, padding included."""

    def __init__(self, model, tokenizer):
        super().__init__(model, tokenizer, batch=4, watch=_Bar())
        self._max_length, self.read = 64, 0

    def _log_p(self, row, prefix):
        self.read += prefix + sum(len(ids) - prefix for ids, _ in row)
        return super()._log_p(row, prefix)

    def _model_call(self, inps, attn_mask=None, labels=None):
        self.read += inps.numel()
        return super()._model_call(inps, attn_mask=attn_mask, labels=labels)


class _Plain(_Counting):
    def _unpacked(self, inputs):
        return True


class _Bar:
    def begins(self, total):
        self.done, self.total = 0, total

    def advance(self, count):
        self.done += count


def test_solved_examples_are_read_once_a_row():
    shots, questions = tuple(range(3, 203)), [tuple(range(3 + i, 23 + i)) for i in range(30)]
    inputs = sorted(((*shots, *question), 1) for question in questions)
    rows = list(shared_rows(inputs, 8 * 220))
    assert sum(prefix + sum(len(ids) - prefix for ids, _ in row) for prefix, row in rows) < 0.2 * 30 * 220
    assert [each for _, row in rows for each in row] == inputs


def test_an_adapter_is_attached_as_saved_or_refused(adapter, model, tmp_path):
    fresh = load_base_model(BaseModelSettings(model=str(model))).model
    attached = attach(fresh, adapter)
    saved = read_adapter(adapter)
    for layer, f in saved.items():
        module = attached.base_model.model.get_submodule(layer)
        assert torch.equal(module.lora_A["default"].weight, f.A)
        assert module.scaling["default"] == f.scale
    assert not any(p.requires_grad for p in attached.parameters())
    config = adapter / "adapter_config.json"
    fields = json.loads(config.read_text())
    plain = load_base_model(BaseModelSettings(model=str(model))).model
    for change, message in (
        ({"megatron_config": {"a": 1}}, "names code to import"),
        ({"target_modules": ["q_proj"]}, "do not fit"),
    ):
        config.write_text(json.dumps(fields | change))
        with pytest.raises(ValueError, match=message):
            attach(plain, adapter)
    other = mmlu_folder.models.qwen3(hidden_size=32, num_hidden_layers=2)
    config.write_text(json.dumps(fields))
    with pytest.raises(ValueError, match="belongs to another model"):
        attach(other, adapter)


def test_what_is_no_adapter_and_no_run_is_refused(tmp_path, model, adapter):
    with pytest.raises(ValueError, match="there is no folder"):
        target_of(tmp_path / "nowhere")
    (tmp_path / "runs").mkdir()
    with pytest.raises(ValueError, match="neither a run directory .* nor a saved adapter"):
        target_of(tmp_path / "runs")
    shutil.copytree(adapter, tmp_path / "runs/one/adapter")
    shutil.copytree(adapter, tmp_path / "runs/one/other")
    with pytest.raises(ValueError, match=r"runs/one holds 2 adapters \(adapter, other\); give one of them, or all as one"):
        target_of(tmp_path / "runs/one")
    fields = json.loads((adapter / "adapter_config.json").read_text())
    (adapter / "adapter_config.json").write_text(json.dumps(fields | {"base_model_name_or_path": None}))
    with pytest.raises(ValueError, match="names no base model; give one with --model"):
        target_of(adapter)
    assert target_of(adapter, model=str(model)).base_model.model == str(model)


class Manager:
    """lm_eval's index of tasks, with three that need no hub."""

    def __init__(self):
        self.made = harness.task_of_folder(Manager.rows)
        self.all_tasks = self.task_index = dict.fromkeys(
            ["mmlu", "mmlu_virology", "odd", "writes_code", "two", "gone", "needy", "needs_more"]
        )

    def load(self, names):
        (name,) = names
        leaves = dict(self.made.leaves)
        if name == "mmlu":
            return {"tasks": leaves, "groups": dict(self.made.groups)}
        if name == "two":  # a tag
            return {"tasks": {n: leaves[n] for n in ("mmlu_anatomy", "mmlu_virology")}}
        if name == "gone":
            raise ConnectionError("Couldn't reach the hub\nmore")
        if name in ("needy", "needs_more"):
            missing = "langdetect" if name == "needy" else "sympy"
            raise ModuleNotFoundError(f"No module named {missing!r}", name=missing)
        leaves["mmlu_virology"].UNSAFE_CODE = name == "writes_code"
        if name == "odd":
            leaves["mmlu_virology"].aggregation = lambda: {"word_perplexity": None}
        return {"tasks": {"mmlu_virology" if name == "mmlu_virology" else name: leaves["mmlu_virology"]}}


@pytest.fixture
def manager(data, monkeypatch):
    monkeypatch.setattr(Manager, "rows", mmlu.read_mmlu(data), raising=False)
    monkeypatch.setattr(harness, "TaskManager", Manager)


@pytest.mark.slow
def test_a_list_of_tasks_scores_their_mean_and_shows_each(manager, adapter, by_hand, tmp_path):
    found = evaluate(adapter, Questions(("mmlu", "mmlu_virology")), cache=tmp_path / "cache")
    whole, one = percent([p for pairs in by_hand.values() for p in pairs]), percent(by_hand["virology"])
    assert found.base.score == pytest.approx((whole + one) / 2)
    assert [(task.task, task.base.score) for task in found.tasks] == [("mmlu", pytest.approx(whole)), ("mmlu_virology", one)]
    assert [len(task.parts) for task in found.tasks] == [57, 0]
    assert (found.task, found.metric, found.files) == ("mmlu,mmlu_virology", "acc", {})
    tag = evaluate(adapter, Questions(("two",)), cache=tmp_path / "cache", force=True)
    assert tag.base.score == pytest.approx((percent(by_hand["anatomy"]) + one) / 2)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("mmlu_virologi", "lm_eval has no task 'mmlu_virologi'; nearest: mmlu_virology"),
        (
            "gone",
            "task gone cannot be loaded: Couldn't reach the hub; its data come from .*: run once where there is a network",
        ),
        ("needy", r"task needy needs langdetect, which is not installed: pip install 'anchorlora\[eval\]'"),
        ("needs_more", "needs sympy, which is not installed: pip install sympy"),
        ("writes_code", "runs code that the model writes"),
        ("odd", r"task odd cannot be scored in percent: no metric of it is a fraction of 1 \(word_perplexity\)"),
    ],
)
def test_a_task_that_cannot_be_had_or_scored_is_refused_early(name, message, manager, adapter, tmp_path, monkeypatch):
    monkeypatch.setattr("anchorlora_lab.suites.measure.load_base_model", None)
    with pytest.raises((ValueError, LookupError, ImportError), match=message):
        evaluate(adapter, Questions((name,)), cache=tmp_path / "cache")
    assert not (adapter / "eval.json").exists()
