"""The paper's tables and figures: which runs each needs, and how it is made from what is kept of them (stored.py).

A `Wanted` is one run. `rankone reproduce` makes the runs that are missing and then calls `make`, which only reads kept runs: the same call
redraws everything from the repository's own results/.
"""

import shlex
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rankone.errors import ConfigError, RankoneError, near_matches
from rankone.files import write_atomic
from rankone.metrics import wilson
from rankone.report import plots as plot
from rankone.runs.config import PRESETS, ExperimentConfig, experiment_config, real_differences
from rankone.runs.kept import SIDE_BY_SIDE, Stored, changes, groups, keep
from rankone.runs.many import ParallelRun
from rankone.runs.run import Summary, read_config
from rankone.targets.resid_mlp import ResidualTarget, blocks_in_words, match_in_words

TMS = ("tms_5-2", "tms_5-2-id", "tms_40-10", "tms_40-10-id")
RESIDUAL = ("resid_mlp1", "resid_mlp2", "resid_mlp3")
EXPERIMENTS = TMS + RESIDUAL
SEEDS = {
    "default": dict(zip(EXPERIMENTS, (10, 10, 5, 5, 5, 3, 1), strict=True)),
    "paper": dict(zip(EXPERIMENTS, (3, 3, 1, 1, 3, 1, 1), strict=True)),
}
"""How many seeds of each experiment are run unless another number is asked for."""
BETA3 = "losses.importance_minimality.coefficient"
BETA3_FACTORS = (0.01, 0.1, 1, 10, 100)
"""The importance coefficients of the figure that varies it, relative to the right one."""
C_FACTORS = (1, 2, 4)
"""How many times the usual number of subcomponents the test for feature splitting offers."""
SPLIT = ("tms_5-2-id", "tms_40-10-id")


@dataclass(frozen=True)
class Wanted:
    """One run that a table or figure needs."""

    experiment: str
    preset: str = "default"
    seed: int = 0
    overrides: tuple[str, ...] = ()
    label: str = ""
    """What is special about it, for its name."""

    @property
    def name(self) -> str:
        return f"{self.experiment}-{self.preset}-seed{self.seed}{f'-{self.label}' if self.label else ''}"

    @property
    def config(self) -> ExperimentConfig:
        changes = [*self.overrides, SIDE_BY_SIDE]
        return experiment_config(self.experiment, preset=self.preset, seed=self.seed, assignments=changes)

    @property
    def command(self) -> str:
        """How to make this run, and no other."""
        words = ["rankone", "run", self.experiment, "--preset", self.preset, "--seed", str(self.seed)]
        return shlex.join([*words, *self.overrides, SIDE_BY_SIDE])


def beta3_runs(preset: str) -> list[Wanted]:
    right = experiment_config("resid_mlp1", preset=preset).losses["importance_minimality"].coefficient
    return [
        Wanted("resid_mlp1", preset)
        if factor == 1
        else Wanted("resid_mlp1", preset, 0, (f"{BETA3}={right * factor:g}",), f"beta3-{right * factor:g}")
        for factor in BETA3_FACTORS
    ]


def splitting_runs(preset: str) -> list[Wanted]:
    runs = []
    for name in SPLIT:
        usual = experiment_config(name, preset=preset).layers
        for factor in C_FACTORS:
            more = tuple(f"layers.{layer}={factor * C}" for layer, C in usual.items()) if factor > 1 else ()
            runs.append(Wanted(name, preset, 0, more, f"C-{factor}x" if factor > 1 else ""))
    return runs


def seed_runs(names: Iterable[str], preset: str, seeds: int | None) -> list[Wanted]:
    return [Wanted(name, preset, s) for name in names for s in range(seeds or SEEDS[preset][name])]


@dataclass(frozen=True)
class Table:
    """A table as rows of text."""

    title: str
    note: str
    head: Sequence[str]
    rows: Sequence[Sequence[str]]

    def markdown(self) -> str:
        lines = ["| " + " | ".join(self.head) + " |", "|" + "---|" * len(self.head)]
        lines += ["| " + " | ".join(row) + " |" for row in self.rows]
        return f"## {self.title}\n\n{self.note}\n\n" + "\n".join(lines) + "\n"


