"""rankone: Stochastic Parameter Decomposition.

Takes a trained network and splits its weight matrices into rank-one subcomponents, so that as few
as possible are needed on any one input. Start with `decompose`; `rankone --help` runs the paper's
experiments.
"""

from importlib.metadata import version

from rankone.adapters import Adapter, register_adapter
from rankone.config import DecompositionConfig
from rankone.data import WeightedBatch
from rankone.decomposition import Decomposition, decompose, load
from rankone.errors import RankoneError
from rankone.fast.factored import FactoredLinear
from rankone.importance import ImportanceFunction, register_importance
from rankone.losses import Loss, register_loss
from rankone.model import DecomposedModel

__version__ = version("rankone")

__all__ = [
    "Adapter",
    "DecomposedModel",
    "Decomposition",
    "DecompositionConfig",
    "FactoredLinear",
    "ImportanceFunction",
    "Loss",
    "RankoneError",
    "WeightedBatch",
    "decompose",
    "load",
    "register_adapter",
    "register_importance",
    "register_loss",
]
