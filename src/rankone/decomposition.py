"""The front door: `decompose` a model, look at the result, keep it, load it again.

An artifact is a directory with `components.safetensors` (factors, importance functions and the
history of training, with what they belong to: settings, library version, the target's fingerprint)
and `decomposition.json`, which says the latter to people. It never holds the target's weights.
"""

import json
from collections.abc import Iterable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from rankone.checkpoint import checkpoint_names, described
from rankone.config import DecompositionConfig, over_recipe
from rankone.data import Batch, Data, to_device
from rankone.errors import CheckpointError, ConfigError, LayerError
from rankone.files import RunDirectory, fingerprint, load_sealed, sealed_bytes
from rankone.masks import Mask
from rankone.metrics_log import Observer, Record, parse_metrics
from rankone.model import DecomposedModel
from rankone.patching import OutputGetter, refuse_unusable
from rankone.settings import validated
from rankone.step import Divergence
from rankone.train import Training

FORMAT = 2
COMPONENTS = "components.safetensors"
DESCRIPTION = "decomposition.json"
HISTORY = "history"
"""The entry of the sealed file that holds the metrics log, as bytes: one file changes as a whole."""


@dataclass(frozen=True)
class LayerView:
    """The subcomponents of one layer, detached, for looking at."""

    name: str
    target: Float[Tensor, "d_out d_in"]
    """The original matrix."""
    U: Float[Tensor, "d_out C"]
    """Write vectors, one column per subcomponent."""
    V: Float[Tensor, "C d_in"]
    """Read vectors, one row per subcomponent."""

    @property
    def C(self) -> int:
        return self.U.shape[1]

    def matrix(self, c: int) -> Float[Tensor, "d_out d_in"]:
        """Subcomponent c as a rank-one matrix."""
        return torch.outer(self.U[:, c], self.V[c])

    def sum(self) -> Float[Tensor, "d_out d_in"]:
        """All subcomponents together: close to the original matrix.

        Added up in double precision, so that the number of threads does not show.
        """
        return (self.U.double() @ self.V.double()).to(self.U.dtype)

    def norms(self) -> Float[Tensor, " C"]:
        """The size (Frobenius norm) of every subcomponent."""
        return self.U.norm(dim=0) * self.V.norm(dim=1)


class AblatedModel(nn.Module):
    """The target with chosen layers reduced to chosen subcomponents; call it exactly like the target.

    It computes no gradients: it is for looking, not for training.
    """

    _model: DecomposedModel

    def __init__(self, model: DecomposedModel, keep: Mapping[str, Float[Tensor, " C"]]) -> None:
        super().__init__()
        object.__setattr__(self, "_model", model)
        self._masks = {name: Mask(kept) for name, kept in keep.items()}

    @torch.no_grad()
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._model.under(self._masks, lambda: self._model.target(*args, **kwargs))


