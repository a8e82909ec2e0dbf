"""rankone: Stochastic Parameter Decomposition.

Takes a trained network and splits its weight matrices into rank-one subcomponents, so that as few
as possible are needed on any one input. Start with `decompose`; `rankone --help` runs the paper's
experiments. What is named here is imported when it is first used.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rankone.adapters import Adapter, register_adapter
    from rankone.config import DecompositionConfig
    from rankone.corpus import sampled, text
    from rankone.data import WeightedBatch
    from rankone.decomposition import Decomposition, decompose, load
    from rankone.errors import RankoneError
    from rankone.fast.factored import FactoredLinear
    from rankone.finetune import decompose_difference
    from rankone.importance import ImportanceFunction, register_importance
    from rankone.losses import Loss, register_loss
    from rankone.model import DecomposedModel
    from rankone.runs.own import open_run as open
    from rankone.targeting import targeted

    __version__: str

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
    "decompose_difference",
    "load",
    "open",
    "register_adapter",
    "register_importance",
    "register_loss",
    "sampled",
    "targeted",
    "text",
]

_HOME = {
    "Adapter": "adapters",
    "DecomposedModel": "model",
    "Decomposition": "decomposition",
    "DecompositionConfig": "config",
    "FactoredLinear": "fast.factored",
    "ImportanceFunction": "importance",
    "Loss": "losses",
    "RankoneError": "errors",
    "WeightedBatch": "data",
    "decompose": "decomposition",
    "decompose_difference": "finetune",
    "load": "decomposition",
    "open": "runs.own",
    "register_adapter": "adapters",
    "register_importance": "importance",
    "register_loss": "losses",
    "sampled": "corpus",
    "targeted": "targeting",
    "text": "corpus",
}
_MODULES = (
    "collection", "compare", "components", "diagnose", "evaluate", "importance", "losses", "masks",
    "patching", "settings", "targets", "train", "tune",
)  # fmt: skip
"""Modules that need no import of their own: `rankone.evaluate.evaluate(result, data)`."""


def __getattr__(name: str) -> Any:
    if name in _HOME:
        value = getattr(import_module(f"rankone.{_HOME[name]}"), "open_run" if name == "open" else name)
        globals()[name] = value
        return value
    if name in _MODULES:
        return import_module(f"rankone.{name}")
    if name == "__version__":
        from importlib.metadata import version

        return version("rankone")
    raise AttributeError(f"module 'rankone' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_MODULES, "__version__"})
