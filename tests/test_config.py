"""Settings: defaults, schedules, YAML, overrides, and what is said about mistakes."""

import math

import pytest
import torch

from rankone import DecompositionConfig, Loss, RankoneError, register_loss
from rankone.config import OptimizerSettings, fields, from_yaml, learning_rate, override, to_yaml, validated
from rankone.losses import LOSSES
from rankone.runs.config import ExperimentConfig, experiment_config


def test_yaml_round_trip():
    config = DecompositionConfig(
        steps=7,
        losses={"importance_minimality": {"coefficient": 1e-5, "p": 0.9}},
        importance={"kind": "layer_mlp", "options": {"width": 3}},
    )
    again = validated(DecompositionConfig, from_yaml(to_yaml(config), source="text"), source="text")
    assert again == config
    assert again.losses["importance_minimality"].p == 0.9


def test_yaml_numbers_and_duplicate_keys():
    assert from_yaml("a: 1e-3\nb: 2E+4\nc: 5", source="x") == {"a": 1e-3, "b": 2e4, "c": 5}
    with pytest.raises(RankoneError, match=r"here is not valid YAML.*the key 'a' stands twice"):
        from_yaml("a: 1\na: 2", source="here")
    with pytest.raises(RankoneError, match="here is not valid YAML"):
        from_yaml("a: [", source="here")
    with pytest.raises(RankoneError, match="not valid YAML"):
        from_yaml("!!python/object/apply:os.system ['true']", source="here")


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"stepz": 3}, r"stepz: unknown setting. Did you mean 'steps'"),
        ({"optimizer": {"lrr": 3}}, r"optimizer.lrr: unknown setting. Did you mean 'lr'"),
        ({"steps": 0}, r"steps: .*greater than or equal to 1.*got 0"),
        ({"steps": "many"}, r"steps: .*valid integer.*got 'many'"),
        ({"init": "kaming"}, r"init: unknown initialisation 'kaming'. Did you mean 'kaiming'"),
        ({"divergence": "msee"}, r"unknown divergence 'msee'. Did you mean 'mse'"),
        ({"losses": {"faithfullness": {}}}, r"losses: Unknown loss 'faithfullness'. Did you mean 'faithfulness'"),
        ({"losses": {"importance_minimality": {"p": 0}}}, r"importance_minimality.p: .*greater than 0 \(got 0\)"),
        ({"losses": {"importance_minimality": {"q": 0}}}, r"importance_minimality has no setting 'q'"),
        (
            {"losses": {"importance_minimality": {"p": 0.5, "eps": 0}}},
            r"slope of the penalty at 0 is infinite unless eps",
        ),
        (
            {"losses": {"importance_minimality": {"p": 1.0, "p_start": 0.5, "eps": 0}}},
            r"slope of the penalty at 0 is infinite unless eps",
        ),
        ({"importance": {"kind": "linear", "options": {"d_gate": 3}}}, r"set importance.options=\{\} as well"),
        ({"losses": {"faithfulness": {"coefficient": 0}}}, r"nothing to train"),
        ({"losses": 3}, r"expected a mapping of loss names"),
        ({"importance": {"kind": "mlpp"}}, r"importance: Unknown importance function 'mlpp'"),
        ({"importance": {"options": {"gate": 3}}}, r"has no option 'gate'. Did you mean 'd_gate'"),
        ({"optimizer": {"schedule": "cosine"}}, r"optimizer.schedule.*half_cosine.*quarter_cosine"),
        ({"optimizer": {"warmup_steps": 9}, "steps": 9}, r"warmup_steps is 9, but there are only 9 steps"),
        ({"optimizer": {"lr": float("nan")}}, r"optimizer.lr"),
        ({"seed": -1}, r"seed"),
    ],
)
def test_mistakes_are_named(values, message):
    with pytest.raises(RankoneError, match=message):
        validated(DecompositionConfig, values, source="here")


def test_not_a_mapping():
    with pytest.raises(RankoneError, match="here: expected a mapping of settings, got list"):
        validated(DecompositionConfig, [], source="here")


