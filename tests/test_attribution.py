"""Edges between subcomponents, on networks whose wiring is known."""

import copy

import pytest
import torch
from torch import nn

import rankone
from rankone.config import DecompositionConfig


def wired(act: nn.Module) -> rankone.Decomposition:
    """Three parts that double one feature each; then one part that adds the first two, one that takes the
    third. Each layer has one more part that is never important."""
    net = nn.Sequential(nn.Linear(3, 3, bias=False), act, nn.Linear(3, 2, bias=False)).eval()
    with torch.no_grad():
        net[0].weight.copy_(2 * torch.eye(3))
        net[2].weight.copy_(torch.tensor([[1.0, 1.0, 0.0], [0.0, 0.0, 3.0]]))
    config = DecompositionConfig.model_validate({"steps": 1, "importance": {"kind": "linear"}})
    result = rankone.decompose(net, torch.rand(64, 3), {"0": 4, "2": 3}, config, progress=False)
    factors = {
        "0": (torch.cat([2 * torch.eye(3), torch.ones(3, 1)], 1), torch.eye(4, 3)),
        "2": (
            torch.tensor([[1.0, 0.0, 0.0], [0.0, 3.0, 0.0]]),
            torch.tensor([[1.0, 1.0, 0.0], [0.0, 0.0, 1.0], [1.0, 0.0, 0.0]]),
        ),
    }
    with torch.no_grad():
        for name, (U, V) in factors.items():
            parts = result.model.layer(name).subcomponents
            parts.U.copy_(U)
            parts.V.copy_(V)
            gate = result.model.importance.functions[name]
            gate.w.zero_()
            gate.b.fill_(1.0)
            gate.b[-1] = -1.0
    return result


def as_edges(table) -> dict:
    return {
        (f"{row['layer']}/{row['c']}", f"{row['drives']}/{row['d']}"): (row["share"], row["by ablation"])
        for row in table
    }


def test_edges_are_the_wires():
    result = wired(nn.ReLU())
    target = copy.deepcopy(result.model.target.state_dict())
    found = as_edges(result.attributions(torch.tensor([[1.0, 2.0, 0.5]])))
    wires = {("0/0", "2/0"): 1 / 3, ("0/1", "2/0"): 2 / 3, ("0/2", "2/1"): 1.0}
    assert set(found) == set(wires)
    for wire, share in wires.items():
        assert found[wire] == pytest.approx((share, share))
    for name, tensor in result.model.target.state_dict().items():
        assert torch.equal(tensor, target[name])
    assert not any(p.grad is not None for p in result.model.parameters())
    assert not result.model.target[0]._forward_pre_hooks


def test_ablation_is_there_because_slopes_mislead():
    """Where a ReLU is silent there is no slope; where a tanh is flat there is hardly any, and yet
    without the part nothing is left."""
    silent = wired(nn.ReLU()).attributions(torch.tensor([[1.0, -2.0, 0.5]]))
    assert ("0/1", "2/0") not in as_edges(silent)
    flat = as_edges(wired(nn.Tanh()).attributions(torch.tensor([[0.1, 0.1, 3.0]])))
    slope, causal = flat["0/2", "2/1"]
    assert slope < 0.01
    assert causal == pytest.approx(1.0)


def test_several_datapoints_are_added_up_and_the_strongest_come_first():
    table = wired(nn.ReLU()).attributions(torch.tensor([[1.0, 0.0, 0.0], [0.0, 3.0, 0.0]]), checked=1)
    assert [row["c"] for row in table] == [1, 0]
    assert table[0]["share"] == pytest.approx(0.75)
    assert table[0]["by ablation"] == pytest.approx(0.75)
    assert table[1]["by ablation"] is None
    assert "share" in repr(table)


def test_one_layer_has_no_edges():
    net = nn.Sequential(nn.Linear(3, 3)).eval()
    config = DecompositionConfig.model_validate({"steps": 1})
    result = rankone.decompose(net, torch.rand(64, 3), {"0": 4}, config, progress=False)
    with pytest.raises(rankone.RankoneError, match="Attributions are between decomposed layers"):
        result.attributions(torch.rand(2, 3))
