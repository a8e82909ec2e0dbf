"""How the kernels are compiled, kept and loaded, so that every process computes the same bits.

LLVM optimises the loops when they are compiled, and once more when they are linked into the
function that calls them. A process that compiles runs the first version, a process that loads
numba's cache runs the second, and the two round differently. So child processes compile, and
everyone loads: there is one version.

What is loaded are pickles and machine code. rankone itself compiled them, into a directory that
only this user can write (`RANKONE_CACHE_DIR`, or `rankone` where the system keeps caches), and
sealed them with their SHA-256 and a digest of what they compute. Nothing received from elsewhere is
ever unpickled. A directory that is damaged, or that computes something else, is deleted and
compiled again; one that others can write is not used.
"""

import atexit
import hashlib
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

SOURCE = Path(__file__).with_name("kernels.py")
SEAL = "seal.json"
TARGET_SETTINGS = ("NUMBA_CPU_NAME", "NUMBA_CPU_FEATURES")
"""The settings of numba that machine code depends on, and that a loading process insists on."""
WITHOUT_NUMBA = (
    "numba is missing, so steps run in plain torch with exact gates: as good, several times slower. "
    "pip install numba"
)


class MissingKernels(UserWarning):
    """The compiled kernels cannot be used; everything works, more slowly."""


class _Damaged(Exception):
    """A directory of compiled kernels is not what was sealed."""


