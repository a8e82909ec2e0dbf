"""What rankone does to a target network, and how it leaves it as it was.

Layers are chosen by name, their `forward` is overridden for the length of one pass and put back
whatever happens, and a target whose passes would not repeat is refused. Nothing here knows about
subcomponents.
"""

import copy
import fnmatch
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from rankone.adapters import Activation, Structured, dense
from rankone.errors import LayerError, TargetError, near_matches
from rankone.files import digest_of

OutputGetter = Callable[[Any], Tensor] | str | int | None
"""How to get the tensor to compare: a function, an attribute or key, an index, or None for the
result itself."""


def choose_layers(target: nn.Module, patterns: Mapping[str, Any]) -> dict[str, int]:
    """The layers that the patterns name, in the target's order, each with its C.

    Modules that own no matrix (containers, activations, norms) are passed over when a pattern with
    a wildcard happens to match them. A module that does own one but has no adapter is an error,
    never skipped.
    """
    if not patterns:
        raise LayerError(
            "No layers were chosen: give at least one name pattern with its number of subcomponents."
        )
    modules = {name: module for name, module in target.named_modules() if name}
    aliases = {
        name: module for name, module in target.named_modules(remove_duplicate=False) if name not in modules
    }
    found: dict[str, str] = {}
    for pattern, C in patterns.items():
        if not isinstance(pattern, str) or not pattern:
            raise LayerError(f"{pattern!r} is no name pattern; write the name of a layer, or '*' for all.")
        if isinstance(C, bool) or not isinstance(C, int) or not 1 <= C <= 10**6:
            raise LayerError(
                f"Pattern {pattern!r} asks for C = {C!r} subcomponents; C must be a whole number "
                "of at least 1 (and at most a million)."
            )
        hits = [n for n in modules if n == pattern or fnmatch.fnmatchcase(n, pattern)]
        matrices = [n for n in hits if n == pattern or _owns_matrix(modules[n])]
        if not matrices:
            able = [n for n in modules if _owns_matrix(modules[n])]
            if pattern in aliases:
                first = next(n for n, m in modules.items() if m is aliases[pattern])
                raise LayerError(
                    f"Pattern {pattern!r} is a second name of the module {first!r}. Use {first!r}."
                )
            if not modules and _owns_matrix(target):
                raise LayerError(
                    f"The target is a bare {type(target).__name__}, so it has no layers to name. "
                    "Wrap it: nn.Sequential(model)."
                )
            seen = "matches no module" if not hits else f"matches {hits[0]!r}, which has no weight matrix,"
            raise LayerError(
                f"Pattern {pattern!r} {seen} in {type(target).__name__}. {near_matches(pattern, able)}"
            )
        for name in matrices:
            if name in found:
                raise LayerError(
                    f"Layer {name!r} is matched twice, by the patterns {found[name]!r} and {pattern!r}. "
                    "Each layer must be matched by exactly one pattern."
                )
            found[name] = pattern
    return {name: patterns[found[name]] for name in modules if name in found}


one_pass_at_a_time = threading.RLock()
"""A pass changes `forward` of modules that threads may share: passes take turns."""


class overridden:  # noqa: N801 (a context manager)
    """Override `forward` on these module instances, and put everything back on the way out.

    A class, because that costs half as much as a generator, and a step enters several.

    torch's fused attention path reads weights without calling the layers that own them; it is off
    meanwhile.
    """

    def __init__(self, forwards: Mapping[nn.Module, Callable[..., Any]]) -> None:
        self.forwards = forwards

    def __enter__(self) -> None:
        self.before = [(module, module.__dict__.get("forward")) for module in self.forwards]
        self.fused = torch.backends.mha.get_fastpath_enabled()
        torch.backends.mha.set_fastpath_enabled(False)
        for module, forward in self.forwards.items():
            module.__dict__["forward"] = forward

    def __exit__(self, *_: object) -> None:
        torch.backends.mha.set_fastpath_enabled(self.fused)
        for module, original in self.before:
            if original is None:
                module.__dict__.pop("forward", None)
            else:
                module.__dict__["forward"] = original


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
        if not isinstance(result, tuple | list) or not -len(result) <= getter < len(result):
            size = f" of {len(result)}" if isinstance(result, tuple | list) else ""
            raise TargetError(
                f"output={getter}: the target returns a {type(result).__name__}{size}, which has "
                f"no element {getter}."
            )
        picked = result[getter]
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
            "outputs. Pass output= "
            "a name (output='logits'), an index (output=0) or a function that gets the tensor."
        )
    return picked


def same(a: Tensor, b: Tensor) -> bool:
    """Equal up to rounding. (Integers, as some getters give them, must be equal.)"""
    if a.shape != b.shape or a.dtype != b.dtype or not a.is_floating_point():
        return torch.equal(a, b)
    tolerance = torch.finfo(a.dtype).eps ** 0.5 * max(1.0, float(b.abs().max()))
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


def only_input(name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Activation:
    given = [*args, *kwargs.values()]
    if len(given) != 1 or not isinstance(given[0], Tensor | Structured):
        kinds = ", ".join(type(g).__name__ for g in given) or "nothing"
        raise LayerError(
            f"Layer {name!r} is called with ({kinds}); rankone decomposes layers that take one tensor."
        )
    return given[0]


def refuse_unusable(target: Any) -> None:
    """A pass must be possible and repeatable: no layer may draw random numbers or change when it is
    called."""
    if not isinstance(target, nn.Module):
        raise TargetError(f"The target is a {type(target).__name__}; expected a trained torch.nn.Module.")
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


def _owns_matrix(module: nn.Module) -> bool:
    if any(p.dim() >= 2 for p in module.parameters(recurse=False)):
        return True
    weight = getattr(
        module, "weight", None
    )  # a parametrised, tied or frozen weight is no parameter of its own
    return isinstance(weight, Tensor) and weight.dim() >= 2
