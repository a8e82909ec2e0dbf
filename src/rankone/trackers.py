"""Trackers: the numbers of a run, sent on to where somebody looks at them while it goes.

`metrics.jsonl` is written in any case and is the run's own record (metrics_log.py). A tracker is an
observer of the same records: TensorBoard, Weights & Biases (online or offline) or trackio, named by
`--track`, in the extra `trackers`, imported when it is used. A tracker opens with the first record, so
that a run that is refused leaves none behind; one that fails later is dropped with a word, and the run
goes on. A tracker of your own is a class under `@TRACKERS.register`, or any function as `observer=`.
"""

import contextlib
import hashlib
import json
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar

from rankone.errors import ConfigError
from rankone.metrics_log import Observer, Progress
from rankone.settings import Registry


class Tracker(ABC):
    """One place that is told every record of one run."""

    needs: ClassVar[str] = ""
    """The package that it is made of."""

    def __init__(self, out: Path, settings: Mapping[str, Any]) -> None:
        """`out` is the run directory, `settings` the complete settings of the run."""
        self.out, self.settings = out, settings

    @abstractmethod
    def open(self, first: Progress) -> None:
        """Get ready for the first record; a run that was resumed does not begin at 0."""

    @abstractmethod
    def log(self, values: Mapping[str, float], step: int) -> None: ...

    @abstractmethod
    def close(self) -> None: ...

    @property
    def name(self) -> str:
        return self.out.name

    @property
    def id(self) -> str:
        """What tells this run from all others, also from one that had the same directory before."""
        manifest = self.out / "manifest.json"
        if manifest.is_file():
            return json.loads(manifest.read_text(encoding="utf-8"))["token"]
        return hashlib.sha256(str(self.out.resolve()).encode()).hexdigest()[:16]

    @property
    def project(self) -> str:
        return str(self.settings.get("experiment", "rankone"))


TRACKERS: Registry[type[Tracker]] = Registry("tracker")


def numbers(progress: Progress) -> dict[str, float]:
    """A record as flat names and numbers, as every tracker takes them."""
    record = progress.record
    return {
        "lr": record["lr"],
        **{f"loss/{name}": value for name, value in record["loss"].items()},
        **{f"l0/{name}": value for name, value in record["l0"].items()},
        "ms_per_step": progress.ms_per_step,
    }


@TRACKERS.register("tensorboard")
class TensorBoard(Tracker):
    """Event files in `tensorboard/` in the run directory: `tensorboard --logdir runs`."""

    needs: ClassVar[str] = "tensorboard"

    def open(self, first: Progress) -> None:
        from torch.utils.tensorboard import SummaryWriter

        begun = first.record["step"]
        # What was logged after the checkpoint that a run goes on from is logged again.
        self.writer = SummaryWriter(str(self.out / "tensorboard"), purge_step=begun or None)
        if begun == 0:
            text = json.dumps(self.settings, indent=2)
            self.writer.add_text("settings", "\n".join(f"    {line}" for line in text.splitlines()))

    def log(self, values: Mapping[str, float], step: int) -> None:
        for name, value in values.items():
            self.writer.add_scalar(name, value, step)
        self.writer.flush()

    def close(self) -> None:
        self.writer.close()


@TRACKERS.register("wandb")
class WandB(Tracker):
    """Weights & Biases; one run there for each run directory, resumed as that is."""

    needs: ClassVar[str] = "wandb"
    mode: ClassVar[str | None] = None

    def open(self, first: Progress) -> None:
        import wandb

        quiet = wandb.Settings(silent=True, console="off")
        self.run = wandb.init(
            project=self.project,
            name=self.name,
            id=self.id,
            resume="allow",
            dir=str(self.out),
            mode=self.mode,  # pyright: ignore[reportArgumentType]
            config=dict(self.settings),
            settings=quiet,
        )

    def log(self, values: Mapping[str, float], step: int) -> None:
        self.run.log(dict(values), step=step)

    def close(self) -> None:
        self.run.finish()


@TRACKERS.register("wandb-offline")
class WandBOffline(WandB):
    """The same without a network, in `wandb/` in the run directory: `wandb sync` sends it later."""

    mode: ClassVar[str | None] = "offline"


@TRACKERS.register("trackio")
class Trackio(Tracker):
    """trackio, where that keeps its projects (TRACKIO_DIR says where): `trackio show`."""

    needs: ClassVar[str] = "trackio"

    def open(self, first: Progress) -> None:
        import trackio

        self._finish = trackio.finish  # it also forgets the run that `init` remembers
        self.run = trackio.init(
            project=self.project, name=f"{self.name}-{self.id[:6]}", config=dict(self.settings),
            resume="allow", embed=False,
            auto_log_cpu=False, auto_log_gpu=False,
        )  # fmt: skip

    def log(self, values: Mapping[str, float], step: int) -> None:
        self.run.log(dict(values), step=step)

    def close(self) -> None:
        self._finish()


def refuse_unusable(names: Sequence[str]) -> None:
    """Raise if a tracker is unknown or not installed: before a run, not in it."""
    for name in names:
        needed = TRACKERS.get(name).needs
        if needed and find_spec(needed) is None:
            raise ConfigError(
                f"--track {name} needs the package {needed}, which is not installed. Install it with: pip "
                f"install 'rankone[trackers]', or pip install {needed}. metrics.jsonl is written without it."
            )


@contextmanager
def tracking(
    names: Sequence[str], out: Path, settings: Mapping[str, Any], say: Callable[[str], None]
) -> Iterator[Observer | None]:
    """An observer that tells all these trackers; None without any."""
    refuse_unusable(names)
    waiting = {name: TRACKERS.get(name)(out, settings) for name in dict.fromkeys(names)}
    opened: dict[str, Tracker] = {}

    def observe(progress: Progress) -> None:
        for name in list(waiting):
            tracker = waiting.pop(name)
            try:
                with _quietly():
                    tracker.open(progress)
            except Exception as error:
                raise ConfigError(
                    f"--track {name} could not begin ({_first_line(error)}). Put that right, or leave it out: "
                    "metrics.jsonl has every number."
                ) from error
            opened[name] = tracker
        for name in list(opened):
            try:
                with _quietly():
                    opened[name].log(numbers(progress), progress.record["step"])
            except Exception as error:
                del opened[name]
                say(f"--track {name} stopped working ({_first_line(error)}); metrics.jsonl goes on.")

    try:
        yield observe if names else None
    finally:
        for name, tracker in opened.items():
            try:
                with _quietly():
                    tracker.close()
            except Exception as error:
                say(
                    f"--track {name} did not end well ({_first_line(error)}); metrics.jsonl has every number."
                )


def together(*observers: Observer | None) -> Observer | None:
    """One observer that tells all that are there."""
    there = [observer for observer in observers if observer is not None]
    if len(there) < 2:
        return there[0] if there else None

    def tell(progress: Progress) -> None:
        for observer in there:
            observer(progress)

    return tell


def _quietly() -> contextlib.AbstractContextManager[Any]:
    """What a tracker prints is no result of a run."""
    return contextlib.redirect_stdout(sys.stderr)


def _first_line(error: Exception) -> str:
    return (str(error).strip().partition("\n")[0] or type(error).__name__)[:300]
