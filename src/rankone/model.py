"""DecomposedModel: any nn.Module, seen as rank-one subcomponents of the layers you choose.

The target is never altered. During one pass the chosen layers' `forward` is overridden on the instance and put
back afterwards, whatever happens; no weight is copied into it, no gradient is left in it. Overriding `forward`
rather than hooking it means that a replaced layer costs nothing, and that the user's own hooks go on working.
"""

import fnmatch
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from rankone.adapters import Adapter, adapter_for
from rankone.checkpoint import fingerprint
from rankone.components import Subcomponents, TiedSubcomponents, make_subcomponents
from rankone.data import Batch, call_with, check_batch, generator_for
from rankone.errors import LayerError, TargetError, near_matches
from rankone.importance import ImportanceFunction, Option, clipped, make_importance
from rankone.masks import Masks

OutputGetter = Callable[[Any], Tensor] | str | int | None


@dataclass(frozen=True)
class CleanPass:
    """What the untouched target did on a batch: its output, and the input that each decomposed layer received."""

    output: Tensor
    inputs: dict[str, Tensor]


class DecomposedLayer(nn.Module):
    """One decomposed layer: the original module, its matrix view, its subcomponents and their importance function."""

    module: nn.Module

    def __init__(
        self,
        name: str,
        module: nn.Module,
        adapter: Adapter,
        subcomponents: Subcomponents,
        importance: ImportanceFunction,
    ) -> None:
        super().__init__()
        self.name = name
        self.adapter = adapter
        self.subcomponents = subcomponents
        self.importance = importance
        self.weight_dtype = adapter.matrix(module).dtype
        # Not registered: the target's parameters are never ours to train, move or save.
        object.__setattr__(self, "module", module)

    @property
    def C(self) -> int:
        return self.subcomponents.C

    def matrix(self) -> Float[Tensor, "d_out d_in"]:
        """The original weight, as a matrix, in the precision of the factors."""
        return self.adapter.matrix(self.module).detach().to(self.subcomponents.U.dtype)

    # Factors are kept in at least single precision; a half-precision target sees them in its own.

    def read(self, x: Tensor) -> Float[Tensor, "*lead C"]:
        V = self.subcomponents.V
        return self.adapter.read(self.module, x, V.to(self.weight_dtype)).to(V.dtype)

    def write(self, z: Float[Tensor, "*lead C"]) -> Tensor:
        dtype = self.weight_dtype
        return self.adapter.write(self.module, z.to(dtype), self.subcomponents.U.to(dtype))

    def verify(self, x: Tensor, output: Tensor) -> None:
        """Raise unless this layer is its matrix and bias and nothing else: its real output must be what the adapter makes."""
        W = self.adapter.matrix(self.module).detach()
        few_outputs = W.shape[0] <= W.shape[1]
        identity = torch.eye(min(W.shape), dtype=W.dtype, device=W.device)
        U, V = (identity, W) if few_outputs else (W, identity)
        made = self.adapter.write(self.module, self.adapter.read(self.module, x, V), U)
        same = made.shape == output.shape
        error = float((made - output).abs().max()) if same else float("inf")
        if not error <= torch.finfo(W.dtype).eps ** 0.5 * max(1.0, float(output.abs().max())):
            raise LayerError(
                f"Layer {self.name!r} ({type(self.module).__name__}) does not just multiply by its matrix and add its bias: its output differs "
                f"from that by up to {error:.3g}. A subclass or a patched forward may do more. Leave it out, or register an Adapter "
                "for its type that says what it does."
            )


