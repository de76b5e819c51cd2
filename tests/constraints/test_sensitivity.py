"""What answers depend on, and the constraints that read it, against dense float64 references."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import models
from anchorlora import (
    METHODS,
    Anchor,
    AnswerSensitivity,
    EffectiveResponse,
    GradientStart,
    KroneckerBrake,
    ProjectDisplacement,
    RankSplit,
    Retract,
    RoutingOverlap,
    SensitiveCore,
    Subspace,
    measure,
    protect,
)
from anchorlora.adapters import AdapterStack, lora_layers
from anchorlora.constraints.sensitivity import INPUTS, OUTPUTS, TASKS, sensitivity
from anchorlora.constraints.stacks import Stack
from anchorlora.geometry import Product
from anchorlora.measurement import predicted_kl
from architectures.cases import LLAMA, Architecture
from toys import OPTIMIZERS, anchor_of, optimizer_for, parameters, task_loss

LENGTH, ANSWER = 9, 2
CLAMPS = Architecture("OLMo", "olmo", ("q_proj", "v_proj"), {**LLAMA, "clip_qkv": 0.05})


def texts(count, seed=0):
    draw = torch.Generator().manual_seed(seed)
    return torch.randint(0, 60, (count, LENGTH), generator=draw)


def labelled(ids):
    """The last two tokens are the answer."""
    labels = ids.clone()
    labels[:, :-ANSWER] = -100
    return labels


@pytest.fixture
def stack():
    """A learned history and a learned block, so that nothing is zero."""
    torch.manual_seed(2)
    stack = AdapterStack(models.qwen3(), targets=("q_proj", "v_proj"), rank=4, alpha=16)
    for _ in range(2):
        stack.open(torch.Generator().manual_seed(5))
        with torch.no_grad():
            for p in stack.trainable():
                p.add_(0.05 * torch.randn(p.shape))
        stack.fold()
    stack.open(torch.Generator().manual_seed(6))
    with torch.no_grad():
        for p in stack.trainable():
            p.add_(0.05 * torch.randn(p.shape))
    stack.model.eval()
    return stack


def losses_of(model, ids):
    def losses(count):
        for row in ids[:count]:
            yield model(input_ids=row[None], labels=labelled(row[None])).loss

    return losses


def dense(model, ids, seed=0):
    """C and G of every layer, one example after the other, by adding a zero to every layer's output and differentiating by it."""
    draw, layers, seen = torch.Generator().manual_seed(seed), lora_layers(model), {}
    zeros = {name: torch.zeros(1, LENGTH, module.out_features, requires_grad=True) for name, module in layers.items()}
    hooks = []
    for name, module in layers.items():
        hooks.append(module.register_forward_pre_hook(lambda m, args, name=name: seen.__setitem__(name, args[0][0].double())))
        hooks.append(module.register_forward_hook(lambda m, args, y, name=name: y + zeros[name]))
    C = {name: 0.0 for name in layers}
    G = {name: 0.0 for name in layers}
    for row in ids:
        logits = model(input_ids=row[None]).logits[0, LENGTH - ANSWER - 1 : -1].float()
        p = logits.detach().double().softmax(-1).cumsum(-1)
        drawn = (p <= torch.rand(len(p), 1, generator=draw, dtype=torch.float64) * p[:, -1:]).sum(1, keepdim=True)
        gradients = torch.autograd.grad(logits.log_softmax(-1).gather(1, drawn).sum(), list(zeros.values()))
        for (name, x), g in zip(seen.items(), gradients, strict=True):
            g = g[0].double()
            C[name] = C[name] + torch.einsum("i,ij,ik->jk", g.square().sum(1), x.detach(), x.detach()) / len(ids)
            G[name] = G[name] + g.T @ g / len(ids)
    for hook in hooks:
        hook.remove()
    return C, G


