"""The paper's tables, made of the summaries of kept runs, the paper's own numbers beside ours."""

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from rankone.metrics import wilson
from rankone.paper.plan import EXPERIMENTS, RESIDUAL, TMS, splitting_runs
from rankone.runs.config import PRESETS, experiment_config
from rankone.runs.kept import KeptRun, groups
from rankone.runs.summary import Summary


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


MEASURES = {
    "sum": "sum is off by",
    "rounded": "rounded",
    "attack_20": "attack",
    "union_16": "union with 16",
    "deletion": "deletion",
}
"""What a recovered decomposition must hold under, by its name in `Summary.relative`."""
AS_MASKS = {"sum": "ones", "rounded": "rounded"}
"""The measures that earlier runs have, too, as divergences under a mask source."""


def table1(runs: Mapping[str, KeptRun]) -> Table:
    """The paper's Table 1."""
    rows = []
    for name, preset, seeds in _groups(runs, TMS):
        paper = experiment_config(name).paper_reports
        ours = [_spread([getattr(run, key) for run in seeds]) for key in ("mmcs", "ml2r")]
        theirs = [f"{paper[key]:.3f} ± {paper[f'{key}_deviation']:.3f}" for key in ("mmcs", "ml2r")]
        rows.append((name, preset, str(len(seeds)), ours[0], theirs[0], ours[1], theirs[1]))
    return Table(
        "Table 1: how the subcomponents of W compare with its columns",
        "Mean and standard deviation over seeds, over alive subcomponents (those that are important on "
        "some datapoint or probe).",
        ("experiment", "preset", "seeds", "MMCS", "paper", "ML2R", "paper"),
        rows,
    )


def recovery(runs: Mapping[str, KeptRun]) -> Table:
    """Which seeds were recovered, of every experiment."""
    rows = []
    for name, preset, seeds in _groups(runs, EXPERIMENTS):
        failures = [f"{run.seed} ({run.errors})" for run in seeds if not run.recovered]
        minutes = statistics.median(run.wall_seconds or 0.0 for run in seeds) / 60
        share, failed = _share(seeds), ", ".join(failures) or "none"
        held = [_worst(seeds, measure) for measure in MEASURES]
        rows.append((name, preset, f"{seeds[0].steps:,}", share, failed, *held, f"{minutes:.1f}"))
    return Table(
        "Recovery: seeds without a single error in any matrix",
        "The share of recovered seeds with its Wilson 95 % interval; failed seeds with the number of "
        "their errors; how far the network is from the target, relative to removing everything, in the "
        "worst seed: made of all subcomponents, of the important ones alone, under an attack of 20 steps, "
        "of those important on it or on 16 other datapoints, and without those that are never important "
        "(- where a run was made before that was measured); median minutes of a run on one thread, beside "
        "other runs.",
        (
            "experiment",
            "preset",
            "steps",
            "recovered",
            "failed seeds (errors)",
            *MEASURES.values(),
            "minutes",
        ),
        rows,
    )


def subcomponents(runs: Mapping[str, KeptRun]) -> Table:
    """How many subcomponents each matrix came back as."""
    rows = []
    for name, preset, seeds in _groups(runs, EXPERIMENTS):
        alive = []
        for layer in seeds[0].n_alive:
            low, high = (choose(run.n_alive[layer] for run in seeds) for choose in (min, max))
            alive.append(f"{layer} {low}" + (f" to {high}" if high > low else ""))
        paper = ", ".join(str(check.expected) for check in seeds[0].checks.values())
        rows.append((name, preset, str(len(seeds)), ", ".join(alive), paper))
    return Table(
        "Subcomponents: how many of each matrix are alive",
        "Alive means important (above 0.1) on some datapoint of eight batches or on the probe, however "
        "rarely; fewest to most over seeds.",
        ("experiment", "preset", "seeds", "alive", "paper"),
        rows,
    )


def contributions(runs: Mapping[str, KeptRun]) -> Table:
    """How well neuron contributions of single subcomponents match the target's."""
    digits = {"correlation": 4, "slope": 3, "largest_deviation": 3, "largest_contribution": 3}
    rows = []
    for name, preset, seeds in _groups(runs, RESIDUAL):
        matches = [run.details["neuron_contributions"] for run in seeds]
        numbers = [_spread([match[key] for match in matches], n) for key, n in digits.items()]
        rows.append((name, preset, str(len(seeds)), *numbers))
    return Table(
        "Neuron contributions: single subcomponents of W_in against the target",
        "Over all features and neurons. A slope above 1 means that contributions of single "
        "subcomponents are larger than the target's, as the paper sees with two layers.",
        ("experiment", "preset", "seeds", *(key.replace("_", " ") for key in digits)),
        rows,
    )


def splitting(runs: Mapping[str, KeptRun]) -> Table:
    """Whether more subcomponents are used when more are offered."""
    rows = []
    for preset in PRESETS:
        specs = [spec for spec in splitting_runs(preset) if spec.name in runs]
        compared = {spec.experiment for spec in specs if spec.overrides}
        for spec in specs:
            if spec.experiment not in compared:
                continue
            run = runs[spec.name].summary
            offered = next(iter(runs[spec.name].config.layers.values()))
            alive = ", ".join(f"{layer} {n}" for layer, n in run.n_alive.items())
            expected = ", ".join(str(check.expected) for check in run.checks.values())
            verdict = "yes" if run.recovered else "no"
            rows.append((spec.experiment, preset, str(offered), alive, expected, verdict))
    return Table(
        "Feature splitting: subcomponents that are alive when more are offered",
        "C is the number offered for each matrix, 1, 2 and 4 times the usual; seed 0.",
        ("experiment", "preset", "C", "alive", "expected", "recovered"),
        rows,
    )


TABLES: dict[str, Callable[[Mapping[str, KeptRun]], Table]] = {
    "table1": table1,
    "recovery": recovery,
    "subcomponents": subcomponents,
    "contributions": contributions,
    "splitting": splitting,
}


def make_tables(what: str, runs: Mapping[str, KeptRun]) -> list[Table]:
    """The table `what`, or all of them, as far as there are runs to put in."""
    tables = [make(runs) for name, make in TABLES.items() if what in ("all", name)]
    return [table for table in tables if table.rows]


def _groups(runs: Mapping[str, KeptRun], names: Sequence[str]) -> list[tuple[str, str, list[Summary]]]:
    """(experiment, preset, runs in the order of their seeds) of presets as they are."""
    kept = groups(runs)
    return [
        (name, preset, kept[name, preset]) for name in names for preset in PRESETS if (name, preset) in kept
    ]


def _spread(values: Sequence[float], digits: int = 3) -> str:
    deviation = f" ± {statistics.stdev(values):.{digits}f}" if len(values) > 1 else ""
    return f"{statistics.mean(values):.{digits}f}{deviation}"


def _worst(runs: Sequence[Summary], measure: str) -> str:
    """A measure in the worst of some runs; a dash unless all of them have it."""
    found = [_measured(run, measure) for run in runs]
    known = [share for share in found if share is not None]
    return f"{max(known):.1%}" if len(known) == len(found) else "-"


def _measured(run: Summary, measure: str) -> float | None:
    if run.relative:
        return run.relative.get(measure)
    divergence, scale = (run.reconstruction.get(of) for of in (AS_MASKS.get(measure, ""), "zero"))
    return divergence / scale if divergence is not None and scale else None


def _share(runs: Sequence[Summary]) -> str:
    good = sum(bool(run.recovered) for run in runs)
    low, high = wilson(good, len(runs))
    return f"{good} of {len(runs)} ({low:.0%} to {high:.0%})"
