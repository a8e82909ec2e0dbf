"""What is kept of a finished run: a few kB from which tables are made and figures are drawn again.

summary.json     the numbers of the run, and the command that made them
config.yaml      its complete settings
figure_data.npz  what its figures show, at the precision that a figure has, if figures show the run
manifest.json    their digests

Kept runs are in DIR/runs/NAME, each a `RunDirectory`.
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

from rankone.decomposition import Decomposition
from rankone.errors import CheckpointError, RankoneError
from rankone.files import RunDirectory
from rankone.metrics import Check, run_check
from rankone.report.canvas import Picture
from rankone.runs.config import RunConfig, experiment_config, real_differences
from rankone.runs.run import CONFIG, load_run, read_config, read_summary, write_summary
from rankone.runs.summary import Summary
from rankone.views import LayerView

SIDE_BY_SIDE = "threads=1"
"""The one setting that kept runs change: they go side by side, which is the better use of several
cores (benchmarks/seeds.py)."""
LARGEST_MATRIX = 2048
"""Matrices with more entries are not kept: no figure draws them weight by weight."""
LARGEST_FIGURE_DATA = 2**28
"""Bytes of figure data, unpacked, beyond which a file is refused."""

_FIGURE_DATA = "figure_data.npz"
_IMPORTANCE, _MATRIX = "importance/", "matrix/"


@dataclass(frozen=True)
class KeptRun:
    """A kept run; its parts are read, and verified, when they are asked for."""

    path: Path

    @cached_property
    def directory(self) -> RunDirectory:
        return RunDirectory.open(self.path)

    @cached_property
    def summary(self) -> Summary:
        return read_summary(self.directory)

    @cached_property
    def config(self) -> RunConfig:
        return read_config(self.directory)

    @cached_property
    def objection(self) -> str | None:
        """Why this is not a run to count: damaged files, or settings that its preset no longer has."""
        try:
            summary, config = self.summary, self.config
            if summary.seed != config.seed:
                return f"its summary.json is of seed {summary.seed}, its config.yaml of seed {config.seed}"
            today = experiment_config(
                summary.experiment, preset=summary.preset, assignments=summary.overrides
            )
            return next(iter(real_differences(config, today, besides=("seed",))), None)
        except RankoneError as error:
            return str(error)

    @cached_property
    def has_figures(self) -> bool:
        """Whether there is figure data, and all of it can be read."""
        try:
            return bool(self.importances)
        except CheckpointError:
            return False

    @cached_property
    def importances(self) -> dict[str, Tensor]:
        """Importances on the probe, to 1/255."""
        return {name: g / 255 for name, g in self._under(_IMPORTANCE).items()}

    @cached_property
    def checks(self) -> dict[str, Check]:
        """The recovery checks' verdicts, with an order of columns for drawing."""
        return {
            name: Check(
                c.pattern,
                c.expected,
                c.errors,
                run_check(c.pattern, c.expected, self.importances[name]).order,
            )
            for name, c in self.summary.checks.items()
            if name in self.importances
        }

    @cached_property
    def views(self) -> dict[str, LayerView]:
        """The subcomponents of each matrix that is small enough to be drawn."""
        parts = self._under(_MATRIX)
        views: dict[str, LayerView] = {}
        for name in [key.removesuffix("/target") for key in parts if key.endswith("/target")]:
            target, U, V = (parts.get(f"{name}/{key}") for key in ("target", "U", "V"))
            if (
                target is None
                or U is None
                or V is None
                or target.shape != (len(U), V.shape[1])
                or len(V) != U.shape[1]
            ):
                raise self._damaged(f"the parts of {name} do not fit together")
            views[name] = LayerView(name, target, U, V)
        return views

    def figures(self) -> list[Picture]:
        """The figures of the target's family."""
        own = {k: t for k, t in self._tensors.items() if not k.startswith((_IMPORTANCE, _MATRIX))}
        return self.config.target.figures(own, self.summary.details)

    def _under(self, prefix: str) -> dict[str, Tensor]:
        return {k.removeprefix(prefix): t for k, t in self._tensors.items() if k.startswith(prefix)}

    @cached_property
    def _tensors(self) -> dict[str, Tensor]:
        content = io.BytesIO(self.directory.read(_FIGURE_DATA))
        try:
            with zipfile.ZipFile(content) as archive:
                size = sum(member.file_size for member in archive.infolist())
            if size > LARGEST_FIGURE_DATA:
                raise ValueError(f"it would unpack to {size} bytes")
            with np.load(content, allow_pickle=False) as arrays:
                tensors = {key: torch.from_numpy(array).float() for key, array in arrays.items()}
            if any(t.dim() != 2 for t in tensors.values()):
                raise ValueError("it holds something else than matrices")
        except Exception as error:  # zip, zlib, numpy's header parser and torch raise two dozen kinds
            raise self._damaged(str(error)) from None
        return tensors

    def _damaged(self, why: str) -> CheckpointError:
        return CheckpointError(
            f"{self.path / _FIGURE_DATA} cannot be read ({why}). Delete {self.path} and make it again."
        )


def keep(run: Path, into: Path, *, command: str, figures: bool) -> KeptRun:
    """Keep what matters of a finished run in the directory `into`."""
    loaded = load_run(run)
    summary = loaded.finished().model_copy(update={"command": command})
    directory = RunDirectory.claim(into)
    with directory.lock():
        directory.write(CONFIG, loaded.directory.read(CONFIG))
        if figures:
            packed = io.BytesIO()
            np.savez_compressed(packed, **_figure_data(loaded.config, loaded.result))
            directory.write(_FIGURE_DATA, packed.getvalue())
        write_summary(directory, summary)
    return KeptRun(into)


def _figure_data(config: RunConfig, result: Decomposition) -> dict[str, Any]:
    """Everything that figures of this run are drawn from."""
    arrays: dict[str, Any] = {}
    probe = config.target.probe()
    for name, g in (result.importances(probe) if probe is not None else {}).items():
        arrays[f"{_IMPORTANCE}{name}"] = (255 * g).round().to(torch.uint8).cpu().numpy()
    for name in result.layers:
        view = result.components(name)
        if view.target.numel() <= LARGEST_MATRIX:
            for key, tensor in (("target", view.target), ("U", view.U), ("V", view.V)):
                arrays[f"{_MATRIX}{name}/{key}"] = tensor.cpu().contiguous().numpy()
    return arrays | {key: t.half().cpu().numpy() for key, t in config.target.figure_data(result).items()}


def kept_runs(directory: Path) -> dict[str, KeptRun]:
    """Every kept run of a directory, by name."""
    return {path.parent.name: KeptRun(path.parent) for path in sorted(directory.glob("runs/*/summary.json"))}


def groups(runs: Mapping[str, KeptRun]) -> dict[tuple[str, str], list[Summary]]:
    """Summaries of runs of unchanged presets, by (experiment, preset), in the order of their seeds."""
    summaries: dict[tuple[str, str], list[Summary]] = {}
    for run in runs.values():
        if not changes(run.summary):
            summaries.setdefault((run.summary.experiment, run.summary.preset), []).append(run.summary)
    return {key: sorted(group, key=lambda s: s.seed) for key, group in summaries.items()}


def changes(summary: Summary) -> set[str]:
    """What a run changed in its preset, besides what all kept runs do."""
    return set(summary.overrides) - {SIDE_BY_SIDE}
