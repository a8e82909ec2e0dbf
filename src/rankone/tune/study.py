"""A study in Optuna: which trials there are, who runs them, and what becomes of those whose worker died.

Needs the extra `tune`; nothing else in rankone imports this file when it is loaded.

Any number of workers share a study, and each may be killed at any moment. What they do with it, they
do under the lock of their output directory, in moments: look for trials whose worker died, take the
next one, record a result. While a trial runs, its worker holds the lock of the trial's own directory,
which the system gives back when a process dies; workers elsewhere, with a storage in common, see that
its beat goes on. A trial that lost its worker is marked as failed and queued again with the same
factor, and where it left a checkpoint, the next worker goes on from there.
"""

import hashlib
import math
import os
import platform
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from typing import Any, Literal

import optuna
from optuna.distributions import BaseDistribution, FloatDistribution
from optuna.exceptions import DuplicatedStudyError, OptunaError, UpdateFinishedTrialError
from optuna.samplers import BaseSampler, TPESampler
from optuna.storages import BaseStorage, JournalStorage, RDBStorage
from optuna.trial import FrozenTrial, Trial, TrialState
from sqlalchemy.exc import SQLAlchemyError

from rankone.errors import CheckpointError, ConfigError, TrainingError, shown
from rankone.files import RunDirectory
from rankone.settings import differences
from rankone.tune.curve import Curve, Failure, Point, percent
from rankone.tune.journal import Journal
from rankone.tune.work import Display, Measured, Work, coefficients

FIRST = (1.0, 0.3, 3.0, 0.1, 10.0)
"""The factors of the first trials; from then on Optuna looks where the curve is."""
FACTORS = FloatDistribution(0.1, 10.0, log=True)
APART = 0.1
"""Factors that differ by less than this share would show the same point twice ..."""
DRAWS = 16
"""... so the sampler may try as often as this to find another."""
JOURNAL, SETTINGS = "journal.log", "settings.json"
PATIENCE = 60.0
"""Seconds to wait for another worker who looks at the study or writes the curve: that takes moments."""
BEAT_EVERY = 20.0
"""Seconds between signs of life of a worker."""
SILENT_FOR = 120.0
"""Without a sign of life for so long, a worker elsewhere is taken for dead."""
LOOK_EVERY = 0.5
"""Seconds between looks at what other workers do, where nothing else is left."""

Say = Callable[[str], None]
Keep = Callable[[Curve, bool], None]
"""Writes the curve of what is finished; also told whether that is all."""


@dataclass(frozen=True)
class Job:
    """A trial that this worker has taken."""

    trial: Trial
    place: int
    """Its place in the study; a trial that repeats another has that one's."""
    factor: float
    directory: RunDirectory


def run_study(
    work: Work,
    trials: int,
    directory: RunDirectory,
    *,
    name: str,
    storage: str | BaseStorage | None = None,
    display: Display = lambda number, factor: nullcontext(),
    say: Say = lambda line: None,
    keep: Keep = lambda curve, complete: None,
) -> Curve:
    """Work on a study until it has so many finished trials; the curve of all of them.

    `keep` is called with the curve after every trial and at the end, under the directory's lock.
    """
    with _quiet():
        _refuse_other_directory(directory, name, work.identity())
        with _opened(directory, storage) as shared:
            study = _study(shared, name, work)
            worker = Worker(study, work, directory, only_here=storage is None, say=say)
            return worker.go(trials, display, keep)


