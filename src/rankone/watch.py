"""Runs with somebody looking on: one, several seeds, or all that the paper's tables and figures lack.

What is shown is console.py's affair; here is what a run does when it is interrupted, when nobody
reads its output any more, or when others still go on.
"""

import json
import shlex
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import FrameType

from rankone.checkpoint import checkpoint_names
from rankone.collection import bench
from rankone.collection.page import table, write
from rankone.collection.split import half_of
from rankone.console import ParallelDisplay, print_notes, print_seeds, print_table
from rankone.files import RunDirectory
from rankone.paper.plan import RunSpec, keeper, missing_runs
from rankone.processes import Together, current
from rankone.progress import RunDisplay
from rankone.report.page import can_report, write_report
from rankone.runs.config import RunConfig, parse_config
from rankone.runs.many import MOST_JOBS, MOST_SEEDS, ParallelRun, bounded, jobs_for, run_all, seed_runs
from rankone.runs.run import cores, follow, program, run, with_threads
from rankone.runs.summary import Summary
from rankone.terminal import READER_GONE, note, say, write_text
from rankone.trackers import refuse_unusable, together, tracking
from rankone.train import Interrupted
from rankone.tune import FIGURE, ConfiguredWork, can_draw, refuse_senseless, tune_work


class Terminated(BaseException):
    """SIGTERM, as an exception."""


def _terminate(signum: int, frame: FrameType | None) -> None:
    raise Terminated


