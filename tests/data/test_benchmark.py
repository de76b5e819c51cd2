import json
import tracemalloc

import pytest

import models
import small
from anchorlora.data import Benchmark, Encoder
from anchorlora.data.benchmark import OWN_WORDING


@pytest.fixture
def root(tmp_path):
    return small.write_folders(tmp_path / "data")


def test_tasks_labels_and_instructions_come_from_the_folder(root):
    benchmark = Benchmark(root)
    assert benchmark.names == ["COPA", "views", "toys"]
    task = benchmark.task("toys")
    assert (task.group, task.instruction, task.labels) == ("TC", "Which toy?\n", ("ball", "doll"))
    assert benchmark.task("COPA").instruction == ""


def test_our_own_wording_is_used_where_a_folder_has_none(tmp_path):
    benchmark = Benchmark(small.write_folders(tmp_path, instructions=False))
    assert benchmark.task("toys").instruction == OWN_WORDING


def test_a_limit_takes_the_first_examples_in_file_order(root):
    examples = list(Benchmark(root).examples("toys", "train", limit=5))
    assert [e.index for e in examples] == [0, 1, 2, 3, 4]
    assert examples[3].sentence == "train passage 3 about a doll\n"
    assert examples[3].place == f"{root / 'TC/toys/train.json'}, example 4"


def test_opened_files_are_on_record_with_hash_and_kind(root):
    benchmark = Benchmark(root)
    list(benchmark.examples("toys", "train"))
    assert set(benchmark.opened) == {"TC/toys/train.json", "TC/toys/labels.json", "instruction_config.json"}
    assert {facts.kind for facts in benchmark.opened.values()} == {"own"}


def test_selection_cannot_open_a_test_file_and_nobody_a_dev_file(root):
    (root / "TC/toys/dev.json").write_text("[]")
    blind = Benchmark(root).training_only()
    assert len(list(blind.examples("toys", "train"))) == 12
    with pytest.raises(ValueError, match=r"test.json of toys may not be opened here: only train"):
        list(blind.examples("toys", "test"))
    with pytest.raises(ValueError, match=r"dev.json of toys may not be opened"):
        list(Benchmark(root).examples("toys", "dev"))
    assert not any("test" in name for name in blind.opened)


def test_an_unknown_task_offers_its_neighbors(root):
    with pytest.raises(LookupError, match="no task called 'toy' in .*nearest: toys"):
        Benchmark(root).task("toy")


def test_a_label_outside_the_label_set_is_named_with_file_and_line(root):
    path = root / "TC/toys/train.json"
    rows = json.loads(path.read_text())
    rows[4]["label"] = "dall"
    path.write_text(json.dumps(rows, indent=0))  # four lines an example, after the first line's bracket
    with pytest.raises(ValueError, match=r"train.json, line 18: the label 'dall' is not in labels.json; nearest: ball, doll|doll"):
        list(Benchmark(root).examples("toys", "train"))
    path.write_text(json.dumps(rows))
    with pytest.raises(ValueError, match=r"train.json, line 1: the label 'dall'"):
        list(Benchmark(root).examples("toys", "train"))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('[{"label": "ball", "sentence": "cut o', "not complete JSON.*fetch it again"),
        ("{}", "is not a list of examples"),
        ("[]", "is not a list of examples: it is empty"),
        ('[{"label": "ball"}]', "line 1: an example is"),
        ('[{"label": 3, "sentence": "x"}]', "an example is"),
    ],
)
def test_damaged_files_are_refused_by_name(root, content, message):
    (root / "TC/toys/train.json").write_text(content)
    with pytest.raises(ValueError, match=message):
        list(Benchmark(root).examples("toys", "train"))


@pytest.mark.parametrize("content", ['["a", ""]', '["a", 1]', "[]", "{}"])
def test_labels_that_are_no_text_are_named(root, content):
    (root / "TC/toys/labels.json").write_text(content)
    odd = {'["a", ""]': ": '' is no text", '["a", 1]': ": 1 is no text"}.get(content, "")
    with pytest.raises(ValueError, match=f"labels.json is not a list of label names{odd}$"):
        Benchmark(root).task("toys")


def test_a_missing_file_is_named(root):
    (root / "TC/toys/train.json").unlink()
    with pytest.raises(ValueError, match=r"toys/train.json is missing"):
        list(Benchmark(root).examples("toys", "train"))


def test_a_folder_that_is_no_benchmark_is_refused(tmp_path):
    with pytest.raises(ValueError, match="holds no <group>/<task>/labels.json"):
        Benchmark(tmp_path)
    with pytest.raises(ValueError, match="is not a folder"):
        Benchmark(tmp_path / "nowhere")


def test_a_mistyped_folder_offers_its_neighbors(root):
    with pytest.raises(ValueError, match=rf"nearest: {root}$"):
        Benchmark(root.with_name("dta"))


def test_what_stays_in_memory_of_an_example_is_its_place_its_label_and_its_length(tmp_path):
    held = []
    tokenizer = models.tokenizer(["red ball doll"])
    for count in (200, 1000):
        root = small.write_folders(tmp_path / str(count))
        rows = [{"label": "ball", "sentence": f"{i} " + "red ball " * 40} for i in range(count)]
        (root / "TC/toys/train.json").write_text(json.dumps(rows))
        del rows
        benchmark, encoder = Benchmark(root), Encoder(tokenizer, max_tokens=400)
        task = benchmark.task("toys")
        list(encoder.encode(task, benchmark.examples("toys", "train", limit=10)))  # what is made once
        tracemalloc.start()
        kept = encoder.encode(task, benchmark.examples("toys", "train"))
        ours = tracemalloc.take_snapshot().filter_traces([tracemalloc.Filter(False, "*/transformers/*")])  # tokenizers 0.23.1 leaks
        tracemalloc.stop()
        assert len(kept) == count
        held.append(sum(trace.size for trace in ours.traces))
    assert (held[1] - held[0]) / 800 < 60
