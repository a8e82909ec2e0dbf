"""The training steps that the benchmarks measure: the paper's seven runs, and a plain MLP with nothing special to it.

Each comes twice from one set of parameters: as rankone's own `Training`, and as the literal step of literal.py.
"""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import literal
import torch
from torch import Tensor, nn

from rankone.config import DecompositionConfig, paper_losses
from rankone.data import WeightedBatch, generator_for, inputs_of
from rankone.decomposition import build
from rankone.losses import mask_key
from rankone.masks import uniform
from rankone.model import DecomposedModel
from rankone.runs.config import experiment_config
from rankone.targets import load_target
from rankone.targets.resid_mlp import ResidualMLP
from rankone.targets.sparse import SparseFeatures
from rankone.train import Training

RUNS = ("tms_5-2", "tms_5-2-id", "tms_40-10", "tms_40-10-id", "resid_mlp1", "resid_mlp2", "resid_mlp3", "plain_mlp")


@dataclass(frozen=True)
class Residual:
    """The paper's settings for one residual MLP."""

    n_features: int
    n_blocks: int
    n_neurons: int
    C: int
    d_gate: int


RESIDUAL = {
    "resid_mlp1": Residual(100, 1, 50, 100, 16),
    "resid_mlp2": Residual(100, 2, 25, 400, 16),
    "resid_mlp3": Residual(102, 3, 17, 500, 128),
}


@dataclass
class Run:
    """One run, ready to take steps."""

    name: str
    target: nn.Module
    layers: dict[str, int]
    config: DecompositionConfig
    data: Callable[[torch.Generator], Any]
    """What rankone trains on."""
    whole: Callable[[torch.Generator], Tensor]
    """The same distribution, row by row, as the literal step takes it."""
    network: literal.Network
    threads: int = 2
    """CPU threads with which this run is best trained."""

    def training(self, engine: str) -> Training:
        config = self.config.model_copy(update={"engine": engine})
        return Training(build(self.target, self.layers, config, None), self.data, config)


def make(name: str) -> Run:
    """The run of this name at the paper's batch size, C and d_gate."""
    if name.startswith("tms"):
        config = experiment_config(name, preset="paper")
        target, sampler = load_target(config.target), config.target.sampler(config.batch_size)
        return Run(
            name,
            target,
            config.layers,
            config,
            sampler,
            sampler.dense,
            literal.tms(config.target.n_identity),
            config.threads,
        )
    if name in RESIDUAL:
        of = RESIDUAL[name]
        return residual(name, of)
    return plain_mlp()


def residual(name: str, of: Residual, batch: int = 2048) -> Run:
    target = ResidualMLP(of.n_features, 1000, of.n_blocks, of.n_neurons, generator_for(0, "target")).eval()
    sampler = SparseFeatures(of.n_features, 0.01, batch, low=-1.0, high=1.0)
    network = literal.residual_mlp(target.embed.weight.detach(), of.n_blocks)
    return Run(name, target, {"blocks.*": of.C}, settings(of.d_gate, 1e-5), sampler, sampler.dense, network)


def plain_mlp(
    widths: tuple[int, ...] = (64, 256, 256, 64),
    C: int = 500,
    batch: int = 2048,
    d_gate: int = 16,
    name: str = "plain_mlp",
) -> Run:
    """Dense inputs, ordinary layers, no two rows alike: only what helps every network can help here."""
    generator = generator_for(0, "target")
    layers: list[nn.Module] = []
    for d_in, d_out in pairwise(widths):
        linear = nn.Linear(d_in, d_out)
        nn.init.normal_(linear.weight, std=d_in**-0.5, generator=generator)
        nn.init.normal_(linear.bias, std=0.1, generator=generator)
        layers += [linear, nn.ReLU()]
    target = nn.Sequential(*layers[:-1]).eval()
    names = [str(i) for i in range(0, len(layers), 2)]

    def data(generator: torch.Generator) -> Tensor:
        return torch.randn(batch, widths[0], generator=generator)

    return Run(name, target, dict.fromkeys(names, C), settings(d_gate, 1e-4), data, data, literal.mlp(names))


def settings(d_gate: int, beta3: float) -> DecompositionConfig:
    minimality = {"importance_minimality": {"coefficient": beta3, "p": 2.0}}
    return DecompositionConfig(losses=paper_losses() | minimality, importance={"options": {"d_gate": d_gate}})


