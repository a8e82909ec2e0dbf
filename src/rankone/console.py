"""What people read of results: summaries, tables, verdicts, and several runs as they go.

terminal.py says how anything is written, progress.py shows one run.
"""

import json
import os
import time
import warnings
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from rich.console import Console
from rich.live import Live
from rich.padding import Padding
from rich.progress_bar import ProgressBar
from rich.table import Table

from rankone import progress
from rankone.clusters import Components
from rankone.compare import SAME, Comparison
from rankone.describe import brief, percent
from rankone.fast.compiled import MissingKernels, kernels
from rankone.findings import Diagnosis
from rankone.measures import ATTACK_STEPS
from rankone.metrics import wilson
from rankone.paper.figures import Reproduction
from rankone.paper.tables import Table as ResultTable
from rankone.plan import Plan
from rankone.progress import duration, pace
from rankone.report.page import can_report
from rankone.runs.config import PRESETS, RunConfig
from rankone.runs.many import ParallelRun
from rankone.runs.summary import Summary
from rankone.tables import cell_text
from rankone.terminal import Part, SafeConsole, errors, note, output, say, table, text
from rankone.verdict import verdict

MOST_LINES = 15
"""With more runs than this, only those that are running get a line."""
VERDICTS = {
    True: ("recovered", "green"),
    False: ("not recovered", "red"),
    None: ("no ground truth known", ""),
}
"""Whether a run was recovered -> words and their style."""
SHARES = {
    "sum": "sum",
    "importance": "importances as masks",
    "rounded": "important ones alone",
    "attack_20": "attack",
    "union_16": "union with 16",
    "deletion": "deletion",
}
"""Which shares of removing everything are printed, and their words."""


class ParallelDisplay:
    """Live progress of several runs: a line for each."""

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or errors
        self._live = Live(console=self._console, refresh_per_second=4)
        self._last_line = time.monotonic() - progress.SECONDS_BETWEEN_LINES
        self._reported: set[str] = set()

    def __enter__(self) -> "ParallelDisplay":
        if self._console.is_terminal:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._live.stop()

    def __call__(self, runs: Sequence[ParallelRun]) -> None:
        if self._console.is_terminal:
            self._live.update(self._table(runs))
            return
        for run in runs:
            if run.state in ("done", "failed", "interrupted") and run.label not in self._reported:
                self._reported.add(run.label)
                self._console.print(text(f"{run.label}: ", _state(run)[0]), soft_wrap=True)
        running = [run for run in runs if run.state == "running" and run.progress is not None]
        if running and time.monotonic() - self._last_line >= progress.SECONDS_BETWEEN_LINES:
            self._last_line = time.monotonic()
            line = "; ".join(f"{run.label} {_state(run)[0]}" for run in running)
            self._console.print(text(line), soft_wrap=True)

    @staticmethod
    def _table(runs: Sequence[ParallelRun]) -> Table:
        grid = Table.grid(padding=(0, 2))
        shown = [run for run in runs if len(runs) <= MOST_LINES or run.state == "running"]
        if len(shown) < len(runs):
            states = Counter(run.state for run in runs if run.state != "running")
            grid.add_row(f"{len(runs)} runs", "", ", ".join(f"{n} {state}" for state, n in states.items()))
        for run in shown:
            p = run.progress
            share = 1.0 if run.state == "done" else p.step / p.steps if p is not None else 0.0
            bar = ProgressBar(total=1.0, completed=share, width=20)
            grid.add_row(text(run.label), bar, text(_state(run)))
        return grid


def _state(run: ParallelRun) -> tuple[str, str]:
    """What has become of a run, in words, and their style."""
    if run.state == "done" and run.summary is not None:
        return VERDICTS[run.summary.recovered]
    if run.state == "running" and run.progress is not None:
        return f"step {run.progress.step}/{run.progress.steps}, {pace(run.progress)}", ""
    return (f"{run.state}: {run.message}" if run.message else run.state), ""


def print_notes(config: RunConfig) -> None:
    """What is missing on this machine, once."""
    if not can_report():
        note(
            "Note: matplotlib or jinja2 is missing, so there will be no figures and no report. "
            "pip install 'rankone[report]'"
        )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", MissingKernels)
        if config.engine == "fast" and kernels() is None and caught:
            note(f"Note: {caught[-1].message}")


def print_experiments(rows: Iterable[Sequence[str]]) -> None:
    head = ("experiment", "what a correct decomposition finds", *PRESETS)
    output.print(table(head, rows, left=len(head)))
    say(
        "\nTimes are of full runs on one CPU core, per preset; those with a star are estimates. "
        "Start one with: rankone run NAME"
    )


def print_settings(settings: Iterable[tuple[str, object, str]]) -> None:
    """Every setting: its dotted name, its value, and what it does."""
    for path, value, doc in settings:
        say((path, "bold"), f" = {json.dumps(value)}")
        output.print(Padding(text(doc), (0, 0, 0, 4)))


