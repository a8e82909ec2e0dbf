"""What people watch while something runs: one line for a run, one per seed for several, and the summary of seeds.

On a terminal the lines are live; elsewhere a line is printed every few seconds.
"""

import time
from collections import Counter
from collections.abc import Sequence

from rich.console import Console
from rich.live import Live
from rich.markup import escape
from rich.progress import BarColumn, TextColumn
from rich.progress import Progress as Bar
from rich.progress_bar import ProgressBar
from rich.table import Column, Table

from rankone.diagnose import Diagnosis
from rankone.metrics import wilson
from rankone.metrics_log import Progress
from rankone.paper.reproduce import Table as ResultTable
from rankone.runs.many import ParallelRun

SECONDS_BETWEEN_LINES = 10.0
GETTING_READY = "Getting ready. Kernels are compiled once after installation, which takes about 20 seconds."
MOST_LINES = 15
"""With more runs than this, only those that are running get a line."""
VERDICTS = {True: "[green]recovered[/]", False: "[red]not recovered[/]", None: "done"}


class RunDisplay:
    """Live progress: a bar on a terminal, a line every few seconds elsewhere."""

    def __init__(self, console: Console, steps: int) -> None:
        self._console = console
        # One line that is cut where the terminal ends: what must be seen comes first, the losses last.
        self._bar = Bar(
            BarColumn(bar_width=8, table_column=Column(min_width=8)),
            TextColumn("{task.fields[line]}", table_column=Column(no_wrap=True, overflow="ellipsis", ratio=1)),
            console=console,
            expand=True,
        )
        self._task = self._bar.add_task("", total=steps, line=GETTING_READY)
        self._spoke = -SECONDS_BETWEEN_LINES

    def __enter__(self) -> "RunDisplay":
        if self._console.is_terminal:
            self._bar.start()
        else:
            print(GETTING_READY, flush=True)
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def say(self, message: str) -> None:
        self._console.print(message)

    def __call__(self, progress: Progress) -> None:
        losses, l0 = progress.record["loss"], progress.record["l0"]
        short = {
            "faithfulness": "faith",
            "stochastic_recon": "recon",
            "stochastic_recon_layerwise": "layer",
            "importance_minimality": "min",
        }
        numbers = "L0 " + "/".join(f"{value:.2f}" for value in l0.values()) + "  "
        numbers += " ".join(f"{short.get(name, name)} {value:.1e}" for name, value in losses.items())
        if self._console.is_terminal:
            line = f"{progress.step}/{progress.steps}  {pace(progress)}  {numbers}"
            self._bar.update(self._task, completed=progress.step, line=line)
        elif time.monotonic() - self._spoke >= SECONDS_BETWEEN_LINES or progress.step == progress.steps:
            self._spoke = time.monotonic()
            print(f"step {progress.step}/{progress.steps}  {pace(progress)}  {numbers}", flush=True)


def pace(progress: Progress) -> str:
    """How fast it goes and how long it will take. The first step says nothing about that: it may have waited for kernels to be compiled."""
    if progress.step == 1:
        return "the first step is done"
    minutes, seconds = divmod(int(progress.seconds_left), 60)
    return f"{progress.ms_per_step:.1f} ms/step, {minutes}:{seconds:02d} left"


