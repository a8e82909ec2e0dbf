"""Settings: defaults, schedules, YAML, overrides, and what is said about mistakes."""

import math
import time

import pytest
import torch

from rankone import DecompositionConfig, Loss, RankoneError, register_loss
from rankone.config import OptimizerSettings
from rankone.errors import ConfigError, near_matches, printable, shown
from rankone.losses import LOSSES
from rankone.optim import learning_rate
from rankone.runs.config import RunConfig
from rankone.settings import (
    Registry,
    Settings,
    differences,
    fields,
    from_yaml,
    override,
    set_setting,
    to_yaml,
    validated,
)


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
    with pytest.raises(RankoneError, match=r"here is not valid YAML: the key 'a' appears twice \(line 2"):
        from_yaml("a: 1\na: 2", source="here")
    with pytest.raises(RankoneError, match="here is not valid YAML"):
        from_yaml("a: [", source="here")


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("2024-01-31", "2024-01-31"),
        ("2024-99-99", "2024-99-99"),
        ("no", "no"),
        ("010", "010"),
        ("1:30", "1:30"),
        ("0x_", "0x_"),
        ("40_000", 40000),
        ("-3", -3),
        ("+.5", 0.5),
        ("1.", 1.0),
        ("e3", "e3"),
        (".", "."),
        ("True", True),
        ("NULL", None),
        ("", None),
        ("'3'", "3"),
        ("-.inf", -math.inf),
        ("9" * 5000, "9" * 5000),
        ("\ufeffa", "a"),
        ("{0: a, 2.weight: b}", {"0": "a", "2.weight": "b"}),
        ("- a\n- [b, {c: d}]", ["a", ["b", {"c": "d"}]]),
    ],
)
def test_what_yaml_means(text, value):
    result = from_yaml(text, source="x")
    assert result == value
    assert type(result) is type(value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("!!python/object/apply:os.system ['true']", r"the tag 'tag:yaml.org,2002:python.*is not read"),
        ("!!int abc", "the tag"),
        ("!!binary aGk=", "the tag"),
        ("a: &x 1\nb: *x", r"anchors \(&\) and aliases \(\*\) are not read.*line 1, column 4"),
        ("&a [*a]", "anchors"),
        ("layers: {*: 3}", "is not valid YAML"),
        ("layers: {*fc : 3}", "quote text"),
        ("<<: {a: 1}", "merge keys"),
        ("? [a]\n: b", "a key must be plain text"),
        ("a: 1\n---\nb: 2", "a second document starts here"),
        ("[" * 21 + "]" * 21, "nested more than 20 deep"),
        ("[" * 100_000, "nested more than 20 deep"),
        ("[" + "1," * 10_001 + "]", "more than 10,000 values"),
        ("".join(f"k{i}: 1\n" for i in range(20_000)), "more than 10,000 values"),
        ("a" * 200_001, "has 200,001 characters; settings have at most 200,000"),
        ("a: \0", "unacceptable character #x0000"),
        ("a: \ud800", "unacceptable character #xd800"),
        ('"\\e[31m"', r"control character, '\\x1b'; remove it"),
        ('"\\ud800"', "control character"),
        ('"\\UFFFFFFFF"', "not valid YAML"),
        ("%YAML 1." + "1" * 5000 + "\n--- a", "not valid YAML"),
    ],
    ids=lambda text: text[:20].encode("unicode_escape").decode() if isinstance(text, str) else None,
)
def test_yaml_that_is_refused(text, message):
    with pytest.raises(ConfigError, match=f"^here.*{message}"):
        from_yaml(text, source="here")


