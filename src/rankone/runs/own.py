"""Runs of a network of the user's own, and opening any run from Python.

`rankone run my_model.py:make` and `decompose(..., out=...)` write the same kind of directory as the
shipped experiments have; what it does not hold is the network (targets/own.py says why).
"""

import re
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import nn

from rankone.config import DecompositionConfig, over_recipe
from rankone.data import Data
from rankone.decomposition import DESCRIPTION, Decomposition, load
from rankone.errors import BatchError, CheckpointError, ConfigError
from rankone.files import RunDirectory
from rankone.patching import OutputGetter
from rankone.room import chosen_layers
from rankone.runs.config import USUAL_PRESET, RunConfig, changed, refuse_descriptive
from rankone.runs.run import (
    CONFIG,
    Report,
    complete,
    is_lengthened,
    lengthened,
    load_run,
    read_config,
)
from rankone.settings import to_yaml, validated
from rankone.step import Divergence
from rankone.targets.own import Own, handing_over, own_target


def own_config(
    own: Own,
    *,
    preset: str | None = None,
    seed: int | None = None,
    steps: int | None = None,
    assignments: Sequence[str] = (),
) -> RunConfig:
    """The settings of a run of a network of the user's: the recipe, what `make` says, the command line."""
    if preset is not None:
        raise ConfigError(f"--preset chooses among the settings of an experiment; {own.made_by} has none.")
    refuse_descriptive(assignments)
    for assignment in assignments:
        if re.match(r"(batch_size|target)\b", assignment):
            raise ConfigError(
                f"{assignment!r} cannot be given for a network of your own: {own.made_by} makes it and its "
                "batches."
            )
    assert own.data is not None  # a `make` returns both
    config = over_recipe(own.config, own.data)
    if any(assignment.startswith("layers=") for assignment in assignments):
        layers = {"*": 1}  # is replaced
    else:
        known = {"output": own.output, "tied": config.tied, "matrices": config.matrices}
        layers = chosen_layers(own.model, own.data, own.layers, **known)
    values = config.model_dump(mode="json") | _described(own) | {"layers": layers}
    changes = [*assignments, *([f"steps={steps}"] if steps is not None else [])]
    source = f"Settings for {own.made_by}"
    values = changed(values, [*changes, *([f"seed={seed}"] if seed is not None else [])], source=source)
    return validated(RunConfig, values | {"overrides": changes}, source=source)


def _described(own: Own) -> dict[str, Any]:
    name = Path(own.made_by.partition(":")[0]).stem or type(own.model).__name__
    return {
        "experiment": re.sub(r"[^A-Za-z0-9._+-]", "_", name).lstrip("._+-")[:80] or "own",
        "preset": USUAL_PRESET,
        "title": own.title,
        "target": own_target(own).model_dump(mode="json"),
        "output": own.output if isinstance(own.output, str | int) else None,
    }


def python_config(own: Own, layers: Mapping[str, int], config: DecompositionConfig) -> RunConfig:
    """The config.yaml of a decomposition that was made in Python."""
    known = DecompositionConfig.model_fields
    settings = {k: v for k, v in config.model_dump(mode="json").items() if k in known}
    values = settings | _described(own) | {"preset": "custom", "layers": dict(layers)}
    return validated(RunConfig, values, source="This decomposition")


def begin(directory: RunDirectory, config: RunConfig, *, resumes: bool) -> None:
    """Say in a run directory what it is going to hold; one that is resumed says it already, unless it is
    lengthened."""
    if resumes and directory.has(CONFIG):
        stored = read_config(directory)
        if not is_lengthened(directory, stored, config):
            return  # training says what is wrong, if anything is
        config = lengthened(directory, stored, config)
    directory.write(CONFIG, to_yaml(config))


def finish(
    directory: RunDirectory, own: Own, config: RunConfig, result: Decomposition, report: Report | None = None
) -> None:
    """Measure a decomposition that was made in Python, and complete its run directory."""
    try:
        with handing_over(own):
            complete(directory, config, result, report=report)
    except BatchError as error:
        warnings.warn(
            f"The decomposition is saved in {directory.path}, but could not be measured: {error}",
            stacklevel=4,
        )


def open_run(
    path: str | Path,
    *,
    model: nn.Module | None = None,
    data: Data | None = None,
    output: OutputGetter = None,
    divergence: Divergence | None = None,
) -> Decomposition:
    """Open a run, finished or not, or a saved decomposition.

    A run of a shipped experiment needs nothing else. A network of your own is not in its directory:
    pass `model`, the very network, and `data` to look at it with; and `output=` and `divergence=` if
    they were functions.
    """
    path = Path(path)
    if not path.is_dir():
        raise CheckpointError(f"There is no directory {path}.")
    if not (path / CONFIG).exists():
        if not (path / DESCRIPTION).exists():
            raise CheckpointError(
                f"{path} is neither a run (it has no {CONFIG}) nor a saved decomposition (no {DESCRIPTION})."
            )
        if model is None:
            raise ConfigError(
                f"{path} is a saved decomposition, without its network. Pass model=, the very network it "
                "was made from."
            )
        result = load(path, model, output=output, divergence=divergence)
        result.data = data
        return result
    if model is None:
        if data is not None:
            raise ConfigError("data= goes with model=: a run of a shipped experiment has its own data.")
        return load_run(path).result
    with handing_over(Own(model, data, output=output, divergence=divergence)):
        return load_run(path).result
