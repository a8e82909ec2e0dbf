"""Several processes that train together: `torchrun --nproc-per-node N -m rankone run ...`.

Every process draws the same global batch (data is a function of seed and step), takes its rows of it,
and computes its share of the step (share.py). Gradients are averaged in one message per step, so that all
hold the same parameters, bit for bit. What looks at a whole batch and is done a few times in a run
(where factors start, what removing everything costs, consolidation) every process does by itself on the
whole, and then takes over the leader's state. Process 0 leads: it alone reads and writes files, shows
progress, evaluates and reports; the others wait for what it announces, and train along.

This is the one module that knows torch.distributed. Everything else asks `current()`, which is `ALONE`
unless processes have joined.
"""

import hashlib
import json
import os
import signal
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any, cast

import safetensors.torch
import torch
import torch.distributed
from torch import Tensor, nn

from rankone.data import Batch, OtherRows, WeightedBatch, given_weights, inputs_of, tensors_of
from rankone.errors import BatchError, ConfigError, LayerError, RankoneError, TrainingError
from rankone.model import DecomposedModel
from rankone.share import WHOLE, Key, Place, Share

dist: Any = torch.distributed  # its stubs leave out half of what it documents

PATIENCE = "RANKONE_PATIENCE"
"""How many seconds processes wait for each other; in the environment, because all must know it."""
USUAL_PATIENCE = 300.0
ASKED_FOR = 3.0
"""Seconds in which the others must answer when a message was lost, to be counted among the living."""
LAUNCHED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""What torchrun puts into the environment."""


class Alone:
    """One process. The same questions as to several, and nothing to do."""

    rank, size = 0, 1

    @property
    def leads(self) -> bool:
        return self.rank == 0

    def share(self, batch: Batch) -> tuple[Batch, Share]:
        """What of a batch this process computes."""
        return batch, WHOLE

    def average(self, parameters: Sequence[nn.Parameter], signum: int) -> int:
        """Average gradients over processes; the signal that any of them was stopped with, or 0."""
        return signum

    def refuse_different(self, things: Mapping[str, Any]) -> None:
        """Raise if these things, by their names, are not the same in every process."""

    def from_leader(
        self, tensors: Mapping[str, Tensor], numbers: Mapping[str, float]
    ) -> tuple[Mapping[str, Tensor], Mapping[str, float]]:
        """What process 0 passes here."""
        return tensors, numbers

    def announce(self, text: str) -> None:
        """Let the others do this as well."""


class Together(Alone):
    """One of several processes."""

    def __init__(self, store: Any, rank: int, size: int, patience: float) -> None:
        self.store, self.rank, self.size, self.patience = store, rank, size, patience
        self.bytes = 0
        """How much this process has handed to collectives."""
        self._announced = 0

    def share(self, batch: Batch) -> tuple[Batch, Share]:
        place = place_in(batch, self.rank, self.size)
        return rows_of(batch, place, even=place.total % self.size == 0), _Part(self, place)

    def average(self, parameters: Sequence[nn.Parameter], signum: int) -> int:
        gradients = [p.grad for p in parameters if p.grad is not None]
        parts = [g.reshape(-1) for g in gradients]
        flat = torch.cat([*parts, parts[0].new_tensor([float(signum)])])
        self.reduce(flat)
        flat /= self.size
        for gradient, part in zip(gradients, flat.split([*(len(p) for p in parts), 1]), strict=False):
            gradient.copy_(part.view(gradient.shape))
        return (signum or signal.SIGTERM) if float(flat[-1]) > 0 else 0

    def reduce(self, values: Tensor, *, largest: bool = False) -> Tensor:
        """Add up over processes (or take the largest), in place."""
        self.bytes += values.numel() * values.element_size()
        with self._noticing_who_is_gone():
            dist.all_reduce(values, dist.ReduceOp.MAX if largest else dist.ReduceOp.SUM)
        return values

    def refuse_different(self, things: Mapping[str, Any]) -> None:
        digests = b"".join(hashlib.sha256(repr(thing).encode()).digest() for thing in things.values())
        own = torch.frombuffer(bytearray(digests), dtype=torch.uint8)
        every = [torch.empty_like(own) for _ in range(self.size)]
        with self._noticing_who_is_gone():
            dist.all_gather(every, own)
        for i, name in enumerate(things):
            part = slice(32 * i, 32 * (i + 1))
            others = [rank for rank, one in enumerate(every) if not torch.equal(one[part], every[0][part])]
            if others:
                raise TrainingError(
                    f"Process {others[0]} of {self.size} has {name} that differ from those of process 0, so they "
                    "cannot train together. Start all with the same command, on the same files and versions; "
                    "data must be a function of its generator, or batches in a fixed order."
                )

    def from_leader(
        self, tensors: Mapping[str, Tensor], numbers: Mapping[str, float]
    ) -> tuple[Mapping[str, Tensor], Mapping[str, float]]:
        content = b""
        if self.leads:
            whole = {name: t.detach().cpu().contiguous().clone() for name, t in tensors.items()}
            content = safetensors.torch.save(whole, {"numbers": json.dumps(dict(numbers))})
        size = torch.tensor([len(content)])
        with self._noticing_who_is_gone():
            dist.broadcast(size, 0)
            sent = torch.frombuffer(bytearray(content), dtype=torch.uint8) if self.leads else None
            sent = torch.empty(int(size), dtype=torch.uint8) if sent is None else sent
            dist.broadcast(sent, 0)
        self.bytes += sent.numel()
        if self.leads:
            return tensors, numbers
        content = sent.numpy().tobytes()
        header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
        return safetensors.torch.load(content), json.loads(header["__metadata__"]["numbers"])

    def announce(self, text: str) -> None:
        self.store.set(f"task/{self._announced}", text)
        self._announced += 1

    def wait_for_all_to_leave(self) -> None:
        """The store may be in this process: others may still have to read that there is nothing more."""
        deadline = time.monotonic() + ASKED_FOR
        while time.monotonic() < deadline and not self.store.check([f"left/{r}" for r in range(self.size)]):
            time.sleep(0.05)

    def announced(self) -> Iterator[str]:
        """What the leader announces, one after another, for as long as that takes."""
        while True:
            key = f"task/{self._announced}"
            with self._noticing_who_is_gone():
                while not self.store.check([key]):
                    time.sleep(0.05)
                text = self.store.get(key).decode()
            if not text:
                return
            self._announced += 1
            yield text

    def speaks(self) -> bool:
        """Whether this process is the first to have something to say about a failure."""
        try:
            return self.store.add("said", 1) == 1
        except RuntimeError:  # the leader has gone, and its store with it
            return True

    @contextmanager
    def _noticing_who_is_gone(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            raise TrainingError(self._who_is_gone(error)) from error

    def _who_is_gone(self, error: Exception) -> str:
        try:
            self.store.set(f"here/{self.rank}", "")
            others = {r for r in range(self.size) if r != self.rank}
            deadline = time.monotonic() + ASKED_FOR
            while time.monotonic() < deadline and not all(self.store.check([f"here/{r}"]) for r in others):
                time.sleep(0.1)
            missing = [r for r in sorted(others) if not self.store.check([f"here/{r}"])]
        except RuntimeError:
            missing = [0]
        first = str(error).partition("\n")[0][:200]
        who = ", ".join(map(str, missing)) or "an unknown one"
        return (
            f"Process {who} of {self.size} no longer answers ({first}): it was killed, has failed or lost its "
            f"connection. What was saved last is complete: start the same command again with --resume, with "
            "any number of processes."
        )


class _Part(Share):
    """A process's share of a batch."""

    def __init__(self, world: Together, place: Place) -> None:
        self.world = world
        self.place = place

    def key(self, key: int) -> int:
        placed = Key(key)
        placed.place = cast(Place, self.place)
        return placed

    def mean(self, value: Tensor) -> Tensor:
        return self.world.reduce(value.detach().clone()) / self.world.size

    def shared(self, value: Tensor) -> Tensor:
        return _Shared.apply(value, self) if value.requires_grad else self.mean(value)  # pyright: ignore

    def largest(self, values: Tensor) -> Tensor:
        return self.world.reduce(values.detach().clone(), largest=True)


