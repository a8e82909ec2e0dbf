"""APD, the predecessor: attributions and losses are what its equations say, taken literally; the judge
takes what it finds; the same seed gives the same bits."""

import pickle
import sys
from dataclasses import replace

import pytest
import torch
from torch.func import functional_call

from conftest import ROOT
from rankone.collection import bench, judge, network
from rankone.collection.apd import (
    APD,
    Layers,
    WholeComponents,
    attributions,
    decompose_by_attribution,
    keep,
    losses,
    threshold_of,
)
from rankone.data import WeightedBatch, row_weights
from rankone.errors import ConfigError, TargetError

sys.path.insert(0, str(ROOT / "benchmarks"))

SMALL = APD(C=4, top_k=1.5, steps=30, batch_size=64, p=0.8, activations=1.0, activations_of="embed", rank=2)
OWN = ("embed", "hidden.0")
"""The matrices of tms_5-2-id that are parameters; the third is the first, transposed."""


def example(settings=SMALL, rows=6):
    """A network with a tied matrix, components, and a batch whose last row stands for ten."""
    known = network("tms_5-2-id")
    layers = Layers(known)
    components = WholeComponents(known, layers.targets, settings, seed=3)
    x = torch.rand(rows, 5, generator=torch.Generator().manual_seed(0))
    x[-1] = 0
    weights = torch.ones(rows)
    weights[-1] = 10
    return known, layers, components, WeightedBatch(x, weights)


def run(known, weights, x):
    return functional_call(known.model, {f"{name}.weight": W for name, W in weights.items()}, (x,))


def test_an_attribution_is_the_squared_derivative_along_a_component():
    known, layers, components, batch = example()
    matrices = components.matrices()
    found = attributions(layers.clean(batch.inputs), matrices)
    W = {name: layers.targets[name] for name in OWN}
    for i, x in enumerate(batch.inputs):
        for c in range(SMALL.C):
            by = torch.zeros((), requires_grad=True)
            moved = {name: W[name] + by * matrices[name][c].detach() for name in OWN}
            slopes = [float(torch.autograd.grad(y, by, retain_graph=True)[0]) for y in run(known, moved, x)]
            literal = sum(slope**2 for slope in slopes) / len(slopes)
            assert float(found[i, c]) == pytest.approx(literal, rel=1e-4, abs=1e-12)
    assert (found[:-1] > 0).any()


def test_losses_are_the_literal_sums():
    known, layers, components, batch = example()
    matrices = components.matrices()
    clean = layers.clean(batch.inputs)
    kept = torch.tensor([[1, 0, 0, 1], [0, 0, 0, 0], [1, 1, 1, 1], [0, 1, 0, 0], [0, 0, 1, 1], [0, 0, 0, 0]])
    kept = kept.bool()
    found = losses(layers, components, SMALL, clean, batch.inputs, kept, matrices, row_weights(batch))

    n_parameters = 10 + 4 + 10
    off = sum(((matrices[n].sum(0) - W) ** 2).sum() for n, W in layers.targets.items())
    minimality = simplicity = activations = 0.0
    for x, own, weight in zip(batch.inputs, kept, batch.weights / 15, strict=True):
        alone = {
            n: sum((P for P, k in zip(matrices[n], own, strict=True) if k), 0 * matrices[n][0]) for n in OWN
        }
        minimality += weight * ((run(known, alone, x) - known.model(x)) ** 2).mean()
        hidden = [(W @ x).relu() for W in (alone["embed"], layers.targets["embed"])]
        activations += weight * ((hidden[0] - hidden[1]) ** 2).mean()
        for c in own.nonzero().flatten().tolist():
            for key, times in (("embed", 2), ("hidden/0", 1)):
                for r in range(2):
                    u, v = components.U[key][c, :, r], components.V[key][c, r]
                    simplicity += weight * times * (u.norm() * v.norm()) ** SMALL.p
    literal = {
        "faithfulness": off / n_parameters,
        "minimality": minimality,
        "simplicity": simplicity / n_parameters,
        "activations": activations,
    }
    assert found.keys() == literal.keys()
    for name, value in literal.items():
        torch.testing.assert_close(found[name], value, rtol=1e-4, atol=1e-9, msg=name)


def test_top_k_counts_datapoints_and_not_rows():
    attribution = torch.tensor([[0.9, 0.1], [0.8, 0.3], [0.7, 0.2]])
    ones = torch.ones(3)
    assert threshold_of(attribution, ones, 1.0) == pytest.approx(0.7)
    assert threshold_of(attribution, ones, 0.34) == pytest.approx(0.9)
    assert threshold_of(attribution, torch.tensor([1.0, 4.0, 1.0]), 0.9) == pytest.approx(0.8)
    assert threshold_of(attribution, ones, 2.0) == pytest.approx(0.1)
    repeated = attribution[[0, 1, 1, 1, 1, 2]]
    for top_k in (0.2, 0.5, 1.0, 1.5):
        merged = threshold_of(attribution, torch.tensor([1.0, 4.0, 1.0]), top_k)
        assert merged == threshold_of(repeated, torch.ones(6), top_k)
    assert not keep(torch.zeros(2, 3), 0.0).any()


