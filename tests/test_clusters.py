"""Components: subcomponents that are important together. The greedy search against a literal one, the
known answers of the collection, and what is said about bad input."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import oracle_components
import rankone
from conftest import rankone_main
from rankone.clusters import ALPHA, cluster
from rankone.collection import ENTRIES, network, true_decomposition
from rankone.collection.grouping import (
    adjusted_rand,
    components_of,
    judge_grouping,
    part_labels,
    true_labels,
)
from rankone.cooccurrence import Lookalikes, OnSets, on_sets
from rankone.errors import BatchError, ConfigError


def sets_of(on, weights=None):
    rows = max((max(s, default=-1) for s in on), default=-1) + 1 if weights is None else len(weights)
    each = np.ones(rows) if weights is None else np.asarray(weights, float)
    items = [("layer", i) for i in range(len(on))]
    return OnSets(items, [np.array(sorted(s), np.int32) for s in on], each / each.sum())


def groups_of(components):
    return {frozenset(index for _, index in c.members) for c in components}


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_the_search_is_the_literal_greedy_search(data):
    rows = data.draw(st.integers(2, 9))
    on = data.draw(st.lists(st.sets(st.integers(0, rows - 1), min_size=1), min_size=1, max_size=7))
    # Weights without ties, so that there is one best pair.
    weights = [1 + 0.1 * 2 ** -float(i) + 0.01 * i for i in range(rows)]
    alpha = data.draw(st.sampled_from([0.3, 0.55, 1.0, 1.7]))
    given_sets = sets_of(on, weights)
    found = cluster(given_sets, alpha)
    wanted = oracle_components.cluster(on, given_sets.weights.tolist(), alpha)
    apart = [frozenset([i]) for i in range(len(on))]
    assert found.length_apart == pytest.approx(
        oracle_components.length(apart, on, given_sets.weights.tolist(), alpha)
    )
    assert found.length == pytest.approx(
        oracle_components.length(groups_of(found), on, given_sets.weights.tolist(), alpha)
    )
    assert found.length == pytest.approx(
        oracle_components.length(wanted, on, given_sets.weights.tolist(), alpha), abs=1e-9
    )
    assert groups_of(found) == wanted


def test_together_more_often_than_apart():
    together = sets_of([range(0, 10), range(3, 13), range(20, 30), range(22, 32)], [1] * 40)
    assert groups_of(cluster(together, alpha=1.0)) == {frozenset([0, 1]), frozenset([2, 3])}
    apart = sets_of([range(0, 10), range(4, 14)], [1] * 40)  # on 6 together, on 8 apart
    assert len(cluster(apart, alpha=1.0)) == 2
    assert len(cluster(apart, alpha=0.4)) == 1


def test_a_rare_part_does_not_join_one_that_is_always_on():
    found = cluster(sets_of([range(100), range(100), range(7)], [1] * 100))
    assert groups_of(found) == {frozenset([0, 1]), frozenset([2])}
    assert [(c.rank, round(c.frequency, 6)) for c in found] == [(2, 1.0), (1, 0.07)]


def test_weights_count():
    """A datapoint of weight 9 is nine datapoints."""
    many = cluster(sets_of([range(0, 10), {0, *range(10, 12)}], [1] * 12), alpha=1.0)
    weighted = cluster(sets_of([range(0, 10), {0, *range(10, 12)}], [99] + [1] * 11), alpha=1.0)
    assert (len(many), len(weighted)) == (2, 1)


def test_lookalikes_finds_every_pair_that_overlaps_enough():
    generator = np.random.default_rng(0)
    weights = generator.uniform(0.5, 2, 3000)
    sets = []
    for _ in range(60):  # pairs with an overlap of about 0.6, and everything else unlike
        base = generator.choice(3000, 200, replace=False)
        other = np.concatenate([base[:150], generator.choice(3000, 50, replace=False)])
        sets += [np.unique(base).astype(np.int32), np.unique(other).astype(np.int32)]
    alike = Lookalikes(sets, weights / weights.sum(), 0.5)
    compared = {(other, i) for i in range(len(sets)) for other in alike.of(i)}
    for i in range(0, len(sets), 2):
        assert (i, i + 1) in compared
    assert len(compared) < 200, "of 7,140 pairs"


@pytest.mark.parametrize("name", ["tms_5-2", "tms_5-2-id", "tms_40-10-id", "resid_mlp1", "resid_mlp2",
                                  "resid_mlp3", "blocks_rank3", "blocks_mixed", "depth_relay",
                                  "depth_two_blocks", "xors_built", "dense_gelu"])  # fmt: skip
def test_true_importances_give_the_known_components(name):
    known = network(name)
    truth = true_decomposition(known)
    found = components_of(known, truth)
    judged = judge_grouping(known, truth, found)
    assert judged.rand == 1
    assert judged.exact == judged.true_components == len(found)
    if name.endswith("-id"):  # the identity is one component, of the rank that it has
        identity = next(c for c in found if "hidden.0" in c.in_layers)
        assert identity.in_layers == {"hidden.0": list(range(10 if "40" in name else 2))}


def test_the_known_answer_has_one_component_for_a_feature_in_all_layers():
    known = network("resid_mlp2")
    labels = true_labels(known)
    first, first_out, second, second_out = known.layers
    for feature in range(100):
        assert labels[first, feature] == labels[second, feature]
    assert labels[first_out, 0] == labels[second_out, 0] == "always"
    assert len(set(labels.values())) == 101


def test_a_wrong_grouping_is_judged_wrong():
    known = network("tms_5-2")
    truth = true_decomposition(known)
    right = components_of(known, truth)
    everything_apart = components_of(known, truth, alpha=1e9)
    assert judge_grouping(known, truth, right).rand == 1
    one = [type(right[0])([m for c in right for m in c.members], 1.0)]
    assert judge_grouping(known, truth, one).rand == pytest.approx(0)
    assert judge_grouping(known, truth, one).exact == 0
    assert everything_apart[0].rank == 2, "what is always on together is joined at any alpha"
    assert set(part_labels(known, truth, true_labels(known)).values()) == set(true_labels(known).values())


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)), min_size=3, max_size=12))
def test_adjusted_rand(labels):
    a, b = zip(*labels, strict=True)
    try:
        literal = oracle_components.adjusted_rand(a, b)
    except ZeroDivisionError:
        assert adjusted_rand(a, b) == 1
    else:
        assert adjusted_rand(a, b) == pytest.approx(literal)


def test_layers_whose_datapoints_differ():
    """What one layer has beyond the others counts as on if any of it is; no rows means every row."""
    g = torch.zeros(4, 3, 2)
    g[1, 2, 0] = 1.0
    rows = torch.tensor([[0.0], [1.0], [0.0], [0.0]])
    positions = torch.zeros(3, 1)
    ones = {"patches": (g, torch.ones(4, 3)), "rows": (rows, torch.ones(4))}
    on = on_sets([ones], 0.1)
    assert on.items == [("patches", 0), ("rows", 0)]
    assert [s.tolist() for s in on.sets] == [[1], [1]]
    positions[2] = 1.0
    with_positions = {"tokens": (g, torch.ones(4, 3)), "positions": (positions, torch.ones(3))}
    on = on_sets([with_positions], 0.1)
    assert [s.tolist() for s in on.sets] == [[5], [2, 5, 8, 11]]


def test_datapoints_that_do_not_count_are_left_out():
    g = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 0.0]])
    on = on_sets([{"a": (g, torch.tensor([1.0, 0.0, 3.0]))}], 0.1)
    assert on.items == [("a", 0)]
    assert on.weights.tolist() == [0.25, 0.75]


@pytest.fixture(scope="module")
def made():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.ReLU(), torch.nn.Linear(6, 3)).eval()
    data = [torch.randn(32, 4) for _ in range(4)]
    return rankone.decompose(model, data, {"*": 5}, {"steps": 2}, progress=False), data


def test_as_the_issue_says_it(made):
    result, data = made
    groups = result.clusters(data)
    alive = {(layer, c) for layer, of in result.alive.items() for c in of}
    assert {member for group in groups for member in group.members} <= alive
    assert sum(group.rank for group in groups) == len({m for group in groups for m in group.members})
    assert all(0 < group.frequency <= 1 for group in groups)
    assert groups[0].frequency == max(group.frequency for group in groups)
    layer, index = groups[0].members[0]
    assert groups.of(layer, index) == 0
    assert groups.of("0", 99) is None
    assert repr(result.clusters(data)) == repr(groups), "the same every time"
    assert "Description length" in repr(groups)
    assert "<table>" in groups._repr_html_()
    result.ablated(drop=groups[0].in_layers)(data[0])


def test_nothing_alive(made):
    result, data = made
    groups = result.clusters(data, threshold=1.0, n_batches=4)
    assert len(groups) == 0
    assert "No subcomponent is important on any of 128 datapoints" in repr(groups)


def test_one_datapoint(made):
    result, data = made
    groups = result.clusters([data[0][:1]], n_batches=1)
    assert len(groups) <= 1
    assert groups.datapoints == 1


@pytest.mark.parametrize("alpha", [0.0, -1.0, float("nan"), float("inf")])
def test_alpha_must_be_a_number_above_zero(made, alpha):
    result, data = made
    with pytest.raises(ConfigError, match=r"alpha is .*; expected a number above 0"):
        result.clusters(data, alpha=alpha)


def test_without_data(made):
    result, _ = made
    result = replace(result, data=None)
    with pytest.raises(BatchError, match="Pass data="):
        result.clusters()


def test_the_command(tmp_path, capsys):
    rankone_main(
        ["run", "tms_5-2", "--steps", "2", "batch_size=64", "--out", str(tmp_path / "run"), "--quiet"]
    )
    capsys.readouterr()
    rankone_main(["cluster", str(tmp_path / "run"), "--batches", "2"])
    assert "alive subcomponents in" in capsys.readouterr().out
    rankone_main(["cluster", str(tmp_path / "run"), "--batches", "2", "--json"])
    found = json.loads(capsys.readouterr().out)
    assert found["components"][0]["members"][0][0] in ("embed", "unembed")
    assert found["alpha"] == ALPHA
    with pytest.raises(SystemExit):
        rankone_main(["cluster", str(tmp_path / "run"), "--alpha", "-1"])
    assert "alpha is -1" in capsys.readouterr().err


def test_every_network_has_a_known_grouping():
    for name in ("bilinear_joined", "attention_head", "ands_built"):
        assert name in ENTRIES
        assert len(set(true_labels(network(name)).values())) > 1
