"""Batches, where they come from, means over them, and the random numbers of a step.

Randomness is a function of (seed, stream, step), never of what ran before: a resumed run draws
exactly what the uninterrupted one would have drawn, without saving any generator's state. Data is
either a *sampler*, a callable that draws a batch from a generator, or any re-iterable (list,
DataLoader), which is cycled through.
"""

import hashlib
import inspect
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, cast

import torch
from jaxtyping import Float
from torch import Tensor

from rankone.errors import BatchError
from rankone.files import digest_of


@dataclass(frozen=True)
class WeightedBatch:
    """A batch whose rows count with different weights in every loss.

    For data in which equal rows are common: merge them into one row with their number as its weight.
    `inputs` is what the model takes; `weights` has one entry per row.
    """

    inputs: Any
    weights: Float[Tensor, " rows"]

    @cached_property
    def normalized(self) -> Float[Tensor, " rows"]:
        """The weights, scaled to sum to 1: how much of a mean each row is."""
        return self.weights / self.weights.sum()

    @classmethod
    def merging_zero_rows(cls, x: Float[Tensor, "rows features"]) -> "WeightedBatch":
        """The batch `x` with all rows of zeros merged into one: the same losses, for a fraction of
        the work."""
        nonzero = x.any(dim=1)
        kept = x[nonzero]
        zeros = x.shape[0] - kept.shape[0]
        counts = torch.promote_types(x.dtype, torch.float32)  # half precision cannot count far
        weights = torch.ones(kept.shape[0] + bool(zeros), dtype=counts, device=x.device)
        if zeros:
            kept = torch.cat([kept, x.new_zeros(1, x.shape[1])])
            weights[-1] = zeros
        return cls(kept, weights)


Batch = Tensor | tuple | list | Mapping | WeightedBatch
Sampler = Callable[[torch.Generator], Batch]
Data = Sampler | Iterable[Batch] | Tensor
"""A function that draws a batch from a torch.Generator, batches to go through again and again, or a
tensor whose rows are the datapoints."""


def seed_for(seed: int, stream: str, step: int = 0) -> int:
    """A well-mixed seed for one use of randomness at one step."""
    digest = hashlib.blake2b(f"{seed}/{stream}/{step}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def generator_for(
    seed: int, stream: str, step: int = 0, device: torch.device | str = "cpu"
) -> torch.Generator:
    return torch.Generator(device=device).manual_seed(seed_for(seed, stream, step))


def inputs_of(batch: Any) -> Any:
    return batch.inputs if isinstance(batch, WeightedBatch) else batch


def row_weights(batch: Batch) -> Float[Tensor, " rows"] | None:
    """How much of a mean each row is; None where all rows count alike."""
    return batch.normalized if isinstance(batch, WeightedBatch) else None


def mean_over_data(values: Tensor, weights: Float[Tensor, " rows"] | None) -> Float[Tensor, ""]:
    """The mean over datapoints of one number per datapoint, with the `row_weights` of their batch."""
    if weights is None:
        return values.mean()
    if values.dim() == 0 or values.shape[0] != weights.shape[0]:
        raise BatchError(
            f"The batch has {weights.shape[0]} row weights, but a divergence or importance came with "
            f"shape {tuple(values.shape)}: with a WeightedBatch its first dimension must be the rows. "
            "A divergence of your own must return one number per datapoint."
        )
    rows = values.flatten(1).mean(1) if values.dim() > 1 else values
    return rows @ weights.to(rows.dtype)


def shapes_of(batch: Batch) -> str:
    """The shapes and types of a batch's tensors, in words."""
    return ", ".join(f"{tuple(t.shape)} {t.dtype}" for _, t in _tensors(inputs_of(batch))) or "no tensor"


def tensors_of(batch: Batch) -> list[Tensor]:
    """The tensors that a batch's inputs are made of; none if something else is among them."""
    inputs = inputs_of(batch)
    entries = list(inputs.values()) if isinstance(inputs, Mapping) else inputs
    entries = [entries] if isinstance(entries, Tensor) else entries
    known = isinstance(entries, tuple | list) and all(isinstance(x, Tensor) for x in entries)
    return list(entries) if known else []


def batch_digest(batch: Batch) -> str:
    """A SHA-256 over every tensor of a batch, to notice when a run is resumed with other data."""
    tensors = dict(_tensors(inputs_of(batch)))
    if isinstance(batch, WeightedBatch):
        tensors["weights"] = batch.weights
    return digest_of(tensors)


def call_with(model: Callable[..., Any], batch: Any) -> Any:
    """Call a model the way the batch's form says: tensor, tuple of arguments, or dict of keywords."""
    inputs = inputs_of(batch)
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = {}
    if isinstance(inputs, Tensor):
        args = (inputs,)
    elif isinstance(inputs, tuple | list):
        args = tuple(inputs)
    elif isinstance(inputs, Mapping):
        kwargs = dict(inputs)
    else:
        raise BatchError(
            f"A batch is a {type(batch).__name__}; expected a tensor, a tuple (positional arguments of "
            "the model), a dict (keyword arguments) or a WeightedBatch of one of these."
        )
    try:
        return model(*args, **kwargs)
    except TypeError as error:
        problem = _unbindable(model, args, kwargs)
        if problem is None:
            raise
        form = f"a tuple of {len(args)}" if args else f"a dict with {', '.join(kwargs)}"
        raise BatchError(
            f"A batch is {form}, which the model does not take as its arguments ({problem}). A tuple "
            "becomes positional arguments and a dict keywords; leave labels out of the data."
        ) from error


