"""The metrics log: where the numbers of a run go while it runs.

`metrics.jsonl` is always written and holds only what is reproducible: no times, so that a resumed
run ends with the same bytes as one that was never interrupted. Any other tracker is an observer of
the same records: a function that takes a `Progress` (docs/extending.md shows one).
"""

import hashlib
import json
import math
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from rankone.errors import CheckpointError
from rankone.files import RunDirectory

NAME = "metrics.jsonl"
Record = dict[str, Any]


@dataclass(frozen=True)
class Progress:
    """What an observer is told at every log step."""

    record: Record
    step: int
    steps: int
    seconds: float
    """Training time so far, earlier sessions of the same run included."""
    ms_per_step: float
    """Over the time since the last log step."""

    @property
    def seconds_left(self) -> float:
        return (self.steps - self.step) * self.ms_per_step / 1000


Observer = Callable[[Progress], None]


class MetricsLog:
    """An append-only `metrics.jsonl` that can be cut back to where a checkpoint was taken."""

    def __init__(self, directory: RunDirectory, keep_bytes: int = 0, keep_sha256: str | None = None) -> None:
        content = read_prefix(directory, keep_bytes, keep_sha256)
        self.records = parse_metrics(content, str(directory.path / NAME))
        self._directory = directory
        self._digest = hashlib.sha256(content)
        self._file = directory.appender(NAME, keep=keep_bytes)

    def write(self, record: Record) -> None:
        line = (json.dumps(record) + "\n").encode()
        self._digest.update(line)
        self._file.write(line)
        self._file.flush()
        self.records.append(record)

    def sync(self) -> tuple[int, str]:
        """Force what was written to disk; return the number of bytes and their SHA-256."""
        self._file.flush()
        os.fsync(self._file.fileno())
        return self._file.tell(), self._digest.hexdigest()

    def close(self, *, finished: bool) -> None:
        self._file.close()
        if finished:
            self._directory.seal(NAME)


def read_prefix(directory: RunDirectory, size: int, sha256: str | None) -> bytes:
    """The part of a metrics log that belongs to a checkpoint; what comes after may be half a line."""
    path = directory.sub(NAME)
    content = path.read_bytes()[:size] if size and path.is_file() else b""
    if len(content) < size:
        raise CheckpointError(
            f"{path} has {len(content)} bytes, but the checkpoint was taken when it had {size}: it was "
            "cut short or replaced. Restore it, or start the run again in a new directory."
        )
    if sha256 is not None and hashlib.sha256(content).hexdigest() != sha256:
        raise CheckpointError(
            f"{path} was changed after the checkpoint was taken. Restore it, or start the run again in "
            "a new directory."
        )
    return content


def parse_metrics(content: bytes, source: str) -> list[Record]:
    """The records of a metrics log, each checked to be one."""
    records: list[Record] = []
    for number, line in enumerate(content.splitlines(), 1):
        try:
            record = json.loads(line)
            well_formed = isinstance(record["step"], int) and all(
                isinstance(v, int | float) and not isinstance(v, bool) and math.isfinite(v)
                for v in (*record["loss"].values(), *record["l0"].values(), record["loss"]["total"])
            )
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            well_formed = False
        if not well_formed:
            raise CheckpointError(
                f"Line {number} of {source} is not a record of training: the file was cut short or "
                "edited. Restore it, or make the run again."
            )
        records.append(record)  # pyright: ignore[reportPossiblyUnboundVariable] (not if it is well-formed)
    return records
