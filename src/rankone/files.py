"""Files that survive a kill and a full disk, and directories in which nothing of the user's is lost.

A *sealed* file is a safetensors file whose metadata holds a digest over every tensor and every
other metadata entry. A file that was cut short or edited fails its seal and is refused by name.

A *run directory* is one that rankone made. Its manifest.json lists each file that rankone wrote
there, with its SHA-256; no other file is ever replaced or deleted, no symbolic link inside it is
followed, and a file that was changed by hand is refused by name when it is read. A name enters the
manifest before its file is written, every write is synced (the file, then its directory) before the
next one begins, and nothing is cached, so that a kill or an error between any two system calls
leaves a directory that opens, with either the old or the new content of every file.

Nothing here pickles or unpickles.
"""

import hashlib
import json
import os
import re
import secrets
import stat
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

import safetensors
import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from rankone.errors import CheckpointError

try:
    import fcntl
except ImportError:  # Windows has no flock: two runs in one directory are then the user's care
    fcntl = None

_KEY = "rankone"
_MANIFEST = "manifest.json"
_LOCK = ".lock"
_PART = re.compile(r"(?!\.)[^/\\:\x00-\x1f\x7f-\x9f\ud800-\udfff]+")
_TOKEN = re.compile(r"[0-9a-f]{16}")
_DIGEST = re.compile(r"[0-9a-f]{64}")
_FIRST_MANIFEST = re.compile(rf"\.manifest\.json\.{_TOKEN.pattern}\.tmp")
_LONGEST_JSON = _LONGEST_HEADER = 8 * 2**20  # Python needs up to 25 times as much to hold what it parsed
_LONGEST_FILE = 2**30
_NO_LINK = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_BINARY", 0)


def write_atomic(path: Path, content: bytes | str) -> None:
    """Write a file so that at every moment either the old or the new content is there, whole."""
    _refuse_link(path)
    _put(path, secrets.token_hex(8), _as_bytes(content))


def read_text(path: Path) -> str:
    return _decode(_read(path, _LONGEST_FILE), path)


def read_json(path: Path) -> Any:
    return _parse_json(_read(path, _LONGEST_JSON), path)


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def sealed_bytes(tensors: Mapping[str, Tensor], meta: Mapping[str, Any]) -> bytes:
    """Tensors and metadata as the content of one sealed safetensors file."""
    plain = {name: t.detach().cpu().contiguous() for name, t in tensors.items()}
    # One metadata entry: safetensors writes several in any order, and equal content must be equal
    # bytes.
    sealed = json.dumps({"meta": meta, "seal": _seal(plain, meta)}, sort_keys=True)
    return safetensors.torch.save(plain, {_KEY: sealed})


def save_sealed(path: Path, tensors: Mapping[str, Tensor], meta: Mapping[str, Any]) -> None:
    write_atomic(path, sealed_bytes(tensors, meta))


