"""DecomposedModel: any nn.Module, seen as rank-one subcomponents of the layers you choose.

The target is never altered. During one pass the chosen layers' `forward` is overridden on the
instance and put back afterwards, whatever happens; no weight is copied into it, no gradient is left
in it. Overriding `forward` rather than hooking it means that a replaced layer costs nothing, and
that the user's own hooks go on working.
"""

import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn

from rankone.adapters import Activation, Adapter
from rankone.components import DATA_INITS, TiedSubcomponents, make_subcomponents
from rankone.data import (
    Batch,
    call_with,
    check_batch,
    generator_for,
    given_weights,
    tensors_of,
    to_device,
)
from rankone.errors import LayerError, TargetError, near_matches
from rankone.heads import found_head, left_out, unless_too_wide
from rankone.importance import LayerActivations, LayerShape, Option, clipped, make_importance
from rankone.layer import Calls, DecomposedLayer
from rankone.masks import Mask, Masks
from rankone.naming import (
    Matrices,
    adapters_of,
    candidates,
    check_tied_names,
    chosen_among,
    find_ties,
)
from rankone.patching import (
    OutputGetter,
    cannot_run,
    frozen,
    one_pass_at_a_time,
    overridden,
    pick_output,
    refuse_unusable,
    same,
    unchanged,
)
from rankone.replay import Recorder, Recording

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
    """What the target returned; where the head was left out, what would have entered it."""
    inputs: dict[str, Activation]
    """For a layer that is called several times, `Calls`."""
    weights: Tensor | None
    """How much each row of the batch counts, or each position of each row; None where all count alike."""
    recording: Recording
    """What masked passes on the same batch need not compute again."""
    overwritten: frozenset[str]
    """The layers whose output the target goes on to overwrite."""
    head: nn.Linear | None = None
    """The last layer, where it was left out."""


