"""What is kept of a finished run: a few kB from which tables are made and figures are drawn again.

summary.json     the numbers of the run, and the command that made them
config.yaml      its complete settings
figure_data.npz  what its figures show, at the precision that a figure has; only where figures are wanted
"""

import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rankone.checkpoint import read_json, write_json
from rankone.decomposition import Decomposition, LayerView
from rankone.errors import RankoneError
from rankone.experiments import ExperimentConfig, experiment_config, real_differences
from rankone.experiments.run import Summary, read_config, reopen
from rankone.metrics import Check, run_check
from rankone.targets.resid_mlp import ResidualTarget

SIDE_BY_SIDE = "threads=1"
"""The one setting that kept runs change: they go side by side, which is the better use of several cores (benchmarks/seeds.py)."""
CONTRIBUTIONS = ("model", "subcomponents")
LARGEST_KEPT = 2048
"""Matrices with more entries are not kept: no figure draws them weight by weight."""


@dataclass(frozen=True)
class Stored:
    """A kept run."""

    directory: Path

    @cached_property
    def summary(self) -> Summary:
        return read_json(self.directory / "summary.json")

    @cached_property
    def config(self) -> ExperimentConfig:
        return read_config(self.directory)

    @cached_property
    def _arrays(self) -> dict[str, Any]:
        with np.load(self.directory / "figure_data.npz") as arrays:
            return dict(arrays)

    @property
    def has_figures(self) -> bool:
        return (self.directory / "figure_data.npz").is_file()

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
    into.mkdir(parents=True, exist_ok=True)
    shutil.copy(run / "config.yaml", into / "config.yaml")
    if figures:
        config, result, _ = reopen(run)
        arrays = figure_data(config, result)
        with open(into / "figure_data.npz", "wb") as file:
            np.savez_compressed(file, **arrays)
    write_json(into / "summary.json", {"command": command} | read_json(run / "summary.json"))
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
    """Summaries of runs of presets as they stand now, by (experiment, preset), in the order of their seeds."""
    found: dict[tuple[str, str], list[Summary]] = {}
    for run in runs.values():
        if not outdated(run) and not set(run.summary["overrides"]) - {SIDE_BY_SIDE}:
            found.setdefault((run.summary["experiment"], run.summary["preset"]), []).append(run.summary)
    return {key: sorted(of, key=lambda s: s["seed"]) for key, of in found.items()}


def outdated(run: Stored) -> list[str]:
    """In what a kept run differs from what its experiment, preset and overrides mean today, or why they mean nothing today."""
    said = run.summary
    if not {"experiment", "preset", "overrides", "checks"} <= set(said):
        return ["its summary.json is not that of a run"]
    try:
        today = experiment_config(said["experiment"], preset=said["preset"], assignments=said["overrides"])
        return real_differences(run.config, today, besides=("seed",))
    except RankoneError as error:
        return [str(error)]