@contextmanager
def _unwinding_when_terminated() -> Iterator[None]:
    """Meanwhile, SIGTERM unwinds like Ctrl-C does, so that the terminal is left as it was; training has
    a handler of its own."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, _terminate)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def run_one(
    config: RunConfig, out: Path, resume: bool, *, quiet: bool = False, track: Sequence[str] = ()
) -> Summary:
    """Do one run and show how it goes; an interrupted one says how to go on, and ends the command."""
    tell: Callable[..., None] = (lambda *_: None) if quiet else note
    if not quiet:
        print_notes(config)
    shared = f", {current().size} processes" * (current().size > 1)
    tell(f"{_title(config)}, seed {config.seed}, {config.steps:,} steps{shared}, into {out}")
    if resume:
        newest = _newest_checkpoint(out)
        tell(f"Resuming from {newest.name}." if newest else "There is no checkpoint yet: starting at step 0.")
    go_on = f"Go on with: {program()} run {shlex.quote(str(out))} --resume{config.target.again}"
    report = write_report if can_report() else None
    display = None if quiet else RunDisplay(config.steps)
    try:
        with (
            _unwinding_when_terminated(),
            display or nullcontext(),
            tracking(track, out, config.model_dump(mode="json"), note) as tracker,
        ):
            say_so = tell if display is None else display.say
            observer = together(display, tracker)
            return run(config, out, resume=resume, observer=observer, say=say_so, report=report)
    except Interrupted as stop:
        note(
            f"\nInterrupted at step {stop.step} of {config.steps}; everything is saved in "
            f"{_newest_checkpoint(out)}.\n{go_on}"
        )
        gone = display is not None and display.reader_gone
        raise SystemExit(READER_GONE if gone else 128 + stop.signum) from None
    except (KeyboardInterrupt, Terminated) as stop:  # before or after training: there is nothing to save
        note(f"\nInterrupted. {go_on}" if (out / "config.yaml").exists() else "\nInterrupted.")
        raise SystemExit(128 + (signal.SIGTERM if isinstance(stop, Terminated) else signal.SIGINT)) from None


def follow_leader(world: Together) -> None:
    """Do what the leading process announces, and say nothing."""
    try:
        for settings in world.announced():
            follow(parse_config(settings, source=f"What process 0 told process {world.rank}"))
    except Interrupted as stop:
        raise SystemExit(128 + stop.signum) from None


def run_seeds(
    config: RunConfig,
    out: Path | None,
    seeds: int,
    jobs: int | None,
    resume: bool,
    *,
    quiet: bool = False,
    track: Sequence[str] = (),
) -> tuple[list[ParallelRun], Path, bool]:
    """Do several seeds and show how they go: the runs, where their numbers are, whether all of them worked.

    Each seed gets a directory of its own, in `out` or in runs/.
    """
    refuse_unusable(track)
    if not quiet:
        print_notes(config)
    config = with_threads(config, None, note)
    runs = seed_runs(config, seeds, out)
    first, last = runs[0].config.seed, runs[-1].config.seed
    together = RunDirectory.claim(out or Path("runs") / f"{config.label}-seeds{first}-{last}")
    for one in runs:
        if one.out.parent == together.path:
            together.sub(one.out.name)  # refuses a link
    at_a_time = min(seeds, jobs_for(config, jobs))
    if not quiet:
        note(
            f"{_title(config)}, seeds {first} to {last}, {config.steps:,} steps, {at_a_time} at a time, "
            f"into {runs[0].out.parent}"
        )
    began = time.monotonic()
    stopped = _run_all(runs, at_a_time, resume=resume, quiet=quiet, track=track)
    seconds = time.monotonic() - began
    summaries = [run.summary.to_json() for run in runs if run.summary is not None]
    together.write_json("seeds.json", {"seeds": [run.config.seed for run in runs], "runs": summaries})
    if stopped:
        print_seeds(runs, seconds)
        note("Interrupted; everything is saved. Go on with the same command and --resume.")
        raise SystemExit(128 + stopped)
    if not quiet:
        note(f"{seconds:.0f} s in all")
    return runs, together.path / "seeds.json", len(summaries) == len(runs)


def _run_all(
    runs: Sequence[ParallelRun],
    jobs: int,
    *,
    resume: bool,
    observer: Callable[[Sequence[ParallelRun]], None] = lambda _: None,
    quiet: bool = False,
    track: Sequence[str] = (),
) -> int:
    """Do several runs and show how they go; 0, or the signal that stopped them."""
    report = write_report if can_report() else None
    options = {"jobs": jobs, "resume": resume, "report": report, "track": track}
    if quiet:
        return run_all(runs, observer=observer, **options)
    with ParallelDisplay() as display:

        def observe(runs: Sequence[ParallelRun]) -> None:
            observer(runs)  # first, so that a run that cannot be kept is not shown as done
            display(runs)

        return run_all(runs, observer=observe, **options)


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


def run_tune(
    config: RunConfig,
    trials: int,
    out: Path | None,
    storage: str | None,
    study: str | None,
    as_json: bool,
    command: str,
) -> None:
    """Work on the trade-off of a network and show how it goes; then one table and one figure."""
    out = out or Path("runs") / f"{config.run_name}-tune"
    refuse_senseless(ConfiguredWork(config), trials, storage)
    config = with_threads(config, None, note)
    note(
        f"{_title(config)}, seed {config.seed}, {config.steps:,} steps each, until {trials} "
        f"trial{'s are' if trials != 1 else ' is'} finished, into {out}"
    )
    shown: list[RunDisplay] = []

    def display(number: int, factor: float) -> RunDisplay:
        note(f"Trial {number}: pressure x{factor:g}")
        shown.append(RunDisplay(config.steps))
        return shown[-1]

    try:
        with _unwinding_when_terminated():
            curve = tune_work(
                ConfiguredWork(config),
                trials,
                out,
                name=study or f"{config.experiment}-{config.preset}-seed{config.seed}",
                storage=storage,
                display=display,
                say=note,
            )
    except (Interrupted, KeyboardInterrupt, Terminated) as stop:
        note(
            "\nInterrupted; finished trials and the newest checkpoint are kept. Go on with the same command."
        )
        signum = stop.signum if isinstance(stop, Interrupted) else signal.SIGINT
        signum = signal.SIGTERM if isinstance(stop, Terminated) else signum
        gone = bool(shown) and shown[-1].reader_gone
        raise SystemExit(READER_GONE if gone else 128 + signum) from None
    if as_json:
        write_text(json.dumps(curve.to_dict(), indent=2) + "\n")
        return
    print_table(curve.table())
    settings = " ".join(f"{name}={value!r}" for name, value in curve.recommended.settings.items())
    say(f"\nUse it: {program()} run {command} {settings}")
    made = curve.path(curve.recommended)
    if made is not None:
        say(f"It is made already: {made}")
    if can_draw():
        say(f"Figure: {out / FIGURE}")
    else:
        note("Note: matplotlib is missing, so there is no figure. pip install 'rankone[report]'")


def _title(config: RunConfig) -> str:
    return f"{config.title or config.experiment}: preset {config.preset}"


def _newest_checkpoint(out: Path) -> Path | None:
    if not (out / "manifest.json").is_file():
        return None
    names = checkpoint_names(RunDirectory.open(out))
    return out / names[-1] if names else None
