"""The command line: a table of plain functions.

What a command prints for people goes to standard output, errors go to standard error. `main` turns every RankoneError into one
readable message and an exit code; anything else is a bug and keeps its traceback.
"""

import json
import shlex
import signal
import sys
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Annotated

import torch
from cyclopts import App, Parameter
from rich.console import Console
from rich.markup import escape
from rich.padding import Padding
from rich.table import Table as RichTable
from rich.text import Text

from rankone import __version__
from rankone.config import fields, to_yaml
from rankone.console import ParallelDisplay, RunDisplay, print_diagnosis, print_seeds, print_table
from rankone.diagnose import diagnose as find_faults
from rankone.errors import ConfigError, RankoneError
from rankone.fast.gates import WITHOUT_NUMBA, MissingKernels, kernels
from rankone.files import write_json
from rankone.paper.reproduce import Wanted, keeper, make, missing_runs, wanted_for
from rankone.report import write_report
from rankone.runs.config import PRESETS, ExperimentConfig, experiment_config, experiment_file, experiment_names
from rankone.runs.kept import stored_runs
from rankone.runs.many import ParallelRun, jobs_for, run_all
from rankone.runs.run import Summary, can_report, evaluate_run, measured, open_as_it_is, read_config, reopen
from rankone.runs.run import run as run_experiment
from rankone.targets import save_target, train_until_good
from rankone.train import Interrupted, checkpoints

app = App(
    name="rankone",
    help="Stochastic Parameter Decomposition: take a trained network's weight matrices apart into rank-one mechanisms.",
    version=__version__,
)
config_app = App(name="config", help="Look at settings.")
app.command(config_app)

console = Console(highlight=False)
errors = Console(stderr=True, highlight=False)

Override = Annotated[
    str,
    Parameter(
        allow_leading_hyphen=True,
        help="Any setting as key=value, for instance optimizer.lr=1e-3 (--optimizer.lr 1e-3 works too).",
    ),
]


@app.command(name="list")
def list_experiments() -> None:
    """List every shipped experiment: what it should recover and how long it takes."""
    table = RichTable(box=None, header_style="bold", pad_edge=False)
    for heading in ("experiment", "what a correct decomposition finds", "default preset", "paper preset"):
        table.add_column(heading, overflow="fold", no_wrap=heading == "experiment")
    for name in experiment_names():
        file = experiment_file(name)
        table.add_row(name, file.recovers, file.takes["default"], file.takes["paper"])
    console.print(table)
    console.print(
        "\nTimes are of full runs on one CPU core; those with a star are estimates. Start one with: rankone run NAME"
    )


@app.command
def run(
    experiment: str,
    /,
    *settings: Override,
    preset: str | None = None,
    out: Path | None = None,
    seed: int | None = None,
    seeds: int | None = None,
    jobs: int | None = None,
    steps: int | None = None,
    resume: bool = False,
) -> None:
    """Decompose a network: train, evaluate, draw, report.

    Parameters
    ----------
    experiment
        A name from `rankone list`, a config.yaml, or the directory of an earlier run (with --resume).
    preset
        `default`, or `paper` for the paper's settings to the letter.
    out
        The run directory; runs/NAME-PRESET-seedN if not given. With --seeds, the directory in which each seed gets its own.
    seed
        Decides initialisation, data and masks. With --seeds, the first of them.
    seeds
        Run this many seeds, several at a time, and summarise them together.
    jobs
        How many seeds at a time; as many as the cores carry if not given.
    steps
        Training steps; fewer than the experiment's own give a quick look, not a result.
    resume
        Go on from the newest checkpoint in the run directory.
    """
    directory = Path(experiment)
    if (directory / "config.yaml").is_file():
        if not resume:
            raise ConfigError(f"{directory} is a run directory. Add --resume to go on with it.")
        if any(given is not None for given in (preset, seed, seeds, steps)) or settings:
            raise ConfigError(
                f"{directory} is resumed with its own settings; leave out --preset, --seed, --seeds, --steps and overrides."
            )
        config, out = read_config(directory), out or directory
    else:
        config = experiment_config(experiment, preset=preset, seed=seed, steps=steps, assignments=assignments(settings))
    if not can_report():
        errors.print(
            "Note: matplotlib or jinja2 is missing, so there will be no figures and no report. pip install 'rankone\\[report]'"
        )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", MissingKernels)
        if config.engine == "fast" and kernels() is None:
            errors.print(f"Note: {WITHOUT_NUMBA}", soft_wrap=True)
    if seeds is not None:
        _run_seeds(config, out, seeds, jobs, resume)
        return
    if jobs is not None:
        raise ConfigError("--jobs says how many seeds run at a time; it needs --seeds.")
    out = out or Path("runs") / f"{config.experiment}-{config.preset}-seed{config.seed}"
    console.print(
        f"{config.title or config.experiment}: preset {config.preset}, seed {config.seed}, {config.steps:,} steps, into {out}",
        soft_wrap=True,
    )
    found = checkpoints(out)
    if resume:
        console.print(
            f"Resuming from {found[-1].name}." if found else "There is no checkpoint yet: starting at step 0."
        )
    go_on = f"Go on with: rankone run {shlex.quote(str(out))} --resume"
    try:
        with _terminable(), RunDisplay(console, config.steps) as display:
            summary = run_experiment(config, out, resume=resume, observer=display, say=display.say)
    except Interrupted as stop:
        saved = checkpoints(out)[-1]
        errors.print(
            f"\nInterrupted at step {stop.step} of {config.steps}; everything is saved in {saved}.\n{go_on}",
            soft_wrap=True,
        )
        raise SystemExit(128 + stop.signum) from None
    except (KeyboardInterrupt, _Terminated) as stop:  # before or after training: there is nothing to save
        errors.print(f"\nInterrupted. {go_on}", soft_wrap=True)
        raise SystemExit(128 + (signal.SIGTERM if isinstance(stop, _Terminated) else signal.SIGINT)) from None
    _print_summary(summary)
    console.print(
        f"Report: {out / 'report.html'}" if can_report() else f"Numbers: {out / 'summary.json'}", soft_wrap=True
    )


