"""Which runs each table and figure of the paper needs, and which of them have yet to be made.

A `RunSpec` is one run. `rankone reproduce` makes the runs that are missing (full run directories in
OUT/work), keeps what matters of each as soon as it is done (OUT/runs), and then makes tables and
figures of kept runs only: the same call redraws everything from the repository's own results/.
"""

import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from rankone.errors import ConfigError, RankoneError, near_matches
from rankone.files import RunDirectory
from rankone.runs.config import PRESETS, RunConfig, experiment_config, real_differences
from rankone.runs.kept import SIDE_BY_SIDE, KeptRun, changes, keep
from rankone.runs.many import MOST_SEEDS, ParallelRun, bounded
from rankone.runs.run import read_config

TMS = ("tms_5-2", "tms_5-2-id", "tms_40-10", "tms_40-10-id")
RESIDUAL = ("resid_mlp1", "resid_mlp2", "resid_mlp3")
EXPERIMENTS = TMS + RESIDUAL
PRESET = "tuned"
"""What is reproduced unless another preset is named."""
SEEDS = {
    "recipe": dict(zip(EXPERIMENTS, (5, 5, 5, 5, 3, 3, 2), strict=True)),
    "tuned": dict(zip(EXPERIMENTS, (10, 10, 5, 5, 5, 3, 1), strict=True)),
    "paper": dict(zip(EXPERIMENTS, (3, 3, 1, 1, 3, 1, 1), strict=True)),
}
"""How many seeds of each experiment are run unless another number is asked for."""
MINIMALITY = "losses.importance_minimality"
BETA3_FACTORS = (0.01, 0.1, 1.0, 10.0, 100.0)
"""The importance coefficients of the figure that varies it, relative to the right one."""
C_FACTORS = (1, 2, 4)
"""How many times the usual number of subcomponents the test for feature splitting offers."""
SPLIT = ("tms_5-2-id", "tms_40-10-id")


@dataclass(frozen=True)
class RunSpec:
    """One run that a table or figure needs."""

    experiment: str
    preset: str = PRESET
    seed: int = 0
    overrides: tuple[str, ...] = ()
    label: str = ""
    """What is special about it, for its name."""

    @property
    def name(self) -> str:
        return f"{self.experiment}-{self.preset}-seed{self.seed}{f'-{self.label}' if self.label else ''}"

    @property
    def config(self) -> RunConfig:
        changes = [*self.overrides, SIDE_BY_SIDE]
        return experiment_config(self.experiment, preset=self.preset, seed=self.seed, assignments=changes)

    @property
    def command(self) -> str:
        """How to make this run, and no other."""
        words = ["rankone", "run", self.experiment, "--preset", self.preset, "--seed", str(self.seed)]
        return shlex.join([*words, *self.overrides, SIDE_BY_SIDE])

    @property
    def by_name_only(self) -> bool:
        """Whether it is made only if asked for by name: other coefficients and other C are studied
        once, with the preset that is reproduced."""
        return bool(self.overrides) and self.preset != PRESET


def beta3_runs(preset: str) -> list[RunSpec]:
    """One layer with other coefficients; one that moves is multiplied at both of its ends."""
    loss = experiment_config("resid_mlp1", preset=preset).losses["importance_minimality"]
    ends = {key: getattr(loss, key) for key in ("coefficient", "coefficient_start")}

    def scaled(factor: float) -> RunSpec:
        overrides = [f"{MINIMALITY}.{key}={end * factor:g}" for key, end in ends.items() if end is not None]
        label = f"beta3-{ends['coefficient'] * factor:g}"
        return RunSpec("resid_mlp1", preset, 0, tuple(overrides), label)

    return [RunSpec("resid_mlp1", preset) if factor == 1 else scaled(factor) for factor in BETA3_FACTORS]


def splitting_runs(preset: str) -> list[RunSpec]:
    runs = []
    for name in SPLIT:
        usual = experiment_config(name, preset=preset).layers
        for factor in C_FACTORS:
            more = tuple(f"layers.{layer}={factor * C}" for layer, C in usual.items()) if factor > 1 else ()
            runs.append(RunSpec(name, preset, 0, more, f"C-{factor}x" if factor > 1 else ""))
    return runs


def seed_runs(names: Iterable[str], preset: str, seeds: int | None) -> list[RunSpec]:
    return [RunSpec(name, preset, s) for name in names for s in range(seeds or SEEDS[preset][name])]


TABLE_RUNS: dict[str, Callable[[str, int | None], list[RunSpec]]] = {
    "table1": lambda preset, seeds: seed_runs(TMS, preset, seeds),
    "recovery": lambda preset, seeds: seed_runs(EXPERIMENTS, preset, seeds),
    "subcomponents": lambda preset, seeds: seed_runs(EXPERIMENTS, preset, seeds),
    "contributions": lambda preset, seeds: seed_runs(RESIDUAL, preset, seeds),
    "splitting": lambda preset, seeds: splitting_runs(preset),
}
"""Table -> the runs it is about, of a preset and a number of seeds. tables.py makes it."""


@dataclass(frozen=True)
class FigureRuns:
    """The runs that a figure shows."""

    of: Callable[[str], list[RunSpec]]
    """Preset -> runs."""
    data: bool = True
    """Whether it shows their figure data, not their summaries only."""


def _one(experiment: str) -> FigureRuns:
    return FigureRuns(lambda preset: [RunSpec(experiment, preset)])


