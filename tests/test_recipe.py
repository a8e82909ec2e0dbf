"""The recipe: settings without units, and what they are laid under."""

import pytest
import torch
from torch import nn

import rankone
from conftest import small_mlp, uniform
from rankone import RankoneError
from rankone.balance import GUARD, Balance, in_units_of_data
from rankone.config import RECIPE, over_recipe
from rankone.data import generator_for
from rankone.errors import ConfigError
from rankone.fast.step import FastStep
from rankone.importance import upper_leaky
from rankone.losses import LOSSES, mse
from rankone.model import DecomposedModel
from rankone.step import Step, relative_faithfulness

LAYERS = {"0": 5, "2": 7}
SHORT = {"steps": 23, "log_every": 4, "checkpoint_every": 5, "importance": {"options": {"d_gate": 4}}}


def tensors(result):
    return {name: t.detach().clone() for name, t in result.model.named_tensors().items()}


def test_settings_are_laid_over_the_recipe():
    config = over_recipe({"steps": 7, "losses": {"importance_minimality": {"saturation": 3.0}}})
    minimality = config.losses["importance_minimality"]
    assert (config.steps, minimality.saturation) == (7, 3.0)
    assert minimality.coefficient == RECIPE["losses"]["importance_minimality"]["coefficient"]
    assert set(config.losses) == set(RECIPE["losses"]), "naming one loss drops no other"
    assert config.relative


def test_a_whole_config_is_taken_as_it_is():
    config = rankone.DecompositionConfig(steps=1)
    result = rankone.decompose(small_mlp(), uniform(), LAYERS, config)
    assert not result.config.relative


class Scaled(nn.Module):
    """A network in other units of its input and output."""

    def __init__(self, network, unit_in, unit_out):
        super().__init__()
        self.first, self.last = nn.Linear(4, 6), nn.Linear(6, 3)
        with torch.no_grad():
            self.first.weight.copy_(network[0].weight / unit_in)
            self.first.bias.copy_(network[0].bias)
            self.last.weight.copy_(network[2].weight * unit_out)
            self.last.bias.copy_(network[2].bias * unit_out)

    def forward(self, x):
        return self.last(torch.relu(self.first(x)))


@pytest.mark.parametrize(("unit_in", "unit_out"), [(1.0, 100.0), (1.0, 0.01), (100.0, 1.0), (0.01, 1.0)])
def test_the_same_network_in_other_units_gets_the_same_answer(unit_in, unit_out):
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3)).requires_grad_(False)
    x = torch.rand(200, 4)

    def importances(a, b):
        data = lambda generator: a * torch.rand(200, 4, generator=generator)  # noqa: E731
        result = rankone.decompose(
            Scaled(network, a, b).eval(), data, {"first": 8, "last": 8}, SHORT | {"steps": 60}
        )
        return result.importances(a * x)

    plain, scaled = importances(1.0, 1.0), importances(unit_in, unit_out)
    for name, g in plain.items():
        assert torch.allclose(g, scaled[name], atol=5e-3), name


def test_what_terms_weigh():
    terms = {
        "stochastic_recon": LOSSES["stochastic_recon"].model_validate({"coefficient": 2.0}),
        "importance_minimality": LOSSES["importance_minimality"].model_validate({"coefficient": 0.3}),
        "faithfulness": LOSSES["faithfulness"].model_validate({"coefficient": 5.0}),
    }
    balance = Balance({})
    balance.set_everything([0.25, 0.75], alone=[1.0, 0.5])  # two layers that do 0.5 and 0.25, say
    values = {
        "stochastic_recon": torch.tensor(0.01),
        "importance_minimality": torch.tensor(4.0),
        "faithfulness": torch.tensor(1.0),
    }
    weights = [float(w) for w in balance.weights(terms, values, 0.0)]
    pressed = 1 - (0.01 / 0.5) / GUARD
    assert weights == pytest.approx([2.0 / 0.5, 0.3 * (0.75 / 0.5) * pressed / 4.0, 5.0])
    values["stochastic_recon"] = torch.tensor(100.0)
    assert float(balance.weights(terms, values, 0.0)[1]) == 0.0, "nothing is pressed while nothing works"


def test_faithfulness_is_a_share_of_each_matrix():
    model = DecomposedModel(small_mlp(), LAYERS)
    shares = [
        (layer.subcomponents.weight() - layer.matrix()).square().sum() / layer.matrix().square().sum()
        for layer in model.layers.values()
    ]
    assert torch.allclose(relative_faithfulness(model), sum(shares) / 2)