def _run_seeds(config: ExperimentConfig, out: Path | None, seeds: int, jobs: int | None, resume: bool) -> None:
    if seeds < 1:
        raise ConfigError(f"--seeds is {seeds}; it must be at least 1.")
    name = f"{config.experiment}-{config.preset}"
    runs = [
        ParallelRun(
            config.model_copy(update={"seed": s}),
            (out / f"seed{s}") if out else Path("runs") / f"{name}-seed{s}",
            f"seed {s}",
        )
        for s in range(config.seed, config.seed + seeds)
    ]
    at_a_time = min(seeds, jobs_for(config, jobs))
    first, last = runs[0].config.seed, runs[-1].config.seed
    console.print(
        f"{config.title or config.experiment}: preset {config.preset}, seeds {first} to {last}, {config.steps:,} steps, "
        f"{at_a_time} at a time, into {runs[0].out.parent}",
        soft_wrap=True,
    )
    began = time.monotonic()
    with ParallelDisplay(console) as display:
        stopped = run_all(runs, jobs=at_a_time, resume=resume, observer=display)
    print_seeds(console, runs, time.monotonic() - began)
    done = [one.summary for one in runs if one.summary is not None]
    path = runs[0].out.parent / f"{name}-seeds{first}-{last}.json"
    write_json(path, {"seeds": [one.config.seed for one in runs], "runs": done})
    console.print(f"Numbers: {path}; each seed's report is in its directory.", soft_wrap=True)
    if stopped:
        errors.print("Interrupted; everything is saved. Go on with the same command and --resume.")
        raise SystemExit(128 + stopped)
    if len(done) < len(runs):
        raise SystemExit(1)


@app.command
def reproduce(
    what: str = "all",
    name: str | None = None,
    /,
    *,
    seeds: int | None = None,
    preset: str | None = None,
    out: Path | None = None,
    source: Annotated[Path | None, Parameter(name="--from")] = None,
    jobs: int | None = None,
) -> None:
    """Reproduce the paper: make the runs that are missing, then print its numbers beside ours and draw its figures.

    Finished runs are kept and interrupted ones resumed, so the same command goes on where it stopped, and a larger --seeds adds to what is there.

    Parameters
    ----------
    what
        `table1` (MMCS and ML2R), `recovery` (which seeds are recovered, all experiments), `subcomponents` (how many are alive), `contributions` (of neurons), `splitting` (of features),
        `figure` with the name of one, or `all`.
    name
        The figure: an experiment of superposition, importances-EXPERIMENT, contributions-EXPERIMENT, beta3 or splitting.
    seeds
        Seeds of every experiment; if not given, 10 of the cheapest down to 1 of the dearest.
    preset
        Which runs to make: `default`, or `paper` for the paper's settings to the letter. If named, tables and figures are of this preset only.
    out
        Where runs, tables and figures go; reproduction/ if not given, redrawn/ with --from.
    source
        Make everything from the runs that this directory keeps (results/ in the repository), without training.
    jobs
        How many runs at a time; as many as there are cores if not given.
    """
    if not can_report():
        raise ConfigError("Figures need matplotlib. Install it with: pip install 'rankone[report]'")
    if seeds is not None and seeds < 1:
        raise ConfigError(f"--seeds is {seeds}; it must be at least 1.")
    if source is not None and (seeds, jobs) != (None, None):
        raise ConfigError("--from uses every run that is kept and makes none; leave --seeds and --jobs away.")
    out = out or Path("redrawn" if source else "reproduction")
    wanted = wanted_for(what, name, preset or "default", seeds)
    all_there = source is not None or _make_runs(wanted, out, jobs)
    kept = stored_runs(source or out)
    if not kept:
        raise ConfigError(f"{source or out} keeps no finished runs (folders with a summary.json).")
    made = make(what, name, [preset] if preset else PRESETS, kept, out)
    for table in made.tables:
        print_table(console, table)
    if made.figures:
        console.print(
            f"\n{len(made.figures)} figure{'s' * (len(made.figures) > 1)} in {out / 'figures'}", soft_wrap=True
        )
    if made.undrawn:
        lacking = ", ".join(dict.fromkeys(run for runs in made.undrawn.values() for run in runs))
        console.print(f"Not drawn: {', '.join(made.undrawn)}. These runs are missing: {lacking}", soft_wrap=True)
    for folder, why in made.left_out.items():
        console.print(f"Left out: {folder} ({escape(why)})", soft_wrap=True)
    if not (made.figures or made.tables):
        of = f" of the preset {preset}" if preset else ""
        raise ConfigError(f"{source or out} keeps no run{of} that this could be made of.")
    if not all_there:
        raise SystemExit(1)


