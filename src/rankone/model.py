"""DecomposedModel: any nn.Module, seen as rank-one subcomponents of the layers you choose.

The target is never altered. During one pass the chosen layers' `forward` is overridden on the
instance and put back afterwards, whatever happens; no weight is copied into it, no gradient is left
in it. Overriding `forward` rather than hooking it means that a replaced layer costs nothing, and
that the user's own hooks go on working.
"""

import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from rankone.adapters import Activation, Adapter, adapter_for, dense
from rankone.components import DATA_INITS, Subcomponents, TiedSubcomponents, make_subcomponents
from rankone.data import Batch, call_with, check_batch, generator_for, shapes_of, to_device
from rankone.errors import LayerError, TargetError, near_matches
from rankone.importance import LayerActivations, LayerShape, Option, clipped, make_importance
from rankone.masks import Mask, Masks
from rankone.patching import (
    OutputGetter,
    choose_layers,
    frozen,
    one_pass_at_a_time,
    only_input,
    overridden,
    pick_output,
    refuse_unusable,
    same,
    unchanged,
)

START_ROWS = 20
"""From how many datapoints per subcomponent an initialisation from data chooses."""
START_BATCHES = 32
"""How many batches it looks at in search of them."""


@dataclass(frozen=True)
class CleanPass:
    """What the untouched target did on a batch: its output, and what each decomposed layer received
    and returned.

    Layers stand in the order in which the target calls them.
    """

    output: Tensor
    inputs: dict[str, Activation]
    outputs: dict[str, Activation]
    """Without the layers whose output the target goes on to overwrite."""