def test_units_leave_the_sum_as_it_is():
    model = DecomposedModel(small_mlp(), LAYERS)
    before = {name: layer.subcomponents.weight().detach().clone() for name, layer in model.layers.items()}
    batch = uniform()(generator_for(0, "test"))
    in_units_of_data(model, [batch])
    for name, layer in model.layers.items():
        assert torch.allclose(layer.subcomponents.weight(), before[name], atol=1e-6)
        norms = layer.subcomponents.V.norm(dim=1)
        assert torch.allclose(norms, norms[0].expand_as(norms))


@pytest.mark.parametrize("step", [3, 11])
def test_a_crashed_run_of_the_recipe_resumes_to_the_same_bits(tmp_path, step):
    class Crash(Exception):
        pass

    def observer(progress):
        if progress.step > step:
            raise Crash

    torch.set_num_threads(1)
    whole = rankone.decompose(small_mlp(), uniform(), LAYERS, SHORT)
    with pytest.raises(Crash):
        rankone.decompose(small_mlp(), uniform(), LAYERS, SHORT, out=tmp_path, observer=observer)
    resumed = rankone.decompose(small_mlp(), uniform(), LAYERS, SHORT, out=tmp_path, resume=True)
    for name, tensor in tensors(whole).items():
        assert torch.equal(tensors(resumed)[name], tensor), name


@pytest.mark.parametrize("what", ["zero layer", "zero data"])
def test_a_network_that_does_nothing_is_refused(what):
    model, data = small_mlp(), uniform()
    if what == "zero layer":
        with torch.no_grad():
            model[2].weight.zero_()
        layers = {"2": 4}
    else:
        with torch.no_grad():
            model[0].bias.zero_()
        width = model[0].in_features
        layers, data = {"0": 4}, [torch.zeros(70, width)]
    with pytest.raises(RankoneError, match="there is nothing to explain"):
        rankone.decompose(model, data, layers, SHORT)


@pytest.mark.parametrize("engine", [Step, FastStep])
def test_layers_may_have_other_prices(engine):
    model = DecomposedModel(small_mlp(), LAYERS)
    loss = LOSSES["importance_minimality"].model_validate({"p": 2.0, "price_of": {"2": 0.2}})
    batch = uniform(rows=100)(generator_for(0, "test"))
    step = engine(model, batch, {"importance_minimality": loss}, mse)
    exact = model.raw_importances(step.clean, step.inner)
    by_hand = sum(
        factor * upper_leaky(exact[name]).square().sum(-1).mean() for name, factor in (("0", 1.0), ("2", 0.2))
    )
    value = loss.value(step)
    assert float(value.detach()) == pytest.approx(float(by_hand.detach()), rel=1e-3)
    parameters = list(model.trained().values())
    ours, theirs = (
        torch.autograd.grad(v, parameters, retain_graph=True, allow_unused=True) for v in (value, by_hand)
    )
    assert any(a is not None for a in ours)
    for a, b in zip(ours, theirs, strict=True):
        assert a is b is None or torch.allclose(a, b, rtol=1e-2, atol=1e-5)


def test_a_price_for_a_layer_that_is_not_there():
    with pytest.raises(ConfigError, match="fits no decomposed layer"):
        rankone.decompose(
            small_mlp(),
            uniform(),
            LAYERS,
            SHORT | {"losses": {"importance_minimality": {"price_of": {"mlp": 2.0}}}},
        )


def test_a_coefficient_that_relaxes_later():
    loss = LOSSES["importance_minimality"].model_validate(
        {"coefficient_start": 1.0, "coefficient": 0.1, "p_start": 2.0, "p": 1.0, "hold": 0.2, "anneal": 0.2}
        | {"relax_after": 0.6}
    )
    assert [loss.exponent(t) for t in (0.2, 0.4)] == [2.0, 1.0]
    assert [loss.coefficient_at(t) for t in (0.4, 0.6, 0.7, 0.8)] == pytest.approx([1.0, 1.0, 0.55, 0.1])
    assert loss.settled == pytest.approx(0.8)
    for wrong in ({"relax_after": 0.5, "coefficient_start": None}, {"relax_after": 0.9}):
        with pytest.raises(RankoneError, match="relax_after"):
            over_recipe({"losses": {"importance_minimality": wrong}})