class _Shared(torch.autograd.Function):
    """A mean over processes whose gradient is left to each of them: they are averaged at the end."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, part: _Part) -> Tensor:
        return part.mean(value)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        return gradient, None


ALONE = Alone()
_current: Alone = ALONE


def current() -> Alone:
    """The processes that train together with this one."""
    return _current


def launched() -> bool:
    """Whether torchrun started this process as one of several."""
    return all(name in os.environ for name in LAUNCHED) and os.environ["WORLD_SIZE"] != "1"


@contextmanager
def joined() -> Iterator[Alone]:
    """Meanwhile, the processes that torchrun started are one; without torchrun, this one is alone.

    An error is told by the process that has it first; the others end quietly, with an exit code of 1.
    """
    global _current
    if not launched():
        yield ALONE
        return
    world = _join()
    _current = world
    try:
        yield world
    except RankoneError as error:
        if not world.speaks():
            raise SystemExit(1) from None
        if world.leads:
            raise
        raise type(error)(f"Process {world.rank} of {world.size}: {error}") from error
    finally:
        _current = ALONE
        with suppress(RuntimeError):
            world.store.set(f"left/{world.rank}", "")
            if world.leads:
                world.announce("")  # there is nothing more to do
                world.wait_for_all_to_leave()
            dist.destroy_process_group()


def _join() -> Together:
    patience = _patience()
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    limit = timedelta(seconds=patience)
    try:
        # torchrun has a store of its own; a job that it starts again must not find what the last one left.
        hosts = rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
        address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        store = dist.TCPStore(*address, is_master=hosts, timeout=limit, wait_for_workers=False)
        store = dist.PrefixStore(f"rankone/{os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}", store)
        store.set(f"arrived/{rank}", "")
        deadline = time.monotonic() + patience
        while missing := [r for r in range(size) if not store.check([f"arrived/{r}"])]:
            if time.monotonic() > deadline:
                raise TrainingError(
                    f"Process {', '.join(map(str, missing))} of {size} did not arrive within {patience:g} s. "
                    f"Look at what it says; {PATIENCE} in the environment is how long all wait, in seconds."
                )
            time.sleep(0.05)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=limit)
    except RuntimeError as error:
        raise TrainingError(
            f"Process {rank} of {size} found no others at {os.environ['MASTER_ADDR']}:"
            f"{os.environ['MASTER_PORT']} within {patience:g} s ({str(error).partition(chr(10))[0][:200]})."
        ) from error
    return Together(store, rank, size, patience)


def _patience() -> float:
    given = os.environ.get(PATIENCE, "")
    try:
        patience = float(given) if given else USUAL_PATIENCE
    except ValueError:
        patience = 0.0
    if not 0 < patience < 1e6:
        raise ConfigError(f"{PATIENCE} is {given!r}; expected a number of seconds, such as 300.")
    return patience


def place_in(batch: Batch, rank: int, size: int) -> Place:
    """Which rows of a batch a process has: as many as the others, or one more."""
    tensors = tensors_of(batch)
    rows = next((len(t) for t in tensors if t.dim()), 0)
    if rows < size:
        raise BatchError(
            f"A batch has {rows} row{'s' * (rows != 1)}, and {size} processes cannot share it: each needs at "
            "least one. Use larger batches or fewer processes."
        )
    edges = [rows * r // size for r in (rank, rank + 1)]
    return Place(edges[1] - edges[0], edges[0], rows)


def rows_of(batch: Batch, place: Place, *, even: bool = True) -> Batch:
    """Some rows of a batch. Where rows or positions count differently, or processes have different numbers of
    them, the weights are said."""
    rows = slice(place.before, place.before + place.here)
    weights = given_weights(batch)
    if weights is None and not even:
        weights = torch.ones(place.total)

    def part(x: Any) -> Any:
        if isinstance(x, Tensor) and x.dim() and len(x) == place.total:
            return x[rows]
        if isinstance(x, Tensor) and x.dim() and len(x) != 1:
            raise BatchError(
                f"A batch has {place.total} rows, and one of its tensors is {tuple(x.shape)}: processes cannot "
                "share it by rows. Give every tensor one entry per row, or use one process."
            )
        return x

    inputs = inputs_of(batch)
    if isinstance(inputs, Mapping):
        taken: Any = {key: part(x) for key, x in inputs.items()}
    else:
        taken = tuple(part(x) for x in inputs) if isinstance(inputs, tuple | list) else part(inputs)
    if isinstance(batch, OtherRows):
        first = place.total - batch.others  # of the rows that are not to be explained
        here = max(0, place.before + place.here - max(place.before, first))
        return OtherRows(taken, batch.weights[rows], here)
    return taken if weights is None else WeightedBatch(taken, weights[rows])


@torch.no_grad()
def refuse_coupled_rows(model: DecomposedModel, batch: Batch) -> None:
    """Raise if what a network does to a row depends on the others, or if its datapoints do not come by rows:
    processes could not share a batch then. Looks at one row, and at two."""
    total = place_in(batch, 0, 1).total
    outputs = []
    for n in (1, min(2, total)):
        clean = model.clean(rows_of(batch, Place(n, 0, total)))
        shapes = {name: h.shape[:-1] for name, h in model.inner(clean).items()}
        for name, lead in {**shapes, "": clean.output.shape}.items():
            if not lead or lead[0] != n:
                which = f"The layer {name!r}" if name else "The output"
                raise LayerError(
                    f"{which} has datapoints of shape {tuple(lead)} on a batch of {n} row{'s' * (n > 1)}: "
                    "rows do not come first, so processes cannot share a batch. "
                    + ("Leave the layer out, or use one process." if name else "Use one process.")
                )
        outputs.append(clean.output[:1].double())
    scale = float(outputs[0].abs().max())
    if float((outputs[0] - outputs[1]).abs().max()) > 1e-3 * max(scale, 1e-6):
        raise LayerError(
            "What the network does to a row of a batch depends on the other rows (batch statistics?), so "
            "processes cannot share a batch. Use one process."
        )
