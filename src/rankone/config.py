"""What a decomposition can be told: typed, frozen, validated settings, and their YAML.

Every field has a docstring; it feeds `rankone config explain`. Unknown keys are errors with the nearest known key, never
dropped. Settings of the paper's experiments (target, data) are in experiments/, which extends `DecompositionConfig`.
"""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from types import UnionType
from typing import Any, ClassVar, Literal, TypeVar, get_args

import yaml
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    SerializeAsAny,
    ValidationError,
    field_validator,
    model_validator,
)

from rankone.components import INITS
from rankone.errors import ConfigError, near_matches
from rankone.importance import Option, check_importance
from rankone.losses import DIVERGENCES, LOSSES, Loss, loss_from

T = TypeVar("T", bound=BaseModel)


def _one_of(value: str, known: Mapping[str, Any], what: str) -> str:
    if value not in known:
        raise ValueError(f"unknown {what} {value!r}. {near_matches(value, known)}")
    return value


def _as_value_error(function: Any, *args: Any) -> Any:
    """pydantic collects ValueErrors with the place they belong to; ours are ConfigErrors."""
    try:
        return function(*args)
    except ConfigError as error:
        raise ValueError(str(error)) from None


class Settings(BaseModel):
    """Base of all settings: immutable, strict about keys, documented by field docstrings."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


class ImportanceSettings(Settings):
    """Which causal importance function every layer gets."""

    kind: str = "mlp"
    """`mlp` (the paper's, one small MLP per subcomponent), `linear`, `layer_mlp`, or one you registered."""
    options: dict[str, Option] = {}
    """Options of that function, such as `d_gate` (mlp) or `width` (layer_mlp)."""

    @model_validator(mode="after")
    def _known(self) -> "ImportanceSettings":
        _as_value_error(check_importance, self.kind, self.options)
        return self


class OptimizerSettings(Settings):
    """Adam without weight decay, one learning rate for factors and importance functions."""

    lr: float = Field(default=1e-3, gt=0, allow_inf_nan=False)
    """The largest learning rate."""
    schedule: Literal["constant", "linear", "half_cosine", "quarter_cosine"] = "constant"
    """How it falls. `half_cosine` is the usual (1 + cos(pi t)) / 2; `quarter_cosine`, cos(pi t / 2), stays high for longer
    and is what the paper's released code calls cosine; `linear` falls to 0 in a straight line."""
    warmup_steps: int = Field(default=0, ge=0)
    """Steps over which the learning rate first rises linearly from 0."""
    grad_clip: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    """Largest norm of the whole gradient; null for no clipping."""


class FaithfulnessWarmupSettings(Settings):
    """An optional phase before training in which U and V alone learn to sum to the matrices."""

    steps: int = Field(default=0, ge=0)
    """Length of the phase; 0 for none."""
    lr: float = Field(default=1e-2, gt=0, allow_inf_nan=False)
    """Its learning rate."""


def paper_losses() -> dict[str, Loss]:
    """The four losses of the paper with their defaults."""
    names = ("faithfulness", "stochastic_recon", "stochastic_recon_layerwise", "importance_minimality")
    return {name: loss_from(name, {}) for name in names}


class DecompositionConfig(Settings):
    """How to decompose a model: everything but the model, its data and the choice of layers."""

    descriptive: ClassVar[tuple[str, ...]] = ()
    """Settings that say what a run is, not what it does."""

    seed: int = Field(default=0, ge=0)
    """Decides initialisation, data and masks. Same seed, same machine, same result."""
    steps: int = Field(default=40_000, ge=1)
    """Training steps."""
    divergence: str = "mse"
    """How outputs are compared: `mse` or `kl`. From Python, pass any function as `divergence=` instead."""
    losses: dict[str, SerializeAsAny[Loss]] = Field(default_factory=paper_losses)
    """The terms of the training loss, by name. What is not listed is not used."""
    importance: ImportanceSettings = ImportanceSettings()
    """The causal importance function."""
    engine: Literal["fast", "exact"] = "fast"
    """`fast` interpolates the gates with compiled kernels where they apply (see fast.py); `exact` computes everything in plain torch."""
    init: str = "overlap"
    """Initialisation of U and V: `overlap` (the released code's), `kaiming`, or `datapoints` (what W does to single datapoints, no warm-up needed)."""
    tied: dict[str, str] = {}
    """layer: layer, for layers that share one set of subcomponents because their weights are equal or each other's transpose."""
    optimizer: OptimizerSettings = OptimizerSettings()
    """The optimiser and its schedule."""
    faithfulness_warmup: FaithfulnessWarmupSettings = FaithfulnessWarmupSettings()
    """The phase before training proper."""
    log_every: int = Field(default=100, ge=1)
    """Steps between records in metrics.jsonl."""
    checkpoint_every: int = Field(default=1000, ge=1)
    """Steps between checkpoints, where a run directory is kept."""
    keep_checkpoints: int = Field(default=2, ge=1)
    """How many of the newest checkpoints stay on disk."""

    def __init__(self, **values: Any) -> None:
        try:
            super().__init__(**values)
        except ValidationError as error:
            raise ConfigError(_explained(type(self), error)) from None

    @field_validator("losses", mode="before")
    @classmethod
    def _losses(cls, value: Any) -> Any:
        if not isinstance(value, Mapping):
            raise ValueError(f"expected a mapping of loss names to their settings, got {type(value).__name__}")
        return {name: _as_value_error(loss_from, name, settings) for name, settings in value.items()}

    @field_validator("init")
    @classmethod
    def _init(cls, value: str) -> str:
        return _one_of(value, INITS, "initialisation")

    @field_validator("divergence")
    @classmethod
    def _divergence(cls, value: str) -> str:
        return _one_of(value, DIVERGENCES, "divergence")

    @model_validator(mode="after")
    def _consistent(self) -> "DecompositionConfig":
        if self.optimizer.warmup_steps >= self.steps:
            raise ValueError(
                f"optimizer.warmup_steps is {self.optimizer.warmup_steps}, but there are only {self.steps} steps; it must be smaller"
            )
        if not any(loss.coefficient > 0 for loss in self.losses.values()):
            raise ValueError("no loss has a coefficient above 0: there is nothing to train")
        return self


def learning_rate(settings: OptimizerSettings, step: int, steps: int) -> float:
    """The learning rate of step `step` (from 0) out of `steps`."""
    if step < settings.warmup_steps:
        return settings.lr * (step + 1) / settings.warmup_steps
    t = (step - settings.warmup_steps) / max(1, steps - settings.warmup_steps)
    factor = {
        "constant": 1.0,
        "linear": 1 - t,
        "half_cosine": (1 + math.cos(math.pi * t)) / 2,
        "quarter_cosine": math.cos(math.pi * t / 2),
    }[settings.schedule]
    return settings.lr * factor


def validated(cls: type[T], values: Any, *, source: str) -> T:
    """Build settings from plain values; every problem in one ConfigError, with the place it stands and a hint."""
    if not isinstance(values, Mapping):
        raise ConfigError(f"{source}: expected a mapping of settings, got {type(values).__name__}.")
    try:
        return cls.model_validate(values)
    except ValidationError as error:
        raise ConfigError(f"{source}:\n{_explained(cls, error)}") from None
    except ConfigError as error:  # from DecompositionConfig, which explains itself
        raise ConfigError(f"{source}:\n{error}") from None


def to_yaml(settings: BaseModel) -> str:
    """Settings as YAML that reads back to the same settings."""
    return yaml.safe_dump(settings.model_dump(mode="json"), sort_keys=False, width=100, allow_unicode=True)


class _Loader(yaml.SafeLoader):
    """YAML as people write it: 1e-3 is a number, and a key that stands twice is an error."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [self.construct_object(k, deep=True) for k, _ in node.value]
        for key in keys:
            if keys.count(key) > 1:
                raise yaml.constructor.ConstructorError(None, None, f"the key {key!r} stands twice", node.start_mark)
        return super().construct_mapping(node, deep)


# YAML 1.1 wants a dot in a float; people write 1e-3.
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"^[-+]?[0-9][0-9_]*(?:\.[0-9_]*)?[eE][-+]?[0-9]+$"), list("-+0123456789")
)


def from_yaml(text: str, *, source: str) -> Any:
    """Plain values from YAML text."""
    try:
        return yaml.load(text, _Loader)  # a SafeLoader: it builds plain values only
    except yaml.YAMLError as error:
        raise ConfigError(f"{source} is not valid YAML: {error}") from None


def override(values: dict[str, Any], settings: type[BaseModel], assignments: Sequence[str]) -> dict[str, Any]:
    """`values` with dotted assignments (`optimizer.lr=1e-3`) applied; each key must exist, each value is YAML."""
    result = _deep_copy(values)
    for assignment in assignments:
        key, separator, text = assignment.partition("=")
        if not separator:
            raise ConfigError(f"Override {assignment!r} has no value; write key=value, for instance optimizer.lr=1e-3.")
        set_setting(result, settings, key, from_yaml(text, source=f"Override {assignment!r}"))
    return result


def set_setting(values: dict[str, Any], settings: type[BaseModel], key: str, value: Any) -> None:
    """Set one dotted setting in plain values. Inside free-form mappings (`layers`) a key may be new and hold dots."""
    known = {path: current for path, current, _ in fields(settings, values)}
    mapping = next((path for path in known if key.startswith(f"{path}.") and isinstance(known[path], dict)), None)
    if mapping is not None:
        known[mapping][key.removeprefix(f"{mapping}.")] = value
        return
    *parents, leaf = key.split(".")
    inside: Any = values
    for part in parents:
        inside = inside.get(part) if isinstance(inside, dict) else None
    if not isinstance(inside, dict) and key in known:
        raise ConfigError(
            f"{key} cannot be set, because {'.'.join(parents)} has been set to what is no group of settings."
        )
    if not isinstance(inside, dict) or (key not in known and leaf not in inside):
        raise ConfigError(f"There is no setting {key!r}. {near_matches(key, known)} See `rankone config explain`.")
    inside[leaf] = value


def differences(old: Any, new: Any, path: str = "") -> list[str]:
    """The settings in which two sets of plain values differ, in words."""
    if isinstance(old, dict) and isinstance(new, dict):
        keys = sorted(set(old) | set(new))
        return [d for k in keys for d in differences(old.get(k), new.get(k), f"{path}.{k}" if path else k)]
    return [] if old == new else [f"{path} was {old!r} and is now {new!r}"]


def fields(cls: type[BaseModel], values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any, str]]:
    """Every setting as (dotted path, value, documentation), depth first; free-form mappings are one setting.

    Values need not be valid: what is no group although it should be counts as an empty one.
    """
    for name, info in cls.model_fields.items():
        path = f"{prefix}{name}"
        value = values.get(name)
        doc = " ".join((info.description or "").split())
        inner = _settings_class(info.annotation, value)
        if inner is not None:
            yield from fields(inner, value if isinstance(value, Mapping) else {}, f"{path}.")
        elif name == "losses" and isinstance(value, Mapping):
            for loss, settings in value.items():
                if loss in LOSSES:
                    yield from fields(
                        LOSSES[loss], settings if isinstance(settings, Mapping) else {}, f"{path}.{loss}."
                    )
        else:
            yield path, value, doc


def _settings_class(annotation: Any, value: Any = None) -> type[BaseModel] | None:
    """The class of a setting that is a group of settings; of several possible ones, the one whose `kind` the value has."""
    if isinstance(annotation, type):
        return annotation if issubclass(annotation, BaseModel) else None
    if not isinstance(annotation, UnionType):
        return None
    classes = [c for c in get_args(annotation) if isinstance(c, type) and issubclass(c, BaseModel)]
    kind = value.get("kind") if isinstance(value, Mapping) else None
    return next((c for c in classes if c.model_fields["kind"].default == kind), classes[0] if classes else None)


def _explained(cls: type[BaseModel], error: ValidationError) -> str:
    return "\n".join(_explain(cls, e) for e in error.errors())


def _explain(cls: type[BaseModel], error: Any) -> str:
    place, siblings = _place(cls, error["loc"])
    path = ".".join(place)
    if error["type"] == "extra_forbidden":
        return f"  {path}: unknown setting. {near_matches(place[-1], siblings)}"
    message = str(error["msg"]).removeprefix("Value error, ")
    seen = "" if error["type"] == "value_error" else f" (got {error['input']!r})"
    return f"  {path or 'settings'}: {message}{seen}"


def _place(cls: type[BaseModel], loc: Sequence[Any]) -> tuple[list[str], list[str]]:
    """Where an error is, as people write it, and the settings that stand beside it."""
    inside: type[BaseModel] | None = cls
    place: list[str] = []
    siblings: list[str] = []
    parts = list(loc)
    while parts:
        part = parts.pop(0)
        siblings = list(inside.model_fields) if inside is not None else []
        place.append(str(part))
        annotation = inside.model_fields[part].annotation if inside is not None and part in siblings else None
        chosen = {"kind": parts[0]} if parts else None
        inside = _settings_class(annotation, chosen)
        if parts and isinstance(annotation, UnionType) and inside is not None and parts[0] not in inside.model_fields:
            parts.pop(0)  # pydantic names the kind that it took, as if it were a level of its own
    return place, siblings


def _deep_copy(value: Any) -> Any:
    return {k: _deep_copy(v) for k, v in value.items()} if isinstance(value, dict) else value
