"""The frontier: its rule against one written out here, and its runs on the embedded model, stopped and gone on with."""

import json
import sys
from itertools import product
from statistics import fmean, stdev
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from anchorlora.adapters import lora_layers
from anchorlora.cli.app import main
from anchorlora.errors import InvalidValue, MissingExtra, UnknownName
from anchorlora.methods import METHODS
from anchorlora_lab.frontier.bench import BEFORE, EPOCHS, Run, append, bench, one, planned, read_records
from anchorlora_lab.frontier.measures import Sizes
from anchorlora_lab.frontier.rows import ROWS, Row
from anchorlora_lab.frontier.skills import HELD_OUT, skills
from anchorlora_lab.frontier.subject import RANK, Subject
from anchorlora_lab.frontier.tables import chosen, chosen_rates, difference, frontier_tables, interval, picture, points_of
from anchorlora_lab.frontier.training import Training
from golden import one_line

SKILLS = ("labels", "card")
SIZES = {"train": 8, "test": 4, "instructions": 2, "facts": 4, "choices": 2, "chats": 2, "passages": 2, "own": 4}
BITS = st.lists(st.integers(0, 1), min_size=4, max_size=4)


def record(row, skill, seed, rate, points):
    """A record with points {(epoch, scale): (new, facts)}."""
    return {
        "row": row,
        "skill": skill,
        "seed": seed,
        "rate": rate,
        "data": "none",
        "stored_bytes": 1,
        "kept_bytes": 0,
        "peak_bytes": 1,
        "points": [
            {
                "epoch": epoch,
                "scale": scale,
                "norm": 1.0,
                "cpu_seconds": {"training": 1.0},
                "new": list(new),
                "old": {"facts": list(facts), "nothing": [0.0] * 4},
                "kl": {"chats": [0.1], "passages": [0.1], "new": [0.1]},
            }
            for (epoch, scale), (new, facts) in points.items()
        ],
    }


@st.composite
def benches(draw):
    before = [record(BEFORE, skill, 1, 0.0, {(0, 0.0): ([0] * 4, draw(BITS.filter(any)))}) for skill in SKILLS]
    runs = [
        record(row, skill, seed, rate, {setting: (draw(BITS), draw(BITS)) for setting in ((1, 1.0), (2, 1.0), (2, 0.5))})
        for row, rate, skill, seed in product(("plain", "other"), (1e-4, 1e-3), SKILLS, (1, 2))
    ]
    return before + runs


def test_rows_that_learn_too_little_or_ran_on_fewer_pairs_are_not_ranked():
    at = {(1, 1.0): ([1] * 4, [0, 0, 1, 1])}
    records = [record(BEFORE, "labels", 1, 0.0, {(0, 0.0): ([0] * 4, [1] * 4)})]
    records += [record(row, "labels", seed, 1e-3, at) for row in ("plain", "alike") for seed in (1, 2)]
    records += [record("few", "labels", 1, 1e-3, {(1, 1.0): ([1] * 4, [1] * 4)})]
    records += [record("idle", "labels", seed, 1e-3, {(1, 1.0): ([0] * 4, [1] * 4)}) for seed in (1, 2)]
    (table,) = frontier_tables(records, choosing=["labels"])
    assert sorted(row[0] for row in table.rows) == ["alike", "few", "idle †", "plain"]
    assert {table.rows[i][0] for i, _ in table.marked} == {"alike", "plain"}


def test_the_picture_joins_what_nothing_of_a_row_beats_over_the_pairs_that_most_rows_have():
    records = [record(BEFORE, skill, 1, 0.0, {(0, 0.0): ([0] * 4, [1] * 4)}) for skill in SKILLS]
    at = {(1, 1.0): ([1, 1, 1, 1], [1, 0, 0, 0]), (2, 1.0): ([1, 1, 0, 0], [1, 1, 0, 0]), (2, 0.5): ([1, 0, 0, 0], [1, 0, 0, 0])}
    records += [record(row, skill, 1, 1e-3, at) for row, skill in product(("plain", "alike"), SKILLS)]
    records += [record("few", SKILLS[0], 1, 1e-3, at)]
    (axes,) = picture(records).axes
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["plain", "alike"]
    points, line = axes.get_lines()[:2]
    assert sorted(zip(*points.get_data(), strict=True)) == [(25, -75), (50, -50), (100, -75)]
    assert list(zip(*line.get_data(), strict=True)) == [(50, -50), (100, -75)]


