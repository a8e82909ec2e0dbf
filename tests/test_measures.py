"""Attack, union, deletion, well-temperedness and the comparison of runs, on decompositions made by hand
whose answers are known."""

import json

import pytest
import torch
from torch import nn

import rankone
from rankone import DecomposedModel, WeightedBatch, cli
from rankone.compare import compare
from rankone.config import DecompositionConfig
from rankone.decomposition import Decomposition
from rankone.diagnose import diagnose
from rankone.errors import ConfigError, LayerError
from rankone.evaluate import attack_ladder, evaluate, held_out
from rankone.measures import attacked, union_masks, well_tempered

FEATURES = 4


def one_feature(generator):
    """Datapoints with exactly one active feature, of size 0.5 to 1."""
    which = torch.randint(FEATURES, (200,), generator=generator)
    return nn.functional.one_hot(which, FEATURES) * (0.5 + 0.5 * torch.rand(200, 1, generator=generator))


def by_hand(parts, *, masks=None, offset=-0.1, reverse=()):
    """A diagonal network and subcomponents (write direction, read direction, size); a subcomponent is
    important where its inner activation is above 0, and those in `reverse` where it is not."""
    layer = nn.Linear(FEATURES, FEATURES, bias=False)
    with torch.no_grad():
        layer.weight.copy_(torch.diag(torch.tensor([1.0, 2, 3, 4])))
    model = DecomposedModel(nn.Sequential(layer).eval(), {"0": len(parts)}, importance="linear")
    sub, function = model.layers["0"].subcomponents, model.importance.functions["0"]
    with torch.no_grad():
        for c, (write, read, size) in enumerate(parts):
            sub.U[:, c], sub.V[c] = size * torch.eye(FEATURES)[write], torch.eye(FEATURES)[read]
        function.w.fill_(100)
        function.b.fill_(offset)
        for c in reverse:
            function.w[c], function.b[c] = -100, 1.0
    config = DecompositionConfig.model_validate({"masks": masks or {}, "importance": {"kind": "linear"}})
    return Decomposition(model, config)


RIGHT = [(0, 0, 1.0), (1, 1, 2.0), (2, 2, 3.0), (3, 3, 4.0)]


def never(decomposition, *parts):
    """These subcomponents are never important."""
    function = decomposition.model.importance.functions["0"]
    with torch.no_grad():
        for c in parts:
            function.w[c], function.b[c] = 0.0, -1.0
    return decomposition


def test_the_right_answer_holds_everywhere():
    found = evaluate(by_hand(RIGHT), one_feature)
    names = [
        "sum",
        "stochastic",
        "importance",
        "rounded",
        "attack_20",
        "attack_20_with_delta",
        "attack_20_without_delta",
    ]
    for name in (*names, "union_1", "union_4", "union_16", "union_64", "deletion"):
        assert found.relative[name] == pytest.approx(0, abs=1e-9), name
    assert found.well_tempered == 1.0
    assert found.to_dict()["relative"] == found.relative


def test_work_done_by_what_is_never_important_is_lost_by_deletion():
    halves = never(by_hand([(0, 0, 0.5), *RIGHT[1:], (0, 0, 0.5)]), 4)
    found = evaluate(halves, one_feature).relative
    assert found["sum"] == pytest.approx(0, abs=1e-9)
    # Half of feature 0 is lost, of squares 1 + 4 + 9 + 16.
    assert found["deletion"] == pytest.approx(0.25 / 30, rel=0.3)
    assert found["rounded"] == pytest.approx(found["deletion"])
    assert found["attack_20"] == pytest.approx(found["deletion"], rel=0.3)
    assert found["stochastic"] < 0.5 * found["deletion"], "random masks keep some of it"


