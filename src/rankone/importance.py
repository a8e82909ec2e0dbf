"""Causal importance functions: how much each subcomponent matters on each datapoint.

A function maps the inner activations `h = V a` of one layer (of the *clean* target) to one raw number per
subcomponent. The raw number is squashed twice: `lower_leaky` makes the masks, `upper_leaky` makes the
minimality loss (appendix A.2 of the paper says why), and `clipped` is what people look at.

A function of your own is a class with a name; its keyword arguments become its options in the config:

    @register_importance("mine")
    class Mine(ImportanceFunction):
        def __init__(self, C, generator, *, width=8): ...
        def forward(self, h): ...
"""

import inspect
import math
from abc import abstractmethod
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from rankone.errors import ConfigError, near_matches

LEAK = 0.01
Option = int | float | str | bool


def lower_leaky(raw: Float[Tensor, "*s"]) -> Float[Tensor, "*s"]:
    """Hard sigmoid that leaks below 0 only: masks may fall below 0, never rise above 1."""
    return F.leaky_relu(raw, LEAK).clamp(max=1)


def upper_leaky(raw: Float[Tensor, "*s"]) -> Float[Tensor, "*s"]:
    """Hard sigmoid that leaks above 1 only: the penalty never rewards a negative importance."""
    return torch.where(raw > 1, 1 + LEAK * (raw - 1), raw.clamp(min=0))


def clipped(raw: Float[Tensor, "*s"]) -> Float[Tensor, "*s"]:
    """The importance as a number in [0, 1], for reading, plotting and thresholds."""
    return raw.clamp(0, 1)


class ImportanceFunction(nn.Module):
    """Raw importances of the C subcomponents of one layer, from their inner activations."""

    @abstractmethod
    def forward(self, h: Float[Tensor, "*lead C"]) -> Float[Tensor, "*lead C"]: ...


IMPORTANCES: dict[str, type[ImportanceFunction]] = {}


def register_importance(name: str) -> Callable[[type[ImportanceFunction]], type[ImportanceFunction]]:
    """Class decorator: make an importance function available to configs under `name`."""

    def register(cls: type[ImportanceFunction]) -> type[ImportanceFunction]:
        IMPORTANCES[name] = cls
        return cls

    return register


def check_importance(kind: str, options: Mapping[str, Option]) -> None:
    """Raise unless `kind` is registered and takes every one of `options`."""
    if kind not in IMPORTANCES:
        raise ConfigError(f"Unknown importance function {kind!r}. {near_matches(kind, IMPORTANCES)}")
    taken = [p for p in inspect.signature(IMPORTANCES[kind].__init__).parameters if p not in ("self", "C", "generator")]
    for option in options:
        if option not in taken:
            hint = near_matches(option, taken) if taken else "It takes no options: set importance.options={} as well."
            raise ConfigError(f"Importance function {kind!r} has no option {option!r}. {hint}")


def make_importance(kind: str, options: Mapping[str, Option], C: int, generator: torch.Generator) -> ImportanceFunction:
    """A freshly initialised importance function for a layer of C subcomponents."""
    check_importance(kind, options)
    return IMPORTANCES[kind](C, generator, **options)  # pyright: ignore[reportCallIssue, reportArgumentType]


def _whole(name: str, value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ConfigError(f"Importance option {name} is {value!r}; it must be a whole number of at least 1.")
    return value


@register_importance("mlp")
class MLPImportance(ImportanceFunction):
    """The paper's function: for every subcomponent its own MLP from one number to one number.

    One hidden layer of `d_gate` GELU neurons. Initialised as fan 1 with ReLU gain going in, fan `d_gate` with
    linear gain going out, biases 0.
    """

    def __init__(self, C: int, generator: torch.Generator, *, d_gate: Any = 16) -> None:
        super().__init__()
        _whole("d_gate", d_gate)
        self.w_in = nn.Parameter(math.sqrt(2) * torch.randn(C, d_gate, generator=generator))
        self.b_in = nn.Parameter(torch.zeros(C, d_gate))
        self.w_out = nn.Parameter(torch.randn(C, d_gate, generator=generator) / math.sqrt(d_gate))
        self.b_out = nn.Parameter(torch.zeros(C))

    def forward(self, h: Float[Tensor, "*lead C"]) -> Float[Tensor, "*lead C"]:
        # Subcomponents come first, so that the large tensor is contiguous forward and backward: twice as fast.
        columns = h.reshape(-1, h.shape[-1]).T.unsqueeze(-1)
        hidden = F.gelu(torch.baddbmm(self.b_in.unsqueeze(1), columns, self.w_in.unsqueeze(1)))
        raw = torch.bmm(hidden, self.w_out.unsqueeze(-1)).squeeze(-1).T + self.b_out
        return raw.reshape(h.shape)


@register_importance("linear")
class LinearImportance(ImportanceFunction):
    """A scale and an offset for every subcomponent: important when its inner activation is large."""

    def __init__(self, C: int, generator: torch.Generator) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(C, generator=generator))
        self.b = nn.Parameter(torch.zeros(C))

    def forward(self, h: Float[Tensor, "*lead C"]) -> Float[Tensor, "*lead C"]:
        return h * self.w + self.b


@register_importance("layer_mlp")
class LayerMLPImportance(ImportanceFunction):
    """One MLP for the whole layer: every importance may depend on all inner activations of the layer.

    The paper asks for such functions (section 2.3.3 and the discussion): whether a subcomponent matters can depend
    on what its neighbours do. `width` is the number of GELU neurons, shared by all subcomponents.
    """

    def __init__(self, C: int, generator: torch.Generator, *, width: Any = 64) -> None:
        super().__init__()
        _whole("width", width)
        self.w_in = nn.Parameter(math.sqrt(2 / C) * torch.randn(width, C, generator=generator))
        self.b_in = nn.Parameter(torch.zeros(width))
        self.w_out = nn.Parameter(torch.randn(C, width, generator=generator) / math.sqrt(width))
        self.b_out = nn.Parameter(torch.zeros(C))

    def forward(self, h: Float[Tensor, "*lead C"]) -> Float[Tensor, "*lead C"]:
        return F.linear(F.gelu(F.linear(h, self.w_in, self.b_in)), self.w_out, self.b_out)
