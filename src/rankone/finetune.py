"""What did a fine-tune change? The difference of two checkpoints as something to decompose.

`difference(base, tuned)` is the tuned network, written so that every layer that was changed is its
base layer plus a layer with the difference of the weights, called `change`. All that is decomposed
are the changes; the base runs untouched below them. A part of a decomposed change is something that
the fine-tune taught the network, and importances say on which inputs it matters.
"""

import copy
import fnmatch
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from rankone.adapters import adapter_for
from rankone.config import DecompositionConfig
from rankone.data import Data
from rankone.decomposition import Decomposition, decompose
from rankone.errors import LayerError, TargetError, near_matches
from rankone.naming import candidates
from rankone.patching import refuse_unusable


class Changed(nn.Module):
    """A layer as its base and its change: the sum of what both make of the same input."""

    def __init__(self, base: nn.Module, change: nn.Module) -> None:
        super().__init__()
        self.base, self.change = base, change

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        return self.base(*args, **kwargs) + self.change(*args, **kwargs)


def difference(base: nn.Module, tuned: nn.Module) -> nn.Module:
    """The tuned network with every changed layer split into `LAYER.base` and `LAYER.change`.

    Both are copied, neither is altered. A peft model is merged first. What was changed elsewhere, in
    norms and other small things, belongs to the tuned network and is not decomposed.
    """
    base, tuned = (_merged(model, role) for model, role in ((base, "base"), (tuned, "tuned")))
    _refuse_other_architecture(base, tuned)
    changed = copy.deepcopy(tuned)
    originals, known = dict(base.named_modules()), candidates(tuned)
    bases: dict[int, Any] = {}  # what was shared in the network is shared in its base and in its change
    changes: dict[int, Any] = {}
    subtracted: set[nn.Parameter] = set()
    found = 0
    for name in known.matrices():
        if name in known.composites:
            _refuse_changed_composite(name, known.composites[name].module, originals, tuned)
            continue
        before, after = originals[name], tuned.get_submodule(name)
        if _equal(before, after):
            continue
        adapter_for(after, name)  # says what is wrong with a layer that cannot be decomposed
        parent, _, leaf = name.rpartition(".")
        change = _subtracted(copy.deepcopy(after, changes), before, subtracted)
        setattr(changed.get_submodule(parent), leaf, Changed(copy.deepcopy(before, bases), change))
        found += 1
    if not found:
        raise TargetError(
            "The tuned network has the same matrices as its base: there is no difference to decompose."
        )
    return changed.train(tuned.training)


def _merged(model: Any, role: str) -> nn.Module:
    """A copy of a network without peft's low-rank matrices: added to the weights, or, for the base,
    left out. Anything else as it is.

    `get_peft_model(base, ...)` puts them into `base` itself, so that a base may hold them, too.
    """
    refuse_unusable(model)
    if hasattr(model, "merge_and_unload") and hasattr(model, "unload"):
        copied = copy.deepcopy(model)
        return copied.merge_and_unload() if role == "tuned" else copied.unload()
    if not any(_adapted(module) for module in model.modules()):
        return model
    copied = copy.deepcopy(model)
    for name, module in list(copied.named_modules()):
        if _adapted(module):
            if module.merged != (role == "tuned"):
                module.merge() if role == "tuned" else module.unmerge()
            parent, _, leaf = name.rpartition(".")
            setattr(copied.get_submodule(parent), leaf, module.get_base_layer())
    return copied


def _adapted(module: Any) -> bool:
    """Whether a module is a layer of peft's, with low-rank matrices beside a base layer."""
    return all(hasattr(module, name) for name in ("get_base_layer", "merge", "unmerge", "merged"))


def _refuse_other_architecture(base: nn.Module, tuned: nn.Module) -> None:
    before, after = (
        {name: tuple(t.shape) for name, t in model.state_dict().items()} for model in (base, tuned)
    )
    if before == after:
        return
    missing = sorted(set(before) ^ set(after))
    if missing:
        where = "base" if missing[0] in before else "tuned network"
        seen = f"only the {where} has {missing[0]!r}"
    else:
        name = next(n for n in before if before[n] != after[n])
        seen = f"{name!r} has shape {before[name]} in the base and {after[name]} in the tuned network"
    raise TargetError(
        f"The base and the tuned network have different architectures: {seen}. A difference needs two "
        "checkpoints of one network; low-rank adapters of peft may stay as they are."
    )


def _refuse_changed_composite(
    name: str, module: nn.Module, originals: Mapping[str, nn.Module], tuned: nn.Module
) -> None:
    """Attention and recurrent layers are not split: an unchanged one is no hindrance."""
    place = next(n for n, m in tuned.named_modules() if m is module)
    if not _equal(originals[place], module):
        raise LayerError(
            f"{name!r} is a matrix of a {type(module).__name__} that was changed. rankone takes differences "
            "of layers that are modules of their own (nn.Linear, convolutions, embeddings). Use separate "
            "projections, or keep this layer fixed."
        )


def _equal(a: nn.Module, b: nn.Module) -> bool:
    first, second = a.state_dict(), b.state_dict()
    return all(torch.equal(first[name], second[name]) for name in first)


def _subtracted(change: nn.Module, before: nn.Module, done: set[nn.Parameter]) -> nn.Module:
    """A layer with the differences of weight and bias; parameters in `done` are differences already."""
    if nn.utils.parametrize.is_parametrized(change):
        raise LayerError(
            f"A {type(change).__name__} with parametrised weights was changed; make its weights plain first "
            "(torch.nn.utils.parametrize.remove_parametrizations)."
        )
    other = dict(before.named_parameters())
    with torch.no_grad():
        for name, p in change.named_parameters():
            if p not in done:
                p.sub_(other[name])
                done.add(p)
    return change


def decompose_difference(
    base: nn.Module,
    tuned: nn.Module,
    data: Data,
    layers: Mapping[str, int] | None = None,
    config: DecompositionConfig | Mapping[str, Any] | None = None,
    **how: Any,
) -> Decomposition:
    """Decompose what a fine-tune changed: the difference of the matrices of two checkpoints.

    `layers` names layers of the tuned network, with their C; without it, all that were changed, each
    with twice as many subcomponents as its change has rank. Everything else is as for `decompose`. The
    result's layers are called `LAYER.change`; to load it again, pass `finetune.difference(base, tuned)`
    to `load`.
    """
    target = difference(base, tuned)
    names = [name for name, module in target.named_modules() if isinstance(module, Changed)]
    if layers is None:
        chosen = {f"{n}.change": 2 * _rank(target.get_submodule(f"{n}.change"), n) for n in names}
    else:
        for pattern in layers:
            if not any(fnmatch.fnmatchcase(n, pattern.removesuffix(".change")) for n in names):
                raise LayerError(
                    f"Pattern {pattern!r} matches no layer that was changed. {near_matches(pattern, names)}"
                )
        chosen = {f"{pattern.removesuffix('.change')}.change": C for pattern, C in layers.items()}
    return decompose(target, data, chosen, config, **how)


def _rank(change: nn.Module, name: str) -> int:
    """The number of directions that a change has, leaving out what is a thousand times smaller than
    the largest."""
    size = torch.linalg.svdvals(adapter_for(change, name).matrix().detach().float())
    return max(1, int((size > 1e-3 * size.max()).sum()))