@given(benches())
def test_the_setting_of_a_row_is_the_one_of_the_log(records):
    before = {r["skill"]: r["points"][0]["old"]["facts"] for r in records if r["row"] == BEFORE}
    new, kept = {}, {}
    for r in records:
        for p in r["points"] if r["row"] != BEFORE else ():
            key = r["row"], (r["rate"], p["epoch"], p["scale"])
            new.setdefault(key, []).append(100 * (p["new"][0] + p["new"][2]) / 2)
            change = [a - b for a, b in zip(p["old"]["facts"], before[r["skill"]], strict=True)]
            kept.setdefault(key, []).append(100 * (change[0] + change[2]) / 2)
    least = max(fmean(values) for (row, setting), values in new.items() if row == "plain" and setting[2] == 1) - 0.5
    settings = chosen([point.half(0) for point in points_of(records)])
    for row, (setting, enough) in settings.items():
        reach = [key for key, values in new.items() if key[0] == row and fmean(values) >= least]
        assert enough == bool(reach)
        if reach:
            assert fmean(kept[row, setting]) == max(fmean(kept[key]) for key in reach)
        else:
            assert fmean(new[row, setting]) == max(fmean(values) for key, values in new.items() if key[0] == row)
    assert {"plain", "other"} == set(settings)
    points = points_of(records)
    pairs = [(a, b) for a in points for b in points if (a.row, b.row, a.cluster) == ("other", "plain", b.cluster)]
    less, values = difference(pairs), [{a.cluster[0]: [x - y for x, y in zip(a.new, b.new, strict=True)]} for a, b in pairs]
    assert less.learned == pytest.approx(100 * fmean(fmean(*each.values()) for each in values))
    assert less.learned_interval == interval(values)
    assert less.kept == pytest.approx(fmean(a.kept - b.kept for a, b in pairs))
    assert chosen_rates(records, choosing=SKILLS) == {row: setting[0] for row, (setting, _) in settings.items()}


def test_an_interval_is_as_wide_as_clusters_and_questions_make_it():
    draw = np.random.default_rng(1)
    hard = draw.normal(0, 1, 50)  # a question's own share, the same in every cluster that is asked it
    answers = [draw.normal(shift, 0.5, 50) + hard for shift in draw.normal(0, 0.3, 40)]
    means = [100 * fmean(values) for values in answers]
    between, inside = stdev(means) ** 2 / 40, (100 * 0.5) ** 2 / 50 / 40  # of clusters, and of what is drawn anew in each
    for same in (True, False):
        low, high = interval([{"a" if same else str(i): values.tolist()} for i, values in enumerate(answers)])
        questions = 100**2 * hard.var() / (50 if same else 50 * 40)
        assert low < fmean(means) < high
        assert high - low == pytest.approx(2 * 1.96 * (between + inside + questions) ** 0.5, rel=0.15)


def test_a_right_answer_has_the_full_score_and_one_of_other_words_none(data):
    every = skills(data, test=4)
    assert set(HELD_OUT) < set(every)
    for name, skill in every.items():
        assert skill.pool, name
        assert {skill.score(item.answer, item.answer) for item in skill.test + skill.pool} == {1.0}, name
        assert {skill.score("Other; Words", item.answer) for item in skill.test + skill.pool} == {0.0}, name
        assert not {item.prompt for item in skill.test} & {item.prompt for item in skill.pool}, name
    (answer,) = {item.answer for item in every["names"].pool}
    assert answer == "Anna Bell; Paris"
    assert every["names"].score("Paris; Rome", answer) == every["names"].score("Paris; Rome; Rome; x; y; Anna Bell", answer) == 0.5
    assert every["headline"].score("River, and the STONE", "river stone bread") == 4 / 7


