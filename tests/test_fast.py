"""The fast engine against exact torch, against the literal step, and where it does not apply."""

import subprocess
import sys
import warnings
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

import rankone
from conftest import ROOT, small_mlp
from rankone.config import DecompositionConfig
from rankone.data import generator_for
from rankone.errors import RankoneError
from rankone.fast import compiled
from rankone.fast import gates as fast
from rankone.fast.step import FastStep
from rankone.importance import MLPImportance, lower_leaky, upper_leaky
from rankone.losses import mse
from rankone.masks import Mask, uniform
from rankone.step import Penalty, Step
from rankone.targets import ResidualTarget

sys.path.insert(0, str(ROOT / "benchmarks"))
import runs

KEY = 0x1234_5678_9ABC_DEF0


def gate(C: int, d_gate: int, scale: float = 1.0):
    function = MLPImportance(C, torch.Generator().manual_seed(0), d_gate=d_gate)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for p in function.parameters():
            p.add_(0.2 * torch.randn(p.shape, generator=generator))
        function.w_in.mul_(scale)
    return function


def gated(function, h, penalty=None, weights=None):
    """One layer's gates by the kernels, and its penalty."""
    made, total = fast.gated({"layer": fast.Gate(function, h, KEY, weights)}, penalty)
    return made["layer"], total


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a.detach().double() - b.detach()).norm() / b.detach().norm())


@pytest.mark.parametrize("d_gate", [1, 16, 128])
@pytest.mark.parametrize("scale", [0.1, 1.0, 5.0])
@pytest.mark.parametrize(
    ("p", "saturation"),
    [(0.9, 0.0), (1.0, 0.0), (1.5, 0.0), (2.0, 0.0), (0.9, 4.0), (1.0, 9.0), (1.5, 2.0), (2.0, 9.0)],
)
def test_interpolated_gates_are_the_exact_ones(d_gate, scale, p, saturation):
    """Values, and gradients to inner activations and to every parameter of the gates, in double
    precision beside."""
    torch.manual_seed(0)
    quick = gate(7, d_gate, scale)
    exact = gate(7, d_gate, scale).double()
    h = (torch.randn(300, 7) * (torch.rand(300, 7) < 0.6)).requires_grad_()
    H = h.detach().double().requires_grad_()
    weights = torch.rand(300)
    weights /= weights.sum()
    eps = 1e-3 if p < 1 else 0.0
    made, paid = gated(quick, h, Penalty(p, eps, saturation), weights)
    raw = exact(H)
    g = lower_leaky(raw)
    mask = g + (1 - g) * uniform(KEY, raw)
    q = (upper_leaky(raw) + eps).pow(p)
    penalty = ((1 + saturation) * q / (1 + saturation * q)).sum(-1) @ weights.double()
    literal = (raw, mask, mask * H, penalty)
    for ours, theirs in zip((*made, paid), literal, strict=True):
        assert relative(ours, theirs) < 1e-4
    # Gradients are compared away from the kinks, where an error of rounding chooses another slope.
    smooth = ((raw.abs() > 1e-3) & ((raw - 1).abs() > 1e-3)).detach()
    by = [torch.randn(300, 7) * smooth for _ in range(3)]
    total = sum((t * w).sum() for t, w in zip(made, by, strict=False)) + 10 * paid
    expected = sum((t * w.double()).sum() for t, w in zip(literal, by, strict=False)) + 10 * penalty
    ours = torch.autograd.grad(total, [h, *quick.parameters()])
    theirs = torch.autograd.grad(expected, [H, *exact.parameters()])
    for a, b in zip(ours, theirs, strict=True):
        assert relative(a, b) < 5e-4


@pytest.mark.parametrize("h", ["outlier", "steep", "narrow", "very narrow", "narrow and far"])
def test_activations_that_interpolation_finds_hard(h):
    """Outliers and steep gates are evaluated exactly; where nodes hardly differ, slopes carry the
    cubics."""
    torch.manual_seed(0)
    x = torch.randn(500, 4)
    if h == "outlier":
        x[17] *= 1000
    scale = {"narrow": 1e-4, "very narrow": 1e-8, "narrow and far": 1e-3}.get(h, 1.0)
    x = x * scale + (100 if h == "narrow and far" else 0)
    quick, exact = (
        gate(4, 16, 30.0 if h == "steep" else 1.0),
        gate(4, 16, 30.0 if h == "steep" else 1.0).double(),
    )
    x.requires_grad_()
    X = x.detach().double().requires_grad_()
    made, _ = gated(quick, x)
    weight = torch.randn(500, 4)
    ours = torch.autograd.grad((made.raw * weight).sum(), [x, *quick.parameters()])
    raw = exact(X)
    theirs = torch.autograd.grad((raw * weight.double()).sum(), [X, *exact.parameters()])
    assert relative(made.raw, raw) < 1e-4
    for a, b in zip(ours, theirs, strict=True):
        assert relative(a, b) < 5e-4


