"""Every damage to every file that a run reads is named, and the run ends bitwise as it would have, or stops with one line."""

import random
import shutil
from contextlib import redirect_stderr, redirect_stdout
from functools import partial
from io import StringIO

import pytest

import small
from anchorlora.cli.app import main
from anchorlora.errors import Interrupted
from anchorlora.experiments.sealed import seal, write_sealed
from anchorlora.record import read_record
from anchorlora.sealed_file import read_sealed
from faults.damages import ADAPTER, ANSWERED, BEGUN, DAMAGES, INPUTS, STOPS, empty, flip, truncate
from faults.runs import assert_same, command, run

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


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_state_is_named_and_the_end_is_the_same(damage, place, tmp_path):
    """Six files a damage, drawn by its name; the long form tries every one."""
    for i, (name, kind) in enumerate(drawn([each for each in ALL if differs(each[0], damage, each[1], place)], 6, damage)):
        try_state(name, damage, kind, place, tmp_path / str(i))


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
    path = tmp_path / "origin.json"
    write_sealed(path, {"config.yaml": "0" * 64, "software/torch": "2.13.0"})
    whole = path.read_bytes()
    assert read_sealed(path, dict[str, str])
    for at in range(len(whole)):
        for bit in (0, 1, 5):
            path.write_bytes(whole[:at] + bytes([whole[at] ^ 1 << bit]) + whole[at + 1 :])
            with pytest.raises(ValueError, match="origin.json is not what was written"):
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


def test_an_instruction_that_was_not_there_is_named(place, tmp_path):
    out, added = moved(place, tmp_path, "step"), place / "data/MANIFEST.json"
    added.write_text('{"schema": 1, "files": {}}')
    try:
        status, said = gone_on_with(place, out)
    finally:
        added.unlink()
    assert status == 2
    assert f"{added} is not what this run began with: it was not there" in said


def test_a_digit_that_flipped_in_the_configuration_is_found_where_it_is_the_request_too(place, tmp_path, monkeypatch):
    """`anchorlora run DIR/config.yaml --out DIR`, as a grid calls it; and before the model and the data are read."""
    monkeypatch.setattr("anchorlora.experiments.run.sequence_of", lambda *given: pytest.fail("they are read"))
    out = moved(place, tmp_path, "step")
    config = out / "config.yaml"
    config.write_text(config.read_text().replace("learning_rate: 0.005", "learning_rate: 0.004"))
    with pytest.raises(ValueError, match=r"config.yaml is not what this run began with: its hash differs from"):
        run(recipe_in(place).changed({"learning_rate": 0.004}), out, METHOD)


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("name", ["record.json", "state/recorded.json", "state/origin.json", "config.yaml"])
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


@pytest.mark.parametrize("damage", ["truncate", "flip", "swap"])
def test_a_report_names_a_damaged_record(damage, place, tmp_path, capsys):
    shutil.copytree(place / "whole", tmp_path / "run")
    record = tmp_path / "run/record.json"
    DAMAGES[damage](record, place / "other/whole/record.json")
    assert main(["report", str(tmp_path / "run"), "--to", str(tmp_path / "report")]) == 2
    assert f"{record} is not what was written" in capsys.readouterr().err
    assert not (tmp_path / "report").exists()


def test_a_finished_run_without_state_is_still_read(place, tmp_path):
    shutil.copytree(place / "whole", tmp_path / "run")
    shutil.rmtree(tmp_path / "run/state")
    assert gone_on_with(place, tmp_path / "run")[0] == 0
    assert read_record(tmp_path / "run/record.json") == read_record(place / "whole/record.json")


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
    from anchorlora.experiments.selection import Candidate, Selection, read_selection

    facts = {"method": "ewc", "parameter": "FisherAnchor.strength", "declared": [1.0, 10.0], "scale": None, "selected": 10.0}
    rest = {
        "recipe": "r",
        "backbone": {"name": "m"},
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