def load_sealed(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Read a sealed file, or refuse it."""
    with _reading(path) as file:
        header_size = int.from_bytes(file.read(8), "little")
    try:
        if header_size > _LONGEST_HEADER:
            raise ValueError(f"its header claims {header_size} bytes; {_LONGEST_HEADER} is the most")
        with safetensors.safe_open(path, framework="pt") as file:
            header = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
    except (SafetensorError, ValueError, TypeError, AttributeError, RuntimeError, OSError) as error:
        raise CheckpointError(f"{path} cannot be read ({error}): it is damaged and is not loaded.") from None
    try:
        sealed = json.loads(header[_KEY])
        meta, seal = sealed["meta"], sealed["seal"]
        matches = isinstance(meta, dict) and seal == _seal(tensors, meta)
    except (KeyError, TypeError, ValueError, RecursionError):
        raise CheckpointError(f"{path} was not written by rankone (no seal) and is not loaded.") from None
    if not matches:
        raise CheckpointError(f"{path} does not match its seal: it was changed since and is not loaded.")
    return tensors, meta


def fingerprint(module: nn.Module) -> str:
    """A SHA-256 over every parameter and buffer of a module: names, types, shapes and bytes."""
    return digest_of({name: t for name, t in module.state_dict().items() if isinstance(t, Tensor)})


def digest_of(tensors: Mapping[str, Tensor]) -> str:
    digest = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name].detach().cpu().contiguous()
        digest.update(f"{name}|{tensor.dtype}|{tuple(tensor.shape)}|".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


class RunDirectory:
    """A directory that rankone made, in which it replaces and deletes only what it wrote itself.

    Names are relative, with `/` between their parts. Whatever writes holds the lock, for one call
    or, in `with directory.lock():`, for a whole run; reading needs none.
    """

    def __init__(self, path: Path) -> None:
        """Not to be called: `claim` and `open` check what is there first."""
        self.path = path
        self._locked = False

    @classmethod
    def claim(cls, path: "str | Path | RunDirectory", patience: float = 0.0) -> "RunDirectory":
        """Open a run directory to write in it, or make one of a directory that is missing or empty.

        A claim that was killed leaves an empty .lock and .manifest.json.<token>.tmp; a directory
        with nothing else counts as empty. The directory itself may be a symbolic link to one.
        """
        if isinstance(path, RunDirectory):
            return path
        if not str(path):
            raise CheckpointError("An empty path is no run directory; give the directory a name.")
        root = Path(path)
        try:
            _make_directory(root)
            names = sorted(os.listdir(root))
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{root} cannot be a run directory ({error}); choose another.") from None
        if _MANIFEST not in names:
            others = [repr(name) for name in names if not _left_by_claim(root / name)]
            if others:
                more = f" and {len(others) - 3} more" if len(others) > 3 else ""
                raise CheckpointError(
                    f"{root} is not empty and not a run directory: it has "
                    f"{', '.join(others[:3])}{more}. "
                    "Nothing in it was touched; choose a directory that is empty or does not exist yet."
                )
            with _file_lock(root, patience):
                if not _mode(root / _MANIFEST):  # else another process was faster
                    for name in set(names) - {_LOCK}:
                        _discard(root / name)
                    cls(root)._save(secrets.token_hex(8), {_LOCK: None})
        return cls.open(root)

    @classmethod
    def open(cls, path: str | Path) -> "RunDirectory":
        """Open a run directory; temporary files of killed writes go, unless a process is at work."""
        directory = cls(Path(path))
        if not str(path) or not os.path.lexists(directory.path / _MANIFEST):
            raise CheckpointError(
                f"{str(path)!r} is not a run directory: it has no {_MANIFEST}. `rankone run` makes one."
            )
        if directory._leftovers():
            with suppress(CheckpointError, OSError), directory.lock():
                pass
        return directory

    def has(self, name: str) -> bool:
        """Whether rankone wrote this file and it is still there."""
        return name in self._load()[1] and stat.S_ISREG(_mode(self.sub(name)))

    def names(self, prefix: str = "") -> list[str]:
        """What rankone wrote and is still there, sorted."""
        names = sorted(name for name in self._load()[1] if name.startswith(prefix) and name != _LOCK)
        return [name for name in names if stat.S_ISREG(_mode(self.sub(name)))]

    def sub(self, name: str) -> Path:
        """The path of an entry, which need not exist; refused if a symbolic link is on the way."""
        _check_name(name)
        path, parts = self.path, name.split("/")
        for depth, part in enumerate(parts, 1):
            path = path / part
            _refuse_link(path)
            if depth < len(parts) and _mode(path) and not path.is_dir():
                raise CheckpointError(f"{path} is not a directory, so {name!r} cannot be in it.")
        return path

    def read(self, name: str) -> bytes:
        content = _read(self.sub(name), _LONGEST_FILE)
        self._verify(name, sha256(content))
        return content

    def read_text(self, name: str) -> str:
        return _decode(self.read(name), self.path / name)

    def read_json(self, name: str) -> Any:
        return _parse_json(self.read(name), self.path / name)

    def read_sealed(self, name: str) -> tuple[dict[str, Tensor], dict[str, Any]]:
        path = self.sub(name)
        self._verify(name, _digest_of_file(path))
        return load_sealed(path)

    def write(self, name: str, content: bytes | str) -> None:
        """Write or replace a file; until it is there, the manifest accepts its old content too."""
        content = _as_bytes(content)
        with self.lock():
            path, token, files = self._own(name)
            before, new = files.get(name), [sha256(content)]
            old = [_digest_of_file(path)] if _mode(path) else []
            accepted = [d for d in old if d not in new and (before is None or d in before)] + new
            if accepted != before:
                self._save(token, files | {name: accepted})
            _put(path, token, content)
            if accepted != new:
                self._save(token, files | {name: new})

    def write_json(self, name: str, value: Any) -> None:
        self.write(name, _json_text(value))

    def remove(self, name: str) -> None:
        """Delete a file that rankone wrote, then forget it."""
        with self.lock():
            path, token, files = self._own(name)
            if name not in files:
                raise CheckpointError(f"There is no file {path} that rankone wrote; nothing is removed.")
            _discard(_temporary(path, token))
            _discard(path)
            _sync_directory(path.parent)
            del files[name]
            self._save(token, files)

    def appender(self, name: str, keep: int = 0) -> BinaryIO:
        """A file to append to after its first `keep` bytes; it has no digest until `seal`.

        Sync it (`flush`, then `os.fsync`) before another file relies on its length.
        """
        with self.lock():
            path, token, files = self._own(name)
            content = self.read(name)[:keep] if keep else b""
            if len(content) < keep:
                raise CheckpointError(
                    f"{path} has {len(content)} bytes, not the {keep} that this run had written: it was "
                    "cut short. Put the original back, or repeat the run in another directory."
                )
            self._save(token, files | {name: None})
            _put(path, token, content)  # not truncated: a copy made of hard links keeps its content
        return os.fdopen(os.open(path, os.O_WRONLY | os.O_APPEND | _NO_LINK), "ab")

    def seal(self, name: str) -> None:
        """Give a file that was appended to, and is closed, the digest that `read` verifies."""
        with self.lock():
            self.write(name, self.read(name))

    @contextmanager
    def lock(self, patience: float = 0.0) -> Iterator[None]:
        """Keep others out; inside, locking again does nothing. Waits `patience` seconds for another."""
        if self._locked:
            yield
            return
        if _LOCK not in self._load()[1]:
            raise CheckpointError(f"{self.path / _LOCK} is not recorded in {_MANIFEST}: it is not rankone's.")
        with _file_lock(self.path, patience):
            self._locked = True
            try:
                for path in self._leftovers():
                    os.unlink(path)
                yield
            finally:
                self._locked = False

    def _load(self) -> tuple[str, dict[str, list[str] | None]]:
        """The token of temporary files, and each recorded name with the digests it may have."""
        path = self.path / _MANIFEST
        _refuse_link(path)
        manifest = read_json(path)
        try:
            token, files = manifest["token"], manifest["files"]
            for name in files.keys() - {_LOCK}:
                _check_name(name)
            digests = [digest for entry in files.values() if entry is not None for digest in entry]
            safe = _TOKEN.fullmatch(token) and all(map(_DIGEST.fullmatch, digests))
            if safe and manifest == _manifest(token, files):
                return token, files
        except (CheckpointError, TypeError, KeyError, AttributeError, RecursionError):
            pass
        raise CheckpointError(
            f"{path} was not written by this version of rankone, or was changed since; nothing in this "
            "directory is touched. Choose another directory."
        )

    def _save(self, token: str, files: Mapping[str, list[str] | None]) -> None:
        _put(self.path / _MANIFEST, token, _as_bytes(_json_text(_manifest(token, files))))

    def _verify(self, name: str, digest: str) -> None:
        # The manifest is read after the file: a write in another process is recorded first.
        files = self._load()[1]
        path, recorded = self.path / name, files.get(name)
        if name not in files:
            raise CheckpointError(f"{path} was not written by rankone: {_MANIFEST} does not list it.")
        if recorded is not None and digest not in recorded:
            raise CheckpointError(
                f"{path} was changed after rankone wrote it (its SHA-256 is now {digest[:12]}...). Put "
                "the original back, or repeat the run in another directory."
            )

    def _own(self, name: str) -> tuple[Path, str, dict[str, list[str] | None]]:
        """The path of a file to be written or deleted, refused if it is not rankone's; the manifest."""
        path, (token, files) = self.sub(name), self._load()
        if _mode(path) and not (name in files and stat.S_ISREG(_mode(path))):
            raise CheckpointError(
                f"{path} is not a file that rankone wrote ({_MANIFEST} does not list it) and is not "
                "touched; move it away, or choose another directory."
            )
        return path, token, files

    def _leftovers(self) -> list[Path]:
        """Temporary files of killed writes. Their names follow from the manifest: nothing is guessed."""
        token, files = self._load()
        paths = [_temporary(self.path / _MANIFEST, token)]
        for name in files.keys() - {_LOCK}:
            with suppress(CheckpointError):
                paths.append(_temporary(self.sub(name), token))
        return [path for path in paths if _mode(path)]


def _manifest(token: str, files: Mapping[str, list[str] | None]) -> dict[str, Any]:
    content = {"format": 1, "token": token, "files": dict(sorted(files.items()))}
    return content | {"seal": sha256(json.dumps(content).encode())}


def _check_name(name: str) -> None:
    parts = name.split("/")
    if len(name) > 1000 or not all(_PART.fullmatch(part) and len(part.encode()) <= 200 for part in parts):
        raise CheckpointError(
            f"{name[:80]!r} cannot name a file in a run directory: a name is relative, its parts "
            "have 1 to 200 bytes, none begins with a dot, and it has no backslash, colon or control "
            "character."
        )


def _left_by_claim(path: Path) -> bool:
    mode = _mode(path) or stat.S_IFREG  # it may just have gone: another process claims
    empty_lock = path.name == _LOCK and os.lstat(path).st_size == 0
    return stat.S_ISREG(mode) and (empty_lock or _FIRST_MANIFEST.fullmatch(path.name) is not None)


@contextmanager
def _file_lock(root: Path, patience: float = 0.0) -> Iterator[None]:
    path = root / _LOCK
    if _mode(path) and not stat.S_ISREG(_mode(path)):
        raise CheckpointError(f"{path} is not a regular file, so {root} cannot be locked; remove it.")
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | _NO_LINK, 0o666)
    try:
        until = time.monotonic() + patience
        while fcntl is not None:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() >= until:
                    raise CheckpointError(
                        f"Another rankone process is running in {root}; wait for it, or choose another "
                        "directory."
                    ) from None
            time.sleep(0.01)
        yield
    finally:
        os.close(descriptor)


