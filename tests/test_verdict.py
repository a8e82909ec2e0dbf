"""The verdict: good, not good with every reason, or not to be judged; never good where it is not known."""

import dataclasses

import pytest
import torch
from torch import nn

import rankone
from conftest import small_mlp, uniform
from rankone.findings import Diagnosis, Numbers, findings
from rankone.verdict import verdict

RIGHT = Numbers(
    divergence={"ones": 0.0, "stochastic": 0.001, "zero": 1.0},
    superposition_noise=0.001,
    near_one={"0": 1.0},
    alive={"0": 5},
    C={"0": 15},
    falling={"loss": 0.0, "l0": 0.0},
    cramped=[],
    split_pairs={"0": 0},
    identities={},
    tied={},
    init="datapoints",
    steps=6000,
    steps_done=None,
    relative={"sum": 0.0, "rounded": 0.01, "attack_20": 0.02, "deletion": 0.0},
    unsure={"0": 0.03},
    l0={"0": 0.25},
    rank={"0": 2},
    datapoints=300,
)


def said(**changes):
    numbers = dataclasses.replace(RIGHT, **changes)
    return verdict(Diagnosis(numbers, findings(numbers)))


def test_good():
    result = said()
    assert result.good is True
    assert any("under attack 2.00%" in reason for reason in result.reasons)
    assert str(result).startswith("good: ")


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"unsure": {"0": 0.3}}, "importances between 0 and 1"),
        ({"too_many": {"0": (7, 3)}}, "more subcomponents than their rank needs"),
        ({"falling": {"loss": 0.5, "l0": 0.0}}, "unconverged"),
        ({"relative": RIGHT.relative | {"attack_20": 0.3}}, "fails under attack"),
        ({"relative": RIGHT.relative | {"rounded": 0.2}}, "the rest does work"),
        ({"relative": RIGHT.relative | {"deletion": 0.0075}}, "the rest does work"),
        ({"alive": {"0": 15}}, "C too small"),
        ({"near_one": {"0": 0.1}}, "importance coefficient too high"),
        ({"steps_done": 10}, "unfinished"),
        ({"agreement": {"0": 0.99, "1": 0.7}}, "seeds disagree"),
    ],
)
def test_not_good_and_why(changes, reason):
    result = said(**changes)
    assert result.good is False
    assert any(known.startswith(reason) for known in result.reasons)


def test_advice_is_about_the_pressure_that_did_it():
    attacked = RIGHT.relative | {"attack_20": 0.11}
    for start, advice in ((0.2, "importance_minimality.coefficient_start` to 0.1"), (None, "adversarial")):
        numbers = dataclasses.replace(RIGHT, relative=attacked, coefficient_start=start)
        assert advice in findings(numbers)[0].do


def test_another_seed_that_agrees_speaks_for_it():
    result = said(agreement={"0": 0.99, "1": 0.95})
    assert result.good is True
    assert "with another seed, importances agree by 95%" in result.reasons


def test_a_decomposition_is_held_against_another():
    model, data = small_mlp(), uniform(4, 64)
    first, second = (
        rankone.decompose(model, data, {"*": 12}, {"steps": 20, "seed": seed}, progress=False)
        for seed in range(2)
    )
    with torch.no_grad():
        for gate in second.model.importance.functions.values():
            gate.b_out[::2] = -100.0  # half of all subcomponents are never important
    with pytest.raises(rankone.RankoneError, match="Both decompositions have seed 0"):
        first.diagnose(against=first)
    found = first.diagnose(against=second)
    assert all(share < 0.85 for share in found.numbers.agreement.values())
    assert "seeds disagree" in [finding.name for finding in found.findings]
    assert first.verdict.good is False
    changed = small_mlp()
    with torch.no_grad():
        next(changed.parameters()).add_(1.0)
    other = rankone.decompose(changed, data, {"*": 12}, {"steps": 2, "seed": 1}, progress=False)
    with pytest.raises(rankone.RankoneError, match="of different networks"):
        first.diagnose(against=other)


def test_every_reason_is_said():
    assert len(said(unsure={"0": 0.3}, falling={"loss": 0.5, "l0": 0.0}).reasons) == 2


def test_a_hint_alone_is_no_reason_against():
    assert said(cramped=["0"]).good is True


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"falling": None}, "too short"),
        ({"datapoints": 1}, "one datapoint"),
        ({"relative": {}}, "under attack"),
        ({"relative": RIGHT.relative | {"rounded": float("nan")}}, "not a finite number"),
        ({"divergence": {"ones": 1e-14, "stochastic": 0.0, "zero": 0.0}}, "changes nothing"),
    ],
)
def test_what_cannot_be_judged_is_not_called_good(changes, reason):
    result = said(**changes)
    assert result.good is None
    assert reason in result.reasons[0]
    assert str(result).startswith("could not be judged: ")


def test_numbers_come_back_from_a_file():
    assert Numbers.from_dict(dataclasses.asdict(RIGHT)) == RIGHT


def test_a_short_run_is_not_called_good():
    result = rankone.decompose(small_mlp(), uniform(), config={"steps": 30})
    assert result.verdict.good is not True
    assert result.verdict.reasons
    assert f"Verdict: {result.verdict.word}: " in repr(result)


def test_one_datapoint_again_and_again_is_not_called_good():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3)).eval()
    result = rankone.decompose(net, torch.rand(1, 4).expand(64, 4), config={"steps": 400, "log_every": 5})
    assert result.verdict.good is not True


def test_a_layer_of_zeros_is_no_trouble():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3)).eval()
    with torch.no_grad():
        net[2].weight[:] = 0
    with pytest.raises(rankone.RankoneError, match="nothing to explain"):
        rankone.decompose(net, torch.rand(64, 4), config={"steps": 20})
    parallel = Parallel().eval()
    result = rankone.decompose(parallel, torch.rand(64, 4), config={"steps": 20})
    assert all(bool(torch.isfinite(t).all()) for t in result.model.named_tensors().values())


class Parallel(nn.Module):
    """A layer that does something, and beside it one that is zero."""

    def __init__(self):
        super().__init__()
        self.something, self.nothing = nn.Linear(4, 3), nn.Linear(4, 3, bias=False)
        with torch.no_grad():
            self.nothing.weight[:] = 0

    def forward(self, x):
        return self.something(x) + self.nothing(x)
