"""Runs with somebody looking on: one, several seeds, or all that the paper's tables and figures lack.

What is shown is console.py's affair; here is what a run does when it is interrupted, when nobody
reads its output any more, or when others still go on.
"""

import shlex
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from rankone.checkpoint import checkpoint_names
from rankone.collection import bench
from rankone.collection.page import table, write
from rankone.collection.split import half_of
from rankone.console import (
    READER_GONE,
    ParallelDisplay,
    RunDisplay,
    Terminated,
    note,
    print_notes,
    print_seeds,
    print_table,
    say,
)
from rankone.files import RunDirectory
from rankone.paper.plan import RunSpec, keeper, missing_runs
from rankone.report.page import can_report, write_report
from rankone.runs.config import RunConfig
from rankone.runs.many import MOST_JOBS, MOST_SEEDS, ParallelRun, bounded, jobs_for, run_all, seed_runs
from rankone.runs.run import cores, program, run, with_threads
from rankone.runs.summary import Summary
from rankone.train import Interrupted


def run_one(config: RunConfig, out: Path, resume: bool) -> Summary:
    """Do one run and show how it goes; an interrupted one says how to go on, and ends the command."""
    print_notes(config)
    say(f"{_title(config)}, seed {config.seed}, {config.steps:,} steps, into {out}")
    if resume:
        newest = _newest_checkpoint(out)
        say(f"Resuming from {newest.name}." if newest else "There is no checkpoint yet: starting at step 0.")
    go_on = f"Go on with: {program()} run {shlex.quote(str(out))} --resume"
    report = write_report if can_report() else None
    display = RunDisplay(config.steps)
    try:
        with display:
            return run(config, out, resume=resume, observer=display, say=display.say, report=report)
    except Interrupted as stop:
        note(
            f"\nInterrupted at step {stop.step} of {config.steps}; everything is saved in "
            f"{_newest_checkpoint(out)}.\n{go_on}"
        )
        raise SystemExit(READER_GONE if display.reader_gone else 128 + stop.signum) from None
    except (KeyboardInterrupt, Terminated) as stop:  # before or after training: there is nothing to save
        note(f"\nInterrupted. {go_on}" if (out / "config.yaml").exists() else "\nInterrupted.")
        raise SystemExit(128 + (signal.SIGTERM if isinstance(stop, Terminated) else signal.SIGINT)) from None


def run_seeds(config: RunConfig, out: Path | None, seeds: int, jobs: int | None, resume: bool) -> bool:
    """Do several seeds and show how they go; whether all of them worked.

    Each seed gets a directory of its own, in `out` or in runs/.
    """
    print_notes(config)
    config = with_threads(config, None, note)
    runs = seed_runs(config, seeds, out)
    first, last = runs[0].config.seed, runs[-1].config.seed
    name = f"{config.experiment}-{config.preset}-seeds{first}-{last}"
    together = RunDirectory.claim(out or Path("runs") / name)
    for one in runs:
        if one.out.parent == together.path:
            together.sub(one.out.name)  # refuses a link
    at_a_time = min(seeds, jobs_for(config, jobs))
    say(
        f"{_title(config)}, seeds {first} to {last}, {config.steps:,} steps, {at_a_time} at a time, "
        f"into {runs[0].out.parent}"
    )
    began = time.monotonic()
    stopped = _run_all(runs, at_a_time, resume=resume)
    print_seeds(runs, time.monotonic() - began)
    summaries = [run.summary.to_json() for run in runs if run.summary is not None]
    together.write_json("seeds.json", {"seeds": [run.config.seed for run in runs], "runs": summaries})
    say(f"Numbers: {together.path / 'seeds.json'}; each seed's report is in its directory.")
    if stopped:
        note("Interrupted; everything is saved. Go on with the same command and --resume.")
        raise SystemExit(128 + stopped)
    return len(summaries) == len(runs)


def _run_all(
    runs: Sequence[ParallelRun],
    jobs: int,
    *,
    resume: bool,
    observer: Callable[[Sequence[ParallelRun]], None] = lambda _: None,
) -> int:
    """Do several runs and show how they go; 0, or the signal that stopped them."""
    report = write_report if can_report() else None
    with ParallelDisplay() as display:

        def observe(runs: Sequence[ParallelRun]) -> None:
            observer(runs)  # first, so that a run that cannot be kept is not shown as done
            display(runs)

        return run_all(runs, jobs=jobs, resume=resume, observer=observe, report=report)


def make_missing(specs: Sequence[RunSpec], out: Path, jobs: int | None) -> bool:
    """Make the runs that `out` does not keep yet, and keep what matters of them; whether all worked."""
    missing = missing_runs(specs, out)
    say(f"{len(specs)} runs are needed, {len(specs) - len(missing)} are there.")
    if not missing:
        return True
    for one in missing:
        for folder in ("work", "runs"):
            RunDirectory.open(out).sub(f"{folder}/{one.label}")  # refuses a link
    at_a_time = min(len(missing), jobs_for(missing[0].config, jobs))
    stopped = _run_all(missing, at_a_time, resume=True, observer=keeper(specs, out))
    if stopped:
        note("Interrupted; everything is saved. Go on with the same command.")
        raise SystemExit(128 + stopped)
    failures = [one for one in missing if one.state != "done"]
    for one in failures:
        note(f"{one.label}: {one.state} {one.message}")
    return not failures


def run_benchmark(
    method: bench.Rankone, names: Sequence[str], seeds: int, jobs: int | None, out: Path | None
) -> None:
    """Run networks of the collection and show how they go; then one table and one page."""
    count = len(names) * bounded("--seeds", seeds, MOST_SEEDS)
    at_a_time = min(count, cores() if jobs is None else bounded("--jobs", jobs, MOST_JOBS))
    directory = RunDirectory.claim(out or Path("runs") / "benchmark")
    settings = {"assignments": list(method.assignments)}
    say(
        f"{len(names)} network{'s' * (len(names) > 1)}, {seeds} seed{'s' * (seeds > 1)} each, "
        f"{at_a_time} at a time, into {directory.path}"
    )
    held_out = [name for name in names if half_of(name) == "held_out"]
    if held_out:
        note(
            f"{len(held_out)} of these networks are held out ({', '.join(held_out[:3])}"
            f"{', ...' * (len(held_out) > 3)}): run them for a final table, and change nothing after it."
        )
    try:
        results = bench.run(method, names, seeds, directory.path, jobs=at_a_time, settings=settings, say=say)
    except KeyboardInterrupt:
        note("Interrupted; what was finished is kept. Go on with the same command.")
        raise SystemExit(128 + signal.SIGINT) from None
    print_table(table(results))
    about = {"method": "rankone.decompose", "settings": " ".join(method.assignments)} | bench.versions()
    say(f"Page: {write(directory, results, about)}")
    raise SystemExit(any(result.judgement is None for result in results))


def _title(config: RunConfig) -> str:
    return f"{config.title or config.experiment}: preset {config.preset}"


def _newest_checkpoint(out: Path) -> Path | None:
    if not (out / "manifest.json").is_file():
        return None
    names = checkpoint_names(RunDirectory.open(out))
    return out / names[-1] if names else None