def test_text_that_looks_like_something_else_stays_text():
    odd = (
        "1e-3",
        "null",
        "~",
        "2024-01-31",
        "true",
        "<<",
        "a: b",
        "*x",
        "'",
        "\ufeff",
        "x" * 300,
        "a\n\nb",
        ".5",
        "-.inf",
    )
    for text in odd:
        config = DecompositionConfig(tied={text: text})
        again = validated(DecompositionConfig, from_yaml(to_yaml(config), source="x"), source="x")
        assert again == config


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"stepz": 3}, r"stepz: unknown setting. Did you mean 'steps'"),
        ({"optimizer": {"lrr": 3}}, r"optimizer.lrr: unknown setting. Did you mean 'lr'"),
        ({"steps": 0}, r"steps: .*greater than or equal to 1.*got 0"),
        ({"steps": "many"}, r"steps: .*valid integer.*got 'many'"),
        ({"init": "kaming"}, r"init: Unknown initialisation 'kaming'. Did you mean 'kaiming'"),
        ({"divergence": "msee"}, r"divergence: Unknown divergence 'msee'. Did you mean 'mse'"),
        (
            {"losses": {"faithfullness": {}}},
            r"losses.faithfullness: Unknown loss .* Did you mean 'faithfulness'",
        ),
        (
            {"losses": {"importance_minimality": {"p": 0}}},
            r"importance_minimality.p: .*greater than 0 \(got 0\)",
        ),
        (
            {"losses": {"importance_minimality": {"coeficient": 0}}},
            r"  losses.importance_minimality.coeficient: unknown setting. Did you mean 'coefficient'",
        ),
        ({"losses": {"faithfulness": 3}}, r"losses.faithfulness: Input should be .*\(got 3\)"),
        (
            {"losses": {"importance_minimality": {"p": 0.5, "eps": 0}}},
            r"slope of the penalty at 0 is infinite unless eps",
        ),
        (
            {"losses": {"importance_minimality": {"p": 1.0, "p_start": 0.5, "eps": 0}}},
            r"slope of the penalty at 0 is infinite unless eps",
        ),
        (
            {"importance": {"kind": "linear", "options": {"d_gate": 3}}},
            r"set importance.options=\{\} as well",
        ),
        ({"losses": {"faithfulness": {"coefficient": 0}}}, r"nothing to train"),
        ({"losses": 3}, r"losses: expected a mapping of loss names to their settings, got 3"),
        ({"importance": {"kind": "mlpp"}}, r"importance: Unknown importance function 'mlpp'"),
        ({"importance": {"options": {"gate": 3}}}, r"has no option 'gate'. Did you mean 'd_gate'"),
        ({"optimizer": {"schedule": "cosine"}}, r"optimizer.schedule.*half_cosine.*quarter_cosine"),
        ({"optimizer": {"warmup_steps": 9}, "steps": 9}, r"warmup_steps is 9, but there are only 9 steps"),
        ({"optimizer": {"lr": float("nan")}}, r"optimizer.lr"),
        ({"seed": -1}, r"seed"),
        ({"seed": 2**63}, r"seed: .*less than 9223372036854775808"),
        ({"seed": "9" * 5000}, r"seed: .*\(got '9{10}"),
        ({"seed": "2024-99-99"}, r"seed: .*valid integer"),
        ({"steps": 10**9 + 1}, r"steps: .*less than or equal to 1000000000"),
        ({"log_every": 10**10}, r"log_every: .*less than or equal to"),
        ({"optimizer": {"lr": 1e38}}, r"optimizer.lr: .*less than or equal to"),
        ({"optimizer": {"lr": math.inf}}, r"optimizer.lr"),
        ({"faithfulness_warmup": {"steps": 10**10}}, r"faithfulness_warmup.steps"),
        ({"tied": {"a": "b" * 1001}}, r"tied.a: .*at most 1000 characters"),
        ({"divergence": "\x1b[31m"}, r"divergence: there is a control character, '\\x1b'"),
        ({"tied": {"\x1b": "b"}}, r"tied: there is a control character"),
        ({f"k{i}": 1 for i in range(100)}, r"\.\.\. and 88 more"),
    ],
)
def test_mistakes_are_named(values, message):
    with pytest.raises(RankoneError, match=message):
        validated(DecompositionConfig, values, source="here")