FIGURE_RUNS: dict[str, FigureRuns] = {
    **{name: _one(name) for name in TMS},
    **{f"importances-{name}": _one(name) for name in EXPERIMENTS},
    **{f"contributions-{name}": _one(name) for name in RESIDUAL},
    "beta3": FigureRuns(beta3_runs),
    "splitting": FigureRuns(splitting_runs, data=False),
}
"""Figure -> the runs it shows. figures.py draws it."""


def runs_for(what: str, name: str | None, preset: str, seeds: int | None) -> list[RunSpec]:
    """The runs that a table, a figure or everything needs, the cheap ones first, each once."""
    if preset not in PRESETS:
        raise ConfigError(f"There is no preset {preset!r}. {near_matches(preset, PRESETS)}")
    if seeds is not None:
        bounded("--seeds", seeds, MOST_SEEDS)
    if what == "figure":
        if seeds is not None:
            raise ConfigError("A figure shows seed 0; --seeds is for tables and for `all`.")
        if name is None:
            raise ConfigError(f"Name a figure: {', '.join(FIGURE_RUNS)}.")
        if name not in FIGURE_RUNS:
            raise ConfigError(f"There is no figure {name!r}. {near_matches(name, FIGURE_RUNS)}")
        return FIGURE_RUNS[name].of(preset)
    if what not in (*TABLE_RUNS, "all"):
        others = near_matches(what, [*TABLE_RUNS, "figure", "all"])
        hint = f"Did you mean `figure {what}`?" if what in FIGURE_RUNS else others
        raise ConfigError(f"There is no table {what!r} to reproduce. {hint}")
    if name is not None:
        raise ConfigError(f"{what!r} takes no name; only `rankone reproduce figure NAME` does.")
    if what == "splitting" and seeds is not None:
        raise ConfigError(
            "Feature splitting is tested on seed 0; --seeds is for the other tables and for `all`."
        )
    runs = [run for table in TABLE_RUNS if what in ("all", table) for run in TABLE_RUNS[table](preset, seeds)]
    if what == "all":
        runs += [run for figure in FIGURE_RUNS.values() for run in figure.of(preset)]
        runs = [run for run in runs if not run.by_name_only]
    return sorted(dict.fromkeys(runs), key=lambda run: EXPERIMENTS.index(run.experiment))


def missing_runs(specs: Sequence[RunSpec], out: Path) -> list[ParallelRun]:
    """The runs that `out` does not keep yet. What is there must have been made with the settings of
    today."""
    missing: list[ParallelRun] = []
    differing: dict[str, str] = {}
    for spec in specs:
        work = out / "work" / spec.name
        differences: list[str] = []
        for folder in (out / "runs" / spec.name, work):
            # A damaged one does not count as kept, and is refused when it is resumed.
            with suppress(RankoneError):
                differences += real_differences(read_config(RunDirectory.open(folder)), spec.config)
        if differences:
            differing[spec.name] = "; ".join(dict.fromkeys(differences))
        elif not is_kept(spec, out):
            missing.append(ParallelRun(spec.config, work, spec.name))
    if differing:
        name, why = next(iter(differing.items()))
        raise ConfigError(
            f"{len(differing)} of the runs in {out} were started with other settings: "
            f"{', '.join(differing)}. ({name}: {why}.) Choose another --out, or delete these folders, "
            f"in {out / 'runs'} and in {out / 'work'}, to make them again."
        )
    return missing


def is_kept(spec: RunSpec, out: Path) -> bool:
    """Whether `out` keeps all that is needed of a run."""
    run = KeptRun(out / "runs" / spec.name)
    return run.objection is None and (run.has_figures or not needs_figure_data(spec))


def needs_figure_data(spec: RunSpec) -> bool:
    """Whether some figure shows this run, so that its figure data is worth keeping."""
    return any(spec in figure.of(spec.preset) for figure in FIGURE_RUNS.values() if figure.data)


def keeper(specs: Sequence[RunSpec], out: Path) -> Callable[[Sequence[ParallelRun]], None]:
    """An observer that keeps what matters of each run as soon as it is done.

    A run that cannot be kept has failed; the others go on.
    """
    by_name = {spec.name: spec for spec in specs}
    handled: set[str] = set()

    def keep_finished(runs: Sequence[ParallelRun]) -> None:
        for run in runs:
            if run.state != "done" or run.label in handled:
                continue
            handled.add(run.label)
            spec = by_name[run.label]
            try:
                figures = needs_figure_data(spec)
                keep(run.out, out / "runs" / spec.name, command=spec.command, figures=figures)
            except (RankoneError, OSError) as error:
                run.state = "failed"
                run.message = f"{error} It is done but cannot be kept; delete {run.out} to make it again."

    return keep_finished


def left_out(kept: Mapping[str, KeptRun]) -> dict[str, str]:
    """Kept runs that are not counted, and why."""
    reasons: dict[str, str] = {}
    special = {run.name: run for preset in PRESETS for run in (*beta3_runs(preset), *splitting_runs(preset))}
    for name, run in kept.items():
        if run.objection is not None:
            reasons[name] = run.objection
            continue
        summary = run.summary
        spec = special.get(name, RunSpec(summary.experiment, summary.preset, summary.seed))
        same = (summary.experiment, summary.preset, summary.seed) == (spec.experiment, spec.preset, spec.seed)
        if name != spec.name or changes(summary) != set(spec.overrides) or not same:
            reasons[name] = "its name is not that of the run it holds"
    return reasons
