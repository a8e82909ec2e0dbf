"""The layers of a target: which matrices it has, under which names, and how they are chosen.

Most layers are submodules with a name. A module that holds several matrices (composites.py) gives
each a name below its own; a plain parameter and the parts of a fused layer get theirs by a
declaration (`Matrices`), and so does a bias that is to be decomposed with its matrix. docs/layers.md
has the table of all kinds.
"""

import fnmatch
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from rankone import convolution, joint_inputs, recurrent  # noqa: F401 (what they know, adapters.py knows)
from rankone.adapters import Activation, Adapter, BiasedAdapter, adapter_for, is_known
from rankone.composites import Composite, Fused, composite_for
from rankone.errors import LayerError, near_matches
from rankone.parameters import ParameterMatrix, Use
from rankone.settings import Settings


class Matrices(Settings):
    """What rankone cannot see by itself of the matrices in a network."""

    fused: dict[str, list[str]] = {}
    """Linear layers whose outputs are several things side by side, by name pattern, with the names of
    these things: `{"*.c_attn": [q, k, v]}` makes `c_attn.q`, `c_attn.k` and `c_attn.v` layers of their
    own. Without it such a layer is one matrix."""
    parameters: dict[str, Use] = {}
    """Plain parameters that are used as matrices, by name, with the way they are used: `x @ W`, or
    `x @ W.T` (which is `F.linear(x, W)`)."""
    biases: list[str] = []
    """Name patterns of layers whose bias is decomposed together with the matrix, as the column that
    belongs to one more input which is always 1."""


class WithBiasColumn(Adapter):
    """A layer whose bias is the last column of its matrix, for an input that is always 1."""

    def __init__(self, plain: BiasedAdapter) -> None:
        super().__init__(plain.module)
        self.plain = plain
        self.input = plain.input

    def matrix(self) -> Tensor:
        bias = self.plain.bias()
        assert bias is not None
        return torch.cat([self.plain.matrix(), bias.unsqueeze(1)], 1)

    def read(self, x: Activation, V: Tensor) -> Tensor:
        return self.plain.read(x, V[:, :-1]) + V[:, -1]

    def write(self, z: Tensor, U: Tensor) -> Tensor:
        return self.plain.combine(z, U)

    def vectors(self, x: Activation) -> Tensor:
        a = self.plain.vectors(x)
        return torch.cat([a, a.new_ones(*a.shape[:-1], 1)], -1)


@dataclass
class Candidates:
    """Everything in a target that has a name, as rankone sees it."""

    modules: dict[str, nn.Module] = field(default_factory=dict)
    """All submodules, and the parts of composites, in the target's order."""
    composites: dict[str, Composite] = field(default_factory=dict)
    """The composite that a part belongs to, by the part's name."""
    split: dict[str, list[str]] = field(default_factory=dict)
    """A module that is seen as parts under other names -> these names."""
    declared: frozenset[str] = frozenset()
    """Parameters that are layers of their own."""

    def matrices(self) -> list[str]:
        """The names under which there is a matrix."""
        return [n for n, m in self.modules.items() if n not in self.split and self._holds_matrix(n, m)]

    def _holds_matrix(self, name: str, module: nn.Module) -> bool:
        own = [f"{name}.{n}" for n, p in module.named_parameters(recurse=False) if p.dim() >= 2]
        return _owns_matrix(module) and not (own and all(n in self.declared for n in own))


def candidates(target: nn.Module, matrices: Matrices | None = None) -> Candidates:
    """What a target's layers could be."""
    declared = matrices or Matrices()
    found = Candidates(declared=frozenset(declared.parameters))
    hidden: tuple[str, ...] = ()
    parameters = _by_owner(target, declared)
    fused: set[str] = set()
    for name, module in target.named_modules():
        prefix = f"{name}." if name else ""
        for attribute in parameters.get(name, ()):
            full = f"{prefix}{attribute}"
            composite = ParameterMatrix(module, attribute, full, declared.parameters[full])
            found.modules[full], found.composites[full] = composite.parts[""], composite
        if not name or name.startswith(hidden or "\n"):
            continue
        found.modules[name] = module
        if nn.utils.parametrize.is_parametrized(module):
            hidden = (*hidden, f"{prefix}parametrizations")
        patterns = [p for p in declared.fused if name == p or fnmatch.fnmatchcase(name, p)]
        if patterns and _owns_matrix(module):
            composite = Fused(module, adapter_for(module, name), declared.fused[patterns[0]])
            fused.add(patterns[0])
        else:
            composite = composite_for(module)
        if composite is not None:
            hidden = (*hidden, *(f"{prefix}{below}" for below in composite.hidden()))
            parts = {f"{prefix}{below}" if below else name: part for below, part in composite.parts.items()}
            for full, part in parts.items():
                found.modules[full], found.composites[full] = part, composite
            if name not in parts:
                found.split[name] = list(parts)
    for pattern in declared.fused:
        if pattern not in fused:
            raise LayerError(
                f"matrices.fused names {pattern!r}, which matches no layer with a matrix. "
                f"{near_matches(pattern, found.matrices())}"
            )
    return found


