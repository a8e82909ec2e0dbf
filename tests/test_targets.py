"""The pinned targets: the right weights, good networks, and reproducible training."""

import copy

import pytest
import torch

from rankone import RankoneError
from rankone.checkpoint import fingerprint
from rankone.experiments import experiment_config, experiment_names
from rankone.targets import load_target, pinned_names, save_target, train_until_good
from rankone.targets.tms import TMS, SparseFeatures, TMSTarget, TMSTraining


@pytest.mark.parametrize("name", experiment_names())
def test_pinned_targets_are_good_and_pinned(name):
    settings = experiment_config(name).target
    assert settings.sha256 is not None
    model = load_target(settings)
    assert fingerprint(model) == settings.sha256
    assert not model.training
    good, numbers = settings.check(model)
    assert good, numbers
    for layer in model.hidden:
        assert torch.equal(layer.weight, torch.eye(settings.n_hidden))
    assert name in pinned_names()


def test_training_is_reproducible_and_the_check_can_fail():
    settings = TMSTarget(training=TMSTraining(steps=30))
    first, again = settings.train(3)[0], settings.train(3)[0]
    assert fingerprint(first) == fingerprint(again)
    assert not settings.check(first)[0]


def test_a_square_among_pentagons_is_not_good():
    """Four features on a cross and one dropped: the classic poor local optimum."""
    settings = TMSTarget()
    model = load_target(experiment_config("tms_5-2").target)
    with torch.no_grad():
        model.embed.weight.copy_(torch.tensor([[1.0, 0, -1, 0, 0], [0, 1, 0, -1, 0]]))
    good, numbers = settings.check(model)
    assert not good
    assert numbers["smallest_own_response"] < 0.5


def test_identities_are_not_trained():
    model, _ = TMSTarget(n_identity=1, training=TMSTraining(steps=5)).train(0)
    assert torch.equal(model.hidden[0].weight, torch.eye(2))


def test_giving_up_is_said():
    settings = TMSTarget(training=TMSTraining(steps=2))
    with pytest.raises(RankoneError, match=r"None of the 2 networks trained with seeds 4 to 5 passed"):
        list(train_until_good(settings, 4, tries=2))


def test_saved_targets_load_and_wrong_ones_are_refused(tmp_path):
    settings = TMSTarget(training=TMSTraining(steps=2))
    model, _ = settings.train(0)
    path = tmp_path / "t.safetensors"
    sha = save_target(path, model, settings, 0)
    loaded = load_target(settings.model_copy(update={"weights": str(path), "sha256": sha}))
    assert fingerprint(loaded) == sha
    with pytest.raises(RankoneError, match=r"has SHA-256 .*but the config pins 00"):
        load_target(settings.model_copy(update={"weights": str(path), "sha256": "00"}))
    with pytest.raises(RankoneError, match=r"t.safetensors holds .*but the settings describe"):
        load_target(settings.model_copy(update={"weights": str(path), "n_features": 6}))
    with pytest.raises(
        RankoneError, match=r"target.weights is 'tms_5-3': neither a pinned target nor a file. Did you mean 'tms_5-2'"
    ):
        load_target(settings.model_copy(update={"weights": "tms_5-3"}))


def test_sparse_features():
    sampler = SparseFeatures(5, 0.05, 20_000)
    x = sampler.dense(torch.Generator().manual_seed(0))
    assert x.shape == (20_000, 5)
    assert (x != 0).float().mean().item() == pytest.approx(0.05, abs=0.002)
    assert x[x != 0].mean().item() == pytest.approx(0.5, abs=0.01)
    batch = sampler(torch.Generator().manual_seed(0))
    assert batch.weights.sum() == 20_000
    assert batch.weights[-1].item() / 20_000 == pytest.approx(0.95**5, abs=0.01)


def test_a_network_has_one_weight_for_both_directions():
    model = TMS(5, 2, 1)
    assert set(model.state_dict()) == {"embed.weight", "hidden.0.weight", "unembed.bias"}
    copied = copy.deepcopy(model)
    with torch.no_grad():
        copied.embed.weight.fill_(1.0)
    assert torch.equal(copied.unembed.weight, torch.ones(5, 2))
    assert not torch.equal(model.unembed.weight, torch.ones(5, 2))
