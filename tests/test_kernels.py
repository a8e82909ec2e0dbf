"""Kernels: the same bits cold, warm and damaged, in every process.

Compiling takes seconds, so it is done three times: into an empty cache, into a damaged one, and by
two processes at once. Elsewhere the compilers are replaced by a copy of what they made.
"""

import json
import os
import shutil
import subprocess
import sys
import warnings
from itertools import pairwise
from pathlib import Path

import numba
import numpy as np
import pytest
import torch

from rankone.fast import compiled
from rankone.fast.compiled import MissingKernels, kernels, kernels_digest

SCRIPT = "from rankone.fast.compiled import kernels_digest; print(kernels_digest())"
NOTICE = "rankone: compiling kernels"


def start(root: Path) -> subprocess.Popen:
    """A process that prints its kernels' digest."""
    paths = os.pathsep.join(filter(None, sys.path))
    return subprocess.Popen(
        [sys.executable, "-c", SCRIPT],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "RANKONE_CACHE_DIR": str(root), "PYTHONPATH": paths},
    )


def directory_in(root: Path) -> Path:
    (directory,) = (path for path in root.glob("kernels-*") if path.is_dir())
    return directory


@pytest.fixture(scope="module")
def cold(tmp_path_factory):
    """A root into which a process has compiled the kernels, and the digest that it printed."""
    root = tmp_path_factory.mktemp("kernels") / "root"
    output, errors = (process := start(root)).communicate()
    assert process.returncode == 0, errors
    assert errors.splitlines() == [f"{NOTICE}, once after installation (about 8 seconds)"]
    return root, output.strip()


@pytest.fixture
def root(cold, tmp_path, monkeypatch):
    """A copy of that root for this process, and compilers that copy instead of compiling."""
    root = tmp_path / "root"
    shutil.copytree(cold[0], root)
    monkeypatch.setenv("RANKONE_CACHE_DIR", str(root))

    def copy(directory):
        shutil.copytree(directory_in(cold[0]), directory, dirs_exist_ok=True)
        (directory / compiled.SEAL).unlink()

    monkeypatch.setattr(compiled, "_run_compilers", copy)
    kernels.cache_clear()
    yield root
    kernels.cache_clear()


def test_a_second_process_loads_the_same_bits_and_says_nothing(cold):
    root, digest = cold
    assert start(root).communicate() == (digest + "\n", "")
    assert directory_in(root).stat().st_mode & 0o777 == 0o700
    assert not list(root.glob("*.tmp"))


def test_a_damaged_cache_is_compiled_again_to_the_same_bits(cold, tmp_path):
    root, digest = cold
    shutil.copytree(root, tmp_path / "root")
    flip(machine_code(directory_in(tmp_path / "root")))
    output, errors = start(tmp_path / "root").communicate()
    assert output.strip() == digest
    assert len(errors.splitlines()) == 1
    assert NOTICE in errors


def test_of_two_processes_at_once_one_compiles(cold, tmp_path):
    processes = [start(tmp_path / "root") for _ in range(2)]
    outputs, errors = zip(*(process.communicate() for process in processes), strict=True)
    assert outputs == (cold[1] + "\n",) * 2
    assert sorted(error.count(NOTICE) for error in errors) == [0, 1]
    assert not list((tmp_path / "root").glob("*.tmp"))


def machine_code(directory: Path) -> Path:
    return max(directory.rglob("*.nbc"))


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def edit_seal(directory: Path, **changes) -> None:
    seal = json.loads((directory / compiled.SEAL).read_text())
    (directory / compiled.SEAL).write_text(json.dumps({**seal, **changes}))


def replace_by_file(path: Path) -> None:
    shutil.rmtree(path)
    path.write_text("no directory")