class ParallelDisplay:
    """Live progress of several runs: a line for each."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._live = Live(console=console, refresh_per_second=4)
        self._spoke = time.monotonic() - SECONDS_BETWEEN_LINES
        self._told: set[str] = set()

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
        for one in runs:
            if one.state in ("done", "failed", "interrupted") and one.label not in self._told:
                self._told.add(one.label)
                print(f"{one.label}: {self._plain(one)}", flush=True)
        running = [one for one in runs if one.state == "running" and one.progress is not None]
        if running and time.monotonic() - self._spoke >= SECONDS_BETWEEN_LINES:
            self._spoke = time.monotonic()
            print("; ".join(f"{one.label} {self._plain(one)}" for one in running), flush=True)

    @staticmethod
    def _plain(one: ParallelRun) -> str:
        if one.state == "done" and one.summary is not None:
            return {True: "recovered", False: "not recovered", None: "done"}[one.summary["recovered"]]
        if one.state == "running" and one.progress is not None:
            return f"step {one.progress.step}/{one.progress.steps}, {pace(one.progress)}"
        return f"{one.state}: {one.message}" if one.message else one.state

    def _table(self, runs: Sequence[ParallelRun]) -> Table:
        table = Table.grid(padding=(0, 2))
        shown = [one for one in runs if len(runs) <= MOST_LINES or one.state == "running"]
        if len(shown) < len(runs):
            states = Counter(one.state for one in runs if one.state != "running")
            table.add_row(f"{len(runs)} runs", "", ", ".join(f"{n} {state}" for state, n in states.items()))
        for one in shown:
            p = one.progress
            done = 1.0 if one.state == "done" else p.step / p.steps if p is not None else 0.0
            text = escape(self._plain(one))
            if one.state == "done" and one.summary is not None:
                text = VERDICTS[one.summary["recovered"]]
            table.add_row(one.label, ProgressBar(total=1.0, completed=done, width=20), text)
        return table


def print_seeds(console: Console, runs: Sequence[ParallelRun], seconds: float) -> None:
    """One table over all seeds, and the share that was recovered."""
    table = Table(box=None, header_style="bold", pad_edge=False)
    for heading in ("seed", "", "errors", "alive", "MMCS", "ML2R", "ms/step", "seconds"):
        table.add_column(heading, justify="left" if heading == "" else "right")
    for one in runs:
        if one.summary is None:
            table.add_row(str(one.config.seed), f"{one.state} {escape(one.message)}".strip())
            continue
        found = one.summary
        numbers = ["" if found[key] is None else f"{found[key]:.4f}" for key in ("mmcs", "ml2r")]
        table.add_row(
            str(one.config.seed),
            VERDICTS[found["recovered"]],
            "/".join(str(check["errors"]) for check in found["checks"].values()),
            "/".join(map(str, found["n_alive"].values())),
            *numbers,
            f"{found['ms_per_step']:.2f}",
            f"{found['wall_seconds']:.0f}",
        )
    console.print()
    console.print(table)
    judged = [
        one.summary["recovered"] for one in runs if one.summary is not None and one.summary["recovered"] is not None
    ]
    if judged:
        low, high = wilson(sum(judged), len(judged))
        console.print(
            f"Recovered {sum(judged)} of {len(judged)} seeds (95 % interval {low:.0%} to {high:.0%}), {seconds:.0f} s in all"
        )


def print_table(console: Console, table: ResultTable) -> None:
    """A table of results, with its title and what it means."""
    console.print(f"\n[bold]{escape(table.title)}[/]\n{escape(table.note)}", soft_wrap=True)
    shown = Table(*table.head, box=None, header_style="bold", pad_edge=False)
    for row in table.rows:
        shown.add_row(*row)
    # In a file or a pipe, lines may be as long as they have to be.
    (console if console.is_terminal else Console(file=console.file, width=1000)).print(shown)


def print_diagnosis(console: Console, diagnosis: Diagnosis) -> None:
    """The numbers that were looked at in a run, then what is wrong and what to do."""
    n = diagnosis.numbers
    table = Table(box=None, show_header=False, pad_edge=False)
    falling = n["still_falling"]
    rows = {
        "all subcomponents kept": f"{n['divergence']['ones']:.2e}, {n['unmasked_share']:.2%} of the scale",
        "random masks": f"{n['divergence']['stochastic']:.2e}, {n['masked_share']:.2%} of the scale",
        "everything removed (the scale)": f"{n['divergence']['zero']:.2e}",
        "noise of superposition": f"{n['superposition_noise']:.2e} (inactive subcomponents at random, active ones whole)",
        "inputs with an importance near 1": ", ".join(
            f"{name} {share:.0%}" for name, share in n["inputs_with_an_importance_near_1"].items()
        )
        or "these layers do nothing on any input",
        "alive of C": ", ".join(f"{name} {alive} of {n['C'][name]}" for name, alive in n["alive"].items()),
        "late in training": "too short to tell"
        if falling is None
        else f"loss {-falling['loss']:+.0%}, important subcomponents {-falling['l0']:+.0%}",
    }
    for what, value in rows.items():
        table.add_row(what, escape(value))
    for name, identity in n["identities"].items():
        table.add_row(f"known identity {escape(name)}", f"{identity['alive']} alive of rank {identity['rank']}")
    console.print(table)
    if not diagnosis.findings:
        console.print("\n[bold green]Nothing wrong was found.[/]")
    for finding in diagnosis.findings:
        console.print(f"\n[bold red]{escape(finding.name)}[/]: {escape(finding.seen)}.", soft_wrap=True)
        console.print(
            f"  It means: {escape(finding.means)}.\n  Do: {escape(finding.do)}.",
            soft_wrap=True,
        )