@pytest.mark.parametrize("group", [DecompositionConfig, OptimizerSettings])
def test_mistakes_from_python_are_config_errors_too(group):
    with pytest.raises(ConfigError, match="  stepz: unknown setting"):
        group(stepz=3)


def test_losses_that_are_given_replace_the_four_of_the_paper():
    assert len(DecompositionConfig().losses) == 4
    assert list(DecompositionConfig(losses={"faithfulness": {}}).losses) == ["faithfulness"]
    with pytest.raises(ConfigError, match=r"losses.faithfulness: .*instance of Faithfulness"):
        DecompositionConfig(losses={"faithfulness": LOSSES["stochastic_recon"]()})


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
            "steps=1e4",
            "log_every=1_000",
        ],
    )
    config = validated(DecompositionConfig, changed, source="here")
    assert config.optimizer.lr == 3e-4
    assert config.losses["importance_minimality"].p == 2
    assert config.importance.options == {"d_gate": 4}
    assert config.tied == {"a": "b"}
    assert (config.steps, config.log_every) == (10_000, 1000)
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
        ("seed=&a [*a]", "Override 'seed=&a .* anchors"),
        ("=" * 100_000, "There is no setting ''"),
        ("x" * 100_000 + "=1", r"There is no setting 'x+\.\.\.x+'\. There are"),
        ("steps", "has no value"),
    ],
)
def test_overrides_that_name_nothing(assignment, message):
    with pytest.raises(RankoneError, match=message):
        override(DecompositionConfig().model_dump(mode="json"), DecompositionConfig, [assignment])


def test_overrides_have_an_end():
    with pytest.raises(ConfigError, match="There are 1001 overrides, but at most 1000 are read"):
        override({}, DecompositionConfig, ["steps=3"] * 1001)


def test_a_group_that_was_set_to_a_plain_value():
    with pytest.raises(
        ConfigError, match=r"optimizer.lr cannot be set, because optimizer was set to a plain value"
    ):
        override({"optimizer": {}}, DecompositionConfig, ["optimizer=3", "optimizer.lr=1"])


def test_differences_are_short():
    assert differences({"a": {"b": 1}, "c": 2}, {"a": {"b": 3}, "c": 2}) == ["a.b was 1 and is now 3"]
    assert len(differences({"a": "x" * 10**6}, {"a": 3})[0]) < 300


def test_every_setting_is_documented():
    for path, _, doc in fields(DecompositionConfig, DecompositionConfig().model_dump(mode="json")):
        assert len(doc) > 3, path