def _make_runs(wanted: list[Wanted], out: Path, jobs: int | None) -> bool:
    """Make the runs that `out` does not keep yet, and keep what matters of them; whether all of them worked."""
    todo = missing_runs(wanted, out)
    console.print(f"{len(wanted)} runs are needed, {len(wanted) - len(todo)} are there.", soft_wrap=True)
    if not todo:
        return True
    at_a_time = min(len(todo), jobs_for(todo[0].config, jobs))
    keep_finished = keeper(wanted, out)
    with ParallelDisplay(console) as display:

        def observer(runs: Sequence[ParallelRun]) -> None:
            keep_finished(runs)  # first, so that one that cannot be kept is not shown as done
            display(runs)

        stopped = run_all(todo, jobs=at_a_time, resume=True, observer=observer)
    if stopped:
        errors.print("Interrupted; everything is saved. Go on with the same command.")
        raise SystemExit(128 + stopped)
    failed = [one for one in todo if one.state != "done"]
    for one in failed:
        errors.print(f"{one.label}: {one.state} {escape(one.message)}", soft_wrap=True)
    return not failed


@config_app.command
def show(
    experiment: str,
    /,
    *settings: Override,
    preset: str | None = None,
    seed: int | None = None,
    steps: int | None = None,
) -> None:
    """Print the complete settings of an experiment as YAML; save it, change it, and give it to `rankone run`.

    Parameters
    ----------
    experiment
        A name from `rankone list`, or a config.yaml.
    preset
        `default`, or `paper` for the paper's settings to the letter.
    seed
        Decides initialisation, data and masks.
    steps
        Training steps.
    """
    config = experiment_config(experiment, preset=preset, seed=seed, steps=steps, assignments=assignments(settings))
    print(to_yaml(config), end="")


@config_app.command
def explain(experiment: str = "tms_5-2", /) -> None:
    """Explain every setting: its dotted name, its value in an experiment, and what it does.

    Parameters
    ----------
    experiment
        The experiment whose values are shown.
    """
    config = experiment_config(experiment)
    for path, value, doc in fields(ExperimentConfig, config.model_dump(mode="json")):
        console.print(f"[bold]{escape(path)}[/] = {escape(json.dumps(value))}", soft_wrap=True)
        console.print(Padding(Text(doc), (0, 0, 0, 4)))


@app.command
def train_target(experiment: str, /, *, seed: int | None = None, out: Path | None = None) -> None:
    """Train the target network of an experiment with the paper's recipe, until one passes the check of a good target.

    Parameters
    ----------
    experiment
        A name from `rankone list`, or a config.yaml.
    seed
        The first seed to try; the pinned target's if not given.
    out
        Where to write it; targets/NAME-seedN.safetensors if not given.
    """
    config = experiment_config(experiment)
    target = config.target
    torch.set_num_threads(config.threads)
    first = target.training.seed if seed is None else seed
    for attempt, model, loss, good, numbers in train_until_good(target, first):
        verdict = "[green]good[/]" if good else "[red]not good[/]"
        console.print(
            f"seed {attempt}: loss {loss:.4g}, {verdict}  " + ", ".join(f"{k} {v:.3g}" for k, v in numbers.items())
        )
        if good:
            path = out or Path("targets") / f"{config.experiment}-seed{attempt}.safetensors"
            sha = save_target(path, model, target, attempt)
            same = sha == target.sha256
            console.print(
                f"Wrote {path}\nSHA-256 {sha}{', the same as the pinned target' if same else ''}", soft_wrap=True
            )
            if not same:
                weights = shlex.quote(f"target.weights={path}")
                console.print(
                    f"Decompose it with: rankone run {experiment} {weights} target.sha256={sha}", soft_wrap=True
                )