def test_runs_of_a_tier_come_before_the_next_and_every_row_once():
    runs = planned(ROWS, SKILLS, (1, 2))
    assert len({run.id for run in runs}) == len(runs) == len(SKILLS) * (1 + 2 * sum(len(row.rates) for row in ROWS))
    tiers = [run.row.tier for run in runs if run.seed == 1]
    assert tiers == sorted(tiers)


def test_a_line_that_was_not_finished_goes(tmp_path):
    append(tmp_path, {"id": "a"})
    with (tmp_path / "records.jsonl").open("ab") as file:
        file.write(b'{"id": "b')
    assert [r["id"] for r in read_records(tmp_path)] == ["a"]
    append(tmp_path, {"id": "c"})
    assert [r["id"] for r in read_records(tmp_path)] == ["a", "c"]


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """A folder as the benchmark's, with rows made up."""
    root = tmp_path_factory.mktemp("data")
    words = ["river", "stone", "bread", "light", "paper", "music", "winter", "garden"]
    for task, kind, sentence in (
        (
            "agnews",
            "TC",
            "Title: {0} {1} {2} {3} {4}\nText: The {0} and {2} were shown to Anna Bell in Paris, where Anna Bell lives.",
        ),
        ("dbpedia", "TC", "Title: {0} {1}\nText: The {0} is a {1} of {2}."),
        ("yahoo", "TC", "Question: what is {0} {1} {2} {3}?\nAnswer: it is {0} and {1} and {2} and {3} and {4}"),
        ("amazon", "SC", "Title: {0}\nText: " + "{0} {1} {2} {3} {4} " * 9),
    ):
        folder = root / "standard_cl" / kind / task
        folder.mkdir(parents=True)
        for split, first in (("train", 0), ("test", 1)):
            rows = [
                {"sentence": sentence.format(*picked), "label": picked[0]}
                for picked in list(product(words, repeat=5))[first:4000:37]
            ]
            (folder / f"{split}.json").write_text(json.dumps(rows))
    return root


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--seeds", "a"], "--seeds takes whole numbers separated by commas, not 'a'"),
        (["--seeds", ""], "--seeds takes whole numbers separated by commas, not ''"),
        (["--choosing", "card,lables"], "there is no skill called 'lables'; there are labels, card, passage, style"),
        (["--skills", "lables"], "there is no skill called 'lables'"),
    ],
)
def test_a_seed_or_a_skill_that_is_none_is_refused_in_one_line(options, said, data, tmp_path, capsys):
    assert main(["frontier", "embedded:mini", "--out", str(tmp_path / "f"), "--data", str(data), "--most", "0", *options]) == 2
    assert said in one_line(capsys)
    assert not (tmp_path / "f").exists()


def test_a_repair_takes_intruders_from_the_block(tmp_path):
    subject = Subject.of("embedded:mini", tmp_path)
    for layer in lora_layers(subject.model).values():
        torch.nn.init.normal_(layer.lora_B["default"].weight, std=0.3, generator=torch.Generator().manual_seed(0))
    before = {layer: (f.scale * f.B.double() @ f.A.double()).numpy() for layer, f in subject.stack.newest().items()}
    subject.repair()
    assert list(subject.model.peft_config) == ["default"]
    for layer, f in list(subject.stack.newest().items())[:4]:
        W = lora_layers(subject.model)[layer].get_base_layer().weight.detach().double().numpy()
        U, S, V = np.linalg.svd(W + before[layer], full_matrices=False)
        near = np.abs(U[:, :10].T @ np.linalg.svd(W, full_matrices=False)[0]).max(1)
        intruders = [i for i in range(10) if near[i] < 0.5]
        assert intruders
        left = before[layer] - 0.25 * sum(S[i] * np.outer(U[:, i], V[i]) for i in intruders)
        U, S, V = np.linalg.svd(left, full_matrices=False)
        change = (f.scale * f.B.double() @ f.A.double()).numpy()
        assert np.linalg.norm(change - (U[:, :RANK] * S[:RANK]) @ V[:RANK]) < 1e-4 * np.linalg.norm(change)


