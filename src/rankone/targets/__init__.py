"""The paper's target networks: built, trained, checked, and pinned by fingerprint.

A pinned target is a few (or, for residual MLPs, a few hundred) kB of safetensors inside the package, so that everyone decomposes the same network. Each family
of models is one file with one settings class (`TMSTarget`, `ResidualTarget`): build, sampler, probe, ground truth, train, check, details.
"""

from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path
from typing import Annotated

from pydantic import Field
from torch import nn

from rankone.errors import TargetError, near_matches
from rankone.files import fingerprint, load_sealed, save_sealed
from rankone.targets.resid_mlp import ResidualTarget
from rankone.targets.tms import TMSTarget

TargetSettings = Annotated[TMSTarget | ResidualTarget, Field(discriminator="kind")]
"""Every family of targets an experiment can name."""

_PINNED = Path(str(files("rankone.targets") / "pinned"))


def pinned_names() -> list[str]:
    return sorted(path.stem for path in _PINNED.glob("*.safetensors"))


def load_target(settings: TargetSettings) -> nn.Module:
    """The trained target that the settings name, verified."""
    path = _PINNED / f"{settings.weights}.safetensors" if settings.weights in pinned_names() else Path(settings.weights)
    if not settings.weights or not path.is_file():
        raise TargetError(
            f"target.weights is {settings.weights!r}: neither a pinned target nor a file. "
            f"{near_matches(settings.weights, pinned_names())} Or train one with `rankone train-target`."
        )
    tensors, _ = load_sealed(path)
    model = settings.build()
    expected = {name: tuple(t.shape) for name, t in model.state_dict().items()}
    found = {name: tuple(t.shape) for name, t in tensors.items()}
    if expected != found:
        raise TargetError(f"{path.name} holds {found}, but the settings describe a network with {expected}.")
    model.load_state_dict(tensors)
    actual = fingerprint(model)
    if settings.sha256 is not None and actual != settings.sha256:
        raise TargetError(
            f"The target in {path.name} has SHA-256 {actual}, but the config pins {settings.sha256}. "
            "Use the pinned weights, or set target.sha256 to the new fingerprint if the change is intended."
        )
    return model.eval()


def save_target(path: Path, model: nn.Module, settings: TargetSettings, seed: int) -> str:
    """Write a trained target; return its fingerprint."""
    save_sealed(path, model.state_dict(), {"settings": settings.model_dump(mode="json"), "seed": seed})
    return fingerprint(model)


def train_until_good(
    settings: TargetSettings, seed: int, tries: int = 10
) -> Iterator[tuple[int, nn.Module, float, bool, dict[str, float]]]:
    """Train with seed, seed + 1, ... and yield (seed, model, loss, good, numbers) for each, until one is a good target."""
    for attempt in range(seed, seed + tries):
        model, loss = settings.train(attempt)
        good, numbers = settings.check(model)
        yield attempt, model, loss, good, numbers
        if good:
            return
    raise TargetError(
        f"None of the {tries} networks trained with seeds {seed} to {seed + tries - 1} passed the check of a good target. "
        "Try another --seed, or look at target.training."
    )
