"""The last matrix of a language model, and how outputs are compared without ever holding all of them.

Logits are `[positions, vocabulary]`: for a vocabulary of fifty thousand they take a hundred times the
memory of everything else in a step. Where a target's output is nothing but what a linear layer makes
of something narrow, passes that are only compared leave that layer (the *head*) out, and the
divergence is computed through it, a slice of positions at a time. The way back needs no logits
either: the slope of the divergence in what enters the head is made together with it.

Whether a target has a head is seen in a pass: the tensor it returns is the very one that the layer
returned. A target that does anything to its logits afterwards has none, and is compared in full.
"""

from collections.abc import Callable, Container
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from rankone.patching import OutputGetter, pick_output

SLICE = 2**23
"""How many logits are held at a time. Batches with fewer are compared in full."""

ThroughHead = Callable[[nn.Linear, Tensor, Tensor], Tensor]
"""(head, what enters it under masks, what enters it in the target) -> a number per datapoint."""
THROUGH_HEAD: list[tuple[Any, ThroughHead]] = []
"""Divergences, each with the same divergence through a head."""
Forward = Callable[..., Any]


def through_head(divergence: Any) -> ThroughHead | None:
    """The same divergence through a head; None where it needs what the head makes."""
    return next((through for known, through in THROUGH_HEAD if known is divergence), None)


def found_head(
    target: nn.Module,
    decomposed: Container[nn.Module],
    run: Callable[[dict[nn.Module, Forward]], Any],
    getter: OutputGetter,
) -> nn.Linear | None:
    """The linear layer, not a decomposed one, that returns the very tensor which the target returns.

    `run` runs the target with these forwards in place.
    """
    made: list[tuple[nn.Linear, Tensor]] = []

    def noticed(module: nn.Linear) -> Forward:
        forward = module.forward

        def call(*args: Any, **kwargs: Any) -> Tensor:
            made.append((module, forward(*args, **kwargs)))
            return made[-1][1]

        return call

    linear = [m for m in target.modules() if type(m) is nn.Linear and m not in decomposed]
    output = pick_output(run({module: noticed(module) for module in linear}), getter)
    heads = [module for module, y in made if y is output]
    once = len(heads) == 1 and sum(module is heads[0] for module, _ in made) == 1
    return heads[0] if once else None


def left_out(x: Tensor) -> Tensor:
    """The forward of a head that is left out."""
    return x


def unless_too_wide(head: nn.Linear, notice: Callable[[nn.Linear], None]) -> Forward:
    """A forward that leaves a head out, and says so, if it makes more of its input than a slice."""
    forward = head.forward

    def call(x: Tensor) -> Tensor:
        if x.numel() // x.shape[-1] * head.out_features <= SLICE:
            return forward(x)
        notice(head)
        return x

    return call


def kl_through_head(
    head: nn.Linear, output: Float[Tensor, "*lead d"], target: Float[Tensor, "*lead d"]
) -> Float[Tensor, "*lead"]:
    """KL(target ‖ masked) of the distributions that a head makes of these, per position."""
    bias = None if head.bias is None else head.bias.detach().to(output.dtype)
    return _KLThroughHead.apply(output, target.detach(), head.weight.detach().to(output.dtype), bias)


class _KLThroughHead(torch.autograd.Function):
    """Differentiable in the first argument alone: a head that is left out is not decomposed."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, target: Tensor, W: Tensor, bias: Tensor | None) -> Tensor:
        x, y = (t.reshape(-1, t.shape[-1]) for t in (output, target))
        values = x.new_empty(len(x))
        slope = torch.empty_like(x) if ctx.needs_input_grad[0] else None
        rows = max(1, SLICE // len(W))
        for start in range(0, len(x), rows):
            part = slice(start, start + rows)
            log_q = F.linear(x[part], W, bias).log_softmax(-1)
            log_p = F.linear(y[part], W, bias).log_softmax(-1)
            p = log_p.exp()
            values[part] = log_p.sub_(log_q).mul_(p).sum(-1)
            if slope is not None:
                torch.mm(log_q.exp_().sub_(p), W, out=slope[part])
        ctx.slope, ctx.shape = slope, output.shape
        return values.reshape(output.shape[:-1])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return (grads[0].reshape(-1, 1) * ctx.slope).reshape(ctx.shape), None, None, None
