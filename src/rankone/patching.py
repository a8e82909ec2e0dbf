"""What rankone does to a target network, and how it leaves it as it was.

Layers are chosen by name, their `forward` is overridden for the length of one pass and put back
whatever happens, and a target whose passes would not repeat is refused. Nothing here knows about
subcomponents.
"""

import copy
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from rankone.adapters import dense
from rankone.data import Batch, shapes_of, tensors_of
from rankone.errors import LayerError, TargetError, near_matches
from rankone.files import digest_of

OutputGetter = Callable[[Any], Tensor] | str | int | None
"""How to get the tensor to compare: a function, an attribute or key, an index, or None for the
result itself."""


one_pass_at_a_time = threading.RLock()
"""A pass changes `forward` of modules that threads may share: passes take turns."""


class overridden:  # noqa: N801 (a context manager)
    """Override attributes of module instances, such as `forward`, and put everything back on the way
    out.

    A class, because that costs half as much as a generator, and a step enters several.

    torch's fused attention path reads weights without calling the layers that own them; it is off
    meanwhile.
    """

    def __init__(self, attributes: Mapping[tuple[nn.Module, str], Any]) -> None:
        self.attributes = attributes

    def __enter__(self) -> None:
        self.before = [(module, name, module.__dict__.get(name, _ABSENT)) for module, name in self.attributes]
        self.fused = torch.backends.mha.get_fastpath_enabled()
        torch.backends.mha.set_fastpath_enabled(False)
        for (module, name), value in self.attributes.items():
            module.__dict__[name] = value

    def __exit__(self, *_: object) -> None:
        torch.backends.mha.set_fastpath_enabled(self.fused)
        for module, name, original in self.before:
            if original is _ABSENT:
                module.__dict__.pop(name, None)
            else:
                module.__dict__[name] = original


_ABSENT: Any = object()

_freezers: dict[nn.Parameter, int] = {}
"""Parameters that are frozen now -> how many threads or nested calls froze them."""


@contextmanager
def frozen(target: nn.Module) -> Iterator[None]:
    """Nothing of the target is trained meanwhile: no gradient is prepared for it, and products of its
    weights can be kept. What several threads freeze thaws when the last of them is done."""
    with one_pass_at_a_time:
        parameters = [p for p in target.parameters() if p.requires_grad or p in _freezers]
        for p in parameters:
            _freezers[p] = _freezers.get(p, 0) + 1
            p.requires_grad_(False)
    try:
        yield
    finally:
        with one_pass_at_a_time:
            for p in parameters:
                _freezers[p] -= 1
                if not _freezers[p]:
                    del _freezers[p]
                    p.requires_grad_(True)


def pick_output(result: Any, getter: OutputGetter) -> Tensor:
    """The tensor to compare, out of whatever the target returns."""
    picked = result
    if callable(getter):
        picked = getter(result)
    elif isinstance(getter, int):
        elements = list(result.values()) if isinstance(result, Mapping) else result
        if not isinstance(elements, tuple | list) or not -len(elements) <= getter < len(elements):
            size = f" of {len(elements)}" if isinstance(elements, tuple | list) else ""
            raise TargetError(
                f"output={getter}: the target returns a {type(result).__name__}{size}, which has "
                f"no element {getter}."
            )
        picked = elements[getter]
    elif isinstance(getter, str):
        in_mapping = isinstance(result, Mapping) and getter in result
        if not in_mapping and not hasattr(result, getter):
            names = (
                list(result)
                if isinstance(result, Mapping)
                else [n for n in dir(result) if not n.startswith("_")]
            )
            raise TargetError(
                f"output={getter!r}: the target returns a {type(result).__name__} that has no such "
                f"attribute or key. {near_matches(getter, map(str, names))}"
            )
        picked = result[getter] if in_mapping else getattr(result, getter)
    picked = dense(picked)
    if not isinstance(picked, Tensor):
        how = "returns" if getter is None else f"with output={getter!r} gives"
        raise TargetError(
            f"The target {how} a {type(picked).__name__}, but a tensor is needed to compare "
            "outputs. Pass output= a name (output='logits'), an index (output=0) or a function that gets "
            f"the tensor.{_inside(picked)}"
        )
    return picked


def cannot_run(target: nn.Module, batch: Batch, error: Exception) -> TargetError:
    """What to say when a pass fails, with a hint where the data is of another type than the network."""
    of_data = {t.dtype for t in tensors_of(batch) if t.is_floating_point()}
    of_target = {p.dtype for p in target.parameters() if p.is_floating_point()}
    hint = ""
    if of_data and not of_data & of_target and len(of_target) == 1:
        own = of_target.pop()
        hint = f" The data is {of_data.pop()}, the network {own}: pass data.to({own})."
    return TargetError(
        f"The target cannot be run on a batch of {shapes_of(batch)}: {error}. Check that the "
        f"data gives what the model takes: shapes, types, device.{hint}"
    )


