"""Merging after training against dense float64 references, written out entry by entry, and against PEFT's own merged adapters."""

import numpy as np
import peft
import pytest
import torch
from packaging.version import Version

import models
from anchorlora import METHODS, MergedPerTask
from anchorlora.adapters import AdapterStack, lora_layers
from anchorlora.geometry import Subspace
from anchorlora.methods import TaskEnd
from faults.runs import assert_same, run
from faults.test_resume import stop_at

RANK, LAYER = 16, "model.layers.0.self_attn.v_proj"  # it writes 32 outputs: two blocks of rank 16 store any change of it


def generator(seed):
    return torch.Generator().manual_seed(seed)


def learned(plan, tasks, *, seed=7, rank=RANK):
    """Blocks that have moved at random, the newest not yet merged; and (F, N) of `LAYER` before that, dense."""
    stack = AdapterStack(models.qwen3(), targets=("q_proj", "v_proj"), rank=rank, alpha=4 * rank)
    draw = generator(5)
    for task in range(1, tasks + 1):
        plan.begin_task(stack, generator(task), first=task == 1)
        with torch.no_grad():
            for p in stack.trainable():
                p.add_(0.1 * torch.randn(p.shape, generator=draw))
        if task < tasks:
            plan.end_task(stack, TaskEnd(draw=generator(seed)))
    return stack


def changes(stack):
    """Layer -> (F, N), what earlier tasks have left and the newest block, dense float64."""
    found = {}
    for layer, f in stack.stacked().items():
        A, B = (4.0 * f.A.double().numpy(), f.B.double().numpy())
        found[layer] = (B[:, :-RANK] @ A[:-RANK], B[:, -RANK:] @ A[-RANK:])
    return found


def stored(stack):
    return {layer: 4.0 * (f.B.double() @ f.A.double()).numpy() for layer, f in stack.stacked().items()}


def trimmed(change, share):
    """Only the largest entries by size, as many as `share` of all, rounded down."""
    keep = np.argsort(-np.abs(change), axis=None)[: int(share * change.size)]
    out = np.zeros(change.size)
    out[keep] = change.ravel()[keep]
    return out.reshape(change.shape)


def ties_of(before, new, share):
    """TIES of two changes, one entry after the other."""
    pair, out = (trimmed(before, share), trimmed(new, share)), np.zeros_like(before)
    for at in np.ndindex(*before.shape):
        a, b = (float(each[at]) for each in pair)
        sign = 1.0 if a + b >= 0 else -1.0
        agree = [x for x in (a, b) if x * sign > 0]
        out[at] = sum(agree) / len(agree) if agree else 0.0
    return out


def nearest(matrix, rank):
    left, sizes, right = np.linalg.svd(matrix)
    return (left[:, :rank] * sizes[:rank]) @ right[:rank]


@pytest.mark.parametrize("name", ["snapshot", "ties", "dare"])
def test_the_first_block_stays_as_it_is_and_later_ones_grow_the_rank_as_stacked_ones_do(name):
    plan = METHODS[name].plan
    stack = learned(plan, 1)
    before = stack.stacked()
    plan.end_task(stack, TaskEnd(draw=generator(1)))
    for layer, f in stack.stacked().items():
        assert torch.equal(f.A, before[layer].A)
        assert torch.equal(f.B, before[layer].B)


@pytest.mark.parametrize("name", ["snapshot", "ties"])
def test_where_the_base_model_is_to_be_kept_the_first_block_is_merged_with_it(name):
    plan = METHODS[name].plan
    stack = learned(plan, 1)
    ((before, new),) = [pair for layer, pair in changes(stack).items() if layer == LAYER]
    assert not before.any()
    kept = {layer: Subspace(torch.eye(f.A.shape[1], 2)) for layer, f in stack.stacked().items()}
    plan.end_task(stack, TaskEnd(protected=kept, draw=generator(1)))
    expected = new / 2 if name == "snapshot" else nearest(ties_of(before, new, plan.share), RANK)
    assert np.abs(stored(stack)[LAYER] - expected).max() < 1e-6 * np.abs(new).max()
    stack = learned(plan, 3)
    plan.end_task(stack, TaskEnd(draw=generator(1)))
    assert {f.rank for f in stack.factors().values()} == {3 * RANK}
    assert stack.scale == 4.0


def test_where_the_base_model_is_to_be_kept_dare_drops_entries_of_the_first_block_too():
    plan = METHODS["dare"].plan
    stack = learned(plan, 1, rank=2 * RANK)  # which stores any change of LAYER
    new = stored(stack)[LAYER]
    kept = {layer: Subspace(torch.eye(f.A.shape[1], 2)) for layer, f in stack.stacked().items()}
    plan.end_task(stack, TaskEnd(protected=kept, draw=generator(3)))
    merged = stored(stack)[LAYER]
    there = np.abs(merged) > np.abs(new) / 2
    assert np.allclose(merged, np.where(there, new / 0.8, 0.0), rtol=0, atol=1e-6 * np.abs(new).max())
    assert 0.77 < there.mean() < 0.83


