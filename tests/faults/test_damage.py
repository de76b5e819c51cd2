"""Every damage to every file that a run reads is named, and the run ends bitwise as it would have, or stops with one line."""

import json
import random
import shutil
from contextlib import redirect_stderr, redirect_stdout
from functools import partial
from io import StringIO

import pytest

import small
from anchorlora.cli.app import main
from anchorlora.errors import Interrupted
from anchorlora.runs.directory import RunDirectory
from anchorlora.store.adapter_config import adapter_sha256
from anchorlora.store.record import read_record
from anchorlora.store.seal import read_sealed, seal, write_sealed
from faults.damages import ADAPTER, ANSWERED, BEGUN, DAMAGES, INPUTS, STOPS, TASK, empty, flip, swap, truncate
from faults.runs import AskToStop, assert_same, command, run
from golden import one_line
from reports import made

SAVED = {"step": {"task": 3, "step": 2}, "answers": {"task": 2, "batch": 1}}
METHOD, OTHER = "o-lora-bsr", "o-lora-hard"


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with model/ and data/, runs stopped and ended, and in other/ the same of another seed of everything."""
    root = tmp_path_factory.mktemp("damage")
    for at, method, train in ((root, METHOD, 24), (root / "other", OTHER, 21)):
        data = small.write_benchmark(at / "data", train=train)
        instructions = data / "instruction_config.json"
        instructions.write_text(instructions.read_text().replace("Choose", "Choose" if at == root else "Choose one"))
        small.write_model(at / "model", data)
        if at != root:
            config = at / "model/config.json"  # the other model differs in each of its files
            config.write_text(config.read_text().replace('"attention_dropout": 0.0', '"attention_dropout": 0.1'))
            for name in ("generation_config.json", "tokenizer_config.json"):
                (at / "model" / name).write_text((at / "model" / name).read_text().replace("{", '{ "other": 1,', 1))
        recipe = recipe_in(at)
        run(recipe, at / "whole", method)
        for kind, point in SAVED.items():
            with pytest.raises(Interrupted):
                run(recipe, at / kind, method, point=point, save_every=1)
    return root


def recipe_in(root):
    return small.recipe(root / "data", root / "model", trace_points=4)


def moved(place, tmp_path, kind):
    """A copy of a stopped run, whose recipe names the shared model and data."""
    shutil.copytree(place / kind, tmp_path / "run")
    return tmp_path / "run"


def gone_on_with(place, out):
    """(exit status, everything that was said) of the command that goes on with a run."""
    said = StringIO()
    with redirect_stdout(said), redirect_stderr(said):
        status = main(command(recipe_in(place), out, METHOD))
    return status, said.getvalue()


def assert_named(path, status, said, out, place):
    """The file is named, and the end is the same, or one line says why there is none."""
    log = (out / "log.jsonl").read_text() if (out / "log.jsonl").is_file() else ""
    if status == 0:
        assert str(path) in log, f"{path} was passed over in silence"
        assert str(path) in " ".join(said.split()), f"{path} is not named on the screen"
        assert_same(out, place / "whole")
    else:
        assert status == 2, said
        last = said.strip().splitlines()[-1]
        assert last.startswith("error: "), said
        assert path.name in last, last
        assert "Traceback" not in said


def try_state(name, damage, kind, place, tmp_path, *, stops=False):
    out = moved(place, tmp_path, kind)
    DAMAGES[damage](out / name, place / "other" / kind / name)
    status, said = gone_on_with(place, out)
    assert stops == (status != 0), said
    assert_named(out / name, status, said, out, place)
    return status


def try_input(name, damage, place, tmp_path):
    """The shared model and data are damaged for the time of one command."""
    out, path = moved(place, tmp_path, "step"), place / name
    before = {p.relative_to(out): p.read_bytes() for p in out.rglob("*") if p.is_file()}
    kept = path.read_bytes()
    try:
        DAMAGES[damage](path, place / "other" / name)
        assert not path.is_file() or path.read_bytes() != kept, "the damage did nothing"
        status, said = gone_on_with(place, out)
    finally:
        path.write_bytes(kept)
    assert status == 2, said
    assert str(path) in said.strip().splitlines()[-1], said
    assert "Traceback" not in said
    assert {p.relative_to(out): p.read_bytes() for p in out.rglob("*") if p.is_file()} == before, "the run was touched"


def differs(name, damage, kind, place):
    """Some files of two runs are the same, as empty tables are; swapping or emptying those is no damage."""
    ours, other = place / kind / name, place / "other" / kind / name
    return damage != "swap" or ours.read_bytes() != other.read_bytes()


ALL = [(name, "step") for name in BEGUN] + [(name, "answers") for name in ANSWERED]


def drawn(items, count, seed):
    return random.Random(seed).sample(items, count)


@pytest.mark.drawn(3)
@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_state_is_named_and_the_end_is_the_same(damage, place, tmp_path):
    """A file a damage, drawn by its name; the long form tries every one."""
    ((name, kind),) = drawn([each for each in ALL if differs(each[0], damage, each[1], place)], 1, damage)
    try_state(name, damage, kind, place, tmp_path / "0")


@pytest.mark.slow
@pytest.mark.parametrize(("name", "kind"), ALL)
@pytest.mark.parametrize("damage", DAMAGES)
def test_every_damage_to_every_file_of_the_state(damage, name, kind, place, figure, tmp_path):
    if not differs(name, damage, kind, place):
        pytest.skip("the other run has the same file")
    status = try_state(name, damage, kind, place, tmp_path)
    figure("damage", damages=1, named=1, went_on=status == 0, stopped=status == 2)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(200))
def test_any_flipped_bit_is_named(seed, place, figure, tmp_path):
    """A drawn bit of a drawn file that a stopped run reads."""
    draw = random.Random(seed)
    name, kind = draw.choice([*ALL, *((name, "step") for name in STOPS)])
    out = moved(place, tmp_path, kind)
    if not (out / name).stat().st_size:
        pytest.skip("an empty file has no bit")
    flip(out / name, None, at=draw.random(), bit=draw.randrange(8))
    status, said = gone_on_with(place, out)
    assert_named(out / name, status, said, out, place)
    figure("bits", damages=1, named=1)


def test_no_bit_of_a_sealed_file_may_change(tmp_path):
    """Wherever it lies: in the middle of a file it may by chance be one that something else would notice."""
    path = tmp_path / "provenance.json"
    write_sealed(path, {"config.yaml": "0" * 64, "software/torch": "2.13.0"})
    whole = path.read_bytes()
    assert read_sealed(path, dict[str, str])
    for at in range(len(whole)):
        for bit in (0, 1, 5):
            path.write_bytes(whole[:at] + bytes([whole[at] ^ 1 << bit]) + whole[at + 1 :])
            with pytest.raises(ValueError, match="provenance.json is not what was written"):
                read_sealed(path, dict[str, str])


def test_where_every_save_of_a_task_is_damaged_it_is_learned_again(place, tmp_path):
    out = moved(place, tmp_path, "step")
    both = [out / f"state/3-begun/step-0000000{step}/tensors.safetensors" for step in (1, 2)]
    for path in both:
        flip(path, None)
    status, said = gone_on_with(place, out)
    for path in both:
        assert_named(path, status, said, out, place)


def test_where_the_newest_save_is_damaged_the_one_before_is_taken(place, tmp_path):
    out = moved(place, tmp_path, "step")
    path = out / "state/3-begun/step-00000002/tensors.safetensors"
    flip(path, None)
    status, said = gone_on_with(place, out)
    assert_named(path, status, said, out, place)
    assert '"event": "resumed", "task": 3, "step": 1' in (out / "log.jsonl").read_text()


def test_answers_of_another_learned_state_are_named(place, tmp_path):
    """Whole and with a right hash, as they lie beside the state of another run."""
    try_state("state/2-begun/answers.json", "swap", "answers", place, tmp_path)


@pytest.mark.parametrize("damage", ["truncate", "flip", "swap"])
def test_a_trace_that_is_not_what_was_written_is_named(damage, place, tmp_path):
    try_state("trace.jsonl", damage, "step", place, tmp_path)


def test_a_file_that_does_not_belong_to_a_state_is_named(place, tmp_path):
    out = moved(place, tmp_path, "step")
    added = out / "state/2/more.safetensors"
    shutil.copyfile(out / "state/2/wide.safetensors", added)
    status, said = gone_on_with(place, out)
    assert_named(added, status, said, out, place)


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("name", STOPS)
def test_a_run_whose_beginning_is_not_known_any_more_stops(damage, name, place, figure, tmp_path):
    status = try_state(name, damage, "step", place, tmp_path, stops=True)
    figure("damage", damages=1, named=1, went_on=status == 0, stopped=status == 2)


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_run_is_not_gone_on_with_on_another_model_or_other_data(damage, place, tmp_path):
    """Four files a damage, drawn by its name; the long form tries every one."""
    for i, name in enumerate(drawn([n for n in INPUTS if differs(n, damage, ".", place)], 4, damage)):
        try_input(name, damage, place, tmp_path / str(i))


@pytest.mark.slow
@pytest.mark.parametrize("name", INPUTS)
@pytest.mark.parametrize("damage", DAMAGES)
def test_every_damage_to_every_file_of_model_and_data(damage, name, place, figure, tmp_path):
    if not differs(name, damage, ".", place):
        pytest.skip("the other run has the same file")
    try_input(name, damage, place, tmp_path)
    figure("inputs", damages=1, named=1)


NEW_FILES = ("data/MANIFEST.json", "model/chat_template.jinja")  # one that was looked for, and one that was not counted


@pytest.mark.parametrize("name", NEW_FILES)
def test_a_file_that_was_not_there_or_not_counted_is_named(name, place, tmp_path):
    out, added = moved(place, tmp_path, "step"), place / name
    added.write_text('{"schema": 1, "files": {}}')
    try:
        status, said = gone_on_with(place, out)
    finally:
        added.unlink()
    assert status == 2
    assert f"{added} is not what this run began with: " in said
    assert "provenance.json has no hash of it; take it away if it was added" in said


def test_a_digit_that_flipped_in_the_configuration_is_found_where_it_is_the_request_too(place, tmp_path, monkeypatch):
    """`anchorlora run DIR/config.yaml --out DIR`, as a grid calls it; and before the model and the data are read."""
    monkeypatch.setattr("anchorlora.runs.run.load_inputs", lambda *given: pytest.fail("they are read"))
    out = moved(place, tmp_path, "step")
    config = out / "config.yaml"
    config.write_text(config.read_text().replace("learning_rate: 0.005", "learning_rate: 0.004"))
    with pytest.raises(ValueError, match=r"config.yaml is not what this run began with: its hash differs from"):
        run(recipe_in(place).changed({"learning_rate": 0.004}), out, METHOD)


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("name", ["record.json", "state/recorded.json", "state/provenance.json", "config.yaml"])
def test_a_finished_run_is_not_read_with_a_damaged_file(damage, name, place, figure, tmp_path):
    shutil.copytree(place / "whole", tmp_path / "run")
    out = tmp_path / "run"
    DAMAGES[damage](out / name, place / "other/whole" / name)
    status, said = gone_on_with(place, out)
    if (name, damage) == ("record.json", "delete"):
        assert status == 0  # every task has its state, so the record is only written again
        assert_same(out, place / "whole")
    else:
        assert_named(out / name, status, said, out, place)
        assert status == 2
        figure("damage", damages=1, named=1, went_on=0, stopped=1)


def reading(place, out, to):
    """Every command that reads a finished run or one of its tasks."""
    first, second = out / "tasks/1-fruit", out / "tasks/2-mood"
    old_text = to.with_name("old.jsonl")
    old_text.write_text('{"text": "an apple or a pear"}\n')
    return {
        "run": command(recipe_in(place), out, METHOD),
        "export": ["export", str(out), "--out", str(to)],
        "export of a task": ["export", str(second), "--out", str(to)],
        "general": ["eval", str(out), "--task", "none"],
        "general of a task": ["eval", str(second / "adapter"), "--task", "none"],
        "report": ["report", str(out), "--out", str(to)],
        "audit": ["audit", str(first), str(second), "--cores", str(first / "cores.safetensors"), "--html", str(to)],
        "audit on its cores": ["audit", str(first), str(first), "--cores", str(second / "cores.safetensors"), "--html", str(to)],
        "measure": ["measure", f"{first}/adapter", f"{second}/adapter", "--cores", str(first / "cores.safetensors")],
        "cores": ["cores", str(place / "model"), f"{second}/adapter", str(old_text), "--out", str(to)],
    }


READING = ("run", "export", "export of a task", "general", "general of a task", "report", "audit", "audit on its cores", "measure")
READING += ("cores",)
OF_A_TASK = [f"tasks/2-mood/{name}" for name in TASK]
STANDING = ("with state", "without state")


@pytest.fixture(params=STANDING)
def ended(request, place, tmp_path):
    """A copy of a finished run, elsewhere than where it was made."""
    out = shutil.copytree(place / "whole", tmp_path / "elsewhere/run")
    if request.param == "without state":
        shutil.rmtree(out / "state")
    return out


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("name", READING)
def test_no_command_reads_a_finished_run_whose_files_are_not_its_own(name, damage, place, ended, figure, tmp_path, capsys):
    """One line names the file, no score is printed, and nothing is written; every file of a task, and the record."""
    words, to = reading(place, ended, tmp_path / "to")[name], tmp_path / "to"
    for file in [*OF_A_TASK, "record.json"]:
        path, whole = ended / file, (ended / file).read_bytes()
        DAMAGES[damage](path, place / "other/whole" / file)
        assert not path.is_file() or path.read_bytes() != whole, f"the other run has the same {file}"
        alone = not (ended / "state").exists() and name not in ("export", "general", "report")
        if (file, damage) == ("record.json", "delete") and (name == "run" or alone):
            path.write_bytes(whole)  # the run goes on, from its state or the beginning; of its tasks nothing is known any more
            continue
        before = {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()}
        assert main(words) == 2, (name, damage, file)
        said = one_line(capsys)
        assert str(path) in said or (file, damage) == ("record.json", "delete"), said
        assert not to.exists()
        assert {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()} == before
        path.write_bytes(whole)
        figure("finished", damages=1, named=1)


@pytest.mark.parametrize("file", ["tasks/1-fruit/adapter/adapter_model.safetensors", "trace.jsonl", "config.yaml"])
@pytest.mark.parametrize("name", ["run", "export", "general", "report"])
def test_who_reads_a_record_reads_it_with_every_file_that_it_names(name, file, place, ended, tmp_path, capsys):
    words = reading(place, ended, tmp_path / "to")[name]
    swap(ended / file, place / "other/whole" / file)
    assert main(words) == 2
    assert str(ended / file) in one_line(capsys)
    assert not (tmp_path / "to").exists()


@pytest.mark.parametrize("name", [name for name in READING if not name.startswith(("general", "cores"))])
def test_a_finished_run_is_read_wherever_it_lies(name, place, ended, tmp_path, capsys):
    """Its hashes name no place."""
    assert main(reading(place, ended, tmp_path / "to")[name]) == 0, capsys.readouterr().err
    assert capsys.readouterr().out


@pytest.mark.parametrize("every", [97, pytest.param(1, marks=pytest.mark.slow)])
def test_no_byte_of_a_record_may_change(every, place, tmp_path):
    """Without the state beside it."""
    path, whole = tmp_path / "record.json", (place / "whole/record.json").read_bytes()
    for at in range(0, len(whole), every):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        with pytest.raises(ValueError, match="record.json"):
            read_record(path)
    path.write_bytes(whole)
    assert read_record(path) == read_record(place / "whole/record.json")


def test_a_record_that_was_collected_stands_for_itself(place, tmp_path, capsys):
    """Without tasks/ there is no adapter that could be another one; a trace beside it is still its own or refused."""
    alone = tmp_path / "runs/alone"
    alone.mkdir(parents=True)
    for name in ("record.json", "trace.jsonl"):
        shutil.copyfile(place / "whole" / name, alone / name)
    (alone / "config.yaml").write_text("model: tiny")  # as it is published, without places
    words = ["report", str(tmp_path / "runs"), "--out", str(tmp_path / "report")]
    assert main(words) == 0
    shutil.rmtree(tmp_path / "report")
    capsys.readouterr()
    flip(alone / "trace.jsonl", None)
    assert main(words) == 2
    assert f"{alone}/trace.jsonl is not what the run wrote" in one_line(capsys)
    assert not (tmp_path / "report").exists()


def of_an_earlier_version(out):
    """The record and the seals, as they were before records held hashes and seals those of predictions."""
    content = json.loads((out / "record.json").read_text())
    del content["files"], content["sha256"]
    text = json.dumps(content, indent=1) + "\n"
    (out / "record.json").write_text(text)
    if (out / "state").is_dir():
        write_sealed(out / "state/recorded.json", text)
        for seal_file in out.glob("state/*/SEAL.json"):
            known = json.loads(seal_file.read_text())
            del known["beside"]["predictions.jsonl"]
            known["beside"].pop("before", None)
            seal_file.write_text(json.dumps(known))


@pytest.mark.parametrize("name", ["run", "export", "audit", "measure"])
def test_a_run_of_an_earlier_version_is_compared_with_its_seals_and_without_them_read_as_it_is(
    name, place, ended, tmp_path, capsys
):
    of_an_earlier_version(ended)
    words, to = reading(place, ended, tmp_path / "to")[name], tmp_path / "to"
    assert main(words) == 0, capsys.readouterr().err
    shutil.rmtree(to, ignore_errors=True)
    to.unlink(missing_ok=True)
    capsys.readouterr()
    for file in (f"tasks/2-mood/{ADAPTER[1]}", "tasks/2-mood/cores.safetensors"):
        swap(ended / file, place / "other/whole" / file)
    status = main(words)
    assert status == (2 if (ended / "state").is_dir() else 0)
    if status:
        assert f"{ended}/tasks/2-mood/{ADAPTER[1]}" in one_line(capsys)
        assert not to.exists()


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_finished_task_of_a_run_that_goes_on_is_compared_with_its_seal(damage, place, tmp_path, capsys):
    out, to = moved(place, tmp_path, "step"), tmp_path / "to"
    words = [reading(place, out, to)[name] for name in ("export", "export of a task", "general of a task", "audit", "measure")]
    for file in OF_A_TASK:
        whole = (out / file).read_bytes()
        DAMAGES[damage](out / file, place / "other/step" / file)
        for line in words:
            assert main(line) == 2, (line, file)
            assert str(out / file) in one_line(capsys)
        (out / file).write_bytes(whole)
    assert not to.exists()


def test_a_task_that_does_not_count_yet_is_not_exported(place, tmp_path, capsys):
    """Its folder has its name, and the process has ended before the state had: the next call learns it again."""
    out, to = moved(place, tmp_path, "step"), tmp_path / "to"
    shutil.rmtree(out / "state/2")
    assert main(["export", str(out / "tasks/2-mood"), "--out", str(to)]) == 2
    assert f"{out}/tasks/2-mood does not count yet" in one_line(capsys)
    assert main(["export", str(out), "--out", str(to)]) == 0
    assert "task 1 of 3 (fruit)" in capsys.readouterr().out


def test_a_file_that_is_damaged_while_later_tasks_are_learned_is_in_no_record(place, tmp_path):
    """The seals of finished tasks are compared once more before the record is written."""
    out = tmp_path / "run"
    path = out / "tasks/1-fruit/adapter/adapter_model.safetensors"

    class Damaging(AskToStop):
        def on_task_begin(self, number, task, steps, done):
            if number == 3:
                flip(path, None)

    with pytest.raises(ValueError, match="adapter_model.safetensors is not what was written.*trains task 1 again"):
        run(recipe_in(place), out, METHOD, callback=Damaging(None, task=None))
    assert not (out / "record.json").exists()
    run(recipe_in(place), out, METHOD)
    assert_same(out, place / "whole")


def test_a_damaged_task_of_a_finished_run_is_learned_again_once_the_record_is_moved_away(place, tmp_path):
    out = shutil.copytree(place / "whole", tmp_path / "run")
    flip(out / "tasks/2-mood/predictions.jsonl", None)
    status, said = gone_on_with(place, out)
    assert status == 2
    assert "call the run again, without record.json" in said
    (out / "record.json").unlink()
    status, said = gone_on_with(place, out)
    assert_named(out / "tasks/2-mood/predictions.jsonl", status, said, out, place)
    assert gone_on_with(place, out)[0] == 0


def test_a_record_names_the_files_that_are_there_and_no_older_ones(place, tmp_path):
    """Where a task is learned again and ends otherwise, as on a GPU, what was committed before does not come back."""
    out = shutil.copytree(place / "whole", tmp_path / "run")
    record, name = read_record(out / "record.json"), "tasks/3-metal/cores.safetensors"
    other = record.model_copy(update={"files": record.files | {name: "0" * 64}})
    assert RunDirectory(out).write_record(other).files[name] == "0" * 64


def test_a_report_names_a_finished_run_that_has_lost_its_record(place, tmp_path, capsys):
    """It would be missing in the tables otherwise, beside others that are there."""
    for name in ("one", "two"):
        shutil.copytree(place / "whole", tmp_path / "runs" / name)
    (tmp_path / "runs/two/record.json").unlink()
    assert main(["report", str(tmp_path / "runs"), "--out", str(tmp_path / "report")]) == 2
    assert f"{tmp_path}/runs/two/record.json is missing, although the run has finished" in one_line(capsys)


def test_a_report_refuses_general_scores_of_another_adapter(place, tmp_path, capsys):
    out = shutil.copytree(place / "whole", tmp_path / "run")
    mine = adapter_sha256(out / "tasks/3-metal/adapter")
    words = ["report", str(out), "--out", str(tmp_path / "report")]
    (out / "eval.json").write_text(made.evaluation(after=70.0, adapter_sha256="0" * 64))
    assert main(words) == 2
    assert f"{out}/eval.json was measured with another adapter" in one_line(capsys)
    (out / "eval.json").write_text(made.evaluation(after=70.0, adapter_sha256=mine))
    assert main(words) == 0


def sealed_again(out, at):
    """The hashes of a state, made anew by somebody who knows how."""
    beside = {name: out / "tasks/2-mood" / name for name in (*ADAPTER, "cores.safetensors")}
    (out / at / "SEAL.json").unlink()
    seal(out / at, beside=beside if at == "state/2" else None)


@pytest.mark.parametrize("content", ["", "null", "[]", "7", '"text"', "{}", '{"sha256": 1, "content": "[]"}', "\x00"])
def test_facts_of_another_shape_are_named_wherever_they_lie(content, place, tmp_path):
    """Even where the seal fits."""
    for i, at in enumerate(("state/3-begun/step-00000002", "state/2")):
        out = moved(place, tmp_path / str(i), "step")
        (out / at / "facts.json").write_text(content)
        sealed_again(out, at)
        status, said = gone_on_with(place, out)
        assert status == 0, said
        assert f"{out / at}/facts.json" in (out / "log.jsonl").read_text()
        assert_same(out, place / "whole")


@pytest.mark.parametrize("damage", [truncate, empty, flip, partial(flip, bit=7)], ids=["truncate", "empty", "flip", "no text"])
def test_a_damaged_log_stops_nothing(damage, place, tmp_path):
    """Nothing is read from it; what cannot be read of it is dropped."""
    out = moved(place, tmp_path, "step")
    damage(out / "log.jsonl", None)
    status, said = gone_on_with(place, out)
    assert status == 0, said
    assert_same(out, place / "whole")


@pytest.mark.parametrize("at", [0.1, 0.3, 0.5, 0.7, 0.9])
def test_a_flipped_bit_in_a_selection_stops_the_run_that_takes_it(at, tmp_path):
    """It is another selection then, or none."""
    from anchorlora.store.selection import Candidate, Selection, read_selection

    facts = {"method": "ewc", "parameter": "FisherAnchor.strength", "declared": [1.0, 10.0], "scale": None, "selected": 10.0}
    rest = {
        "recipe": "r",
        "base_model": {"name": "m"},
        "order": ["fruit"],
        "seed": 42,
        "protocol": {},
        "holdout_sha256": "0",
        "data": {},
    }
    candidates = [Candidate(value=v, AA=v, accuracy=[v]) for v in (1.0, 10.0)]
    path = tmp_path / "selection.json"
    path.write_text(Selection(**facts, **rest, candidates=candidates).as_json())
    before = read_selection(path).sha256
    flip(path, None, at=at)
    try:
        found = read_selection(path).sha256
    except ValueError as error:
        found = str(error)
    assert found != before
    assert str(path) in found or len(found) == len(before)