@dataclass
class Decomposition:
    """A decomposed model and the story of its training."""

    model: DecomposedModel
    config: DecompositionConfig
    history: list[Record] = field(default_factory=list)
    seconds: float = 0.0
    divergence: Divergence | None = None
    """The function that outputs were compared with, where it was not one named in the config."""

    @property
    def layers(self) -> list[str]:
        """Names of the decomposed layers, in the target's order."""
        return list(self.model.layers)

    def importances(self, batch: Batch) -> dict[str, Tensor]:
        """Causal importances in [0, 1] per datapoint: layer name -> `[*lead, C]`."""
        return self.model.importances(to_device(batch, self.model.device))

    def components(self, layer: str) -> LayerView:
        """The subcomponents of one layer, next to its original matrix."""
        decomposed = self.model.layer(layer)
        parts = decomposed.subcomponents
        return LayerView(
            layer, decomposed.matrix().clone(), parts.U.detach().clone(), parts.V.detach().clone()
        )

    def ablated(self, keep: Mapping[str, Iterable[int] | Tensor]) -> AblatedModel:
        """A runnable model in which every layer named in `keep` consists of the listed
        subcomponents only.

        Layers that are not named keep their original matrix. Biases stay.
        """
        return AblatedModel(self.model, {name: self._kept(name, chosen) for name, chosen in keep.items()})

    def save(self, path: str | Path) -> Path:
        """Write the artifact into a new directory, or over an earlier artifact."""
        directory = RunDirectory.claim(path)
        known = DecompositionConfig.model_fields
        info = {
            "format": FORMAT,
            "rankone": version("rankone"),
            "torch": torch.__version__,
            "target": {"class": type(self.model.target).__name__, "sha256": fingerprint(self.model.target)},
            "output": _named(self.model.output, self.model.output),
            "divergence": _named(self.divergence, self.config.divergence),
            "layers": {
                name: {
                    "C": layer.C,
                    "shape": list(layer.matrix().shape),
                    "module": type(layer.adapter.module).__name__,
                    "tied_to": self.model.tied.get(name),
                }
                for name, layer in self.model.layers.items()
            },
            "config": {k: v for k, v in self.config.model_dump(mode="json").items() if k in known},
        }
        history = "".join(json.dumps(record) + "\n" for record in self.history).encode()
        as_tensor = (
            torch.frombuffer(bytearray(history), dtype=torch.uint8) if history else torch.zeros(0).byte()
        )
        directory.write(COMPONENTS, sealed_bytes({**self.model.named_tensors(), HISTORY: as_tensor}, info))
        directory.write(DESCRIPTION, json.dumps(info, indent=2) + "\n")
        return directory.path

    def _kept(self, name: str, chosen: Iterable[int] | Tensor) -> Tensor:
        C = self.model.layer(name).C
        if not isinstance(chosen, Iterable):
            raise LayerError(
                f"keep[{name!r}] is {chosen!r}; expected the indices of subcomponents, such as [{chosen!r}]."
            )
        listed = chosen if isinstance(chosen, Tensor) else [*chosen]
        index = torch.as_tensor(listed) if len(listed) else torch.zeros(0, dtype=torch.long)
        if index.is_floating_point():
            raise LayerError(
                f"keep[{name!r}] holds numbers of type {index.dtype}; expected indices or a boolean "
                "choice, such as importances > 0.5."
            )
        if index.dtype == torch.bool:
            if index.shape != (C,):
                raise LayerError(
                    f"keep[{name!r}] has shape {tuple(index.shape)}; a boolean choice needs C = {C} entries."
                )
            kept = index
        else:
            wrong = [int(i) for i in index.flatten() if not 0 <= int(i) < C]
            if wrong:
                raise LayerError(
                    f"keep[{name!r}] names subcomponent {wrong[0]}, but the layer has "
                    f"subcomponents 0 to {C - 1}."
                )
            kept = torch.zeros(C, dtype=torch.bool)
            kept[index.long()] = True
        return kept.to(self.model.device, self.model.layer(name).subcomponents.U.dtype)


def decompose(
    model: nn.Module,
    data: Data,
    layers: Mapping[str, int],
    config: DecompositionConfig | Mapping[str, Any] | None = None,
    *,
    output: OutputGetter = None,
    divergence: Divergence | None = None,
    out: str | Path | None = None,
    resume: bool = False,
    observer: Observer | None = None,
) -> Decomposition:
    """Decompose the weight matrices of a trained model into rank-one subcomponents.

    model       any nn.Module, in eval mode; it is not altered
    data        an iterable of batches, or a function that draws a batch from a torch.Generator
    layers      name patterns of the layers to decompose -> number of subcomponents C
    config      what should differ from the recipe (config.RECIPE), as a mapping; or a whole
                DecompositionConfig, which is taken as it is
    output      how to get the tensor to compare from what the model returns: name, index, function
    divergence  a function (masked output, target output) -> number per datapoint, instead of
                config.divergence
    out         a directory for metrics.jsonl, checkpoints/ and decomposition/; without it nothing is
                written
    resume      go on from the newest checkpoint in `out`
    observer    called with a Progress at every log step
    """
    if not isinstance(layers, Mapping):
        raise ConfigError(
            f"layers is a {type(layers).__name__}; expected a mapping from layer name patterns to C, "
            "such as {'mlp.*': 100}."
        )
    if not isinstance(config, DecompositionConfig):
        config = over_recipe(config or {})
    if divergence is not None and not callable(divergence):
        raise ConfigError(f"divergence is {divergence!r}; pass a function, or name one in the config.")
    if resume and out is None:
        raise ConfigError("resume=True needs out=, the directory of the run to resume.")
    decomposed = build(model, layers, config, output)
    directory = None if out is None else RunDirectory.claim(out)
    with nullcontext() if directory is None else directory.lock():
        if (
            directory is not None
            and not resume
            and (directory.sub("decomposition").exists() or checkpoint_names(directory))
        ):
            raise CheckpointError(
                f"{directory.path} already holds a run. Pass resume=True to go on with it, or "
                "choose another out=."
            )
        return train(
            decomposed,
            data,
            config,
            divergence=divergence,
            directory=directory,
            resume=resume,
            observer=observer,
        )


