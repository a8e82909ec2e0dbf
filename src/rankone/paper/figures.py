"""The paper's figures, drawn from kept runs, and everything that can be made of kept runs at once."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rankone.files import RunDirectory
from rankone.paper.plan import EXPERIMENTS, FIGURE_RUNS, PRESET, RESIDUAL, TMS, left_out
from rankone.paper.tables import Table, make_tables
from rankone.report import plots
from rankone.report.canvas import Picture, to_svg
from rankone.runs.kept import KeptRun


def draw_weights(runs: Sequence[KeptRun]) -> list[Picture]:
    """Weight columns or matrices, and network diagrams, of one of the models of superposition."""
    (run,) = runs
    worth = {name: check.expected for name, check in run.summary.checks.items()}
    return plots.weight_pictures(run.views, run.config.tied or {}, worth)


def draw_importances(runs: Sequence[KeptRun]) -> list[Picture]:
    (run,) = runs
    return [plots.importance_picture(run.importances, run.checks, run.config.target.probe_in_words)]


def draw_contributions(runs: Sequence[KeptRun]) -> list[Picture]:
    """What the target's family draws of its own: of residual MLPs, neuron contributions."""
    (run,) = runs
    return run.figures()


def draw_beta3(runs: Sequence[KeptRun]) -> list[Picture]:
    settings = []
    for run in runs:
        beta3 = run.config.losses["importance_minimality"].coefficient
        settings.append((f"β3 = {beta3:.0e}, {run.summary.errors} errors", run.importances, run.checks))
    figure = plots.importances_by_setting(settings)
    return [Picture("importances-by-beta3", "Importances by coefficient", "", figure)]


def draw_splitting(runs: Sequence[KeptRun]) -> list[Picture]:
    experiments: dict[str, dict[str, list[tuple[int, int, int]]]] = {}
    for run in runs:
        layers = experiments.setdefault(run.summary.experiment, {})
        for name, check in run.summary.checks.items():
            if name not in (run.config.tied or {}):
                point = (run.config.layers[name], run.summary.n_alive[name], check.expected)
                layers.setdefault(name, []).append(point)
    figure = plots.alive_by_capacity(experiments)
    return [Picture("splitting", "Feature splitting", "", figure)]


FIGURES: dict[str, Callable[[Sequence[KeptRun]], list[Picture]]] = {
    **dict.fromkeys(TMS, draw_weights),
    **{f"importances-{name}": draw_importances for name in EXPERIMENTS},
    **{f"contributions-{name}": draw_contributions for name in RESIDUAL},
    "beta3": draw_beta3,
    "splitting": draw_splitting,
}
"""Figure -> how it is drawn of the runs that `plan.FIGURE_RUNS` names."""


@dataclass(frozen=True)
class Reproduction:
    """What was made of kept runs."""

    tables: list[Table]
    figures: list[Path]
    undrawn: dict[str, list[str]]
    """Figures that lack something -> the runs that are missing, or kept without figure data."""
    left_out: dict[str, str]
    """Kept runs that are not counted -> why."""


def make(
    what: str, name: str | None, presets: Sequence[str], kept: Mapping[str, KeptRun], out: RunDirectory
) -> Reproduction:
    """Make and write tables and figures of those kept runs that have one of these presets and mean
    today what they meant when they were made."""
    not_counted = left_out(kept)
    runs = {n: run for n, run in kept.items() if n not in not_counted and run.summary.preset in presets}
    tables = make_tables(what, runs)
    if tables:
        text = "\n".join(table.markdown() for table in tables)
        out.write(f"{'tables' if what == 'all' else what}.md", text)
    chosen = {"figure": [name or ""], "all": list(FIGURES), "splitting": ["splitting"]}.get(what, [])
    paths: list[Path] = []
    undrawn: dict[str, list[str]] = {}
    for preset in presets:
        if not any(run.summary.preset == preset for run in runs.values()):
            continue
        ending = "" if preset == PRESET else f"-{preset}"
        for figure in chosen:
            specs = FIGURE_RUNS[figure].of(preset)
            data = FIGURE_RUNS[figure].data
            absent = [s.name for s in specs if s.name not in runs or (data and not runs[s.name].has_figures)]
            asked_for = what != "all" and len(presets) == 1
            if absent and not asked_for and any(spec.by_name_only for spec in specs):
                continue
            if absent:
                undrawn[figure + ending] = absent
                continue
            of = "" if figure == "splitting" else f"{specs[0].experiment}-"
            for picture in FIGURES[figure]([runs[spec.name] for spec in specs]):
                stem = f"{of}{picture.name}"
                file = f"figures/{stem}{ending}.svg"
                out.write(file, to_svg(picture.figure, stem))
                paths.append(out.path / file)
    return Reproduction(tables, paths, undrawn, not_counted)