@app.command
def evaluate(directory: Path, /) -> None:
    """Evaluate a finished run again and print its numbers; summary.json is brought up to date.

    Parameters
    ----------
    directory
        A run directory.
    """
    config, result, summary = reopen(directory)
    summary |= measured(config, result, evaluate_run(config, result))
    write_json(directory / "summary.json", summary)
    _print_summary(summary)


@app.command
def diagnose(directory: Path, /) -> None:
    """Look for what is wrong with a run, finished or not, and say which setting to move in which direction.

    Parameters
    ----------
    directory
        A run directory.
    """
    config, result, steps = open_as_it_is(directory)
    diagnosis = find_faults(result, config.target.sampler(config.batch_size), steps_done=steps)
    print_diagnosis(console, diagnosis)


@app.command
def report(directory: Path, /) -> None:
    """Draw the figures and write report.html of a finished run again.

    Parameters
    ----------
    directory
        A run directory.
    """
    if not can_report():
        raise ConfigError("A report needs matplotlib and jinja2. Install them with: pip install 'rankone[report]'")
    config, result, summary = reopen(directory)
    console.print(f"Report: {write_report(directory, config, result, evaluate_run(config, result), summary)}")


def assignments(tokens: tuple[str, ...]) -> list[str]:
    """Overrides in any of the forms people type (`a.b=1`, `--a.b=1`, `--a.b 1`), as `a.b=1`."""
    result: list[str] = []
    rest = list(tokens)
    while rest:
        token = rest.pop(0)
        key = token.removeprefix("--")
        if "=" not in key and token.startswith("--"):
            if not rest:
                raise ConfigError(
                    f"{token} has no value, or is no option of this command. Write key=value, for instance seed=1."
                )
            key = f"{key}={rest.pop(0)}"
        result.append(key)
    return result


def _print_summary(summary: Summary) -> None:
    verdict = {True: "[bold green]recovered[/]", False: "[bold red]not recovered[/]", None: "no ground truth known"}
    console.print(f"\n{escape(summary['experiment'])}, seed {summary['seed']}: {verdict[summary['recovered']]}")
    table = RichTable(box=None, header_style="bold", pad_edge=False)
    for heading in ("matrix", "pattern", "errors", "alive", "L0"):
        table.add_column(heading, justify="left" if heading in ("matrix", "pattern") else "right")
    for name, alive in summary["n_alive"].items():
        check = summary["checks"].get(name, {"pattern": "-", "errors": "-"})
        pattern = f"{check['pattern']} {check['expected']}" if "expected" in check else "-"
        table.add_row(name, pattern, str(check["errors"]), str(alive), f"{summary['l0'][name]:.3f}")
    console.print(table)
    if summary["mmcs"] is not None:
        console.print(
            f"MMCS {summary['mmcs']:.4f}, ML2R {summary['ml2r']:.4f} over alive subcomponents of {summary['similarity_of']}"
        )
    masks = ", ".join(f"{name} {value:.2e}" for name, value in summary["reconstruction"].items())
    console.print(f"Divergence from the target under masks: {masks}")
    memory = f", {summary['peak_rss_mb']:.0f} MB at most" if summary["peak_rss_mb"] else ""
    console.print(f"{summary['wall_seconds']:.0f} s, {summary['ms_per_step']:.2f} ms/step{memory}")


class _Terminated(BaseException):
    """SIGTERM, as an exception."""


@contextmanager
def _terminable() -> Iterator[None]:
    """Let SIGTERM unwind like Ctrl-C does; while training runs, training has its own handler."""

    def handle(signum: int, frame: FrameType | None) -> None:
        raise _Terminated

    before = signal.signal(signal.SIGTERM, handle)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def main(words: list[str] | None = None) -> None:
    """Run the command line; every expected failure becomes one message and an exit code."""
    try:
        app(sys.argv[1:] if words is None else words)
    except RankoneError as error:
        errors.print(f"[bold red]error:[/] {escape(str(error))}", soft_wrap=True)
        raise SystemExit(1) from None
    except OSError as error:
        where = f" {error.filename}" if error.filename else ""
        errors.print(f"[bold red]error:[/] cannot read or write{where}: {error.strerror or error}", soft_wrap=True)
        raise SystemExit(1) from None
    except KeyboardInterrupt:
        errors.print("Interrupted.")
        raise SystemExit(128 + signal.SIGINT) from None
