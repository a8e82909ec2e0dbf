"""A study's journal in one file that a kill cannot damage. Needs the extra `tune` (Optuna).

Optuna's own file backend leaves half a line behind when its process is killed while it writes, and
the next line is then appended to that half: from there on the study cannot be read. Here whoever
appends holds a lock that the system gives back when a process dies, and first removes what a killed
writer left; readers take whole lines only.
"""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from optuna.storages.journal import BaseJournalBackend

from rankone.errors import CheckpointError

try:
    import fcntl
except ImportError:  # Windows has no flock: one worker at a time is then the user's care
    fcntl = None


class Journal(BaseJournalBackend):
    """Operations on a study, one JSON object per line, appended by any number of processes."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._offsets = [0]
        """Where each line begins that was read so far."""

    def read_logs(self, log_number_from: int) -> Iterator[dict[str, Any]]:
        first = min(log_number_from, len(self._offsets) - 1)
        with open(self.path, "rb") as file:
            file.seek(self._offsets[first])
            content = file.read()
        whole = content[: content.rfind(b"\n") + 1]
        offset = self._offsets[first]
        for number, line in enumerate(whole.splitlines(keepends=True), start=first):
            offset += len(line)
            if number + 1 == len(self._offsets):
                self._offsets.append(offset)
            if number >= log_number_from:
                yield self._operation(line, number)

    def append_logs(self, logs: list[dict[str, Any]]) -> None:
        lines = "".join(json.dumps(log, separators=(",", ":")) + "\n" for log in logs).encode()
        with self._locked() as descriptor:
            os.ftruncate(descriptor, self._end_of_lines(descriptor))
            os.lseek(descriptor, 0, os.SEEK_END)
            rest = memoryview(lines)
            while rest:
                rest = rest[os.write(descriptor, rest) :]
            os.fsync(descriptor)

    @contextmanager
    def _locked(self) -> Iterator[int]:
        descriptor = os.open(self.path, os.O_RDWR | getattr(os, "O_NOFOLLOW", 0))
        try:
            if fcntl is not None:
                fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield descriptor
        finally:
            os.close(descriptor)

    def _end_of_lines(self, descriptor: int) -> int:
        """The length of the file without half a line at its end."""
        end = os.lseek(descriptor, 0, os.SEEK_END)
        tail = b""
        while end > 0:
            begin = max(0, end - 4096)
            os.lseek(descriptor, begin, os.SEEK_SET)
            tail = os.read(descriptor, end - begin)
            newline = tail.rfind(b"\n")
            if newline >= 0:
                return begin + newline + 1
            end = begin
        return 0

    def _operation(self, line: bytes, number: int) -> dict[str, Any]:
        try:
            operation = json.loads(line)
            if isinstance(operation, dict) and "op_code" in operation:
                return operation
        except ValueError:
            pass
        raise CheckpointError(
            f"Line {number + 1} of {self.path} is no record of a study: the file was damaged or edited. Put "
            "the original back, or choose another directory with --out."
        )