def print_attempt(seed: int, loss: float, good: bool, numbers: dict[str, float]) -> None:
    """A target that was trained, and whether it is a good one."""
    verdict = ("good", "green") if good else ("not good", "red")
    named = ", ".join(f"{name} {value:.3g}" for name, value in numbers.items())
    say(f"seed {seed}: loss {loss:.4g}, ", verdict, f"  {named}")


def print_summary(summary: Summary) -> None:
    """The numbers of a finished run."""
    words, style = VERDICTS[summary.recovered]
    say(f"\n{summary.experiment}, seed {summary.seed}: ", (words, f"bold {style}" if style else ""))
    rows = []
    for name, alive in summary.n_alive.items():
        check = summary.checks.get(name)
        judged = (f"{check.pattern} {check.expected}", str(check.errors)) if check else ("-", "-")
        rows.append((name, *judged, str(alive), f"{summary.l0[name]:.3f}"))
    output.print(table(("matrix", "pattern", "errors", "alive", "L0"), rows, left=2))
    if summary.mmcs is not None:
        similarity = f"MMCS {summary.mmcs:.4f}, ML2R {summary.ml2r:.4f}"
        say(f"{similarity} over alive subcomponents of {summary.similarity_of}")
    masks = ", ".join(f"{name} {value:.2e}" for name, value in summary.reconstruction.items())
    say(f"Divergence from the target under masks: {masks}")
    if summary.relative:
        shares = ", ".join(f"{SHARES[n]} {percent(summary.relative.get(n))}" for n in SHARES)
        say(f"In per cent of what removing everything costs: {shares}")
    if summary.verdict is not None:
        good = summary.verdict.good
        style = {True: "bold green", False: "bold red", None: "bold"}[good]
        say("Verdict: ", (brief(summary.verdict.word, summary.verdict.reasons, good=good), style))
    for line in summary.details.get("in_words", []):
        say(str(line))
    memory = f", {summary.peak_rss_mb:.0f} MB at most" if summary.peak_rss_mb else ""
    say(f"{summary.wall_seconds or 0:.0f} s, {summary.ms_per_step:.2f} ms/step{memory}")


def print_ladder(ladders: Mapping[str, Mapping[int, float | None]]) -> None:
    """How a decomposition degrades under longer and longer attacks."""
    say("Divergence under attack, in per cent of what removing everything costs:")
    steps = list(next(iter(ladders.values())))
    rows = [(f"{n} steps", *(percent(ladder[n]) for ladder in ladders.values())) for n in steps]
    output.print(table(("", *(name.replace("_", " ") for name in ladders)), rows))


def print_comparison(
    comparison: Comparison, differing: Sequence[str], versions: Sequence[str | None]
) -> None:
    """How two runs compare, layer by layer."""
    say("They differ in: " + ("; ".join(differing) or "no setting at all"))
    if versions[0] != versions[1]:
        say(f"They were made by rankone {versions[0]} and {versions[1]}")
    rows = [
        (
            name, f"{of.alive[0]} and {of.alive[1]}", f"{of.same}", f"{of.cosine:.3f}",
            "-" if of.agreement is None else f"{of.agreement:.3f}",
        )
        for name, of in comparison.layers.items()
    ]  # fmt: skip
    head = ("matrix", "alive", f"same (cosine {SAME} and up)", "mean cosine", "importances agree")
    output.print(table(head, rows, left=2))
    for which, names in zip(("first", "second"), comparison.only_in, strict=True):
        if names:
            say(f"Only the {which} decomposes: {', '.join(names)}")


def print_components(components: Components) -> None:
    """Components, the most frequent first, and what grouping them saves."""
    shown = components.table()
    if components:
        rows = [[cell_text(cell) for cell in row] for row in shown.rows]
        output.print(table(shown.head, [[*row[:3], row[3]] for row in rows], left=0))
    say(shown.note)


def print_seeds(runs: Sequence[ParallelRun], seconds: float | None = None) -> None:
    """One table over all seeds, and the share that was recovered."""
    rows: list[Sequence[Part]] = []
    for run in runs:
        summary = run.summary
        if summary is None:
            rows.append((str(run.config.seed), f"{run.state} {run.message}".strip()))
            continue
        similarity = ["" if n is None else f"{n:.4f}" for n in (summary.mmcs, summary.ml2r)]
        rows.append(
            (
                str(run.config.seed),
                VERDICTS[summary.recovered],
                "/".join(str(check.errors) for check in summary.checks.values()),
                "/".join(map(str, summary.n_alive.values())),
                *similarity,
                f"{summary.ms_per_step:.2f}",
                f"{summary.wall_seconds or 0:.0f}",
            )
        )
    output.print()
    output.print(table(("seed", "", "errors", "alive", "MMCS", "ML2R", "ms/step", "seconds"), rows, left=2))
    verdicts = [run.summary.recovered for run in runs if run.summary is not None]
    judged = [verdict for verdict in verdicts if verdict is not None]
    if judged:
        low, high = wilson(sum(judged), len(judged))
        say(
            f"Recovered {sum(judged)} of {len(judged)} seeds (95 % interval {low:.0%} to {high:.0%})"
            + ("" if seconds is None else f", {seconds:.0f} s in all")
        )


