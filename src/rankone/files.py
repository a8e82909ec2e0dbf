"""Files that survive being killed: atomic writes, sealed tensor files, and the fingerprint of a target.

A *sealed* file is a safetensors file whose metadata holds a digest over every tensor and every other metadata entry. A
file that was cut short or edited fails its seal and is refused by name. Nothing here pickles or unpickles.
"""

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from rankone.errors import CheckpointError

_KEY = "rankone"


def write_atomic(path: Path, content: bytes | str) -> None:
    """Write a file so that at every moment either the old or the new content is there, whole."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with open(temporary, "wb") as file:
        file.write(content.encode() if isinstance(content, str) else content)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
    if os.name == "posix":  # make the rename itself durable
        directory = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)


def remove_leftovers(directory: Path) -> None:
    """Delete the temporary files of writes that were killed half-way."""
    for path in directory.rglob(".*.tmp"):
        path.unlink(missing_ok=True)


def write_json(path: Path, value: Any) -> None:
    write_atomic(path, json.dumps(value, indent=2, ensure_ascii=False) + "\n")


def read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text())
    except FileNotFoundError:
        raise CheckpointError(f"There is no file {path}.") from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{path} is not valid JSON ({error}); it may have been cut short or edited.") from None


def save_sealed(path: Path, tensors: Mapping[str, Tensor], meta: Mapping[str, Any]) -> None:
    """Write tensors and metadata as one sealed safetensors file, atomically."""
    plain = {name: t.detach().cpu().contiguous() for name, t in tensors.items()}
    # One metadata entry, because safetensors writes several in any order: equal content must be equal bytes.
    sealed = json.dumps({"meta": meta, "seal": _seal(plain, meta)}, sort_keys=True)
    write_atomic(path, safetensors.torch.save(plain, {_KEY: sealed}))


def load_sealed(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Read a sealed file, or refuse it."""
    if not path.is_file():
        raise CheckpointError(f"There is no file {path}.")
    try:
        with safetensors.safe_open(path, framework="pt") as file:
            header = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
    except (SafetensorError, ValueError, OSError) as error:
        raise CheckpointError(
            f"{path} cannot be read ({error}); it was cut short or damaged and is not loaded."
        ) from None
    try:
        sealed = json.loads(header[_KEY])
        meta, seal = sealed["meta"], sealed["seal"]
    except (KeyError, TypeError, json.JSONDecodeError):
        raise CheckpointError(f"{path} was not written by rankone (it has no seal) and is not loaded.") from None
    if seal != _seal(tensors, meta):
        raise CheckpointError(f"{path} does not match its seal: it was changed after it was written and is not loaded.")
    return tensors, meta


def fingerprint(module: nn.Module) -> str:
    """A SHA-256 over every parameter and buffer of a module: names, types, shapes and bytes."""
    return digest_of({name: value for name, value in module.state_dict().items() if isinstance(value, Tensor)})


def digest_of(tensors: Mapping[str, Tensor]) -> str:
    digest = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name].detach().cpu().contiguous()
        digest.update(f"{name}|{tensor.dtype}|{tuple(tensor.shape)}|".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def _seal(tensors: Mapping[str, Tensor], meta: Mapping[str, Any]) -> str:
    return hashlib.sha256(f"{digest_of(tensors)}|{json.dumps(meta, sort_keys=True)}".encode()).hexdigest()
