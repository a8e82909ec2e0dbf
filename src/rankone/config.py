"""What a decomposition can be told: everything but the model, its data and the choice of layers.

Every field has a docstring, which feeds `rankone config explain`. How settings are read from YAML,
overridden and explained is in settings.py; `runs/config.py` adds target, data and layers.
"""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, Field, model_validator

from rankone import context  # noqa: F401 (its importance functions are known by name)
from rankone.components import DATA_INITS, INITS
from rankone.data import Corpus
from rankone.errors import ConfigError, near_matches, shown
from rankone.importance import Option, check_importance
from rankone.losses import DIVERGENCES, LOSSES, Loss
from rankone.masks import MaskSettings
from rankone.naming import Matrices
from rankone.settings import ByName, Count, CountOrZero, Positive, Seed, Settings, validated

LayerName = Annotated[str, Field(min_length=1, max_length=1000)]
"""The name of a layer, or a pattern of names."""
Layers = Annotated[
    dict[LayerName, Annotated[int, Field(ge=1, le=10**6)]], Field(min_length=1, max_length=10_000)
]
"""Name patterns of the layers to decompose, with the number C of subcomponents of each."""


class ImportanceSettings(Settings):
    """Which causal importance function every layer gets."""

    kind: str = "mlp"
    """`mlp` (the paper's, one small MLP per subcomponent), `linear`, `layer_mlp` (one for a layer's inner
    activations), `input_mlp` (one for a layer's input), `transformer` (one for all layers and positions),
    or one that you registered."""
    options: dict[str, Option] = {}
    """Options of that function, such as `d_gate` (mlp), `width` (layer_mlp, input_mlp, transformer), or
    `blocks`, `heads` and `causal` (transformer)."""

    @model_validator(mode="after")
    def _known(self) -> "ImportanceSettings":
        check_importance(self.kind, self.options)
        return self


class OptimizerSettings(Settings):
    """Adam without weight decay, one learning rate for factors and importance functions."""

    lr: Positive = 1e-3
    """The largest learning rate."""
    schedule: Literal["constant", "linear", "half_cosine", "quarter_cosine"] = "constant"
    """How it falls. `half_cosine` is the usual (1 + cos(pi t)) / 2; `quarter_cosine`, cos(pi t / 2),
    stays high for longer and is what the paper's released code calls cosine; `linear` falls to 0 in a
    straight line."""
    warmup_steps: CountOrZero = 0
    """Steps over which the learning rate first rises linearly from 0."""
    grad_clip: Positive | None = None
    """Largest norm of the whole gradient; null for no clipping."""


class FaithfulnessWarmupSettings(Settings):
    """An optional phase before training in which U and V alone learn to sum to the matrices."""

    steps: CountOrZero = 0
    """Length of the phase; 0 for none."""
    lr: Positive = 1e-2
    """Its learning rate."""


def paper_losses() -> dict[str, Loss]:
    """The four losses of the paper with their defaults."""
    names = ("faithfulness", "stochastic_recon", "stochastic_recon_layerwise", "importance_minimality")
    return {name: LOSSES[name].model_validate({}) for name in names}


def _known_init(name: str) -> str:
    known = [*INITS, *DATA_INITS]
    if name not in known:
        raise ConfigError(f"Unknown initialisation {shown(name)}. {near_matches(name, known)}")
    return name


