"""The exact state of training on disk: what is saved, and when a saved state may be resumed.

A checkpoint is parameters, the optimiser's moments and a step number; everything random is a
function of the step. A run resumes only as itself: same target, layers, settings, data and kernels,
or it is refused by name. Two things are allowed besides: a complete run may be lengthened (more
`steps`; it then goes on in the schedule of the longer run), and a new run may start from the
parameters of an earlier one.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from rankone.config import DecompositionConfig
from rankone.errors import CheckpointError
from rankone.files import RunDirectory, load_sealed, sealed_bytes
from rankone.model import DecomposedModel
from rankone.settings import differences, validated

PREFIX = "checkpoints/step-"


def checkpoint_names(directory: RunDirectory) -> list[str]:
    """The checkpoints of a run, oldest first."""
    return directory.names(PREFIX)


def save_checkpoint(
    directory: RunDirectory, tensors: Mapping[str, Tensor], meta: Mapping[str, Any], keep: int
) -> str:
    """Write a checkpoint, and only when it is safely on disk remove all but the newest `keep`."""
    name = f"{PREFIX}{meta['step']:09d}.safetensors"
    directory.write(name, sealed_bytes(tensors, meta))
    for old in checkpoint_names(directory)[:-keep]:
        directory.remove(old)
    return name


def load_newest(directory: RunDirectory) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The content of the newest checkpoint."""
    names = checkpoint_names(directory)
    try:
        return directory.read_sealed(names[-1])
    except CheckpointError as error:
        earlier = f"go on from {names[-2]}" if len(names) > 1 else "start again from step 0"
        raise CheckpointError(f"{error} Delete that file to {earlier}.") from None


def load_parameters(model: DecomposedModel, tensors: Mapping[str, Tensor]) -> None:
    """Set a model's parameters to those of a checkpoint."""
    with torch.no_grad():
        for name, tensor in model.named_tensors().items():
            tensor.copy_(tensors[f"parameter/{name}"])


def earlier_parameters(directory: RunDirectory, artifact: str, target: str) -> dict[str, Tensor]:
    """The parameters of an earlier run of the same network, finished or not, to start another from.

    `artifact` names the sealed file of a finished one, `target` is the network's fingerprint.
    """
    finished = directory.sub(artifact)
    if finished.is_file():
        tensors, info = load_sealed(finished)
        made_from = info["target"]["sha256"]
    elif checkpoint_names(directory):
        tensors, info = load_newest(directory)
        tensors = {k.removeprefix("parameter/"): t for k, t in tensors.items() if k.startswith("parameter/")}
        made_from = info["target"]
    else:
        raise CheckpointError(f"{directory.path} has nothing to start from: no checkpoint, no decomposition.")
    if made_from != target:
        raise CheckpointError(
            f"{directory.path} is a run of another network (its weights differ), so nothing can start from it."
        )
    return tensors


def load_earlier(model: DecomposedModel, earlier: Mapping[str, Tensor]) -> None:
    """Set what an earlier decomposition knows of this model's layers: factors, and importance functions
    of the same shape. Layers that it does not know stay as they are."""
    named = model.named_tensors()
    found = False
    with torch.no_grad():
        for name, layer in model.layers.items():
            factors = [key for key in (f"{name}.U", f"{name}.V") if key in named]
            known = [key for key in factors if key in earlier]
            for key in known:
                if earlier[key].shape != named[key].shape:
                    raise CheckpointError(
                        f"start_from has {key} of shape {tuple(earlier[key].shape)}, and layer {name!r} with "
                        f"C = {layer.C} needs {tuple(named[key].shape)}. Choose the same C as before."
                    )
            found = found or bool(known)
        if not found:
            raise CheckpointError(
                f"start_from has none of the layers {', '.join(model.layers)}: there is nothing to start from."
            )
        for key, tensor in named.items():
            if key in earlier and earlier[key].shape == tensor.shape:
                tensor.copy_(earlier[key])


def lengthens(meta: Mapping[str, Any], config: DecompositionConfig) -> bool:
    """Whether a run that had come to its end goes on to a later one."""
    return meta["step"] == meta["config"]["steps"] < config.steps


def refuse_other_layers(model: DecomposedModel, name: str, meta: Mapping[str, Any]) -> None:
    """Raise if a checkpoint was written for other layers than this model's, or another C."""
    layers = {layer_name: layer.C for layer_name, layer in model.layers.items()}
    if meta["C"] != layers:
        changed = differences(meta["C"], layers)
        raise CheckpointError(
            f"{name} was written for other layers: C of {'; '.join(changed)}. Choose the same layers again."
        )


def refuse_other_run(
    name: str, meta: Mapping[str, Any], identity: Mapping[str, Any], config: DecompositionConfig
) -> None:
    """Raise if a checkpoint belongs to another run than the one that wants to resume it."""
    if meta["target"] != identity["target"]:
        raise CheckpointError(
            f"{name} belongs to another target network (its weights differ); nothing was loaded."
        )
    if set(meta["config"]) - set(type(config).model_fields):
        raise CheckpointError(
            f"{name} is of a run of the command line. Resume it with: rankone run DIRECTORY --resume"
        )
    # What older versions did not know has its default now; how a run is described does not matter.
    earlier = validated(type(config), meta["config"], source=name)
    before, now = (c.model_dump(mode="json", exclude=set(c.descriptive)) for c in (earlier, config))
    if lengthens(meta, config):
        before["steps"] = now["steps"]
    changed = differences(
        before | {key: meta[key] for key in ("divergence", "output")},
        now | {key: identity[key] for key in ("divergence", "output")},
    )
    if changed:
        raise CheckpointError(
            f"{name} was written with other settings, so it cannot be resumed with these: "
            f"{'; '.join(changed)}. "
            "Resume with the run's own settings, or start a new run in another directory"
            + (" (a run that is complete can be lengthened)." if before["steps"] < now["steps"] else ".")
        )
    other = meta["first_batch"] != identity["first_batch"]
    if other or identity["last_batch"] not in (None, meta["last_batch"]):
        raise CheckpointError(
            f"{name} was written by a run on other data: its batches are not the same. Resume with "
            "the data of the run, or start a new run in another directory."
        )
    if meta["kernels"] != identity["kernels"]:
        raise CheckpointError(
            f"{name} was written {_with(meta['kernels'])}, and this process runs "
            f"{_with(identity['kernels'])}: the result would be of neither. Resume in an environment "
            "like the first, or start again in another directory."
        )


def _with(kernels: str | None) -> str:
    return "without compiled kernels" if kernels is None else f"with kernels that compute {kernels[:12]}"


def described(thing: Any) -> Any:
    """A function by its name, anything else as it is: enough to notice when a run resumes with another.

    Without its module: the same function may be `__main__`'s today and imported tomorrow.
    """
    return getattr(thing, "__qualname__", type(thing).__qualname__) if callable(thing) else thing
