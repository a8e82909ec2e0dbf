"""The trade-off itself: how much an attack can break against how few subcomponents are needed.

`rankone tune` and `tune` vary one number, the pressure on importances, decompose the network with each
value, and give the curve with one point recommended. Trials are kept in an Optuna study that any
number of workers share. Optuna (the extra `tune`) is imported when a study is opened, not before.
"""

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from rankone.config import DecompositionConfig, over_recipe
from rankone.data import Data
from rankone.decomposition import build
from rankone.errors import ConfigError
from rankone.files import RunDirectory
from rankone.patching import OutputGetter
from rankone.report.canvas import to_svg
from rankone.runs.many import bounded
from rankone.step import Divergence
from rankone.tune.curve import Choice, Curve, Failure, Point
from rankone.tune.work import ConfiguredWork, Display, OwnWork, Work, coefficients, pressed

if TYPE_CHECKING:
    from optuna.storages import BaseStorage

__all__ = [
    "Choice", "ConfiguredWork", "Curve", "Failure", "OwnWork", "Point", "pressed", "tune", "tune_work",
]  # fmt: skip

CURVE, TABLE, FIGURE = "tune.json", "tune.md", "tune.svg"
MOST_TRIALS = 10_000


def tune(
    model: nn.Module,
    data: Data,
    layers: Mapping[str, int],
    config: DecompositionConfig | Mapping[str, Any] | None = None,
    *,
    trials: int = 8,
    out: str | Path = "runs/tune",
    storage: "str | BaseStorage | None" = None,
    study: str = "tune",
    output: OutputGetter = None,
    divergence: Divergence | None = None,
    say: Callable[[str], None] = lambda line: None,
) -> Curve:
    """Find the trade-off of a model of your own, until the study has so many finished trials.

    model to config, output, divergence   as for `rankone.decompose`
    trials    finished trials of the study, those of other workers and earlier calls included
    out       a directory for tune.json, tune.md, tune.svg, the journal and each trial's decomposition
    storage   an Optuna storage or its URL, for workers on several machines; a journal in `out` if not
              given
    study     the name of the study in the storage
    say       called with a line when a trial is finished
    """
    whole = config if isinstance(config, DecompositionConfig) else over_recipe(config or {})
    if not isinstance(layers, Mapping):
        raise ConfigError(
            f"layers is a {type(layers).__name__}; expected a mapping from layer name patterns to C, "
            "such as {'mlp.*': 100}."
        )
    build(model, layers, whole, output)  # what cannot be decomposed is refused before a study is made
    work = OwnWork(model, data, layers, whole, output, divergence)
    return tune_work(work, trials, Path(out), name=study, storage=storage, say=say)


def tune_work(
    work: Work,
    trials: int,
    out: Path,
    *,
    name: str,
    storage: "str | BaseStorage | None" = None,
    display: Display = lambda number, factor: nullcontext(),
    say: Callable[[str], None] = lambda line: None,
) -> Curve:
    """Work on a study until it has so many finished trials; write and return the curve."""
    refuse_senseless(work, trials, storage)
    from rankone.tune.study import PATIENCE, run_study

    directory = RunDirectory.claim(out, PATIENCE)
    return run_study(
        work,
        trials,
        directory,
        name=name,
        storage=storage,
        display=display,
        say=say,
        keep=lambda curve, complete: keep(directory, curve, complete),
    )


def refuse_senseless(work: Work, trials: int, storage: "str | BaseStorage | None") -> None:
    """Raise before anything is made if nothing could come of it."""
    bounded("trials", trials, MOST_TRIALS)
    coefficients(work.config, 1.0)
    if storage == "":
        raise ConfigError("The URL of the storage is empty; leave it out for a journal in the directory.")
    if find_spec("optuna") is None:
        raise ConfigError("Tuning needs Optuna. Install it with: pip install 'rankone[tune]'")


def keep(directory: RunDirectory, curve: Curve, complete: bool) -> None:
    """Write a curve as numbers and as a table; when it is complete, also as a figure, if one can be drawn."""
    directory.write_json(CURVE, curve.to_dict())
    directory.write(TABLE, curve.table().markdown())
    if complete and can_draw():
        from rankone.tune.figure import curve_figure

        directory.write(FIGURE, to_svg(curve_figure(curve), curve.name))


def can_draw() -> bool:
    """Whether matplotlib is there (the extra `report`)."""
    return find_spec("matplotlib") is not None
