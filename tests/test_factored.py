"""Activations that carry their factors are the dense ones, whatever is done with them."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import rankone
from rankone import FactoredLinear
from rankone.adapters import dense
from rankone.fast.factored import Factored
from rankone.fast.products import keeping_constants, sharing
from rankone.fast.step import FastStep
from rankone.losses import LOSSES, mse
from rankone.step import Step


def stream(rows: tuple[int, ...] = (6,), d: int = 50) -> Factored:
    torch.manual_seed(0)
    terms = [
        (torch.randn(*rows, k, dtype=torch.float64), torch.randn(d, k, dtype=torch.float64)) for k in (3, 2)
    ]
    return Factored(*terms)


@pytest.mark.parametrize("rows", [(6,), (2, 3), (400,)])
@pytest.mark.parametrize("n", [1, 4, 300])
@pytest.mark.parametrize("bias", [True, False])
def test_reading_is_a_linear_layer(rows, n, bias):
    x = stream(rows)
    linear = nn.Linear(50, n, bias=bias).double()
    torch.testing.assert_close(linear(x), linear(x.dense()))
    torch.testing.assert_close(F.linear(x, weight=linear.weight), x.dense() @ linear.weight.T)
    torch.testing.assert_close(x @ linear.weight.T, x.dense() @ linear.weight.T)


def test_what_is_not_reading_or_adding_sees_the_dense_tensor():
    x = stream()
    plain = x.dense()
    assert x.shape == plain.shape
    assert x.dim() == 2
    assert (x.dtype, x.device) == (plain.dtype, plain.device)
    assert isinstance(x + stream(), Factored)
    torch.testing.assert_close((x + stream()).dense(), 2 * plain)
    torch.testing.assert_close(x + plain, 2 * plain)
    torch.testing.assert_close(plain + x, 2 * plain)
    torch.testing.assert_close(x * 2, 2 * plain)
    torch.testing.assert_close(2 * x - plain, plain)
    torch.testing.assert_close(-x / 2, -plain / 2)
    torch.testing.assert_close(torch.relu(x), plain.relu())
    torch.testing.assert_close(F.layer_norm(x, (50,)), F.layer_norm(plain, (50,)))
    torch.testing.assert_close(x.mean(), plain.mean())
    torch.testing.assert_close(x[1:3], plain[1:3])
    torch.testing.assert_close(torch.cat([x, x]), torch.cat([plain, plain]))
    assert torch.equal(x > 0, plain > 0)
    assert torch.equal(x == 0, plain == 0)
    torch.testing.assert_close(abs(x) + 1 / x, plain.abs() + 1 / plain)
    assert len(x) == 6
    with pytest.raises(AttributeError, match="no attribute 'men'"):
        _ = x.men


def test_changing_in_place_changes_a_copy():
    x = stream()
    plain = x.dense()
    F.leaky_relu(x, 0.3, True)
    x.mul_(3)
    torch.testing.assert_close(x.dense(), plain)
    W = torch.randn(4, 50, dtype=torch.float64)
    with sharing({}):
        first = F.linear(x, W).relu_()
        torch.testing.assert_close(F.linear(x, W), plain @ W.T)
        assert first.is_contiguous()


def test_terms_of_different_leading_dimensions():
    position = Factored((torch.randn(3, 2), torch.randn(50, 2)))
    both = position + Factored((torch.randn(2, 3, 4), torch.randn(50, 4)))
    assert both.shape == both.dense().shape == (2, 3, 50)
    W = torch.randn(5, 50)
    torch.testing.assert_close(F.linear(both, W), both.dense() @ W.T, rtol=1e-4, atol=1e-4)


def test_a_look_without_gradients_does_not_lose_them():
    D = torch.randn(50, 3, requires_grad=True)
    x = Factored((torch.randn(6, 3), D))
    with torch.no_grad():
        x.norm()
    assert torch.relu(x).requires_grad


def test_the_cheap_order_is_chosen():
    wide = Factored((torch.randn(400, 3), torch.randn(50, 3)))
    wide.read(torch.randn(5, 50))
    assert wide._dense is None
    # As many coefficients as dimensions: forming the activation costs less.
    full = Factored((torch.randn(400, 80), torch.randn(50, 80)))
    full.read(torch.randn(300, 50))
    assert full._dense is not None


def test_products_are_shared_within_a_step_and_never_stale():
    W = torch.randn(5, 50, requires_grad=True)
    D = torch.randn(50, 3, requires_grad=True)
    c = torch.randn(400, 3)
    with sharing({}):
        first, second = (Factored((c, D)).read(W) for _ in range(2))
        assert first is second
        with torch.no_grad():
            W.mul_(2)
        torch.testing.assert_close(Factored((c, D)).read(W), 2 * first, rtol=1e-3, atol=1e-3)
    with sharing({}):
        assert Factored((c, D)).read(W) is not first


def test_a_frozen_last_term_does_not_freeze_what_came_before():
    W, D = (nn.Parameter(torch.randn(shape), requires_grad=False) for shape in ((5, 50), (50, 3)))
    position = nn.Parameter(torch.randn(1, 3), requires_grad=False)
    with keeping_constants():
        for _ in range(5):
            c = torch.randn(400, 3)
            with sharing({}):
                x = Factored((c, D)) + Factored((position, D))
                torch.testing.assert_close(x.read(W), (c + position) @ D.T @ W.T, rtol=1e-4, atol=1e-4)
            del c, x


def test_products_of_frozen_weights_are_kept_until_they_change():
    W, D = (
        nn.Parameter(torch.randn(5, 50), requires_grad=False),
        nn.Parameter(torch.randn(50, 3), requires_grad=False),
    )
    c = torch.randn(400, 3)
    with keeping_constants():
        with sharing({}):
            before = Factored((c, D)).read(W)
        with torch.no_grad():
            W.mul_(3)
        with sharing({}):
            torch.testing.assert_close(Factored((c, D)).read(W), 3 * before, rtol=1e-3, atol=1e-3)


class Stream(nn.Module):
    """A small residual network whose stream is written to by one kind of linear layer or the other."""

    def __init__(self, factored: bool) -> None:
        super().__init__()

        def writer(d: int) -> nn.Module:
            return FactoredLinear(d, 40) if factored else nn.Linear(d, 40, bias=False)

        self.embed = writer(5)
        self.read = nn.ModuleList(nn.Linear(40, 6) for _ in range(2))
        self.write = nn.ModuleList(writer(6) for _ in range(2))
        self.out = nn.Linear(40, 3)

    def forward(self, x):
        x = self.embed(x)
        for read, write in zip(self.read, self.write, strict=True):
            x = x + write(torch.tanh(read(x)))
        return self.out(x)


@pytest.mark.parametrize("engine", [Step, FastStep])
@pytest.mark.parametrize("which", ["read.*", "write.*", "*"])
def test_a_users_residual_network_decomposes_the_same_either_way(engine, which):
    torch.manual_seed(0)
    plain = Stream(factored=False).eval()
    factored = Stream(factored=True).eval()
    factored.load_state_dict(plain.state_dict())
    batch = torch.randn(150, 5)
    found = []
    for target in (plain, factored):
        model = rankone.DecomposedModel(target, {which: 12})
        with engine.ready(model):
            total, _ = engine(model, batch, {name: LOSSES[name]() for name in LOSSES}, mse, seed=1).total()
        found.append([total, *torch.autograd.grad(total, list(model.trained().values()))])
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


def test_a_model_that_returns_its_stream():
    class Bare(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = FactoredLinear(3, 20)

        def forward(self, x):
            return self.embed(x)

    torch.manual_seed(0)
    result = rankone.decompose(Bare().eval(), [torch.randn(80, 3)], {"embed": 4}, {"steps": 2})
    assert result.model.clean(torch.randn(7, 3)).output.shape == (7, 20)


def test_dense_leaves_other_things_alone():
    assert dense("a") == "a"
    assert dense(stream()).shape == (6, 50)
