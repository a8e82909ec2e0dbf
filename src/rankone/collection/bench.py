"""A method over the collection: networks x seeds, several at a time, resumed, one result file each.

A method is any function `(network, seed) -> found`, where `found` has importances and components as
judge.py says. A result belongs to a method, its settings, the code of rankone and the network's weights;
one that belongs to the same is not made again.
"""

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from importlib.metadata import version
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import torch

import rankone
from rankone.checkpoint import described
from rankone.collection.base import ENTRIES, KnownNetwork, network, one_thread
from rankone.collection.judge import Found, judge, true_decomposition
from rankone.collection.split import half_of, names_in
from rankone.config import DecompositionConfig, over_recipe
from rankone.decomposition import decompose
from rankone.errors import ConfigError, RankoneError
from rankone.files import RunDirectory, sha256
from rankone.runs.many import MOST_JOBS, MOST_SEEDS, bounded
from rankone.settings import override, validated
from rankone.train import Interrupted

Method = Callable[[KnownNetwork, int], Found]
Notice = Callable[[str], None]
FORMAT = 2


@dataclass(frozen=True)
class Rankone:
    """rankone itself as a method: `decompose` with settings that are the same for every network."""

    assignments: tuple[str, ...] = ()
    """As `key=value`; without any, the library's own."""

    def config(self, seed: int = 0, tied: Mapping[str, str] | None = None, divergence: str = "mse") -> Any:
        for assignment in self.assignments:
            key = assignment.partition("=")[0].split(".")[0]
            if key in ("seed", "tied", "divergence"):
                raise ConfigError(
                    f"{key} cannot be set for a benchmark: every network and every seed has its own."
                )
        own = {"seed": seed, "tied": dict(tied or {}), "divergence": divergence}
        values = over_recipe(own).model_dump(mode="json")
        values = override(values, DecompositionConfig, self.assignments)
        return validated(DecompositionConfig, values, source="the settings of the benchmark")

    def __call__(self, network: KnownNetwork, seed: int) -> Found:
        config = self.config(seed, network.tied, network.divergence)
        known = (network.model, network.data, network.layers, config)
        return decompose(*known, output=network.output, progress=False)


@dataclass(frozen=True)
class Result:
    """What came of one network and seed."""

    name: str
    half: str
    seed: int
    seconds: float
    """Of the method, without building the network and judging."""
    judgement: dict[str, Any] | None
    """As `Judgement.to_dict` gives it; None where the method failed."""
    truth: dict[str, float | None]
    """The shares of the true decomposition, to compare with."""
    quality: dict[str, float]
    message: str = ""
    """Why the method failed."""
    called_good: bool | None = None
    """What the method itself says of its result (`found.verdict.good`), which does not know the truth;
    None where it says nothing, or could not judge."""
    reasons: tuple[str, ...] = ()
    """Its reasons, where it does not call it good."""

    @property
    def recovered(self) -> bool:
        return self.judgement is not None and bool(self.judgement["recovered"])


def run(
    method: Method,
    names: Iterable[str] | None = None,
    seeds: int | Iterable[int] = 1,
    out: str | Path = "runs/benchmark",
    *,
    jobs: int = 1,
    settings: Mapping[str, Any] | None = None,
    say: Notice = lambda line: None,
) -> list[Result]:
    """Run a method over networks (the development half if none are named) and seeds (so many, or these).

    method    `(network, seed) -> found`; with several jobs it must be importable by its name
    out       a directory for results/NAME-seedN.json; results that are there are not made again
    jobs      how many at a time, each in a process of its own with one thread
    settings  whatever distinguishes this method from others of the same name
    """
    wanted = [ENTRIES.known(name) for name in (names_in("develop") if names is None else names)]
    numbers = list(range(bounded("seeds", seeds, MOST_SEEDS)) if isinstance(seeds, int) else seeds)
    if not wanted or not numbers:
        raise ConfigError("There is nothing to run: give at least one network and one seed.")
    directory = RunDirectory.claim(out)
    about = {"method": described(method), "settings": dict(settings or {}), **versions()}
    tasks = [(name, seed) for name in wanted for seed in numbers]
    done = {task: r for task in tasks if (r := _stored(directory, about, *task)) is not None}
    waiting = [task for task in tasks if task not in done]
    if done:
        say(f"{len(done)} of {len(tasks)} results are there already.")

    def take(task: tuple[str, int], result: Result, digest: str) -> None:
        done[task] = result
        word = f"failed: {result.message}" if result.judgement is None else _in_words(result)
        say(f"{task[0]}, seed {task[1]}: {word} ({len(done)} of {len(tasks)})")
        if result.judgement is not None:
            content = {"format": FORMAT, "about": about, "network": digest, "result": asdict(result)}
            directory.write_json(_file(*task), content)

    with directory.lock():
        if bounded("jobs", jobs, MOST_JOBS) == 1:
            for name, seed in waiting:
                take((name, seed), *_one(method, name, seed))
        else:
            _in_processes(method, waiting, jobs, about["code"], take)
    return [done[task] for task in tasks]