def test_an_adversary_finds_what_random_masks_average_away():
    opposed = never(by_hand([*RIGHT, *[(0, 3, 1.0), (0, 3, -1.0)] * 8]), *range(4, 20))
    found = evaluate(opposed, one_feature).relative
    assert found["sum"] == pytest.approx(0, abs=1e-9)
    assert found["importance"] == pytest.approx(0, abs=1e-9)
    assert found["attack_20"] > 20 * found["stochastic"]
    # Eight parts that write 1 where nothing belongs, of a square of 16: 64 / 30 of everything.
    assert found["attack_20"] == pytest.approx(64 / 30, rel=0.3)


def test_delta_is_something_to_attack():
    missing = by_hand(RIGHT[1:])
    found = evaluate(missing, one_feature).relative
    assert found["sum"] == pytest.approx(1 / 30, rel=0.3)
    assert found["attack_20_without_delta"] == pytest.approx(found["sum"], rel=0.3)
    assert found["attack_20"] == found["attack_20_without_delta"]
    within = evaluate(by_hand(RIGHT[1:], masks={"delta": True}), one_feature).relative
    assert within["attack_20"] == within["attack_20_with_delta"]
    assert within["attack_20"] == pytest.approx(found["attack_20"], rel=1e-3), "it removes delta"
    assert within["stochastic"] < found["stochastic"], "random masks keep some of it"
    assert within["sum"] == found["sum"], "the honest number is without delta"


def test_the_ladder():
    ladder = attack_ladder(by_hand(RIGHT[1:]), one_feature, 100)
    assert list(ladder) == ["with_delta", "without_delta"]
    assert list(ladder["with_delta"]) == [20, 40, 80, 100]
    with pytest.raises(ConfigError, match=r"An attack of 0 steps does nothing; give 1 or more"):
        attack_ladder(by_hand(RIGHT), one_feature, 0)


def test_attacks_and_evaluations_repeat():
    a, b = (evaluate(by_hand(RIGHT[1:]), one_feature).relative for _ in range(2))
    assert a == b


def test_union_draws_datapoints_as_often_as_the_data_has_them():
    decomposition = by_hand(RIGHT)
    x = torch.eye(FEATURES)
    batch = WeightedBatch(x, torch.tensor([1.0, 0, 0, 0]))
    (step,) = held_out(decomposition, [batch], 1, 0, None)
    for size, masks in union_masks(step, (1, 4)):
        joined = masks["0"].values
        assert torch.equal(joined, torch.maximum(x, x[:1].expand(4, -1))), size


def test_union_of_something_that_interferes_gets_worse():
    """Every part also writes to another feature what a never-present part would cancel."""
    found = evaluate(by_hand([*RIGHT, (0, 3, 1.0)], reverse=[4]), one_feature).relative
    assert found["union_1"] <= found["union_4"] <= found["union_16"] <= found["union_64"]
    assert found["union_16"] > 0


def test_importances_that_say_the_opposite_are_not_well_tempered():
    assert evaluate(by_hand(RIGHT, reverse=range(4)), one_feature).well_tempered < 0.2


def test_a_divergence_that_is_a_mean_has_no_temper():
    decomposition = by_hand(RIGHT)
    (step,) = held_out(decomposition, one_feature, 1, 0, lambda y, t: (y - t).square().mean())
    with torch.no_grad():
        assert well_tempered(step) is None
    found = evaluate(decomposition, one_feature, divergence=lambda y, t: (y - t).square().mean())
    assert found.well_tempered is None
    assert found.relative["attack_20"] == pytest.approx(0, abs=1e-9)


def test_a_network_that_does_nothing_has_no_shares():
    decomposition = by_hand(RIGHT)
    found = evaluate(decomposition, lambda generator: torch.zeros(10, FEATURES))
    assert set(found.relative.values()) == {None}


def test_attack_leaves_no_gradient_and_no_change():
    decomposition = by_hand(RIGHT[1:])
    before = {name: t.detach().clone() for name, t in decomposition.model.named_tensors().items()}
    (step,) = held_out(decomposition, one_feature, 1, 0, None)
    list(attacked(step, [3]))
    for name, t in decomposition.model.named_tensors().items():
        assert torch.equal(t, before[name])
        assert t.grad is None
    assert all(p.grad is None for p in decomposition.model.target.parameters())