def test_inputs_and_outputs_are_those_of_answers_that_the_model_draws_over_two_tasks(stack):
    """In full rank the statistics are the dense sums over tasks; 3 and 5 examples weigh their tasks alike."""
    whole = AnswerSensitivity(examples=8, inputs=64, outputs=64)
    past, expected = {}, []
    for task, count in ((1, 3), (2, 5)):
        ids = texts(count, seed=task)
        past = whole.end_task(stack.anchor(losses=losses_of(stack.model, ids), past=past))
        expected.append(dense(stack.model, ids))
    compare(stack.model, past, expected)


def compare(model, past, expected):
    for name, module in lora_layers(model).items():
        C, G = (sum(each[side][name] for each in expected) for side in (0, 1))
        found_C, found_G = sensitivity(past, name, d_in=module.in_features, d_out=module.out_features)
        for found, right in ((found_C, C / G.trace()), (found_G, G)):
            mine = found.times(torch.eye(len(right), dtype=torch.float64))
            assert float((mine - right).norm()) <= 2e-4 * float(right.norm()), name  # float32 forward and backward passes


def test_what_a_layer_returns_counts_as_it_was_before_the_model_wrote_to_it():
    """OLMo clamps queries, keys and values in place, those of the first layer too, which no gradient has to pass."""
    stack = AdapterStack(CLAMPS.model(), targets=("q_proj", "v_proj"), rank=4, alpha=16)
    stack.open(torch.Generator().manual_seed(5))
    stack.model.eval()
    past = AnswerSensitivity(examples=3, inputs=64, outputs=64).end_task(
        stack.anchor(losses=losses_of(stack.model, texts(3, seed=1)))
    )
    compare(stack.model, past, [dense(stack.model, texts(3, seed=1))])


def test_tasks_that_count_alike_are_the_mean_of_equal_traces_of_the_fisher_information(stack):
    """In full rank, over three tasks of unlike answers; a task without a gradient counts as it is."""
    reader, past, expected = AnswerSensitivity(examples=8, inputs=64, outputs=64, alike=True), {}, []
    for task, count in ((1, 3), (2, 5), (3, 4)):
        ids = texts(count, seed=task)
        if task == 2:
            ids[:, 1:] = ids[:, :1]
        past = reader.end_task(stack.anchor(losses=losses_of(stack.model, ids), past=past))
        expected.append(dense(stack.model, ids))
    fishers = [sum(float(C.trace()) for C in each[0].values()) for each in expected]
    assert max(fishers) > 1.05 * min(fishers)
    for name, module in lora_layers(stack.model).items():
        C, G = (sum(fishers[0] / f * each[i][name] for f, each in zip(fishers, expected, strict=True)) / 3 for i in (0, 1))
        found_C, found_G = sensitivity(past, name, d_in=module.in_features, d_out=module.out_features)
        for found, right in ((found_C, C / G.trace()), (found_G, G)):
            held = found.times(torch.eye(len(right), dtype=torch.float64))
            assert float((held - right).norm()) <= 2e-4 * float(right.norm()), name  # float32 forward and backward passes
    still = {name: torch.zeros_like(t) if name != TASKS else t for name, t in past.items()}
    after = reader.end_task(stack.anchor(losses=losses_of(stack.model, texts(3)), past=still))
    once = AnswerSensitivity(examples=8, inputs=64, outputs=64).end_task(stack.anchor(losses=losses_of(stack.model, texts(3))))
    assert all(torch.allclose(after[name], t, atol=1e-5 * float(t.abs().max())) for name, t in once.items())


def test_answers_are_drawn_where_peft_calls_the_forward_of_the_base_past_its_hooks(stack, monkeypatch):
    """As PEFT before 0.21 does."""
    found = []
    for _ in range(2):
        found.append(AnswerSensitivity().end_task(stack.anchor(losses=losses_of(stack.model, texts(3)))))
        forward = "peft.tuners.tuners_utils.BaseTuner.forward"
        monkeypatch.setattr(forward, lambda tuner, *args, **options: tuner.model.forward(*args, **options))
    assert found[0]
    assert all(torch.equal(tensor, found[1][name]) for name, tensor in found[0].items())


