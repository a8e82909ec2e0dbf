"""Several runs, as many at a time as there are cores for, each in a process and a directory of its own.

Each result is, to the bit, that of `rankone run`: nothing is shared between them. Processes are used
rather than a batched dimension over seeds because a run with one thread keeps its core busy, and
because a run that fails takes no other with it.
"""

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from rankone.errors import ConfigError, RankoneError
from rankone.metrics_log import Progress
from rankone.runs.config import RunConfig
from rankone.runs.run import Report, allowed_threads, cores, refuse_existing, run
from rankone.runs.summary import Summary
from rankone.targets.own import handing_over, made_by, typed
from rankone.terminal import note
from rankone.trackers import together, tracking
from rankone.train import Interrupted

MOST_SEEDS = 10_000
MOST_JOBS = 1024


@dataclass
class ParallelRun:
    """One run of several: what it is to do, and what came of it."""

    config: RunConfig
    out: Path
    label: str
    """What it is called on the display."""
    state: str = "waiting"
    """waiting, running, done, failed or interrupted."""
    progress: Progress | None = None
    summary: Summary | None = None
    message: str = ""
    """Why it failed."""


def bounded(option: str, number: int, most: int) -> int:
    """A number from the command line, if it is at least 1 and not absurd."""
    if not 1 <= number <= most:
        raise ConfigError(f"{option} is {number}; it must be at least 1 and at most {most:,}.")
    return number


def jobs_for(config: RunConfig, jobs: int | None) -> int:
    """How many runs at a time: what was asked for, or as many as there are cores for."""
    if jobs is not None:
        return bounded("--jobs", jobs, MOST_JOBS)
    return max(1, cores() // allowed_threads(config.threads))


def seed_runs(config: RunConfig, seeds: int, out: Path | None = None) -> list[ParallelRun]:
    """The same run with as many seeds, from the config's on, each in its own directory."""
    first = config.seed
    configs = [
        RunConfig.model_validate(config.model_dump(mode="json") | {"seed": seed})
        for seed in range(first, first + bounded("--seeds", seeds, MOST_SEEDS))
    ]
    return [
        ParallelRun(c, out / f"seed{c.seed}" if out else Path("runs") / c.run_name, f"seed {c.seed}")
        for c in configs
    ]


def run_all(
    runs: Sequence[ParallelRun],
    *,
    jobs: int,
    resume: bool = False,
    observer: Callable[[Sequence[ParallelRun]], None],
    report: Report | None = None,
    track: Sequence[str] = (),
) -> int:
    """Do all runs, `jobs` at a time; `observer` sees their states a few times a second.

    Returns 0, or the signal that stopped everything; whatever ran has then saved its state.
    """
    if not resume:
        for one in runs:
            refuse_existing(one.out)
    spawn = multiprocessing.get_context(
        "spawn"
    )  # a fork would inherit torch's threads, which do not survive it
    waiting = list(runs)
    working: dict[Any, tuple[ParallelRun, BaseProcess]] = {}
    stopped = 0

    def stop(signum: int, frame: Any) -> None:
        nonlocal stopped
        if stopped:
            return  # all have been told; telling them again would cut their saving short
        stopped = signum
        for _, process in working.values():
            process.terminate()  # training saves its state; before and after it there is nothing to save

    in_main = threading.current_thread() is threading.main_thread()
    before = {s: signal.signal(s, stop) for s in (signal.SIGINT, signal.SIGTERM)} if in_main else {}
    try:
        while (waiting and not stopped) or working:
            while waiting and not stopped and len(working) < jobs:
                one = waiting.pop(0)
                one.state = "running"
                # A pipe for each: a child that is killed while it writes can block no other.
                ours, theirs = spawn.Pipe(duplex=False)
                arguments = (one.config, one.out, resume, report, theirs, typed(), track)
                process = spawn.Process(target=_work, args=arguments)
                with _ignoring_interrupts(in_main):
                    process.start()
                theirs.close()
                working[ours] = (one, process)
                if stopped:
                    process.terminate()
            ready: list[Any] = wait(list(working), timeout=0.2)
            for connection in ready:
                one, process = working[connection]
                try:
                    _take_in(one, *connection.recv())
                except (EOFError, OSError):  # its process has ended
                    del working[connection]
                    connection.close()
                    process.join()
                    if one.state == "running":
                        one.state = "interrupted" if stopped else "failed"
                        one.message = f"its process ended with exit code {process.exitcode}"
            observer(runs)
    finally:
        for s, handler in before.items():
            signal.signal(s, handler)
        for _, process in working.values():
            process.terminate()
            process.join()
    return stopped


@contextmanager
def _ignoring_interrupts(possible: bool) -> Iterator[None]:
    """A child that starts now ignores Ctrl-C, which a terminal sends to all: its parent stops it."""
    if not possible:
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _take_in(one: ParallelRun, kind: str, content: Any) -> None:
    """Take in one message of a run's process."""
    if kind == "progress":
        one.progress = content
    elif kind == "done":
        one.state, one.summary = "done", content
    else:
        one.state, one.message = kind, content


def _work(
    config: RunConfig,
    out: Path,
    resume: bool,
    report: Report | None,
    parent: Any,
    model: str,
    track: Sequence[str],
) -> None:
    """One run, in its own process; `model` names the user's own network, as the user typed it."""
    if hasattr(os, "setpgid"):
        os.setpgid(0, 0)  # out of reach of a terminal's Ctrl-C: a second signal would cut the saving short
    last = 0.0
    process = multiprocessing.parent_process()

    def observer(progress: Progress) -> None:
        nonlocal last
        if time.monotonic() - last > 0.5 or progress.step == progress.steps:
            last = time.monotonic()
            if process is not None and not process.is_alive():
                os.kill(os.getpid(), signal.SIGTERM)  # nobody is left to read the result: save and stop
                return
            parent.send(("progress", progress))

    try:
        settings = config.model_dump(mode="json")
        with (
            handing_over(made_by(model)) if model else nullcontext(),
            tracking(track, out, settings, note) as tracker,
        ):
            both = together(observer, tracker)
            parent.send(("done", run(config, out, resume=resume, observer=both, report=report)))
    except Interrupted as stop:
        parent.send(("interrupted", f"saved at step {stop.step}"))
    except (RankoneError, OSError) as error:
        parent.send(("failed", str(error)))
