"""DecomposedModel: any nn.Module, seen as rank-one subcomponents of the layers you choose.

The target is never altered. During one pass the chosen layers' `forward` is overridden on the instance and put
back afterwards, whatever happens; no weight is copied into it, no gradient is left in it. Overriding `forward`
rather than hooking it means that a replaced layer costs nothing, and that the user's own hooks go on working.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from rankone.adapters import Adapter, adapter_for
from rankone.components import Subcomponents, TiedSubcomponents, datapoint_start, make_subcomponents
from rankone.data import Batch, call_with, check_batch, generator_for, to_device
from rankone.errors import LayerError, TargetError, near_matches
from rankone.fast.factored import Activation, dense
from rankone.importance import ImportanceFunction, Option, clipped, make_importance
from rankone.masks import Masks
from rankone.patching import (
    OutputGetter,
    choose_layers,
    only_input,
    overridden,
    pick_output,
    refuse_training_mode,
    same,
    unchanged,
)

START_ROWS = 20
"""From how many datapoints per subcomponent the initialisation `datapoints` chooses."""
START_BATCHES = 32
"""How many batches it looks at in search of them."""


@dataclass(frozen=True)
class CleanPass:
    """What the untouched target did on a batch: its output, and what each decomposed layer received and returned.

    Layers stand in the order in which the target calls them.
    """

    output: Tensor
    inputs: dict[str, Activation]
    outputs: dict[str, Activation]
    """Without the layers whose output the target goes on to overwrite."""


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
        self.n_weights = adapter.matrix(module).numel()
        # Not registered: the target's parameters are never ours to train, move or save.
        object.__setattr__(self, "module", module)

    @property
    def C(self) -> int:
        return self.subcomponents.C

    def matrix(self) -> Float[Tensor, "d_out d_in"]:
        """The original weight, as a matrix, in the precision of the factors."""
        return self.adapter.matrix(self.module).detach().to(self.subcomponents.U.dtype)

    # Factors are kept in at least single precision; a half-precision target sees them in its own.

    def read(self, x: Activation) -> Float[Tensor, "*lead C"]:
        V = self.subcomponents.V
        return self.adapter.read(self.module, x, V.to(self.weight_dtype)).to(V.dtype)

    def write(self, z: Float[Tensor, "*lead C"]) -> Activation:
        dtype = self.weight_dtype
        return self.adapter.write(self.module, z.to(dtype), self.subcomponents.U.to(dtype))

    def verify(self, x: Activation, output: Activation) -> None:
        """Raise unless this layer is its matrix and bias and nothing else: its real output must be what the adapter makes."""
        W = self.adapter.matrix(self.module).detach()
        few_outputs = W.shape[0] <= W.shape[1]
        identity = torch.eye(min(W.shape), dtype=W.dtype, device=W.device)
        U, V = (identity, W) if few_outputs else (W, identity)
        made = self.adapter.write(self.module, self.adapter.read(self.module, x, V), U)
        if not same(dense(made), dense(output)):
            raise LayerError(
                f"Layer {self.name!r} ({type(self.module).__name__}) does not just multiply by its matrix and add its bias: "
                "its output is something else. A subclass or a patched forward may do more. Leave it out, or register an "
                "Adapter for its type that says what it does."
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
            W = adapter.matrix(module).to(source.subcomponents.U.dtype)
            transposed = _tie_orientation(name, W, source_name, source.matrix())
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
        self._overwritten_outputs: set[str] = set()

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

    @torch.no_grad()
    def start_from_data(self, stream: Iterator[Batch], seed: int) -> None:
        """Let subcomponents start as what their matrix does to single datapoints: the initialisation `datapoints`."""
        own = {name: layer for name, layer in self.layers.items() if name not in self.tied}
        seen: dict[str, list[Tensor]] = {name: [] for name in own}
        for batch in islice(stream, START_BATCHES):
            clean = self.clean(to_device(batch, self.device))
            for name, layer in own.items():
                a = layer.adapter.vectors(layer.module, clean.inputs[name]).flatten(0, -2)
                seen[name].append(a.to("cpu", layer.subcomponents.U.dtype))
            if all(sum(map(len, seen[name])) >= START_ROWS * layer.C for name, layer in own.items()):
                break
        for name, layer in own.items():
            inputs = torch.cat(seen[name])[: START_ROWS * layer.C]
            generator = generator_for(seed, f"init/datapoints/{name}")
            U, V = datapoint_start(layer.matrix().cpu(), inputs, layer.C, generator)
            layer.subcomponents.U.copy_(U)
            layer.subcomponents.V.copy_(V)

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
        return self._observe(batch)

    def _observe(self, batch: Batch, *, copy_outputs: bool = False) -> CleanPass:
        inputs: dict[str, Activation] = {}
        outputs: dict[str, Activation] = {}
        versions: dict[str, tuple[int, int]] = {}

        def recorder(layer: DecomposedLayer) -> Callable[..., Any]:
            original = layer.module.forward

            def forward(*args: Any, **kwargs: Any) -> Any:
                x = only_input(layer.name, args, kwargs)
                inputs[layer.name] = x.clone() if layer.name in self._overwritten_inputs else x
                before = inputs[layer.name]._version
                output = original(*args, **kwargs)
                outputs[layer.name] = output.clone() if copy_outputs else output
                versions[layer.name] = before, outputs[layer.name]._version
                return output

            return forward

        recorders = {name: recorder(layer) for name, layer in self.layers.items()}
        result = self._run(lambda: call_with(self.target, batch), recorders)
        # An activation that works in place, or `x += ...`, changes what a layer returned: such an output is not kept.
        self._overwritten_outputs |= {name for name, y in outputs.items() if y._version != versions[name][1]}
        overwritten = {name for name, x in inputs.items() if x._version != versions[name][0]}
        if overwritten:
            # The target changed a layer's input in place after the layer had used it: keep copies from now on.
            self._overwritten_inputs |= overwritten
            return self._observe(batch, copy_outputs=copy_outputs)
        kept = {name: y for name, y in outputs.items() if copy_outputs or name not in self._overwritten_outputs}
        return CleanPass(pick_output(result, self.output).detach(), inputs, kept)

    def _verify(self, batch: Batch) -> None:
        """What must hold for a decomposition to mean anything: passes repeat, and layers are what their adapters say."""
        refuse_training_mode(self.target)
        with unchanged(self.target):
            seen = self._observe(batch, copy_outputs=True)
            again = self._observe(batch)
        if not same(seen.output, again.output):
            raise TargetError(
                "The target gives different outputs for the same batch, so its output cannot be compared with. "
                "Call model.eval() before decomposing, and switch off whatever else is random in it."
            )
        for name, layer in self.layers.items():
            layer.verify(seen.inputs[name], seen.outputs[name])

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

    def masked(self, batch: Batch, masks: Masks, known: Mapping[str, Activation] | None = None) -> Tensor:
        """The target's output when the layers in `masks` are their masked subcomponents, the others original.

        `known` gives outputs of layers that need not be computed again, as `StepContext` knows them.
        """
        return pick_output(self.under(masks, lambda: call_with(self.target, batch), known), self.output)

    def under(self, masks: Masks, run: Callable[[], Any], known: Mapping[str, Activation] | None = None) -> Any:
        """Whatever `run()` returns while the target's layers in `masks` are their masked subcomponents."""

        def replacement(layer: DecomposedLayer, mask: Tensor) -> Callable[..., Activation]:
            def forward(*args: Any, **kwargs: Any) -> Activation:
                return layer.write(layer.read(only_input(layer.name, args, kwargs)) * mask)

            return forward

        for name, mask in masks.items():
            self.check_mask(name, mask)
        forwards: dict[str, Callable[..., Any]] = {n: replacement(self.layer(n), mask) for n, mask in masks.items()}
        forwards |= {name: (lambda *args, output=output, **kwargs: output) for name, output in (known or {}).items()}
        return self._run(run, forwards)

    def check_mask(self, name: str, mask: Tensor) -> None:
        if mask.shape[-1] != self.layer(name).C:
            raise LayerError(
                f"The mask for layer {name!r} has {mask.shape[-1]} entries in its last dimension, but the layer "
                f"has C = {self.layer(name).C} subcomponents."
            )

    def forward(self, batch: Batch) -> Tensor:
        """The target with every decomposed matrix replaced by the sum of its subcomponents."""
        ones = {name: layer.subcomponents.U.new_ones(layer.C) for name, layer in self.layers.items()}
        return self.masked(batch, ones)

    def _run(self, run: Callable[[], Any], forwards: Mapping[str, Callable[..., Any]]) -> Any:
        """`run()` with these forwards in place; each must be called exactly once."""
        calls: list[str] = []

        def counted(name: str, forward: Callable[..., Any]) -> Callable[..., Any]:
            def call(*args: Any, **kwargs: Any) -> Any:
                calls.append(name)
                return forward(*args, **kwargs)

            return call

        with overridden({self.layers[name].module: counted(name, f) for name, f in forwards.items()}):
            result = run()
        if len(calls) != len(forwards) or set(calls) != set(forwards):
            self._explain_calls(Counter(calls), forwards)
        return result

    @staticmethod
    def _explain_calls(calls: Counter[str], expected: Iterable[str]) -> None:
        for name in expected:
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
