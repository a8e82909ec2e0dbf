"""Batches, where they come from, means over them, and the random numbers of a step.

Randomness is a function of (seed, stream, step), never of what ran before: a resumed run draws
exactly what the uninterrupted one would have drawn, without saving any generator's state. Data is
either a *sampler*, a callable that draws a batch from a generator, or any re-iterable (list,
DataLoader), which is cycled through.
"""

import hashlib
import inspect
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Protocol, cast, runtime_checkable

import torch
from jaxtyping import Bool, Float, Shaped
from torch import Tensor

from rankone.errors import BatchError
from rankone.files import digest_of
from rankone.share import WHOLE, Share


@dataclass(frozen=True)
class WeightedBatch:
    """A batch whose datapoints count with different weights, in losses as in everything measured.

    `inputs` is what the model takes. `weights` has one number per row, or one per position of every row,
    as the model's inputs have them (`[rows, positions]`):

    - padding: a mask that is True where there is data, `WeightedBatch(tokens, tokens != pad)`. A dict
      with an `attention_mask` needs no WeightedBatch: where that is 0, there is no data.
    - equal rows: merged into one, with their number as its weight.
    """

    inputs: Any
    weights: Shaped[Tensor, "rows *positions"]

    @cached_property
    def normalized(self) -> Float[Tensor, "rows *positions"]:
        """The weights, scaled to sum to 1: how much of a mean each row or position is."""
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


@dataclass(frozen=True)
class OtherRows(WeightedBatch):
    """A batch whose last rows are not to be explained: there the delta component always stays on."""

    others: int = 0
    """How many rows these are."""

    def explained(self) -> Bool[Tensor, " rows"]:
        """Which rows are to be explained."""
        rows = len(self.weights)
        return torch.arange(rows, device=self.weights.device) < rows - self.others


Batch = Tensor | tuple | list | Mapping | WeightedBatch
Sampler = Callable[[torch.Generator], Batch]


@runtime_checkable
class Corpus(Protocol):
    """Data that knows its own order (text): batches as a function of (seed, stream, step)."""

    settings: Mapping[str, Any]
    """What suits networks for such data, laid over the recipe and under what a user says."""

    def stream(self, seed: int, start: int, stream: str) -> Iterator[Batch]: ...

    def output_of(self, model: Any) -> str | None:
        """How the tensor to compare is got from what a network for such data returns."""
        ...

    def refuse_misfit(self, model: Any) -> None:
        """Raise if it is no data for this network."""
        ...

    def examples(self, model: Any, layer: str, c: int, count: int, n_batches: int) -> Any:
        """Where one subcomponent matters most, as a table."""
        ...


Data = Sampler | Iterable[Batch] | Tensor | Mapping[str, Any] | WeightedBatch | Corpus
"""A function that draws a batch from a torch.Generator, batches to go through again and again, all
datapoints as the rows of a tensor, of a dict of tensors or of a WeightedBatch, or text."""

ATTENTION_MASK = "attention_mask"
"""The entry of a dict that says where there is data, as tokenizers give it: 1, and 0 for padding."""


def output_for(data: Any, model: Any, output: Any) -> Any:
    """How the tensor to compare is got: as a user says, else as the data knows; raises if data and
    network do not fit."""
    if not isinstance(data, Corpus):
        return output
    data.refuse_misfit(model)
    return data.output_of(model) if output is None else output


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


def given_weights(batch: Batch) -> Float[Tensor, "rows *positions"] | None:
    """How much each row of a batch counts, or each position of each row; None where all count alike.

    The weights of a WeightedBatch; else the attention mask of a dict, if it masks anything.
    """
    if isinstance(batch, WeightedBatch):
        weights = batch.weights
        return weights.to(torch.promote_types(weights.dtype, torch.float32))
    mask = batch.get(ATTENTION_MASK) if isinstance(batch, Mapping) else None
    if not isinstance(mask, Tensor) or mask.dim() != 2:  # others say who attends to whom
        return None
    kept = mask == 1
    known = bool((kept | (mask == 0)).all())
    return kept.float() if known and not bool(kept.all()) else None


def row_weights(batch: Batch, share: Share = WHOLE) -> Float[Tensor, "rows *positions"] | None:
    """How much of a mean each row is, or each position of each row; None where all count alike."""
    if share is not WHOLE:
        weights = given_weights(batch)
        return None if weights is None else weights / share.mean(weights.sum())
    if isinstance(batch, WeightedBatch):
        return batch.normalized
    weights = given_weights(batch)
    return None if weights is None else weights / weights.sum()


def weights_for(
    weights: Float[Tensor, "rows *positions"], lead: Sequence[int], whose: str = "A divergence or importance"
) -> Float[Tensor, "*lead"]:
    """The weights of a batch as those of datapoints of another shape.

    Rows and positions may have changed places. What has no positions (a pooled output) counts as much as
    the most of its row does, what has no rows (an embedding of positions) as the most of its position.
    Further dimensions (heads) count alike.
    """
    shape, wanted = tuple(weights.shape), tuple(lead)
    n = len(shape)
    if wanted[:n] == shape:
        fitting = weights
    elif 0 < len(wanted) < n and shape[: len(wanted)] == wanted:
        fitting = weights.flatten(len(wanted)).amax(-1)
    elif len(wanted) >= n and all(size in (1, full) for size, full in zip(wanted, shape, strict=False)):
        shared = [i for i in range(n) if wanted[i] != shape[i]]
        fitting = weights.amax(shared, keepdim=True)
    elif n == 2 and wanted[:2] == shape[::-1]:
        fitting = weights.T
    elif n > 1 and wanted[: n - 1] == shape[1:]:
        fitting = weights.amax(0)
    else:
        what = "row weights" if n == 1 else "weights of positions (or an attention mask)"
        raise BatchError(
            f"{whose} came with datapoints of shape {wanted}, but the batch has {what} of shape {shape}, "
            "which do not fit them. A divergence of your own must return one number per datapoint, rows first. "
            "Where a layer has other positions than the data, leave it out, or give weights for rows alone: "
            "with WeightedBatch(inputs, torch.ones(rows)) all positions count."
        )
    return fitting.reshape(*fitting.shape, *[1] * (len(wanted) - fitting.dim())).expand(wanted)


