"""Causal importance functions: how much each subcomponent matters on each datapoint.

A function gives one raw number per subcomponent, from what the *clean* target shows. The raw number
is squashed twice: `lower_leaky` (or `straight_through`) makes the masks, `upper_leaky` makes the
minimality loss (appendix A.2 of the paper says why), and `clipped` is what people look at.

Most functions look at one layer at a time and see its inner activations `h = V a`: an
`ImportanceFunction`. One that needs more, the layer's input or all layers at once, is a
`JointImportance`. Both are registered by name; their keyword arguments become their options in the
config. docs/extending.md shows both.
"""

import inspect
import math
from abc import abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from rankone.data import generator_for
from rankone.errors import ConfigError, near_matches
from rankone.settings import Registry

LEAK = 0.01
AT_ZERO = 0.6
"""The importance at an inner activation of 0, where a function starts open above 0. Below 0 it falls to
about 0.4: not so far that a feature with either sign could not open it again."""
OPENING = 1.6
"""How steeply it then rises: it reaches 1 at about a third of a typical inner activation."""
Option = int | float | str | bool


def lower_leaky(raw: Float[Tensor, "*s"]) -> Float[Tensor, "*s"]:
    """Hard sigmoid that leaks below 0 only: masks may fall below 0, never rise above 1."""
    return F.leaky_relu(raw, LEAK).clamp(max=1)


class _StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, raw: Tensor) -> Tensor:
        ctx.save_for_backward(raw)
        return raw.clamp(0, 1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        (raw,), (grad,) = ctx.saved_tensors, grads
        below = LEAK * grad.clamp(max=0)
        return torch.where(raw <= 0, below, torch.where(raw <= 1, grad, torch.zeros_like(grad)))


def straight_through(raw: Float[Tensor, "*s"]) -> Float[Tensor, "*s"]:
    """Clamped to [0, 1]; below 0 a hundredth of the gradient passes where it would raise the value."""
    return _StraightThrough.apply(raw)


def upper_leaky(raw: Float[Tensor, "*s"]) -> Float[Tensor, "*s"]:
    """Hard sigmoid that leaks above 1 only: the penalty never rewards a negative importance."""
    return torch.where(raw > 1, 1 + LEAK * (raw - 1), raw.clamp(min=0))


def clipped(raw: Float[Tensor, "*s"]) -> Float[Tensor, "*s"]:
    """The importance as a number in [0, 1], for reading, plotting and thresholds."""
    return raw.clamp(0, 1)


class LayerShape(NamedTuple):
    """What a joint importance function is told of a layer when it is made."""

    C: int
    d_in: int


class LayerActivations(NamedTuple):
    """What the clean pass shows of one layer on a batch."""

    inner: Float[Tensor, "*lead C"]
    """The inner activations h = V a; gradient flows through them into V."""
    vectors: Callable[[], Float[Tensor, "*lead d_in"]]
    """The layer's input a, made when it is called."""


class ImportanceFunction(nn.Module):
    """Raw importances of the C subcomponents of one layer, from their inner activations."""

    @abstractmethod
    def forward(self, h: Float[Tensor, "*lead C"]) -> Float[Tensor, "*lead C"]: ...

    def open_above_zero(self) -> None:
        """Start as 1 where the inner activation is large, and near a half where it is negative. A
        function that cannot do so leaves itself as it is."""

    def stretch(self, factor: float) -> None:
        """Move every raw importance `factor` times as far from a half. A function that cannot do so
        leaves itself as it is."""


class JointImportance(nn.Module):
    """Raw importances of every decomposed layer, from what the clean pass shows of all of them.

    Made as `cls(shapes, generator, **options)`, with the `LayerShape` of every layer by name.
    """

    @abstractmethod
    def forward(self, layers: Mapping[str, LayerActivations]) -> dict[str, Tensor]: ...

    def open_above_zero(self) -> None:
        """As `ImportanceFunction.open_above_zero`, for all layers."""

    def stretch(self, factor: float) -> None:
        """As `ImportanceFunction.stretch`, for all layers."""

    def named(self) -> dict[str, nn.Parameter | Tensor]:
        """Parameters and buffers, by the names they have in a checkpoint."""
        return {f"importance.{k}": t for k, t in (*self.named_parameters(), *self.named_buffers())}


class PerLayer(JointImportance):
    """One importance function for each layer, each on its own."""

    def __init__(self, functions: Mapping[str, ImportanceFunction]) -> None:
        super().__init__()
        self.functions = dict(functions)
        self._registered = nn.ModuleList(functions.values())

    def forward(self, layers: Mapping[str, LayerActivations]) -> dict[str, Tensor]:
        return {name: function(layers[name].inner) for name, function in self.functions.items()}

    def open_above_zero(self) -> None:
        for function in self.functions.values():
            function.open_above_zero()

    def stretch(self, factor: float) -> None:
        for function in self.functions.values():
            function.stretch(factor)

    def named(self) -> dict[str, nn.Parameter | Tensor]:
        tensors: dict[str, nn.Parameter | Tensor] = {}
        for name, f in self.functions.items():
            tensors |= {f"{name}.importance.{k}": t for k, t in (*f.named_parameters(), *f.named_buffers())}
        return tensors


IMPORTANCES: Registry[type[ImportanceFunction] | type[JointImportance]] = Registry("importance function")
register_importance = IMPORTANCES.register


def check_importance(kind: str, options: Mapping[str, Option]) -> None:
    """Raise unless `kind` is registered and takes every one of `options`."""
    parameters = list(inspect.signature(IMPORTANCES.get(kind).__init__).parameters)[
        3:
    ]  # self, shape, generator
    for option in options:
        if option not in parameters:
            none = "It takes no options: set importance.options={} as well."
            hint = near_matches(option, parameters) if parameters else none
            raise ConfigError(f"Importance function {kind!r} has no option {option!r}. {hint}")


def make_importance(
    kind: str, options: Mapping[str, Option], shapes: Mapping[str, LayerShape], seed: int
) -> JointImportance:
    """A freshly initialised importance function for these layers."""
    check_importance(kind, options)
    cls: Any = IMPORTANCES.get(kind)
    if issubclass(cls, JointImportance):
        return cls(shapes, generator_for(seed, "init/importance"), **options)
    return PerLayer(
        {
            n: cls(shape.C, generator_for(seed, f"init/importance/{n}"), **options)
            for n, shape in shapes.items()
        }
    )


def whole(name: str, value: Any) -> int:
    """An option that must be a whole number."""
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= 100_000:
        raise ConfigError(
            f"Importance option {name} is {value!r}; it must be a whole number from 1 to 100,000."
        )
    return value


@register_importance("mlp")
class MLPImportance(ImportanceFunction):
    """The paper's function: for every subcomponent its own MLP from one number to one number.

    One hidden layer of `d_gate` GELU neurons. Initialised as fan 1 with ReLU gain going in, fan
    `d_gate` with linear gain going out, biases 0.
    """

    def __init__(self, C: int, generator: torch.Generator, *, d_gate: Any = 16) -> None:
        super().__init__()
        whole("d_gate", d_gate)
        self.w_in = nn.Parameter(math.sqrt(2) * torch.randn(C, d_gate, generator=generator))
        self.b_in = nn.Parameter(torch.zeros(C, d_gate))
        self.w_out = nn.Parameter(torch.randn(C, d_gate, generator=generator) / math.sqrt(d_gate))
        self.b_out = nn.Parameter(torch.zeros(C))

    def forward(self, h: Float[Tensor, "*lead C"]) -> Float[Tensor, "*lead C"]:
        # Subcomponents come first, so that the large tensor is contiguous forward and backward:
        # twice as fast.
        columns = h.reshape(-1, h.shape[-1]).T.unsqueeze(-1)
        hidden = F.gelu(torch.baddbmm(self.b_in.unsqueeze(1), columns, self.w_in.unsqueeze(1)))
        raw = torch.bmm(hidden, self.w_out.unsqueeze(-1)).squeeze(-1).T + self.b_out
        return raw.reshape(h.shape)

    @torch.no_grad()
    def open_above_zero(self) -> None:
        self.w_in.abs_()
        self.w_out.abs_().mul_(OPENING / math.sqrt(self.w_out.shape[1]))
        self.b_out.fill_(AT_ZERO)

    def stretch(self, factor: float) -> None:
        stretch(self.w_out, self.b_out, factor)


@register_importance("linear")
class LinearImportance(ImportanceFunction):
    """A scale and an offset for every subcomponent: important when its inner activation is large."""

    def __init__(self, C: int, generator: torch.Generator) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(C, generator=generator))
        self.b = nn.Parameter(torch.zeros(C))

    def forward(self, h: Float[Tensor, "*lead C"]) -> Float[Tensor, "*lead C"]:
        return h * self.w + self.b

    def stretch(self, factor: float) -> None:
        stretch(self.w, self.b, factor)