def choose_layers(
    target: nn.Module, patterns: Mapping[str, Any], matrices: Matrices | None = None
) -> dict[str, int]:
    """The layers that the patterns name, in the target's order, each with its C.

    Modules that own no matrix (containers, activations, norms) are passed over when a pattern with
    a wildcard happens to match them. A module that does own one but has no adapter is an error,
    never skipped.
    """
    return chosen_among(candidates(target, matrices), target, patterns)


def chosen_among(known: Candidates, target: nn.Module, patterns: Mapping[str, Any]) -> dict[str, int]:
    """`choose_layers`, where the candidates are known already."""
    if not patterns:
        raise LayerError(
            "No layers were chosen: give at least one name pattern with its number of subcomponents."
        )
    modules, able = known.modules, known.matrices()
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
        below = any(n.startswith(f"{pattern}.") for n in able)
        chosen = [n for n in hits if n in able or (n == pattern and n not in known.split and not below)]
        if not chosen:
            raise LayerError(_why_nothing(pattern, hits, known, target))
        for name in chosen:
            if name in found:
                raise LayerError(
                    f"Layer {name!r} is matched twice, by the patterns {found[name]!r} and {pattern!r}. "
                    "Each layer must be matched by exactly one pattern."
                )
            found[name] = pattern
    return {name: patterns[found[name]] for name in modules if name in found}


def _why_nothing(pattern: str, hits: list[str], known: Candidates, target: nn.Module) -> str:
    able = known.matrices()
    aliases = {n: m for n, m in target.named_modules(remove_duplicate=False) if n not in known.modules}
    if pattern in aliases and pattern:
        first = next((n for n, m in known.modules.items() if m is aliases[pattern]), None)
        if first is not None:
            return f"Pattern {pattern!r} is a second name of the module {first!r}. Use {first!r}."
    if not known.modules and _owns_matrix(target):
        return (
            f"The target is a bare {type(target).__name__}, so it has no layers to name. "
            "Wrap it: nn.Sequential(model)."
        )
    if pattern in known.split:
        kind = type(known.modules[pattern]).__name__
        return (
            f"{pattern!r} is a {kind}, which is seen as several matrices. Name them: "
            f"{', '.join(known.split[pattern])} (or {pattern + '.*'!r} for all)."
        )
    plain = dict(target.named_parameters())
    owner = pattern.rpartition(".")[0]
    if pattern in plain and owner in known.split:
        return (
            f"{pattern!r} is a parameter of a {type(known.modules[owner]).__name__}, which is seen as "
            f"several matrices. Name them: {', '.join(known.split[owner])}."
        )
    if pattern in plain:
        return (
            f"{pattern!r} is a parameter of shape {tuple(plain[pattern].shape)}, no module. Say how it is "
            f'used, in the config: "matrices": {{"parameters": {{{pattern!r}: "x @ W"}}}} (or "x @ W.T").'
        )
    below = [n for n in able if n.startswith(f"{pattern}.")]
    if hits and below:
        return (
            f"Pattern {pattern!r} matches a {type(known.modules[pattern]).__name__}, which has no weight "
            f"matrix of its own. Its layers are: {', '.join([*below[:12], '...'][: len(below)])}; "
            f"{pattern + '.*'!r} names them all."
        )
    seen = "matches no module" if not hits else f"matches {hits[0]!r}, which has no weight matrix,"
    return f"Pattern {pattern!r} {seen} in {type(target).__name__}. {near_matches(pattern, able)}"


