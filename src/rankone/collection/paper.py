"""The seven networks of the paper, as they are pinned in rankone: the experiments' own targets."""

from functools import partial

import torch
from torch import Tensor, nn

from rankone.collection.base import Dense, KnownNetwork, Mechanisms, Truth, columns, register, rows
from rankone.model import DecomposedModel
from rankone.naming import choose_layers
from rankone.runs.config import experiment_config

NAMES = {
    "tms_5-2": "5 features in 2 dimensions",
    "tms_5-2-id": "the same, with an identity matrix in between",
    "tms_40-10": "40 features in 10 dimensions",
    "tms_40-10-id": "the same, with an identity matrix in between",
    "resid_mlp1": "100 features computed by 50 neurons in one layer",
    "resid_mlp2": "100 features computed by 50 neurons in two layers",
    "resid_mlp3": "100 features computed by 51 neurons in three layers",
}


def _build(name: str) -> KnownNetwork:
    config = experiment_config(name, preset="tuned")
    target = config.target
    model, probe = target.load(), target.probe()
    assert probe is not None
    model.requires_grad_(False)
    truth: dict[str, Truth] = {}
    for layer, (pattern, k) in target.truth().items():
        W = model.get_submodule(layer).weight
        assert isinstance(W, Tensor)
        W = W.detach().clone()
        if pattern == "dense":
            truth[layer] = Dense(k)
        elif name.startswith("tms"):
            truth[layer] = Mechanisms(columns(W) if layer == "embed" else rows(W))
        else:
            # The stream is far wider than the features: a mechanism is what a matrix makes of what one
            # feature brings into it, and says nothing of directions that no feature reaches.
            brought = _brought(model, layer, probe)
            read = torch.linalg.pinv(brought.double()).float()
            truth[layer] = Mechanisms(torch.einsum("ok,ki->koi", W @ brought, read), support=brought)
    sampler = target.data(config.batch_size)
    assert callable(sampler)
    known = [layer for layer, about in truth.items() if isinstance(about, Mechanisms)]
    return KnownNetwork(
        name,
        model,
        sampler,
        choose_layers(model, config.layers),
        truth,
        probe,
        partial(_needed, known),
        tied=dict(config.tied or {}),
        divergence=config.divergence,
        output=target.output,
        quality=target.check(model)[1],
    )


@torch.no_grad()
def _brought(model: nn.Module, layer: str, probe: Tensor) -> Tensor:
    """The directions in which single features reach a layer: half of the way from their negative to
    their positive probe. In later blocks it is bent by the ReLUs before, so there the truth is not exact."""
    decomposed = DecomposedModel(model, {layer: 1}, importance="linear")
    of = decomposed.layer(layer)
    up, down = (of.vectors(decomposed.clean(x).inputs[layer]) for x in (probe, -probe))
    return ((up - down) / (2 * probe.max())).T.contiguous()


def _needed(layers: list[str], x: Tensor) -> dict[str, Tensor]:
    return dict.fromkeys(layers, x != 0)


for _name, _about in NAMES.items():
    register(_name, "paper", _about, _build)