def test_losses_of_batches_count_their_examples_and_a_wrapper_may_return_the_loss_alone(stack, monkeypatch):
    """A batch counted as one example, so a brake was stronger by its size; a wrapper without logits was refused."""

    class Wrapper(torch.nn.Module):
        def __init__(self, model):
            super().__init__()
            self.model = model

        def forward(self, ids):
            return self.model(input_ids=ids, labels=labelled(ids)).loss

    ids, wrapper = texts(4), Wrapper(stack.model)

    def past(count, of):
        rows = iter(ids.split(count))
        anchor = replace(stack.anchor(losses=lambda _: (of(some) for some in rows)), model=wrapper)
        shares = iter(torch.linspace(0.1, 0.9, 4 * ANSWER, dtype=torch.float64))  # the same draws, however many come at once
        monkeypatch.setattr(torch, "rand", lambda n, *_, **__: torch.stack([next(shares) for _ in range(n)])[:, None])
        return AnswerSensitivity(examples=4).end_task(anchor)

    singles, batches = past(1, wrapper), past(2, wrapper)
    assert max(float(tensor.abs().max()) for tensor in singles.values()) > 0
    for name, tensor in singles.items():
        if tensor.ndim == 2:
            assert torch.allclose(batches[name] @ batches[name].T, tensor @ tensor.T, rtol=1e-4, atol=1e-9)


def test_dropout_is_off_while_examples_are_read(stack):
    """PEFT leaves the dropout of a new adapter in training mode, whatever mode the model is in."""
    anchor = stack.anchor(losses=losses_of(stack.model, texts(3)))
    plain = AnswerSensitivity().end_task(anchor)
    for module in lora_layers(stack.model).values():
        module.lora_dropout["default"] = torch.nn.Dropout(0.5).train()
    dropped = AnswerSensitivity().end_task(anchor)
    assert all(torch.equal(tensor, dropped[name]) for name, tensor in plain.items())
    assert all(module.lora_dropout["default"].training for module in lora_layers(stack.model).values())


def test_what_is_remembered_has_a_constant_size_and_the_whole_trace(stack):
    kept, past, sizes, traces = AnswerSensitivity(examples=4, inputs=6, outputs=3), {}, [], []
    for task in range(3):
        ids = texts(4, seed=task)
        past = kept.end_task(stack.anchor(losses=losses_of(stack.model, ids), past=past))
        sizes.append(sum(t.numel() for t in past.values()))
        traces.append(dense(stack.model, ids)[1])
    assert sizes[0] == sizes[1] == sizes[2]
    name, module = next(iter(lora_layers(stack.model).items()))
    _, G = sensitivity(past, name, d_in=module.in_features, d_out=module.out_features)
    assert past[f"{OUTPUTS}/{name}"].shape == (module.out_features, 3)
    assert G.trace == pytest.approx(sum(float(t[name].trace()) for t in traces), rel=1e-4)


def test_hooks_modes_and_gradients_are_as_before(stack):
    stack.model.train()
    frozen = stack.trainable()[0]
    frozen.grad = torch.ones_like(frozen)

    def breaking(count):
        yield stack.model(input_ids=texts(1), labels=texts(1)).loss
        raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"):
        AnswerSensitivity().end_task(stack.anchor(losses=breaking))
    assert not any(module._forward_hooks for module in stack.model.modules())
    assert stack.model.training
    assert bool((frozen.grad == 1).all())


