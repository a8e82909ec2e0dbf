"""What a target is to a run: a trained network, its data, and whatever else is known about it.

A family of targets is one class of settings in one file, registered under its `kind`. It must say
how to `load` the network and what its `data` is; everything else (a probe, the known truth, a check,
figures of its own) is optional, and a run makes use of what there is.

    @register_target("mine")
    class MyTarget(Target):
        kind: str = "mine"
        width: int = 8
        def load(self): ...
        def data(self, batch_size): ...
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from importlib.resources import files
from pathlib import Path
from typing import Any, ClassVar

from torch import Tensor, nn

from rankone.data import Data
from rankone.decomposition import Decomposition
from rankone.errors import TargetError, near_matches
from rankone.files import fingerprint, load_sealed, save_sealed
from rankone.metrics import Check, Pattern
from rankone.patching import OutputGetter
from rankone.report.canvas import Picture
from rankone.settings import Registry, Settings
from rankone.step import Divergence


class Target(Settings, ABC):
    """A network to decompose: the settings of one family."""

    kind: str
    """The family of networks."""

    output: ClassVar[OutputGetter] = None
    """How to get the tensor to compare from what the network returns."""
    divergence: ClassVar[Divergence | None] = None
    """A function to compare outputs with, where it is not one that a config can name."""
    similarity_of: ClassVar[str | None] = None
    """The matrix whose columns MMCS and ML2R are about, where columns are mechanisms."""

    @abstractmethod
    def load(self) -> nn.Module:
        """The trained network, verified, in eval mode."""

    @abstractmethod
    def data(self, batch_size: int) -> Data:
        """What it is decomposed on: a sampler, or an iterable of batches."""

    @property
    def again(self) -> str:
        """What must be added to a command that goes on with a run of this target."""
        return ""

    def at_hand(self) -> bool:
        """Whether the network can be loaded here and now."""
        return True

    @property
    def begun_in_python(self) -> bool:
        """Whether a run of this target can only be resumed from Python."""
        return False

    def has_data(self) -> bool:
        """Whether there is data: a network that a user handed over may have come alone."""
        return True

    probe_in_words: ClassVar[str] = "The network is given one row of its probe at a time"
    """What happens on the probe, as the beginning of a sentence in the report."""

    def probe(self) -> Tensor | None:
        """Inputs on which importances show whether a known mechanism was found, one row each."""
        return None

    def truth(self) -> dict[str, tuple[Pattern, int]]:
        """The pattern of importances that each layer must show on the probe, where it is known.

        `("identity", n)`: each of the n rows has a subcomponent of its own; `("dense", k)`: k
        subcomponents serve many rows each.
        """
        return {}

    def check(self, model: nn.Module) -> tuple[bool, dict[str, float]]:
        """Whether a trained network is a good target, and the numbers that decide it."""
        return True, {}

    def details(self, result: Decomposition, checks: Mapping[str, Check]) -> dict[str, Any]:
        """What is worth knowing about a decomposition besides its recovery, as plain values."""
        return {}

    def figure_data(self, result: Decomposition) -> dict[str, Tensor]:
        """Matrices that this family's own figures are drawn from; kept with a kept run."""
        return {}

    def figures(self, figure_data: Mapping[str, Tensor], details: Mapping[str, Any]) -> list[Picture]:
        """This family's own figures, for the report and for the paper."""
        return []


TARGETS: Registry[type[Target]] = Registry("kind of target")
"""Every family that an experiment can name."""
register_target = TARGETS.register

_PINNED = Path(str(files("rankone.targets") / "pinned"))


def pinned_names() -> list[str]:
    return sorted(path.stem for path in _PINNED.glob("*.safetensors"))


class TrainableTarget(Target):
    """A target that rankone trains itself; its weights are pinned in the package, or in a file."""

    weights: str = ""
    """The trained weights: the name of a pinned target, or the path of a file by train-target."""
    sha256: str | None = None
    """The fingerprint that the loaded weights must have; null to take them as they are."""

    @abstractmethod
    def build(self) -> nn.Module:
        """An untrained network of this kind."""

    @abstractmethod
    def train(self, seed: int) -> tuple[nn.Module, float]:
        """Train a fresh network; also return its mean loss over the last hundredth of training."""

    @property
    def first_seed(self) -> int:
        """The seed that training tries first."""
        return 0

    def load(self) -> nn.Module:
        pinned = self.weights in pinned_names()
        path = _PINNED / f"{self.weights}.safetensors" if pinned else Path(self.weights)
        if not self.weights or not path.is_file():
            raise TargetError(
                f"target.weights is {self.weights!r}: neither a pinned target nor a file. "
                f"{near_matches(self.weights, pinned_names())} Or train one with `rankone "
                "train-target`."
            )
        tensors, _ = load_sealed(path)
        model = self.build()
        expected, actual = (
            {name: tuple(t.shape) for name, t in state.items()} for state in (model.state_dict(), tensors)
        )
        if expected != actual:
            raise TargetError(
                f"{path.name} holds {actual}, but the settings describe a network with {expected}."
            )
        model.load_state_dict(tensors)
        if self.sha256 not in (None, fingerprint(model)):
            raise TargetError(
                f"The target in {path.name} has SHA-256 {fingerprint(model)}, but the config pins "
                f"{self.sha256}. Use the pinned weights, or set target.sha256 to the new fingerprint if "
                "the change is intended."
            )
        return model.eval()


def trainable(target: Target) -> TrainableTarget:
    """The target, if it is one that rankone can train."""
    if not isinstance(target, TrainableTarget):
        raise TargetError(
            f"Targets of the kind {target.kind!r} come trained; there is no recipe to train one."
        )
    return target


def save_target(path: Path, model: nn.Module, target: Target, seed: int) -> str:
    """Write a trained target; return its fingerprint."""
    save_sealed(path, model.state_dict(), {"settings": target.model_dump(mode="json"), "seed": seed})
    return fingerprint(model)


def train_until_good(
    target: TrainableTarget, seed: int, tries: int = 10
) -> Iterator[tuple[int, nn.Module, float, bool, dict[str, float]]]:
    """Train with seed, seed + 1, ... and yield (seed, model, loss, good, numbers) until one is good."""
    for attempt in range(seed, seed + tries):
        model, loss = target.train(attempt)
        good, numbers = target.check(model)
        yield attempt, model, loss, good, numbers
        if good:
            return
    raise TargetError(
        f"None of the {tries} networks trained with seeds {seed} to {seed + tries - 1} passed the check "
        "of a good target. Try another --seed, or look at target.training."
    )