def _put(path: Path, token: str, content: bytes) -> None:
    """Write a file by way of a temporary one; the file and its directory are synced at the end."""
    _make_directory(path.parent)
    temporary = _temporary(path, token)
    _discard(temporary)
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | _NO_LINK, 0o666)
    try:
        try:
            rest = memoryview(content)
            while rest:
                rest = rest[os.write(descriptor, rest) :]
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        os.replace(temporary, path)
    except BaseException:
        with suppress(OSError):
            os.unlink(temporary)
        raise
    _sync_directory(path.parent)


def _temporary(path: Path, token: str) -> Path:
    return path.with_name(f".{path.name}.{token}.tmp")


def _discard(path: Path) -> None:
    if _mode(path):
        os.unlink(path)


def _make_directory(path: Path) -> None:
    """The directory and its parents, each new entry synced."""
    if not path.is_dir():
        _make_directory(path.parent)
        path.mkdir(exist_ok=True)
        _sync_directory(path.parent)


def _sync_directory(path: Path) -> None:
    if os.name == "posix":  # elsewhere a directory cannot be opened
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _mode(path: Path) -> int:
    """What an entry is, without following a symbolic link; 0 if there is none."""
    try:
        return os.lstat(path).st_mode
    except (FileNotFoundError, NotADirectoryError):
        return 0


