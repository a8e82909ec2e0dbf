"""What a network with known mechanisms is, how one is registered, and how a trained one is kept.

Every network of the collection is a `KnownNetwork`: a model, its data, and the truth about each of
its matrices. It is built from its name alone and comes out the same every time; all random numbers
come from generators of its own, and the caller's random state is left as it was. Training takes
seconds to minutes, so trained weights are kept in sealed files where the system keeps caches.
"""

import json
import math
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from rankone.data import Batch, Sampler, generator_for
from rankone.errors import CheckpointError, TargetError
from rankone.files import fingerprint, load_sealed, save_sealed, sha256
from rankone.patching import OutputGetter
from rankone.settings import Registry

RECIPES = 1
"""Grows when the way in which networks are trained changes: kept weights of before are not used."""


@dataclass(frozen=True)
class Mechanisms:
    """A matrix that consists of mechanisms, each needed on some inputs and not on others."""

    matrices: Float[Tensor, "K d_out d_in"]
    """They add up to the matrix on every input that occurs in the data."""
    rank: int | tuple[int, ...] = 1
    """The rank of all of them, or of each."""
    support: Float[Tensor, "d_in directions"] | None = None
    """Directions that the layer's inputs consist of, where the data does not reach all of them. Only
    what a part does to these is compared."""

    @property
    def ranks(self) -> tuple[int, ...]:
        return (self.rank,) * len(self.matrices) if isinstance(self.rank, int) else self.rank

    def on_support(self, matrices: Float[Tensor, "*n d_out d_in"]) -> Float[Tensor, "*n d_out directions"]:
        return matrices if self.support is None else matrices @ self.support


@dataclass(frozen=True)
class Dense:
    """A matrix of which only this is known: k parts serve many inputs each and together make it up."""

    k: int


Truth = Mechanisms | Dense
Needed = Callable[[Any], dict[str, Tensor]]
"""Inputs of the model -> for each layer that has `Mechanisms`, which are needed: bool `[*lead, K]`."""


@dataclass(frozen=True)
class KnownNetwork:
    """A network, its data, and what a right decomposition of it looks like."""

    name: str
    model: nn.Module
    data: Sampler
    layers: dict[str, int]
    """The layers to decompose -> C, the number of subcomponents to decompose each into."""
    truth: dict[str, Truth]
    probe: Tensor
    """Inputs on which every mechanism that occurs in the data is needed at least once."""
    needed: Needed
    tied: dict[str, str] = field(default_factory=dict)
    divergence: str = "mse"
    output: OutputGetter = None
    good: bool = True
    """Whether the network itself is what it should be."""
    quality: dict[str, float] = field(default_factory=dict)
    """The numbers that decide it."""

    @property
    def digest(self) -> str:
        """A fingerprint of the weights."""
        return fingerprint(self.model)

    def needed_on_probe(self, layer: str) -> Bool[Tensor, "rows K"]:
        """Which mechanisms of a layer are needed on each row (and position) of the probe."""
        return self.needed(self.probe)[layer].flatten(0, -2)


Build = Callable[[str], KnownNetwork]


class Entry(NamedTuple):
    """A network of the collection that is not built yet."""

    family: str
    about: str
    """What it tests, in a few words."""
    build: Build
    trains: bool
    """Whether building it trains it, if no trained weights are kept."""


ENTRIES: Registry[Entry] = Registry("network of the collection")


def register(name: str, family: str, about: str, build: Build, *, trains: bool = False) -> None:
    """Add a network. `build` is given the name."""
    ENTRIES.register(name)(Entry(family, about, build, trains))


def network(name: str) -> KnownNetwork:
    """The network of this name."""
    entry = ENTRIES.get(name)
    with torch.random.fork_rng(devices=[]), torch.inference_mode(False):
        return entry.build(name)


def linear(weight: Float[Tensor, "d_out d_in"], bias: Tensor | None = None) -> nn.Linear:
    """A linear layer with these weights."""
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None)
    with torch.no_grad():
        layer.weight.copy_(weight)
        if bias is not None:
            layer.bias.copy_(bias)
    return layer


