"""Mechanisms that are the two signs of one channel, which one part may serve.

A network that writes two features in opposite directions has one matrix of rank one for both: d and -d
for e_i and e_j are d (e_i - e_j). One part costs no more than two and does the same, so the judge
accepts either.
"""

from dataclasses import replace

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from rankone.collection.base import Mechanisms

OPPOSITE = -0.95
"""The cosine of write vectors (or read vectors) from which on two mechanisms are two signs of one."""


def opposites(truth: Mechanisms) -> list[tuple[int, int]]:
    """Pairs of mechanisms of rank one that are the two signs of one channel."""
    left, _, right = torch.linalg.svd(truth.on_support(truth.matrices), full_matrices=False)
    write, read = left[..., 0], right[:, 0]
    # The signs of singular vectors are arbitrary; with those of the reads fixed, the writes have theirs.
    write, read = write * _sign(read), read * _sign(write)
    one = torch.tensor([rank == 1 for rank in truth.ranks])
    pairs = ((write @ write.T < OPPOSITE) | (read @ read.T < OPPOSITE)) & one & one.unsqueeze(1)
    return [(int(a), int(b)) for a, b in pairs.triu(1).nonzero()]


def _sign(vectors: Float[Tensor, "K d"]) -> Float[Tensor, "K 1"]:
    """The sign of the largest entry of each."""
    return vectors.gather(1, vectors.abs().argmax(1, keepdim=True)).sign()


def joined(
    truth: Mechanisms, needed: Bool[Tensor, "rows K"], pair: tuple[int, int]
) -> tuple[Mechanisms, Bool[Tensor, "rows K"]]:
    """The same with the second of a pair made part of the first, and itself needed nowhere."""
    first, second = pair
    matrices, needed = truth.matrices.clone(), needed.clone()
    matrices[first] += matrices[second]
    needed[:, first] |= needed[:, second]
    needed[:, second] = False
    return replace(truth, matrices=matrices), needed
