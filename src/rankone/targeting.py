"""Targeted decomposition: a behaviour, or a handful of prompts, explained by few parts alone.

Two streams of text make one batch. On the rows of the target stream masks do what they always do: the
parts must do the work alone. On the rows of the other stream the delta component, W minus the sum of
all parts, always stays on, so that nothing but the behaviour has to be explained; parts that matter
there as well must still say so, which is why an edit of the parts does little harm elsewhere.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rankone.corpus import Text
from rankone.data import ATTENTION_MASK, Batch, OtherRows, WeightedBatch, inputs_of
from rankone.errors import ConfigError, shown


@dataclass(frozen=True)
class Targeted:
    """Two texts as data: rows of the target's first, then rows of the other's."""

    target: Text
    other: Text

    @property
    def settings(self) -> Mapping[str, Any]:
        return {**self.target.settings, "masks": {"delta": True}}

    def stream(self, seed: int, start: int, stream: str) -> Iterator[Batch]:
        """Batches of both, in the order of each."""
        of_target = self.target.stream(seed, start, stream)
        of_other = self.other.stream(seed, start, stream)
        for first, second in zip(of_target, of_other, strict=False):
            yield self._joined(first, second)

    def _joined(self, first: Batch, second: Batch) -> Batch:
        """One batch of two; where one is shorter, it is padded."""
        ids = [self.target.ids_of(first), self.other.ids_of(second)]
        there = [_there(batch, its) for batch, its in zip((first, second), ids, strict=True)]
        chosen = [_counting(batch, its) for batch, its in zip((first, second), there, strict=True)]
        length = max(its.shape[1] for its in ids)
        joined, attended, counts = (
            torch.cat([torch.nn.functional.pad(t, (0, length - t.shape[1])) for t in both])
            for both in (ids, there, chosen)
        )
        inputs: Any = joined
        if self.target.keyword is not None:
            inputs = {self.target.keyword: joined, "use_cache": False}
            inputs |= {} if bool(attended.all()) else {ATTENTION_MASK: attended.long()}
        return OtherRows(inputs, counts, len(ids[1]))

    def output_of(self, model: Any) -> str | None:
        return self.target.output_of(model)

    def refuse_misfit(self, model: Any) -> None:
        self.target.refuse_misfit(model)
        self.other.refuse_misfit(model)

    def examples(self, model: Any, layer: str, c: int, count: int, n_batches: int) -> Any:
        """The passages of the target text in which one subcomponent is most important."""
        return self.target.examples(model, layer, c, count, n_batches)


def _there(batch: Batch, ids: Tensor) -> Tensor:
    """Where a batch has text, and no padding."""
    inputs = inputs_of(batch)
    if not isinstance(inputs, Mapping) and isinstance(batch, WeightedBatch):
        return batch.weights.bool()  # nothing else says so to a model that takes ids alone
    mask = inputs.get(ATTENTION_MASK) if isinstance(inputs, Mapping) else None
    return torch.ones_like(ids, dtype=torch.bool) if mask is None else mask.bool()


def _counting(batch: Batch, there: Tensor) -> Tensor:
    """The positions that count: what was chosen of the text."""
    return batch.weights.bool() if isinstance(batch, WeightedBatch) else there


def targeted(target_data: Any, other_data: Any) -> Targeted:
    """Data for a targeted decomposition: the parts explain `target_data`, and leave `other_data` as it is.

    `rankone.decompose(model, rankone.targeted(target_data=prompts, other_data=text), layers)`.
    """
    for name, data in (("target_data", target_data), ("other_data", other_data)):
        if not isinstance(data, Text):
            raise ConfigError(f"{name} is {shown(data)}; expected text, as rankone.text gives it.")
    if target_data.keyword != other_data.keyword:
        raise ConfigError("target_data and other_data have different keywords for token ids.")
    return Targeted(target_data, other_data)