class DecomposedModel(nn.Module):
    """A target network and the subcomponents of its chosen layers.

    `layers` maps name patterns (`"mlp.*.fc1"`; `*` also matches dots) to the number of subcomponents C.
    `tied` maps a layer to the layer whose subcomponents it shares, for weights that are equal or each
    other's transpose. `output` says how to get the tensor to compare out of what the target returns: a
    function, an attribute or key, or an index.
    """

    target: nn.Module
    output: OutputGetter

    def __init__(
        self,
        target: nn.Module,
        layers: Mapping[str, int],
        *,
        importance: str = "mlp",
        importance_options: Mapping[str, Option] | None = None,
        init: str = "overlap",
        tied: Mapping[str, str] | None = None,
        output: OutputGetter = None,
        seed: int = 0,
    ) -> None:
        super().__init__()
        refuse_training_mode(target)
        object.__setattr__(self, "target", target)
        object.__setattr__(self, "output", output)  # a getter that is a module must not be trained
        chosen = choose_layers(target, layers)
        tied = dict(tied or {})
        _check_tied_names(tied, chosen)
        self.layers: dict[str, DecomposedLayer] = {}
        for name, C in chosen.items():
            module = target.get_submodule(name)
            adapter = adapter_for(module, name)
            W = adapter.matrix(module).detach()
            if W.is_inference():
                raise LayerError(
                    f"Layer {name!r} was created under torch.inference_mode, so nothing can be trained through it. "
                    "Create or load the model outside of inference mode."
                )
            if W.dtype in (torch.float16, torch.bfloat16):
                W = W.float()
            if not W.is_floating_point():
                raise LayerError(
                    f"Layer {name!r} has a weight of type {W.dtype}; only floating point can be decomposed."
                )
            if name in tied:
                continue
            parts = make_subcomponents(W, C, init, generator_for(seed, f"init/components/{name}"))
            self.layers[name] = self._layer(name, module, adapter, parts, importance, importance_options, seed)
        for name, source_name in tied.items():
            module = target.get_submodule(name)
            adapter = adapter_for(module, name)
            source = self.layers[source_name]
            transposed = _tie_orientation(name, adapter.matrix(module), source_name, source.matrix())
            if chosen[name] != source.C:
                raise LayerError(
                    f"Layer {name!r} has C = {chosen[name]} but is tied to {source_name!r}, which has C = {source.C}. "
                    "Tied layers share their subcomponents, so both need the same C."
                )
            parts = TiedSubcomponents(source.subcomponents, transposed=transposed)
            self.layers[name] = self._layer(name, module, adapter, parts, importance, importance_options, seed)
        # The order in which the target defines its layers, whatever was tied to what.
        self.layers = {name: self.layers[name] for name in chosen}
        self._registered = nn.ModuleList(self.layers.values())
        self.tied = tied
        self._verified_in_mode: bool | None = None
        self._overwritten_inputs: set[str] = set()

    @staticmethod
    def _layer(
        name: str,
        module: nn.Module,
        adapter: Adapter,
        parts: Subcomponents,
        kind: str,
        options: Mapping[str, Option] | None,
        seed: int,
    ) -> DecomposedLayer:
        function = make_importance(kind, options or {}, parts.C, generator_for(seed, f"init/importance/{name}"))
        return DecomposedLayer(name, module, adapter, parts, function.to(device=parts.U.device, dtype=parts.U.dtype))

    @property
    def device(self) -> torch.device:
        return next(self.parameters()).device

    def layer(self, name: str) -> DecomposedLayer:
        if name not in self.layers:
            raise LayerError(f"No decomposed layer is called {name!r}. {near_matches(name, self.layers)}")
        return self.layers[name]

    def factors(self) -> list[nn.Parameter]:
        """All U and V that are trained (tied ones once)."""
        return [p for layer in self.layers.values() for p in layer.subcomponents.parameters()]

    def trained(self) -> dict[str, nn.Parameter]:
        """Every trained parameter under a readable name: `layer.U`, `layer.V`, `layer.importance.*`."""
        named: dict[str, nn.Parameter] = {}
        for name, layer in self.layers.items():
            named |= {f"{name}.{key}": p for key, p in layer.subcomponents.named_parameters()}
            named |= {f"{name}.importance.{key}": p for key, p in layer.importance.named_parameters()}
        return named

    def named_tensors(self) -> dict[str, Tensor]:
        """Everything that makes up the decomposition: what is trained, and the buffers of importance functions."""
        named: dict[str, Tensor] = dict(self.trained())
        for name, layer in self.layers.items():
            named |= {f"{name}.importance.{key}": b for key, b in layer.importance.named_buffers()}
        return named

    @torch.no_grad()
    def clean(self, batch: Batch) -> CleanPass:
        """Run the untouched target; remember its output and the inputs of the decomposed layers."""
        check_batch(batch)
        if self._verified_in_mode != self.target.training:
            self._verify(batch)
            self._verified_in_mode = self.target.training
        return self._observe(batch)[0]

    def _observe(self, batch: Batch) -> tuple[CleanPass, dict[str, Any]]:
        """A clean pass, and the decomposed layers' own outputs."""
        inputs: dict[str, Tensor] = {}
        outputs: dict[str, Any] = {}
        versions: dict[str, int] = {}

        def recorder(layer: DecomposedLayer) -> Callable[..., Any]:
            original = layer.module.forward

            def forward(*args: Any, **kwargs: Any) -> Any:
                x = _only_input(layer.name, args, kwargs)
                inputs[layer.name] = x.clone() if layer.name in self._overwritten_inputs else x
                versions[layer.name] = inputs[layer.name]._version
                outputs[layer.name] = original(*args, **kwargs)
                return outputs[layer.name]

            return forward

        recorders = {name: recorder(layer) for name, layer in self.layers.items()}
        result = self._run(lambda: call_with(self.target, batch), recorders)
        overwritten = {name for name, x in inputs.items() if x._version != versions[name]}
        if (
            overwritten
        ):  # the target changed a layer's input in place after the layer had used it: keep copies from now on
            self._overwritten_inputs |= overwritten
            return self._observe(batch)
        return CleanPass(pick_output(result, self.output).detach(), inputs), outputs

    def _verify(self, batch: Batch) -> None:
        """What must hold for a decomposition to mean anything: passes repeat, and layers are what their adapters say."""
        refuse_training_mode(self.target)
        before = {key: value.clone() for key, value in self.target.state_dict().items() if isinstance(value, Tensor)}
        print_before = fingerprint(self.target)
        seen, outputs = self._observe(batch)
        again, _ = self._observe(batch)
        if fingerprint(self.target) != print_before:
            for key, value in self.target.state_dict().items():
                if key in before:
                    value.copy_(before[key])
            raise TargetError("The target changes its own state when it is run. Call model.eval() before decomposing.")
        if not torch.equal(seen.output, again.output):
            raise TargetError(
                "The target gives different outputs for the same batch, so its output cannot be compared with. "
                "Call model.eval() before decomposing, and switch off whatever else is random in it."
            )
        for name, layer in self.layers.items():
            if isinstance(outputs[name], Tensor):
                layer.verify(seen.inputs[name], outputs[name])

    def inner(self, clean: CleanPass) -> dict[str, Tensor]:
        """Inner activations h = V a of every layer on the clean activations; differentiable in V."""
        return {name: layer.read(clean.inputs[name]) for name, layer in self.layers.items()}

    def raw_importances(self, inner: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Outputs of the importance functions before any squashing."""
        return {name: layer.importance(inner[name]) for name, layer in self.layers.items()}

    @torch.no_grad()
    def importances(self, batch: Batch) -> dict[str, Tensor]:
        """Causal importances in [0, 1] of every subcomponent of every layer, per datapoint."""
        raw = self.raw_importances(self.inner(self.clean(batch)))
        return {name: clipped(r) for name, r in raw.items()}

    def masked(self, batch: Batch, masks: Masks, inner: Mapping[str, Tensor] | None = None) -> Tensor:
        """The target's output when the layers in `masks` are their masked subcomponents, the others original.

        `inner` gives inner activations that are already known, for layers whose input is the clean one.
        """
        return pick_output(self.under(masks, lambda: call_with(self.target, batch), inner), self.output)

    def under(self, masks: Masks, run: Callable[[], Any], inner: Mapping[str, Tensor] | None = None) -> Any:
        """Whatever `run()` returns while the target's layers in `masks` are their masked subcomponents."""
        known = inner or {}

        def replacement(layer: DecomposedLayer, mask: Tensor) -> Callable[..., Tensor]:
            def forward(*args: Any, **kwargs: Any) -> Tensor:
                h = known.get(layer.name)
                if h is None:
                    h = layer.read(_only_input(layer.name, args, kwargs))
                return layer.write(h * mask)

            return forward

        for name, mask in masks.items():
            if mask.shape[-1] != self.layer(name).C:
                raise LayerError(
                    f"The mask for layer {name!r} has {mask.shape[-1]} entries in its last dimension, but the layer "
                    f"has C = {self.layer(name).C} subcomponents."
                )
        return self._run(run, {name: replacement(self.layer(name), mask) for name, mask in masks.items()})

    def forward(self, batch: Batch) -> Tensor:
        """The target with every decomposed matrix replaced by the sum of its subcomponents."""
        ones = {name: layer.subcomponents.U.new_ones(layer.C) for name, layer in self.layers.items()}
        return self.masked(batch, ones)

    def _run(self, run: Callable[[], Any], forwards: Mapping[str, Callable[..., Any]]) -> Any:
        """`run()` with these forwards in place; each must be called exactly once."""
        calls: Counter[str] = Counter()

        def counted(name: str, forward: Callable[..., Any]) -> Callable[..., Any]:
            def call(*args: Any, **kwargs: Any) -> Any:
                calls[name] += 1
                return forward(*args, **kwargs)

            return call

        with overridden({self.layers[name].module: counted(name, f) for name, f in forwards.items()}):
            result = run()
        for name in forwards:
            if calls[name] == 0:
                raise LayerError(
                    f"Layer {name!r} was chosen, but the target's forward pass never calls it on this input (its weight "
                    "may be read directly, as nn.MultiheadAttention does with out_proj). Leave it out of the patterns."
                )
            if calls[name] > 1:
                raise LayerError(
                    f"Layer {name!r} is called {calls[name]} times in one forward pass; rankone decomposes layers that are "
                    "called once. Give each use a module of its own (they may share the weight: see `tied`), or leave it out."
                )
        return result


def choose_layers(target: nn.Module, patterns: Mapping[str, Any]) -> dict[str, int]:
    """The layers that the patterns name, in the target's order, each with its C.

    Modules that own no matrix (containers, activations, norms) are passed over when a pattern with a wildcard
    happens to match them. A module that does own one but has no adapter is an error, never skipped.
    """
    if not patterns:
        raise LayerError("No layers were chosen: give at least one name pattern with its number of subcomponents.")
    modules = {name: module for name, module in target.named_modules() if name}
    aliases = {name: module for name, module in target.named_modules(remove_duplicate=False) if name not in modules}
    found: dict[str, str] = {}
    for pattern, C in patterns.items():
        if isinstance(C, bool) or not isinstance(C, int) or C < 1:
            raise LayerError(
                f"Pattern {pattern!r} asks for C = {C!r} subcomponents; C must be a whole number of at least 1."
            )
        hits = [n for n in modules if n == pattern or fnmatch.fnmatchcase(n, pattern)]
        matrices = [n for n in hits if n == pattern or _owns_matrix(modules[n])]
        if not matrices:
            able = [n for n in modules if _owns_matrix(modules[n])]
            if pattern in aliases:
                first = next(n for n, m in modules.items() if m is aliases[pattern])
                raise LayerError(f"Pattern {pattern!r} is a second name of the module {first!r}. Use {first!r}.")
            if not modules and _owns_matrix(target):
                raise LayerError(
                    f"The target is a bare {type(target).__name__}, so it has no layers to name. Wrap it: nn.Sequential(model)."
                )
            seen = "matches no module" if not hits else f"matches {hits[0]!r}, which has no weight matrix,"
            raise LayerError(f"Pattern {pattern!r} {seen} in {type(target).__name__}. {near_matches(pattern, able)}")
        for name in matrices:
            if name in found:
                raise LayerError(
                    f"Layer {name!r} is matched twice, by the patterns {found[name]!r} and {pattern!r}. "
                    "Each layer must be matched by exactly one pattern."
                )
            found[name] = pattern
    return {name: patterns[found[name]] for name in modules if name in found}


@contextmanager
def overridden(forwards: Mapping[nn.Module, Callable[..., Any]]) -> Iterator[None]:
    """Override `forward` on these module instances, and put everything back on the way out.

    torch's fused attention path reads weights without calling the layers that own them; it is off meanwhile.
    """
    before = {module: module.__dict__.get("forward") for module in forwards}
    fused = torch.backends.mha.get_fastpath_enabled()
    try:
        torch.backends.mha.set_fastpath_enabled(False)
        for module, forward in forwards.items():
            module.__dict__["forward"] = forward
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fused)
        for module, original in before.items():
            if original is None:
                module.__dict__.pop("forward", None)
            else:
                module.__dict__["forward"] = original