def check_batch(batch: Batch) -> None:
    """Raise if a batch is empty, holds NaN or infinite numbers, or lists where tensors should be."""
    inputs = inputs_of(batch)
    if isinstance(inputs, Mapping):
        for key, x in inputs.items():
            if isinstance(x, list):
                raise BatchError(
                    f"The batch's entry {key!r} is a list; expected a tensor. A tokenizer gives tensors with "
                    "return_tensors='pt'."
                )
    for where, tensor in _tensors(inputs_of(batch)):
        if tensor.numel() == 0:
            raise BatchError(f"The batch{where} is empty: its shape is {tuple(tensor.shape)}.")
        # A finite sum is quick proof that every term is; a sum that is not may have overflowed.
        if (
            tensor.is_floating_point()
            and not math.isfinite(float(tensor.sum()))
            and not bool(torch.isfinite(tensor).all())
        ):
            nan = int(torch.isnan(tensor).sum())
            inf = int(torch.isinf(tensor).sum())
            raise BatchError(
                f"The batch{where} of shape {tuple(tensor.shape)} holds {nan} NaN and {inf} infinite "
                "values; every value must be finite. Clean the data before decomposing."
            )
    if not isinstance(batch, WeightedBatch):
        return
    weights = batch.weights
    if not isinstance(weights, Tensor) or weights.dim() != 1:
        raise BatchError(
            f"The weights of a WeightedBatch are a {type(weights).__name__}; expected a tensor, one per row."
        )
    for where, tensor in _tensors(inputs_of(batch)):
        if tensor.dim() and tensor.shape[0] != weights.shape[0]:
            raise BatchError(
                f"The WeightedBatch{where} has {tensor.shape[0]} rows and {weights.shape[0]} "
                "weights; every row needs one weight."
            )
    if not (float(weights.min()) >= 0 and float(weights.sum()) > 0):
        raise BatchError("The weights of a WeightedBatch must be non-negative numbers with a positive sum.")


def to_device(batch: Batch, device: torch.device) -> Batch:
    if isinstance(batch, WeightedBatch):
        return WeightedBatch(to_device(batch.inputs, device), batch.weights.to(device))
    if isinstance(batch, Tensor):
        return batch.to(device)
    if isinstance(batch, tuple | list):
        return tuple(x.to(device) if isinstance(x, Tensor) else x for x in batch)
    if isinstance(batch, Mapping):
        return {k: x.to(device) if isinstance(x, Tensor) else x for k, x in batch.items()}
    return batch  # call_with says what is wrong with it


def _unbindable(model: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> str | None:
    """Why these arguments do not fit the model's signature, or None if they do."""
    try:
        inspect.signature(getattr(model, "forward", model)).bind(*args, **kwargs)
    except TypeError as error:
        return str(error)
    return None


def batches(data: Any, seed: int, *, start: int = 0, stream: str = "data") -> Iterator[Batch]:
    """An endless stream of batches that begins as if `start` of them had been drawn already."""
    if isinstance(data, Tensor):
        yield from _rows(data, seed, start, stream)
    elif isinstance(data, Iterable):
        yield from _cycled(data, seed, start, stream)
    elif callable(data):
        sampler = cast(Sampler, data)
        step = start
        while True:
            yield sampler(generator_for(seed, stream, step))
            step += 1
    else:
        raise BatchError(
            f"data is a {type(data).__name__}; expected an iterable of batches (a list, a DataLoader) "
            "or a function that draws a batch from a torch.Generator."
        )


def first_batch_digest(data: Any, seed: int) -> str | None:
    """The digest of the first batch, to notice other data; None where data cannot be drawn again
    the same."""
    if isinstance(data, Iterable) and iter(data) is data:
        return None
    first, again = (batch_digest(next(batches(data, seed))) for _ in range(2))
    return first if first == again else None


ROWS = 1024
"""How many rows of a tensor of datapoints make a batch."""


def _rows(data: Tensor, seed: int, start: int, stream: str) -> Iterator[Tensor]:
    """Batches of a tensor of datapoints: all of them, or if they are many, so many drawn at random."""
    if not data.dim() or not len(data):
        raise BatchError(f"data is a tensor of shape {tuple(data.shape)}: it has no rows to draw from.")
    step = start
    while True:
        if len(data) <= ROWS:
            yield data
        else:
            drawn = torch.randint(len(data), (ROWS,), generator=generator_for(seed, stream, step))
            yield data[drawn.to(data.device)]
        step += 1


_END: Any = object()


def _cycled(data: Iterable[Batch], seed: int, start: int, stream: str) -> Iterator[Batch]:
    step = 0
    while True:
        # A shuffling DataLoader draws from torch's global generator: it gets its own seed at every
        # step, and the
        # caller's random state is left as it was.
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed_for(seed, stream, step))
            iterator = iter(data)
        began = step
        while True:
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(seed_for(seed, stream, step))
                batch = next(iterator, _END)
            if batch is _END:
                break
            step += 1
            if step > start:
                yield batch
        if step == began:
            raise BatchError(
                f"data gave {step} batches and then no more. Pass something that can be iterated again "
                "(a list or a DataLoader, not a generator), or a function of a torch.Generator."
                if step
                else "data is empty: it gave no batch at all."
            )


def _tensors(inputs: Any) -> Iterator[tuple[str, Tensor]]:
    if isinstance(inputs, Tensor):
        yield "", inputs
    elif isinstance(inputs, tuple | list):
        for i, x in enumerate(inputs):
            if isinstance(x, Tensor):
                yield f"'s element {i}", x
    elif isinstance(inputs, Mapping):
        for key, x in inputs.items():
            if isinstance(x, Tensor):
                yield f"'s entry {key!r}", x