class Worker:
    """One of those who work on a study."""

    def __init__(
        self, study: optuna.Study, work: Work, directory: RunDirectory, *, only_here: bool, say: Say
    ) -> None:
        self.study = study
        self.work = work
        self.directory = directory
        self.say = say
        self.only_here = only_here
        """Whether every worker of the study uses this directory."""
        where = f"{platform.node()}|{directory.path.resolve()}"
        self.here = hashlib.sha256(where.encode()).hexdigest()[:16]
        """This directory on this machine, without naming it."""
        self._beats: dict[int, tuple[int, float]] = {}

    def go(self, trials: int, display: Display, keep: Keep) -> Curve:
        """Take and run trials until so many are finished, by whomever."""
        waiting = False
        while True:
            with ExitStack() as held:
                with self.directory.lock(PATIENCE):
                    job = self._take(trials, held)
                    if job == "done":
                        curve = self._curve()
                        if curve.points:
                            keep(curve, True)
                        return curve
                if job == "wait":
                    if not waiting:
                        self.say("Nothing is left to begin; waiting for the trials of other workers.")
                    waiting = True
                    time.sleep(LOOK_EVERY)
                    continue
                waiting = False
                self._run(job, display, keep)

    def _take(self, trials: int, held: ExitStack) -> Job | Literal["done", "wait"]:
        """The next trial, its directory locked until `held` ends."""
        for known in self.study.get_trials(deepcopy=False):
            if known.state == TrialState.RUNNING and self._dead(known):
                self._requeue(known)
        after = self.study.get_trials(deepcopy=False)
        finished = sum(map(_finished, after))
        working = sum(known.state == TrialState.RUNNING for known in after)
        if finished >= trials:
            return "done"
        if finished + working >= trials:
            return "wait"
        trial = self.study.ask({"factor": FACTORS})
        root, factor = trial.user_attrs.get("retry_of", trial.number), trial.params["factor"]
        if self._repeated(root, before=trial.number):
            self.study.tell(trial, state=TrialState.FAIL)
            return self._take(trials, held)
        place = _place(self.study, root)
        name = f"trials/{place:03d}-x{factor:g}"
        trial.set_user_attr("worker", {"where": self.here, "directory": name})
        try:
            claimed = RunDirectory.claim(self.directory.sub(name))
            held.enter_context(claimed.lock())
        except BaseException:
            self._give_back(trial)
            raise
        return Job(trial, place, factor, claimed)

    def _run(self, job: Job, display: Display, keep: Keep) -> None:
        """Run a trial and record what came of it. Whatever stops it, it is queued again."""
        measured, error = None, ""
        try:
            with display(job.place, job.factor) as observer, _beating(job.trial):
                measured = self.work.run(job.factor, job.directory, observer)
        except TrainingError as failure:  # with this factor it does not work; with another it may
            error = str(failure)
        except BaseException:
            with self.directory.lock(PATIENCE):
                self._give_back(job.trial)
            raise
        with self.directory.lock(PATIENCE):
            ours = self._record(job, measured, error)
            curve = self._curve()
            if curve.points:
                keep(curve, False)
        if not ours:
            self.say(f"Pressure x{job.factor:g}: another worker took this trial for dead and runs it again.")
        elif measured is None:
            self.say(f"Pressure x{job.factor:g}: failed: {error}")
        else:
            found = curve.points[[p.trial for p in curve.points].index(job.trial.number)]
            self.say(
                f"Pressure x{job.factor:g}: attack {percent(found.attack)}, L0 {found.l0:.2f}, "
                f"{found.seconds:.0f} s ({len(curve.points) + len(curve.failures)} finished)"
            )

    def _record(self, job: Job, measured: Measured | None, error: str) -> bool:
        """Write the result of a trial into the study; False if it is not this worker's any more."""
        notes = {"error": error} if measured is None else measured.notes
        try:
            for key, value in notes.items():
                job.trial.set_user_attr(key, value)
            if measured is None:
                self.study.tell(job.trial, state=TrialState.FAIL)
            else:
                self.study.tell(job.trial, [measured.attack, measured.l0])
        except (UpdateFinishedTrialError, ValueError):
            return False
        return True

    def _give_back(self, trial: Trial) -> None:
        known = self.study.get_trials(deepcopy=False)[trial.number]
        if known.state == TrialState.RUNNING:
            self._requeue(known)

    def _requeue(self, trial: FrozenTrial) -> None:
        """Queue a trial again that nobody runs any more, then mark it: in between, nothing is lost.

        As often as it takes: no factor is more likely than another to be what kills workers.
        """
        root = trial.user_attrs.get("retry_of", trial.number)
        place = _place(self.study, root)
        factor = trial.params.get("factor", FIRST[place] if place < len(FIRST) else None)
        if factor is not None and not self._repeated(root, besides=trial.number):
            self.study.enqueue_trial({"factor": factor}, {"retry_of": root})
        self.study.tell(trial.number, state=TrialState.FAIL, skip_if_finished=True)

    def _repeated(self, root: int, *, before: int | None = None, besides: int | None = None) -> bool:
        """Whether another trial repeats the same one: two workers may queue it at once."""
        return any(
            other.user_attrs.get("retry_of", other.number) == root
            and other.state != TrialState.FAIL
            and other.number != besides
            and (before is None or other.number < before)
            for other in self.study.get_trials(deepcopy=False)
        )

    def _dead(self, trial: FrozenTrial) -> bool:
        """Whether nobody runs this trial any more."""
        worker = trial.user_attrs.get("worker")
        if worker is None and self.only_here:
            return True  # whoever took it did so under the lock that is held now, and did not finish that
        if worker is None or worker["where"] != self.here or os.name != "posix":
            return self._silent(trial)
        path = self.directory.sub(worker["directory"])
        if not (path / "manifest.json").exists():
            return True
        try:
            with RunDirectory.open(path).lock():
                return True
        except CheckpointError:
            return False

    def _silent(self, trial: FrozenTrial) -> bool:
        """Whether its beat has not been seen to change for long, by the clock of this process alone."""
        beat, now = trial.user_attrs.get("beat", 0), time.monotonic()
        known, since = self._beats.get(trial.number, (None, now))
        if beat != known:
            self._beats[trial.number] = (beat, now)
            return False
        return now - since > SILENT_FOR

    def _curve(self) -> Curve:
        points, failures = [], []
        for trial in self.study.get_trials(deepcopy=False):
            if trial.state == TrialState.COMPLETE:
                points.append(_point(trial, coefficients(self.work.config, trial.params["factor"])))
            elif _finished(trial):
                failures.append(Failure(trial.params.get("factor", 0.0), trial.user_attrs["error"]))
        points.sort(key=lambda point: (point.factor, point.trial))
        return Curve(self.study.study_name, points, failures, self.directory.path)