@pytest.mark.parametrize(
    ("schedule", "half", "end"),
    [
        ("constant", 1, 1),
        ("linear", 0.5, 0),
        ("half_cosine", 0.5, 0),
        ("quarter_cosine", math.cos(math.pi / 4), 0),
    ],
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


def test_a_registry_is_a_mapping_that_explains_itself():
    shapes: Registry[type] = Registry("shape")
    with pytest.raises(ConfigError, match=r"Unknown shape 'circle'. There are none to choose from."):
        shapes["circle"]
    assert shapes.register("circle")(int) is int
    shapes.register("square")(str)
    assert dict(shapes) == {"circle": int, "square": str}
    assert "circle" in shapes
    assert "oval" not in shapes
    assert ["circle"] not in shapes
    for look_up in (shapes.get, shapes.known, shapes.__getitem__, shapes.__delitem__):
        with pytest.raises(ConfigError, match=r"Unknown shape 'circl'. Did you mean 'circle'"):
            look_up("circl")
    with pytest.raises(
        ConfigError, match=r"There is already a shape 'circle' \(<class 'int'>\). Choose another name"
    ):
        shapes.register("circle")(float)
    for name in ("a.b", "", "a b", "\x1b", "a" * 101):
        with pytest.raises(ConfigError, match="cannot name a shape"):
            shapes.register(name)(float)
    del shapes["circle"]
    assert len(shapes) == 1


def test_mistakes_in_a_target_name_its_own_settings():
    """A target may be of several families; what is said is about the one that was chosen."""
    wrong = {"experiment": "x", "layers": {"*": 3}, "target": {"kind": "resid_mlp", "n_neuronz": 3}}
    with pytest.raises(RankoneError, match=r"  target.n_neuronz: unknown setting. Did you mean 'n_neurons'"):
        validated(RunConfig, wrong, source="x")
    wrong["target"] = {"kind": "tms", "training": {"stepz": 3}}
    with pytest.raises(RankoneError, match=r"  target.training.stepz: unknown setting. Did you mean 'steps'"):
        validated(RunConfig, wrong, source="x")
    wrong["target"] = {"kind": "transformer"}
    with pytest.raises(RankoneError, match=r"  target: Unknown kind of target .*'resid_mlp', 'tms'"):
        validated(RunConfig, wrong, source="x")
    for target in ({"n_hidden": 3}, {"kind": ["tms"]}, 3):
        wrong["target"] = target
        with pytest.raises(RankoneError, match=r"  target: its kind must be the name of a .*resid_mlp, tms"):
            validated(RunConfig, wrong, source="x")


def test_settings_of_a_target_are_explained_and_overridden():
    right = {"experiment": "x", "layers": {"*": 3}, "target": {"kind": "tms", "n_hidden": 3}}
    values = validated(RunConfig, right, source="x").model_dump(mode="json")
    explained = {path: (value, doc) for path, value, doc in fields(RunConfig, values)}
    assert explained["target.n_hidden"] == (3, "Hidden dimensions.")
    assert "losses.importance_minimality.p" in explained
    set_setting(values, RunConfig, "target.training.steps", 7)
    config = validated(RunConfig, override(values, RunConfig, ["target.n_hidden=4"]), source="x")
    assert (config.target.n_hidden, config.target.training.steps) == (4, 7)
    assert validated(RunConfig, from_yaml(to_yaml(config), source="x"), source="x") == config
    with pytest.raises(ConfigError, match=r"no setting 'target.n_hiden'. Did you mean 'target.n_hidden'"):
        override(values, RunConfig, ["target.n_hiden=4"])


def test_messages_are_short_and_harmless():
    class Group(Settings):
        text: str = ""

    assert len(shown("x" * 10**7)) <= 200
    assert len(shown({str(i): ["y" * 1000] * 1000 for i in range(1000)})) <= 200
    assert shown("\x1b[31m") == r"'\x1b[31m'"
    assert shown({"b": [1, 2]}) == "{'b': [1, 2]}"
    assert shown(10**5000) == "a number of thousands of digits"
    assert printable("a\x1b[31m\x9b\u202e\ud800\nb\té") == "a\\x1b[31m\\x9b\\u202e\\ud800\nb\\té"
    assert str(RankoneError("\x1b" * 10**6)).encode("ascii").count(b"\\x1b") == 3900
    message = str(RankoneError("a" * 10**7 + " what to do"))
    assert len(message) < 4000
    assert message.endswith("what to do")
    with pytest.raises(ConfigError) as caught:
        Group(text=["z" * 10**7])
    assert len(str(caught.value)) < 400


def test_near_matches_are_quick():
    names = [f"blocks.{i}.mlp.fc" + "ab" * 40 for i in range(5000)]
    start = time.perf_counter()
    assert near_matches("blocks.7.mlp.fc" + "ba" * 10**6, names)
    assert time.perf_counter() - start < 2
    assert near_matches("x" * 10**6, ["y"]) == "There are: 'y'."
    assert near_matches("stepz", ["steps", "seed"]) == "Did you mean 'steps'?"
