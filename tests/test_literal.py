"""The benchmarks' literal step is the oracle's mathematics, so that speed is measured against the
right thing."""

import sys

import pytest
import torch

import oracle
from conftest import ROOT

sys.path.insert(0, str(ROOT / "benchmarks"))
import literal


@pytest.mark.parametrize("p", [1.0, 2.0])
@pytest.mark.parametrize("samples", [1, 2])
def test_the_literal_step_is_the_oracle(p, samples):
    torch.manual_seed(0)
    W = [torch.randn(3, 4, dtype=torch.float64), torch.randn(2, 3, dtype=torch.float64)]
    layers = {}
    for name, w in zip("ab", W, strict=True):
        shapes = [(w.shape[0], 5), (5, w.shape[1]), (5, 3), (5, 3), (5, 3), (5,)]
        made = [torch.randn(s, dtype=torch.float64).requires_grad_() for s in shapes]
        layers[name] = literal.LiteralLayer(w, None, *made)
    x = torch.randn(4, 4, dtype=torch.float64)
    draws = [{name: torch.rand(4, 5, dtype=torch.float64) for name in layers} for _ in range(samples)]
    found = literal.losses(literal.mlp(["a", "b"]), layers, x, p, draws)

    def f(x, matrices):
        return matrices[1] @ torch.relu(matrices[0] @ x)

    entering = [lambda x: x, lambda x: torch.relu(W[0] @ x)]
    scalar = [
        oracle.Layer(l.W, l.U, l.V, oracle.mlp_gate(l.w_in, l.b_in, l.w_out, l.b_out), a)
        for l, a in zip(layers.values(), entering, strict=True)
    ]
    R = [list(sample.values()) for sample in draws]
    expected = {
        "faithfulness": oracle.faithfulness(scalar),
        "stochastic_recon": oracle.stochastic_recon(f, scalar, list(x), R, oracle.mse),
        "stochastic_recon_layerwise": oracle.stochastic_recon_layerwise(f, scalar, list(x), R, oracle.mse),
        "importance_minimality": oracle.importance_minimality(scalar, list(x), p),
    }
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value)