def print_table(result: ResultTable) -> None:
    """A table of results, with its title and what it means."""
    say((f"\n{result.title}", "bold"), f"\n{result.note}")
    # In a file or a pipe, lines may be as long as they have to be.
    wide = output if output.is_terminal else SafeConsole(file=output.file, width=1000)
    wide.print(table(result.head, result.rows, left=len(result.head)))


def print_reproduction(made: Reproduction, out: os.PathLike[str]) -> None:
    """Tables, where the figures are, and what could not be made."""
    for result in made.tables:
        print_table(result)
    if made.figures:
        say(f"\n{len(made.figures)} figure{'s' * (len(made.figures) > 1)} in {os.path.join(out, 'figures')}")
    if made.undrawn:
        lacking = ", ".join(dict.fromkeys(run for runs in made.undrawn.values() for run in runs))
        say(f"Not drawn: {', '.join(made.undrawn)}. These runs are missing: {lacking}")
    for folder, why in made.left_out.items():
        say(f"Left out: {folder} ({why})")


def print_diagnosis(diagnosis: Diagnosis) -> None:
    """The numbers that were looked at in a run, then what is wrong and what to do."""
    n = diagnosis.numbers
    near_one = ", ".join(f"{name} {share:.0%}" for name, share in n.near_one.items())
    late = "too short to tell"
    if n.falling is not None:
        words = {"loss": "loss", "l0": "important subcomponents"}
        late = ", ".join(f"{words[what]} {-fell:+.0%}" for what, fell in n.falling.items())
    rows = {
        "all subcomponents kept": f"{n.divergence['ones']:.2e}, {n.unmasked_share:.2%} of the scale",
        "random masks": f"{n.divergence['stochastic']:.2e}, {n.masked_share:.2%} of the scale",
        "important ones alone": f"{percent(n.relative.get('rounded'))} of the scale",
        f"attack of {ATTACK_STEPS} steps": f"{percent(n.attack_share)} of the scale",
        "never important ones deleted": f"{percent(n.relative.get('deletion'))} of the scale",
        "everything removed (the scale)": f"{n.divergence['zero']:.2e}",
        "noise of superposition": f"{n.superposition_noise:.2e} "
        "(inactive subcomponents at random, active ones whole)",
        "inputs with an importance near 1": near_one or "these layers do nothing on any input",
        "alive of C": ", ".join(f"{name} {alive} of {n.C[name]}" for name, alive in n.alive.items()),
        "late in training": late,
    }
    for name, identity in n.identities.items():
        rows[f"known identity {name}"] = f"{identity.alive} alive of rank {identity.rank}"
    output.print(table(("", ""), rows.items(), left=2))
    if not diagnosis.findings:
        say(("\nNothing wrong was found.", "bold green"))
    for finding in diagnosis.findings:
        say((f"\n{finding.name}", "bold red"), f": {finding.seen}.")
        say(f"  It means: {finding.means}.\n  Do: {finding.do}.")
    found = verdict(diagnosis)
    why = f", because {'; '.join(found.reasons)}" if found.good is None else ""
    say(("\nVerdict", "bold"), f": {found.word}{why}.")


def print_plan(plan: Plan) -> None:
    """What a run decomposes, and what it takes."""
    say(f"{plan.experiment}, preset {plan.preset}: {how_many(len(plan.layers))}, {plan.steps:,} steps")
    rows = [
        (name, " x ".join(map(str, of["shape"])), f"{of['C']:,}", f"{of['parameters']:,}" if of["parameters"] else
         "shared") for name, of in plan.layers.items()
    ]  # fmt: skip
    output.print(table(("matrix", "shape", "C", "parameters"), rows, left=2))
    say(
        f"{plan.target_parameters:,} parameters in the network, {plan.trained_parameters:,} to train, a batch of "
        f"{plan.rows:,} rows in {plan.processes} process{'es' * (plan.processes > 1)}"
    )
    say(f"Memory of a process ({plan.how}):")
    output.print(table(("", ""), [(name, amount(size, "B")) for name, size in plan.memory.items()]))
    step = plan.per_step
    sent = f", {amount(step['sent'], 'B')} sent" if plan.processes > 1 else ""
    say(
        f"A step: {step['ms']:.3g} ms ({plan.how}); in plain torch it is {amount(step['products'], 'FLOP')} of "
        f"products and {amount(step['moved'], 'B')} moved{sent}"
    )
    say(f"Training in all: {duration(plan.seconds)}, without evaluation and report")
    if plan.fits is False:
        say(
            f"It does not fit: {amount(plan.total_memory, 'B')} of {amount(plan.available or 0, 'B')}. {plan.advice}"
        )
    elif plan.fits:
        say(f"It fits: {amount(plan.total_memory, 'B')} of {amount(plan.available or 0, 'B')}")


def how_many(layers: int) -> str:
    return f"{layers} matri{'ces' if layers != 1 else 'x'}"


def amount(number: float | int, unit: str) -> str:
    """A large number as people read it: 1.2 GB."""
    for prefix, size in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if number >= size:
            return f"{number / size:.3g} {prefix}{unit}"
    return f"{number:.0f} {unit}"
