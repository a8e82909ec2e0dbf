"""Where the numbers of a run go while it runs.

`metrics.jsonl` is always written and holds only what is reproducible: no times, so that a resumed run ends with the same
bytes as one that was never interrupted. Other trackers are observers of the same records.
"""

import hashlib
import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rankone.errors import CheckpointError

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


class MetricsFile:
    """An append-only `metrics.jsonl` that can be cut back to where a checkpoint was taken."""

    def __init__(self, path: Path, keep_bytes: int = 0, keep_sha256: str | None = None) -> None:
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        content = path.read_bytes() if path.exists() else b""
        if len(content) < keep_bytes:
            raise CheckpointError(
                f"{path} has {len(content)} bytes, but the checkpoint was taken when it had {keep_bytes}: it was cut short or replaced. "
                "Restore it, or start the run again in a new directory."
            )
        self._digest = hashlib.sha256(content[:keep_bytes])
        if keep_sha256 is not None and self._digest.hexdigest() != keep_sha256:
            raise CheckpointError(
                f"{path} was changed after the checkpoint was taken. Restore it, or start the run again in a new directory."
            )
        with open(path, "ab") as file:
            file.truncate(keep_bytes)
        self._file = open(path, "ab")  # noqa: SIM115 (closed in close)

    def write(self, record: Record) -> None:
        line = (json.dumps(record) + "\n").encode()
        self._digest.update(line)
        self._file.write(line)
        self._file.flush()

    def sync(self) -> tuple[int, str]:
        """Force what was written to disk; return the number of bytes and their SHA-256."""
        self._file.flush()
        os.fsync(self._file.fileno())
        return self._file.tell(), self._digest.hexdigest()

    def close(self) -> None:
        self._file.close()


def read_metrics(path: Path, first_bytes: int | None = None) -> list[Record]:
    """The records of a `metrics.jsonl`, or of as many of its bytes as belong to a checkpoint: what comes after may be half a line."""
    content = path.read_bytes()[:first_bytes] if path.exists() else b""
    return [json.loads(line) for line in content.splitlines()]
