"""Every loss and every gradient of rankone against the literal transcription of the paper."""

import math

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

import oracle
from rankone import DecomposedModel, WeightedBatch
from rankone.data import seed_for
from rankone.fast.step import FastStep
from rankone.losses import DIVERGENCES, LOSSES
from rankone.masks import Mask, uniform
from rankone.step import Step
from rankone.targets.tms import TMS

QUICK = settings(
    max_examples=15, deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True
)


class Chain(nn.Module):
    """Layers of one kind each, one after the other, with a GELU between: each layer's input depends
    on all before."""

    def __init__(self, layers: list[nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x: Tensor) -> Tensor:
        for i, layer in enumerate(self.layers):
            x = layer(x if i == 0 else nn.functional.gelu(x))
        return x


def build(kinds: list[str], widths: list[int], vocabulary: int) -> tuple[Chain, list[bool]]:
    """A double-precision chain; the second value says for each layer whether its stored weight is
    transposed."""
    layers: list[nn.Module] = []
    for i, kind in enumerate(kinds):
        if kind == "embedding" and i == 0:
            layers.append(nn.Embedding(vocabulary, widths[1]))
        elif kind == "conv1d":
            layers.append(Conv1D(widths[i + 1], widths[i]))
            for p in layers[-1].parameters():
                nn.init.normal_(p, std=0.5)
        else:
            layers.append(nn.Linear(widths[i], widths[i + 1], bias=kind == "linear"))
    transposed = [isinstance(layer, Conv1D | nn.Embedding) for layer in layers]
    return Chain(layers).double().eval(), transposed


def literal_network(chain: Chain, up_to: int | None = None):
    """The chain as a function of one datapoint and plain matrices; `up_to` stops at what enters
    that layer."""

    def f(x: Tensor, matrices) -> Tensor:
        for i, layer in enumerate(chain.layers):
            if i > 0:
                x = oracle.gelu(x)
            elif isinstance(layer, nn.Embedding):
                x = nn.functional.one_hot(x, layer.num_embeddings).double()
            if up_to == i:
                return x
            x = matrices[i] @ x
            if getattr(layer, "bias", None) is not None:
                x = x + layer.bias.detach()
        return x

    return f


def literal_layers(model: DecomposedModel, kind: str, activations) -> list[oracle.Layer]:
    gates = {"mlp": oracle.mlp_gate, "linear": oracle.linear_gate, "layer_mlp": oracle.layer_mlp_gate}
    result = []
    for (name, layer), activation in zip(model.layers.items(), activations, strict=True):
        function = model.importance.functions[name]
        names = ("w", "b") if kind == "linear" else ("w_in", "b_in", "w_out", "b_out")
        gate = gates[kind](*(getattr(function, n) for n in names))
        result.append(
            oracle.Layer(layer.matrix(), layer.subcomponents.U, layer.subcomponents.V, gate, activation)
        )
    return result


def scatter_gates(model: DecomposedModel, seed: int) -> None:
    """Move every parameter off its special initial values, so that raw importances fall on both
    sides of 0 and 1."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, p in model.named_tensors().items():
            if ".importance." in name:
                p.add_(0.7 * torch.randn(p.shape, generator=generator, dtype=p.dtype))


def engine_losses(engine, model, batch, divergence, S, p, seed, eps=1e-6):
    terms = {
        "faithfulness": LOSSES["faithfulness"](),
        "stochastic_recon": LOSSES["stochastic_recon"](samples=S),
        "stochastic_recon_layerwise": LOSSES["stochastic_recon_layerwise"](samples=S),
        "importance_minimality": LOSSES["importance_minimality"](p=p, eps=eps),
    }
    _, values = engine(model, batch, terms, DIVERGENCES[divergence], seed=seed).total()
    return values


def literal_losses(f, layers, X, R, divergence, p, eps=1e-6):
    D = {"mse": oracle.mse, "kl": oracle.kl}[divergence]
    return {
        "faithfulness": oracle.faithfulness(layers),
        "stochastic_recon": oracle.stochastic_recon(f, layers, X, R, D),
        "stochastic_recon_layerwise": oracle.stochastic_recon_layerwise(f, layers, X, R, D),
        "importance_minimality": oracle.importance_minimality(layers, X, p, eps if p < 1 else 0.0),
    }


def draws(model: DecomposedModel, lead: tuple[int, ...], S: int, seed: int) -> list[list[Tensor]]:
    """The random numbers the engine draws, sample by sample and layer by layer, as rows per datapoint."""
    return [
        [
            uniform(
                seed_for(seed, f"masks/{name}/{s}", 0), torch.zeros(*lead, layer.C, dtype=torch.float64)
            ).flatten(0, -2)
            for name, layer in model.layers.items()
        ]
        for s in range(S)
    ]


def assert_same(engine: dict[str, Tensor], literal: dict[str, Tensor], parameters: dict[str, Tensor]) -> None:
    for name, value in literal.items():
        torch.testing.assert_close(
            engine[name], value, rtol=1e-9, atol=1e-12, msg=lambda m, n=name: f"{n}: {m}"
        )
        ours = torch.autograd.grad(
            engine[name], list(parameters.values()), allow_unused=True, retain_graph=True
        )
        theirs = torch.autograd.grad(value, list(parameters.values()), allow_unused=True, retain_graph=True)
        for parameter, a, b in zip(parameters, ours, theirs, strict=True):
            zero = torch.zeros_like(parameters[parameter])
            torch.testing.assert_close(
                zero if a is None else a,
                zero if b is None else b,
                rtol=1e-7,
                atol=1e-10,
                msg=lambda m, n=name, q=parameter: f"gradient of {n} with respect to {q}: {m}",
            )


@QUICK
@given(
    kinds=st.lists(
        st.sampled_from(["linear", "linear_no_bias", "conv1d", "embedding"]), min_size=1, max_size=3
    ),
    widths=st.lists(st.integers(1, 4), min_size=4, max_size=4),
    Cs=st.lists(st.integers(1, 5), min_size=3, max_size=3),
    lead=st.sampled_from([(3,), (2, 2)]),
    importance=st.sampled_from(["mlp", "linear", "layer_mlp"]),
    init=st.sampled_from(["overlap", "kaiming"]),
    divergence=st.sampled_from(["mse", "kl"]),
    S=st.integers(1, 3),
    p=st.sampled_from([0.5, 1.0, 1.5, 2.0]),
    seed=st.integers(0, 1000),
    engine=st.sampled_from([Step, FastStep]),
)
def test_losses_and_gradients(kinds, widths, Cs, lead, importance, init, divergence, S, p, seed, engine):
    assume(divergence == "mse" or widths[len(kinds)] > 1)  # the KL of a single logit is refused
    torch.manual_seed(seed)
    vocabulary = 5
    chain, _ = build(kinds, widths, vocabulary)
    layers = {f"layers.{i}": Cs[i] for i in range(len(kinds))}
    model = DecomposedModel(chain, layers, importance=importance, init=init, seed=seed)
    scatter_gates(model, seed)
    if isinstance(chain.layers[0], nn.Embedding):
        x = torch.randint(0, vocabulary, lead)
        X = list(x.flatten())
    else:
        x = torch.randn(*lead, widths[0], dtype=torch.float64)
        X = list(x.flatten(0, -2))
    originals = [layer.matrix() for layer in model.layers.values()]
    prefixes = [literal_network(chain, up_to=i) for i in range(len(kinds))]
    activations = [lambda x, f=f: f(x, originals) for f in prefixes]
    literal = literal_losses(
        literal_network(chain),
        literal_layers(model, importance, activations),
        X,
        draws(model, lead, S, seed),
        divergence,
        p,
    )
    with engine.ready(model):
        ours = engine_losses(engine, model, x, divergence, S, p, seed)
    assert_same(ours, literal, model.named_tensors())


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("n_identity", [0, 1])
@pytest.mark.parametrize("merged", [True, False])
@pytest.mark.parametrize("engine", [Step, FastStep])
def test_toy_model_of_superposition(tied, n_identity, merged, engine):
    """The paper's own network, with W and its transpose, and with rows of zeros merged or not."""
    torch.manual_seed(1)
    network = TMS(4, 2, n_identity).double().eval()
    with torch.no_grad():
        network.unembed.bias.copy_(torch.tensor([0.3, 0.2, 0.1, 0.4]))
    layers = {"embed": 5, "unembed": 5} | ({"hidden.*": 3} if n_identity else {})
    model = DecomposedModel(network, layers, tied={"unembed": "embed"} if tied else {}, seed=2)
    scatter_gates(model, 3)
    assert ("unembed.U" in model.named_tensors()) is not tied
    x = torch.tensor(
        [[0.8, 0, 0, 0.3], [0, 0, 0, 0], [0, 0.5, 0, 0], [0.1, 0.9, 0.4, 0], [0, 0, 0, 0], [0, 0, 0.7, 0]],
        dtype=torch.float64,
    )
    W = network.embed.weight.detach()
    bias = network.unembed.bias.detach()

    def f(x, matrices):
        for matrix in matrices:
            x = matrix @ x
        return torch.relu(x + bias)

    entering = [lambda x: x, *[lambda x: W @ x] * n_identity, lambda x: W @ x]
    batch = WeightedBatch.merging_zero_rows(x) if merged else x
    rows = batch.inputs if merged else x
    if merged:
        assert batch.weights.tolist() == [1, 1, 1, 1, 2]
    R = draws(model, (rows.shape[0],), 2, 7)
    if (
        merged
    ):  # in the literal batch both rows of zeros use the one row of random numbers that the merged row drew
        where = {tuple(row.tolist()): i for i, row in enumerate(rows)}
        index = [where[tuple(row.tolist())] for row in x]
        R = [[r[index] for r in sample] for sample in R]
    literal = literal_losses(f, literal_layers(model, "mlp", entering), list(x), R, "mse", 1.0)
    with engine.ready(model):
        ours = engine_losses(engine, model, batch, "mse", 2, 1.0, 7)
    assert_same(ours, literal, model.named_tensors())


@pytest.mark.parametrize("kind", ["linear", "linear_no_bias", "conv1d", "embedding"])
@pytest.mark.parametrize("engine", [Step, FastStep])
@pytest.mark.parametrize("with_delta", [True, False])
@pytest.mark.parametrize("somewhere", [True, False])
def test_masks_that_apply_somewhere_and_keep_the_rest(kind, engine, with_delta, somewhere):
    """Per datapoint: U diag(m) V + delta (W - U V) where the mask applies, W elsewhere; values and
    gradients."""
    torch.manual_seed(0)
    chain, _ = build([kind, "linear"], [3, 4, 2], 5)
    model = DecomposedModel(chain, {"layers.*": 3}, seed=1)
    x = torch.randint(0, 5, (6,)) if kind == "embedding" else torch.randn(6, 3, dtype=torch.float64)
    masks, matrices = {}, []
    for name, layer in model.layers.items():
        values, delta = torch.rand(6, 3, dtype=torch.float64), torch.rand(6, dtype=torch.float64)
        where = torch.tensor([True, False, True, True, False, False])
        masks[name] = Mask(values, where if somewhere else None, delta if with_delta else None)
        literal = oracle.Layer(layer.matrix(), layer.subcomponents.U, layer.subcomponents.V, None, None)
        rows = []
        for b in range(6):
            masked = oracle.masked_matrix(literal, values[b])
            if with_delta:
                masked = masked + delta[b] * (literal.W - oracle.masked_matrix(literal, torch.ones(3)))
            rows.append(masked if where[b] or not somewhere else literal.W)
        matrices.append(rows)
    f = literal_network(chain)
    expected = torch.stack([f(row, [rows[b] for rows in matrices]) for b, row in enumerate(x)])
    with engine.ready(model):
        output = engine(model, x, {}, DIVERGENCES["mse"]).output(masks)
    torch.testing.assert_close(output, expected)
    direction = torch.randn_like(expected)
    factors = model.factors()
    ours, theirs = (torch.autograd.grad((y * direction).sum(), factors) for y in (output, expected))
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b)