@pytest.mark.parametrize(
    ("losses", "error", "said"),
    [
        (None, ValueError, r"needs losses of single examples of the task; pass losses= to Anchor\.of"),
        (lambda model: lambda count: iter(()), ValueError, "losses of the anchor gave none"),
        (lambda model: iter(()), TypeError, "losses is a .*; give a function of a count n"),
        (lambda model: lambda count: list(losses_of(model, texts(3))(count)), TypeError, "returned a list; yield the loss of one"),
        (lambda model: lambda count: print(count), TypeError, "returned a NoneType; yield the loss of one"),
        (lambda model: lambda count: iter([1.0]), TypeError, "gave 1.0; yield the loss of one example, a number with its graph"),
        (lambda model: lambda count: (x.detach() for x in losses_of(model, texts(3))(count)), TypeError, "with its graph"),
        (lambda model: lambda count: (x * torch.ones(2) for x in losses_of(model, texts(3))(count)), TypeError, "of one example"),
        (
            lambda model: lambda count: (model(input_ids=texts(1)).logits.square().mean() for _ in range(1)),
            TypeError,
            "the loss is no cross-entropy of them",
        ),
        (
            lambda model: lambda count: (sum(p.square().sum() for p in model.parameters() if p.requires_grad) for _ in range(1)),
            TypeError,
            "the model returned none with a gradient",
        ),
    ],
)
def test_what_no_answer_can_be_drawn_from_is_refused(stack, losses, error, said):
    with pytest.raises(error, match=said):
        AnswerSensitivity().end_task(stack.anchor(losses=losses and losses(stack.model)))


def test_layers_that_checkpointing_runs_outside_the_graph_are_refused_and_the_other_kind_changes_nothing(stack):
    """No gradient would reach them: the memory would be empty, and a brake that reads it would hold nothing back."""
    stack.fold()
    stack.open(torch.Generator().manual_seed(8))  # a gradient start needs a fresh block
    anchor = stack.anchor(losses=losses_of(stack.model, texts(2)))
    plain = AnswerSensitivity(examples=2).end_task(anchor)
    stack.model.train()
    stack.model.enable_input_require_grads()
    for reentrant in (True, False):
        stack.model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        if reentrant:
            for read in (AnswerSensitivity(examples=2).end_task, GradientStart(examples=2).begin_task):
                with pytest.raises(TypeError, match="q_proj runs outside the graph, .* with use_reentrant=False"):
                    read(anchor)
    again = AnswerSensitivity(examples=2).end_task(anchor)
    assert all(torch.equal(tensor, plain[name]) for name, tensor in again.items())


def test_readers_without_what_they_read_are_refused(stack):
    anchor = stack.anchor()
    with pytest.raises(ValueError, match=r"add AnswerSensitivity\(\) to the method"):
        KroneckerBrake().begin_task(anchor)
    with pytest.raises(ValueError, match=r"add AnswerSensitivity\(\) to the method"):
        SensitiveCore().cores({})
    past = AnswerSensitivity(examples=2, inputs=3, outputs=3).end_task(stack.anchor(losses=losses_of(stack.model, texts(2))))
    name = next(iter(lora_layers(stack.model)))
    with pytest.raises(LookupError, match=f"knows no {INPUTS}/{name} of width"):
        KroneckerBrake().begin_task(replace(anchor, past={k: t for k, t in past.items() if k != f"{INPUTS}/{name}"}))
    with pytest.raises(ValueError, match="the answers depend on 3 directions at .*, but a core needs 4"):
        SensitiveCore(at_least=4).cores(past)


def test_a_sensitive_core_is_the_leading_eigenvectors_of_the_inputs(stack):
    ids = texts(6)
    past = AnswerSensitivity(examples=6).end_task(stack.anchor(losses=losses_of(stack.model, ids)))
    C, _ = dense(stack.model, ids)
    for name, made in SensitiveCore(0.9, 2, 6).cores(past).items():
        values, Q = torch.linalg.eigh(C[name])
        share = values.flip(0).cumsum(0) / values.sum()
        star = int((share < 0.9).sum()) + 1
        assert made.k_star == star
        assert made.core.k == min(max(star, 2), 6)
        assert made.retained_energy == pytest.approx(float(share[made.core.k - 1]), rel=1e-3)
        assert float(torch.linalg.svdvals(made.core.basis.double().T @ Q.flip(1)[:, : made.core.k]).min()) > 1 - 1e-3


