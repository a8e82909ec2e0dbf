"""One decomposed layer: a module through its adapter, its subcomponents, and what a mask makes of it.

A layer may be called several times in a pass. It has one set of subcomponents then, and every call
is a datapoint of its own: what is known of its calls (`Calls`) is joined behind the first dimension,
the rows of the batch, into `[rows, calls, ..., C]`, and masks of that shape are cut apart again, call
by call.
"""

import math
from collections.abc import Callable, Sequence

import torch
from jaxtyping import Float
from torch import Tensor, nn

from rankone.adapters import Activation, Adapter, Structured, dense
from rankone.components import Subcomponents
from rankone.data import weights_for
from rankone.errors import LayerError
from rankone.masks import Mask
from rankone.patching import same


class Calls(Structured):
    """What a layer received in a pass that calls it several times, one input for each call."""

    def __init__(self, each: Sequence[Activation]) -> None:
        self.each = tuple(each)
        self.leads: list[torch.Size] = []
        """The shapes of each call's datapoints, once it was read."""

    def joined(self, of_each: Sequence[Tensor]) -> Tensor:
        """What there is of every call, as one tensor."""
        self.leads = [values.shape[:-1] for values in of_each]
        return joined(of_each)

    def dense(self) -> Tensor:
        return joined([dense(x) for x in self.each])

    def clone(self) -> "Calls":
        return Calls([x.clone() for x in self.each])

    @property
    def _version(self) -> int:
        return sum(x._version for x in self.each)


def joined(values: Sequence[Tensor]) -> Tensor:
    """What there is of every call, `[rows, ..., n]` each, as `[rows, calls, ..., n]`; calls of
    different shapes are laid end to end, `[rows, all positions, n]`."""
    if len(values) == 1:
        return values[0]
    leads = [v.shape[:-1] for v in values]
    if len(set(leads)) == 1:
        return torch.stack(list(values), min(1, len(leads[0])))
    if any(not lead or lead[0] != leads[0][0] for lead in leads):
        raise LayerError(
            f"A layer is called several times in one pass with inputs of shapes {[tuple(n) for n in leads]} "
            "before the last dimension; the first of them, the rows of the batch, must be the same. "
            "Leave the layer out, or give each use a module of its own."
        )
    return torch.cat([v.reshape(v.shape[0], -1, v.shape[-1]) for v in values], 1)