class DecomposedLayer(nn.Module):
    """One decomposed layer: the original module through its adapter, and its subcomponents."""

    def __init__(self, name: str, adapter: Adapter, subcomponents: Subcomponents) -> None:
        super().__init__()
        self.name = name
        self.adapter = adapter  # no submodule: the target's parameters are never ours to train, move or save
        self.subcomponents = subcomponents
        self.weight_dtype = adapter.matrix().dtype

    @property
    def C(self) -> int:
        return self.subcomponents.C

    def matrix(self) -> Float[Tensor, "d_out d_in"]:
        """The original weight, as a matrix, in the precision of the factors."""
        return self.adapter.matrix().detach().to(self.subcomponents.U.dtype)

    # Factors are kept in at least single precision; a half-precision target sees them in its own.

    def read(self, x: Activation) -> Float[Tensor, "*lead C"]:
        """The inner activations V a of an input."""
        V = self.subcomponents.V
        return self.adapter.read(x, V.to(self.weight_dtype)).to(V.dtype)

    def write(self, z: Float[Tensor, "*lead C"]) -> Activation:
        """The output for masked inner activations z."""
        dtype = self.weight_dtype
        return self.adapter.write(z.to(dtype), self.subcomponents.U.to(dtype))

    def masked(self, x: Activation, mask: Mask) -> Activation:
        """The output for an input under a mask."""
        h = self.read(x)
        if mask.where is None and mask.delta is None:
            return self.write(h * mask.values)
        return self.write_with_rest(h, mask, self.rest(x))

    def rest(self, x: Activation) -> tuple[Float[Tensor, "*lead k"], Float[Tensor, "d_out k"] | None]:
        """What the original matrix makes of an input, as (vectors, directions): (a, W), or (W a, None)
        where that is narrower."""
        W = self.adapter.matrix().detach()
        dtype = self.subcomponents.U.dtype
        if W.shape[0] <= W.shape[1]:
            return self.adapter.read(x, W).to(dtype), None
        return self.adapter.vectors(x).to(dtype), W.to(dtype)

    def write_with_rest(
        self,
        h: Float[Tensor, "*lead C"],
        mask: Mask,
        rest: tuple[Tensor, Tensor | None],
        known: Float[Tensor, "*lead C"] | None = None,
    ) -> Activation:
        """The output for inner activations h under a mask that has a delta or holds somewhere only.

        U (m h) + delta (W - U V) a is U ((m - delta) h) + delta W a, and the original is W a. `known` is
        m h, where it has been made already.
        """
        vectors, W = rest
        share: Tensor | None = None if mask.delta is None else mask.delta.unsqueeze(-1)
        if share is None:
            z = mask.values * h if known is None else known
        elif known is None:
            z = (mask.values - share) * h
        else:
            z = torch.addcmul(known, share, h, value=-1)
        if mask.where is not None:
            where = mask.where.unsqueeze(-1)
            z = z * where
            share = torch.where(where, 0.0 if share is None else share, 1.0)
        assert share is not None
        dtype = self.weight_dtype
        U = self.subcomponents.U.to(dtype)
        return self.adapter.write_sum(
            z.to(dtype), U, (share * vectors).to(dtype), None if W is None else W.to(dtype)
        )

    def verify(self, x: Activation, output: Activation) -> None:
        """Raise unless this layer is its matrix and bias and nothing else."""
        W = self.adapter.matrix().detach()
        identity = torch.eye(min(W.shape), dtype=W.dtype, device=W.device)
        U, V = (identity, W) if W.shape[0] <= W.shape[1] else (W, identity)
        if not same(dense(self.adapter.write(self.adapter.read(x, V), U)), dense(output)):
            raise LayerError(
                f"Layer {self.name!r} ({type(self.adapter.module).__name__}) does not just multiply by "
                f"its matrix and add its bias: {type(self.adapter).__name__}.write(read(x)) is "
                "something else than its output. A subclass or a patched forward may do more, or an "
                "Adapter of your own may forget the bias. Leave the layer out, or register an Adapter "
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
        refuse_unusable(target)
        object.__setattr__(self, "target", target)
        object.__setattr__(self, "output", output)  # a getter that is a module must not be trained
        chosen = choose_layers(target, layers)
        self.tied = dict(tied or {})
        _check_tied_names(self.tied, chosen)
        adapters = {name: adapter_for(target.get_submodule(name), name) for name in chosen}
        own: dict[str, DecomposedLayer] = {}
        for name, adapter in adapters.items():
            W = _decomposable(name, adapter.matrix().detach())
            if name not in self.tied:
                generator = generator_for(seed, f"init/components/{name}")
                own[name] = DecomposedLayer(
                    name, adapter, make_subcomponents(W, chosen[name], init, generator)
                )
        # The order in which the target defines its layers, whatever was tied to what.
        self.layers: dict[str, DecomposedLayer] = {}
        for name, adapter in adapters.items():
            layer = own.get(name) or _tied_layer(name, adapter, chosen[name], own[self.tied[name]])
            self.layers[name] = layer
        self._registered = nn.ModuleList(self.layers.values())
        shapes = {n: LayerShape(layer.C, layer.matrix().shape[1]) for n, layer in self.layers.items()}
        function = make_importance(importance, importance_options or {}, shapes, seed)
        like = next(iter(own.values())).subcomponents.U
        self.importance = function.to(device=like.device, dtype=like.dtype)
        self.init = init
        self._verified_in_mode: bool | None = None
        self._overwritten_inputs: set[str] = set()
        self._overwritten_outputs: set[str] = set()

    @property
    def device(self) -> torch.device:
        return next(self.parameters()).device

    @torch.no_grad()
    def start_from_data(self, stream: Iterator[Batch], seed: int) -> None:
        """Start U and V from the first batches, where the initialisation is one from data."""
        start = DATA_INITS.get(self.init)
        own = {name: layer for name, layer in self.layers.items() if name not in self.tied}
        rows: dict[str, list[Tensor]] = {name: [] for name in own}
        for batch in islice(stream, START_BATCHES):
            clean = self.clean(to_device(batch, self.device))
            for name, layer in own.items():
                a = layer.adapter.vectors(clean.inputs[name]).flatten(0, -2)
                rows[name].append(a.to("cpu", layer.subcomponents.U.dtype))
            if all(sum(map(len, rows[name])) >= START_ROWS * layer.C for name, layer in own.items()):
                break
        for name, layer in own.items():
            inputs = torch.cat(rows[name])[: START_ROWS * layer.C]
            generator = generator_for(seed, f"init/{self.init}/{name}")
            U, V = start(layer.matrix().cpu(), inputs, layer.C, generator)
            layer.subcomponents.U.copy_(U)
            layer.subcomponents.V.copy_(V)

    def layer(self, name: str) -> DecomposedLayer:
        if name not in self.layers:
            raise LayerError(f"No decomposed layer is called {name!r}. {near_matches(name, self.layers)}")
        return self.layers[name]

    def factors(self) -> list[nn.Parameter]:
        """All U and V that are trained (tied ones once)."""
        return [p for layer in self.layers.values() for p in layer.subcomponents.parameters()]

    def named_tensors(self) -> dict[str, Tensor]:
        """Everything that makes up the decomposition, by a readable name: `layer.U`,
        `layer.importance.*`."""
        importance = self.importance.named()
        named: dict[str, Tensor] = {}
        for name, layer in self.layers.items():
            named |= {f"{name}.{key}": p for key, p in layer.subcomponents.named_parameters()}
            named |= {key: t for key, t in importance.items() if key.startswith(f"{name}.importance.")}
        named |= importance
        if len(named) < len(importance) + len(self.factors()):
            raise LayerError(
                "A layer and a parameter of the importance function have the same name. Rename one."
            )
        return named

    def trained(self) -> dict[str, nn.Parameter]:
        """Every trained parameter: `named_tensors` without buffers."""
        return {
            name: t
            for name, t in self.named_tensors().items()
            if isinstance(t, nn.Parameter) and t.requires_grad
        }

    @torch.no_grad()
    def clean(self, batch: Batch) -> CleanPass:
        """Run the untouched target; remember its output and the inputs of the decomposed layers."""
        check_batch(batch)
        try:
            if self._verified_in_mode != self.target.training:
                self._verify(batch)
                self._verified_in_mode = self.target.training
            return self._observe(batch)
        except (RuntimeError, ValueError, IndexError) as error:
            raise TargetError(
                f"The target cannot be run on a batch of {shapes_of(batch)}: {error}. Check that the "
                "data gives what the model takes: shapes, types, device."
            ) from error

    def _observe(self, batch: Batch, *, copy_outputs: bool = False) -> CleanPass:
        inputs: dict[str, Activation] = {}
        outputs: dict[str, Activation] = {}
        versions: dict[str, tuple[int, int]] = {}

        def recorder(layer: DecomposedLayer) -> Callable[..., Any]:
            original = layer.adapter.module.forward

            def forward(*args: Any, **kwargs: Any) -> Any:
                x = only_input(layer.name, args, kwargs)
                inputs[layer.name] = x.clone() if layer.name in self._overwritten_inputs else x
                before = inputs[layer.name]._version
                output = original(*args, **kwargs)
                outputs[layer.name] = output.clone() if copy_outputs else output
                versions[layer.name] = before, outputs[layer.name]._version
                return output

            return forward

        with one_pass_at_a_time:
            recorders = {name: recorder(layer) for name, layer in self.layers.items()}
            result = self._run(lambda: call_with(self.target, batch), recorders)
        # An activation that works in place, or `x += ...`, changes what a layer returned: such an
        # output is not kept.
        self._overwritten_outputs |= {name for name, y in outputs.items() if y._version != versions[name][1]}
        overwritten = {name for name, x in inputs.items() if x._version != versions[name][0]}
        if overwritten:
            # The target changed a layer's input in place after the layer had used it: keep copies
            # from now on.
            self._overwritten_inputs |= overwritten
            return self._observe(batch, copy_outputs=copy_outputs)
        kept = {
            name: y for name, y in outputs.items() if copy_outputs or name not in self._overwritten_outputs
        }
        return CleanPass(pick_output(result, self.output).detach(), inputs, kept)

    def _verify(self, batch: Batch) -> None:
        """What must hold for a decomposition to mean anything: passes repeat, and layers are what
        their adapters say."""
        refuse_unusable(self.target)
        with unchanged(self.target):
            seen = self._observe(batch, copy_outputs=True)
            again = self._observe(batch)
        if not same(seen.output, again.output):
            raise TargetError(
                "The target gives different outputs for the same batch, so its output cannot be "
                "compared with. "
                "Call model.eval() before decomposing, and switch off whatever else is random in it."
            )
        for name, layer in self.layers.items():
            layer.verify(seen.inputs[name], seen.outputs[name])

    def inner(self, clean: CleanPass) -> dict[str, Tensor]:
        """Inner activations h = V a of every layer on the clean activations; differentiable in V."""
        return {name: layer.read(clean.inputs[name]) for name, layer in self.layers.items()}

    def raw_importances(self, clean: CleanPass, inner: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """What the importance function says of every layer, before any squashing."""

        def vectors(layer: DecomposedLayer) -> Callable[[], Tensor]:
            return lambda: layer.adapter.vectors(clean.inputs[layer.name]).to(layer.subcomponents.V.dtype)

        raw = self.importance(
            {n: LayerActivations(inner[n], vectors(layer)) for n, layer in self.layers.items()}
        )
        shapes, expected = ({n: tuple(t.shape) for n, t in of.items()} for of in (raw, inner))
        if shapes != expected:
            raise LayerError(
                f"The importance function {type(self.importance).__name__} returned {shapes}; expected "
                f"one raw importance for each inner activation, {expected}."
            )
        return raw

    @torch.no_grad()
    def importances(self, batch: Batch) -> dict[str, Tensor]:
        """Causal importances in [0, 1] of every subcomponent of every layer, per datapoint."""
        clean = self.clean(batch)
        return {name: clipped(raw) for name, raw in self.raw_importances(clean, self.inner(clean)).items()}

    def masked(self, batch: Batch, masks: Masks, outputs: Mapping[str, Activation] | None = None) -> Tensor:
        """The target's output when the layers in `masks` are their masked subcomponents, the others
        original.

        `outputs` gives outputs of layers that need not be computed again.
        """
        return pick_output(self.under(masks, lambda: call_with(self.target, batch), outputs), self.output)

    def under(
        self, masks: Masks, run: Callable[[], Any], outputs: Mapping[str, Activation] | None = None
    ) -> Any:
        """Whatever `run()` returns while the target's layers in `masks` are their masked subcomponents."""

        def replacement(layer: DecomposedLayer, mask: Mask) -> Callable[..., Activation]:
            def forward(*args: Any, **kwargs: Any) -> Activation:
                return layer.masked(only_input(layer.name, args, kwargs), mask)

            return forward

        for name, mask in masks.items():
            self.check_mask(name, mask)
        forwards: dict[str, Callable[..., Any]]
        with one_pass_at_a_time:
            forwards = {name: replacement(self.layer(name), mask) for name, mask in masks.items()}
            forwards |= {name: (lambda *args, y=y, **kwargs: y) for name, y in (outputs or {}).items()}
            return self._run(run, forwards)

    def held_fixed(self) -> AbstractContextManager[None]:
        """While this lasts, passes are differentiable in their masks only, which makes them cheaper."""
        return frozen(nn.ModuleList(layer.subcomponents for layer in self.layers.values()))

    def check_mask(self, name: str, mask: Mask) -> None:
        C = self.layer(name).C
        if mask.values.shape[-1] != C:
            raise LayerError(
                f"The mask for layer {name!r} has {mask.values.shape[-1]} entries in its last "
                f"dimension, but the layer has C = {C} subcomponents."
            )
        if mask.where is not None and mask.where.dtype != torch.bool:
            raise LayerError(
                f"`where` in the mask for layer {name!r} is of type {mask.where.dtype}; it must be "
                "boolean, with one entry per datapoint."
            )

    def forward(self, batch: Batch) -> Tensor:
        """The target with every decomposed matrix replaced by the sum of its subcomponents."""
        ones = {n: Mask(layer.subcomponents.U.new_ones(layer.C)) for n, layer in self.layers.items()}
        return self.masked(batch, ones)

    def _run(self, run: Callable[[], Any], forwards: Mapping[str, Callable[..., Any]]) -> Any:
        """`run()` with these forwards in place; each must be called exactly once."""
        calls: list[str] = []
        thread = threading.get_ident()

        def counted(name: str, forward: Callable[..., Any]) -> Callable[..., Any]:
            original = self.layers[name].adapter.module.forward

            def call(*args: Any, **kwargs: Any) -> Any:
                if threading.get_ident() != thread:  # the user's own call of the model meanwhile
                    return original(*args, **kwargs)
                calls.append(name)
                return forward(*args, **kwargs)

            return call

        modules = {self.layers[name].adapter.module: counted(name, f) for name, f in forwards.items()}
        with overridden(modules):
            result = run()
        if len(calls) != len(forwards) or set(calls) != set(forwards):
            self._explain_calls(Counter(calls), forwards)
        return result

    @staticmethod
    def _explain_calls(calls: Counter[str], expected: Iterable[str]) -> None:
        for name in expected:
            if calls[name] == 0:
                raise LayerError(
                    f"Layer {name!r} was chosen, but the target's forward pass never calls it on this "
                    "input (its weight may be read directly, as nn.MultiheadAttention does with "
                    "out_proj). Leave it out of the patterns."
                )
            if calls[name] > 1:
                raise LayerError(
                    f"Layer {name!r} is called {calls[name]} times in one forward pass; rankone "
                    "decomposes layers that are called once. Give each use a module of its own (they "
                    "may share the weight: see `tied`), or leave it out."
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
                f"Layer {name!r} is tied to {source!r}, which is itself tied. Tie both to the same "
                "untied layer."
            )


def _decomposable(name: str, W: Tensor) -> Tensor:
    """A matrix in at least single precision, or an error that says why it cannot be decomposed."""
    if W.is_inference():
        raise LayerError(
            f"Layer {name!r} was created under torch.inference_mode, so nothing can be trained through "
            "it. Create or load the model outside of inference mode."
        )
    if not W.is_floating_point():
        raise LayerError(
            f"Layer {name!r} has a weight of type {W.dtype}; only floating point can be decomposed."
        )
    return W.float() if W.dtype in (torch.float16, torch.bfloat16) else W


def _tied_layer(name: str, adapter: Adapter, C: int, source: DecomposedLayer) -> DecomposedLayer:
    W = adapter.matrix().detach().to(source.subcomponents.U.dtype)
    transposed = _tie_orientation(name, W, source.name, source.matrix())
    if source.C != C:
        raise LayerError(
            f"Layer {name!r} has C = {C} but is tied to {source.name!r}, which has C = {source.C}. "
            "Tied layers share their subcomponents, so both need the same C."
        )
    return DecomposedLayer(name, adapter, TiedSubcomponents(source.subcomponents, transposed=transposed))


def _tie_orientation(name: str, W: Tensor, source_name: str, source: Tensor) -> bool:
    """Whether W is the transpose of the source (True) or equal to it (False); anything else is an
    error."""
    if W.shape == source.T.shape and torch.equal(W, source.T):
        return True
    if W.shape == source.shape and torch.equal(W, source):
        return False
    raise LayerError(
        f"Layers {name!r} {tuple(W.shape)} and {source_name!r} {tuple(source.shape)} are declared as "
        "tied, but their matrices are neither equal nor each other's transpose. Remove the entry from "
        "`tied` to decompose them separately."
    )