@register_importance("layer_mlp")
class LayerMLPImportance(ImportanceFunction):
    """One MLP for the whole layer: every importance may depend on all inner activations of the layer.

    The paper asks for such functions (section 2.3.3 and the discussion): whether a subcomponent
    matters can depend on what its neighbours do. `width` is the number of GELU neurons, shared by
    all subcomponents.
    """

    def __init__(self, C: int, generator: torch.Generator, *, width: Any = 64) -> None:
        super().__init__()
        whole("width", width)
        self.w_in = nn.Parameter(math.sqrt(2 / C) * torch.randn(width, C, generator=generator))
        self.b_in = nn.Parameter(torch.zeros(width))
        self.w_out = nn.Parameter(torch.randn(C, width, generator=generator) / math.sqrt(width))
        self.b_out = nn.Parameter(torch.zeros(C))

    def forward(self, h: Float[Tensor, "*lead C"]) -> Float[Tensor, "*lead C"]:
        return F.linear(F.gelu(F.linear(h, self.w_in, self.b_in)), self.w_out, self.b_out)

    def stretch(self, factor: float) -> None:
        stretch(self.w_out, self.b_out, factor)


@torch.no_grad()
def stretch(weight: Tensor, bias: Tensor, factor: float) -> None:
    """Move what a last layer makes `factor` times as far from a half."""
    weight.mul_(factor)
    bias.mul_(factor).add_(0.5 - 0.5 * factor)
