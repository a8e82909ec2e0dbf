"""The predecessor as a second method on the collection: Attribution-based Parameter Decomposition.

APD (Braun, Bushnaq, Heimersheim, Mendel and Sharkey, 2025, arXiv:2501.14926) decomposes all matrices of
a network at once. A component c is one matrix P_c in every layer, given by factors:
P_c = sum_r u_cr v_cr^T, with as many terms as the layer's matrix may have ranks unless told otherwise.
This file is read top to bottom, in plain torch:

- *attribution* of c on a datapoint x: the mean over outputs o of (dy_o/dW . P_c)^2, where the gradient
  is the target's and the product runs over all layers: a first-order guess of what c does to y;
- *batch top-k*: the k times batch size largest attributions of a batch are the kept components;
- *faithfulness*: squared distance of the sum of all P_c from the target's matrices;
- *minimality*: squared distance of the output with only the kept components from the target's, and
  for residual networks also that of hidden activations;
- *simplicity*: sum over kept components and their terms of (|u_cr| |v_cr|)^p, which bounds the Schatten
  p-norm of the matrices and pushes components to few ranks and few layers.

Faithfulness and simplicity are divided by the number of decomposed parameters, and everything is a
mean over datapoints. Matrices that are tied share their components, transposed. Biases stay.

A top-k over a batch says nothing of a single datapoint. When training is done, the attribution that
just k components per datapoint exceed is measured on fresh data; from then on importances are 1 above
this threshold and 0 below.
"""

import fnmatch
import math
from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass, replace
from itertools import islice
from typing import Any, Literal, cast

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from rankone.adapters import Adapter, adapter_for, dense
from rankone.collection.base import KnownNetwork, inputs_tensor
from rankone.data import Batch, Sampler, WeightedBatch, batches, generator_for, mean_over_data, row_weights
from rankone.errors import ConfigError, TargetError, near_matches
from rankone.patching import one_pass_at_a_time, overridden, pick_output

Matrices = dict[str, Float[Tensor, "C d_out d_in"]]
THRESHOLD_BATCHES = 16
"""On how many batches the threshold of a finished decomposition is measured."""
NO_ROOT_OF_ZERO = 1e-16
"""Added under the root in simplicity, whose slope at 0 would be infinite."""


@dataclass(frozen=True)
class APD:
    """APD as a method of the benchmark: its settings, which are for one network.

    They have units and depend on the network, above all `top_k`.
    """

    C: int
    """The number of components."""
    top_k: float
    """How many components are kept per datapoint, on average over a batch."""
    steps: int = 20_000
    batch_size: int | None = None
    """None: as the network's data draws them."""
    lr: float = 1e-3
    schedule: Literal["constant", "quarter_cosine"] = "quarter_cosine"
    warmup: float = 0.05
    """The share of steps in which the learning rate rises."""
    faithfulness: float = 1.0
    minimality: float = 1.0
    simplicity: float = 1.0
    p: float = 0.9
    activations: float = 0.0
    """How much the error of hidden activations counts."""
    activations_of: str = "*"
    """The layers whose outputs, after a ReLU, these activations are: a name pattern."""
    unit_reads: bool = False
    """Whether read vectors are kept at unit length."""
    rank: int | None = None
    """How many terms a component has in each layer; None: as many as the matrix may have ranks."""
    scale: float = 1.0
    """Of the random factors at the start."""

    def __post_init__(self) -> None:
        for name in ("C", "top_k", "steps", "lr", "p", "scale"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"APD needs {name} above 0; it is {getattr(self, name)!r}.")
        for name in ("batch_size", "rank"):
            given = getattr(self, name)
            if given is not None and given < 1:
                raise ConfigError(f"APD needs {name} of at least 1; it is {given!r}.")
        if not 0 <= self.warmup < 1:
            raise ConfigError(f"The warm-up of APD is a share of its steps below 1; it is {self.warmup!r}.")
        if self.top_k > self.C:
            raise ConfigError(f"APD cannot keep top_k={self.top_k} of C={self.C} components per datapoint.")

    def __call__(self, network: KnownNetwork, seed: int) -> "AttributionDecomposition":
        return decompose_by_attribution(network, self, seed)