def _spread(values: Sequence[float], digits: int = 3) -> str:
    deviation = f" ± {statistics.stdev(values):.{digits}f}" if len(values) > 1 else ""
    return f"{statistics.mean(values):.{digits}f}{deviation}"


def _share(runs: Sequence[Summary]) -> str:
    good = sum(bool(run["recovered"]) for run in runs)
    low, high = wilson(good, len(runs))
    return f"{good} of {len(runs)} ({low:.0%} to {high:.0%})"


def _by_group(runs: Mapping[str, Stored], names: Sequence[str]) -> list[tuple[str, str, list[Summary]]]:
    found = groups(runs)
    return [(name, preset, found[name, preset]) for name in names for preset in PRESETS if (name, preset) in found]


def table1(runs: Mapping[str, Stored]) -> Table:
    """The paper's Table 1."""
    rows = []
    for name, preset, of in _by_group(runs, TMS):
        paper = experiment_config(name).paper_reports
        ours = [_spread([run[key] for run in of]) for key in ("mmcs", "ml2r")]
        theirs = [f"{paper[key]:.3f} ± {paper[f'{key}_deviation']:.3f}" for key in ("mmcs", "ml2r")]
        rows.append((name, preset, str(len(of)), ours[0], theirs[0], ours[1], theirs[1]))
    return Table(
        "Table 1: how the subcomponents of W compare with its columns",
        "Mean and standard deviation over seeds, over alive subcomponents (those that are important on some datapoint or probe).",
        ("experiment", "preset", "seeds", "MMCS", "paper", "ML2R", "paper"),
        rows,
    )


def recovery(runs: Mapping[str, Stored]) -> Table:
    """Which seeds were recovered, of every experiment."""
    rows = []
    for name, preset, of in _by_group(runs, EXPERIMENTS):
        failed = [
            f"{run['seed']} ({sum(c['errors'] for c in run['checks'].values())})" for run in of if not run["recovered"]
        ]
        minutes = statistics.median(run["wall_seconds"] for run in of) / 60
        off = max(run["reconstruction"]["ones"] / run["reconstruction"]["zero"] for run in of)
        failures = ", ".join(failed) or "none"
        rows.append((name, preset, f"{of[0]['steps']:,}", _share(of), failures, f"{off:.1%}", f"{minutes:.1f}"))
    return Table(
        "Recovery: seeds without a single error in any matrix",
        "The share of recovered seeds with its Wilson 95 % interval; failed seeds with the number of their errors; how far the network made of all "
        "subcomponents is from the target, relative to removing everything, in the worst seed; median minutes of a run on one thread, beside other runs.",
        ("experiment", "preset", "steps", "recovered", "failed seeds (errors)", "sum is off by", "minutes"),
        rows,
    )


def subcomponents(runs: Mapping[str, Stored]) -> Table:
    """How many subcomponents each matrix came back as."""
    rows = []
    for name, preset, of in _by_group(runs, EXPERIMENTS):
        alive = []
        for layer in of[0]["n_alive"]:
            low, high = (choose(run["n_alive"][layer] for run in of) for choose in (min, max))
            alive.append(f"{layer} {low}" + (f" to {high}" if high > low else ""))
        paper = ", ".join(str(check["expected"]) for check in of[0]["checks"].values())
        rows.append((name, preset, str(len(of)), ", ".join(alive), paper))
    return Table(
        "Subcomponents: how many of each matrix are alive",
        "Alive means important (above 0.1) on some datapoint of eight batches or on the probe, however rarely; fewest to most over seeds.",
        ("experiment", "preset", "seeds", "alive", "paper"),
        rows,
    )


def contributions(runs: Mapping[str, Stored]) -> Table:
    """How well neuron contributions of single subcomponents match the target's."""
    rows = []
    for name, preset, of in _by_group(runs, RESIDUAL):
        found = [run["details"]["neuron_contributions"] for run in of]
        digits = {"correlation": 4, "slope": 3, "largest_deviation": 3, "largest_contribution": 3}
        numbers = [_spread([match[key] for match in found], n) for key, n in digits.items()]
        rows.append((name, preset, str(len(of)), *numbers))
    return Table(
        "Neuron contributions: single subcomponents of W_in against the target",
        "Over all features and neurons. A slope above 1 means that contributions of single subcomponents are larger than the target's, as the paper sees with two layers.",
        ("experiment", "preset", "seeds", "correlation", "slope", "largest deviation", "largest contribution"),
        rows,
    )


