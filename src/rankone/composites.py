"""Modules that hold several matrices, or use them without calling the modules that own them.

A `Composite` is bound to one such module and says its computation again, as calls of one small
module for each matrix: a `Part`, which is seen as a matrix like any `nn.Linear` and has a name of its
own (`attn.q`). While rankone runs the target, the composite's forward stands in for the module's.
Nothing is copied: a part reads its weight from the module when it is called. Before a decomposition
begins, the target with its composites is compared with the target as it is.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rankone.adapters import Adapter, LinearAdapter, register_adapter


class Part(nn.Module):
    """One matrix of a module that holds several, and its bias: y = W x + b."""

    def __init__(
        self,
        weight: Callable[[], Tensor],
        bias: Callable[[], Tensor | None] = lambda: None,
        *,
        backwards: bool = False,
    ) -> None:
        """`backwards`: it is called from the last position to the first."""
        super().__init__()
        self._weight, self._bias = weight, bias
        self.backwards = backwards

    @property
    def weight(self) -> Tensor:
        return self._weight()

    @property
    def bias(self) -> Tensor | None:
        return self._bias()

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)


register_adapter(Part)(LinearAdapter)


class Composite(ABC):
    """One module, seen as parts with one matrix each."""

    parts: Mapping[str, nn.Module]
    """The parts, by what is added to the module's name (`q` for `attn.q`; empty for the name itself)."""
    tolerance: float | None = None
    """By how much of its size the output may differ from the module's own; None: by rounding."""

    def __init__(self, module: nn.Module) -> None:
        self.module: Any = module

    @abstractmethod
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What the module computes, by calls of the parts."""

    def hidden(self) -> Sequence[str]:
        """Submodules that are not called any more, as prefixes of their names below the module."""
        return ()

    def refusal(self) -> str | None:
        """Why this particular module cannot be decomposed, or None when it can."""
        return None

    def installed(self) -> dict[tuple[nn.Module, str], Any]:
        """The attributes that stand in for the module's own in every pass."""
        return {(self.module, "forward"): self.forward}


_BY_TYPE: dict[type[nn.Module] | str, type[Composite]] = {}

K = TypeVar("K", bound=type[Composite])


def register_composite(module_type: type[nn.Module] | str) -> Callable[[K], K]:
    """Class decorator: see modules of this type, or with this full class name, as this composite."""

    def register(composite: K) -> K:
        _BY_TYPE[module_type] = composite
        return composite

    return register


def composite_for(module: nn.Module) -> Composite | None:
    """The composite of a module, by the nearest registered class among its ancestors."""
    for cls in type(module).__mro__:
        found = _BY_TYPE.get(cls) or _BY_TYPE.get(f"{cls.__module__}.{cls.__qualname__}")
        if found is not None:
            return found(module)
    return None