class DecomposedModel(nn.Module):
    """A target network and the subcomponents of its chosen layers.

    `layers` maps name patterns (`"mlp.*.fc1"`; `*` also matches dots) to the number of subcomponents
    C. `tied` maps a layer to the layer whose subcomponents it shares, for weights that are equal or
    each other's transpose; by default, layers that share the memory of their weights (and have the
    same C) are tied, and with `{}` none. `matrices` declares what cannot be seen: fused layers, plain
    parameters, biases to be decomposed. `output` says how to get the tensor to compare out of what the
    target returns: a function, an attribute or key, or an index.
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
        matrices: Matrices | None = None,
        output: OutputGetter = None,
        seed: int = 0,
    ) -> None:
        super().__init__()
        refuse_unusable(target)
        object.__setattr__(self, "target", target)
        object.__setattr__(self, "output", output)  # a getter that is a module must not be trained
        known = candidates(target, matrices)
        chosen = chosen_among(known, target, layers)
        adapters = adapters_of(known, chosen, matrices)
        if tied is None:
            tied = {a: b for a, b in find_ties(adapters).items() if chosen[a] == chosen[b]}
        self.tied = dict(tied)
        check_tied_names(self.tied, chosen)
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
        self._head: nn.Linear | None = None
        self._by_module = {layer.adapter.module: layer for layer in self.layers.values()}
        self._recorder = Recorder(target, self._by_module)
        self._composites = {id(c): c for n, c in known.composites.items() if n in chosen}
        self._always = {k: v for c in self._composites.values() for k, v in c.installed().items()}

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
                a = layer.vectors(clean.inputs[name])
                a = a[self.weights(name, clean, a.shape[:-1]) > 0]
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
    def clean(self, batch: Batch, *, before_head: bool = False) -> CleanPass:
        """Run the untouched target; remember its output and the inputs of the decomposed layers.

        With `before_head`, a head that makes very much of its input (heads.py) is left out, here and in
        masked passes that are told of this one.
        """
        check_batch(batch)
        try:
            if self._verified_in_mode != self.target.training:
                self._verify(batch)
                self._verified_in_mode = self.target.training
            return self._observe(batch, before_head=before_head)
        except (RuntimeError, ValueError, IndexError) as error:
            raise cannot_run(self.target, batch, error) from error

    def _observe(
        self,
        batch: Batch,
        outputs: dict[str, list[Activation]] | None = None,
        *,
        before_head: bool = False,
    ) -> CleanPass:
        """A clean pass; copies of what every call of a layer returned go into `outputs`."""
        heads: list[nn.Linear] = []
        inputs: dict[str, list[Activation]] = {}
        versions: dict[str, list[int]] = {}
        recording = self._recorder.recording(tensors_of(batch))

        def observed(layer: DecomposedLayer, forward: Callable[..., Any]) -> Callable[..., Any]:
            name = layer.name

            def call(*args: Any, **kwargs: Any) -> Any:
                x = layer.adapter.input(name, args, kwargs)
                x = x.clone() if name in self._overwritten_inputs else x
                inputs.setdefault(name, []).append(x)
                versions.setdefault(name, []).append(x._version)
                output = forward(*args, **kwargs)
                if outputs is not None:
                    outputs.setdefault(name, []).append(output.clone())
                return output

            return call

        with one_pass_at_a_time:
            forwards = {}
            for module in self._recorder.modules():
                forward = self._original(module)
                if module in self._by_module:
                    forward = observed(self._by_module[module], forward)
                forwards[module] = recording.recorded(module, forward)
            if before_head and self._head is not None:
                forwards[self._head] = unless_too_wide(self._head, heads.append)
            result = self._run(lambda: call_with(self.target, batch), forwards)
        recording.finish()
        self._refuse_uncalled(self.layers, inputs)
        overwritten = {n for n, xs in inputs.items() if [x._version for x in xs] != versions[n]}
        if overwritten:
            # The target changed a layer's input in place after the layer had used it.
            self._overwritten_inputs |= overwritten
            if outputs is not None:
                outputs.clear()
            return self._observe(batch, outputs, before_head=before_head)
        return CleanPass(
            pick_output(result, self.output).detach(),
            {name: xs[0] if len(xs) == 1 else Calls(xs) for name, xs in inputs.items()},
            given_weights(batch),
            recording,
            frozenset(n for n, y in self.layers.items() if y.adapter.module in self._recorder.overwritten),
            heads[0] if heads else None,
        )

    def _verify(self, batch: Batch) -> None:
        """What must hold for a decomposition to mean anything: passes repeat, and layers are what
        their adapters say."""
        refuse_unusable(self.target)
        outputs: dict[str, list[Activation]] = {}
        with unchanged(self.target), self._recorder.learning():
            seen = self._observe(batch, outputs)
            again = self._observe(batch)
        if not same(seen.output, again.output):
            raise TargetError(
                "The target gives different outputs for the same batch, so its output cannot be "
                "compared with. "
                "Call model.eval() before decomposing, and switch off whatever else is random in it."
            )
        if self._composites:
            plain = pick_output(call_with(self.target, batch), self.output)
            loosest = max((c.tolerance or 0.0 for c in self._composites.values()), default=0.0)
            if not same(seen.output, plain, loosest or None):
                kinds = sorted({type(c.module).__name__ for c in self._composites.values()})
                raise TargetError(
                    f"The target gives another output when its {', '.join(kinds)} layers are computed matrix "
                    "by matrix. A subclass or a patched forward may do more than torch's own class. Leave their "
                    "matrices out."
                )
        run = lambda forwards: self._run(lambda: call_with(self.target, batch), forwards)  # noqa: E731
        self._head = found_head(self.target, self._by_module, run, self.output)
        for name, layer in self.layers.items():
            of_calls = outputs[name]
            layer.verify(seen.inputs[name], of_calls[0] if len(of_calls) == 1 else Calls(of_calls))

    def inner(self, clean: CleanPass) -> dict[str, Tensor]:
        """Inner activations h = V a of every layer on the clean activations; differentiable in V."""
        return {name: layer.read(clean.inputs[name]) for name, layer in self.layers.items()}

    def weights(self, name: str, clean: CleanPass, lead: Sequence[int]) -> Tensor:
        """How much each datapoint of a layer counts: for values `[*lead, ...]` read from its inputs."""
        if clean.weights is None:
            return torch.ones(tuple(lead), device=clean.output.device)
        return self.layer(name).weights(clean.inputs[name], clean.weights, lead)

    def raw_importances(self, clean: CleanPass, inner: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """What the importance function says of every layer, before any squashing."""

        def vectors(layer: DecomposedLayer) -> Callable[[], Tensor]:
            return lambda: layer.vectors(clean.inputs[layer.name])

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
        return {name: g for name, (g, _) in self.weighted_importances(batch).items()}

    @torch.no_grad()
    def weighted_importances(self, batch: Batch) -> dict[str, tuple[Tensor, Tensor]]:
        """Layer -> importances `[*lead, C]`, and how much each datapoint counts, `[*lead]`."""
        clean = self.clean(batch)
        raw = self.raw_importances(clean, self.inner(clean))
        return {name: (clipped(r), self.weights(name, clean, r.shape[:-1])) for name, r in raw.items()}

    def masked(
        self,
        batch: Batch,
        masks: Masks,
        clean: CleanPass | None = None,
        first: tuple[str, Activation] | None = None,
    ) -> Tensor:
        """The target's output when the layers in `masks` are their masked subcomponents, the others
        original.

        With the clean pass on the same batch, what comes before the first masked layer is not computed
        again. `first` gives the output of the first call of a masked layer, where it is known.
        """
        run = lambda: call_with(self.target, batch)  # noqa: E731
        return pick_output(self.under(masks, run, clean, first), self.output)

    def under(
        self,
        masks: Masks,
        run: Callable[[], Any],
        clean: CleanPass | None = None,
        first: tuple[str, Activation] | None = None,
    ) -> Any:
        """Whatever `run()` returns while the target's layers in `masks` are their masked subcomponents."""
        called: dict[str, bool] = {}

        def replacement(layer: DecomposedLayer, mask: Mask) -> Callable[..., Activation]:
            masked, name = layer.masked_calls(mask), layer.name

            def forward(*args: Any, **kwargs: Any) -> Activation:
                if name not in called and first is not None and first[0] == name:
                    called[name] = True
                    return first[1]
                called[name] = True
                return masked(layer.adapter.input(name, args, kwargs))

            return forward

        for name, mask in masks.items():
            self.check_mask(name, mask)
        with one_pass_at_a_time:
            forwards = {
                self.layer(name).adapter.module: replacement(self.layer(name), mask)
                for name, mask in masks.items()
            }
            if clean is not None:
                replayed = clean.recording.replayed(
                    list(forwards), lambda module: forwards.get(module) or self._original(module)
                )
                forwards = forwards | replayed
                if clean.head is not None:
                    forwards[clean.head] = left_out
            result = self._run(run, forwards)
        self._refuse_uncalled(masks, called)
        return result

    def target_held_fixed(self) -> AbstractContextManager[None]:
        """While this lasts, the target must not change: beginnings of passes on batches that come again
        are not run again."""
        return self._recorder.keeping()

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

    def _original(self, module: nn.Module) -> Callable[..., Any]:
        """What a module does when it is neither masked nor replayed."""
        return self._always.get((module, "forward")) or module.forward

    def _run(self, run: Callable[[], Any], forwards: Mapping[nn.Module, Callable[..., Any]]) -> Any:
        """`run()` with these forwards in place."""
        thread = threading.get_ident()

        def here(module: nn.Module, forward: Callable[..., Any]) -> Callable[..., Any]:
            original = module.forward

            def call(*args: Any, **kwargs: Any) -> Any:
                if threading.get_ident() != thread:  # the user's own call of the model meanwhile
                    return original(*args, **kwargs)
                return forward(*args, **kwargs)

            return call

        attributes = {(module, "forward"): here(module, forward) for module, forward in forwards.items()}
        with overridden({**self._always, **attributes}):
            return run()

    @staticmethod
    def _refuse_uncalled(expected: Iterable[str], called: Collection[str]) -> None:
        for name in expected:
            if name not in called:
                raise LayerError(
                    f"Layer {name!r} was chosen, but the target's forward pass never calls it on this "
                    "input (its weight may be read directly, without calling it). Leave it out of the "
                    "patterns; for a plain parameter, see `matrices.parameters`."
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