class _Kernel:
    """One compiled kernel: alone, or spread over the threads that torch computes with."""

    def __init__(self, alone: Any, address: int, spread: Any) -> None:
        self._alone, self._address, self._spread = alone, address, spread

    def __call__(self, threads: int, arrays: tuple[Any, ...]) -> None:
        C = len(arrays[0])
        threads = min(threads, C, _most_threads)
        if threads < 2:
            self._alone((0, C, *arrays))
        else:
            edges = [C * i // threads for i in range(threads + 1)]
            with _numba_threads(threads):
                self._spread(self._address, np.array(edges), arrays)


class Kernels:
    """The compiled kernels. See kernels.py; `arrays` are the arguments there, without the range.

    The numbers do not depend on `threads`. They are OpenMP's, as torch's are: other threads would fight
    for a core with those, which wait for their next product by spinning (docs/log.md).
    """

    def __init__(self, forward: _Kernel, backward: _Kernel) -> None:
        self._forward, self._backward = forward, backward
        self.digest = _digest(self)

    def gate_forward(self, threads: int, *arrays: Any) -> None:
        self._forward(threads, arrays)

    def gate_backward(self, threads: int, *arrays: Any) -> None:
        self._backward(threads, arrays)


_lock = threading.Lock()
_most_threads = 1
"""How many threads numba may use: one where they are not OpenMP's, and in the child of a fork, which
has none of them."""


def _after_fork() -> None:
    """A lock that another thread held at the fork would never be released."""
    global _lock, _most_threads
    _lock = threading.Lock()
    _most_threads = 1


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


@contextmanager
def _numba_threads(threads: int) -> Iterator[None]:
    import numba

    before = numba.get_num_threads()
    if before != threads:
        numba.set_num_threads(threads)
    try:
        yield
    finally:
        if before != threads:
            numba.set_num_threads(before)


@cache
def kernels() -> Kernels | None:
    """The compiled kernels, or None (with one warning). The first call may compile them."""
    with _lock:
        return _compiled()


def kernels_digest() -> str | None:
    """A digest of what the kernels compute for a fixed input: the same digest, the same bits."""
    compiled = kernels()
    return None if compiled is None else compiled.digest


def _compiled() -> Kernels | None:
    try:
        import numba  # noqa: F401
    except ImportError:
        warnings.warn(WITHOUT_NUMBA, MissingKernels, stacklevel=3)
        return None
    try:
        return _from_cache(*_root())
    except Exception as error:  # whatever is wrong there, a directory of our own gives the same bits
        first = error
    try:
        return _from_cache(*_private_root(f"the usual one cannot be used ({_last_line(first)})"))
    except Exception as error:
        warnings.warn(
            f"The kernels could not be compiled or loaded ({_last_line(error)}), so steps run in plain torch "
            "with exact gates: as good, several times slower.",
            MissingKernels,
            stacklevel=3,
        )
        return None


def _last_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[-1]


def _from_cache(root: Path, trouble: str) -> Kernels:
    directory = root / f"kernels-{_key()}"
    try:
        return _load(directory)
    except _Damaged:
        with _locked(directory):
            return _compile_once(directory, trouble)


def _compile_once(directory: Path, trouble: str) -> Kernels:
    """Load the kernels if another process has compiled them meanwhile, otherwise compile them."""
    try:
        return _load(directory)
    except _Damaged:
        _remove(directory)
    where = f" into a temporary directory, because {trouble}" if trouble else ", once after installation"
    print(f"rankone: compiling kernels{where} (about 8 seconds)", file=sys.stderr, flush=True)
    for leftover in directory.parent.glob(f"{directory.name}.*.tmp"):
        _remove(leftover)  # of a process that was killed; whoever is alive has the lock
    new = Path(tempfile.mkdtemp(prefix=f"{directory.name}.", suffix=".tmp", dir=directory.parent))
    try:
        _run_compilers(new)
        result = _open(new)
        seal = {"digest": result.digest, "files": _digests(new)}
        (new / SEAL).write_text(json.dumps(seal, indent=1), encoding="utf-8")
        with suppress(OSError):  # where there are no locks, another process may have been faster
            new.rename(directory)
        return result
    finally:
        _remove(new)


def _run_compilers(directory: Path) -> None:
    """Compile each kernel in a process of its own, with numba's settings as they come."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("NUMBA_") or k in TARGET_SETTINGS}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
    children = [
        subprocess.Popen(
            [sys.executable, "-P", __file__, str(directory), name],
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, env=environment,
        )
        for name in ("gate_forward", "gate_backward")
    ]  # fmt: skip
    try:
        for child in children:
            complaint = child.communicate()[1]
            if child.returncode:
                raise RuntimeError(complaint.decode(errors="replace"))
    finally:
        for child in children:
            with child:
                child.kill()


def _load(directory: Path) -> Kernels:
    """The kernels in a sealed directory."""
    seal = _sealed(directory)
    result = _open(directory)
    if result.digest != seal["digest"]:
        raise _Damaged(f"{directory} computes something else than when it was sealed")
    return result


def _sealed(directory: Path) -> dict[str, Any]:
    try:
        if trouble := _unsafe(directory):
            raise _Damaged(trouble)
        digests = _digests(directory)
        seal = json.loads((directory / SEAL).read_text(encoding="utf-8"))
        if seal["files"] != digests or not isinstance(seal["digest"], str):
            raise _Damaged(f"{directory} was changed")
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise _Damaged(str(error)) from None
    return seal


def _digests(directory: Path) -> dict[str, str]:
    """SHA-256 of every file but the seal."""
    files = sorted(path for path in directory.rglob("*") if not path.is_dir() and path != directory / SEAL)
    if not all(path.is_file() and not path.is_symlink() for path in (*files, *directory.glob(SEAL))):
        raise _Damaged(f"{directory} holds something that is not a file")
    return {
        path.relative_to(directory).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in files
    }


def _open(directory: Path) -> Kernels:
    """Load the kernels from numba's cache in a directory. Nothing is ever compiled here."""
    global _most_threads
    from rankone.fast.kernels import KERNELS, spread

    _most_threads = _start_threads()
    loaded = [_load_kernel(kernel, directory) for kernel in KERNELS]
    for dispatcher in (*KERNELS, spread):
        dispatcher.disable_compile()
    return Kernels(*loaded)


def _load_kernel(kernel: Any, directory: Path) -> _Kernel:
    for dispatcher, signature in _signatures(kernel):
        result = _cache(dispatcher, directory / kernel.__name__).load_overload(
            signature, dispatcher.targetctx
        )
        if result is None:
            raise _Damaged(f"numba does not find {dispatcher.__name__} in {directory}")
        if signature not in dispatcher.overloads:
            dispatcher.targetctx.insert_user_function(result.entry_point, result.fndesc, [result.library])
            dispatcher.add_overload(result)
    (alone, signature), (spread, _) = _signatures(kernel)
    compiled = alone.overloads[signature]
    address = compiled.library.get_pointer_to_function(compiled.fndesc.llvm_cfunc_wrapper_name)
    return _Kernel(alone, address, spread)


def _signatures(kernel: Any) -> list[tuple[Any, tuple[Any, ...]]]:
    """A kernel and what spreads it over threads, each with the types of its arguments."""
    from numba import types

    from rankone.fast.kernels import KERNELS, spread

    begin = end = address = types.int64
    alone = types.Tuple((begin, end, *KERNELS[kernel]))
    return [(kernel, (alone,)), (spread, (address, types.int64[::1], types.Tuple(KERNELS[kernel])))]


def _start_threads() -> int:
    """Let numba start its threads, OpenMP's if it has the choice, and say how many of them are of use.

    That sets the number of threads of everything that uses OpenMP, torch included: it is put back.
    """
    import numba.core.config
    import numba.np.ufunc.parallel as layers
    import torch

    config: Any = numba.core.config
    layer, threads = config.THREADING_LAYER, torch.get_num_threads()
    if layer == "default":
        config.THREADING_LAYER = "omp"
    try:
        with suppress(ValueError):  # there is no OpenMP here; other layers start when they are needed
            numba.get_num_threads()
            return config.NUMBA_NUM_THREADS if layers.threading_layer() == "omp" else 1
        return 1
    finally:
        config.THREADING_LAYER = layer
        if torch.get_num_threads() != threads:
            torch.set_num_threads(threads)


def _cache(dispatcher: Any, directory: Path) -> Any:
    """numba's cache of one function, in a directory of our choice."""
    import numba.core.config
    from numba.core.caching import FunctionCache

    config: Any = numba.core.config
    before = config.CACHE_DIR
    config.CACHE_DIR = str(directory)
    try:
        return FunctionCache(dispatcher.py_func)
    finally:
        config.CACHE_DIR = before


def _digest(kernels: Kernels, threads: int = 1) -> str:
    """A digest of what the kernels compute: all branches, whole vectors and what is left over."""
    C, rows, d_gate = 5, 77, 16
    numbers = iter(np.arange(1, 100, dtype=np.uint64))

    def uniform(*shape: int) -> Any:
        """Numbers in [-1, 1), the same with every version of numpy."""
        n = np.arange(np.prod(shape, dtype=int), dtype=np.uint64) + next(numbers) * np.uint64(7919)
        n = (n * np.uint64(2654435761)) % np.uint64(2**32)
        return (n.astype(np.float64) / 2**31 - 1).astype(np.float32).reshape(shape)

    summary = hashlib.sha256()
    h, w_in, b_in, w_out, b_out = uniform(C, rows), *(uniform(C, d_gate) for _ in range(3)), uniform(C)
    w_in[1] *= 1000  # too steep for nodes
    w_in[2] *= np.float32(1e-4)  # nodes that differ by rounding
    key = tuple(np.uint32(number) for number in (12345, 67890, 0, rows))
    weights = abs(uniform(rows))
    paper, other = (1, 0, 0.01), (2, 0.5, 0)
    for masks, penalty in (
        (paper, (1, 0, 0, 0)), (paper, (2, 0, 0, 0)), (paper, (0.9, 1e-6, 0, 0)),
        (paper, (0.9, 1e-6, 3, 0)), (other, (1, 0, 0, 0.1)),
    ):  # fmt: skip
        masks, penalty = (tuple(np.float32(number) for number in of) for of in (masks, penalty))
        given = *key, *masks, weights, *penalty
        raw, mask, masked, slopes, to_h = np.zeros((5, C, rows), np.float32)
        kept = slopes, *np.zeros((2, C), np.float32), np.zeros(C, np.int32)
        penalties, to_b_out = np.zeros((2, C), np.float32)
        kernels.gate_forward(
            threads, h, w_in, b_in, w_out, b_out, *given, raw, mask, masked, penalties, *kept
        )
        wide = [x for _ in range(3) for x in (True, uniform(C, rows))]
        to_gate = np.zeros((3, C, d_gate), np.float32)
        gradients = *wide, np.float32(0.3), to_h, *to_gate, to_b_out
        kernels.gate_backward(threads, h, w_in, b_in, w_out, *given, raw, mask, *kept, *gradients)
        for array in (raw, mask, masked, penalties, *kept, to_h, to_gate, to_b_out):
            summary.update(array.tobytes())
    return summary.hexdigest()


def _key() -> str:
    """What the machine code depends on, and the place and time of the source, which numba checks."""
    import llvmlite
    import numba
    from llvmlite import binding

    stat = SOURCE.stat()
    parts = (
        hashlib.sha256(SOURCE.read_bytes()).hexdigest(), str(SOURCE), stat.st_mtime_ns, stat.st_size,
        platform.python_implementation(), sys.version, numba.__version__, llvmlite.__version__,
        platform.machine(), binding.get_host_cpu_name(), binding.get_host_cpu_features().flatten(),
        [os.environ.get(name) for name in TARGET_SETTINGS],
    )  # fmt: skip
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:20]


