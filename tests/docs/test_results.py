"""What docs/lab/results*.md print is made of the records in results/, and of nothing else."""

import json
import re
import shutil
import statistics
from collections import Counter
from itertools import combinations, pairwise
from pathlib import Path

import pytest
import torch

import built_pages
import count_labels
import records
import results_studies
import results_tables
import small
from anchorlora import METHODS, embedded, run_sequence
from anchorlora.store.record import read_record
from anchorlora.store.selection import FILE, read_selection
from anchorlora_lab.report.comparability import model_label
from anchorlora_lab.report.grid import Grid
from anchorlora_lab.report.paired_tests import PairedTest, mean_interval
from anchorlora_lab.report.published import PUBLISHED, printed_endpoint
from anchorlora_lab.report.records import find_runs
from anchorlora_lab.report.tables.mechanism import correlation_table
from anchorlora_lab.report.tables.pairs import comparisons
from anchorlora_lab.report.tables.scores import interval_over_examples
from built_pages import built, page
from collect import collect, collect_right, without_places
from results import hash_of, pack, unpack
from results_mechanism import verdict

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def pages():
    """Name -> text of the results pages as the site has them, but for the ends of intervals, which are drawn from fewer samples."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("anchorlora.scores.DRAWS", 100)
        patched.setattr("anchorlora_lab.report.tables.mechanism.DRAWS", 100)
        made = {path.name: page(f"lab/{path.name}") for path in sorted((ROOT / "docs/lab").glob("results*.md"))}
    yield made
    for cached in (page, built_pages.region, results_studies.report, results_studies.all_comparisons):
        cached.cache_clear()


def test_every_marker_stands_for_what_the_records_give(pages):
    for name, text in pages.items():
        committed = (ROOT / "docs/lab" / name).read_text()
        assert committed.count("<!-- table ") > 4, name
        assert "<!-- " not in text, f"{name}: a marker that tools/built_pages.py does not know"
        assert text.count("\n| ") > committed.count("\n| ") + 50, name


def test_no_table_sets_a_value_of_the_paper_beside_one_of_ours(pages):
    assert not any("Δ" in text.split() for text in pages.values())


def levels(study):
    """Guessing and the best single answer, percent over all tasks, and how many tested examples have each label."""
    labels = json.loads((ROOT / "results" / study / "labels.json").read_text())
    labels = {task: {label: n["test"] for label, n in each.items()} for task, each in labels.items()}
    guessing = statistics.mean(100 / len(each) for each in labels.values())
    return guessing, statistics.mean(100 * max(each.values()) / sum(each.values()) for each in labels.values()), labels


def test_where_nothing_was_learned_no_run_is_above_the_single_best_answer():
    """What the page says of the grid, the selections and the fifteen tasks on mini-en."""
    guessing, constant, labels = levels("mini-en/grid")
    scores = [run.record.scores for run in find_runs([ROOT / "results/mini-en/grid"])]
    one_example = 100 / sum(sum(each.values()) for each in labels.values())
    assert (len(scores), guessing, constant) == (45, pytest.approx(15.54, abs=0.005), pytest.approx(20.94, abs=0.005))
    assert max(s.AA for s in scores) <= constant
    assert max(s.LA for s in scores) <= constant + 1.001 * one_example
    chosen = [read_selection(path) for path in (ROOT / "results/mini-en/select").rglob(FILE)]
    assert max(c.AA for selection in chosen for c in selection.candidates) <= guessing + 100 / 64  # answers a candidate
    _, constant, _ = levels("mini-en/long")
    assert all(max(run.record.scores.AA, run.record.scores.LA) < constant for run in find_runs([ROOT / "results/mini-en/long"]))


@pytest.mark.parametrize("study", ["mini/grid", "mini-en/five"])
def test_where_something_was_learned_every_run_is_above_it(study):
    _, constant, _ = levels(study)
    assert min(run.record.scores.LA for run in find_runs([ROOT / "results" / study])) > 2 * constant


FOUND = [  # on mini: the first method's score is higher or lower than the second's
    ("sfor", "projected-lora", "FM", "lower"),
    ("o-lora-hard", "o-lora", "FM", "lower"),
    ("projected-lora-freeze-b", "projected-lora", "FM", "lower"),
    ("o-lora-retract-gradient", "o-lora-retract", "FM", "lower"),
    ("sfor", "seq-lora", "LA", "lower"),
    ("lwf", "sfor", "AA", "higher"),
    ("ewc", "sfor", "AA", "higher"),
    ("o-lora", "inc-lora", "LA", "lower"),
]
NOT_FOUND = [  # differences of the paper, or of an earlier page, that nine pairs do not show
    ("sfor", "projected-lora", "AA"),
    ("o-lora-hard", "o-lora", "AA"),
    ("projected-lora", "seq-lora", "FM"),
    ("o-lora-retract", "o-lora", "FM"),
    ("projected-lora-wrp", "projected-lora", "FM"),
    ("o-lora", "inc-lora", "FM"),
    ("o-lora-bsr-strong", "o-lora-hard", "FM"),
    ("o-lora-bsr-strong", "o-lora-hard", "LA"),
    ("sd-lora-per-layer", "sd-lora", "AA"),
    ("sd-lora-per-layer", "sd-lora", "LA"),
]


@pytest.fixture(scope="module")
def mini():
    runs = find_runs([ROOT / "results/mini/grid"])
    return Grid(runs), comparisons(runs)


@pytest.mark.parametrize(("one", "other", "score", "way"), FOUND)
def test_a_difference_that_the_page_tells_is_a_finding_after_correction(mini, one, other, score, way):
    test = mini[1][one, other, score]
    assert test.adjusted < 0.05
    assert (test.mean > 0) == (way == "higher")


@pytest.mark.parametrize(("one", "other", "score"), NOT_FOUND)
def test_a_difference_that_the_page_calls_not_shown_is_none(mini, one, other, score):
    assert mini[1][one, other, score].adjusted >= 0.05


@pytest.mark.parametrize("pair", [("sfor", "projected-lora-freeze-b"), ("o-lora-hard", "o-lora-retract-gradient")])
def test_the_projected_displacement_lowers_rho_by_six_orders_and_changes_no_score(mini, pair):
    grid, tests = mini
    with_it, without = (statistics.mean(run.record.drift[-1].rho for run in grid.of_method(method)) for method in pair)
    assert without > 1e6 * with_it
    for score in ("AA", "LA", "FM"):
        test = tests[(*pair, score)]
        assert test.interval[0] <= 0 <= test.interval[1]
        assert max(map(abs, test.interval)) < 0.7  # one answer is 0.16 points of AA
    theirs = [PUBLISHED["projected_family_components_qwen3_8b"]["rows"], PUBLISHED["olora_components_qwen3_8b_order1"]["rows"]]
    (rows,) = [each for each in theirs if set(pair) <= set(each)]
    assert 0 < rows[pair[0]]["FM"] - rows[pair[1]]["FM"] <= 0.25


@pytest.fixture(scope="module")
def real():
    runs = find_runs([ROOT / "results/real/grid"])
    return Grid(runs), comparisons(runs)


REAL = [  # on real text: the first method's score is higher or lower than the second's, or None: not shown
    ("o-lora-hard", "o-lora", "FM", "lower"),
    ("o-lora-hard", "o-lora", "AA", "higher"),
    ("sfor", "projected-lora", "FM", "lower"),
    ("sfor", "projected-lora", "AA", None),
    ("sfor", "seq-lora", "AA", "higher"),
    ("sfor", "seq-lora", "LA", "lower"),
    ("snapshot", "sfor", "AA", "higher"),
    ("snapshot", "sfor", "LA", "higher"),
    ("snapshot", "o-lora-hard", "AA", None),
    ("snapshot", "o-lora-hard", "FM", None),
    ("projected-lora-freeze-b", "projected-lora", "FM", "lower"),
    ("sensitive-core", "o-lora-hard", "AA", "higher"),
    ("sensitive-core", "o-lora-hard", "LA", "higher"),
    ("sensitive-core", "seq-lora", "LA", None),
    ("brake", "sensitive-core", "AA", None),
    ("fold-16", "sensitive-core", "AA", None),
    ("fold-16", "sensitive-core", "LA", "higher"),
    ("fold-8", "fold-16", "AA", "lower"),
    ("fold-8", "fold-16", "LA", "lower"),
    ("fold-8", "fold-16", "FM", None),
    ("lwf", "sfor", "AA", None),
    ("lwf", "sfor", "LA", "higher"),
    ("lwf", "sfor", "FM", "higher"),
]


@pytest.mark.parametrize(("one", "other", "score", "way"), REAL)
def test_what_the_page_tells_of_real_text_is_what_nine_pairs_show(real, one, other, score, way):
    test = real[1][one, other, score]
    assert test.n == 9
    assert (test.adjusted < 0.05) == (way is not None)
    assert way is None or (test.mean > 0) == (way == "higher")


@pytest.mark.parametrize("pair", [("sfor", "projected-lora-freeze-b"), ("o-lora-hard", "o-lora-retract-gradient")])
def test_the_projected_displacement_is_not_shown_to_change_a_score_on_real_text(real, pair):
    grid, tests = real
    with_it, without = (statistics.mean(run.record.drift[-1].rho for run in grid.of_method(method)) for method in pair)
    assert 1e6 * with_it < without < 10**7.5 * with_it
    for score in ("AA", "LA", "FM"):
        assert tests[(*pair, score)].interval[0] <= 0 <= tests[(*pair, score)].interval[1]


def test_the_runs_on_real_text_that_do_not_learn_a_task_are_those_that_the_page_names():
    runs = find_runs([ROOT / "results/real/grid"])
    tested = {task: [count.test for count in counts.values()] for task, counts in runs[0].record.labels.items()}
    one_answer = {task: 100 * max(counts) / sum(counts) for task, counts in tested.items()}
    missed = {
        (run.record.method.name, task, tuple(run.order), run.seed)
        for run in runs
        for i, task in enumerate(run.record.order)
        if run.record.accuracy[i][i] < one_answer[task] + 10
    }
    frozen, blocks = ("sfor", "projected-lora-freeze-b"), ("o-lora", "o-lora-hard", "o-lora-retract-gradient")
    of_lwf = {each for each in missed if each[0] == "lwf"}
    assert sorted((task, order[0]) for _, task, order, _ in of_lwf) == [
        ("amazon-two", "dbpedia-works"),
        *[("dbpedia-works", "amazon-two")] * 3,
    ]
    missed -= of_lwf
    of_amazon = {each for each in missed if each[2][0] == "amazon-two"}
    assert of_amazon == {
        (method, task, order, seed) for method, _, order, seed in of_amazon for task in ("agnews", "dbpedia-works")
    }, "both tasks in each of these runs"
    assert {(each[0], each[3]) for each in of_amazon} == {(method, seed) for method in frozen for seed in (38, 42, 2026)}
    others = missed - of_amazon
    assert {each[:2] for each in others} == {("fold-8", "amazon-two"), *((method, "agnews") for method in (*frozen, *blocks))}
    assert (len(runs), len(others)) == (126, 6)
    assert len({each[2:] for each in others if each[1] == "agnews"}) == 1, "all with one order and seed"


def test_the_last_fold_costs_a_part_of_a_task_in_four_of_nine_runs_on_real_text(real):
    lost = []
    for run in real[0].of_method("fold-16"):
        *_, before, after = run.record.accuracy
        lost.append(sorted(was - now for was, now in zip(before, after, strict=False)))
    lost.sort(key=lambda each: each[-1])
    assert all(each[-1] < 4 for each in lost[:5])
    assert all(4.5 < each[-1] < 7.5 and each[-3] < 4.5 for each in lost[5:7])
    assert all(15 < each[-1] < 25 and each[-2] < 15 for each in lost[7:])
    assert len(lost) == 9


@pytest.mark.parametrize("points", ["all runs", "methods that are not exact"])
def test_predicted_kl_goes_with_a_runs_forgetting_more_than_any_other_number_by_the_rule(points):
    rows = correlation_table(find_runs([ROOT / "results/mini/predicted"])).rows
    ends = {row[1]: [float(end) for end in row[4].split(" to ")] for row in rows if row[0] == points}
    low = ends.pop("predicted KL")[0]
    assert set(ends) == {"rho", "held-out", "D_eff"}
    assert low > max(high for _, high in ends.values())


def test_predicted_kl_is_no_better_than_rho_from_one_boundary_to_the_next():
    rows = correlation_table(find_runs([ROOT / "results/mini/predicted"])).rows
    found = {row[1]: row for row in rows if row[0] == "all boundaries"}
    low, high = (float(end) for end in found["predicted KL"][4].split(" to "))
    assert low <= found["rho"][3] <= high


def test_among_methods_that_are_not_exact_rho_goes_with_forgetting_on_real_text_more_than_on_mini(real, mini):
    found = []
    for grid, _ in (real, mini):
        rows = {row[:2]: row for row in correlation_table(grid.runs).rows}
        found.append([float(end) for end in rows["methods that are not exact", "rho"][4].split(" to ")])
    (low, _), (_, high) = found
    assert high < 0.5 < low
    brake = real[0].of_method("brake")
    moved, unaligned = ([getattr(d, name) for run in brake for d in run.record.drift] for name in ("rho", "chance"))
    assert statistics.mean(moved) == pytest.approx(statistics.mean(unaligned), rel=0.2)
    assert statistics.mean(run.record.scores.FM for run in brake) < 2


def assert_over_examples(told, way, *, pairs):
    """Whether an interval over test examples, as the page has it, lies above zero, below it, or around it."""
    low, high = map(float, re.search(rf"\((\S+) to (\S+) over test examples, {pairs} pairs of runs\)", told).groups())
    assert (low > 0, high < 0) == (way == "higher", way == "lower"), told


def test_every_method_of_the_catalog_and_of_the_papers_tables_has_run_on_real_text_with_three_seeds():
    tables = [table["rows"] for table in PUBLISHED.values() if isinstance(table, dict) and isinstance(table.get("rows"), dict)]
    printed = {row for rows in tables for row in rows} - {"base"}
    runs = find_runs([ROOT / "results/real/grid", ROOT / "results/real/order1"])
    on_order1 = max((run.order for run in runs), key=[run.order for run in runs].count)
    ran = Counter(run.method for run in runs if run.order == on_order1)
    assert len(printed) == 17
    assert printed <= ran.keys() == set(METHODS) - {"replay-kl", "fold-64-replay"}  # run on text of other files (log)
    assert set(ran.values()) == {3}


def test_what_the_page_tells_of_every_method_on_one_order(pages):
    """Over test examples, since three pairs of runs are too few for a test."""
    study = "real/grid+real/order1@order1"
    shown = [  # the first method's score is higher or lower than the second's, or None: not shown
        ("o-lora-retract-gradient", "o-lora-retract", "AA", "higher"),
        ("o-lora-retract", "o-lora", "AA", None),
        ("o-lora-hard", "o-lora-retract-gradient", "AA", None),
        ("o-lora", "inc-lora", "AA", "higher"),
        ("o-lora", "inc-lora", "LA", "lower"),
        ("o-lora-effective", "o-lora", "AA", None),
        ("o-lora-bsr", "o-lora-hard", "AA", None),
        ("o-lora-bsr", "o-lora-hard", "LA", None),
        ("replay", "sfor", "AA", "higher"),
        ("replay", "o-lora-hard", "AA", "higher"),
        ("fold-16", "replay", "AA", "higher"),
        ("rank-split", "replay", "AA", "higher"),
        ("rank-split", "o-lora-hard", "AA", "higher"),
        ("rank-split", "sensitive-core", "AA", "lower"),
        ("rank-split", "fold-8", "AA", "higher"),
        ("oplora", "sfor", "AA", "lower"),
        ("oplora", "sfor", "LA", "higher"),
        *((method, "sfor", "AA", None) for method in ("lwf", "sd-lora")),
        *((method, "sfor", "AA", "lower") for method in ("ewc", "n-lora")),
        *((method, "sfor", "LA", "higher") for method in ("lwf", "sd-lora", "ewc", "n-lora")),
        ("projected-lora-wrp", "projected-lora", "AA", "higher"),
        ("projected-lora-wrp", "projected-lora", "LA", None),
        ("snapshot", "o-lora-hard", "AA", None),
        ("snapshot", "o-lora", "AA", "higher"),
        ("snapshot", "sfor", "AA", "higher"),
        ("lora-fa", "sfor", "LA", None),
        ("lora-fa", "sfor", "AA", "lower"),
        ("inc-lora-hard", "inc-lora", "AA", "higher"),
        ("inc-lora-hard", "inc-lora", "LA", "higher"),
        ("o-lora-hard", "inc-lora-hard", "AA", "higher"),
        ("o-lora-hard", "inc-lora-hard", "LA", "lower"),
        *((method, "o-lora-hard", "LA", "higher") for method in ("keep-lora", "inf-lora")),
        ("keep-lora", "o-lora-hard", "AA", "lower"),
        ("inf-lora", "o-lora-hard", "AA", None),
        *((method, "sfor", "AA", "higher") for method in ("keep-lora", "inf-lora")),
        *((method, "replay", "AA", "lower") for method in ("keep-lora", "inf-lora")),
        *((method, "sfor", "AA", "lower") for method in ("lora-fa-retract", "orthogonal-adaptation", "sd-lora-per-layer")),
        *((method, "snapshot", "AA", "lower") for method in ("dare", "ties")),
        ("ties", "seq-lora", "AA", "lower"),
        ("lora-null", "inc-lora", "AA", "higher"),
        ("lora-null", "inc-lora", "LA", None),
        ("lora-plus", "seq-lora", "BWT", "lower"),
        ("sd-lora-per-layer", "sd-lora", "AA", "lower"),
        ("sd-lora-per-layer", "sd-lora", "LA", None),
        ("o-lora-bsr-strong", "o-lora-hard", "AA", None),
        ("o-lora-bsr-strong", "o-lora-hard", "LA", "lower"),
        ("o-lora-bsr-strong", "o-lora-hard", "BWT", "higher"),
    ]
    for one, other, score, way in shown:
        assert_over_examples(results_tables.examples(f"{study}:{one}:{other}:{score}"), way, pairs=3)
    runs = results_tables.report(study)[1]
    mean = {
        name: {m: statistics.mean(of(r) for r in runs if r.method == m) for m in Grid(runs).methods}
        for name, of in (("AA", lambda r: r.record.scores.AA), ("rho", lambda r: r.record.drift[-1].rho))
    }
    ours = {"sensitive-core", "brake", "fold-64", "fold-16", "rank-split", "fold-8"}
    assert max(mean["AA"], key=mean["AA"].get) == "fold-64"
    assert {m for m, score in mean["AA"].items() if score > mean["AA"]["replay"]} == ours - {"fold-8"}
    assert len({r.record.cost.stored_parameters for r in runs if r.method in ("rank-split", "fold-8")}) == 1
    assert min(ours - {"fold-8", "rank-split"}, key=mean["AA"].get) == "fold-16"
    for method in mean["AA"].keys() - ours - {"replay"}:
        assert_over_examples(results_tables.examples(f"{study}:replay:{method}:AA"), "higher", pairs=3)
    assert 0.4 < mean["rho"]["o-lora-retract"] / mean["rho"]["o-lora"] < 0.6
    below = re.findall(r"(?m)^\| (\S+) +\| 3 of 3 \| [\d.]+† +\| [\d.]+ \| [\d.]+ \|(?: +\|){3}$", pages["results-real.md"])
    assert below == ["lora-plus"], "marked, and compared with nothing"


@pytest.mark.parametrize("folder", ["mini", "real"])
def test_the_lists_of_candidates_went_on_until_the_best_was_not_the_outermost(folder):
    """On mini two end at their choice, as the page says: the one that the paper prints, and one at which no score changes."""
    found = [read_selection(path) for path in (ROOT / "results" / folder / "select").glob("*/selection.json")]
    longest = {each.method: max((o for o in found if o.method == each.method), key=lambda o: len(o.candidates)) for each in found}
    changed = {each.method for each in found if each.selected != longest[each.method].selected}
    assert changed == ({"o-lora-bsr-strong"} if folder == "mini" else set())
    at_their_end = {method for method, each in longest.items() if each.end}
    assert at_their_end == ({"o-lora-bsr", "o-lora-bsr-strong"} if folder == "mini" else set())
    assert {method for method, each in longest.items() if len(each.candidates) == 6} >= {"ewc", "lwf", "o-lora-bsr-strong"}
    weak, strong = longest["o-lora-bsr"], longest["o-lora-bsr-strong"]
    right = right_answers(weak) | right_answers(strong)
    if folder == "mini":
        assert len({right[value] for value in (0.01, 0.1, 1, 10, 100, 1000)}) == 1, "the penalty changes no score"
        assert right[10000] != right[1000]
    else:
        assert strong.selected == 1000
        first, *_, last = zip(*(right[value] for value in sorted(right_answers(strong))), strict=True)
        assert list(first) == sorted(set(first)), "the stronger, the more is kept of the first task"
        assert list(last) == sorted(last, reverse=True), "and the less is learned of the last"
        assert last[0] > 100 * last[-1]


def right_answers(selection):
    """Candidate value -> right answers on the holdout of each task."""
    n = [each["test"] for each in selection.protocol["examples"].values()]
    return {c.value: tuple(round(a * k / 100) for a, k in zip(c.accuracy, n, strict=True)) for c in selection.candidates}


def test_the_papers_strengths_of_the_effective_response_move_at_most_two_answers_on_the_holdout_of_real_text():
    chosen = read_selection(ROOT / "results/real/select/o-lora-bsr" / FILE)
    pairs = combinations(right_answers(chosen).values(), 2)
    differ = [sum(abs(a - b) for a, b in zip(one, other, strict=True)) for one, other in pairs]
    assert (max(differ), chosen.selected) == (2, 1)


def test_what_the_page_tells_of_two_base_models():
    shown = {
        "mini-en": [
            ("sfor", "seq-lora", "LA", "lower"),
            ("o-lora-hard", "o-lora", "AA", None),
            ("sensitive-core", "o-lora-hard", "AA", "higher"),
            ("fold-16", "sensitive-core", "LA", "higher"),
            ("fold-16", "sensitive-core", "BWT", "lower"),
            ("brake", "sensitive-core", "BWT", "lower"),
        ],
        "smollm2-135m": [
            ("sfor", "seq-lora", "LA", None),
            ("sfor", "projected-lora", "BWT", "higher"),
            ("sfor", "projected-lora", "AA", "higher"),
            ("o-lora-hard", "o-lora", "AA", "higher"),
            ("sensitive-core", "o-lora-hard", "AA", "higher"),
            ("fold-16", "sensitive-core", "AA", None),
            ("brake", "sensitive-core", "BWT", None),
        ],
    }
    runs = {model: results_tables.report(f"dbpedia/{model}")[1] for model in shown}
    for model, claims in shown.items():
        for one, other, score, way in claims:
            assert_over_examples(results_tables.examples(f"dbpedia/{model}:{one}:{other}:{score}"), way, pairs=3)
    best = {"dbpedia-people": 23, "dbpedia-places": 33, "dbpedia-works": 27}  # the table's best single answers
    missed = [
        (model, run.method, run.seed, task)
        for model, found in runs.items()
        for run in found
        for i, task in enumerate(run.order)
        if run.record.accuracy[i][i] < best[task] + 10
    ]
    assert {each[:2] for each in missed} == {("mini-en", "sfor"), ("mini-en", "o-lora")}
    assert sorted(each[1:] for each in missed if each[1] == "sfor") == [
        ("sfor", seed, f"dbpedia-{task}") for seed in (38, 42, 2026) for task in ("places", "works")
    ]
    assert sorted(each[2] for each in missed if each[1] == "o-lora") == [38, 42]
    grids = {model: Grid(found) for model, found in runs.items()}
    LA = {m: statistics.mean(r.record.scores.LA for r in grids["mini-en"].of_method(m)) for m in ("sfor", "seq-lora")}
    assert LA["sfor"] < LA["seq-lora"] / 2
    opposite = set()
    for one, other in combinations(sorted(set(grids["mini-en"].methods) - {"sfor"}), 2):
        ends = [interval_over_examples(grid.of_method(one), grid.of_method(other)) for grid in grids.values()]
        if all(low > 0 or high < 0 for low, high in ends) and (ends[0][0] > 0) != (ends[1][0] > 0):
            opposite.add((one, other) if ends[0][0] > 0 else (other, one))
    assert len(opposite) == 4
    assert {one for one, _ in opposite} <= {"seq-lora", "projected-lora"}
    assert {other for _, other in opposite} <= {"o-lora", "o-lora-hard"}
    for score, at_least in (("BWT", 0.6), ("AA", 0.5)):
        assert (
            float(re.search(r" ([+-]\S+) \(", results_tables.agreement(f"dbpedia/mini-en+dbpedia/smollm2-135m:{score}"))[1])
            > at_least
        )


def test_the_trace_on_real_text_ends_in_the_papers_order_with_every_seed():
    """And the text on how much each part lowers rho, here and in the paper."""
    rows = (
        ("projected-lora", "projected-lora-wrp", "projected-lora-freeze-b", "sfor"),
        ("o-lora", "o-lora-effective", "o-lora-hard"),
    )
    changing = set()
    for seed in (38, 42, 2026):
        steps = {}
        for method in (m for each in rows for m in each):
            lines = (ROOT / f"results/real/trace/{method}-{seed}/trace.jsonl").read_text().splitlines()
            steps[method] = [json.loads(line) for line in lines]
            assert (len(lines), steps[method][-1]["step"]) == (64, 626)
            projects = method in ("projected-lora-wrp", "sfor", "o-lora-hard")
            assert all(step["wrp_before"] > 1e-3 for step in steps[method][1:])
            assert all((step["wrp_after"] < 1e-6) == projects for step in steps[method][1:])
        for higher, lower in (pair for each in rows for pair in pairwise(each)):
            at = [(a["step"], a["rho"] > b["rho"]) for a, b in zip(steps[higher][1:], steps[lower][1:], strict=True)]
            assert at[-1] == (626, True)
            changing |= {(higher, lower)} if not dict(at)[199] else set()
    assert changing == {("o-lora", "o-lora-effective")}
    theirs = {m: PUBLISHED["mechanism_endpoints_qwen3_8b"]["rows"][m]["rho_bod"] for m in rows[0]}
    assert all(0.75 < theirs[m] / theirs["projected-lora"] < 1 for m in rows[0][1:3])


def test_every_claim_about_the_paper_names_a_test_or_a_table(pages):
    head = "\n".join(pages["results-real.md"].splitlines()[2:12])
    assert "What differs here from the paper" in head, "in the first ten lines"
    mini = re.sub(r"(?m)^<!-- (?:lead|unaligned) .*\n", "", (ROOT / "docs/lab/results-mini.md").read_text())  # no claims
    told = mini[mini.index("## What agrees") : mini.index("## What the mechanism shows")]
    told = built(told, "lab/results-mini.md")
    claims = {
        name: re.findall(r"(?m)^- .*(?:\n  .*)*", text) for name, text in (("results-real.md", head), ("results-mini.md", told))
    }
    assert sum(map(len, claims.values())) >= 16
    places = {
        name: set(re.findall(r'<a id="([^"]+)">', page))
        | {re.sub(r"[^a-z0-9 -]", "", h.lower()).replace(" ", "-") for h in re.findall(r"(?m)^#+ (.*)$", page)}
        for name, page in pages.items()
    }
    for name, claim in ((name, claim) for name, each in claims.items() for claim in each):
        links = re.findall(r"\]\((results[a-z-]*\.md)?#([^)]+)\)", claim)
        assert links, claim
        assert all(link in places[page or name] for page, link in links), claim


def test_o_lora_stops_just_above_chance_and_inc_lora_far_above_it(mini):
    grid, _ = mini
    less = {
        method: [statistics.mean(d.rho - d.chance for d in run.record.drift) for run in grid.of_method(method)]
        for method in ("o-lora", "inc-lora")
    }
    assert 0.02 < mean_interval(less["o-lora"])[0] < mean_interval(less["o-lora"])[1] < 0.05
    assert min(less["inc-lora"]) > 0.15


def test_each_part_alone_leaves_a_residual_in_every_task_of_every_run(mini):
    grid, _ = mini
    drifts = {m: [d for run in grid.of_method(m) for d in run.record.drift] for m in grid.methods}
    assert all(d.rho > d.chance for m in ("projected-lora", "projected-lora-wrp") for d in drifts[m])
    assert all(0.1 * d.chance < d.rho < d.chance for d in drifts["projected-lora-freeze-b"])
    steps = ["o-lora", "o-lora-retract", "o-lora-retract-gradient", "o-lora-hard"]
    for more, less in pairwise(steps):
        assert all(a.rho > b.rho for a, b in zip(drifts[more], drifts[less], strict=True)), (more, less)
    assert all(d.exact for m in ("sfor", "o-lora-hard") for d in drifts[m])
    assert not any(d.exact for m in (*steps[:3], "projected-lora-wrp", "projected-lora-freeze-b") for d in drifts[m])


@pytest.mark.parametrize(
    ("total", "brake", "rest", "told"),
    [
        ((-2.0, 0.01), (-1.9, 0.01), (-0.1, 0.9), "the brake explains it"),
        ((-2.0, 0.01), (-1.0, 0.01), (-1.0, 0.01), "the brake explains a part"),
        ((-2.0, 0.01), (-0.1, 0.90), (-1.9, 0.01), "the brake does not explain it"),
        ((-2.0, 0.01), (-0.9, 0.20), (-1.1, 0.20), "undecided"),
        ((-2.0, 0.01), (+1.0, 0.01), (-3.0, 0.01), "undecided"),  # a finding of the other sign
        ((-2.0, 0.06), (-2.0, 0.01), (-0.0, 1.00), "nothing to explain"),
    ],
)
def test_the_rule_of_the_brake_is_applied_as_it_was_written(total, brake, rest, told):
    def test(mean, p):
        reach = abs(mean) + (1.0 if p >= 0.05 else -0.01)
        return PairedTest(9, mean, (mean - abs(reach), mean + abs(reach)) if p >= 0.05 else (mean - 0.01, mean + 0.01), p, p)

    found = {("total", "LA"): test(*total), ("brake", "LA"): test(*brake), ("rest", "LA"): test(*rest)}
    assert verdict(found, "LA") == told


def test_o_lora_moves_a_in_its_first_steps_and_then_holds_it_where_inc_lora_goes_on():
    traces = {}
    for run in find_runs([ROOT / "results/mini/moves"]):
        if run.trace:
            traces.setdefault(run.method, []).append({point.step: point for point in run.trace})
    for steps in traces["o-lora"]:
        ratios = [p.grad_norms.penalties / p.grad_norms.task for p in steps.values() if p.grad_norms.task]
        assert min(ratios) > 2
        assert statistics.median(ratios) > 8
        assert abs(steps[80].moves.A - steps[20].moves.A) < 0.05 * steps[80].moves.A
    for steps in traces["inc-lora"]:
        assert steps[80].moves.A > 1.3 * steps[20].moves.A
    ends = {method: [steps[80].moves.A for steps in each] for method, each in traces.items()}
    assert max(ends["second_moment"]) < 0.4 * min(ends["o-lora"]) < 0.4 * min(ends["inc-lora"])
    assert min(ends["rescaled"]) > 0.9 * min(ends["inc-lora"])


def test_the_cap_decides_k_in_every_layer_of_every_run(mini):
    grid, _ = mini
    layers = [layer for run in grid.runs for task in run.record.layers for layer in task]
    assert {layer.k for layer in layers} == {20}
    assert min(layer.k_star for layer in layers) > 20
    for run in find_runs([ROOT / "results/mini/ranks"]):
        features = run.record.protocol["features"]
        for layer in (layer for task in run.record.layers for layer in task):
            assert layer.k == min(layer.k_star or features["at_most"], features["at_most"])


def test_what_else_the_page_tells_of_mini(mini):
    grid, tests = mini
    means = {
        m: {s: statistics.mean(getattr(r.record.scores, s) for r in grid.of_method(m)) for s in ("LA", "FM")} for m in grid.methods
    }
    assert min(means, key=lambda m: means[m]["LA"]) == "sfor"
    assert min(means, key=lambda m: means[m]["FM"]) == "o-lora-bsr-strong"
    for one, other in (("sfor", "projected-lora"), ("o-lora-hard", "o-lora")):
        places = [(order, seed) for order in grid.orders for seed in grid.seeds]
        scores = [[grid.there[method, order, seed].record.scores.FM for method in (one, other)] for order, seed in places]
        assert all(mine < theirs for mine, theirs in scores)
    for one, other in (("o-lora-bsr", "o-lora-hard"), ("o-lora-effective", "o-lora")):
        assert all(abs(end) < 0.2 for score in ("AA", "LA", "FM") for end in tests[one, other, score].interval)
    (zero_shot,) = find_runs([ROOT / "results/mini/references/zero-shot"])
    before = dict(zip(zero_shot.order, zero_shot.record.accuracy[-1], strict=True))
    after = {task: [r.record.accuracy[i][i] for r in grid.runs for i in [r.order.index(task)]] for task in before}
    assert before["reviews"] > max(after["reviews"]) - 5
    assert before["news"] < 30 < min(after["news"]) - 40
    assert min(before["entities"], before["questions"]) > 40


def test_products_in_tf32_leave_what_the_paper_prints_and_float32_does_not():
    found = {run.method: run.record.drift for run in find_runs([ROOT / "results/mini/precision"])}
    for host, method in (("sfor", "sfor"), ("hard", "o-lora-hard")):
        printed = printed_endpoint(method, "rho")
        for drift in found[f"{host}_tf32"]:
            assert printed / 2 < drift.rho < 2 * printed
        assert all(drift.rho < printed / 100 for drift in found[f"{host}_float32"])
        assert all(drift.rho > 5 * printed for drift in found[f"{host}_bf16_core"])


def test_the_emulation_keeps_ten_bits(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT))
    from benchmarks.precision import tf32

    x = torch.tensor([1 + 2.0**-10, 1 + 2.0**-12, 1 + 3 * 2.0**-12, -3.0, 0.0])
    assert tf32(x).tolist() == [1 + 2.0**-10, 1.0, 1 + 2.0**-10, -3.0, 0.0]
    x = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    assert float(((tf32(x) - x) / x).abs().max()) <= 2.0**-11


@pytest.mark.parametrize(
    ("page", "begin", "end"),
    [("results-mini.md", "## What agrees", "## Strengths"), ("results-real.md", "# Results", "## Not run")],
)
def test_no_value_of_a_comparison_is_typed_by_hand(page, begin, end):
    """Numbers of the prose beside the tables: settings and what the paper prints, no means of ours."""
    page = (ROOT / "docs/lab" / page).read_text()  # with markers for what is measured
    told = page[page.index(begin) : page.index(end)]
    told = re.sub(r"p 0\.\d+ is the smallest", "", told)  # that so many pairs can give
    assert not re.findall(r"\d+\.\d\d", told.replace("0.05", "").replace("0.01", "").replace("0.32", "").replace("0.07", ""))


def test_labels_are_those_of_the_examples_that_the_runs_were_tested_on():
    found = count_labels.count(embedded.folder("embedded:mini", "data"), ROOT / "results/mini/grid")
    assert found == json.loads((ROOT / "results/mini/grid/labels.json").read_text())
    for path in (ROOT / "results").rglob("labels.json"):
        counted = json.loads(path.read_text())
        sizes = {task: {part: sum(n[part] for n in each.values()) for part in ("train", "test")} for task, each in counted.items()}
        for run in find_runs([path.parent]):
            assert run.record.protocol["examples"] == sizes


def test_every_figure_shown_is_one_that_is_drawn_from_them(pages):
    shown = {part.split(")")[0] for text in pages.values() for part in text.split("](../figures/")[1:]}
    assert shown == {results_tables.drawn(study, name) for study, names in results_tables.FIGURES.items() for name in names}


def test_records_traces_and_selections_are_collected_and_nothing_that_a_model_said(tmp_path):
    source = tmp_path / "runs"
    for folder, names in {
        "grid/sfor/order1-42": ["record.json", "config.yaml", "trace.jsonl", "log.jsonl", "tasks/1-a/predictions.jsonl"],
        "grid/sfor/order2-42": ["config.yaml", "log.jsonl"],  # not finished
        "select/ewc": ["selection.json", "scale.json"],
    }.items():
        for name in names:
            (source / folder / name).parent.mkdir(parents=True, exist_ok=True)
            (source / folder / name).write_text("x")
    selected = json.loads((ROOT / "results/mini/select/ewc/selection.json").read_text())
    (source / "select/ewc/selection.json").write_text(json.dumps(selected))
    facts = {"name": "../models/tiny", "revision": None, "sha256": "0" * 64, "parameters": 1000, "dtype": "float32"}
    (source / "grid/sfor/order1-42/record.json").write_text(records.record(base_model=facts).as_json())
    assert collect(source, tmp_path / "kept") == 5
    assert read_record(tmp_path / "kept/grid/sfor/order1-42/record.json").base_model.name == "tiny"
    found = {str(p.relative_to(tmp_path / "kept")) for p in (tmp_path / "kept").rglob("*") if p.is_file()}
    assert found == {f"grid/sfor/order1-42/{n}" for n in ("record.json", "config.yaml", "trace.jsonl")} | {
        "select/ewc/selection.json",
        "select/ewc/scale.json",
    }
    place = selected | {"base_model": selected["base_model"] | {"name": "/home/me/models/tiny"}}
    (source / "select/ewc/selection.json").write_text(json.dumps(place))
    with pytest.raises(SystemExit, match=r"select/ewc/selection.json: names the base model /home/me/models/tiny; .*relative"):
        collect(source, tmp_path / "again")
    assert not (tmp_path / "again").exists(), "nothing is copied"


def test_right_and_wrong_answers_are_collected_without_a_word(tmp_path, small_benchmark, small_model):
    source, kept = tmp_path / "runs", tmp_path / "kept"
    recipe = small.recipe(small_benchmark, small_model).changed({"train_limit": 8, "test_limit": 6})
    run_sequence(recipe, METHODS["sfor"], order=small.ORDER[:2], seed=1, out=source / "sfor")
    assert collect(source, kept) == 2
    assert collect_right(source, kept) == 1
    (mine,), (theirs,) = find_runs([source]), find_runs([kept])
    assert mine.answers == theirs.answers
    assert {len(each) for each in theirs.answers.values()} == {12}
    words = re.findall(r"[A-Za-z]+", (kept / "sfor/right.json").read_text())
    assert set(words) == {"AA", "LA", *small.ORDER[:2]}


def test_committed_results_hold_no_predictions_and_read_as_records():
    # of benchmarks and the frontier: numbers alone
    names = (
        "keeping",
        "keeping-linear",
        "beyond/osf",
        "frontier",
        "first-command",
        "second-stage",
        "peft-comparison",
        "full-weights",
    )
    ours = [ROOT / "results" / name for name in names]
    folders = [folder for folder in (ROOT / "results").iterdir() if folder.is_dir()]
    files = [path for folder in folders for path in folder.rglob("*") if path.is_file() and path.name != ".made-of"]
    kept = {path.name for path in files if not set(ours) & set(path.parents)}
    numbers = {"record.json", "trace.jsonl", "selection.json", "scale.json", "eval.json", "labels.json", "right.json"}
    assert kept <= {"config.yaml", *numbers}
    assert len(find_runs([ROOT / "results"])) > 150
    for path in ours[0].glob("*.json"):
        scores = json.loads(path.read_text())["scores"]
        assert all(isinstance(value, float) for metrics in scores.values() for values in metrics.values() for value in values), path
    for path in ours[1].glob("*/*.json"):
        assert set(json.loads(path.read_text())) == {"order", "seed", "accuracy", "scores", "stored_parameters"}
    lines = [line for path in ours[3].glob("*/records.jsonl") for line in path.read_text().splitlines()]
    assert lines, "the frontier has records"
    for point in (point for line in lines for point in json.loads(line)["points"]):
        assert all(isinstance(value, int | float) for values in (point["new"], *point["old"].values()) for value in values)


def test_collected_configurations_name_no_place_of_a_machine():
    config = "method: /home/me/mine.py:best\n    data: /home/me/data/cl\n    model: ../models/tiny\n"
    config += "    model: Qwen/Qwen3-8B\n    data: embedded:mini\n"
    kept = "method: mine.py:best\n    data: cl\n    model: tiny\n    model: Qwen/Qwen3-8B\n    data: embedded:mini\n"
    assert without_places(config) == kept
    for path in sorted((ROOT / "results").rglob("record.json")):
        assert (name := json.loads(path.read_text())["base_model"]["name"]) == model_label(name), path
    for path in sorted((ROOT / "results").rglob("config.yaml")):
        assert without_places(path.read_text()) == path.read_text(), path


def test_a_study_is_one_file_that_makes_its_folder_and_is_made_of_it(tmp_path):
    files = {"grid/a/record.json": '{"é": 1}\r\n', "grid/b/trace.jsonl": "", "labels.json": "x" * 1000}
    for name, text in files.items():
        path = tmp_path / "study" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text.encode())
    archive = pack(tmp_path / "study")
    made = archive.read_bytes()
    shutil.rmtree(tmp_path / "study")
    (tmp_path / "study").mkdir()
    (tmp_path / "study/stale.json").write_text("{}")
    folder = unpack(archive)
    there = {p.relative_to(folder).as_posix(): p.read_bytes().decode() for p in folder.rglob("*") if p.is_file()}
    assert there.pop(".made-of") == hash_of(archive)
    assert there == files
    assert pack(folder).read_bytes() == made