def train(
    decomposed: DecomposedModel,
    data: Data,
    config: DecompositionConfig,
    *,
    divergence: Divergence | None = None,
    directory: RunDirectory | None = None,
    resume: bool = False,
    observer: Observer | None = None,
) -> Decomposition:
    """Train a freshly built model; in a run directory, which must be locked, also keep all of it."""
    with torch.inference_mode(False), torch.enable_grad():
        training = Training(
            decomposed, data, config, divergence=divergence, directory=directory, observer=observer
        )
        training.run(resume=resume)
    result = Decomposition(decomposed, config, training.history, training.seconds, divergence)
    if directory is not None:
        result.save(directory.sub("decomposition"))
    return result


def load(
    path: str | Path, model: nn.Module, *, output: OutputGetter = None, divergence: Divergence | None = None
) -> Decomposition:
    """Load a saved decomposition for the very network it was made from.

    If it was made with functions of your own as `output=` or `divergence=`, pass them again.
    """
    path = Path(path)
    refuse_unusable(model)
    if (path / "manifest.json").exists():  # it is not needed, but where it is, it knows of changes
        directory = RunDirectory.open(path)
        directory.read(DESCRIPTION)
        tensors, info = directory.read_sealed(COMPONENTS)
    else:
        tensors, info = load_sealed(path / COMPONENTS)
    if info.get("format") != FORMAT:
        raise CheckpointError(
            f"{path} has format {info.get('format')!r}; this version of rankone ({version('rankone')}) "
            f"reads format {FORMAT}."
        )
    if fingerprint(model) != info["target"]["sha256"]:
        raise CheckpointError(
            f"{path} was made from another network: a {info['target']['class']} whose weights have "
            f"SHA-256 {info['target']['sha256'][:12]}..., but this {type(model).__name__} has "
            f"{fingerprint(model)[:12]}... Load the exact weights that were decomposed."
        )
    for name, given in (("output", output), ("divergence", divergence)):
        if given is None and isinstance(info[name], dict):
            raise ConfigError(
                f"{path} was made with the function {info[name]['function']} as {name}=; pass it to load()."
            )
    config = validated(DecompositionConfig, info["config"], source=str(path))
    getter = output if output is not None else info["output"]
    decomposed = build(model, {name: layer["C"] for name, layer in info["layers"].items()}, config, getter)
    with torch.no_grad():
        for name, tensor in decomposed.named_tensors().items():
            if name not in tensors or tensors[name].shape != tensor.shape:
                raise CheckpointError(
                    f"{path} has no {name} of shape {tuple(tensor.shape)}: a class that it was "
                    "made with has changed."
                )
            tensor.copy_(tensors[name])
    history = parse_metrics(tensors[HISTORY].numpy().tobytes(), str(path))
    return Decomposition(decomposed, config, history, divergence=divergence)


def build(
    model: nn.Module, layers: Mapping[str, int], config: DecompositionConfig, output: OutputGetter
) -> DecomposedModel:
    """A fresh DecomposedModel as the settings say."""
    with torch.inference_mode(False):
        return DecomposedModel(
            model,
            layers,
            importance=config.importance.kind,
            importance_options=config.importance.options,
            init=config.init,
            tied=config.tied,
            output=output,
            seed=config.seed,
        )


def _named(function: Any, otherwise: Any) -> Any:
    """A function as JSON can hold it, by its name; anything else as it is."""
    return {"function": described(function)} if callable(function) else otherwise