class WholeComponents(nn.Module):
    """C components, each with a matrix of its own in every layer."""

    def __init__(self, network: KnownNetwork, matrices: dict[str, Tensor], settings: APD, seed: int) -> None:
        super().__init__()
        self.names, self.tied = list(matrices), network.tied
        self.U, self.V = nn.ParameterDict(), nn.ParameterDict()
        for name, W in matrices.items():
            if name in self.tied:
                continue
            d_out, d_in = W.shape
            C, rank = settings.C, min(d_out, d_in, settings.rank or d_in)
            generator = generator_for(seed, f"apd/init/{name}")
            for factors, shape, width in (
                (self.U, (C, d_out, rank), d_out),
                (self.V, (C, rank, d_in), d_in),
            ):
                std = settings.scale * math.sqrt(2 / (C * rank * width))
                factors[_key(name)] = nn.Parameter(std * torch.randn(shape, generator=generator))

    def matrices(self) -> Matrices:
        own = {name: self.U[_key(name)] @ self.V[_key(name)] for name in self.names if name not in self.tied}
        return {name: own[self.tied[name]].mT if name in self.tied else own[name] for name in self.names}

    def sizes(self, p: float) -> Float[Tensor, " C"]:
        """Of each component, the sum over layers and terms of (|u| |v|)^p; a tied layer counts again."""
        total = torch.zeros(())
        for name in self.names:
            key = _key(self.tied.get(name, name))
            squares = self.U[key].square().sum(1) * self.V[key].square().sum(2)
            total = total + (squares + NO_ROOT_OF_ZERO).pow(p / 2).sum(1)
        return total

    @torch.no_grad()
    def normalize_reads(self) -> None:
        for V in self.V.values():
            V.div_(V.norm(dim=2, keepdim=True).clamp(min=1e-12))


@dataclass(frozen=True)
class TargetPass:
    """What the target did on a batch, with the graph from its layers' outputs to its own."""

    output: Float[Tensor, "rows outputs"]
    inputs: dict[str, Float[Tensor, "rows d_in"]]
    outputs: dict[str, Float[Tensor, "rows d_out"]]


class Layers:
    """The decomposed layers of a network, and the two ways to run it."""

    def __init__(self, network: KnownNetwork) -> None:
        self.network = network
        self.adapters: dict[str, Adapter] = {
            name: adapter_for(network.model.get_submodule(name), name) for name in network.layers
        }
        self.targets = {name: a.matrix().detach().clone() for name, a in self.adapters.items()}
        self.n_parameters = sum(W.numel() for W in self.targets.values())

    def _run(self, x: Tensor, layer: Callable[[str, Any], Any]) -> Float[Tensor, "rows outputs"]:
        def forward(name: str) -> Callable[[Any], Any]:
            return lambda given: layer(name, given)

        with (
            one_pass_at_a_time,
            overridden({(a.module, "forward"): forward(name) for name, a in self.adapters.items()}),
        ):
            output = pick_output(self.network.model(x), self.network.output)
        if output.dim() != 2:
            raise TargetError(
                f"{self.network.name} gives an output of shape {tuple(output.shape)}; APD is written here "
                "for networks that make one vector of one vector."
            )
        return output

    def clean(self, x: Tensor) -> TargetPass:
        inputs: dict[str, Tensor] = {}
        outputs: dict[str, Tensor] = {}

        def layer(name: str, given: Any) -> Tensor:
            a = self.adapters[name].vectors(given)
            inputs[name] = a.detach()
            y = dense(self.adapters[name].write(a, self.targets[name]))
            outputs[name] = y if y.requires_grad else y.requires_grad_()
            return outputs[name]

        with torch.enable_grad():
            output = self._run(x, layer)
        return TargetPass(
            output, {n: inputs[n] for n in self.adapters}, {n: outputs[n] for n in self.adapters}
        )

    def kept(
        self, x: Tensor, matrices: Matrices, kept: Bool[Tensor, "rows C"]
    ) -> tuple[Float[Tensor, "rows outputs"], dict[str, Tensor]]:
        """The output, and those of the layers, where each row has only its kept components.

        Only a few components are kept on each row, so the products are made pair by pair.
        """
        row, component = kept.nonzero(as_tuple=True)
        outputs: dict[str, Tensor] = {}

        def layer(name: str, given: Any) -> Any:
            a = self.adapters[name].vectors(given)
            products = matrices[name].index_select(0, component) @ a.index_select(0, row).unsqueeze(2)
            z = a.new_zeros(len(a), products.shape[1]).index_add(0, row, products.squeeze(2))
            outputs[name] = dense(self.adapters[name].write(z, torch.eye(z.shape[1])))
            return outputs[name]

        return self._run(x, layer), outputs


