"""The files of `anchorlora train` are sealed like a run's: what it reads, what it leaves, and who may write."""

import io
import json
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from contextlib import redirect_stdout
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer

import forked
import models
from anchorlora import embedded
from anchorlora.cli.app import main
from anchorlora.config import BaseModelSettings
from anchorlora.errors import Interrupted, InvalidValue
from anchorlora.features import read_cores
from anchorlora.methods import METHODS
from anchorlora.models.load import load_base_model
from anchorlora.models.trust import refuse_foreign
from anchorlora.store.files import load_yaml, write_text
from anchorlora.store.lock import Lease
from anchorlora.store.record import read_record
from anchorlora.store.run_folder import RunFolder, refuse_damaged_adapter
from anchorlora.store.seal import read_sealed, sha256
from anchorlora.text import without_secrets
from anchorlora.train import train as module
from anchorlora.train import verdict as judging
from anchorlora.train.kept import refuse_repeated
from anchorlora.train.request import SkillRequest, default_recipe, name_of_data, skill_request
from anchorlora.train.sealed import compare_inputs, keep_inputs, refuse_damaged_past, seal_skill
from skills import FEW, NARROW, rows, written

ADAPTER = "adapter/adapter_model.safetensors"


@pytest.fixture(scope="module")
def data(less_data, small_model):
    """The files, and the model of random weights: seals do not ask what was learned."""
    return {**less_data, "model": str(small_model)}


def command(data, out, *more):
    return ["train", data["model"], "--data", data["news"], "--keep", data["reviews"], "--out", str(out), *more, *FEW, *NARROW]


def refused(words, capsys, *said):
    capsys.readouterr()
    assert main(words) == 2
    err = capsys.readouterr().err
    line = err.splitlines()[-1]
    assert line.startswith("error: ")
    assert "Traceback" not in err
    for each in said:
        assert each in line
    return err


def randomized(file):
    save_file({name: torch.randn_like(t) for name, t in load_file(file).items()}, file)


def rescored(file):
    file.write_text(file.read_text().replace('"loss": ', '"loss": 1', 1))


DAMAGES = {
    "adapter": (ADAPTER, randomized),
    "memory": ("skill/after/memory.safetensors", lambda file: file.write_bytes(file.read_bytes()[:-4] + b"abcd")),
    "probes": ("skill/before/probes/reviews.jsonl", Path.unlink),
    "scores": ("skill/after/scores.json", rescored),
    "verdict": ("skill/verdict.json", rescored),
    "seal": ("skill/SEAL.json", Path.unlink),
    "template": ("adapter/chat_template.jinja", lambda file: file.write_text("{{ messages[0].content }}")),
}


