"""Layers whose matrix multiplies something made of several arguments: bags of tokens, products of pairs.

`nn.EmbeddingBag` multiplies its matrix with the counts of the tokens in a bag, `nn.Bilinear` with all
products of an entry of its first input and one of its second. Neither vector is formed unless
somebody asks to see it.
"""

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rankone.adapters import Activation, Adapter, BiasedAdapter, Structured, register_adapter
from rankone.errors import LayerError


class _Arguments(Structured):
    """The tensors that a layer is called with (None where one was left out)."""

    def __init__(self, *tensors: Tensor | None) -> None:
        self.tensors = tensors

    def clone(self) -> "_Arguments":
        return type(self)(*(None if t is None else t.clone() for t in self.tensors))

    @property
    def _version(self) -> int:
        return sum(t._version for t in self.tensors if t is not None)


class Pair(_Arguments):
    """Two vectors for every datapoint: all products of their entries."""

    def dense(self) -> Tensor:
        a, b = self.tensors
        assert a is not None
        assert b is not None
        return (a.unsqueeze(-1) * b.unsqueeze(-2)).flatten(-2)


@register_adapter(nn.Bilinear)
class BilinearAdapter(BiasedAdapter):
    """`nn.Bilinear`: a matrix over the products of the entries of two inputs, `d_in = in1 * in2`."""

    module: nn.Bilinear

    def input(self, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Activation:
        named = dict(zip(("input1", "input2"), args, strict=False)) | dict(kwargs)
        return Pair(named["input1"], named["input2"])

    def matrix(self) -> Tensor:
        return self.module.weight.flatten(1)

    def read(self, x: Activation, V: Tensor) -> Tensor:
        assert isinstance(x, Pair)
        a, b = x.tensors
        assert a is not None
        assert b is not None
        kernels = V.unflatten(1, (self.module.in1_features, self.module.in2_features))
        # The first input makes a vector for each subcomponent, which meets the second.
        return (torch.einsum("...i,cij->...cj", a, kernels) * b.unsqueeze(-2)).sum(-1)

    def vectors(self, x: Activation) -> Tensor:
        assert isinstance(x, Pair)
        return x.dense()

    def combine(self, z: Tensor, U: Tensor) -> Tensor:
        return F.linear(z, U)

    def bias(self) -> Tensor | None:
        return self.module.bias


class Bags(_Arguments):
    """Tokens, where bags begin (None if every row is one), and the weight of every token."""

    def __init__(self, tokens: Tensor | None, offsets: Tensor | None, weights: Tensor | None) -> None:
        super().__init__(tokens, offsets, weights)

    def dense(self) -> Tensor:
        raise LayerError("Bags of tokens can be made into vectors by their adapter only.")


@register_adapter(nn.EmbeddingBag)
class EmbeddingBagAdapter(Adapter):
    """`nn.EmbeddingBag`: a matrix that acts on counts of tokens (sum), or on their shares (mean)."""

    module: nn.EmbeddingBag

    def refusal(self) -> str | None:
        if self.module.mode == "max":
            return "mode='max' is no product with a matrix. Only mode='sum' and mode='mean' are."
        if self.module.max_norm is not None:
            return "max_norm makes its forward pass rewrite the weight. Set max_norm=None on the module."
        return None

    def input(self, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Activation:
        given = dict(zip(("input", "offsets", "per_sample_weights"), args, strict=False)) | dict(kwargs)
        return Bags(given["input"], given.get("offsets"), given.get("per_sample_weights"))

    def matrix(self) -> Tensor:
        return self.module.weight.T

    def read(self, x: Activation, V: Tensor) -> Tensor:
        assert isinstance(x, Bags)
        m = self.module
        tokens, offsets, weights = x.tensors
        assert tokens is not None
        return F.embedding_bag(
            tokens,
            V.T.contiguous(),
            offsets,
            mode=m.mode,
            per_sample_weights=None if weights is None else weights.to(V.dtype),
            include_last_offset=m.include_last_offset,
            padding_idx=m.padding_idx,
        )

    def write(self, z: Tensor, U: Tensor) -> Tensor:
        return F.linear(z, U)