class DecompositionConfig(Settings):
    """How to decompose a model: everything but the model, its data and the choice of layers."""

    descriptive: ClassVar[tuple[str, ...]] = ()
    """Settings that say what a run is, not what it does."""

    seed: Seed = 0
    """Decides initialisation, data and masks. Same seed, same machine, same result."""
    steps: Count = 40_000
    """Training steps."""
    divergence: Annotated[str, AfterValidator(DIVERGENCES.known)] = "mse"
    """How outputs are compared: `mse` or `kl`. From Python, pass any function as `divergence=`."""
    losses: Annotated[dict[str, Loss], ByName(LOSSES)] = Field(default_factory=paper_losses)
    """The terms of the training loss, by name. The default is the paper's four; in a config file or a
    DecompositionConfig, what you give replaces all of them: a loss that is not listed is not used."""
    relative: bool = False
    """Whether everything is measured against the network itself (balance.py): divergences as shares of
    what removing everything costs, faithfulness as a share of each matrix, coefficients of minimality as
    the share that all importances together cost, learning rates in units of the factors. Then the
    settings do not depend on the network's units."""
    importance: ImportanceSettings = ImportanceSettings()
    """The causal importance function."""
    masks: MaskSettings = MaskSettings()
    """How masks are made from importances and random numbers."""
    engine: Literal["fast", "exact"] = "fast"
    """`fast` interpolates the gates with compiled kernels where they apply (see fast/README.md);
    `exact` computes everything in plain torch."""
    init: Annotated[str, AfterValidator(_known_init)] = "overlap"
    """Initialisation of U and V: `overlap` (the released code's), `kaiming`, `datapoints` (what W
    does to single datapoints, no warm-up needed), or `mixed` (the same with smaller write vectors, and
    single neurons where few of them matter at a time)."""
    tied: dict[LayerName, LayerName] | None = None
    """layer: layer, for layers that share one set of subcomponents because their weights are equal or
    each other's transpose. null: those that share the memory of their weights, and C; {}: none."""
    matrices: Matrices = Matrices()
    """What cannot be seen of the network's matrices: fused layers, plain parameters, biases to decompose."""
    optimizer: OptimizerSettings = OptimizerSettings()
    """The optimiser and its schedule."""
    faithfulness_warmup: FaithfulnessWarmupSettings = FaithfulnessWarmupSettings()
    """The phase before training proper."""
    consolidate_at: tuple[Annotated[float, Field(ge=0, lt=1)], ...] = Field(default=(), max_length=100)
    """After which shares of training groups of subcomponents that are more than their rank needs are
    replaced by as many as that (consolidate.py); none in the paper."""
    sharpen_at: float = Field(default=0.9, ge=0, lt=1)
    """After which share of training raw importances are moved away from a half, once."""
    sharpen_by: float = Field(default=1.0, ge=1, le=100)
    """By which factor: what is nearly important becomes important, what hardly is becomes not, and the
    rest of training settles what is left; 1, as in the paper, leaves them as they are."""
    log_every: Count = 100
    """Steps between records in metrics.jsonl."""
    checkpoint_every: Count = 1000
    """Steps between checkpoints, where a run directory is kept."""
    keep_checkpoints: Annotated[int, Field(ge=1, le=1000)] = 2
    """How many of the newest checkpoints stay on disk."""

    @model_validator(mode="after")
    def _consistent(self) -> "DecompositionConfig":
        if self.optimizer.warmup_steps >= self.steps:
            raise ValueError(
                f"optimizer.warmup_steps is {self.optimizer.warmup_steps}, but there are only "
                f"{self.steps} steps; it must be smaller"
            )
        if not any(loss.coefficient > 0 for loss in self.losses.values()):
            raise ValueError("no loss has a coefficient above 0: there is nothing to train")
        return self


RECIPE: dict[str, Any] = {
    "relative": True,
    "steps": 6000,
    "init": "mixed",
    "consolidate_at": [0.5, 0.8],
    "sharpen_by": 3.0,
    "losses": {
        "faithfulness": {"coefficient": 10.0},
        "stochastic_recon": {"coefficient": 1.0},
        "stochastic_recon_layerwise": {"coefficient": 1.0},
        "importance_recon": {"coefficient": 1.0},
        "importance_minimality": {
            "coefficient_start": 0.1,
            "coefficient": 0.045,
            "p_start": 2.0,
            "p": 1.0,
            "saturation": 50.0,
            "hold": 0.4,
            "anneal": 0.2,
            "relax_after": 0.65,
        },
    },
    "masks": {"sigmoid": "straight_through", "delta": True, "at_zero": 0.4, "at_one": 0.4},
    "optimizer": {"lr": 6e-3, "schedule": "half_cosine"},
}
"""One recipe for any network, without units: what `decompose` uses where it is told nothing else.

Pressure is high until features have found their subcomponents, then its shape becomes steep near 0
and flat near 1, so that strays go, and last it relaxes, so that what is important rises to 1; what is
then still undecided is decided.
docs/recipe.md has what it recovers and where it fails.
"""


def over_recipe(settings: Mapping[str, Any], data: Any = None) -> DecompositionConfig:
    """The recipe with these settings laid over it: mappings are merged, everything else replaces. What
    suits the data, where that knows it, lies between the two."""
    if isinstance(data, Corpus) and isinstance(settings, Mapping):
        settings = _merged(data.settings, settings)
    laid = laid_over_recipe(settings) if isinstance(settings, Mapping) else settings
    return validated(DecompositionConfig, laid, source="config")


def laid_over_recipe(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The same as plain values, of which some may be a run's: its target, its layers."""
    return _merged(RECIPE, settings)


def _merged(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(below)
    for key, value in above.items():
        if isinstance(value, Mapping) and isinstance(merged.get(key), Mapping):
            merged[key] = _merged(merged[key], value)
        else:
            merged[key] = value
    return merged