def splitting(runs: Mapping[str, Stored]) -> Table:
    """Whether more subcomponents are used when more are offered."""
    rows = []
    for preset in PRESETS:
        kept = [wanted for wanted in splitting_runs(preset) if wanted.name in runs]
        compared = {wanted.experiment for wanted in kept if wanted.overrides}
        for wanted in kept:
            if wanted.experiment not in compared:
                continue
            run = runs[wanted.name].summary
            offered = next(iter(runs[wanted.name].config.layers.values()))
            alive = ", ".join(f"{layer} {n}" for layer, n in run["n_alive"].items())
            expected = ", ".join(str(check["expected"]) for check in run["checks"].values())
            rows.append((wanted.experiment, preset, str(offered), alive, expected, "yes" if run["recovered"] else "no"))
    return Table(
        "Feature splitting: subcomponents that are alive when more are offered",
        "C is the number offered for each matrix, 1, 2 and 4 times the usual; seed 0.",
        ("experiment", "preset", "C", "alive", "expected", "recovered"),
        rows,
    )


@dataclass(frozen=True)
class TableKind:
    """A table: the runs it is about, and how it is made of all that are kept."""

    runs: Callable[[str, int | None], list[Wanted]]
    """(preset, seeds) -> runs."""
    make: Callable[[Mapping[str, Stored]], Table]


TABLES: dict[str, TableKind] = {
    "table1": TableKind(lambda preset, seeds: seed_runs(TMS, preset, seeds), table1),
    "recovery": TableKind(lambda preset, seeds: seed_runs(EXPERIMENTS, preset, seeds), recovery),
    "subcomponents": TableKind(lambda preset, seeds: seed_runs(EXPERIMENTS, preset, seeds), subcomponents),
    "contributions": TableKind(lambda preset, seeds: seed_runs(RESIDUAL, preset, seeds), contributions),
    "splitting": TableKind(lambda preset, seeds: splitting_runs(preset), splitting),
}

Drawn = dict[str, Any]
"""File name without its ending -> figure."""


def draw_tms(run: Stored) -> Drawn:
    """Weight columns or matrices, and network diagrams, of one of the four models of superposition."""
    experiment, tied = run.config.experiment, run.config.tied
    own = {name: view for name, view in run.views.items() if name not in tied}
    expected = {name: check["expected"] for name, check in run.summary["checks"].items()}
    drawn: Drawn = {}
    for name, view in own.items():
        shown = min(expected[name] + 1, 7)
        if plot.is_plane(view):
            drawn[f"{experiment}-columns-{name}"] = plot.weight_columns(view, shown)
        else:
            drawn[f"{experiment}-matrices-{name}"] = plot.matrices(view, shown)
    parts = plot.parts_to_show(own, expected)
    return drawn | {f"{experiment}-networks": plot.network_diagrams(run.views, parts, tied)}


def draw_importances(run: Stored) -> Drawn:
    labels = {name: f"{name}: {check.errors} errors" for name, check in run.checks.items()}
    figure = plot.importance_heatmap(run.importances, run.checks, labels)
    return {f"{run.config.experiment}-importances": figure}


def draw_contributions(run: Stored) -> Drawn:
    """The first ten features as bars, and all of them as a scatter."""
    target, (model, parts) = run.config.target, run.contributions
    assert isinstance(target, ResidualTarget)
    note = match_in_words(run.summary["details"]["neuron_contributions"])
    scatter = plot.contribution_scatter(model, parts, blocks_in_words(model, parts, target.n_blocks), note)
    return {
        f"{run.config.experiment}-contributions": plot.contribution_bars(model, parts, target.n_blocks),
        f"{run.config.experiment}-scatter": scatter,
    }


def draw_beta3(runs: Sequence[Stored]) -> Drawn:
    found = []
    for run in runs:
        beta3 = run.config.losses["importance_minimality"].coefficient
        errors = sum(check.errors for check in run.checks.values())
        found.append((f"β3 = {beta3:.0e}, {errors} errors", run.importances, run.checks))
    return {"resid_mlp1-importances-by-beta3": plot.importances_by_setting(found)}