@register_composite(nn.MultiheadAttention)
class Attention(Composite):
    """`nn.MultiheadAttention`: `q`, `k`, `v` (packed or separate) and `out_proj`.

    Each of q, k and v is one matrix for all heads, with the heads' rows one after the other.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module)
        attention, width = self.module, self.module.embed_dim

        def projection(i: int, name: str) -> Part:
            rows = slice(i * width, (i + 1) * width)

            def weight() -> Tensor:
                packed = attention.in_proj_weight
                return getattr(attention, f"{name}_proj_weight") if packed is None else packed[rows]

            def bias() -> Tensor | None:
                return None if attention.in_proj_bias is None else attention.in_proj_bias[rows]

            return Part(weight, bias)

        projections = {name: projection(i, name) for i, name in enumerate("qkv")}
        self.parts = {**projections, "out_proj": attention.out_proj}

    def refusal(self) -> str | None:
        if self.module.bias_k is not None or self.module.bias_v is not None:
            return (
                "add_bias_kv=True gives it keys and values that no matrix makes. Use a module without them."
            )
        if self.module.add_zero_attn:
            return "add_zero_attn=True gives it a key that no matrix makes. Use a module without it."
        return None

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        m = self.module
        if is_causal and attn_mask is None:
            raise RuntimeError("Need attn_mask if specifying the is_causal hint.")  # as torch says
        batched, seconds = query.dim() == 3, m.batch_first and query.dim() == 3
        q, k, v = (self.parts[n](x) for n, x in zip("qkv", (query, key, value), strict=True))

        def heads(x: Tensor) -> Tensor:  # [batch, heads, positions, width of a head]
            x = x if batched else x.unsqueeze(1)
            x = x if seconds else x.transpose(0, 1)
            return x.unflatten(-1, (m.num_heads, -1)).transpose(1, 2)

        q, k, v = heads(q), heads(k), heads(v)
        mask = self._mask(attn_mask, key_padding_mask, q, k.shape[2])
        weights = None
        if need_weights:
            scores = (q * q.shape[-1] ** -0.5) @ k.transpose(-2, -1)
            weights = torch.softmax(scores if mask is None else scores + mask, -1)
            mixed = weights @ v
            weights = weights.mean(1) if average_attn_weights else weights
            weights = weights if batched else weights.squeeze(0)
        else:
            mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        mixed = mixed.transpose(1, 2).flatten(2)
        mixed = mixed if seconds else mixed.transpose(0, 1)
        return self.parts["out_proj"](mixed if batched else mixed.squeeze(1)), weights

    @staticmethod
    def _mask(attn_mask: Tensor | None, padding: Tensor | None, q: Tensor, keys: int) -> Tensor | None:
        """Both masks together, as numbers that are added to the scores."""

        def added(mask: Tensor) -> Tensor:
            if mask.dtype != torch.bool:
                return mask.to(q.dtype)
            return torch.zeros(mask.shape, dtype=q.dtype, device=q.device).masked_fill_(mask, float("-inf"))

        total = None
        if attn_mask is not None:
            total = added(attn_mask)
            total = total.view(q.shape[0], q.shape[1], q.shape[2], keys) if total.dim() == 3 else total
        if padding is not None:
            of_keys = added(padding).view(-1, 1, 1, keys)
            total = of_keys if total is None else total + of_keys
        return total


class Fused(Composite):
    """A linear layer whose output is several things side by side, such as queries, keys and values."""

    def __init__(self, module: nn.Module, adapter: Adapter, names: Sequence[str]) -> None:
        super().__init__(module)
        self._names, self._adapter = list(names), adapter
        rows = 0 if self.refusal() else adapter.matrix().shape[0] // len(names)

        def part(i: int) -> Part:
            mine = slice(i * rows, (i + 1) * rows)
            return Part(
                lambda: adapter.matrix()[mine],
                lambda: None if self.module.bias is None else self.module.bias[mine],
            )

        self.parts = {name: part(i) for i, name in enumerate(names)}

    def refusal(self) -> str | None:
        if not isinstance(self._adapter, LinearAdapter):
            return f"it is declared as fused, but is a {type(self.module).__name__}, not a linear layer."
        outputs = self._adapter.matrix().shape[0]
        if outputs % len(self._names):
            return f"its {outputs} outputs cannot be cut into {len(self._names)} equal parts {self._names}."
        return None

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        x = self._adapter.input("", args, kwargs)
        return torch.cat([part(x) for part in self.parts.values()], -1)


@register_composite("torch.ao.nn.quantized.dynamic.modules.linear.Linear")
class Quantised(Composite):
    """A dynamically quantised linear layer, by its dequantised matrix.

    While rankone runs the target, its activations are not rounded to eight bits.
    """

    tolerance = 0.05

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module)
        weight: Tensor = self.module.weight().dequantize()
        self.parts = {"": Part(lambda: weight, lambda: self.module.bias())}

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        return self.parts[""](*args, **kwargs)


@register_composite("peft.tuners.lora.layer.LoraLayer")
class LowRankAdapter(Composite):
    """A linear layer with peft's LoRA: `change` is the sum of the low-rank matrices that are active.

    The layer below keeps its name, `base_layer`.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module)
        self.parts = {"change": Part(self._change)}

    def _change(self) -> Tensor:
        changes = [self.module.get_delta_weight(name) for name in self.module.active_adapters]
        total = torch.stack(changes).sum(0)
        base = self.module.get_base_layer().weight
        fan_in_fan_out = getattr(self.module, "fan_in_fan_out", False)
        return (total.T if fan_in_fan_out else total).to(base.dtype)

    def hidden(self) -> Sequence[str]:
        return ("lora_",)

    def refusal(self) -> str | None:
        m = self.module
        if m.merged:
            return "its low-rank matrices are merged into the base. Call unmerge_adapter() on the peft model."
        if m.disable_adapters or not m.active_adapters:
            return "its low-rank matrices are switched off. Call enable_adapter_layers() on the peft model."
        if any(name not in m.lora_A for name in m.active_adapters) or not hasattr(m, "get_delta_weight"):
            return "it is no LoRA of a linear layer. Leave it out."
        if any(m.use_dora.get(name, False) for name in m.active_adapters):
            return "DoRA rescales the base as well. Merge it and use rankone.decompose_difference."
        if m.get_base_layer().weight.dim() != 2 or isinstance(m.get_base_layer(), nn.Embedding):
            return "its base is no linear layer. Merge it and use rankone.decompose_difference."
        return None

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return self.module.base_layer(x, *args, **kwargs) + self.parts["change"](x)