class DecomposedLayer(nn.Module):
    """One decomposed layer: the original module through its adapter, and its subcomponents."""

    def __init__(self, name: str, adapter: Adapter, subcomponents: Subcomponents) -> None:
        super().__init__()
        self.name = name
        self.adapter = adapter  # no submodule: the target's parameters are never ours to train, move or save
        self.subcomponents = subcomponents
        self.weight_dtype = adapter.matrix().dtype

    @property
    def C(self) -> int:
        return self.subcomponents.C

    def matrix(self) -> Float[Tensor, "d_out d_in"]:
        """The original weight, as a matrix, in the precision of the factors."""
        return self.adapter.matrix().detach().to(self.subcomponents.U.dtype)

    # Factors are kept in at least single precision; a half-precision target sees them in its own.

    def read(self, x: Activation) -> Float[Tensor, "*lead C"]:
        """The inner activations V a of an input, or of the inputs of all calls."""
        if isinstance(x, Calls):
            return x.joined([self.read(each) for each in x.each])
        V = self.subcomponents.V
        return self.adapter.read(x, V.to(self.weight_dtype)).to(V.dtype)

    def vectors(self, x: Activation) -> Float[Tensor, "*lead d_in"]:
        """The vectors a that the matrix multiplies, of an input or of the inputs of all calls."""
        if isinstance(x, Calls):
            return x.joined([self.vectors(each) for each in x.each])
        return self.adapter.vectors(x).to(self.subcomponents.V.dtype)

    def weights(
        self, x: Activation, weights: Float[Tensor, "rows *positions"], lead: Sequence[int]
    ) -> Float[Tensor, "*lead"]:
        """The weights of a batch, as those of this layer's datapoints; its inputs must have been read."""
        whose = f"Layer {self.name!r}"
        if not isinstance(x, Calls):
            return weights_for(weights, lead, whose)
        moments = tuple(weights.shape[:2]) == tuple(lead) and all(len(each) == 1 for each in x.leads)
        if moments:  # a call for each position, as of a recurrent matrix
            backwards = getattr(self.adapter.module, "backwards", False)
            return weights_for(weights.flip(1) if backwards else weights, lead, whose)
        each = [weights_for(weights, of_call, whose) for of_call in x.leads]
        return joined([w.unsqueeze(-1) for w in each]).squeeze(-1)

    def write(self, z: Float[Tensor, "*lead C"]) -> Activation:
        """The output for masked inner activations z."""
        dtype = self.weight_dtype
        return self.adapter.write(z.to(dtype), self.subcomponents.U.to(dtype))

    def masked(self, x: Activation, mask: Mask) -> Activation:
        """The output for an input under a mask."""
        return self._under(self.read(x), x, mask)

    def masked_calls(self, mask: Mask) -> Callable[[Activation], Activation]:
        """What to call, with one input after the other, in a pass under a mask for all calls."""
        done = 0  # positions that earlier calls have used up

        def call(x: Activation) -> Activation:
            nonlocal done
            h = self.read(x)
            lead = h.shape[:-1]
            own = self._of_call(mask, lead, done)
            done += math.prod(lead[1:])
            return self._under(h, x, own)

        return call

    def _under(self, h: Float[Tensor, "*lead C"], x: Activation, mask: Mask) -> Activation:
        if mask.where is None and mask.delta is None:
            return self.write(h * mask.values)
        return self.write_with_rest(h, mask, self.rest(x))

    def _of_call(self, mask: Mask, lead: torch.Size, done: int) -> Mask:
        """The mask of one call, out of one for all calls."""

        def cut(t: Tensor | None, behind: int) -> Tensor | None:
            own = () if t is None else t.shape[: t.dim() - behind]
            if t is None or not own:
                return t
            if len(own) == len(lead) and all(n in (1, m) for n, m in zip(own, lead, strict=True)):
                return t
            if not lead:
                return t[done]
            flat = t.reshape(own[0], -1, *t.shape[len(own) :])
            if flat.shape[1] == 1:
                return flat.reshape(own[0], *[1] * (len(lead) - 1), *t.shape[len(own) :])
            positions = math.prod(lead[1:])
            if done + positions > flat.shape[1]:
                raise LayerError(
                    f"The mask for layer {self.name!r} is for {tuple(own)} datapoints, but the layer is "
                    f"called with {tuple(lead)} after {done} positions of earlier calls. Make masks from "
                    "importances on the same batch."
                )
            return flat[:, done : done + positions].reshape(own[0], *lead[1:], *t.shape[len(own) :])

        values = cut(mask.values, 1)
        assert values is not None
        return Mask(values, cut(mask.where, 0), cut(mask.delta, 0))

    def rest(self, x: Activation) -> tuple[Float[Tensor, "*lead k"], Float[Tensor, "d_out k"] | None]:
        """What the original matrix makes of an input, as (vectors, directions): (a, W), or (W a, None)
        where that is narrower."""
        W = self.adapter.matrix().detach()
        dtype = self.subcomponents.U.dtype
        if W.shape[0] <= W.shape[1]:
            return self.adapter.read(x, W).to(dtype), None
        return self.adapter.vectors(x).to(dtype), W.to(dtype)

    def write_with_rest(
        self,
        h: Float[Tensor, "*lead C"],
        mask: Mask,
        rest: tuple[Tensor, Tensor | None],
        known: Float[Tensor, "*lead C"] | None = None,
    ) -> Activation:
        """The output for inner activations h under a mask that has a delta or holds somewhere only.

        U (m h) + delta (W - U V) a is U ((m - delta) h) + delta W a, and the original is W a. `known` is
        m h, where it has been made already.
        """
        vectors, W = rest
        share: Tensor | None = None if mask.delta is None else mask.delta.unsqueeze(-1)
        if share is None:
            z = mask.values * h if known is None else known
        elif known is None:
            z = (mask.values - share) * h
        else:
            z = torch.addcmul(known, share, h, value=-1)
        if mask.where is not None:
            where = mask.where.unsqueeze(-1)
            z = z * where
            share = torch.where(where, 0.0 if share is None else share, 1.0)
        assert share is not None
        dtype = self.weight_dtype
        U = self.subcomponents.U.to(dtype)
        return self.adapter.write_sum(
            z.to(dtype), U, (share * vectors).to(dtype), None if W is None else W.to(dtype)
        )

    def verify(self, x: Activation, output: Activation) -> None:
        """Raise unless this layer is its matrix and bias and nothing else."""
        if isinstance(x, Calls) and isinstance(output, Calls):
            for each, its in zip(x.each, output.each, strict=True):
                self.verify(each, its)
            return
        if not is_its_matrix(self.adapter, x, output):
            raise LayerError(
                f"Layer {self.name!r} ({type(self.adapter.module).__name__}) does not just multiply by "
                f"its matrix and add its bias: {type(self.adapter).__name__}.write(read(x)) is "
                "something else than its output. A subclass or a patched forward may do more, or an "
                "Adapter of your own may forget the bias. Leave the layer out, or register an Adapter "
                "for its type that says what it does."
            )


def is_its_matrix(adapter: Adapter, x: Activation, output: Activation) -> bool:
    """Whether a layer's output is what its adapter makes of its matrix and an input."""
    W = adapter.matrix().detach()
    identity = torch.eye(min(W.shape), dtype=W.dtype, device=W.device)
    U, V = (identity, W) if W.shape[0] <= W.shape[1] else (W, identity)
    return same(dense(adapter.write(adapter.read(x, V), U)), dense(output))
