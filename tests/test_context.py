"""Importance functions that see context, against their literal transcription: position by position, head
by head."""

import math

import pytest
import torch
from torch import nn

import rankone
from conftest import small_mlp, uniform
from rankone import context
from rankone.errors import ConfigError, LayerError
from rankone.importance import LayerActivations, LayerShape, make_importance

SHAPES = {"a": LayerShape(C=5, d_in=4), "b": LayerShape(C=3, d_in=6)}


def gelu(x):
    return x * 0.5 * (1 + torch.erf(x / math.sqrt(2)))


def unit(x):
    return x / ((x * x).mean() + 1e-12).sqrt()


def turned(x, position):
    """Pairs (x_i, x_{i + half}) turned by position / 10000^(i / half)."""
    half, out = len(x) // 2, x.clone()
    for i in range(half):
        angle = position * 10_000 ** (-i / half)
        out[i] = x[i] * math.cos(angle) - x[i + half] * math.sin(angle)
        out[i + half] = x[i] * math.sin(angle) + x[i + half] * math.cos(angle)
    return out


def literal_block(block, rows):
    """One block on the vectors of one row."""
    heads, width = block.heads, len(rows[0])
    d = width // heads
    qkv = [block.qkv @ unit(x) for x in rows]
    attended = []
    for t in range(len(rows)):
        parts = []
        for h in range(heads):
            q, k, v = ([y[j * width + h * d : j * width + (h + 1) * d] for y in qkv] for j in range(3))
            seen = range(t + 1) if block.causal else range(len(rows))
            scores = torch.stack([turned(q[t], t) @ turned(k[s], s) / math.sqrt(d) for s in seen])
            parts.append(sum(w * v[s] for w, s in zip(scores.softmax(0), seen, strict=True)))
        attended.append(rows[t] + block.o @ torch.cat(parts))
    return [x + block.down @ gelu(block.up @ unit(x)) for x in attended]


def activations(rows=3, positions=5):
    torch.manual_seed(1)
    inputs = {
        name: torch.randn(rows, positions, shape.d_in, dtype=torch.float64) for name, shape in SHAPES.items()
    }
    layers = {
        name: LayerActivations(torch.zeros(rows, positions, SHAPES[name].C), lambda a=a: a)
        for name, a in inputs.items()
    }
    return inputs, layers


def test_one_mlp_on_the_input_of_each_layer():
    function = make_importance("input_mlp", {"width": 7}, SHAPES, 0).double()
    inputs, layers = activations()
    raw = function(layers)
    for name, f in zip(function.names, function.functions, strict=True):
        for row in range(3):
            for t in range(5):
                hidden = gelu(f.w_in @ unit(inputs[name][row, t]) + f.b_in)
                torch.testing.assert_close(raw[name][row, t], f.w_out @ hidden + f.b_out)


@pytest.mark.parametrize("causal", [True, False])
def test_one_transformer_for_all_layers(causal):
    options = {"width": 8, "blocks": 2, "heads": 2, "causal": causal}
    function = make_importance("transformer", options, SHAPES, 0).double()
    inputs, layers = activations()
    raw = function(layers)
    for row in range(3):
        joined = [torch.cat([unit(inputs[name][row, t]) for name in SHAPES]) for t in range(5)]
        stream = [function.w_in @ x for x in joined]
        for block in function.blocks:
            stream = literal_block(block, stream)
        for t, x in enumerate(stream):
            everything = function.w_out @ unit(x) + function.b_out
            torch.testing.assert_close(raw["a"][row, t], everything[:5])
            torch.testing.assert_close(raw["b"][row, t], everything[5:])


@pytest.mark.parametrize("kind", ["input_mlp", "transformer"])
def test_by_chunks_it_is_the_same(kind, monkeypatch):
    function = make_importance(kind, {"width": 8}, SHAPES, 0).double()
    _, layers = activations()
    found = []
    for size in (2**22, 1):
        monkeypatch.setattr(context, "AT_ONCE", size)
        raw = function(layers)
        total = sum((r * torch.arange(r.shape[-1])).square().sum() for r in raw.values())
        found.append([*raw.values(), *torch.autograd.grad(total, list(function.parameters()))])
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("kind", ["input_mlp", "transformer"])
def test_stretching_moves_importances_away_from_a_half(kind):
    function = make_importance(kind, {"width": 8}, SHAPES, 0).double()
    _, layers = activations()
    with torch.no_grad():
        before = function(layers)
        function.stretch(3.0)
        for name, raw in function(layers).items():
            torch.testing.assert_close(raw - 0.5, 3 * (before[name] - 0.5))


@pytest.mark.parametrize("kind", ["input_mlp", "transformer"])
def test_they_train_and_load_again(kind, tmp_path):
    model = small_mlp()
    settings = {"steps": 3, "importance": {"kind": kind, "options": {"width": 8}}}
    result = rankone.decompose(model, uniform(), {"*": 4}, settings, progress=False)
    loaded = rankone.load(result.save(tmp_path / "d"), model)
    x = torch.rand(5, 4)
    assert torch.equal(loaded.importances(x)["0"], result.importances(x)["0"])


def test_what_they_refuse():
    with pytest.raises(ConfigError, match="width is 10; with heads=4 it must be a multiple of 8"):
        make_importance("transformer", {"width": 10}, SHAPES, 0)
    with pytest.raises(ConfigError, match="width is 0; it must be a whole number"):
        make_importance("input_mlp", {"width": 0}, SHAPES, 0)
    function = make_importance("transformer", {"width": 8}, SHAPES, 0)
    layers = {
        name: LayerActivations(torch.zeros(1), lambda n=n, d=shape.d_in: torch.zeros(2, n, d))
        for n, (name, shape) in enumerate(SHAPES.items(), 1)
    }
    with pytest.raises(
        LayerError, match=r"needs layers with the same rows and positions; here are a \(2, 1\)"
    ):
        function(layers)


def test_context_matters():
    """A position sees another one through the transformer, and only through it."""
    for kind, differs in (("transformer", True), ("input_mlp", False)):
        function = make_importance(kind, {"width": 8}, SHAPES, 0).double()
        inputs, layers = activations()
        before = function(layers)["a"][:, 4]
        inputs["b"][:, 0] += 1.0
        assert isinstance(function, nn.Module)
        assert bool((function(layers)["a"][:, 4] != before).any()) is differs