def test_a_snapshot_is_the_mean_of_the_weights_before_and_after_exactly():
    plan = METHODS["snapshot"].plan
    stack = learned(plan, 3)
    expected, before = changes(stack), stack.stacked()
    plan.end_task(stack, TaskEnd())
    for layer, found in stored(stack).items():
        F, N = expected[layer]
        assert np.allclose(found, (F + (F + N)) / 2, rtol=0, atol=1e-12)
        A, B = stack.stacked()[layer].A, stack.stacked()[layer].B
        assert torch.equal(A, before[layer].A)
        assert torch.equal(B[:, :-RANK], before[layer].B[:, :-RANK])
        assert torch.equal(B[:, -RANK:], before[layer].B[:, -RANK:] / 2)


def test_ties_is_trimmed_elected_and_averaged_entry_by_entry_and_cut_to_the_stacked_rank():
    plan = METHODS["ties"].plan
    stack = learned(plan, 2)
    expected = {layer: ties_of(F, N, 0.2) for layer, (F, N) in changes(stack).items()}
    assert all(np.linalg.matrix_rank(each) > RANK for each in expected.values())
    plan.end_task(stack, TaskEnd())
    for layer, found in stored(stack).items():
        assert np.allclose(found, nearest(expected[layer], 2 * RANK), rtol=0, atol=2e-6 * np.abs(found).max())
    assert np.allclose(stored(stack)[LAYER], expected[LAYER], atol=1e-6)  # nothing is cut where the rank suffices


def test_ties_is_what_peft_makes_of_the_two_adapters():
    plan = METHODS["ties"].plan
    stack = learned(plan, 2)
    once = 1.0 if Version(peft.__version__) >= Version("0.21") else 1 / stack.scale  # PEFT used to apply the scale twice
    stack.model.add_weighted_adapter(
        ["history", "default"], [once, once], "peft", combination_type="ties_svd", svd_rank=2 * RANK, density=0.2
    )
    theirs = {
        name: (module.scaling["peft"] * module.lora_B["peft"].weight @ module.lora_A["peft"].weight).detach().double().numpy()
        for name, module in lora_layers(stack.model).items()
    }
    stack.model.delete_adapter("peft")
    plan.end_task(stack, TaskEnd())
    for layer, found in stored(stack).items():
        assert np.allclose(found, theirs[layer], rtol=0, atol=1e-4 * np.abs(found).max())


def test_dare_drops_a_fifth_of_the_new_entries_scales_the_others_up_and_leaves_the_earlier_change():
    plan = METHODS["dare"].plan
    stack = learned(plan, 2)
    F, N = changes(stack)[LAYER]
    plan.end_task(stack, TaskEnd(draw=generator(3)))
    added = stored(stack)[LAYER] - F
    kept = np.abs(added) > np.abs(N) / 2
    assert np.allclose(added, np.where(kept, N / 0.8, 0.0), rtol=0, atol=1e-6 * np.abs(N).max())
    assert 0.77 < kept.mean() < 0.83  # of 2,048 entries: three and a half standard errors


def test_dare_draws_from_what_it_is_given_alone():
    plan, found = METHODS["dare"].plan, []
    for seed, noise in ((3, 1), (3, 2), (4, 1)):
        stack = learned(plan, 2)
        torch.manual_seed(noise)
        state = torch.get_rng_state()
        plan.end_task(stack, TaskEnd(draw=generator(seed)))
        assert torch.equal(torch.get_rng_state(), state)
        found.append(stack.stacked()[LAYER].B)
    assert torch.equal(found[0], found[1])
    assert not torch.equal(found[0], found[2])


def test_a_merge_without_a_draw_of_another_kind_or_of_no_share_is_refused():
    with pytest.raises(ValueError, match=r"drops entries at random; pass TaskEnd\(draw=generator\)"):
        METHODS["dare"].plan.end_task(learned(METHODS["dare"].plan, 1), TaskEnd())
    with pytest.raises(ValueError, match="blocks are merged by 'snapshot', 'ties', 'dare', not by 'mean'"):
        MergedPerTask("mean")
    for share in (0.0, 1.0, float("nan")):
        with pytest.raises(ValueError, match=r"MergedPerTask\(share=..\) lies between 0 and 1"):
            MergedPerTask("ties", share)


def test_merges_promise_nothing_and_their_share_can_be_set():
    assert {METHODS[name].preserves.words for name in ("snapshot", "ties", "dare")} == {"none"}
    assert METHODS["ties"].changed({"MergedPerTask.share": 0.5}).definition == "MergedPerTask('ties', 0.5)"


def test_a_run_of_dare_that_was_stopped_ends_bitwise_as_one_that_was_not(small_recipe, tmp_path):
    run(small_recipe, tmp_path / "whole", "dare")
    stop_at({"task": 2, "phase": "trained"}, small_recipe, tmp_path / "parts", "dare")
    run(small_recipe, tmp_path / "parts", "dare")
    assert_same(tmp_path / "parts", tmp_path / "whole")
