"""The networks that rankone knows by name: the paper's toy models, and the contract for any other.

base.py says what a family of targets is; each family is one file. A pinned target is a few (or, for
residual MLPs, a few hundred) kB of safetensors inside the package, so that everyone decomposes the
same network.
"""

from rankone.targets.base import (
    TARGETS,
    Target,
    TrainableTarget,
    pinned_names,
    register_target,
    save_target,
    train_until_good,
    trainable,
)
from rankone.targets.induction import InductionTarget
from rankone.targets.own import OwnTarget
from rankone.targets.resid_mlp import ResidualTarget
from rankone.targets.tms import TMSTarget
from rankone.targets.toy_language import ToyLanguageTarget

__all__ = [
    "TARGETS",
    "InductionTarget",
    "OwnTarget",
    "ResidualTarget",
    "TMSTarget",
    "Target",
    "ToyLanguageTarget",
    "TrainableTarget",
    "pinned_names",
    "register_target",
    "save_target",
    "train_until_good",
    "trainable",
]