def mean_over_data(
    values: Tensor, weights: Float[Tensor, "rows *positions"] | None, share: Share = WHOLE
) -> Float[Tensor, ""]:
    """The mean over datapoints of one number per datapoint, with the `row_weights` of their batch."""
    if weights is None:
        return values.mean()
    if weights.dim() == 1 and values.shape[:1] == weights.shape:
        rows = values.flatten(1).mean(1) if values.dim() > 1 else values
        return rows @ weights.to(rows.dtype)
    each = weights_for(weights, values.shape).to(values.dtype)
    return (values * each).sum() / share.mean(each.sum())


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
            + (
                " torch.as_tensor(batch).float() makes one of an array."
                if hasattr(batch, "__array__")
                else ""
            )
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
    _refuse_lists(batch)
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
    if isinstance(batch, WeightedBatch):
        _check_weights(batch)
    weights = given_weights(batch)
    if weights is not None and not (float(weights.min()) >= 0 and float(weights.sum()) > 0):
        raise BatchError(
            "The weights of a WeightedBatch must be non-negative numbers with a positive sum."
            if isinstance(batch, WeightedBatch)
            else "The batch's attention_mask is 0 everywhere, so there is no data in it. 1 is for data, 0 "
            "for padding."
        )


def _refuse_lists(batch: Batch) -> None:
    inputs = inputs_of(batch)
    if isinstance(inputs, Mapping):
        for key, x in inputs.items():
            if isinstance(x, list):
                raise BatchError(
                    f"The batch's entry {key!r} is a list; expected a tensor. A tokenizer gives tensors with "
                    "return_tensors='pt'."
                )


def _check_weights(batch: WeightedBatch) -> None:
    weights = batch.weights
    if not isinstance(weights, Tensor) or not weights.dim():
        raise BatchError(
            f"The weights of a WeightedBatch are a {type(weights).__name__}; expected a tensor, with one "
            "number per row, or per position of every row."
        )
    for where, tensor in _tensors(inputs_of(batch)):
        if tensor.dim() and tensor.shape[0] != weights.shape[0]:
            raise BatchError(
                f"The WeightedBatch{where} has {tensor.shape[0]} rows and {weights.shape[0]} "
                "weights; every row needs one weight."
            )


def to_device(batch: Batch, device: torch.device) -> Batch:
    if isinstance(batch, WeightedBatch):
        return replace(batch, inputs=to_device(batch.inputs, device), weights=batch.weights.to(device))
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
    if hasattr(data, "__array__") and not isinstance(data, Tensor):
        raise BatchError(
            f"data is a {type(data).__name__}; expected tensors. Pass torch.as_tensor(array).float(), rows "
            "first (of a table: frame.to_numpy())."
        )
    if isinstance(data, Corpus):
        yield from data.stream(seed, start, stream)
    elif isinstance(data, Tensor | Mapping | WeightedBatch):
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
            f"data is a {type(data).__name__}; expected a tensor of datapoints, an iterable of batches (a "
            "list, a DataLoader) or a function that draws a batch from a torch.Generator."
            + (
                " A dataset needs a DataLoader, whose collate_fn leaves labels out."
                if hasattr(data, "__getitem__")
                else ""
            )
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


def _rows(data: Any, seed: int, start: int, stream: str) -> Iterator[Batch]:
    """Batches of all datapoints together: all of them, or if they are many, so many drawn at random."""
    _refuse_lists(data)
    given = dict(_tensors(inputs_of(data)))
    for where, x in given.items():
        if not x.dim() or not len(x):
            raise BatchError(
                f"data{where} is a tensor of shape {tuple(x.shape)}: it has no rows to draw from."
            )
    count = len(next(iter(given.values()))) if given else 0
    if not given or any(len(x) != count for x in given.values()):
        raise BatchError(
            f"data is a {type(data).__name__} with {shapes_of(data)}; expected tensors with one row for each "
            "datapoint. For one batch that is made otherwise, pass a list of batches: [batch]."
        )
    step = start
    while True:
        if count <= ROWS:
            yield data
        else:
            drawn = torch.randint(count, (ROWS,), generator=generator_for(seed, stream, step))
            yield _chosen(data, drawn)
        step += 1


def _chosen(data: Any, rows: Tensor) -> Any:
    """Some rows of all tensors of a batch."""
    if isinstance(data, WeightedBatch):
        return WeightedBatch(_chosen(data.inputs, rows), _chosen(data.weights, rows))
    if isinstance(data, tuple | list):
        return tuple(_chosen(x, rows) for x in data)
    if isinstance(data, Mapping):
        return {key: _chosen(x, rows) for key, x in data.items()}
    return data[rows.to(data.device)] if isinstance(data, Tensor) else data


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
