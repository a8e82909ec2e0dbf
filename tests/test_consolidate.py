"""Groups of subcomponents that are more than their rank needs: replaced, and nothing else touched."""

import torch
from torch import nn

from rankone.consolidate import consolidate, observe, replacements
from rankone.data import generator_for
from rankone.importance import MLPImportance, PerLayer
from rankone.model import DecomposedModel
from rankone.optim import Adam


def made(W, U, V, gate_bias, gate=None):
    """A linear layer with these subcomponents, important where gate_bias + gate * gelu-ish(h) says so."""
    layer = nn.Linear(W.shape[1], W.shape[0], bias=False)
    with torch.no_grad():
        layer.weight.copy_(W)
    model = DecomposedModel(nn.Sequential(layer).eval().requires_grad_(False), {"0": U.shape[1]})
    with torch.no_grad():
        parts = model.layer("0").subcomponents
        parts.U.copy_(U)
        parts.V.copy_(V)
        function = gate_of(model)
        function.w_out.zero_()
        function.b_out.copy_(gate_bias)
        if gate is not None:  # a pair of neurons that answers to the size of h
            function.w_in.zero_()
            function.w_in[:, 0], function.w_in[:, 1] = 50.0, -50.0
            function.w_out[:, 0], function.w_out[:, 1] = gate, gate
    return model


def gate_of(model):
    assert isinstance(model.importance, PerLayer)
    function = model.importance.functions["0"]
    assert isinstance(function, MLPImportance)
    return function


def seen_by(model, x):
    return observe(model, [x])["0"]


def test_many_always_on_become_their_rank():
    torch.manual_seed(0)
    W = torch.randn(6, 3) @ torch.randn(3, 8)
    V = torch.randn(9, 8)
    model = made(W, W @ torch.linalg.pinv(V), V, torch.ones(9))
    x = torch.randn(256, 8)
    before = model.masked(x, {})
    changed = consolidate(model, [x], Adam(model.trained()), generator_for(0, "test"))
    assert changed == {"0": (9, 3)}
    g = model.importances(x)["0"]
    used = (g > 0.1).any(0)
    assert int(used.sum()) == 3
    parts = model.layer("0").subcomponents
    assert torch.allclose(parts.U[:, used] @ parts.V[used], W, atol=1e-4)
    assert float(g[:, used].min()) > 0.95
    assert torch.equal(model.masked(x, {}), before)  # the target is what it was


def test_mechanisms_that_come_one_at_a_time_stay():
    W = torch.eye(5)[:2] + torch.randn(
        2, 5, generator=torch.manual_seed(1)
    )  # five features in two dimensions
    model = made(W, W, torch.eye(5), torch.zeros(5), gate=1.0)
    x = torch.eye(5)[torch.randint(5, (400,))] * torch.rand(400, 1)
    assert (model.importances(x)["0"] > 0.1).sum(-1).max() == 1
    assert replacements(model.layer("0"), seen_by(model, x)) == []


def test_only_the_group_is_touched():
    torch.manual_seed(2)
    W = torch.eye(6)
    # A plane that is always on, cut into four; and two features that come one at a time.
    angles = torch.arange(4) * torch.pi / 4
    plane = torch.zeros(4, 6)
    plane[:, 0], plane[:, 1] = angles.cos(), angles.sin()
    U = torch.cat([plane.T / 2, torch.eye(6)[:, 2:4]], 1)
    V = torch.cat([plane, torch.eye(6)[2:4]])
    model = made(W, U, V, torch.tensor([1.0, 1, 1, 1, 0, 0]), gate=torch.tensor([0.0, 0, 0, 0, 1, 1]))
    x = torch.zeros(300, 6)
    x[:, :2] = torch.randn(300, 2)
    x[:150, 2], x[150:, 3] = torch.rand(150), torch.rand(150)
    (found,) = replacements(model.layer("0"), seen_by(model, x))
    assert found.members == [0, 1, 2, 3]
    assert len(found.V) == 2
    assert found.saved == len(found.members) - len(found.V) > 0


def test_the_same_twice():
    torch.manual_seed(3)
    V, x = torch.randn(9, 8), torch.randn(64, 8)
    W = torch.randn(4, 8)
    states = []
    for _ in range(2):
        model = made(W, W @ torch.linalg.pinv(V), V, torch.ones(9))
        consolidate(model, [x], Adam(model.trained()), generator_for(0, "test"))
        states.append({name: t.clone() for name, t in model.named_tensors().items()})
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])


def test_where_the_optimiser_was_heading_is_forgotten():
    torch.manual_seed(4)
    V, x = torch.randn(9, 8), torch.randn(64, 8)
    W = torch.randn(4, 8)
    model = made(W, W @ torch.linalg.pinv(V), V, torch.ones(9))
    optimizer = Adam(model.trained())
    for p in optimizer.named.values():
        p.grad = torch.ones_like(p)
    optimizer.update(0.0)
    optimizer.zero_grad()
    consolidate(model, [x], optimizer, generator_for(0, "test"))
    assert all(float(optimizer.state[p]["exp_avg"].abs().sum()) == 0 for p in optimizer.named.values())