def literal_layers(model: DecomposedModel) -> dict[str, literal.LiteralLayer]:
    """The parameters of a decomposed model as the literal step has them: copies, except that tied layers share theirs."""
    made: dict[str, literal.LiteralLayer] = {}
    for name in [*(n for n in model.layers if n not in model.tied), *model.tied]:
        layer = model.layer(name)
        gate = [
            getattr(layer.importance, key).detach().clone().requires_grad_()
            for key in ("w_in", "b_in", "w_out", "b_out")
        ]
        if name in model.tied:
            source = made[model.tied[name]]
            U, V = (source.V.T, source.U.T) if layer.subcomponents.transposed else (source.U, source.V)
        else:
            U, V = (t.detach().clone().requires_grad_() for t in (layer.subcomponents.U, layer.subcomponents.V))
        bias = getattr(layer.module, "bias", None)
        made[name] = literal.LiteralLayer(layer.matrix().clone(), None if bias is None else bias.detach(), U, V, *gate)
    return {name: made[name] for name in model.layers}


def literal_parameters(model: DecomposedModel, layers: dict[str, literal.LiteralLayer]) -> dict[str, Tensor]:
    """What the literal step trains, under rankone's names."""
    return {
        name: getattr(layers[name.removesuffix(f".{key}").removesuffix(".importance")], key)
        for name in model.trained()
        for key in [name.rsplit(".", 1)[1]]
    }


class LiteralTraining:
    """The literal step with torch's default Adam, on fresh data every time."""

    def __init__(self, run: Run) -> None:
        self.run = run
        model = build(run.target, run.layers, run.config, None)
        self.layers = literal_layers(model)
        self.optimizer = torch.optim.Adam(literal_parameters(model, self.layers).values(), lr=run.config.optimizer.lr)

    def take_step(self, step: int) -> None:
        losses = self.run.config.losses
        terms = literal.losses(
            self.run.network,
            self.layers,
            self.run.whole(generator_for(0, "data", step)),
            losses["importance_minimality"].p,
        )
        self.optimizer.zero_grad()
        sum(losses[name].coefficient * term for name, term in terms.items()).backward()
        self.optimizer.step()


def disagreement(run: Run, engine: str, *, scatter: float = 0.3) -> dict[str, float]:
    """How far rankone's losses and gradients are from the literal ones on one batch, with the same masks.

    Every parameter is first moved at random, so that importances fall on both sides of 0 and 1. Errors are relative: of each
    loss, and of each parameter's gradient as a whole, in the 2-norm; the largest is reported.
    """
    training = run.training(engine)
    model = training.model
    noise = generator_for(1, "scatter")
    with torch.no_grad():
        for name, p in training.trained.items():
            scale = scatter if ".importance." in name else 0.1 * float(p.abs().mean())
            p.add_(scale * torch.randn(p.shape, generator=noise))
    batch = run.data(generator_for(0, "data"))
    rows, weights = inputs_of(batch), (batch.weights if isinstance(batch, WeightedBatch) else None)
    copies = torch.ones(rows.shape[0], dtype=torch.long) if weights is None else weights.long()
    total, terms, _ = training.loss_terms(0, batch)
    ours = torch.autograd.grad(total, training.parameters)
    # Each merged row stands for several: in the literal batch they all use the random numbers that the one row drew.
    draws = {
        name: uniform(mask_key(0, 0, name, 0), torch.empty(rows.shape[0], layer.C)).repeat_interleave(copies, 0)
        for name, layer in model.layers.items()
    }
    layers = literal_layers(model)
    parameters = literal_parameters(model, layers)
    losses = literal.losses(
        run.network, layers, rows.repeat_interleave(copies, 0), run.config.losses["importance_minimality"].p, [draws]
    )
    theirs = torch.autograd.grad(
        sum(run.config.losses[name].coefficient * term for name, term in losses.items()), list(parameters.values())
    )
    by_loss = {
        name: float((terms[name] - value).detach().abs() / value.detach().abs()) for name, value in losses.items()
    }
    by_gradient = {name: float((a - b).norm() / b.norm()) for name, a, b in zip(parameters, ours, theirs, strict=True)}
    return {"loss": max(by_loss.values()), "gradient": max(by_gradient.values())}
