"""The pinned targets: the right weights, good networks, and reproducible training."""

import copy

import pytest
import torch

from rankone import RankoneError
from rankone.files import fingerprint
from rankone.runs.config import experiment_config, experiment_names
from rankone.targets import (
    TARGETS,
    Target,
    pinned_names,
    register_target,
    save_target,
    train_until_good,
    trainable,
)
from rankone.targets.resid_mlp import Contributions, ResidualMLP, ResidualTarget, neuron_contributions
from rankone.targets.sparse import Recipe, SparseFeatures
from rankone.targets.tms import TMS, TMSTarget


@pytest.mark.parametrize("name", experiment_names())
def test_pinned_targets_are_good_and_pinned(name):
    settings = experiment_config(name).target
    assert settings.sha256 is not None
    model = settings.load()
    assert fingerprint(model) == settings.sha256
    assert not model.training
    good, numbers = settings.check(model)
    assert good, numbers
    for layer in getattr(model, "hidden", ()):
        assert torch.equal(layer.weight, torch.eye(settings.n_hidden))
    assert name in pinned_names()


def test_training_is_reproducible_and_the_check_can_fail():
    settings = TMSTarget(training=Recipe(steps=30))
    first, again = settings.train(3)[0], settings.train(3)[0]
    assert fingerprint(first) == fingerprint(again)
    assert not settings.check(first)[0]


def test_a_square_among_pentagons_is_not_good():
    """Four features on a cross and one dropped: the classic poor local optimum."""
    settings = TMSTarget()
    model = experiment_config("tms_5-2").target.load()
    with torch.no_grad():
        model.embed.weight.copy_(torch.tensor([[1.0, 0, -1, 0, 0], [0, 1, 0, -1, 0]]))
    good, numbers = settings.check(model)
    assert not good
    assert numbers["smallest_own_response"] < 0.5


def test_identities_are_not_trained():
    model, _ = TMSTarget(n_identity=1, training=Recipe(steps=5)).train(0)
    assert torch.equal(model.hidden[0].weight, torch.eye(2))


def test_giving_up_is_said():
    settings = TMSTarget(training=Recipe(steps=2))
    with pytest.raises(RankoneError, match=r"None of the 2 networks trained with seeds 4 to 5 passed"):
        list(train_until_good(settings, 4, tries=2))


def test_saved_targets_load_and_wrong_ones_are_refused(tmp_path):
    settings = TMSTarget(training=Recipe(steps=2))
    model, _ = settings.train(0)
    path = tmp_path / "t.safetensors"
    sha = save_target(path, model, settings, 0)
    loaded = settings.model_copy(update={"weights": str(path), "sha256": sha}).load()
    assert fingerprint(loaded) == sha
    with pytest.raises(RankoneError, match=r"has SHA-256 .*but the config pins 00"):
        settings.model_copy(update={"weights": str(path), "sha256": "00"}).load()
    with pytest.raises(RankoneError, match=r"t.safetensors holds .*but the settings describe"):
        settings.model_copy(update={"weights": str(path), "n_features": 6}).load()
    with pytest.raises(
        RankoneError,
        match=r"target.weights is 'tms_5-3': neither a pinned target nor a file. Did you mean 'tms_5-2'",
    ):
        settings.model_copy(update={"weights": "tms_5-3"}).load()


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


def test_residual_targets_train_reproducibly_and_fall_below_the_naive_solution():
    settings = ResidualTarget(n_features=10, d_stream=50, n_neurons=5, training=Recipe(steps=5))
    first, again = settings.train(3)[0], settings.train(3)[0]
    assert fingerprint(first) == fingerprint(again)
    good, numbers = settings.check(first)
    assert not good
    longer = settings.model_copy(
        update={"training": Recipe(steps=600, batch_size=2048, lr=1e-2), "feature_probability": 0.05}
    )
    model, loss = longer.train(0)
    _, trained = longer.check(model)
    assert trained["share_of_naive_loss"] < 1 < numbers["share_of_naive_loss"]
    assert trained["loss"] == pytest.approx(loss, rel=0.5)


def test_the_naive_solution_computes_as_many_features_as_there_are_neurons():
    """An orthonormal embedding has no interference: the naive network is exact where it has a neuron."""
    settings = ResidualTarget(n_features=6, d_stream=6, n_blocks=2, n_neurons=2)
    model = settings.build()
    with torch.no_grad():
        model.embed.weight.copy_(torch.eye(6))
        naive = settings._naive(model)
        x = 2 * torch.rand(50, 6) - 1
        torch.testing.assert_close(naive(x)[:, :4], settings.labels(x)[:, :4])
        torch.testing.assert_close(naive(x)[:, 4:], x[:, 4:])


