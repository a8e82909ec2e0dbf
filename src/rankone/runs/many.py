"""Several runs, as many at a time as the cores carry, each in a process and a directory of its own.

Each result is, to the bit, that of `rankone run`: nothing is shared between them. Processes are used rather than
a batched dimension over seeds because a run with one thread keeps its core busy, and because a run that fails takes no
other with it.
"""

import multiprocessing
import os
import queue
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from rankone.errors import ConfigError, RankoneError
from rankone.metrics_log import Progress
from rankone.runs.config import ExperimentConfig
from rankone.runs.run import Summary, refuse_existing, run
from rankone.train import Interrupted


@dataclass
class ParallelRun:
    """One run of several: what it is to do, and what came of it."""

    config: ExperimentConfig
    out: Path
    label: str
    """What it is called on the display."""
    state: str = "waiting"
    """waiting, running, done, failed or interrupted."""
    progress: Progress | None = None
    summary: Summary | None = None
    message: str = ""
    """Why it failed."""


def cores() -> int:
    """The cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def jobs_for(config: ExperimentConfig, jobs: int | None) -> int:
    """How many runs at a time: what was asked for, or as many as the cores carry with this many threads each."""
    if jobs is not None and jobs < 1:
        raise ConfigError(f"--jobs is {jobs}; it must be at least 1.")
    return jobs or max(1, cores() // config.threads)


def run_all(
    runs: Sequence[ParallelRun], *, jobs: int, resume: bool = False, observer: Callable[[Sequence[ParallelRun]], None]
) -> int:
    """Do all runs, `jobs` at a time; their states are kept in them, and `observer` sees them a few times a second.

    Returns 0, or the signal that stopped everything; whatever ran has then saved its state.
    """
    if not resume:
        for one in runs:
            refuse_existing(one.out)
    spawn = multiprocessing.get_context("spawn")  # a fork would inherit torch's threads, which do not survive it
    reports: Any = spawn.Queue()
    waiting = list(range(len(runs)))
    working: dict[int, BaseProcess] = {}
    stopped = 0

    def stop(signum: int, frame: Any) -> None:
        nonlocal stopped
        if stopped:
            return  # all have been told; telling them again would cut their saving short
        stopped = signum
        for process in working.values():
            process.terminate()  # training saves its state on SIGTERM; before and after training there is nothing to save

    in_main = threading.current_thread() is threading.main_thread()
    before = {s: signal.signal(s, stop) for s in (signal.SIGINT, signal.SIGTERM)} if in_main else {}
    try:
        while (waiting and not stopped) or working:
            while waiting and not stopped and len(working) < jobs:
                index = waiting.pop(0)
                one = runs[index]
                one.state = "running"
                process = spawn.Process(target=_work, args=(index, one.config, one.out, resume, reports))
                with _ignoring_interrupts(in_main):
                    process.start()
                working[index] = process
                if stopped:
                    process.terminate()
            _listen(reports, runs)
            for index, process in list(working.items()):
                if process.is_alive():
                    continue
                process.join()
                _listen(reports, runs)
                del working[index]
                if runs[index].state == "running":  # it ended without a word
                    runs[index].state = "interrupted" if stopped else "failed"
                    runs[index].message = f"its process ended with exit code {process.exitcode}"
            observer(runs)
    finally:
        for s, handler in before.items():
            signal.signal(s, handler)
        for process in working.values():
            process.terminate()
            process.join()
    return stopped


@contextmanager
def _ignoring_interrupts(possible: bool) -> Iterator[None]:
    """A child that starts now ignores Ctrl-C, which a terminal sends to all: this process tells its children when to stop."""
    if not possible:
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _listen(reports: Any, runs: Sequence[ParallelRun]) -> None:
    """Take in what the processes have said, waiting a little for the first word."""
    wait = 0.2
    while True:
        try:
            index, kind, content = reports.get(timeout=wait)
        except queue.Empty:
            return
        wait = 0.0
        one = runs[index]
        if kind == "progress":
            one.progress = content
        elif kind == "done":
            one.state, one.summary = "done", content
        else:
            one.state, one.message = kind, content


def _work(index: int, config: ExperimentConfig, out: Path, resume: bool, reports: Any) -> None:
    """One run, in its own process."""
    if hasattr(os, "setpgid"):
        os.setpgid(0, 0)  # out of reach of a terminal's Ctrl-C: a second signal would cut the saving short
    last = 0.0
    parent = multiprocessing.parent_process()

    def observer(progress: Progress) -> None:
        nonlocal last
        if time.monotonic() - last > 0.5 or progress.step == progress.steps:
            last = time.monotonic()
            if parent is not None and not parent.is_alive():
                os.kill(os.getpid(), signal.SIGTERM)  # nobody is left to read the result: save and stop
            reports.put((index, "progress", progress))

    try:
        reports.put((index, "done", run(config, out, resume=resume, observer=observer)))
    except Interrupted as stop:
        reports.put((index, "interrupted", f"saved at step {stop.step}"))
    except (RankoneError, OSError) as error:
        reports.put((index, "failed", str(error)))