def _root() -> tuple[Path, str]:
    """The directory for compiled kernels, and why it is a temporary one if it is."""
    root = Path(os.environ.get("RANKONE_CACHE_DIR") or _user_caches() / "rankone")
    try:
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
        trouble = _unsafe(root) or ("" if os.access(root, os.W_OK | os.X_OK) else f"{root} cannot be written")
    except OSError as error:
        trouble = f"{root} cannot be used ({error.strerror})"
    return (root, "") if not trouble else _private_root(trouble)


def _private_root(trouble: str) -> tuple[Path, str]:
    """A directory for this process alone, and why."""
    private, owner = Path(tempfile.mkdtemp(prefix="rankone-kernels-")), os.getpid()
    atexit.register(lambda: os.getpid() == owner and _remove(private))
    return private, trouble


def _user_caches() -> Path:
    if sys.platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local")
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")


def _unsafe(directory: Path) -> str:
    """Why a directory must not be trusted, or nothing."""
    if directory.is_symlink() or not directory.is_dir():
        return f"{directory} is not a directory"
    if hasattr(os, "getuid"):
        stat = directory.stat()
        if stat.st_uid != os.getuid():
            return f"{directory} belongs to another user"
        if stat.st_mode & 0o022:
            return f"{directory} can be written by others (chmod 700 mends it)"
    return ""


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


@contextmanager
def _locked(directory: Path) -> Iterator[None]:
    """One process compiles, the others wait for it."""
    try:
        import fcntl
    except ImportError:  # Windows: several may compile, and the first one wins
        yield
        return
    flags = os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0)
    with os.fdopen(os.open(directory.with_suffix(".lock"), flags, 0o600), "r+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _compile(directory: Path, name: str) -> None:
    """What a child process does. It needs neither torch nor the rest of rankone."""
    for package, path in (("rankone", SOURCE.parent.parent), ("rankone.fast", SOURCE.parent)):
        sys.modules[package] = ModuleType(package)
        sys.modules[package].__path__ = [str(path)]
    from rankone.fast.kernels import KERNELS

    (kernel,) = (kernel for kernel in KERNELS if kernel.__name__ == name)
    for dispatcher, signature in _signatures(kernel):
        dispatcher.compile(signature)
        _cache(dispatcher, directory / name).save_overload(signature, dispatcher.overloads[signature])


if __name__ == "__main__":
    _compile(Path(sys.argv[1]), sys.argv[2])