DAMAGE = {
    "machine code flipped": lambda d: flip(machine_code(d)),
    "machine code truncated": lambda d: os.truncate(machine_code(d), 1000),
    "machine code deleted": lambda d: machine_code(d).unlink(),
    "index flipped": lambda d: flip(max(d.rglob("*.nbi"))),
    "another file": lambda d: (machine_code(d).parent / "more.nbc").write_text("x"),
    "no seal": lambda d: (d / compiled.SEAL).unlink(),
    "seal truncated": lambda d: os.truncate(d / compiled.SEAL, 30),
    "seal of another kind": lambda d: (d / compiled.SEAL).write_text("[1]"),
    "seal not text": lambda d: (d / compiled.SEAL).write_bytes(b"\xff\xfe"),
    "another digest": lambda d: edit_seal(d, digest="0" * 64),
    "no digest": lambda d: edit_seal(d, digest=None),
    "empty": lambda d: [shutil.rmtree(d), d.mkdir(mode=0o700)],
    "a file": replace_by_file,
    "writable by others": lambda d: d.chmod(0o777),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damage_is_mended_once(root, cold, capfd, damage):
    DAMAGE[damage](directory_in(root))
    assert kernels_digest() == cold[1]
    assert capfd.readouterr().err.count(NOTICE) == 1
    kernels.cache_clear()
    assert kernels_digest() == cold[1]
    assert capfd.readouterr().err == ""


def test_leftovers_of_a_killed_process_are_removed(root, cold):
    directory = directory_in(root)
    shutil.rmtree(directory)
    (root / f"{directory.name}.abc.tmp").mkdir()
    (root / "notes.tmp").write_text("not ours")
    assert kernels_digest() == cold[1]
    assert sorted(path.name for path in root.iterdir()) == [
        directory.name,
        f"{directory.name}.lock",
        "notes.tmp",
    ]


@pytest.mark.parametrize("trouble", ["a file", "writable by others", "a link"])
def test_a_root_that_cannot_be_trusted_is_left_alone(root, cold, capfd, monkeypatch, trouble):
    if trouble == "a file":
        replace_by_file(root)
    elif trouble == "writable by others":
        root.chmod(0o777)
    else:
        root.rename(root.with_name("elsewhere"))
        root.symlink_to("elsewhere")
    at_exit, before = [], sorted(root.parent.rglob("*"))
    monkeypatch.setattr(compiled.atexit, "register", at_exit.append)
    assert kernels_digest() == cold[1]
    assert f"{NOTICE} into a temporary directory, because {root} " in capfd.readouterr().err
    assert sorted(root.parent.rglob("*")) == before
    private = Path(at_exit[0].__closure__[1].cell_contents)
    assert directory_in(private).stat().st_mode & 0o777 == 0o700
    at_exit[0]()
    assert not private.exists()


def test_kernels_of_another_source_are_not_taken(root, monkeypatch, tmp_path):
    key = compiled._key()
    source = tmp_path / "kernels.py"
    source.write_text(compiled.SOURCE.read_text() + "\n")
    monkeypatch.setattr(compiled, "SOURCE", source)
    assert compiled._key() != key


def test_a_failed_compilation_is_one_warning(root, monkeypatch):
    shutil.rmtree(directory_in(root))

    def fail(directory):
        raise RuntimeError("Traceback\n  ...\nMemoryError: out of memory\n")

    monkeypatch.setattr(compiled, "_run_compilers", fail)
    with pytest.warns(
        MissingKernels, match=r"\(MemoryError: out of memory\), so steps run in plain torch"
    ) as caught:
        assert kernels() is None
    assert kernels_digest() is None
    assert len(caught) == 1
    assert not [path for path in root.iterdir() if path.is_dir()]


def test_without_numba_there_is_one_warning(root, monkeypatch):
    monkeypatch.setitem(sys.modules, "numba", None)
    with pytest.warns(MissingKernels, match=r"numba is missing.*pip install numba"):
        assert kernels() is None


def test_compilers_report_what_went_wrong(tmp_path, monkeypatch):
    monkeypatch.setattr(compiled, "__file__", str(tmp_path / "missing.py"))
    with pytest.raises(RuntimeError, match=r"missing\.py"):
        compiled._run_compilers(tmp_path)


def test_loading_changes_nothing_in_numba_and_torch(root):
    directory, threads, mask = numba.config.CACHE_DIR, torch.get_num_threads(), numba.config.NUMBA_NUM_THREADS
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        kernels()
    assert (numba.config.CACHE_DIR, torch.get_num_threads()) == (directory, threads)
    assert mask == numba.config.NUMBA_NUM_THREADS


def test_nothing_is_compiled_here(root):
    loaded = kernels()
    for dispatcher, signatures in (
        (loaded._forward._alone, 1),
        (loaded._backward._alone, 1),
        (loaded._forward._spread, 2),
    ):
        assert len(dispatcher.overloads) == signatures
        assert not dispatcher.stats.cache_misses
        with pytest.raises(TypeError, match="No matching definition"):
            dispatcher(*[(1, 2.0)] * (signatures if signatures == 1 else 3))


def test_the_digest_depends_on_what_is_computed(root):
    class Off(compiled.Kernels):
        def gate_backward(self, *arrays):
            super().gate_backward(*arrays)
            arrays[-1][0] = np.nextafter(arrays[-1][0], np.float32(9))

    loaded = kernels()
    assert compiled._digest(loaded) == loaded.digest
    assert compiled._digest(Off(loaded._forward, loaded._backward)) != loaded.digest


@pytest.mark.parametrize("parts", [2, 3, 7])
def test_results_do_not_depend_on_how_subcomponents_are_divided(root, parts):
    class Divided(compiled.Kernels):
        def gate_forward(self, threads, *arrays):
            self._divide(self._forward._alone, arrays)

        def gate_backward(self, threads, *arrays):
            self._divide(self._backward._alone, arrays)

        def _divide(self, kernel, arrays):
            edges = [len(arrays[0]) * i // parts for i in range(parts + 1)]
            for begin, end in pairwise(edges):
                kernel((begin, end, *arrays))

    loaded = kernels()
    assert compiled._digest(Divided(loaded._forward, loaded._backward)) == loaded.digest


def test_results_do_not_depend_on_the_number_of_threads(root, monkeypatch):
    spread = []

    class Watched(compiled._Kernel):
        def __init__(self, kernel):
            super().__init__(kernel._alone, kernel._address, self._count)
            self._real = kernel._spread

        def _count(self, address, edges, arrays):
            spread.append(numba.get_num_threads())
            self._real(address, edges, arrays)

    loaded = kernels()
    assert compiled._most_threads == numba.config.NUMBA_NUM_THREADS, "numba runs on OpenMP, as torch does"
    two = compiled.Kernels(Watched(loaded._forward), Watched(loaded._backward))
    assert not spread
    numba.set_num_threads(1)
    assert compiled._digest(two, threads=2) == loaded.digest
    several = numba.config.NUMBA_NUM_THREADS > 1  # with one core there is nothing to spread over
    assert spread == [2] * 10 * several
    assert numba.get_num_threads() == 1, "the user's own number is put back"
    numba.set_num_threads(numba.config.NUMBA_NUM_THREADS)
    monkeypatch.setattr(compiled, "_most_threads", 1)
    assert compiled._digest(two, threads=2) == loaded.digest
    assert len(spread) == 10 * several


def test_a_forked_process_uses_them(cold):
    code = (
        "import os\n"
        "from rankone.fast import compiled\n"
        "loaded = compiled.kernels()\n"
        "assert compiled._digest(loaded, threads=2) == loaded.digest\n"
        "pid = os.fork()\n"
        "if pid == 0:\n"
        "    os._exit(compiled._digest(loaded, threads=2) != loaded.digest)\n"
        "assert os.waitpid(pid, 0)[1] == 0\n"
    )
    environment = {**os.environ, "RANKONE_CACHE_DIR": str(cold[0]), "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment, timeout=60
    )
    assert done.returncode == 0, done.stderr
