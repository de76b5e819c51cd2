"""What crosses task boundaries: its cost stays flat over two hundred tasks, and it comes back bitwise from what a run saves."""

from dataclasses import fields, is_dataclass

import pytest
import torch

import oracle
from anchorlora.config import Features
from anchorlora.continual.past import Past
from anchorlora.geometry import Subspace, spectrum

TASKS, ROWS, HELD_OUT = 200, 16, 4
SETTINGS = Features(rows=ROWS, held_out_rows=HELD_OUT, energy=0.93, at_least=4, at_most=6, wide=8)
STORES = {"q": "q", "v": "q", "out": "out"}
NARROW, WIDE = 24, 96


@pytest.fixture(params=[NARROW, WIDE], ids=["narrow", "wide"])
def width(request, monkeypatch):
    """The width of the layers; the wide ones are wider than what is decomposed exactly."""
    monkeypatch.setattr(spectrum, "SIDE", 64)
    return request.param


def drawn(width, task):
    """A task's rows, mostly along directions that all tasks share."""
    draw = torch.Generator().manual_seed(task)
    sizes = torch.arange(1, width + 1) ** -1.0

    def rows(n):
        return torch.randn(n, width, generator=draw) * sizes

    return {f"{kind}/{store}": rows(n) for kind, n in (("core", ROWS), ("held_out", HELD_OUT)) for store in ("q", "out")}


def begun():
    past = Past.empty(SETTINGS)
    past.rows.keep, past.rows.stores = 40, dict(STORES)
    return past


def finish(past, rows):
    past.rows.restore_task(rows)
    cores, kept = past.made({})
    past.append(cores, kept)
    return cores


def entries(value, seen):
    """How many numbers something holds on to; tensors that share their memory count once."""
    if isinstance(value, torch.Tensor):
        storage = value.untyped_storage()
        if storage.data_ptr() in seen:
            return 0
        seen.add(storage.data_ptr())
        return storage.nbytes() // value.element_size()
    if is_dataclass(value):
        value = [getattr(value, f.name) for f in fields(value)]
    if isinstance(value, dict):
        value = list(value.values())
    return sum(entries(item, seen) for item in value) if isinstance(value, list) else 0


def test_the_two_hundredth_boundary_holds_and_decomposes_no_more_than_an_early_one(width, monkeypatch):
    largest = []
    for name in ("eigh", "svd"):
        inner = getattr(torch.linalg, name)

        def noting(matrix, *args, inner=inner, **kwargs):
            largest[-1] = max(largest[-1], min(matrix.shape))
            return inner(matrix, *args, **kwargs)

        monkeypatch.setattr(torch.linalg, name, noting)
    past, held = begun(), []
    for task in range(TASKS):
        largest.append(0)
        finish(past, drawn(width, task))
        held.append(entries(past, set()))
    assert max(largest[20:]) <= max(largest[:20]) <= 5 * ROWS
    assert max(held[100:]) <= max(held[:100])
    # of each store: 64 rows, 2 d held-out ones and the last task's, a union of d directions, and the first and last cores
    assert max(held) <= 2 * width * (64 + 2 * width + ROWS + 2 * HELD_OUT + width + 6 + 6 + 8)


def test_after_two_hundred_tasks_the_cores_of_a_narrow_layer_are_those_of_all_rows():
    past, parts = begun(), []
    for task in range(TASKS):
        rows = drawn(NARROW, task)
        parts.append(rows["core/q"])
        made = finish(past, rows)["v"]
    rows = torch.cat(parts)
    V, k_star, retained = oracle.core(rows, energy=0.93, at_least=4, at_most=6)
    assert (made.core.k, made.k_star, made.rows) == (V.shape[1], k_star, TASKS * ROWS)
    assert made.retained_energy == pytest.approx(retained, rel=len(rows) * torch.finfo(torch.float64).eps)
    outside = made.core.outside(V.T.double())
    assert float(outside.norm()) < V.shape[1] * torch.finfo(torch.float32).eps, "stored in float32"


@pytest.mark.parametrize("stopped", [2, 5, 60])
def test_a_past_that_is_built_again_from_what_was_saved_goes_on_bitwise(width, stopped):
    whole, again = begun(), begun()
    for task in range(stopped):
        made = finish(whole, drawn(width, task))
        saved = {name: t.clone() for name, t in whole.rows.tensors().items()}
        again.rows.restore_task(saved)
        again.append(made, {})
    for task in range(stopped, stopped + 3):
        expected, found = (finish(past, drawn(width, task)) for past in (whole, again))
        for layer in STORES:
            assert torch.equal(found[layer].core.basis, expected[layer].core.basis)
            assert torch.equal(found[layer].wide.basis, expected[layer].wide.basis)
            assert found[layer].retained_energy == expected[layer].retained_energy
            assert torch.equal(again.union_cores[layer].basis, whole.union_cores[layer].basis)
            assert torch.equal(again.held_out[layer], whole.held_out[layer])
    assert again.first_cores.keys() == whole.first_cores.keys()


def test_the_union_of_all_past_cores_is_that_of_joining_them_at_once(width):
    past, cores = begun(), []
    for task in range(12):
        cores.append(finish(past, drawn(width, task))["q"].core)
    union, expected = past.union_cores["q"], Subspace.joining(cores)
    assert union is past.union_cores["v"]
    assert union.k == expected.k
    assert float(union.outside(expected.basis.T).norm()) < 1e-6 * union.k, "what is less than that counts as no direction"
    for core in cores:
        assert float(union.outside(core.basis.double().T).norm()) < 1e-6 * core.k


def test_held_out_rows_of_many_tasks_are_fewer_rows_that_every_change_reads_alike(width):
    past, parts = begun(), []
    for task in range(TASKS):
        rows = drawn(width, task)
        parts.append(rows["held_out/out"].double())
        finish(past, rows)
    held, rows = past.held_out["out"], torch.cat(parts)
    assert len(held) <= 2 * width + HELD_OUT
    assert past.rows.held_out_rows(tasks=TASKS - 1)["out"].shape[1] == width
    change = torch.randn(5, width, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    expected = float((rows @ change.T).norm())
    assert float((held.double() @ change.T).norm()) == pytest.approx(expected, rel=len(rows) * torch.finfo(torch.float64).eps)
    with pytest.raises(ValueError, match="held-out rows are kept for all 200 tasks or all but the last, not for the first 3"):
        past.rows.held_out_rows(tasks=3)
