"""Token ids on disk: written once, one after the other, and read through a memory map.

A file holds a short head (what it is, how wide a number is, how many there are) and the numbers. It
is written under another name and renamed when it is complete, so that a file that is there is whole.
It lives where the system keeps caches (`RANKONE_CACHE_DIR`), under the digest of what it was made
from, or in a temporary file that nobody else sees.
"""

import os
import secrets
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from rankone.errors import BatchError

MAGIC = b"rankone tokens 1"
HEAD = len(MAGIC) + 8
WIDE = np.dtype("<u4")
"""Ids are below 2**32; half as wide would do for most vocabularies, but not for all."""
AT_ONCE = 2**20
Document = Iterable[list[int]]
"""The ids of a document, in as many pieces as one likes: it need not fit into memory."""


def cache_folder() -> Path:
    """Where token ids are kept from session to session."""
    given = os.environ.get("RANKONE_CACHE_DIR")
    if given:
        return Path(given) / "tokens"
    if sys.platform == "win32":
        caches = Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local")
    elif sys.platform == "darwin":
        caches = Path.home() / "Library" / "Caches"
    else:
        caches = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return caches / "rankone" / "tokens"


def kept(key: str, documents: Iterable[Document]) -> tuple[Any, Any]:
    """The ids of all documents, and where each ends: from the cache, or made and put there."""
    folder = cache_folder()
    path, ends = folder / f"{key}.tokens", folder / f"{key}.ends"
    if not (path.is_file() and ends.is_file()):
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError:
            return spooled(documents)
        _write(path, ends, documents)
    return _read(path, WIDE), _read(ends, np.dtype("<u8"))


def spooled(documents: Iterable[Document]) -> tuple[Any, Any]:
    """The same in temporary files, which are gone when nobody uses them any more."""
    with tempfile.TemporaryDirectory(prefix="rankone-tokens-") as folder:
        path, ends = Path(folder) / "tokens", Path(folder) / "ends"
        _write(path, ends, documents)
        tokens, stops = _read(path, WIDE), _read(ends, np.dtype("<u8"))
        if sys.platform == "win32":  # where an open file cannot be deleted
            return np.array(tokens), np.array(stops)
        return tokens, stops


def _write(path: Path, ends: Path, documents: Iterable[Document]) -> None:
    """Both files; the one that says where documents end comes last."""
    token = secrets.token_hex(8)
    temporary = path.with_name(f".{path.name}.{token}.tmp")
    stops, count, waiting = [], 0, []
    try:
        with open(temporary, "xb") as file:
            file.write(MAGIC + bytes(8))
            for document in documents:
                for ids in document:
                    _refuse_no_ids(ids)
                    waiting += ids
                    count += len(ids)
                    if len(waiting) >= AT_ONCE:
                        file.write(np.asarray(waiting, WIDE).tobytes())
                        waiting = []
                stops.append(count)
            file.write(np.asarray(waiting, WIDE).tobytes())
            file.seek(len(MAGIC))
            file.write(count.to_bytes(8, "little"))
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    behind = ends.with_name(f".{ends.name}.{token}.tmp")
    behind.write_bytes(MAGIC + len(stops).to_bytes(8, "little") + np.asarray(stops, "<u8").tobytes())
    os.replace(behind, ends)


def _refuse_no_ids(ids: list[int]) -> None:
    wrong = next((i for i in ids if not 0 <= i < 2**32), None)
    if wrong is not None:
        raise BatchError(f"{wrong} is no token id; expected whole numbers from 0.")


def _read(path: Path, dtype: Any) -> Any:
    """The numbers of a file, through a memory map."""
    with open(path, "rb") as file:
        head = file.read(HEAD)
    count = int.from_bytes(head[len(MAGIC) :], "little")
    if head[: len(MAGIC)] != MAGIC or path.stat().st_size != HEAD + count * dtype.itemsize:
        raise BatchError(f"{path} is damaged. Delete it: it is made again from your text.")
    if not count:
        return np.zeros(0, dtype)
    return np.memmap(path, dtype, mode="r", offset=HEAD, shape=(count,))