def versions() -> dict[str, str]:
    """What a result was made with; `code` changes with any line that a result may depend on."""
    return {"rankone": version("rankone"), "torch": torch.__version__, "code": _code()}


def _code() -> str:
    """A digest of the code that decomposes and judges; not of what only shows results."""
    root = Path(rankone.__file__).parent
    shown_only = {
        "console.py", "watch.py", "cli.py", "__main__.py", "terminal.py", "progress.py", "describe.py",
        "tables.py", "views.py", "looking.py", "editing.py", "options.py", "config_commands.py",
    }  # fmt: skip
    counted = [path for path in sorted(root.glob("*.py")) if path.name not in shown_only]
    counted += [
        *sorted((root / "fast").glob("*.py")),
        *(root / "collection" / f"{name}.py" for name in ("judge", "opposites")),
    ]
    return sha256(b"\n".join(path.read_bytes() for path in counted))[:16]


def _in_words(result: Result) -> str:
    judgement = result.judgement or {}
    verdict = "recovered" if result.recovered else f"{judgement['errors']} errors"
    cosine = judgement["cosine"]
    return f"{verdict}{'' if cosine is None else f', cosine {cosine:.3f}'}, {result.seconds:.0f} s"


def _file(name: str, seed: int) -> str:
    return f"results/{name}-seed{seed}.json"


_DIGESTS: dict[str, str] = {}


def _stored(directory: RunDirectory, about: Mapping[str, Any], name: str, seed: int) -> Result | None:
    """A result that is there and belongs to this method, version and network."""
    if not directory.has(_file(name, seed)):
        return None
    content = directory.read_json(_file(name, seed))
    if content.get("format") != FORMAT or content.get("about") != about:
        return None
    if name not in _DIGESTS:
        _DIGESTS[name] = network(name).digest
    fields = content["result"] | {"reasons": tuple(content["result"].get("reasons", ()))}
    return Result(**fields) if content["network"] == _DIGESTS[name] else None


def _one(method: Method, name: str, seed: int) -> tuple[Result, str]:
    """Build, decompose, judge; also return the network's digest."""
    with one_thread():
        known = network(name)
        began = time.monotonic()
        judgement, message, own = None, "", None
        try:
            found = method(known, seed)
            seconds = time.monotonic() - began
            judgement = judge(known, found).to_dict()
            own = getattr(found, "verdict", None)
        except Interrupted as stop:
            raise KeyboardInterrupt from stop
        except RankoneError as error:
            seconds, message = time.monotonic() - began, str(error)
        truth = judge(known, true_decomposition(known)).shares
    good = getattr(own, "good", None)
    reasons = () if good else tuple(getattr(own, "reasons", ()))
    result = Result(
        name, half_of(name), seed, seconds, judgement, truth, known.quality, message, good, reasons
    )
    return result, known.digest


def _in_processes(
    method: Method,
    tasks: Sequence[tuple[str, int]],
    jobs: int,
    code: str,
    take: Callable[[tuple[str, int], Result, str], None],
) -> None:
    """Several at a time, each in a process of its own, which takes no other with it when it fails."""
    spawn = multiprocessing.get_context("spawn")
    waiting = list(tasks)
    working: dict[Any, tuple[tuple[str, int], Any]] = {}
    with _stopping_on_terminate():
        try:
            while waiting or working:
                while waiting and len(working) < jobs:
                    task = waiting.pop(0)
                    ours, theirs = spawn.Pipe(duplex=False)
                    process = spawn.Process(target=_work, args=(method, *task, code, theirs))
                    process.start()
                    theirs.close()
                    working[ours] = (task, process)
                ready: list[Any] = wait(list(working))
                for connection in ready:
                    task, process = working.pop(connection)
                    try:
                        result, digest = connection.recv()
                    except EOFError:
                        process.join()
                        result = _failed(*task, f"its process ended with exit code {process.exitcode}")
                        digest = ""
                    process.join()
                    connection.close()
                    take(task, result, digest)
        finally:
            for _, process in working.values():
                process.terminate()
                process.join()


@contextmanager
def _stopping_on_terminate() -> Iterator[None]:
    """SIGTERM ends this process as Ctrl-C does, so that it takes its children with it."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(signum: int, frame: Any) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _failed(name: str, seed: int, message: str) -> Result:
    return Result(name, half_of(name), seed, 0.0, None, {}, {}, message)


def _work(method: Method, name: str, seed: int, code: str, parent: Any) -> None:
    """One network and seed, in its own process."""
    if hasattr(os, "setpgid"):
        os.setpgid(0, 0)  # a terminal sends Ctrl-C to all; the parent decides
    torch.set_num_threads(1)
    if _code() != code:
        parent.send((_failed(name, seed, "rankone's code was changed while the benchmark ran"), ""))
        return
    with suppress(KeyboardInterrupt):
        parent.send(_one(method, name, seed))