def test_overrides():
    values = DecompositionConfig().model_dump(mode="json")
    changed = override(
        values,
        DecompositionConfig,
        [
            "optimizer.lr=3e-4",
            "losses.importance_minimality.p=2",
            "importance.options.d_gate=4",
            "optimizer.grad_clip=null",
            "tied={a: b}",
        ],
    )
    config = validated(DecompositionConfig, changed, source="here")
    assert config.optimizer.lr == 3e-4
    assert config.losses["importance_minimality"].p == 2
    assert config.importance.options == {"d_gate": 4}
    assert config.tied == {"a": "b"}
    dotted = override(changed, DecompositionConfig, ["tied.blocks.0.out=blocks.0.in"])
    assert dotted["tied"] == {"a": "b", "blocks.0.out": "blocks.0.in"}
    assert values["optimizer"]["lr"] == 1e-3


@pytest.mark.parametrize(
    ("assignment", "message"),
    [
        ("optimizer.lr", "has no value; write key=value"),
        ("optimiser.lr=3", "There is no setting 'optimiser.lr'. Did you mean 'optimizer.lr'"),
        ("steps.more=3", "There is no setting 'steps.more'"),
        ("losses.importance_minimality.q=3", "There is no setting 'losses.importance_minimality.q'"),
    ],
)
def test_overrides_that_name_nothing(assignment, message):
    with pytest.raises(RankoneError, match=message):
        override(DecompositionConfig().model_dump(mode="json"), DecompositionConfig, [assignment])


def test_every_setting_is_documented():
    for path, _, doc in fields(DecompositionConfig, DecompositionConfig().model_dump(mode="json")):
        assert len(doc) > 3, path


@pytest.mark.parametrize(
    ("schedule", "half", "end"),
    [("constant", 1, 1), ("linear", 0.5, 0), ("half_cosine", 0.5, 0), ("quarter_cosine", math.cos(math.pi / 4), 0)],
)
def test_schedules(schedule, half, end):
    settings = OptimizerSettings(lr=2.0, schedule=schedule)
    assert learning_rate(settings, 0, 100) == 2.0
    assert learning_rate(settings, 50, 100) == pytest.approx(2 * half)
    assert learning_rate(settings, 100, 100) == pytest.approx(2 * end)
    warm = OptimizerSettings(lr=2.0, schedule=schedule, warmup_steps=10)
    assert [learning_rate(warm, s, 110) for s in (0, 4, 9, 10)] == pytest.approx([0.2, 1.0, 2.0, 2.0])
    assert learning_rate(warm, 60, 110) == pytest.approx(2 * half)


def test_a_new_loss_is_one_class():
    @register_loss("size")
    class Size(Loss):
        coefficient: float = 0.1

        def value(self, step):
            return torch.stack([p.square().sum() for p in step.model.factors()]).sum()

    try:
        config = validated(DecompositionConfig, {"losses": {"size": {"coefficient": 2}}}, source="here")
        assert config.losses["size"].coefficient == 2
        assert "losses.size.coefficient" in {
            path for path, _, _ in fields(DecompositionConfig, config.model_dump(mode="json"))
        }
    finally:
        del LOSSES["size"]


def test_mistakes_in_a_target_name_its_own_settings():
    """A target may be of several families; what is said is about the one that was chosen."""
    wrong = {"experiment": "x", "layers": {"*": 3}, "target": {"kind": "resid_mlp", "n_neuronz": 3}}
    with pytest.raises(RankoneError, match=r"  target.n_neuronz: unknown setting. Did you mean 'n_neurons'"):
        validated(ExperimentConfig, wrong, source="x")
    wrong["target"] = {"kind": "tms", "training": {"stepz": 3}}
    with pytest.raises(RankoneError, match=r"  target.training.stepz: unknown setting. Did you mean 'steps'"):
        validated(ExperimentConfig, wrong, source="x")
    wrong["target"] = {"kind": "transformer"}
    with pytest.raises(RankoneError, match=r"  target: .*'tms', 'resid_mlp'"):
        validated(ExperimentConfig, wrong, source="x")
    values = experiment_config("resid_mlp1", assignments=["target.n_blocks=2"])
    assert values.target.n_blocks == 2
