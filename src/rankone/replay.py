"""What of a clean pass need not be computed again: everything before the first masked layer.

A `Recording` of the clean pass knows what every module returned, in the order of the calls. In a
masked pass each call that was over before the first masked layer began is answered from it, without
computing; the largest such calls answer for all that is inside them. What stands between modules in
a `forward` runs as it always does, and so does everything from the first masked layer on.

Only what may be left out is left out. A module runs itself if it changes its input in place, keeps
something of its own from call to call, takes or returns something that is no plain value, or has
somebody's hook inside. A result that the target goes on to change in place is kept, and handed out,
as a copy. A recorded tensor that has changed all the same is not used: the module is run.

While the target is frozen (`Recorder.keeping`), what comes before every decomposed layer is also kept
for batches that come again as the same tensors, as they do from a list.
"""

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.weak import WeakTensorKeyDictionary

from rankone.adapters import Structured

Forward = Callable[..., Any]
MOST_KEPT = 2**28
"""How many bytes are kept for batches that come again."""
_PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, range)


@dataclass(eq=False)
class Call:
    """One call of one module in a clean pass."""

    module: nn.Module
    after: int = 0
    """The place in the log of the first call that is not inside this one."""
    value: Any = None
    versions: tuple[int, ...] | None = None
    """The versions of the tensors in `value` when it was returned; None if the call is not kept."""
    copied: bool = False

    def fresh(self) -> bool:
        """Whether the value is there, and is what was returned."""
        return self.versions is not None and _versions(self.value) == self.versions

    def answer(self) -> Any:
        """The value, to be handed out once."""
        if isinstance(self.value, Tensor):
            return self.value.clone() if self.copied else self.value
        return tree_map(lambda t: t.clone() if self.copied and _is_activation(t) else t, self.value)


class Recorder:
    """What is known of a target from one clean pass to the next."""

    def __init__(self, target: nn.Module, layers: Iterable[nn.Module]) -> None:
        self.layers = frozenset(layers)
        """The decomposed ones: a call around one of them keeps what is inside."""
        self.target = target
        self.overwritten: set[nn.Module] = set()
        """Modules whose results the target changes in place."""
        self._inside: set[nn.Module] = set()
        """Modules that need no recording: others answer for them, or they come too late."""
        self._changing: set[nn.Module] = set()
        self._hooked: set[nn.Module] = set()
        self._runs: set[nn.Module] = set()
        """Modules that must run themselves."""
        self._beginnings: _Beginnings | None = None

    @contextmanager
    def learning(self) -> Iterator[None]:
        """Notice which modules keep something of their own in the passes meanwhile."""
        before = {m: _state(m) for m in self.target.modules()}
        yield
        self._changing = {m for m, state in before.items() if not _same_state(_state(m), state)}
        self._inside, self._hooked = set(), {self.target}  # to be looked at again

    @contextmanager
    def keeping(self) -> Iterator[None]:
        """While this lasts, which must be while the target does not change, the beginnings of passes
        are kept for batches that come again."""
        before, self._beginnings = self._beginnings, _Beginnings()
        try:
            yield
        finally:
            self._beginnings = before

    def recording(self, tensors: list[Tensor]) -> "Recording":
        """An empty recording, for a clean pass on a batch of these tensors that begins now."""
        hooked = {m for m in self.target.modules() if m._forward_hooks or m._forward_pre_hooks}
        if hooked != self._hooked:
            self._hooked, self._inside = hooked, set()
            self._runs = {
                m
                for m in self.target.modules()
                if any(x in self._changing or (x in hooked and x is not m) for x in m.modules())
            }
        kept = self._beginnings
        return Recording(self, tensors, [] if kept is None else kept.of(tensors))

    def modules(self) -> list[nn.Module]:
        """The modules whose calls are to be recorded."""
        everywhere = nn.modules.module._global_forward_hooks or nn.modules.module._global_forward_pre_hooks
        if everywhere or any(
            isinstance(m, torch.jit.ScriptModule) or type(m).__name__ == "OptimizedModule"
            for m in self.target.modules()
        ):
            return list(self.layers)
        own = {m: None for m in self.target.modules() if m is not self.target and m not in self._inside}
        return list(own | dict.fromkeys(self.layers))

    def must_run(self, module: nn.Module) -> bool:
        return module in self._runs