def knowing(anchor, seed=7):
    """The anchor with metrics of its own in its past, and the dense matrices C / tr G and G."""
    draw, past, matrices = torch.Generator().manual_seed(seed), {}, {}
    for layer in anchor.layers:
        d_in, d_out = layer.factor("A").shape[1], layer.factor("B").shape[0]
        dense = []
        for kind, d, m, tail in ((INPUTS, d_in, 5, 0.3), (OUTPUTS, d_out, 3, 0.1)):
            Q = torch.linalg.qr(torch.randn(d, m, generator=draw, dtype=torch.float64)).Q
            root = (Q * torch.linspace(3, 1, m, dtype=torch.float64)).float()
            past |= {f"{kind}/{layer.name}": root, f"{kind}/{layer.name}/tail": torch.tensor(tail, dtype=torch.float64)}
            dense.append(root.double() @ root.double().T + tail * torch.eye(d, dtype=torch.float64))
        matrices[layer.name] = dense[0] / dense[1].trace(), dense[1]
    return replace(anchor, past=past), matrices


def wander(anchor, by=0.1):
    draw = torch.Generator().manual_seed(11)
    with torch.no_grad():
        for p in parameters(anchor):
            p.add_(by * torch.randn(p.shape, generator=draw, dtype=torch.float64).to(p))


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # torch's own tracing reads it
def test_a_model_that_was_compiled_and_run_before_is_remembered_as_one_that_was_not(stack):
    model, ids, memories = stack.model, texts(2), []
    torch.compiler.reset()
    for run in (model, torch.compile(model, backend="eager")):
        run(input_ids=ids[:1], labels=labelled(ids[:1]))
        memories.append(AnswerSensitivity(examples=2).end_task(stack.anchor(losses=losses_of(run, ids))))
    plain, compiled = memories
    assert plain.keys() == compiled.keys()
    assert all(torch.equal(tensor, compiled[name]) for name, tensor in plain.items())


@pytest.mark.parametrize("fresh", [True, False])
def test_the_brake_is_half_the_trace_of_g_dw_c_dw_and_its_gradient(fresh):
    anchor, matrices = knowing(anchor_of(fresh=fresh, dtype=torch.float64))
    active = KroneckerBrake(3.0).begin_task(anchor)
    wander(anchor)
    total, expected = 0.0, []
    for layer in anchor.layers:
        A, B = (layer.factor(name).detach().clone().requires_grad_() for name in "AB")
        dW = 4.0 * (B @ A - layer.start_factor("B") @ layer.start_factor("A"))
        C, G = matrices[layer.name]
        value = 0.5 * (G @ dW @ C @ dW.T).trace()
        expected += [3.0 * g for g in torch.autograd.grad(value, [A, B])]
        total += float(value.detach())
    with torch.no_grad():
        active.add_penalty_grads()
    assert active.readings()["predicted_kl"] == pytest.approx(total, rel=1e-6)  # roots are kept in float32
    assert predicted_kl(anchor) == pytest.approx(total, rel=1e-7)  # whose columns are orthogonal to its rounding
    assert predicted_kl(replace(anchor, past={})) is None
    for p, right in zip(parameters(anchor), expected, strict=True):
        assert torch.allclose(p.grad, right, rtol=1e-5, atol=1e-6 * float(right.norm()))


@pytest.mark.parametrize("fresh", [True, False])
@pytest.mark.parametrize("penalty", [KroneckerBrake(), EffectiveResponse(), RoutingOverlap(0.5)])
def test_a_penalty_on_stacked_layers_is_the_sum_of_theirs(penalty, fresh):
    anchor, _ = knowing(anchor_of(fresh=fresh, history=True, wide=12, sizes=((24, 16), (24, 16), (24, 16))))
    active = penalty.begin_task(anchor)
    wander(anchor)
    with torch.no_grad():
        value, gradients = active.stacked(Stack(anchor.layers))
        alone = [active.pieces(layer) for layer in anchor.layers]
    assert float(value) == pytest.approx(sum(float(v) for v, _ in alone), rel=1e-5)
    assert gradients.keys() == alone[0][1].keys()
    for name in gradients:
        right = torch.stack([g[name] for _, g in alone])
        assert torch.allclose(gradients[name], right, rtol=1e-4, atol=1e-5 * float(right.norm()))


