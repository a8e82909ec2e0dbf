"""What one trial does: decompose with more or less pressure on importances, and measure the result.

Pressure is one number, a factor on the coefficients of importance_minimality, at the start and at the
end of training alike: it says how much of the network's behaviour may be lost for having fewer
important subcomponents. A trial is a function of the settings and this factor, whichever process runs
it; it works in a directory of its own, and goes on there if an earlier worker was killed in it.
"""

import math
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar, runtime_checkable

import torch
from torch import nn

from rankone.checkpoint import described
from rankone.collection.bench import versions
from rankone.config import DecompositionConfig
from rankone.data import Data
from rankone.decomposition import build, train
from rankone.errors import ConfigError, TrainingError
from rankone.evaluate import evaluate
from rankone.files import RunDirectory, fingerprint
from rankone.measures import ATTACK_STEPS
from rankone.metrics_log import Observer
from rankone.patching import OutputGetter
from rankone.runs.config import RunConfig, changed
from rankone.runs.run import run
from rankone.settings import override, validated
from rankone.step import Divergence

PRESSED = "importance_minimality"
COEFFICIENTS = ("coefficient", "coefficient_start")

Display = Callable[[int, float], AbstractContextManager[Observer | None]]
"""Shows a trial (its number, its factor) while it runs."""

C = TypeVar("C", bound=DecompositionConfig)


@dataclass(frozen=True)
class Measured:
    """What came of a trial."""

    attack: float
    l0: float
    notes: dict[str, Any]
    """Everything else that is recorded: rounded, sum, deletion, alive, recovered, seconds."""


@runtime_checkable
class Work(Protocol):
    """A network and its settings: what all trials of a study have in common."""

    @property
    def config(self) -> DecompositionConfig: ...

    def identity(self) -> dict[str, Any]:
        """Whatever a result depends on, as JSON: two studies with the same are one."""
        ...

    def run(self, factor: float, directory: RunDirectory, observer: Observer | None) -> Measured:
        """Decompose in a directory that is locked, from its newest checkpoint if it has one."""
        ...


@dataclass(frozen=True)
class ConfiguredWork:
    """A network that a config describes: its trials are runs, as `rankone run` makes them."""

    config: RunConfig

    def identity(self) -> dict[str, Any]:
        return {
            "config": self.config.model_dump(mode="json", exclude=set(self.config.descriptive)),
            "versions": versions(),
        }

    def run(self, factor: float, directory: RunDirectory, observer: Observer | None) -> Measured:
        summary = run(pressed(self.config, factor), directory, resume=True, observer=observer)
        return _measured(
            summary.relative, summary.l0, summary.n_alive, summary.recovered, summary.wall_seconds or 0.0
        )


@dataclass(frozen=True)
class OwnWork:
    """A model of the user's own."""

    model: nn.Module
    data: Data
    layers: Mapping[str, int]
    config: DecompositionConfig
    output: OutputGetter = None
    divergence: Divergence | None = None

    def identity(self) -> dict[str, Any]:
        return {
            "config": self.config.model_dump(mode="json"),
            "layers": dict(self.layers),
            "target": fingerprint(self.model),
            "data": described(self.data) if callable(self.data) else type(self.data).__name__,
            "output": described(self.output),
            "divergence": described(self.divergence),
            "threads": torch.get_num_threads(),
            "versions": versions(),
        }

    def run(self, factor: float, directory: RunDirectory, observer: Observer | None) -> Measured:
        config = pressed(self.config, factor)
        model = build(self.model, self.layers, config, self.output)
        result = train(
            model,
            self.data,
            config,
            divergence=self.divergence,
            directory=directory,
            resume=True,
            observer=observer,
        )
        found = evaluate(result, self.data)
        alive = {name: len(indices) for name, indices in found.alive.items()}
        return _measured(found.relative, found.l0, alive, found.recovered, result.seconds)


def coefficients(config: DecompositionConfig, factor: float) -> dict[str, float]:
    """The settings that this much pressure changes, with their values."""
    if PRESSED not in config.losses or config.losses[PRESSED].coefficient == 0:
        seen = ", ".join(name for name, loss in config.losses.items() if loss.coefficient > 0)
        raise ConfigError(
            f"The trade-off is between pressure on importances and what is lost by it, but these settings "
            f"have no loss {PRESSED} with a coefficient above 0 (there are: {seen}). Add it to `losses`."
        )
    loss = config.losses[PRESSED].model_dump()
    return {
        f"losses.{PRESSED}.{name}": float(f"{loss[name] * factor:.6g}")
        for name in COEFFICIENTS
        if loss.get(name) is not None
    }


def pressed(config: C, factor: float) -> C:
    """The same settings with this much more pressure on importances; with a factor of 1, themselves."""
    changes = coefficients(config, factor)
    if factor == 1:
        return config
    source = f"Settings with pressure x{factor:g}"
    assignments = [f"{name}={value!r}" for name, value in changes.items()]
    values = config.model_dump(mode="json")
    if isinstance(config, RunConfig):
        values = changed(values, assignments, source=source)
        values["overrides"] = [*values["overrides"], *assignments]
    else:
        values = override(values, type(config), assignments)
    return validated(type(config), values, source=source)


def _measured(
    relative: Mapping[str, float | None],
    l0: Mapping[str, float],
    alive: Mapping[str, int],
    recovered: bool | None,
    seconds: float,
) -> Measured:
    attack, needed = relative.get(f"attack_{ATTACK_STEPS}"), sum(l0.values())
    if attack is None or not math.isfinite(attack) or not math.isfinite(needed):
        raise TrainingError(
            f"The result cannot be measured: an attack costs {attack} of what removing everything costs, "
            f"L0 is {needed:g}."
        )
    shares = {name: _finite(relative.get(name)) for name in ("rounded", "sum", "deletion")}
    notes = shares | {"alive": dict(alive), "recovered": recovered, "seconds": round(seconds, 3)}
    return Measured(attack, needed, notes)


def _finite(share: float | None) -> float | None:
    return share if share is not None and math.isfinite(share) else None