def draw_splitting(runs: Sequence[Stored]) -> Drawn:
    found: dict[str, dict[str, list[tuple[int, int, int]]]] = {}
    for run in runs:
        layers = found.setdefault(run.summary["experiment"], {})
        for name, check in run.summary["checks"].items():
            if name in run.config.tied:
                continue
            point = (run.config.layers[name], run.summary["n_alive"][name], check["expected"])
            layers.setdefault(name, []).append(point)
    return {"splitting": plot.alive_by_capacity(found)}


@dataclass(frozen=True)
class FigureKind:
    """A figure: the runs it shows, and how they are drawn."""

    runs: Callable[[str], list[Wanted]]
    draw: Callable[[list[Stored]], Drawn]
    of_summaries: bool = False
    """Whether summaries are all it is drawn from."""


def _of_one(experiment: str, draw: Callable[[Stored], Drawn]) -> FigureKind:
    return FigureKind(lambda preset: [Wanted(experiment, preset)], lambda runs: draw(runs[0]))


FIGURES: dict[str, FigureKind] = {
    **{name: _of_one(name, draw_tms) for name in TMS},
    **{f"importances-{name}": _of_one(name, draw_importances) for name in EXPERIMENTS},
    **{f"contributions-{name}": _of_one(name, draw_contributions) for name in RESIDUAL},
    "beta3": FigureKind(beta3_runs, draw_beta3),
    "splitting": FigureKind(splitting_runs, draw_splitting, of_summaries=True),
}


def wanted_for(what: str, name: str | None, preset: str, seeds: int | None) -> list[Wanted]:
    """The runs that a table, a figure or everything needs, the cheap ones first, each once."""
    if preset not in PRESETS:
        raise ConfigError(f"There is no preset {preset!r}. {near_matches(preset, PRESETS)}")
    if what == "figure":
        if seeds is not None:
            raise ConfigError("A figure shows seed 0; --seeds is for tables and for `all`.")
        if name is None:
            raise ConfigError(f"Name a figure: {', '.join(FIGURES)}.")
        if name not in FIGURES:
            raise ConfigError(f"There is no figure {name!r}. {near_matches(name, FIGURES)}")
        return FIGURES[name].runs(preset)
    if what not in (*TABLES, "all"):
        hint = f"Did you mean `figure {what}`?" if what in FIGURES else near_matches(what, [*TABLES, "figure", "all"])
        raise ConfigError(f"There is no table {what!r} to reproduce. {hint}")
    if name is not None:
        raise ConfigError(f"{what!r} takes no name; only `rankone reproduce figure NAME` does.")
    if what == "splitting" and seeds is not None:
        raise ConfigError("Feature splitting is tested on seed 0; --seeds is for the other tables and for `all`.")
    found = [run for table in TABLES if what in ("all", table) for run in TABLES[table].runs(preset, seeds)]
    if what == "all":
        found += [run for figure in FIGURES.values() for run in figure.runs(preset)]
        found = [run for run in found if _belongs_to_all(run)]
    return sorted(dict.fromkeys(found), key=lambda run: EXPERIMENTS.index(run.experiment))


def _belongs_to_all(run: Wanted) -> bool:
    """Other coefficients and other C are studied once, with the default preset, unless one asks for them by name."""
    return run.preset == "default" or not run.overrides


def missing_runs(wanted: Sequence[Wanted], out: Path) -> list[ParallelRun]:
    """The runs that `out` does not keep yet. What it keeps must have been made with the settings of today."""
    todo: list[ParallelRun] = []
    differing: dict[str, str] = {}
    for run in wanted:
        begun = out / "runs" / run.name
        found: list[str] = []
        for folder in (out / run.name, begun):
            with suppress(RankoneError):  # a damaged one does not count as kept, and is refused when it is resumed
                found += real_differences(read_config(folder), run.config)
        if found:
            differing[run.name] = "; ".join(dict.fromkeys(found))
        elif not is_kept(run, out):
            todo.append(ParallelRun(run.config, begun, run.name))
    if differing:
        name, why = next(iter(differing.items()))
        raise ConfigError(
            f"{len(differing)} of the runs in {out} were begun with other settings: {', '.join(differing)}. ({name}: {why}.) "
            f"Choose another --out, or delete these folders, in {out} and in {out / 'runs'}, to make them again."
        )
    return todo