def test_a_finished_skill_is_read_by_every_reader_with_what_eval_and_people_put_beside_its_adapter(finished, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(finished, run)
    for name in ("README.md", "eval.json"):
        (run / "adapter" / name).write_text("{}")
    RunFolder(run).refuse_damaged_skill()
    refuse_damaged_adapter(run / "adapter")


@pytest.mark.parametrize("what", DAMAGES)
def test_a_damaged_skill_is_neither_shown_nor_continued_from_nor_exported(what, finished, data, tmp_path, capsys):
    name, damage = DAMAGES[what]
    run = tmp_path / "run"
    shutil.copytree(finished, run)
    damage(run / name)
    if what != "seal":  # which the same command writes again
        refused(command(data, run), capsys, str(run / name))
    name = name if what != "seal" else ""  # "has not been trained to its end"
    new = ["train", data["model"], "--data", data["questions"], "--out", str(tmp_path / "new"), *FEW]
    refused([*new, "--after", str(run)], capsys, str(run / name))
    refused([*new, "--keep", str(run)], capsys, str(run / name))
    refused([*new, "--adapter", str(run / "adapter"), "--keep", data["reviews"]], capsys, str(run / name))
    (tmp_path / "link").symlink_to(run / "adapter")
    refused([*new, "--adapter", str(tmp_path / "link"), "--keep", data["reviews"]], capsys, str(run / name))
    for read in (run, run / "adapter", tmp_path / "link"):
        refused(["export", str(read), "--out", str(tmp_path / "exported")], capsys, str(run / name))
    refused(["audit", str(finished), str(run)], capsys, str(run / name))
    assert not (tmp_path / "new").exists()


def test_an_export_of_a_skill_names_its_data_without_the_folder(finished, data, tmp_path):
    assert main(["export", str(finished), "--out", str(tmp_path / "out")]) == 0
    for file in (tmp_path / "out").iterdir():
        assert str(Path(data["news"]).parent).encode() not in file.read_bytes(), file.name
    card = (tmp_path / "out/README.md").read_text()
    assert f"\n| news.jsonl | {sha256(Path(data['news']))} | own |\n" in card
    assert 'from_pretrained("path/to/the/base/model", dtype="float32")\n' in card, "the type that it was tested in"


def test_an_earlier_skill_belongs_to_the_weights_that_it_was_trained_on_in_whatever_folder(finished, data, tmp_path, capsys):
    copy, other = (Path(shutil.copytree(data["model"], tmp_path / name)) for name in ("copy", "other"))
    randomized(other / "model.safetensors")
    words = ["--out", str(tmp_path / "new"), *FEW]
    for option in ("--after", "--keep"):
        new = ["train", str(other), "--data", data["questions"], option, str(finished)]
        refused([*new, *words], capsys, f"{finished} was trained on other weights ({data['model']}) than those of {other}")
        assert not (tmp_path / "new").exists()
    (tmp_path / "none.jsonl").write_text('{"prompt": "a"}\n')
    same = ["train", str(copy), "--data", str(tmp_path / "none.jsonl"), "--after", str(finished), *words]
    refused(same, capsys, "none.jsonl, line 1")  # the next thing to be read


def test_a_damaged_task_of_a_run_is_no_old_adapter(finished, data, tmp_path, capsys):
    run = tmp_path / "run"
    shutil.copytree(finished, run)
    task = run / "tasks/1-news/adapter"
    randomized(task / "adapter_model.safetensors")
    words = ["train", data["model"], "--data", data["questions"], "--out", str(tmp_path / "new"), *FEW]
    refused([*words, "--adapter", str(task), "--keep", data["reviews"]], capsys, str(task / "adapter_model.safetensors"))


def test_the_config_of_a_skill_repeats_its_run(finished, tmp_path):
    assert main(["run", str(finished / "config.yaml"), "--out", str(tmp_path / "again")]) == 0
    one, again = (json.loads((folder / "record.json").read_text()) for folder in (finished, tmp_path / "again"))
    differing = {name for name in one if one[name] != again[name]} - {"cost", "started", "finished", "sha256"}
    assert differing <= {"layers", "files"}, "a run also makes the cores of a next task; a skill leaves rows to a later one"
    others = {name for name, known in one["files"].items() if again["files"][name] != known}
    assert others <= {"tasks/1-news/cores.safetensors"}
    assert one["protocol"]["tuned"] == {"AnswerSensitivity.alike": 1, "GradientStart.examples": 16, "KroneckerBrake.strength": 30}


def test_the_old_adapter_of_a_run_is_that_after_its_last_task(finished, data, tmp_path):
    run = shutil.copytree(finished, tmp_path / "run", ignore=shutil.ignore_patterns("skill"))
    shutil.rmtree(run / "adapter")  # as `anchorlora run` leaves it
    given = {"base_model": {"model": data["model"]}, "data": data["news"], "old_adapter": str(run)}
    asked = skill_request(given, same_size=False, method="inc-lora", methods=METHODS)
    assert asked.old_adapter == str(run / "tasks/1-news/adapter")


def test_a_second_first_task_in_the_run_directory_is_no_fault_of_ours_and_a_missing_one_is_said(finished, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(finished, run)
    shutil.copytree(run / "tasks/1-news", run / "tasks/1-copy")
    request = requested(run)
    seal_skill(request, run)
    shutil.rmtree(run / "tasks/1-news")
    with pytest.raises(InvalidValue, match=r"tasks/1-news/adapter is missing"):
        seal_skill(request, run)


def requested(run):
    return SkillRequest.model_validate(load_yaml(run / "skill/request.yaml"))


def test_an_earlier_skill_named_from_the_home_folder_is_checked_as_any(finished, data, tmp_path, monkeypatch):
    run = tmp_path / "run"
    shutil.copytree(finished, run)
    randomized(run / ADAPTER)
    monkeypatch.setenv("HOME", str(tmp_path))
    fields = {"base_model": BaseModelSettings(model="embedded:mini"), "data": data["news"], "name": "n", "method": "inc-lora-hard"}
    for past in ({"after": "~/run"}, {"keep": ("~/run",)}, {"old_adapter": "~/run/adapter"}):
        with pytest.raises(InvalidValue, match="adapter_model.safetensors is not what was written"):
            refuse_damaged_past(SkillRequest(**fields, **past))


@pytest.mark.parametrize("name", ["model.safetensors", "code.py", "additional_chat_templates/tools.jinja", "tokenizer.tiktoken"])
def test_every_file_that_a_model_is_loaded_from_is_compared(name, data, tmp_path):
    model = shutil.copytree(embedded.folder("embedded:mini", "base_model"), tmp_path / "model")
    (model / name).parent.mkdir(exist_ok=True)
    (model / name).touch()
    fields = {"data": data["news"], "name": "n", "method": "inc-lora-hard"}
    request = SkillRequest(base_model=BaseModelSettings(model=str(model)), **fields)
    keep_inputs(request, tmp_path)
    compare_inputs(request, tmp_path)
    (model / name).write_bytes((model / name).read_bytes() + b" ")
    with pytest.raises(InvalidValue, match=f"{name} was changed since this skill was begun"):
        compare_inputs(request, tmp_path)


def test_a_skill_on_a_model_of_the_hub_stays_with_the_commit_that_it_began_with(data, tmp_path, monkeypatch):
    cache, commit, later = tmp_path / "hub/models--org--m", "0" * 40, "f" * 40
    for each in (commit, later):
        shutil.copytree(data["model"], cache / "snapshots" / each)
    (cache / "snapshots" / later / "model.safetensors").unlink()
    (cache / "refs").mkdir()
    (cache / "refs/main").write_text(commit)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    real, out = module.stages.before, tmp_path / "out"

    def then_moved(*args, **named):
        real(*args, **named)
        (cache / "refs/main").write_text(later)

    monkeypatch.setattr(module.stages, "before", then_moved)
    words = command({**data, "model": "org/m"}, out)
    assert main(words) == 0
    assert read_sealed(out / "skill/inputs.json", dict[str, str])["org/m"] == commit
    assert read_record(out / "record.json").base_model.revision == commit
    assert main(words) == 0


@pytest.fixture(scope="module")
def named(data, tmp_path_factory):
    """A skill with names in any letters, the one after it, the command of the second, and what the first one's said."""
    folder = tmp_path_factory.mktemp("named")
    kept, first, second = shutil.copy(data["reviews"], folder / "kört 本.jsonl"), folder / "first", folder / "second"
    with redirect_stdout(io.StringIO()) as said:
        assert main(command({**data, "reviews": kept}, first, "--name", "Mün <b> 技能")) == 0
    words = ["train", data["model"], "--data", data["questions"], "--after", str(first), *FEW]
    assert main([*words, "--out", str(second)]) == 0
    return first, second, words, said.getvalue()


def test_a_finished_skill_is_shown_when_it_was_moved_cannot_be_written_or_has_lost_its_past(named, tmp_path, capsys, monkeypatch):
    first, second, words, _ = named
    moved = shutil.move(shutil.copytree(second, tmp_path / "second"), tmp_path / "moved")

    def read_only(*_):
        raise OSError(30, "Read-only file system", "index.html")

    monkeypatch.setattr("anchorlora.pages.verdict.write_verdict", read_only)
    before = {file: file.stat().st_mtime_ns for file in moved.rglob("*")}
    first.rename(tmp_path / "lost")
    try:
        assert main([*words, "--out", str(moved)]) == 0
    finally:
        (tmp_path / "lost").rename(first)
    said = capsys.readouterr().out
    assert "finished before" in said
    assert str(second) not in said.replace(f"{moved}", "")
    assert said.count(f"{moved}/adapter") == 2, "where it is, and how it is served"
    assert before == {file: file.stat().st_mtime_ns for file in moved.rglob("*")}


def test_data_that_change_between_two_stages_are_refused_and_what_was_done_is_kept(data, tmp_path, capsys, monkeypatch):
    news, test = (Path(written(tmp_path / f"{name}.jsonl", rows("news", "train", n))) for name, n in (("news", 40), ("test", 6)))
    out = tmp_path / "out"
    words = command({**data, "news": str(news)}, out, "--test", str(test))
    rewritten, appended = (lambda text: text[: text.rindex("\n")]), (lambda text: text + "\n" + text)
    for stage, owner in (("before", module.stages), ("run_sequence", module), ("after", module.stages)):
        for changed, change in ((news, rewritten), (news, appended), (test, rewritten)):
            original, real = changed.read_text(), getattr(owner, stage)
            other = change(original)
            shutil.rmtree(out / "skill" / stage, ignore_errors=True)  # so that the stage is gone through once more

            def then_changed(*args, real=real, changed=changed, content=other, **named):
                real(*args, **named)
                changed.write_text(content)

            with monkeypatch.context() as patched:
                patched.setattr(owner, stage, then_changed)
                refused(words, capsys, f"{changed} was changed")
            assert (out / "skill/before/scores.json").is_file()
            refused(words, capsys, f"{changed} was changed")
            changed.write_text(original)
    assert main(words) == 0


def test_a_process_that_was_killed_while_it_read_data_is_continued(data, tmp_path):
    out, big = tmp_path / "out", tmp_path / "big.jsonl"
    big.write_text("\n".join(json.dumps(row) for row in rows("news", "train", 40) * 4000))
    words = command({**data, "news": str(big)}, out)
    process = forked.program(words, said=tmp_path / "said")
    try:
        until = time.monotonic() + 60
        while not list(out.glob(".skill.*.tmp")) and time.monotonic() < until:
            time.sleep(0.001)
    finally:
        process.kill()
        process.join()
    assert list(out.glob(".skill.*.tmp"))
    assert not (out / "skill").exists()
    assert main(command(data, out)) == 0
    assert not list(out.glob(".*"))


def test_a_second_process_says_so_in_one_line_and_touches_nothing(data, tmp_path, capsys, monkeypatch):
    out = tmp_path / "out"
    out.mkdir()
    other = "import sys, time; from pathlib import Path; from anchorlora.store import lock; lock.HEARTBEAT = 0.2;"
    other += "lease = lock.Lease(Path(sys.argv[1])); lease.take(); print(flush=True); time.sleep(60)"
    process = subprocess.Popen([sys.executable, "-c", other, str(out / ".lease")], stdout=subprocess.PIPE)
    try:
        process.stdout.readline()
        monkeypatch.setattr("anchorlora.store.lock.HEARTBEAT", 0.2)  # both are of one version
        refused(command(data, out), capsys, f"{out} is in use by process {process.pid}")
        assert [place.name for place in out.iterdir()] == [".lease"]
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def test_a_lent_lease_is_held_by_objects_made_in_the_block_and_released_by_its_owner_alone(tmp_path):
    with Lease(tmp_path / ".lease") as lease:
        lease.take()
        assert not Lease(tmp_path / ".lease").try_take()
        with lease.lent(), Lease(tmp_path / ".lease") as inner:
            inner.take()
            inner.check()
            assert inner.held
        assert lease.held
        lease.check()


@pytest.mark.parametrize(
    ("setting", "instead"),
    [
        ("model=B", "MODEL"),
        ("base_model.model=B", "MODEL"),
        ("tasks.data=B", "--data"),
        ("targets=q_proj", "--targets"),
        ("old_adapter=B", "--adapter"),
        ("start.old_cores=B", "--keep"),
        ("seed=1", "--seed"),
        ("name=x", "--name"),
    ],
)
def test_a_field_that_the_request_has_already_is_refused_in_set(setting, instead, data, tmp_path, capsys):
    refused(command(data, tmp_path / "out", "--set", setting), capsys, f"--set {setting.split('=')[0]}", instead)


def test_what_is_refused_leaves_no_folder_that_was_not_there(data, tmp_path, capsys):
    refused(command({**data, "news": str(tmp_path / "none.jsonl")}, tmp_path / "runs/new"), capsys, "there is no file")
    assert list(tmp_path.iterdir()) == []


def test_a_row_beyond_the_positions_of_a_model_is_refused_before_any_work(data, tmp_path, capsys):
    model, news = shutil.copytree(data["model"], tmp_path / "model"), rows("news", "train", 20)
    small = models.gpt2(vocab=len(AutoTokenizer.from_pretrained(model)))
    small.generation_config.pad_token_id = 0
    small.save_pretrained(model)
    file = written(tmp_path / "news.jsonl", news)
    words = command({**data, "model": str(model), "news": file}, tmp_path / "out")
    said = " tokens, and the model has 128 positions; set max_tokens=128 (--max-length of train)"
    refused(["c_attn" if word == NARROW[1] else word for word in words], capsys, f"{file}, line 1: ", said)
    assert not (tmp_path / "out").exists()
    tasks = tmp_path / "tasks.yaml"
    tasks.write_text(f"tasks: {{news: {{train: {file}}}}}")
    words = ["run", "standard-cl", "--method", "seq-lora", "--model", str(model), "--data", str(tasks), "--set", "targets=c_attn"]
    refused([*words, "--out", str(tmp_path / "run")], capsys, said)


def test_a_token_that_only_the_tokenizer_has_is_named_with_its_row_and_pads_nothing(data, tmp_path, capsys):
    model, news = shutil.copytree(data["model"], tmp_path / "model"), rows("news", "train", 20)
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.add_special_tokens({"pad_token": "<|new|>"})
    tokenizer.save_pretrained(model)
    news[3]["prompt"] = "<|new|> " + news[3]["prompt"]
    file = written(tmp_path / "news.jsonl", news)
    said = f"{file}, line 4: the token '<|new|>' has number {len(tokenizer) - 1}, and the model has {len(tokenizer) - 1} tokens"
    refused(command({**data, "model": str(model), "news": file}, tmp_path / "out"), capsys, said)
    assert not (tmp_path / "out").exists()
    tasks = tmp_path / "tasks.yaml"
    tasks.write_text(f"tasks: {{news: {{train: {file}}}}}")
    words = ["run", "standard-cl", "--method", "seq-lora", "--model", str(model), "--data", str(tasks)]
    refused([*words, "--out", str(tmp_path / "run")], capsys, said)
    loaded = load_base_model(BaseModelSettings(model=str(model)))
    assert loaded.model.generation_config.pad_token_id == loaded.tokenizer.pad_token_id == tokenizer.eos_token_id


def test_a_skill_too_short_for_a_core_is_refused_before_training(data, tmp_path, capsys):
    file = written(tmp_path / "short.jsonl", [{"text": "a"}, {"text": "b"}])
    words = command({**data, "news": file}, tmp_path / "out", "--method", "inc-lora-hard")
    said = refused(words, capsys, "short has 2 different tokens, but a core needs at least 4 feature rows; give more text")
    assert "training" not in said
    assert not (tmp_path / "out").exists()


def test_a_skill_whose_rows_are_alike_leaves_the_directions_that_there_are_and_kept_rows_are_refused(data, tmp_path, capsys):
    """Of 16 tokens that rows are made from, few are others than one that is said again and again."""
    alike = [{"text": "a " * 60 + "b c d e" * (number == 7)} for number in range(30)]
    file, few = written(tmp_path / "alike.jsonl", alike), ["--method", "inc-lora-hard", "--set", "epochs=1", "--set", "rows=16"]
    words = ["train", data["model"], "--data", file, "--keep", data["reviews"], *FEW, *NARROW, *few, "--out"]
    assert main([*words, str(tmp_path / "out")]) == 0
    assert read_cores(tmp_path / "out/skill/after/cores.safetensors")
    said = ", but a core needs at least 4; give more varied text, or lower at_least"
    words[3], words[5] = data["news"], file
    refused([*words, str(tmp_path / "kept")], capsys, said)


def test_a_rank_that_the_fold_would_cut_is_refused_with_a_way_out(data, tmp_path, capsys):
    asked = command(data, tmp_path / "out", "--rank", "128", "--dry-run")
    refused(asked, capsys, "--rank 128: fold-64 folds what it learns into an adapter of rank 64", "--set FoldedPerTask.rank=128")
    assert main([*asked, "--set", "FoldedPerTask.rank=128"]) == 0


def test_a_method_that_would_be_plain_lora_is_refused(data, tmp_path, capsys):
    refused(command(data, tmp_path / "out", "--method", "lwf"), capsys, "plain LoRA", "--keep FILE")


def test_names_may_have_any_letters(data):
    assert [name_of_data(f"{stem}.jsonl") for stem in ("dätä", "my skill", "a..b", "con")] == ["data", "my-skill", "a", "skill-con"]
    assert name_of_data("技能.jsonl") != name_of_data("本.jsonl")
    assert [name_of_data(name) for name in ("/mnt/C:/news.jsonl", "org/news:train", "news:2.jsonl")] == ["news"] * 3
    with pytest.raises(InvalidValue, match="both called News"):  # one file, where case does not count
        refuse_repeated(["News", "news"], "questions")
    given = {"base_model": BaseModelSettings(model="embedded:mini").model_dump(), "data": data["news"], "keep": ("self",)}
    request = skill_request(given | {"name": "my skill"}, same_size=False, method=None, methods=METHODS)
    assert (request.name, request.title) == ("my-skill", "my skill")


def test_passwords_are_not_printed(data, tmp_path, capsys):
    words = command({**data, "news": "https://me:hunter2@example.org/x.jsonl"}, tmp_path / "out")
    assert "hunter2" not in refused(words, capsys, "data: contains a password")
    assert without_secrets("user:hunter2@org/m") == "org/m"
    assert without_secrets("a: b@org/m 12:30") == "a: b@org/m 12:30"


def test_an_attention_kernel_from_elsewhere_is_refused_as_code_is(tmp_path):
    for config in ({"attn_implementation": "org/kernel"}, {"text_config": {"_attn_implementation": "org/kernel"}}):
        (tmp_path / "config.json").write_text(json.dumps(config))
        with pytest.raises(InvalidValue, match="org/kernel"):
            refuse_foreign(tmp_path, code=False)


def test_set_trust_remote_code_reaches_the_model(data, tmp_path, monkeypatch, capsys):
    seen = []

    def taken(request, *_, **__):
        seen.append(request.base_model.trust_remote_code)
        raise InvalidValue("enough")

    monkeypatch.setattr("anchorlora.train.train.train_skill", taken)
    refused(command(data, tmp_path / "out", "--set", f"trust_remote_code={'a' * 40}"), capsys, "enough")
    assert seen == ["a" * 40]


def test_a_full_disk_is_said_with_the_name_of_the_file(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError, match="No space") as error:
        write_text(tmp_path / "index.html", "page")
    assert error.value.filename == str(tmp_path / "index.html")


def test_an_answer_that_is_too_long_is_found_before_the_model_is_loaded(data, tmp_path, capsys, monkeypatch):
    long = [*rows("news", "train", 39), {"prompt": "a", "completion": " word" * 2000}]
    own = {**data, "news": written(tmp_path / "long.jsonl", long)}
    with monkeypatch.context() as patched:
        patched.setattr(module.stages, "before", None)
        refused(command(own, tmp_path / "out"), capsys, "max_tokens")
    assert not (tmp_path / "out").exists()
    assert default_recipe().training.max_tokens == 1024


def test_after_an_answer_that_was_too_long_the_same_command_with_room_for_it_goes_through(data, tmp_path, capsys):
    refused([*command(data, tmp_path / "out"), "--set", "max_tokens=2"], capsys, "max_tokens")
    assert main([*command(data, tmp_path / "out"), "--set", "max_tokens=128"]) == 0


def test_what_is_refused_as_training_begins_leaves_nothing_and_goes_through_when_it_is_mended(data, tmp_path, capsys):
    odd = ["--method", "oplora", "--track", "tensorboard"]
    refused(command(data, tmp_path / "out", *odd, "--set", "ProjectSingular.k=5000"), capsys, "--set ProjectSingular.k=..")
    assert not (tmp_path / "out").exists()
    assert main(command(data, tmp_path / "out", *odd, "--set", "ProjectSingular.k=4")) == 0


def test_what_an_old_adapter_does_not_go_with_is_refused_before_text_is_read(finished, data, tmp_path, capsys):
    words = ["train", data["model"], "--data", data["questions"], "--after", str(finished), "--out", str(tmp_path / "out"), *FEW]
    for odd, said in (("seq-lora --rank 8", "; leave the rank out"), ("sd-lora", "gates, which no adapter holds")):
        assert "finding what to protect" not in refused([*words, "--method", *odd.split()], capsys, said)
        assert not (tmp_path / "out").exists()


def test_the_verdict_and_the_page_say_the_names_that_people_gave_and_files_have_plain_ones(named):
    first, second, _, said = named
    page = (first / "index.html").read_text()
    for title in ("Mün <b> 技能", "kört 本"):
        assert f"{title}: " in said
        assert title.replace("<b>", "&lt;b&gt;") in page
    assert all(file.name.isascii() for file in first.rglob("*"))
    found = json.loads((second / "skill/verdict.json").read_text())
    assert {each["title"] for each in found["kept"]} == {"kört 本", "Mün <b> 技能"}


@pytest.fixture(scope="module")
def stopped(data, tmp_path_factory):
    """A skill whose training has not begun: what is kept is measured."""
    out = tmp_path_factory.mktemp("stopped") / "news"

    def interrupted(*_, **__):
        raise Interrupted("enough")

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(module, "run_sequence", interrupted)
        assert main(command(data, out)) == 75
    return out


PARTS = ["before/facts.json", "before/scores.json", "before/probes/reviews.jsonl", "before/memory.safetensors", "rows.json"]
PARTS += ["inputs.json", "request.yaml", "tasks.yaml", "before/SEAL.json"]
HOW = {
    "no JSON": lambda file: file.write_text("{not JSON"),
    "another type": lambda file: file.write_text('{"kept": 3}'),
    "no object": lambda file: file.write_text("[[1], null]"),
    "not UTF-8": lambda file: file.write_bytes(b"\xff\xfe" + file.read_bytes()),
    "cut": lambda file: file.write_bytes(file.read_bytes()[: len(file.read_bytes()) // 2]),
    "empty": lambda file: file.write_bytes(b""),
    "gone": lambda file: file.unlink(),
    "link": lambda file: file.symlink_to(file.rename(file.with_suffix(".other"))),
    "folder": lambda file: (file.unlink(), file.mkdir()),
}


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("part", PARTS)
def test_what_a_stopped_skill_has_left_is_read_strictly(part, how, stopped, data, tmp_path, capsys, monkeypatch):
    out = tmp_path / "out"
    shutil.copytree(stopped, out)
    HOW[how](out / "skill" / part)
    monkeypatch.setattr(module, "run_sequence", None)
    refused(command(data, out), capsys, str(out if part == "request.yaml" else out / "skill" / part))


@pytest.mark.parametrize("what", ["keep", "adapter", "weights", "template"])
def test_nothing_that_is_read_may_change_between_two_stages(what, finished, data, tmp_path, capsys, monkeypatch):
    model = shutil.copytree(data["model"], tmp_path / "model")
    adapter = shutil.copytree(finished / "adapter", tmp_path / "old")
    kept, template = Path(shutil.copy(data["reviews"], tmp_path / "kept.jsonl")), tmp_path / "own.jinja"
    template.write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    changed = {"keep": kept, "adapter": adapter / "adapter_model.safetensors", "weights": model / "model.safetensors"}
    file = changed.get(what, template)

    def then_changed(*_, **__):
        file.write_bytes(file.read_bytes() + b" ")

    monkeypatch.setattr(module.stages, "before", then_changed)
    words = ["train", str(model), "--data", data["news"], "--keep", str(kept), "--adapter", str(adapter)]
    words += ["--set", f"chat_template={template}", "--out", str(tmp_path / "out"), *FEW]
    refused(words, capsys, f"{file} was changed since this skill was begun")


def test_scores_of_other_prompts_than_before_are_refused_in_one_line(stopped, data, tmp_path, capsys, monkeypatch):
    out, real = tmp_path / "out", judging.scores_in
    shutil.copytree(stopped, out)

    def others(folder, stage):
        found = real(folder, "before")
        found["reviews"] = [row | {"prompt_sha256": stage} for row in found["reviews"]]
        return found

    monkeypatch.setattr(module, "_teach", lambda *_, **__: None)
    monkeypatch.setattr(judging, "scores_in", others)
    monkeypatch.setattr(judging, "scores_after", lambda run, name: others(run / "skill", "after"))
    refused(command(data, out), capsys, "reviews was tested on other examples before than after")


def test_a_stopped_skill_goes_on_from_another_folder_and_where_it_was_moved(finished, data, tmp_path, monkeypatch):
    real, score, threads = module.run_sequence, module.stages.score_tasks, set()

    def interrupted(*args, **named):
        real(*args, **named)
        if named["out"].name == module.UNPROTECTED:
            raise Interrupted("enough")

    def scored(*args):
        threads.add(torch.get_num_threads())
        return score(*args)

    monkeypatch.chdir(tmp_path)
    torch.set_num_threads(2)  # as OMP_NUM_THREADS of a shell
    with monkeypatch.context() as patched:
        patched.setattr(module, "run_sequence", interrupted)
        patched.setattr(module.stages, "score_tasks", scored)
        assert main(command(data, "out", "--compare")) == 75
    assert threads == {1}
    shutil.copytree("out", "moved")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    for out in (Path("../out"), tmp_path / "moved"):
        torch.set_num_threads(2)  # as OMP_NUM_THREADS of another shell
        assert main(command(data, out, "--compare")) == 0
        assert torch.get_num_threads() == 1
        assert left(out) == left(finished)


def started(words):
    return subprocess.Popen([sys.executable, "-m", "anchorlora", *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def left(out):
    """What a later skill and a server read, and what the verdict stands on."""
    names = (ADAPTER, *(f"skill/{stage}/{name}" for stage in ("before", "after") for name in ("scores.json", "memory.safetensors")))
    return {name: sha256(out / name) for name in names}


@pytest.mark.slow
@pytest.mark.parametrize("offset", [0, 0.4, 1, 2])
def test_of_two_processes_one_works_and_the_other_says_so_in_one_line(offset, finished, data, tmp_path):
    out = tmp_path / "out"
    first = started(command(data, out))
    time.sleep(offset)
    second = started(command(data, out))
    ends = [(each, *each.communicate(timeout=300)) for each in (first, second)]
    assert 0 in {each.returncode for each in (first, second)}
    for process, said, err in ends:
        assert "Traceback" not in err
        if process.returncode:
            assert process.returncode == 2
            assert f"error: {out} is in use by process" in " ".join(err.split())
        else:
            assert "adapter:" in said
    assert left(out) == left(finished)
    assert main(command(data, out)) == 0


LANDMARKS = [".lease", ".skill.*.tmp", "skill/inputs.json", "skill/.before.*.tmp", "skill/.before.*.tmp/memory.safetensors"]
LANDMARKS += ["skill/before", "config.yaml", "state/provenance.json", "state/*begun*", "tasks/1-*", "record.json", ".adapter.*.tmp"]
LANDMARKS += ["adapter", "skill/.after.*.tmp", "skill/after", "skill/verdict.json"]


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_skill_that_is_stopped_again_and_again_ends_bitwise_as_in_one_go(number, finished, data, tmp_path):
    out, draw, stopped = tmp_path / "out", random.Random(int(number)), 0
    for landmark in LANDMARKS:
        process = started(command(data, out))
        while process.poll() is None and not any(out.glob(landmark)):
            time.sleep(0.001)
        time.sleep(draw.choice([0, 0.01, 0.3]) * draw.random())
        process.send_signal(number)
        _, err = process.communicate(timeout=300)
        assert "Traceback" not in err
        assert process.returncode in (0, 75, -number), err
        stopped += process.returncode != 0
    assert stopped > 3
    assert main(command(data, out)) == 0
    assert left(out) == left(finished)
    assert not list(out.glob(".*.tmp"))


@pytest.mark.slow
def test_a_chain_says_what_is_left_until_a_layer_is_full_which_is_refused_before_training_with_a_way_out(
    tmp_path, capsys, monkeypatch
):
    monkeypatch.setattr("anchorlora.geometry.room.LEAST", 0.95)  # inputs of so small a model are too alike to fill it by 0.4
    draw, tokenizer = random.Random(5), AutoTokenizer.from_pretrained(embedded.folder("embedded:mini", "base_model"))
    words = [word for word in (tokenizer.decode(i).strip() for i in range(len(tokenizer))) if word.isalpha()]
    many, last, said = ["--set", "energy=0.999", "--set", "at_most=64", "--set", "wide=64"], None, []
    for number in range(12):
        lines = [{"prompt": " ".join(draw.choices(words, k=12)), "completion": draw.choice(words)} for _ in range(12)]
        data, out = written(tmp_path / f"skill{number}.jsonl", lines), tmp_path / f"run{number}"
        past = ["--after", str(last)] if last else ["--keep", written(tmp_path / "old.jsonl", lines[::-1])]
        exact = ["--method", "inc-lora-hard", *past, "--out", str(out), *FEW, *many]
        status = main(["train", "embedded:mini", "--data", data, *exact])
        printed = capsys.readouterr()
        if status:
            break
        found = json.loads((out / "skill/verdict.json").read_text())["protection"]
        assert found["exact"]
        used, width, skills = (found["capacity"][name] for name in ("used", "width", "skills"))
        assert f"room: the fullest layer protects {used} of its {width} directions; " in printed.out
        assert used <= width / 2
        said.append((used, skills))
        last = out
    assert status == 2
    assert len(said) >= 2
    assert said[-1][1] == 0
    line = printed.err.splitlines()[-1]
    assert re.search(r"error: .* is full: 96 of its 192 input directions are protected, half stay free to learn in, and only", line)
    assert "training ..." not in printed.err
    assert "Traceback" not in printed.err
    assert not (out / "tasks").exists()
    assert "--set at_most=N" in line
    assert "--method fold-64, --adapter and --keep FILE instead of --after" in line
    ways = ["--method", "fold-64", "--adapter", str(last / "adapter"), "--keep", str(tmp_path / f"skill{number - 1}.jsonl")]
    assert main(["train", "embedded:mini", "--data", data, *ways, "--out", str(out), *FEW, *many]) == 0