def test_components_that_are_all_kept_are_their_sum():
    known, layers, components, batch = example()
    matrices = {name: m / m.sum(0).norm() for name, m in components.matrices().items()}
    everything = torch.ones(len(batch.inputs), SMALL.C, dtype=torch.bool)
    output, _ = layers.kept(batch.inputs, matrices, everything)
    whole = {name: matrices[name].sum(0) for name in OWN}
    torch.testing.assert_close(output, run(known, whole, batch.inputs))


def test_the_judge_takes_it_and_a_seed_decides_every_bit(tmp_path):
    known = network("tms_5-2-id")
    digest, state = known.digest, torch.random.get_rng_state()
    first, again, other = (SMALL(known, seed) for seed in (1, 1, 2))
    assert known.digest == digest
    assert torch.equal(torch.random.get_rng_state(), state)
    assert first.threshold == again.threshold
    for name in known.layers:
        assert torch.equal(first.matrices[name], again.matrices[name])
        assert not torch.equal(first.matrices[name], other.matrices[name])
    importances = first.importances(known.probe)
    assert importances.keys() == known.layers.keys()
    assert importances["embed"].unique().tolist() in ([0.0, 1.0], [0.0], [1.0])
    assert judge(known, first, n_batches=1).errors > 0  # 30 steps are not enough
    assert pickle.loads(pickle.dumps(SMALL)) == SMALL  # as several jobs need it
    (result,) = bench.run(SMALL, ["tms_5-2"], 1, tmp_path)
    assert result.judgement is not None


@pytest.mark.slow
def test_it_recovers_superposition_and_shrinks_it():
    from apd import SETTINGS, measures

    known = network("tms_5-2")
    found = replace(SETTINGS["tms_5-2"], steps=4000)(known, 1)
    assert judge(known, found, n_batches=1).recovered
    numbers = measures(known, found)
    assert numbers["mmcs"] > 0.99
    assert 0.85 < numbers["ml2r"] < 0.95
    assert numbers["best_errors"] == 0


def test_a_narrow_stream_changes_nothing():
    from apd import Narrow, found_by

    known = network("resid_mlp1")
    narrow = Narrow(known.model)
    torch.testing.assert_close(narrow(known.probe), known.model(known.probe), atol=1e-5, rtol=0)
    for layer in known.layers:
        W = narrow.get_submodule(layer).weight
        torch.testing.assert_close(
            narrow.widened(layer, W), known.model.get_submodule(layer).weight, atol=1e-5, rtol=0
        )
    found = found_by(APD(C=3, top_k=1.0, steps=2, batch_size=16, rank=2), known, seed=0)
    wide = {layer: found.components(layer).matrices for layer in known.layers}
    assert wide["blocks.0.mlp_in"].shape == (3, 50, 1000)
    assert wide["blocks.0.mlp_out"].shape == (3, 1000, 50)
    for layer, matrices in wide.items():
        torch.testing.assert_close(matrices.norm(), found.matrices[layer].norm())


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"C": 0, "top_k": 1.0}, "C above 0"),
        ({"C": 3, "top_k": 0.0}, "top_k above 0"),
        ({"C": 3, "top_k": 4.0}, "cannot keep top_k=4.0 of C=3"),
        ({"C": 3, "top_k": 1.0, "lr": -1.0}, "lr above 0"),
        ({"C": 3, "top_k": 1.0, "rank": 0}, "rank of at least 1"),
        ({"C": 3, "top_k": 1.0, "warmup": 1.0}, "share of its steps below 1"),
    ],
)
def test_settings_that_make_no_sense_are_refused(settings, message):
    with pytest.raises(ConfigError, match=message):
        APD(**settings)


def test_networks_that_it_is_not_for_are_refused():
    with pytest.raises(ConfigError, match="has no batch_size"):
        decompose_by_attribution(network("blocks_rank1"), replace(SMALL, batch_size=8), 0)
    with pytest.raises(ConfigError, match="names no decomposed layer"):
        replace(SMALL, activations_of="embde")(network("tms_5-2"), 0)
    sequences = replace(SMALL, batch_size=None, steps=1)
    with pytest.raises(TargetError, match="one vector of one vector"):
        sequences(network("attention_head"), 0)
