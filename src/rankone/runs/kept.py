"""What is kept of a finished run: a few kB from which tables are made and figures are drawn again.

summary.json     the numbers of the run, and the command that made them
config.yaml      its complete settings
figure_data.npz  what its figures show, at the precision that a figure has; only where figures are wanted
"""

import io
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rankone.decomposition import Decomposition, LayerView
from rankone.errors import CheckpointError, RankoneError
from rankone.files import read_json, write_atomic, write_json
from rankone.metrics import Check, run_check
from rankone.runs.config import ExperimentConfig, experiment_config, read_text, real_differences
from rankone.runs.run import Summary, read_config, reopen
from rankone.targets.resid_mlp import ResidualTarget

SIDE_BY_SIDE = "threads=1"
"""The one setting that kept runs change: they go side by side, which is the better use of several cores (benchmarks/seeds.py)."""
CONTRIBUTIONS = ("model", "subcomponents")
IN_A_SUMMARY = (
    "experiment",
    "preset",
    "overrides",
    "seed",
    "steps",
    "checks",
    "recovered",
    "mmcs",
    "ml2r",
    "n_alive",
    "reconstruction",
    "details",
    "wall_seconds",
)
"""What tables and figures read of it."""
LARGEST_KEPT = 2048
"""Matrices with more entries are not kept: no figure draws them weight by weight."""


@dataclass(frozen=True)
class Stored:
    """A kept run."""

    directory: Path

    @cached_property
    def summary(self) -> Summary:
        said = read_json(self.directory / "summary.json")
        if not isinstance(said, dict) or not set(IN_A_SUMMARY) <= set(said):
            raise CheckpointError("its summary.json is not that of a run")
        return said

    @cached_property
    def config(self) -> ExperimentConfig:
        return read_config(self.directory)

    @cached_property
    def objection(self) -> str | None:
        """Why this is not a run to count: its files, or what its experiment, preset and overrides mean today; None if it is one."""
        try:
            said = self.summary
            if said["seed"] != self.config.seed:
                return f"its summary.json is of seed {said['seed']}, its config.yaml of seed {self.config.seed}"
            today = experiment_config(said["experiment"], preset=said["preset"], assignments=said["overrides"])
            return next(iter(real_differences(self.config, today, besides=("seed",))), None)
        except RankoneError as error:
            return str(error)

    @cached_property
    def _arrays(self) -> dict[str, Any]:
        path = self.directory / "figure_data.npz"
        try:
            with np.load(path) as arrays:
                return dict(arrays)
        except (OSError, ValueError, EOFError, zipfile.BadZipFile) as error:
            raise CheckpointError(f"{path} cannot be read ({error}). Delete it to have it made again.") from None

    @cached_property
    def has_figures(self) -> bool:
        """Whether there is figure data, and all of it can be read."""
        try:
            return any(key.startswith("importance/") for key in self._arrays)
        except CheckpointError:
            return False

    @cached_property
    def importances(self) -> dict[str, Tensor]:
        """Importances on the probe, to 1/255."""
        found = {k.removeprefix("importance/"): v for k, v in self._arrays.items() if k.startswith("importance/")}
        return {name: torch.from_numpy(g).float() / 255 for name, g in found.items()}

    @cached_property
    def checks(self) -> dict[str, Check]:
        """The recovery checks' verdicts, with an order of columns for drawing."""
        found: dict[str, Check] = {}
        for name, said in self.summary["checks"].items():
            order = run_check(said["pattern"], said["expected"], self.importances[name]).order
            found[name] = Check(said["pattern"], said["expected"], said["errors"], order)
        return found

    @cached_property
    def views(self) -> dict[str, LayerView]:
        names = [k.split("/")[1] for k in self._arrays if k.startswith("matrix/") and k.endswith("/target")]

        def part(name: str, key: str) -> Tensor:
            return torch.from_numpy(self._arrays[f"matrix/{name}/{key}"])

        return {name: LayerView(name, part(name, "target"), part(name, "U"), part(name, "V")) for name in names}

    @cached_property
    def contributions(self) -> tuple[Tensor, Tensor]:
        """Neuron contributions in the target and in single subcomponents, each `[features, neurons]`."""
        model, parts = (torch.from_numpy(self._arrays[f"contributions/{key}"]).float() for key in CONTRIBUTIONS)
        return model, parts


def keep(run: Path, into: Path, *, command: str, figures: bool) -> Stored:
    """Keep what matters of a finished run in the directory `into`."""
    config, result, summary = reopen(run)
    into.mkdir(parents=True, exist_ok=True)
    write_atomic(into / "config.yaml", read_text(run / "config.yaml"))
    if figures:
        packed = io.BytesIO()
        np.savez_compressed(packed, **figure_data(config, result))
        write_atomic(into / "figure_data.npz", packed.getvalue())
    write_json(into / "summary.json", {"command": command} | summary)
    return Stored(into)


def figure_data(config: ExperimentConfig, result: Decomposition) -> dict[str, Any]:
    """Everything that figures of this run are drawn from."""
    arrays: dict[str, Any] = {}
    for name, g in result.importances(config.target.probe()).items():
        arrays[f"importance/{name}"] = (255 * g).round().to(torch.uint8).cpu().numpy()
    for name in result.layers:
        view = result.components(name)
        if view.target.numel() <= LARGEST_KEPT:
            for key, tensor in (("target", view.target), ("U", view.U), ("V", view.V)):
                arrays[f"matrix/{name}/{key}"] = tensor.contiguous().numpy()
    if isinstance(config.target, ResidualTarget):
        found = config.target.contributions(result)
        for key in CONTRIBUTIONS:
            arrays[f"contributions/{key}"] = getattr(found, key).half().numpy()
    return arrays


def stored_runs(directory: Path) -> dict[str, Stored]:
    """Every kept run in a directory, by name."""
    return {path.parent.name: Stored(path.parent) for path in sorted(directory.glob("*/summary.json"))}


def groups(runs: Mapping[str, Stored]) -> dict[tuple[str, str], list[Summary]]:
    """Summaries of runs of presets as they are, by (experiment, preset), in the order of their seeds."""
    found: dict[tuple[str, str], list[Summary]] = {}
    for run in runs.values():
        if not changes(run.summary):
            found.setdefault((run.summary["experiment"], run.summary["preset"]), []).append(run.summary)
    return {key: sorted(of, key=lambda s: s["seed"]) for key, of in found.items()}


def changes(summary: Summary) -> set[str]:
    """What a run changed in its preset, besides what all kept runs do."""
    return set(summary["overrides"]) - {SIDE_BY_SIDE}