def test_diagnosis_says_what_fails_under_attack_and_what_deletion_loses():
    opposed = never(by_hand([*RIGHT, *[(0, 3, 1.0), (0, 3, -1.0)] * 8]), *range(4, 20))
    names = {finding.name: finding for finding in diagnose(opposed, one_feature).findings}
    assert "fails under attack" in names
    assert "losses.adversarial_recon" in names["fails under attack"].do
    halves = never(by_hand([*RIGHT[:3], (3, 3, 2.0), (3, 3, 2.0)]), 4)
    names = {finding.name: finding for finding in diagnose(halves, one_feature).findings}
    assert "never important" in names["the rest does work"].seen
    right = {finding.name for finding in diagnose(by_hand([*RIGHT, (0, 0, 0.0)]), one_feature).findings}
    assert not right & {"fails under attack", "the rest does work"}


def test_compare_matches_whatever_the_order_and_the_number():
    a = by_hand(RIGHT)
    b = never(by_hand([RIGHT[2], RIGHT[0], (1, 2, 0.1), RIGHT[3], RIGHT[1]]), 2)
    found = compare(a, b, one_feature).layers["0"]
    assert found.alive == (4, 4)
    assert found.same == 4
    assert found.cosine == pytest.approx(1)
    assert found.agreement == pytest.approx(1)
    assert {(m.a, m.b) for m in found.matches} == {(0, 1), (1, 4), (2, 0), (3, 3)}


def test_compare_counts_what_has_no_partner_and_what_differs():
    a, b = by_hand(RIGHT), by_hand([*RIGHT[:2], (0, 2, 3.0)])
    found = compare(a, b, one_feature).layers["0"]
    assert (found.alive, found.same) == ((4, 3), 2)
    assert found.cosine == pytest.approx(2 / 4)
    assert 0.3 < found.agreement < 0.9


def test_compare_refuses_other_networks_and_layers():
    other = rankone.decompose(nn.Sequential(nn.Linear(4, 4)).eval(), one_feature, {"0": 2}, {"steps": 1})
    with pytest.raises(LayerError, match=r"different networks: .* Only decompositions of the same network"):
        compare(by_hand(RIGHT), other, one_feature)
    torch.manual_seed(0)
    target = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).eval()
    a, b = (rankone.decompose(target, one_feature, {name: 2}, {"steps": 1}) for name in "01")
    with pytest.raises(LayerError, match="no layer in common: 0; 1"):
        compare(a, b, one_feature)
    both = rankone.decompose(target, one_feature, {"*": 2}, {"steps": 1})
    assert compare(both, a, one_feature).only_in == (["1"], [])


def test_on_the_command_line(tmp_path, capsys):
    def command(*words):
        code = 0
        try:
            cli.main([str(word) for word in words])
        except SystemExit as stop:
            code = stop.code or 0
        return code, *capsys.readouterr()

    a, b = tmp_path / "a", tmp_path / "b"
    for seed, out in enumerate((a, b)):
        code, _, error = command("run", "tms_5-2", "--steps", 30, "--seed", seed, "--out", out)
        assert code == 0, error
    summary = json.loads((a / "summary.json").read_text())
    wanted = {"sum", "stochastic", "importance", "rounded", "attack_20", "union_16", "deletion"}
    assert wanted <= set(summary["relative"])
    assert "How well does it hold?" in (a / "report.html").read_text()
    _, ladder, _ = command("evaluate", a, "--attack", 40)
    assert "40 steps" in ladder
    assert "with delta" in ladder
    code, _, error = command("evaluate", a, "--attack", 0)
    assert code == 1
    assert "An attack of 0 steps does nothing" in error
    _, words, _ = command("compare", a, b)
    assert "seed was 0 and is now 1" in words
    found = json.loads(command("compare", a, b, "--json")[1])
    assert set(found["layers"]) == {"embed", "unembed"}
    assert found["differing"] == ["seed was 0 and is now 1"]
    code, _, error = command("compare", a, tmp_path / "none")
    assert code == 1
    assert "none" in error