def orthonormal(rows: int, width: int, generator: torch.Generator) -> Float[Tensor, "rows width"]:
    """Random directions at right angles to each other."""
    square = torch.randn(width, width, generator=generator, dtype=torch.float64)
    return torch.linalg.qr(square).Q[:rows].float().contiguous()


def columns(W: Float[Tensor, "d_out d_in"]) -> Float[Tensor, "d_in d_out d_in"]:
    """One mechanism for each input of a matrix: its column."""
    return torch.einsum("oi,ki->koi", W, torch.eye(W.shape[1]))


def rows(W: Float[Tensor, "d_out d_in"]) -> Float[Tensor, "d_out d_out d_in"]:
    """One mechanism for each output of a matrix: its row."""
    return torch.einsum("oi,ko->koi", W, torch.eye(W.shape[0]))


Fit = Callable[[int], nn.Module]
"""Seed -> a trained network."""
Check = Callable[[nn.Module], tuple[bool, dict[str, float]]]


def trained(
    name: str, recipe: Mapping[str, Any], fit: Fit, check: Check, tries: int = 8
) -> tuple[nn.Module, bool, dict[str, float]]:
    """(network, whether it is good, numbers): trained with seed after seed until one is good.

    Weights are kept under a digest of the recipe. If no seed is good, the last one is what there is.
    """
    key = sha256(json.dumps([RECIPES, name, recipe], sort_keys=True).encode())[:16]
    path = cache_directory() / f"{name}-{key}.safetensors"
    with one_thread():
        if path.exists():
            with suppress(CheckpointError, RuntimeError, KeyError):  # what is damaged is made again
                tensors, meta = load_sealed(path)
                model = fit(-1)
                model.load_state_dict(tensors)
                model.eval().requires_grad_(False)
                if fingerprint(model) == meta["sha256"]:
                    return model, *check(model)
        numbers: dict[str, float] = {}
        for seed in range(tries):
            model = fit(seed).eval().requires_grad_(False)
            good, numbers = check(model)
            if good:
                break
        else:
            raise TargetError(f"None of {tries} networks trained for {name} is what it should be: {numbers}.")
    with suppress(OSError):  # without a cache it is trained every time
        path.parent.mkdir(parents=True, exist_ok=True)
        save_sealed(path, model.state_dict(), {"sha256": fingerprint(model), "seed": seed})
    return model, good, numbers


def descend(
    model: nn.Module,
    loss: Callable[[nn.Module, torch.Generator], Tensor],
    *,
    seed: int,
    steps: int,
    lr: float,
    weight_decay: float = 0.01,
) -> nn.Module:
    """Train with AdamW and a learning rate that falls as half a cosine; with seed -1, not at all."""
    if seed < 0:
        return model
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=weight_decay, fused=True)
    with torch.enable_grad():
        for step in range(steps):
            for group in optimizer.param_groups:
                group["lr"] = lr * (1 + math.cos(math.pi * step / steps)) / 2
            optimizer.zero_grad()
            loss(model, generator_for(seed, "collection/data", step)).backward()
            optimizer.step()
    return model


def initialise(model: nn.Module, seed: int) -> None:
    """Gaussian matrices that keep the scale of activations, and biases of 0."""
    generator = generator_for(max(seed, 0), "collection/init")
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn(p.shape, generator=generator) / p.shape[-1] ** 0.5 if p.dim() > 1 else 0 * p)


@contextmanager
def one_thread() -> Iterator[None]:
    """The last bits of a sum depend on the number of threads: networks are made with one."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def cache_directory() -> Path:
    """Where trained weights are kept: `RANKONE_CACHE_DIR`, or `rankone` where the system keeps caches."""
    if os.environ.get("RANKONE_CACHE_DIR"):
        return Path(os.environ["RANKONE_CACHE_DIR"]) / "collection"
    if os.name == "nt" and os.environ.get("LOCALAPPDATA"):
        return Path(os.environ["LOCALAPPDATA"]) / "rankone" / "collection"
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "rankone" / "collection"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "rankone" / "collection"


def inputs_tensor(batch: Batch) -> Tensor:
    """The one tensor that a batch of this collection consists of."""
    inputs = getattr(batch, "inputs", batch)
    assert isinstance(inputs, Tensor)
    return inputs