@pytest.mark.filterwarnings("ignore")
def test_self_distillation_trains_the_block_alone_on_short_answers_of_its_own_beside_the_example(data, tmp_path, monkeypatch):
    pytest.importorskip("trl.experimental.sdft", reason="this TRL has no SDFT")
    from transformers import TrainerCallback

    subject, skill, batches = Subject.of("embedded:mini", tmp_path), skills(data, test=4)["labels"], []
    hook = "on_self_distillation_batch_prepared"  # TRL calls it of every callback
    monkeypatch.setattr(TrainerCallback, hook, lambda _, **batch: batches.append(batch), raising=False)
    measures = SimpleNamespace(sizes=Sizes(**SIZES), of=lambda _: {})
    run = Run(Row("sdft", "sdft", scales=()), 1e-2, "labels", 1)
    before = {name: p.detach().clone() for name, p in subject.model.named_parameters() if "lora_" not in name}
    found = one(subject, measures, run, skill, data)
    after = dict(subject.model.named_parameters())
    assert all(torch.equal(p, after[name]) for name, p in before.items())
    assert all(f.B.count_nonzero() for f in subject.stack.newest().values())
    first, last = found["points"]
    assert (first["epoch"], last["epoch"]) == (1, EPOCHS)
    assert 0 < first["cpu_seconds"]["training"] < last["cpu_seconds"]["training"]
    assert found["stored_bytes"] > 0 <= found["peak_bytes"]
    assert {len(batch["prompt_ids"]) for batch in batches} == {SIZES["train"]}, "an answer a prompt"
    assert all(batch["completion_ids"].shape[1] <= skill.max_new_tokens for batch in batches)
    shown = subject.tokenizer.batch_decode(batches[0]["teacher_input_ids"])
    drawn = {f"{item.prompt}\n\n\nExample answer: {item.answer}\n" for item in skill.drawn(SIZES["train"], 1)}
    assert len({prompt for prompt in drawn for text in shown if prompt in text}) == len(drawn)
    with monkeypatch.context() as without, pytest.raises(MissingExtra, match="the row sdft needs TRL .* pip install -U trl"):
        without.setitem(sys.modules, "trl.experimental.sdft", None)
        one(subject, measures, run, skill, data)


@pytest.mark.parametrize("method", ["fold-16", "inc-lora-hard"])
def test_a_row_with_old_text_protects_what_the_old_chats_show_and_writes_none(method, tmp_path):
    subject, row, kept = Subject.of("embedded:mini", tmp_path), Row("old", method, old=True), []
    chats = [subject.encoded(i, f"What is {i} and {i}?", f"{2 * i} it is") for i in range(8)]
    how = {"epochs": 1, "own": 8, "human": chats, "most": 4, "at_epoch": lambda epoch, seconds: kept.append(epoch)}
    facts = Training(subject, row, 1e-3, 1, chats[:4], **how).run()
    made = subject.memory if METHODS[method].reads_past else subject.cores
    name = f"{made.__name__}-human.safetensors"
    assert row.data == "old data"
    assert kept == [1]
    assert facts["kept_bytes"] > 0
    assert {path.name for path in tmp_path.glob("*.safetensors")} == {name}, "and no text of its own"
    assert not list(tmp_path.glob("own-*.json"))
    of_these, _ = made(chats, "-again")
    of_others, _ = made(chats[::2], "-others")
    read = {use: (tmp_path / f"{made.__name__}{use}.safetensors").read_bytes() for use in ("-human", "-again", "-others")}
    assert of_these.keys() == of_others.keys()
    assert read["-human"] == read["-again"] != read["-others"]


