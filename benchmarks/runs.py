"""The training steps that the benchmarks measure: the paper's seven runs, a plain MLP with nothing
special to it, a convolutional network and a transformer encoder.

Each comes twice from one set of parameters: as rankone's own `Training`, and as the literal step of
literal.py.
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
from rankone.importance import PerLayer
from rankone.masks import uniform
from rankone.model import DecomposedModel
from rankone.runs.config import experiment_config, experiment_file, experiment_names
from rankone.targets import ResidualTarget
from rankone.targets.sparse import SparseTarget
from rankone.train import Training

PAPERS = [name for name in experiment_names() if "paper" in experiment_file(name).presets]
RUNS = (*sorted(PAPERS, reverse=True), "plain_mlp", "digits", "encoder")

LITERAL: dict[str, Callable[[Any, Any], literal.Network]] = {
    "tms": lambda target, model: literal.tms(target.n_identity),
    "resid_mlp": lambda target, model: literal.residual_mlp(model.embed.weight.detach(), target.n_blocks),
}
"""Kind of target -> its forward pass, written down literally."""


@dataclass
class Run:
    """One run, ready to take steps."""

    name: str
    model: nn.Module
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
        return Training(build(self.model, self.layers, config, None), self.data, config)


def make(name: str) -> Run:
    """The run of this name at the paper's batch size, C and d_gate."""
    own = {"plain_mlp": plain_mlp, "digits": digits, "encoder": encoder}
    if name in own:
        return own[name]()
    config = experiment_config(name, preset="paper")
    assert isinstance(config.target, SparseTarget)
    data = config.target.data(config.batch_size)
    model = config.target.load()
    network = LITERAL[config.target.kind](config.target, model)
    return Run(name, model, config.layers, config, data, data.dense, network, config.threads)


def residual(target: ResidualTarget, C: int, batch: int, d_gate: int) -> Run:
    """An untrained residual MLP of any size."""
    model, data = target.build().eval(), target.data(batch)
    network = LITERAL["resid_mlp"](target, model)
    return Run("residual", model, {"blocks.*": C}, settings(d_gate, 1e-5), data, data.dense, network)


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


def digits() -> Run:
    """A small convolutional network for images of 8 by 8 points, every layer decomposed."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        target = nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(),
            nn.MaxPool2d(2), nn.Flatten(), nn.Linear(512, 32), nn.ReLU(), nn.Linear(32, 10),
        ).eval()  # fmt: skip

    def data(generator: torch.Generator) -> Tensor:
        return torch.rand(256, 1, 8, 8, generator=generator)

    layers = {"0": 20, "2": 60, "6": 40, "8": 14}
    return Run("digits", target, layers, settings(16, 1e-4), data, data, literal.digits)


def encoder(blocks: int = 2) -> Run:
    """A small `nn.TransformerEncoder`, every matrix decomposed."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        block = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True)
        target = nn.TransformerEncoder(block, blocks, enable_nested_tensor=False).eval()
    norms = [norm for layer in target.layers for norm in (layer.norm1, layer.norm2)]

    def data(generator: torch.Generator) -> Tensor:
        return torch.randn(64, 16, 32, generator=generator)

    network = literal.encoder(norms, heads=4)
    return Run("encoder", target, {"*": 48}, settings(16, 1e-4), data, data, network)


def settings(d_gate: int, beta3: float) -> DecompositionConfig:
    minimality = {"importance_minimality": {"coefficient": beta3, "p": 2.0}}
    return DecompositionConfig(losses=paper_losses() | minimality, importance={"options": {"d_gate": d_gate}})


def literal_layers(model: DecomposedModel) -> dict[str, literal.LiteralLayer]:
    """The parameters of a decomposed model as the literal step has them: copies, except that tied
    layers share theirs."""
    assert isinstance(model.importance, PerLayer)
    layers: dict[str, literal.LiteralLayer] = {}
    for name in [*(n for n in model.layers if n not in model.tied), *model.tied]:
        layer = model.layer(name)
        gate = [
            getattr(model.importance.functions[name], key).detach().clone().requires_grad_()
            for key in ("w_in", "b_in", "w_out", "b_out")
        ]
        if name in model.tied:
            source = layers[model.tied[name]]
            U, V = (source.V.T, source.U.T) if layer.subcomponents.transposed else (source.U, source.V)
        else:
            U, V = (
                t.detach().clone().requires_grad_() for t in (layer.subcomponents.U, layer.subcomponents.V)
            )
        bias = getattr(layer.adapter.module, "bias", None)
        bias = None if bias is None else bias.detach()
        layers[name] = literal.LiteralLayer(layer.matrix().clone(), bias, U, V, *gate)
    return {name: layers[name] for name in model.layers}


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
        model = build(run.model, run.layers, run.config, None)
        self.layers = literal_layers(model)
        self.optimizer = torch.optim.Adam(
            literal_parameters(model, self.layers).values(), lr=run.config.optimizer.lr
        )

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
    """How far rankone's losses and gradients are from the literal ones on one batch, with the same
    masks.

    Every parameter is first moved at random, so that importances fall on both sides of 0 and 1. Errors
    are relative: of each loss, and of each parameter's gradient as a whole, in the 2-norm; the largest
    is reported.
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
    with training.ready():
        step = training.make_step(0, batch)
        total, terms = step.total()
        ours = torch.autograd.grad(total, training.parameters)
    # Each merged row stands for several: in the literal batch they all use the random numbers of
    # that row.
    draws = {
        name: uniform(step.mask_key(name, 0), raw).repeat_interleave(copies, 0).flatten(0, -2)
        for name, raw in step.raw.items()
    }
    layers = literal_layers(model)
    parameters = literal_parameters(model, layers)
    losses = literal.losses(
        run.network,
        layers,
        rows.repeat_interleave(copies, 0),
        run.config.losses["importance_minimality"].p,
        [draws],
    )
    theirs = torch.autograd.grad(
        sum(run.config.losses[name].coefficient * term for name, term in losses.items()),
        list(parameters.values()),
    )
    by_loss = {
        name: float((terms[name] - value).detach().abs() / value.detach().abs())
        for name, value in losses.items()
    }
    by_gradient = {
        name: float((a - b).norm() / b.norm()) for name, a, b in zip(parameters, ours, theirs, strict=True)
    }
    return {"loss": max(by_loss.values()), "gradient": max(by_gradient.values())}