class Recording:
    """The calls of one clean pass, in order."""

    def __init__(self, recorder: Recorder, tensors: list[Tensor], beginning: list[Call]) -> None:
        self.recorder = recorder
        self._tensors: list[Tensor] | None = tensors
        self._beginning = beginning
        """The first calls of an earlier pass on the same batch."""
        self.log: list[Call] = []
        self._first: dict[nn.Module, int] = {}

    def recorded(self, module: nn.Module, forward: Forward) -> Forward:
        """A module's forward that also writes down what it returns."""
        recorder, is_layer = self.recorder, module in self.recorder.layers

        def call(*args: Any, **kwargs: Any) -> Any:
            if len(self._first) == len(recorder.layers):  # no pass begins later than here
                return forward(*args, **kwargs)
            place = len(self.log)
            if place < len(self._beginning):
                entry = self._beginning[place]
                if entry.module is not module:
                    self._beginning = []
                elif entry.after == place + 1 and entry.fresh() and not recorder.must_run(module):
                    self.log.append(entry)
                    return entry.answer()
            entry = Call(module)
            self.log.append(entry)
            if is_layer:
                self._first.setdefault(module, place)
            given = None if recorder.must_run(module) else _given(args, kwargs)
            before = _versions(given)
            value = forward(*args, **kwargs)
            entry.after = len(self.log)
            if given is not None and _versions(given) == before and _is_plain(value):
                entry.copied = module in recorder.overwritten
                entry.value = value
                if entry.copied:
                    entry.value = entry.answer()
                entry.versions = _versions(entry.value)
                if not any(c.module in recorder.layers for c in self.log[place:]):
                    del self.log[place + 1 :]  # this call answers for what is inside it
                    entry.after = place + 1
            return value

        return call

    def finish(self) -> None:
        """To be called when the pass is over: what the target has changed since is not kept."""
        recorder = self.recorder
        for entry in self.log:
            if entry.versions is not None and not entry.fresh():
                recorder.overwritten.add(entry.module)
                entry.value = entry.versions = None
        if recorder._beginnings is not None and self._tensors and not self._beginning:
            recorder._beginnings.keep(self._tensors, self.log[: min(self._first.values(), default=0)])
        self._tensors = None
        seen = {entry.module for entry in self.log}
        recorder._inside |= {m for m in recorder.modules() if m not in seen and m not in recorder.layers}

    def replayed(
        self, masked: Iterable[nn.Module], forward: Callable[[nn.Module], Forward]
    ) -> dict[nn.Module, Forward]:
        """Forwards for a pass in which `masked` are the first modules that do something else.

        `forward` gives what a module does when it is run.
        """
        first = min((self._first[m] for m in masked), default=len(self.log))
        place: int | None = 0  # in the log; None once the first masked layer is reached

        def replaying(module: nn.Module) -> Forward:
            run = forward(module)

            def call(*args: Any, **kwargs: Any) -> Any:
                nonlocal place
                if place is not None:
                    entry = self.log[place] if place < first else None
                    if entry is None or entry.module is not module:
                        place = None
                    elif entry.after <= first and entry.fresh():
                        place = entry.after
                        return entry.answer()
                    else:
                        place += 1
                return run(*args, **kwargs)

            return call

        return {m: replaying(m) for m in {entry.module: None for entry in self.log[: first + 1]}}


class _Beginnings:
    """The first calls of clean passes, by batch; a batch that is gone takes them along."""

    def __init__(self) -> None:
        self._kept = WeakTensorKeyDictionary()

    def of(self, tensors: list[Tensor]) -> list[Call]:
        known = self._kept.get(tensors[0]) if tensors else None
        if known is None:
            return []
        others, versions, calls = known
        same = len(others) == len(tensors) - 1 and all(
            r() is t for r, t in zip(others, tensors[1:], strict=True)
        )
        return calls if same and [_versions(t) for t in tensors] == versions else []

    def keep(self, tensors: list[Tensor], calls: list[Call]) -> None:
        own = _storages(tensors)
        # What is the batch itself, in another form, would keep it alive, and costs nothing to make.
        kept = [Call(c.module, c.after) if _storages(c.value).keys() & own.keys() else c for c in calls]
        size = sum(sum(_storages(c.value).values()) for c in kept)
        used = sum(sum(_storages(c.value).values()) for _, _, calls in self._kept.values() for c in calls)
        if size and size + used <= MOST_KEPT:
            others = [weakref.ref(t) for t in tensors[1:]]
            self._kept[tensors[0]] = others, [_versions(t) for t in tensors], kept


def _storages(value: Any) -> dict[int, int]:
    """Where the tensors in a value are in memory -> how many bytes they take there."""
    storages = [t.untyped_storage() for t in tree_leaves(value) if isinstance(t, Tensor)]
    return {s.data_ptr(): s.nbytes() for s in storages}


def _is_activation(x: Any) -> bool:
    return isinstance(x, Tensor | Structured)


def _given(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Any] | None:
    """The tensors that a module is called with, or None if it gets something that it could fill."""
    found: list[Any] = []

    def plain(x: Any) -> bool:
        if _is_activation(x):
            found.append(x)
            return True
        return isinstance(x, _PLAIN) or (isinstance(x, tuple) and all(map(plain, x)))

    return found if all(map(plain, args)) and all(map(plain, kwargs.values())) else None


def _is_plain(value: Any) -> bool:
    """Whether a result is made of tensors without a past, and of plain values."""
    if isinstance(value, Tensor):
        return not value.requires_grad and not value.is_inference()
    return all(
        _is_plain(x) if isinstance(x, Tensor) else isinstance(x, (Structured, *_PLAIN))
        for x in tree_leaves(value)
    )


def _versions(value: Any) -> tuple[int, ...]:
    if isinstance(value, Tensor):
        return (0 if value.is_inference() else value._version,)
    return tuple(
        x._version
        for x in (value if isinstance(value, list) else tree_leaves(value))
        if _is_activation(x) and not (isinstance(x, Tensor) and x.is_inference())
    )


def _state(module: nn.Module) -> dict[str, tuple[Any, Any]]:
    """What a module's own attributes are, as far as it can be told cheaply."""

    def size(x: Any) -> Any:
        if isinstance(x, list | dict | set):
            return len(x)
        return x._version if isinstance(x, Tensor) and not x.is_inference() else None

    return {name: (x, size(x)) for name, x in vars(module).items()}


def _same_state(a: dict[str, tuple[Any, Any]], b: dict[str, tuple[Any, Any]]) -> bool:
    return a.keys() == b.keys() and all(a[n][0] is b[n][0] and a[n][1] == b[n][1] for n in a)
