"""One of several processes, or the only one: some training steps of several networks, written to a file.

`python processes_worker.py DIRECTORY` computes what tests/test_processes.py compares: the same steps alone
(without RANK in the environment) and shared.
"""

import json
import sys
from pathlib import Path

import torch
from torch import nn

from rankone import DecompositionConfig, WeightedBatch, processes
from rankone.data import batches, to_device
from rankone.decomposition import build
from rankone.errors import RankoneError
from rankone.files import digest_of, save_sealed
from rankone.masks import uniform
from rankone.runs.config import experiment_config
from rankone.train import Training

STEPS = 3


class TinyLanguageModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.up, self.down = nn.Linear(8, 12), nn.Linear(12, 8)
        self.unembed = nn.Linear(8, 11)

    def forward(self, input_ids, attention_mask):
        x = self.embed(input_ids)
        n = input_ids.shape[1]
        causal = torch.triu(torch.full((n, n), float("-inf")), 1)
        x = x + self.attention(x, x, x, attn_mask=causal, need_weights=False)[0]
        x = x + self.down(torch.relu(self.up(x)))
        return self.unembed(x)


def padded(generator):
    lengths = torch.randint(2, 7, (10,), generator=generator)
    mask = (torch.arange(6) < lengths.unsqueeze(1)).long()
    return {"input_ids": torch.randint(0, 11, (10, 6), generator=generator) * mask, "attention_mask": mask}


def weighted(generator):
    x = torch.rand(70, 4, generator=generator)
    return WeightedBatch(x, torch.arange(1.0, 71.0))


def convolution() -> nn.Module:
    return nn.Sequential(nn.Conv1d(2, 3, 3), nn.ReLU(), nn.Flatten(), nn.Linear(12, 4))


def plain(generator):
    return torch.randn(10, 2, 6, generator=generator)


def shipped(name: str, preset: str, batch_size: int, **changes):
    config = experiment_config(name, preset=preset, assignments=[f"batch_size={batch_size}", "steps=4"])
    config = config.model_copy(update=changes)
    model = build(config.target.load(), config.layers, config, config.getter)
    return model, config.target.data(config.batch_size), config, config.target.divergence


def own(network: nn.Module, layers, data, **settings):
    config = DecompositionConfig.model_validate({"steps": 4} | settings)
    return build(network.eval(), layers, config, None), data, config, None


def cases():
    """Name -> (model, data, config, divergence)."""
    faithful = {"faithfulness": {}}
    yield "tms", shipped("tms_5-2", "recipe", 512)
    yield "tms_exact", shipped("tms_5-2-id", "paper", 300, engine="exact")
    yield "residual", shipped("resid_mlp1", "paper", 130)
    torch.manual_seed(0)
    sparse = {"importance_minimality": {}, "frequency": {"remember": 0.9}}
    subset = {"stochastic_recon_subset": {"samples": 2}, "importance_recon": {}}
    mlp = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 4))
    masks = {"delta": True, "at_zero": 0.2, "sigmoid": "straight_through"}
    losses = faithful | sparse | subset
    yield "own", own(mlp, {"0": 5, "2": 7}, weighted, losses=losses, masks=masks, relative=True)
    attack = {"adversarial_recon": {"steps": 3}, "importance_minimality": {"p": 0.9}}
    yield "attacked", own(mlp, {"0": 5, "2": 7}, weighted, losses=faithful | attack, engine="exact")
    persistent = {"adversarial_recon": {"persistent": True, "steps": 2}}
    yield "persistent", own(mlp, {"0": 5}, weighted, losses=faithful | persistent, masks={"delta": True})
    yield "convolution", own(convolution(), {"0": 5, "3": 7}, plain, optimizer={"lr": 1e-3, "grad_clip": 0.1})
    layers = {"attention.*": 4, "up": 6, "down": 6, "unembed": 5}
    yield "language", own(TinyLanguageModel(), layers, padded, divergence="kl")


def compute(world, out: Path) -> None:
    for name, (model, data, config, divergence) in cases():
        training = Training(model, data, config, divergence=divergence)
        tensors = {}
        with training.ready():
            if world.size > 1:
                training._join()
            if config.relative:
                training._measure()
                training._use_measured()
            stream = batches(data, config.seed)
            for index in range(STEPS):
                batch = to_device(next(stream), model.device)
                step, total, terms = training.take_step(index, batch)
                if index == 0:
                    for layer, raw in step.raw.items():
                        tensors[f"random/{layer}"] = uniform(step.mask_key(layer, 0), raw.detach())
                        tensors[f"mask/{layer}"] = step.masks("stochastic", 0)[layer].values.detach()
                    for parameter, p in training.trained.items():
                        if p.grad is not None:
                            tensors[f"gradient/{parameter}"] = p.grad.clone()
                    tensors |= {f"loss/{term}": value.detach() for term, value in terms.items()}
                    tensors |= {
                        f"l0/{k}": torch.tensor(v)
                        for k, v in training._record(step, total, terms)["l0"].items()
                    }
        tensors |= {f"after/{k}": t.detach() for k, t in training._state().items()}
        place = step.share.place
        meta = {
            "parameters": digest_of({k: t.detach() for k, t in training._state().items()}),
            "place": list(place) if place else None,
            "bytes": getattr(world, "bytes", 0),
        }
        save_sealed(out / f"{name}-{world.rank}.safetensors", tensors, meta)


def refusals(world, out: Path) -> None:
    """What is said when processes differ."""
    said = {}
    try:
        world.refuse_different({"settings": 1, "batches": world.rank == 2})
        world.refuse_different({"settings": world.rank})
    except RankoneError as error:
        said["different"] = str(error)
    (out / f"said-{world.rank}.json").write_text(json.dumps(said))


if __name__ == "__main__":
    torch.set_num_threads(1)
    directory = Path(sys.argv[1])
    with processes.joined() as world:
        compute(world, directory)
        if world.size > 1:
            refusals(world, directory)