@pytest.mark.usefixtures("extra_eval")
def test_runs_go_on_where_they_stopped_and_the_table_tells_them(data, tmp_path, monkeypatch):
    rows = (
        Row("plain", rates=(1e-3,), scales=(0.5,)),
        Row("own", "fold-16", rates=(1e-3,), scales=(0.5,), own=0.5, kl=0.1),
        Row("osf", "osf", rates=(1e-2,), scales=()),
        Row("plain repaired", rates=(1e-3,), scales=(), repair=True),
    )
    monkeypatch.setattr("anchorlora_lab.frontier.bench.ROWS", rows)
    monkeypatch.setattr(
        "anchorlora_lab.frontier.skills.Demand.met", lambda demand, text: 1.0
    )  # whatever is said, so that none is told
    monkeypatch.setattr("anchorlora_lab.frontier.measures.ANSWER", 4)
    monkeypatch.setattr("anchorlora_lab.frontier.subject.OWN_TOKENS", 16)
    monkeypatch.setattr("anchorlora_lab.frontier.tables.ABOVE_CHANCE", 80)  # of two questions, one is right by chance
    options = {"skill_names": ["labels"], "seeds": (1,), "sizes": SIZES, "say": lambda _: None}
    with pytest.raises(
        InvalidValue, match="instructions 100, facts 0, choice .* % right, none 80 points above chance; give a model"
    ):
        bench("embedded:mini", tmp_path / "none", data, **options)
    monkeypatch.setattr("anchorlora_lab.frontier.measures.fact_score", lambda text, answer: 1.0)  # so that there is an ability
    assert bench("embedded:mini", tmp_path, data, most=1, **options) == 1
    assert bench("embedded:mini", tmp_path, data, **options) == 4
    assert bench("embedded:mini", tmp_path, data, **options) == 0
    assert bench("embedded:mini", tmp_path, data, rates={"plain": 1e-3}, **options) == 0, "at the rate that is there"
    file = tmp_path / "embedded-mini/records.jsonl"
    before, heard = file.read_text(), []
    file.write_text(before.replace(json.loads(before.splitlines()[0])["sha256"], "0" * 64))
    assert bench("embedded:mini", tmp_path, data, **options | {"say": heard.append}) == 0
    assert heard == [
        f"warning: 5 records in {file.parent} are of other files of a model; if its weights differ too, choose another --out"
    ]
    file.write_text(before)
    records = read_records(tmp_path / "embedded-mini")
    assert [r["row"] for r in records] == ["before", "plain", "own", "osf", "plain repaired"]
    whole, repaired = records[3:]
    assert [(p["epoch"], p["scale"]) for p in whole["points"]] == [(1, 1.0), (2, 1.0)]
    assert 0 < whole["points"][0]["norm"] < whole["points"][1]["norm"]
    assert fmean(whole["points"][1]["kl"]["chats"]) > 0, "against the model before OSF"
    assert whole["stored_bytes"] > 5 * records[1]["stored_bytes"], "full weights"
    assert [(p["epoch"], p["scale"]) for p in repaired["points"]] == [(2, 1.0)]
    assert repaired["points"][0]["norm"] == records[1]["points"][1]["norm"], "four steps make no intruders, and OSF left no trace"
    for r in records[1:3]:
        assert [(p["epoch"], p["scale"]) for p in r["points"]] == [(1, 1.0), (2, 1.0), (2, 0.5)]
        assert r["points"][2]["norm"] == pytest.approx(r["points"][1]["norm"] / 2, rel=1e-4)
        assert 0 < fmean(r["points"][2]["kl"]["chats"]) < fmean(r["points"][1]["kl"]["chats"])
        assert set(r["points"][0]["cpu_seconds"]) == {"training", "made"}
    assert records[1]["kept_bytes"] == 0 < records[2]["kept_bytes"]
    assert max(records[0]["points"][0]["kl"]["chats"]) < 1e-3, "the model before is the model before"
    with pytest.raises(UnknownName, match="no row called 'x'"):
        bench("embedded:mini", tmp_path, data, rows=["x"], **options)
    (table,) = frontier_tables(records[:3], choosing=["labels"])
    assert [row[0].rstrip(" †") for row in table.rows] == ["plain", "own"] or len(table.rows) == 2