def pick_output(result: Any, getter: OutputGetter) -> Tensor:
    """The tensor to compare, out of whatever the target returns."""
    picked = result
    if callable(getter):
        picked = getter(result)
    elif isinstance(getter, int):
        if not isinstance(result, tuple | list) or not -len(result) <= getter < len(result):
            size = f" of {len(result)}" if isinstance(result, tuple | list) else ""
            raise TargetError(
                f"output={getter}: the target returns a {type(result).__name__}{size}, which has no element {getter}."
            )
        picked = result[getter]
    elif isinstance(getter, str):
        in_mapping = isinstance(result, Mapping) and getter in result
        if not in_mapping and not hasattr(result, getter):
            names = list(result) if isinstance(result, Mapping) else [n for n in dir(result) if not n.startswith("_")]
            raise TargetError(
                f"output={getter!r}: the target returns a {type(result).__name__} that has no such attribute or key. "
                f"{near_matches(getter, map(str, names))}"
            )
        picked = result[getter] if in_mapping else getattr(result, getter)
    if not isinstance(picked, Tensor):
        how = "returns" if getter is None else f"with output={getter!r} gives"
        raise TargetError(
            f"The target {how} a {type(picked).__name__}, but a tensor is needed to compare outputs. Pass output= "
            "a name (output='logits'), an index (output=0) or a function that gets the tensor."
        )
    return picked