def is_kept(wanted: Wanted, out: Path) -> bool:
    """Whether `out` keeps all that is needed of a run."""
    kept = Stored(out / wanted.name)
    return kept.objection is None and (kept.has_figures or not shows_figures(wanted))


def shows_figures(wanted: Wanted) -> bool:
    """Whether some figure shows this run, so that its figure data is worth keeping."""
    return any(wanted in kind.runs(wanted.preset) for kind in FIGURES.values() if not kind.of_summaries)


def keeper(wanted: Sequence[Wanted], out: Path) -> Callable[[Sequence[ParallelRun]], None]:
    """An observer that keeps what matters of each run as soon as it is done; one that cannot be kept has failed, and the others go on."""
    by_name = {run.name: run for run in wanted}
    seen: set[str] = set()

    def keep_finished(runs: Sequence[ParallelRun]) -> None:
        for one in runs:
            if one.state != "done" or one.label in seen:
                continue
            seen.add(one.label)
            run = by_name[one.label]
            try:
                keep(one.out, out / run.name, command=run.command, figures=shows_figures(run))
            except (RankoneError, OSError) as error:
                one.state = "failed"
                one.message = f"{error} It is done but cannot be kept; delete {one.out} to make it again."

    return keep_finished


def left_out(kept: Mapping[str, Stored]) -> dict[str, str]:
    """Folders that are not counted, and why."""
    found: dict[str, str] = {}
    special = {run.name: run for preset in PRESETS for run in (*beta3_runs(preset), *splitting_runs(preset))}
    for name, run in kept.items():
        if run.objection is not None:
            found[name] = run.objection
            continue
        said = run.summary
        proper = special.get(name, Wanted(said["experiment"], said["preset"], said["seed"]))
        same = (said["experiment"], said["preset"], said["seed"]) == (proper.experiment, proper.preset, proper.seed)
        if name != proper.name or changes(said) != set(proper.overrides) or not same:
            found[name] = "its name is not that of the run it holds"
    return found


@dataclass(frozen=True)
class Made:
    """What came of kept runs."""

    tables: list[Table]
    figures: list[Path]
    undrawn: dict[str, list[str]]
    """Figures that lack something -> the runs that are missing, or kept without figure data."""
    left_out: dict[str, str]
    """Folders that are not counted -> why."""


def make(what: str, name: str | None, presets: Sequence[str], kept: Mapping[str, Stored], out: Path) -> Made:
    """Make and write tables and figures of those kept runs that have one of these presets and mean today what they meant."""
    not_counted = left_out(kept)
    runs = {n: run for n, run in kept.items() if n not in not_counted and run.summary["preset"] in presets}
    tables = [kind.make(runs) for table, kind in TABLES.items() if what in ("all", table)]
    tables = [table for table in tables if table.rows]
    if tables:
        write_atomic(out / f"{'tables' if what == 'all' else what}.md", "\n".join(table.markdown() for table in tables))
    chosen = {"figure": [name or ""], "all": list(FIGURES), "splitting": ["splitting"]}.get(what, [])
    files: list[Path] = []
    undrawn: dict[str, list[str]] = {}
    for preset in presets:
        if not any(run.summary["preset"] == preset for run in runs.values()):
            continue
        ending = "" if preset == "default" else f"-{preset}"
        for figure in chosen:
            kind = FIGURES[figure]
            needed = [run.name for run in kind.runs(preset)]
            absent = [n for n in needed if n not in runs or not (kind.of_summaries or runs[n].has_figures)]
            asked_for = what != "all" and len(presets) == 1
            if absent and not asked_for and not all(_belongs_to_all(run) for run in kind.runs(preset)):
                continue
            if absent:
                undrawn[figure + ending] = absent
                continue
            for stem, drawn in kind.draw([runs[n] for n in needed]).items():
                path = out / "figures" / f"{stem}{ending}.svg"
                write_atomic(path, plot.to_svg(drawn, stem))
                files.append(path)
    return Made(tables, files, undrawn, not_counted)