def test_a_second_derivative_is_refused_not_zero():
    h = torch.randn(200, 3, requires_grad=True)
    made, _ = gated(gate(3, 4), h)
    with pytest.raises(RankoneError, match=r"no second derivatives .* engine='exact'"):
        torch.autograd.grad(made.raw.sum(), h, create_graph=True)


def test_a_forked_process_goes_on():
    code = (
        "import os, torch, rankone, warnings\n"
        "warnings.simplefilter('ignore')\n"
        "data = lambda g: torch.rand(200, 3, generator=g)\n"
        "run = lambda: rankone.decompose(torch.nn.Sequential(torch.nn.Linear(3, 2)).eval(), data, "
        "{'0': 4}, {'steps': 2})\n"
        "run()\n"
        "pid = os.fork()\n"
        "torch.set_num_threads(1)\n"
        "if pid == 0:\n"
        "    run()\n"
        "    os._exit(0)\n"
        "assert os.waitpid(pid, 0)[1] == 0\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_weights_in_half_precision():
    for kind in (torch.float16, torch.bfloat16):
        x = (torch.rand(300, 4) * (torch.rand(300, 4) < 0.3)).to(kind)
        batch = rankone.WeightedBatch.merging_zero_rows(x)
        assert batch.weights.dtype == torch.float32
        half = rankone.WeightedBatch(batch.inputs.float(), batch.weights.to(kind))
        rankone.decompose(small_mlp(), [half], {"*": 5}, {"steps": 2})
        assert torch.isfinite(uniform(KEY, x)).all()


def test_the_kernels_draw_the_same_numbers_as_torch():
    made, _ = gated(gate(5, 3), torch.randn(100, 5))
    g = lower_leaky(made.raw.detach())
    torch.testing.assert_close(made.mask.detach(), g + (1 - g) * uniform(KEY, g))


def test_random_numbers_are_uniform_and_independent():
    u = uniform(KEY, torch.empty(20_000, 10, dtype=torch.float64))
    assert u.min() >= 0
    assert u.max() < 1
    assert u.mean().item() == pytest.approx(0.5, abs=0.003)
    assert u.var().item() == pytest.approx(1 / 12, abs=0.002)
    counts = torch.histc(u, 100, 0, 1)
    assert ((counts - 2000) ** 2 / 2000).sum() < 150  # chi-squared, 99 degrees of freedom
    others = [uniform(KEY + 1, u), uniform(KEY + (1 << 32), u), u.roll(1, 0), u.roll(1, 1)]
    for other in others:
        both = torch.stack([u.flatten(), other.flatten()])
        assert abs(torch.corrcoef(both)[0, 1].item()) < 0.01


def test_results_do_not_depend_on_the_number_of_threads():
    torch.manual_seed(0)
    h, weight = torch.randn(2000, 40), torch.randn(2000, 40)
    found = []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        function, x = gate(40, 16), h.clone().requires_grad_()
        made, paid = gated(function, x, Penalty(1.0, 0.0))
        total = (made.masked * weight + made.mask).sum() + paid
        found.append([*made, *torch.autograd.grad(total, [x, *function.parameters()])])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_a_layer_that_a_loss_does_not_use_has_no_gradient():
    """Not one of zeros: the optimiser would go on moving the layer by what it remembers."""
    a, b = gate(3, 4), gate(3, 4)
    h = torch.randn(200, 3, requires_grad=True)
    made, paid = fast.gated({"a": fast.Gate(a, h, KEY), "b": fast.Gate(b, h, KEY)}, Penalty(1.0, 0.0))
    wanted = [*a.parameters(), *b.parameters()]
    found = torch.autograd.grad(made["b"].raw.sum(), wanted, allow_unused=True, retain_graph=True)
    assert [g is None for g in found] == 4 * [True] + 4 * [False]
    found = torch.autograd.grad(paid, wanted, allow_unused=True)
    assert not any(g is None for g in found)


def test_values_of_losses_are_the_callers_own():
    model = rankone.DecomposedModel(small_mlp(), {"*": 5})
    loss = rankone.losses.LOSSES["importance_minimality"]()
    context = FastStep(model, torch.rand(200, 4), {"minimality": loss}, mse)
    first = loss.value(context)
    before = first.item()
    with torch.no_grad():
        first *= 0.5
    assert loss.value(context).item() == before


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e38])
def test_senseless_activations_give_senseless_importances_and_no_crash(value):
    h = torch.randn(200, 3)
    h[17, 1] = value
    h.requires_grad_()
    function = gate(3, 4)
    made, paid = gated(function, h, Penalty(2.0, 0.0))
    (made.masked.sum() + paid).backward()
    assert torch.isfinite(made.raw[:, [0, 2]]).all()
    if not np.isfinite(value):
        assert not torch.isfinite(paid)