def _only_input(name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Tensor:
    given = [*args, *kwargs.values()]
    if len(given) != 1 or not isinstance(given[0], Tensor):
        kinds = ", ".join(type(g).__name__ for g in given) or "nothing"
        raise LayerError(f"Layer {name!r} is called with ({kinds}); rankone decomposes layers that take one tensor.")
    return given[0]


def _owns_matrix(module: nn.Module) -> bool:
    if any(p.dim() >= 2 for p in module.parameters(recurse=False)):
        return True
    weight = getattr(module, "weight", None)  # a parametrised, tied or frozen weight is no parameter of its own
    return isinstance(weight, Tensor) and weight.dim() >= 2


def _check_tied_names(tied: Mapping[str, str], chosen: Mapping[str, int]) -> None:
    for name, source in tied.items():
        for given in (name, source):
            if given not in chosen:
                raise LayerError(
                    f"tied names the layer {given!r}, which is not decomposed. {near_matches(given, chosen)}"
                )
        if source in tied or source == name:
            raise LayerError(
                f"Layer {name!r} is tied to {source!r}, which is itself tied. Tie both to the same untied layer."
            )


def _tie_orientation(name: str, W: Tensor, source_name: str, source: Tensor) -> bool:
    """Whether W is the transpose of the source (True) or equal to it (False); anything else is an error."""
    if W.shape == source.T.shape and torch.equal(W, source.T):
        return True
    if W.shape == source.shape and torch.equal(W, source):
        return False
    raise LayerError(
        f"Layers {name!r} {tuple(W.shape)} and {source_name!r} {tuple(source.shape)} are declared as tied, but their matrices "
        "are neither equal nor each other's transpose. Remove the entry from `tied` to decompose them separately."
    )


def refuse_training_mode(target: nn.Module) -> None:
    """A pass must be repeatable: no layer may behave at random or change state when it is called."""
    for name, module in target.named_modules():
        if not module.training:
            continue
        dropout = getattr(module, "dropout", 0.0)
        random = (isinstance(module, nn.modules.dropout._DropoutNd) and module.p > 0) or (
            isinstance(module, nn.MultiheadAttention | nn.RNNBase) and isinstance(dropout, float) and dropout > 0
        )
        stateful = isinstance(module, nn.modules.batchnorm._BatchNorm)
        if random or stateful:
            what = "draws random numbers" if random else "changes its statistics"
            raise TargetError(
                f"The target is in training mode and its layer {name!r} ({type(module).__name__}) {what} in every pass. "
                "Call model.eval() before decomposing."
            )