def adapters_of(
    known: Candidates, names: Iterable[str], matrices: Matrices | None = None
) -> dict[str, Adapter]:
    """The adapters of these layers, with their biases where that was declared."""
    declared, used = matrices or Matrices(), set()
    adapters: dict[str, Adapter] = {}
    for name in names:
        module = known.modules[name]
        composite = known.composites.get(name)
        reason = None if composite is None else composite.refusal()
        if composite is not None and reason is not None:
            kind = type(composite.module).__name__
            raise LayerError(f"Layer {name!r} ({kind}) cannot be decomposed: {reason}")
        adapters[name] = adapter_for(module, name)
        patterns = [p for p in declared.biases if name == p or fnmatch.fnmatchcase(name, p)]
        if patterns:
            adapters[name], taken = _with_bias(adapters[name], name, exact=name in patterns)
            used |= set(patterns) if taken else set()
    for pattern in declared.biases:
        if pattern not in used:
            raise LayerError(
                f"matrices.biases names {pattern!r}, but no layer that is decomposed under that name has a "
                f"bias. {near_matches(pattern, adapters)}"
            )
    return adapters


def _with_bias(adapter: Adapter, name: str, *, exact: bool) -> tuple[Adapter, bool]:
    if isinstance(adapter, BiasedAdapter) and adapter.bias() is not None:
        return WithBiasColumn(adapter), True
    if exact:
        raise LayerError(
            f"matrices.biases names {name!r}, a {type(adapter.module).__name__} whose bias "
            f"{'is None' if isinstance(adapter, BiasedAdapter) else 'is not known'}. Leave it out."
        )
    return adapter, False


def undeclared_parameters(target: nn.Module, known: Candidates) -> list[str]:
    """Matrices that no layer holds: plain parameters of modules that rankone does not know."""
    able = [known.modules[n] for n in known.matrices() if is_known(known.modules[n])]
    used = {id(p) for m in able for p in m.parameters(recurse=False)}
    composites = {id(c.module): c.module for c in known.composites.values()}
    used |= {id(p) for m in composites.values() for p in m.parameters()}
    return [
        name
        for name, p in target.named_parameters()
        if p.dim() == 2
        and id(p) not in used
        and name not in known.declared
        and "parametrizations" not in name
    ]


def find_ties(adapters: Mapping[str, Adapter]) -> dict[str, str]:
    """Layers whose matrices are the same numbers in memory, or their transpose: layer -> the first
    such layer."""
    ties: dict[str, str] = {}
    seen: dict[tuple[Any, ...], str] = {}
    for name, adapter in adapters.items():
        W = adapter.matrix()
        if W.numel() < 2 or isinstance(adapter, WithBiasColumn):
            continue

        def key(t: Tensor) -> tuple[Any, ...]:
            return t.device, t.data_ptr(), t.dtype, tuple(t.shape), t.stride()

        first = seen.get(key(W)) or seen.get(key(W.T))
        if first is None:
            # Only weights that are kept somewhere have an address that means anything.
            if W._base is not None or isinstance(W, nn.Parameter):
                seen[key(W)] = name
        else:
            ties[name] = first
    return ties


def _by_owner(target: nn.Module, declared: Matrices) -> dict[str, list[str]]:
    """The declared parameters, by the name of the module that owns them."""
    owners: dict[str, list[str]] = {}
    known = dict(target.named_parameters(remove_duplicate=False))
    for name in declared.parameters:
        if name not in known:
            raise LayerError(f"matrices.parameters names {name!r}. {near_matches(name, known)}")
        owner, _, attribute = name.rpartition(".")
        owners.setdefault(owner, []).append(attribute)
    return owners


def _owns_matrix(module: nn.Module) -> bool:
    if any(p.dim() >= 2 for p in module.parameters(recurse=False)):
        return True
    weight = getattr(
        module, "weight", None
    )  # a parametrised, tied or frozen weight is no parameter of its own
    return isinstance(weight, Tensor) and weight.dim() >= 2


def check_tied_names(tied: Mapping[str, str], chosen: Mapping[str, int]) -> None:
    """Raise unless every tied layer, and what it is tied to, is decomposed, and ties make no chain."""
    for name, source in tied.items():
        for given in (name, source):
            if given not in chosen:
                raise LayerError(
                    f"tied names the layer {given!r}, which is not decomposed. {near_matches(given, chosen)}"
                )
        if source in tied or source == name:
            raise LayerError(
                f"Layer {name!r} is tied to {source!r}, which is itself tied. Tie both to the same "
                "untied layer."
            )