def test_initial_values_match_method_notes():
    """Overlap scaling: |U_c| is the overlap of the unit product with W; gates have fan-1 and
    fan-d_gate scales."""
    torch.manual_seed(0)
    linear = nn.Sequential(nn.Linear(30, 20, bias=False)).double()
    model = DecomposedModel(linear, {"0": 400}, importance_options={"d_gate": 64})
    U, V = model.layers["0"].subcomponents.U, model.layers["0"].subcomponents.V
    torch.testing.assert_close(V.norm(dim=1), torch.ones(400, dtype=torch.float64))
    for c in range(5):
        unit = U[:, c] / U[:, c].norm()
        overlap = unit @ linear[0].weight @ V[c]
        torch.testing.assert_close(overlap.abs(), U[:, c].norm())
        assert overlap > 0
    gate = model.importance.functions["0"]
    assert abs(gate.w_in.std().item() - math.sqrt(2)) < 0.03
    assert abs(gate.w_out.std().item() - 1 / 8) < 0.003
    assert gate.b_in.abs().max() == 0
    assert gate.b_out.abs().max() == 0


@pytest.mark.parametrize("engine", [Step, FastStep])
@pytest.mark.parametrize("kinds", [["linear", "conv1d"], ["embedding", "linear", "linear_no_bias"]])
@pytest.mark.parametrize("divergence", ["mse", "kl"])
@pytest.mark.parametrize("weighted", [True, False])
def test_positions_that_are_no_data(engine, kinds, divergence, weighted):
    """Of a batch with a mask of positions every loss is the literal one over the others, and with weights
    of whole numbers, the literal one with copies; values and gradients."""
    torch.manual_seed(0)
    chain, _ = build(kinds, [3, 4, 2, 3], 5)
    model = DecomposedModel(chain, {"layers.*": 3}, seed=1)
    scatter_gates(model, 2)
    lead = (3, 4)
    shape = lead if kinds[0] == "embedding" else (*lead, 3)
    x = torch.randint(0, 5, shape) if kinds[0] == "embedding" else torch.randn(shape, dtype=torch.float64)
    weights = torch.tensor([[1, 1, 1, 0], [1, 0, 0, 0], [1, 1, 1, 1]])
    if weighted:
        weights = weights * torch.tensor([2, 1, 3, 1])
    index = torch.arange(12).repeat_interleave(weights.flatten()).tolist()
    X = [x.flatten(0, 1)[i] for i in index]
    R = [[r[index] for r in sample] for sample in draws(model, lead, 2, 7)]
    originals = [layer.matrix() for layer in model.layers.values()]
    prefixes = [literal_network(chain, up_to=i) for i in range(len(kinds))]
    layers = literal_layers(model, "mlp", [lambda x, f=f: f(x, originals) for f in prefixes])
    literal = literal_losses(literal_network(chain), layers, X, R, divergence, 1.0)
    literal["frequency"] = oracle.frequency(layers, X)
    batch = WeightedBatch(x, weights.double() if weighted else weights.bool())
    with engine.ready(model):
        ours = engine_losses(engine, model, batch, divergence, 2, 1.0, 7)
        step = engine(model, batch, {}, DIVERGENCES[divergence], seed=7)
        ours["frequency"] = LOSSES["frequency"]().value(step)
    assert_same(ours, literal, model.named_tensors())