def test_the_predicted_kl_is_that_of_the_answers():
    """One linear layer, one input, one answer: exact to second order. Of layers that move it together, each alone is counted."""
    torch.manual_seed(0)
    d, words, scale = 6, 5, 1e-2
    x, W, dW = torch.randn(d).double(), torch.randn(words, d).double(), torch.randn(words, d).double() * scale
    p = (W @ x).softmax(0)
    G = torch.diag(p) - torch.outer(p, p)  # the expectation over drawn answers of g g^T, with g = drawn - p
    C = torch.outer(x, x)  # |g|^2 x x^T / |g|^2
    moved = ((W + dW) @ x).softmax(0)
    kl = float((p * (p / moved).log()).sum())
    assert 0.5 * float((G @ dW @ C @ dW.T).trace()) == pytest.approx(kl, rel=0.05)

    values, vectors = torch.linalg.eigh(G)
    roots = {INPUTS: x[:, None] * G.trace().sqrt(), OUTPUTS: vectors * values.clamp(min=0).sqrt()}
    for count in (1, 2, 10):  # layers that add up to this one, each with its share of the change: they move the answer together
        names = [f"layer {i}" for i in range(count)]
        past = {f"{kind}/{name}": root for kind, root in roots.items() for name in names}
        past |= {f"{name}/tail": torch.zeros((), dtype=torch.float64) for name in past}
        change = Product(dW / count, torch.eye(d).double())
        layers = [SimpleNamespace(name=name, change=lambda change=change: change) for name in names]
        assert predicted_kl(SimpleNamespace(past=past, layers=layers)) == pytest.approx(kl / count, rel=0.05)


def test_a_gradient_start_is_the_strongest_directions_of_the_task_outside_the_core(stack):
    stack.fold()
    stack.open(torch.Generator().manual_seed(8))
    cores = {
        name: Subspace(torch.linalg.qr(torch.randn(module.in_features, 3)).Q) for name, module in lora_layers(stack.model).items()
    }
    ids = texts(5)
    anchor = stack.anchor(cores=cores, losses=losses_of(stack.model, ids))
    before = stack.model(input_ids=ids).logits
    sizes = {layer.name: float(layer.start_factor("A").norm()) for layer in anchor.layers}
    stack.model.train()
    with torch.no_grad():
        GradientStart(examples=5).begin_task(anchor)
    assert stack.model.training
    assert torch.equal(stack.model.eval()(input_ids=ids).logits, before)
    weights = {layer.name: layer.whole.base.weight for layer in anchor.layers}
    for weight in weights.values():
        weight.requires_grad_()
    total = sum(losses_of(stack.model, ids)(5))
    for (name, core), g in zip(cores.items(), torch.autograd.grad(total, list(weights.values())), strict=True):
        g = core.outside(g.double())
        layer = next(each for each in anchor.layers if each.name == name)
        A = layer.factor("A").detach().double()
        found = float((g @ torch.linalg.qr(A.T).Q).norm().detach())
        assert found >= (1 - 1e-4) * float(torch.linalg.svdvals(g)[: len(A)].norm())
        assert float(core.coordinates(A).norm()) <= 1e-6 * float(A.norm())
        assert float(A.norm()) == pytest.approx(sizes[name], rel=1e-5)
        assert torch.equal(layer.start_factor("A"), layer.factor("A"))