def test_a_constant_inner_activation():
    made, _ = gated(function := gate(3, 4), h := torch.full((200, 3), 0.7, requires_grad=True))
    torch.testing.assert_close(made.raw, function(h))
    made.masked.sum().backward()
    assert torch.isfinite(h.grad).all()


@pytest.mark.parametrize("engine", ["fast", "exact"])
@pytest.mark.parametrize("name", [n for n in runs.RUNS if n != "resid_mlp3"])
def test_losses_and_gradients_of_the_papers_runs(name, engine):
    """At the paper's sizes, on the same masks as the literal step. (resid_mlp3 takes 8 GB; a small
    one is below.)"""
    errors = runs.disagreement(runs.make(name), engine)
    assert errors["loss"] < (1e-5 if engine == "fast" else 1e-6)
    # Where two points of an image are equal up to rounding, pooling chooses one or the other.
    loose = engine == "fast" or name == "digits"
    assert errors["gradient"] < (3e-4 if loose else 5e-6)


def test_convolutions_in_double_precision():
    def data(generator):
        return torch.rand(16, 1, 8, 8, generator=generator).double()

    run = runs.digits()
    double = replace(run, model=run.model.double(), data=data, whole=data)
    assert max(runs.disagreement(double, "exact").values()) < 1e-12


@pytest.mark.parametrize("engine", ["fast", "exact"])
def test_three_blocks_with_wide_gates(engine):
    run = runs.residual(ResidualTarget(n_features=20, n_blocks=3, n_neurons=7), C=30, batch=700, d_gate=128)
    errors = runs.disagreement(run, engine)
    assert errors["gradient"] < (3e-4 if engine == "fast" else 5e-6)


@pytest.mark.parametrize("kind", ["linear", "layer_mlp"])
def test_other_importance_functions_and_more_samples_take_the_plain_way(kind):
    """Both engines are then the same up to rounding, whatever is mixed."""
    model = rankone.DecomposedModel(small_mlp(), {"*": 5}, importance=kind)
    batch = torch.rand(200, 4)
    recon = rankone.losses.LOSSES["stochastic_recon"](samples=3)
    values = [recon.value(engine(model, batch, {}, mse)).item() for engine in (Step, FastStep)]
    assert values[0] == pytest.approx(values[1], rel=1e-6)
    mixed = rankone.DecomposedModel(small_mlp(), {"*": 5})
    values = [recon.value(engine(mixed, batch, {}, mse)).item() for engine in (Step, FastStep)]
    assert values[0] == pytest.approx(values[1], rel=1e-4)


@pytest.mark.parametrize("case", ["few rows", "double precision"])
def test_where_the_kernels_do_not_apply(case):
    rows = 10 if case == "few rows" else 200
    h = torch.randn(rows, 3, dtype=torch.float64 if case == "double precision" else torch.float32)
    assert fast.gated({"layer": fast.Gate(gate(3, 4).to(h.dtype), h, KEY)}) == ({}, None)


def test_layers_with_and_without_kernels_together():
    """Each layer gets its own answer, and the penalty is of those that got one."""
    torch.manual_seed(0)
    penalty = Penalty(1.0, 0.0)
    few, many = torch.randn(10, 3), torch.randn(200, 3)
    longer = torch.randn(4, 100, 5)
    gates = {"few": (gate(3, 4), few), "many": (gate(3, 4), many), "longer": (gate(5, 4), longer)}
    made, total = fast.gated({name: fast.Gate(f, h, KEY) for name, (f, h) in gates.items()}, penalty)
    assert list(made) == ["many", "longer"]
    assert made["longer"].mask.shape == longer.shape
    alone = {name: gated(f, h, penalty) for name, (f, h) in gates.items() if name in made}
    for name, (single, _) in alone.items():
        assert all(torch.equal(a, b) for a, b in zip(made[name], single, strict=True))
    assert total.item() == pytest.approx(sum(paid.item() for _, paid in alone.values()))


def test_without_numba_there_is_one_notice_and_the_same_result(monkeypatch):
    monkeypatch.setitem(sys.modules, "numba", None)
    compiled.kernels.cache_clear()
    config = DecompositionConfig(steps=5, importance={"options": {"d_gate": 4}}, log_every=1)

    def data(generator):
        return torch.rand(100, 4, generator=generator)

    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            without = rankone.decompose(small_mlp(), data, {"*": 5}, config)
        notices = [str(w.message) for w in caught if issubclass(w.category, compiled.MissingKernels)]
        assert len(notices) == 1
        assert "numba is missing" in notices[0]
        assert "pip install" in notices[0]
    finally:
        compiled.kernels.cache_clear()
    exact = rankone.decompose(small_mlp(), data, {"*": 5}, config.model_copy(update={"engine": "exact"}))
    assert [r["loss"]["total"] for r in without.history] == pytest.approx(
        [r["loss"]["total"] for r in exact.history], rel=1e-5
    )