@torch.no_grad()
def attributions(clean: TargetPass, matrices: Matrices) -> Float[Tensor, "rows C"]:
    """Of each component on each row: the mean over outputs of (dy_o/dW . P_c)^2.

    dy_o/dW . P_c is dy_o/dz . P_c a, where a is what a layer receives and z what it returns.
    """
    n_outputs = clean.output.shape[1]
    with torch.enable_grad():
        gradients = torch.autograd.grad(
            clean.output.sum(0),
            list(clean.outputs.values()),
            grad_outputs=torch.eye(n_outputs),
            is_grads_batched=True,
        )
    effects = torch.zeros(())
    for gradient, name in zip(gradients, clean.outputs, strict=True):
        C, d_out, _ = matrices[name].shape
        products = (clean.inputs[name] @ matrices[name].flatten(0, 1).T).unflatten(1, (C, d_out))
        effects = effects + gradient.transpose(0, 1) @ products.mT
    return effects.square().mean(1)


def threshold_of(
    attribution: Float[Tensor, "rows C"], weights: Float[Tensor, " rows"], top_k: float
) -> float:
    """The least attribution among the `top_k` times number of datapoints largest ones.

    A row of weight w stands for w datapoints.
    """
    wanted = int(top_k * float(weights.sum()))
    values, places = attribution.flatten().topk(min(max(wanted, 1), attribution.numel()))
    taken = weights[places // attribution.shape[1]].cumsum(0) - weights[places // attribution.shape[1]]
    return float(values[taken < max(wanted, 1)][-1])


def keep(attribution: Float[Tensor, "rows C"], threshold: float) -> Bool[Tensor, "rows C"]:
    """Which components are kept; one without any effect never is."""
    return (attribution >= threshold) & (attribution > 0)


def losses(
    layers: Layers,
    components: WholeComponents,
    settings: APD,
    clean: TargetPass,
    x: Tensor,
    kept: Bool[Tensor, "rows C"],
    matrices: Matrices,
    weights: Float[Tensor, " rows"] | None,
) -> dict[str, Float[Tensor, ""]]:
    """The terms of the loss, without their coefficients."""
    faithfulness = torch.zeros(())
    for name, W in layers.targets.items():
        faithfulness = faithfulness + (matrices[name].sum(0) - W).square().sum()
    output, of_layers = layers.kept(x, matrices, kept)
    minimality = mean_over_data((output - clean.output.detach()).square().mean(1), weights)
    simplicity = mean_over_data(kept.float() @ components.sizes(settings.p), weights)
    terms = {
        "faithfulness": faithfulness / layers.n_parameters,
        "minimality": minimality,
        "simplicity": simplicity / layers.n_parameters,
    }
    if settings.activations:
        hidden = fnmatch.filter(layers.adapters, settings.activations_of)
        if not hidden:
            raise ConfigError(
                f"activations_of={settings.activations_of!r} names no decomposed layer. "
                f"{near_matches(settings.activations_of, layers.adapters)}"
            )
        ours = torch.cat([of_layers[name].relu() for name in hidden], 1)
        theirs = torch.cat([clean.outputs[name].detach().relu() for name in hidden], 1)
        terms["activations"] = mean_over_data((ours - theirs).square().mean(1), weights)
    return terms


def decompose_by_attribution(network: KnownNetwork, settings: APD, seed: int) -> "AttributionDecomposition":
    """APD from beginning to end."""
    layers = Layers(network)
    data = _in_batches_of(network.data, settings.batch_size)
    components = WholeComponents(network, layers.targets, settings, seed)
    coefficients = {
        "faithfulness": settings.faithfulness,
        "minimality": settings.minimality,
        "simplicity": settings.simplicity,
        "activations": settings.activations,
    }
    optimizer = torch.optim.AdamW(components.parameters(), lr=settings.lr, weight_decay=0.0, fused=True)
    for step, batch in enumerate(islice(batches(data, seed, stream="apd/data"), settings.steps)):
        if settings.unit_reads:
            components.normalize_reads()
        for group in optimizer.param_groups:
            group["lr"] = settings.lr * _learning_rate(settings, step)
        x = inputs_tensor(batch)
        clean = layers.clean(x)
        matrices = components.matrices()
        attribution = attributions(clean, matrices)
        kept = keep(attribution, threshold_of(attribution, _counts(batch), settings.top_k))
        terms = losses(layers, components, settings, clean, x, kept, matrices, row_weights(batch))
        loss = torch.stack([coefficients[name] * term for name, term in terms.items()]).sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    with torch.no_grad():
        matrices = {name: m.clone() for name, m in components.matrices().items()}
        measured: list[Tensor] = []
        counts: list[Tensor] = []
        for batch in islice(batches(data, seed, stream="apd/threshold"), THRESHOLD_BATCHES):
            measured.append(attributions(layers.clean(inputs_tensor(batch)), matrices))
            counts.append(_counts(batch))
        threshold = threshold_of(torch.cat(measured), torch.cat(counts), settings.top_k)
    return AttributionDecomposition(network, matrices, threshold)


@dataclass(frozen=True)
class WholeMatrices:
    """The components of one layer."""

    matrices: Float[Tensor, "C d_out d_in"]


@dataclass(frozen=True)
class AttributionDecomposition:
    """What APD makes of a network: whole matrices, and a threshold for their attributions."""

    network: KnownNetwork
    matrices: Matrices
    threshold: float

    def attributions(self, batch: Batch) -> Float[Tensor, "rows C"]:
        return attributions(Layers(self.network).clean(inputs_tensor(batch)), self.matrices)

    def importances(self, batch: Batch) -> dict[str, Float[Tensor, "rows C"]]:
        """1 where a component's attribution reaches the threshold, 0 elsewhere; the same in all layers."""
        return dict.fromkeys(self.matrices, keep(self.attributions(batch), self.threshold).float())

    def components(self, layer: str) -> WholeMatrices:
        return WholeMatrices(self.matrices[layer])


def _learning_rate(settings: APD, step: int) -> float:
    """Relative to its peak."""
    rising = int(settings.warmup * settings.steps)
    if step < rising:
        return step / rising
    if settings.schedule == "constant":
        return 1.0
    return math.cos(math.pi / 2 * (step - rising) / (settings.steps - rising))


def _in_batches_of(data: Sampler, batch_size: int | None) -> Sampler:
    """The same data in batches of another size."""
    if batch_size is None:
        return data
    if not is_dataclass(data) or isinstance(data, type) or "batch_size" not in {f.name for f in fields(data)}:
        raise ConfigError(
            f"batch_size={batch_size} was asked for, but the data of this network ({type(data).__name__}) "
            "has no batch_size to set. Leave it out."
        )
    return cast(Sampler, replace(data, batch_size=batch_size))


def _counts(batch: Batch) -> Float[Tensor, " rows"]:
    """How many datapoints each row stands for."""
    return batch.weights if isinstance(batch, WeightedBatch) else torch.ones(len(inputs_tensor(batch)))


def _key(name: str) -> str:
    """A layer's name as torch allows it in a dictionary of parameters."""
    return name.replace(".", "/")