def test_a_gradient_start_of_a_learned_anchor_is_refused(stack):
    with pytest.raises(ValueError, match="GradientStart would change the function at .*: B is not zero there"):
        GradientStart().begin_task(stack.anchor(losses=losses_of(stack.model, texts(1))))


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_split_rank_keeps_the_response_of_a_learned_anchor_under_every_optimizer_while_b_moves(name):
    anchor = anchor_of(r=6, k=3)
    optimizer = optimizer_for(anchor, name)
    with protect(optimizer, anchor, [ProjectDisplacement("A"), RankSplit()]):
        for step in range(20):
            optimizer.zero_grad()
            task_loss(anchor, seed=step % 3).backward()
            optimizer.step()
    drift = measure(anchor)
    assert drift.exact, (drift.rho, drift.bound)
    for layer in anchor.layers:
        moved = layer.factor("B").detach().double() - layer.start_factor("B").double()
        dense = moved @ layer.start_factor("A").double()
        assert float((dense @ layer.core.basis.double()).norm()) <= 1e-5 * float(dense.norm())
        assert float(moved.norm()) > 1e-3 * float(layer.start_factor("B").norm())


def test_a_core_that_takes_the_whole_rank_is_refused():
    with pytest.raises(ValueError, match="takes the whole rank 4, so B could not move"):
        RankSplit().begin_task(anchor_of(r=4, k=5))


def test_a_moved_b_is_named():
    anchor = anchor_of(r=6, k=3)
    with torch.no_grad():
        active = RankSplit().begin_task(anchor)
        assert active.violation() is None
        anchor.layers[0].factor("B").add_(0.1)
        assert "|dB A_0 V| at layer0 is" in active.violation()
        active.project()
        assert active.violation() is None


def test_mechanisms_work_in_a_loop_of_ones_own(stack):
    """Two tasks by hand: what the methods do, from their parts."""
    model = stack.model
    past = AnswerSensitivity(examples=4).end_task(stack.anchor(losses=losses_of(model, texts(4))))
    cores = {name: made.core for name, made in SensitiveCore(0.99, 4, 16).cores(past).items()}
    stack.fold()
    stack.open(torch.Generator().manual_seed(9))
    anchor = stack.anchor(cores=cores, past=past, losses=losses_of(model, texts(4, seed=1)))
    optimizer = torch.optim.AdamW(stack.trainable(), lr=1e-2)
    ids = texts(4, seed=1)
    parts = [GradientStart(4), Retract("A"), ProjectDisplacement("A"), KroneckerBrake(10.0)]
    with protect(optimizer, anchor, parts) as active:
        for _ in range(4):
            model(input_ids=ids, labels=labelled(ids)).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        assert active[-1].readings()["predicted_kl"] > 0
    assert measure(anchor).exact


def test_an_expert_that_no_example_reaches_is_named():
    """It has a tail of nothing: no brake acts on it, and a core cannot be made."""

    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.used, self.idle, self.head = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 12)

        def forward(self, x):
            return SimpleNamespace(logits=self.head(self.used(x)))

    from peft import LoraConfig, get_peft_model

    model = get_peft_model(Two(), LoraConfig(r=2, target_modules=["used", "idle"], init_lora_weights=False))

    def losses(count):
        for i in range(count):
            x = torch.randn(1, 3, 8, generator=torch.Generator().manual_seed(i))
            yield nn.functional.cross_entropy(model(x).logits[0], torch.tensor([1, 2, 3]))

    past = AnswerSensitivity(examples=3).end_task(Anchor.of(model, losses=losses))
    assert past[f"{INPUTS}/idle"].shape == (8, 0)
    active = KroneckerBrake().begin_task(Anchor.of(model, past=past))
    with torch.no_grad():
        active.add_penalty_grads()
    with pytest.raises(ValueError, match="the answers depend on 0 directions at idle, but a core needs 4"):
        SensitiveCore().cores(past)


def test_the_catalog_says_what_each_method_keeps():
    words = {name: METHODS[name].preserves.words for name in ("brake", "sensitive-core", "rank-split", "fold-8", "fold-16")}
    assert words == {
        "brake": "none",
        "sensitive-core": "displacement, state, response",
        "rank-split": "displacement, response",
        "fold-8": "displacement, state, response",
        "fold-16": "displacement, state, response",
    }