class FirstThenOptuna(BaseSampler):
    """Fixed factors that span the range, then Optuna's multi-objective sampler.

    What a trial gets follows from the seed, its place in the study and the results so far, not from
    the process.
    """

    def __init__(self, seed: int) -> None:
        self.seed = seed

    def infer_relative_search_space(self, study: Any, trial: FrozenTrial) -> dict[str, BaseDistribution]:
        return {}

    def sample_relative(
        self, study: Any, trial: FrozenTrial, search_space: dict[str, BaseDistribution]
    ) -> dict[str, Any]:
        return {}

    def sample_independent(
        self, study: Any, trial: FrozenTrial, param_name: str, param_distribution: BaseDistribution
    ) -> float:
        place = _place(study, trial.number)
        if place < len(FIRST):
            return FIRST[place]
        digest = hashlib.sha256(f"{self.seed}/{place}".encode()).digest()
        sampler = TPESampler(seed=int.from_bytes(digest[:4], "little"), n_startup_trials=len(FIRST))
        known = [t.params["factor"] for t in study.get_trials(deepcopy=False) if "factor" in t.params]
        drawn = [
            float(f"{sampler.sample_independent(study, trial, param_name, param_distribution):.3g}")
            for _ in range(DRAWS)
        ]

        def apart(factor: float) -> float:
            return min(abs(math.log(factor / other)) for other in known)

        inside = [min(max(factor, FACTORS.low), FACTORS.high) for factor in drawn]
        return next((f for f in inside if apart(f) > APART), max(inside, key=apart))


def _place(study: optuna.Study, number: int) -> int:
    """The place of a trial among those that repeat no other: a worker's death does not change it."""
    earlier = study.get_trials(deepcopy=False)[:number]
    return sum("retry_of" not in trial.user_attrs for trial in earlier)


def _finished(trial: FrozenTrial) -> bool:
    failed = trial.state == TrialState.FAIL and "error" in trial.user_attrs
    return failed or trial.state == TrialState.COMPLETE


def _point(trial: FrozenTrial, settings: Mapping[str, float]) -> Point:
    attack, l0 = trial.values
    notes = trial.user_attrs
    names = ("rounded", "sum", "deletion", "alive", "recovered", "seconds")
    return Point(
        factor=trial.params["factor"],
        attack=attack,
        l0=l0,
        settings=dict(settings),
        trial=trial.number,
        directory=notes["worker"]["directory"],
        **{name: notes[name] for name in names},
    )