@pytest.mark.parametrize("engine", [FastStep, Step])
def test_an_activation_that_works_in_place(engine):
    """Outputs that the target overwrites must not be taken for what the layer returned."""
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(4, 9), nn.ReLU(), nn.Linear(9, 9), nn.ReLU(), nn.Linear(9, 4)).eval()
    in_place = nn.Sequential(
        plain[0], nn.ReLU(inplace=True), plain[2], nn.ReLU(inplace=True), plain[4]
    ).eval()
    batch = torch.randn(200, 4)
    found = []
    for target in (plain, in_place):
        model = rankone.DecomposedModel(target, {"0": 8, "2": 8, "4": 8})
        context = engine(model, batch, {}, mse, seed=3)
        losses = [rankone.losses.LOSSES[n]() for n in ("stochastic_recon", "stochastic_recon_layerwise")]
        total = sum(loss.value(context) for loss in losses)
        found.append([total, *torch.autograd.grad(total, list(model.trained().values()))])
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("bias", [True, False])
def test_outputs_of_replaced_layers_are_ordinary_tensors(bias):
    """Large enough for our own product: its result must be fit for in-place activations and for `view`."""

    class Picky(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = nn.Linear(64, 64, bias=bias)
            self.b = nn.Linear(64, 8, bias=bias)

        def forward(self, x):
            y = torch.relu_(self.a(x))
            return self.b(y.view(2000, -1)).view(-1, 4)

    result = rankone.decompose(
        Picky().eval(), lambda g: torch.randn(2000, 64, generator=g), {"*": 20}, {"steps": 2}
    )
    assert len(result.history) == 2


def test_masks_that_are_not_the_samples_own():
    model = rankone.DecomposedModel(small_mlp(), {"*": 5})
    batch = torch.rand(100, 4)
    context = FastStep(model, batch, {}, mse)
    masks = {name: Mask(0.5 * mask.values) for name, mask in context.masks("stochastic", 0).items()}
    torch.testing.assert_close(context.output(masks), model.masked(batch, masks))
    torch.testing.assert_close(context.output({}), context.clean.output)


def test_factors_in_another_order_in_memory_train_the_same():
    """As torch.linalg.svd gives them."""
    from rankone.components import INITS, kaiming_init

    INITS.register("columns")(lambda W, C, g: tuple(t.T.contiguous().T for t in kaiming_init(W, C, g)))
    try:
        found = [
            rankone.decompose(
                small_mlp(), lambda g: torch.rand(100, 4, generator=g), {"*": 5}, {"steps": 20, "init": init}
            )
            for init in ("kaiming", "columns")
        ]
    finally:
        del INITS["columns"]
    assert found[0].history[-1]["loss"] == found[1].history[-1]["loss"]


def test_keys_differ_between_layers_samples_and_steps():
    model = rankone.DecomposedModel(small_mlp(), {"*": 5})
    steps = [Step(model, torch.rand(3, 4), {}, mse, seed=s, index=t) for s in range(3) for t in range(3)]
    keys = {step.mask_key(layer, k) for step in steps for layer in ("a", "b") for k in range(3)}
    assert len(keys) == 54
    assert all(0 <= key < 1 << 63 for key in keys)


def test_sparse_features_drawn_sparsely_have_the_right_distribution():
    from rankone.targets.sparse import SparseFeatures

    sampler = SparseFeatures(7, 0.05, 20_000, low=-1.0, high=1.0)
    batch = sampler(generator_for(0, "data"))
    x, weights = batch.inputs, batch.weights
    assert weights.sum() == 20_000
    assert (x[:-1] != 0).any(1).all()
    assert (x[-1] == 0).all()
    assert weights[:-1].eq(1).all()
    on = x != 0
    assert (on.sum(0) / 20_000).tolist() == pytest.approx([0.05] * 7, abs=0.006)
    assert weights[-1].item() / 20_000 == pytest.approx(0.95**7, abs=0.01)
    # Two features are on together as often as chance has it.
    assert (on[:, 0] & on[:, 3]).sum().item() / 20_000 == pytest.approx(0.05**2, abs=0.0012)
    assert x[on].mean().item() == pytest.approx(0, abs=0.03)
    assert x[on].abs().mean().item() == pytest.approx(0.5, abs=0.02)
    full = SparseFeatures(3, 1.0, 50)(generator_for(0, "data"))
    assert full.inputs.shape == (50, 3)
    assert full.weights.eq(1).all()