def test_neuron_contributions_are_the_papers_equations():
    settings = ResidualTarget(n_features=7, d_stream=20, n_blocks=2, n_neurons=3)
    model = settings.build(1)
    W_E, W_U = model.embed.weight, model.embed.weight.T
    torch.manual_seed(0)
    factors = {}
    for i in range(2):
        factors[f"blocks.{i}.mlp_in"] = (torch.randn(3, 9), torch.randn(9, 20))
        factors[f"blocks.{i}.mlp_out"] = (torch.randn(20, 5), torch.randn(5, 3))
    contributions = neuron_contributions(model, factors)
    assert contributions.model.shape == (7, 6)
    for i in range(7):
        for block in range(2):
            W_in, W_out = model.blocks[block].mlp_in.weight, model.blocks[block].mlp_out.weight
            literal = (W_U[i, :] @ W_out) * (W_in @ W_E[:, i])
            torch.testing.assert_close(contributions.model[i, 3 * block : 3 * block + 3], literal)
            U_in, V_in = factors[f"blocks.{block}.mlp_in"]
            U_out, V_out = factors[f"blocks.{block}.mlp_out"]
            of_each = [
                (W_U[i, :] @ U_out @ V_out) * (U_in[:, c] * (V_in[c, :] @ W_E[:, i])) for c in range(9)
            ]
            torch.testing.assert_close(
                contributions.maxima[i, 3 * block : 3 * block + 3], torch.stack(of_each).amax(0)
            )
            best = max(of_each, key=torch.sum)
            torch.testing.assert_close(contributions.subcomponents[i, 3 * block : 3 * block + 3], best)


def test_a_perfect_decomposition_contributes_what_the_target_does():
    """One subcomponent per feature that reads only this feature's direction, and W_out as a whole."""
    model = ResidualTarget(n_features=7, d_stream=20, n_blocks=2, n_neurons=3).build(1)
    W_E = model.embed.weight
    dual = torch.linalg.pinv(W_E)  # row f reads feature f and no other
    factors = {}
    for i, block in enumerate(model.blocks):
        factors[f"blocks.{i}.mlp_in"] = (block.mlp_in.weight @ W_E, dual)
        factors[f"blocks.{i}.mlp_out"] = (block.mlp_out.weight, torch.eye(3))
    contributions = neuron_contributions(model, factors)
    # Where the target's contribution is negative, the maximum is that of a subcomponent that does
    # nothing.
    torch.testing.assert_close(contributions.maxima, contributions.model.clamp(min=0), atol=1e-5, rtol=1e-4)
    useful = contributions.model.reshape(7, 2, 3).sum(-1) > 0.1
    own, target = (t.reshape(7, 2, 3)[useful] for t in (contributions.subcomponents, contributions.model))
    torch.testing.assert_close(own, target, atol=1e-5, rtol=1e-4)


def test_how_well_contributions_match():
    x = torch.rand(5, 4)
    same = Contributions(x, x, x).to_dict()
    assert same["correlation"] == pytest.approx(1)
    assert same["slope"] == pytest.approx(1)
    assert same["largest_deviation"] == 0
    skewed = Contributions(x, 1.2 * x + 0.1, x).to_dict()
    assert skewed["of_maxima"] == {key: value for key, value in same.items() if key != "of_maxima"}
    assert skewed["slope"] == pytest.approx(1.2)
    assert skewed["offset"] == pytest.approx(0.1)
    assert skewed["largest_deviation"] == pytest.approx(float((0.2 * x + 0.1).max()), rel=1e-5)


def test_the_residual_network_is_what_the_paper_says():
    model = experiment_config("resid_mlp2").target.load()
    assert isinstance(model, ResidualMLP)
    W_E = model.embed.weight
    torch.testing.assert_close(W_E.norm(dim=0), torch.ones(100))
    x = 2 * torch.rand(30, 100) - 1
    stream = x @ W_E.T
    for block in model.blocks:
        stream = stream + torch.relu(stream @ block.mlp_in.weight.T) @ block.mlp_out.weight.T
    torch.testing.assert_close(model(x), stream @ W_E, atol=1e-4, rtol=1e-4)


class Ready(Target):
    kind: str = "ready"

    def load(self):
        return torch.nn.Linear(2, 2)

    def data(self, batch_size):
        return [torch.ones(batch_size, 2)]


@pytest.mark.parametrize("kind", ["tms", "resid_mlp", "ready"])
def test_every_family_keeps_the_contract(kind):
    """Whatever is optional is there, and is empty where a family has nothing to say."""
    target = Ready() if kind == "ready" else TARGETS[kind]()
    assert target.kind == kind
    assert target.data(8) is not None
    probe, truth = target.probe(), target.truth()
    assert truth == {} or probe is not None
    assert target.figures({}, {}) == []
    if kind == "ready":
        assert (probe, truth, target.output, target.similarity_of) == (None, {}, None, None)
        assert target.check(target.load()) == (True, {})


def test_only_targets_with_a_recipe_can_be_trained():
    assert trainable(TMSTarget()).first_seed == 0
    with pytest.raises(RankoneError, match="Targets of the kind 'ready' come trained"):
        trainable(Ready())


def test_a_kind_is_registered_once():
    with pytest.raises(RankoneError, match="There is already a kind of target 'tms'"):
        register_target("tms")(Ready)