@contextmanager
def _beating(trial: Trial) -> Iterator[None]:
    """Give signs of life while a trial runs. A storage that cannot be reached now may be so later."""
    ended = threading.Event()

    def beat() -> None:
        number = 0
        while not ended.wait(BEAT_EVERY):
            number += 1
            with suppress(Exception):
                trial.set_user_attr("beat", number)

    thread = threading.Thread(target=beat, name="rankone-beat", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


@contextmanager
def _quiet() -> Iterator[None]:
    """Optuna without its log of every study and trial."""
    before = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    try:
        yield
    finally:
        optuna.logging.set_verbosity(before)


def _refuse_other_directory(directory: RunDirectory, name: str, identity: Mapping[str, Any]) -> None:
    """Raise if a directory holds something else than this study; else note what it holds."""
    with directory.lock(PATIENCE):
        names = directory.names()
        if SETTINGS not in names:
            if names:
                raise CheckpointError(
                    f"{directory.path} holds something else that rankone made ({names[0]}). Choose another "
                    "directory with --out."
                )
            directory.write_json(SETTINGS, {"study": name, "settings": identity})
        stored = directory.read_json(SETTINGS)
    if stored["study"] != name:
        raise CheckpointError(
            f"{directory.path} holds the study {shown(stored['study'])}, not {shown(name)}. Choose another "
            "directory with --out."
        )
    _refuse_other_settings(
        str(directory.path), stored["settings"], identity, "choose another directory with --out"
    )


def _refuse_other_settings(
    place: str, stored: Mapping[str, Any], identity: Mapping[str, Any], otherwise: str
) -> None:
    differing = differences(dict(stored), dict(identity))
    if differing:
        raise CheckpointError(
            f"{place} holds a study with other settings: {'; '.join(differing)}. Go on with its own "
            f"settings, or {otherwise}."
        )


@contextmanager
def _opened(directory: RunDirectory, storage: str | BaseStorage | None) -> Iterator[BaseStorage]:
    """The storage of a study; what was opened here is closed."""
    shared = _storage(directory, storage)
    try:
        yield shared
    except (OptunaError, SQLAlchemyError) as error:
        raise CheckpointError(
            f"The storage of the study failed ({_first_line(error)}). Finished trials are kept; go on with "
            "the same command when it can be reached again."
        ) from error
    finally:
        if isinstance(shared, RDBStorage) and shared is not storage:
            shared.remove_session()
            shared.engine.dispose()


def _storage(directory: RunDirectory, storage: str | BaseStorage | None) -> BaseStorage:
    if isinstance(storage, BaseStorage):
        return storage
    if storage is None:
        with directory.lock(PATIENCE):
            if not directory.has(JOURNAL):
                directory.appender(JOURNAL).close()
        try:
            return JournalStorage(Journal(directory.sub(JOURNAL)))
        except (KeyError, TypeError, ValueError, AttributeError, AssertionError, OptunaError) as error:
            raise CheckpointError(
                f"{directory.sub(JOURNAL)} cannot be read ({_first_line(error)}): it was damaged or edited. "
                "Put the original back, or choose another directory with --out."
            ) from None
    try:
        return _database(storage)
    except Exception as error:  # whatever a database and its driver raise
        hidden = re.sub(r"://[^@/]*@", "://***@", storage)
        raise ConfigError(
            f"The storage {shown(hidden)} cannot be opened ({_first_line(error)}). Expected the URL of a "
            "database that can be reached, such as sqlite:///tune.db or postgresql://HOST/NAME; without "
            "--storage, a journal in the output directory is used."
        ) from None


def _database(url: str) -> RDBStorage:
    """A database as storage. Workers that come to a new one at the same time all try to make its tables,
    and all but one fail, half-way: they find the tables there when they look again."""
    for wait in (0.2, 0.4, 0.8, 1.6):
        try:
            return RDBStorage(url)
        except SQLAlchemyError:
            time.sleep(wait)
    return RDBStorage(url)


def _study(storage: BaseStorage, name: str, work: Work) -> optuna.Study:
    """The study of this name, new or as it is; refused if it was made with other settings."""
    sampler, identity = FirstThenOptuna(work.config.seed), work.identity()
    try:
        study = optuna.create_study(
            storage=storage, study_name=name, sampler=sampler, directions=["minimize", "minimize"]
        )
        study.set_user_attr("settings", identity)
    except DuplicatedStudyError:
        study = optuna.load_study(storage=storage, study_name=name, sampler=sampler)
        stored = _settings_of(study)
        if stored is None:
            if study.get_trials(deepcopy=False) or len(study.directions) != 2:
                raise CheckpointError(
                    f"The storage has a study {shown(name)} that rankone did not make. Choose another name "
                    "with --study."
                ) from None
            study.set_user_attr("settings", identity)  # whoever made it was killed before this line
        else:
            _refuse_other_settings(
                f"The storage, under the name {name},", stored, identity, "choose another name with --study"
            )
    return study


def _settings_of(study: optuna.Study) -> dict[str, Any] | None:
    """What a study was made with; whoever has just made it may be about to write that."""
    until = time.monotonic() + 5.0
    while "settings" not in study.user_attrs and time.monotonic() < until:
        if study.get_trials(deepcopy=False):
            break
        time.sleep(0.1)
    return study.user_attrs.get("settings")


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:300]