def _inside(result: Any) -> str:
    """The tensors that a target's output holds, in words."""
    named = (
        result.items()
        if isinstance(result, Mapping)
        else enumerate(result if isinstance(result, tuple) else ())
    )
    found = [f"{name} {tuple(x.shape)}" for name, x in named if isinstance(x, Tensor)]
    return f" It holds {', '.join(found)}." if found else ""


def same(a: Tensor, b: Tensor, relative: float | None = None) -> bool:
    """Equal up to rounding, or up to a share of the largest. (Integers, as some getters give them, must
    be equal.)"""
    if a.shape != b.shape or a.dtype != b.dtype or not a.is_floating_point():
        return torch.equal(a, b)
    size = max(1.0, float(b.abs().max())) if b.numel() else 1.0
    tolerance = (torch.finfo(a.dtype).eps ** 0.5 if relative is None else relative) * size
    return torch.allclose(a, b, rtol=0, atol=tolerance, equal_nan=True)


@contextmanager
def unchanged(target: nn.Module) -> Iterator[None]:
    """Raise, and undo it, if a target changes its parameters or buffers meanwhile."""

    def state() -> dict[str, Tensor]:
        tensors = dict(target.named_buffers())
        if any(module.training for module in target.modules()):
            tensors |= dict(target.named_parameters())
        return tensors

    before = {key: value.clone() for key, value in state().items()}
    changed: list[str] = []
    try:
        yield
    finally:
        with torch.no_grad():
            for key, value in state().items():
                if key in before and digest_of({key: value}) != digest_of({key: before[key]}):
                    changed.append(key)
                    value.copy_(before[key])
    if changed:
        raise TargetError(
            f"The target changes its own state when it is run ({changed[0]}). Call model.eval() before "
            "decomposing; if it is in eval mode already, take out what counts or remembers."
        )


def refuse_unusable(target: Any) -> None:
    """A pass must be possible and repeatable: no layer may draw random numbers or change when it is
    called."""
    if not isinstance(target, nn.Module):
        raise TargetError(f"The target is a {type(target).__name__}; expected a trained torch.nn.Module.")
    if isinstance(target, torch.jit.ScriptModule):
        raise TargetError(
            "The target is a ScriptModule: what its layers do was compiled, and cannot be replaced. "
            "Decompose the module that it was made from."
        )
    if any(t.is_meta for t in (*target.parameters(), *target.buffers())):
        raise TargetError(
            "The target has weights on the meta device, without values. Load its weights first."
        )
    for name, module in target.named_modules():
        if not module.training:
            continue
        dropout = getattr(module, "dropout", 0.0)
        random = (isinstance(module, nn.modules.dropout._DropoutNd) and module.p > 0) or (
            isinstance(module, nn.MultiheadAttention | nn.RNNBase)
            and isinstance(dropout, float)
            and dropout > 0
        )
        stateful = isinstance(module, nn.modules.batchnorm._BatchNorm)
        if random or stateful:
            what = "draws random numbers" if random else "changes its statistics"
            raise TargetError(
                f"The target is in training mode and its layer {name!r} ({type(module).__name__}) "
                f"{what} in every pass. Call model.eval() before decomposing."
            )


class WithIdentity(nn.Module):
    """A module followed by a fixed identity matrix: the same function, with one more mechanism,
    which is known."""

    def __init__(self, module: nn.Module, width: int) -> None:
        super().__init__()
        self.module = module
        self.identity = nn.Linear(width, width, bias=False)
        self.identity.weight = nn.Parameter(torch.eye(width), requires_grad=False)

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        return self.identity(self.module(*args, **kwargs))


def insert_identity(model: nn.Module, layer: str, width: int | None = None) -> nn.Module:
    """A copy of a model with a fixed identity matrix after `layer`; decompose `LAYER.identity` with
    the rest.

    `width` is the size of the layer's output; it need not be given for layers with `out_features`.
    """
    changed = copy.deepcopy(model)
    try:
        module = changed.get_submodule(layer)
    except AttributeError:
        names = [name for name, _ in model.named_modules() if name]
        raise LayerError(f"There is no layer {layer!r}. {near_matches(layer, names)}") from None
    if not layer:
        raise LayerError("Name the layer after which the identity is to stand.")
    size = width if width is not None else getattr(module, "out_features", None)
    if not isinstance(size, int):
        raise LayerError(
            f"The output of {layer!r} ({type(module).__name__}) may have any width; pass width=."
        )
    with_identity = WithIdentity(module, size)
    like = next(module.parameters(), next(changed.parameters(), torch.zeros(())))
    with_identity.identity.to(device=like.device, dtype=like.dtype)
    with_identity.train(module.training)
    parent, _, leaf = layer.rpartition(".")
    setattr(changed.get_submodule(parent), leaf, with_identity)
    return changed