def _refuse_link(path: Path) -> None:
    if path.is_symlink():
        raise CheckpointError(f"{path} is a symbolic link and is not followed; put the file itself there.")


@contextmanager
def _reading(path: Path) -> Iterator[Any]:
    try:
        if not stat.S_ISREG(os.stat(path).st_mode):  # opening a pipe would wait for ever
            raise CheckpointError(f"{path} is not a regular file and is not read.")
        with open(path, "rb") as file:
            yield file
    except FileNotFoundError:
        raise CheckpointError(f"There is no file {path}.") from None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read ({error}).") from None


def _read(path: Path, longest: int) -> bytes:
    with _reading(path) as file:
        content = file.read(longest + 1)
    if len(content) > longest:
        raise CheckpointError(f"{path} has more than {longest} bytes, the most that is read of such a file.")
    return content


def _digest_of_file(path: Path) -> str:
    with _reading(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _as_bytes(content: bytes | str) -> bytes:
    return content.encode() if isinstance(content, str) else content


def _decode(content: bytes, path: Path) -> str:
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{path} is not UTF-8 text ({error}); it may have been damaged.") from None


def _json_text(value: Any) -> str:
    return json.dumps(value, indent=2, ensure_ascii=False) + "\n"


def _parse_json(content: bytes, path: Path) -> Any:
    text = _decode(content, path)
    try:
        if len(content) > _LONGEST_JSON:
            raise ValueError(f"it has more than {_LONGEST_JSON} bytes")
        value = json.loads(text)
        if "\\ud" in text.lower():  # half a surrogate pair parses, but cannot be printed or written
            _json_text(value).encode()
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is not valid JSON ({error}); it was cut short or edited.") from None
    return value


def _seal(tensors: Mapping[str, Tensor], meta: Mapping[str, Any]) -> str:
    return sha256(f"{digest_of(tensors)}|{json.dumps(meta, sort_keys=True)}".encode())
