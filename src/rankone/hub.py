"""Language models by name: a directory, a GGUF file, a llama2.c checkpoint, or a name on the Hugging
Face Hub.

Needs the extra `text` (transformers). Weights are read from safetensors or GGUF and never unpickled,
and no code that comes with a model is run.
"""

import os
from pathlib import Path
from typing import Any

from torch import nn

from rankone.errors import ConfigError, TargetError


def _transformers() -> Any:
    try:
        import transformers
    except ImportError:
        raise ConfigError(
            "Language models by name need transformers. Install it with: pip install 'rankone[text]'"
        ) from None
    return transformers


def load_model(name: str | Path) -> nn.Module:
    """A causal language model in eval mode: a directory, a .gguf file, or a name on the Hub."""
    if str(name).endswith((".bin", ".data")):
        from rankone.llama2c import load_llama2c

        return load_llama2c(name).model
    transformers = _transformers()
    where, options = _place(name)
    given = {} if options else {"use_safetensors": True}
    try:
        model = transformers.AutoModelForCausalLM.from_pretrained(
            where, trust_remote_code=False, **options, **given
        )
    except (OSError, ValueError, ImportError) as error:
        raise _cannot(name, "model", error) from error
    return model.eval()


def load_tokenizer(name: str | Path) -> Any:
    """The tokenizer of a language model."""
    if str(name).endswith((".bin", ".data")):
        from rankone.llama2c import load_llama2c

        return load_llama2c(name).tokenizer
    transformers = _transformers()
    where, options = _place(name)
    try:
        return transformers.AutoTokenizer.from_pretrained(where, trust_remote_code=False, **options)
    except (OSError, ValueError, ImportError) as error:
        raise _cannot(name, "tokenizer", error) from error


def _place(name: str | Path) -> tuple[str, dict[str, str]]:
    """Where transformers finds a model, and what else it is told."""
    path = Path(name)
    if path.suffix == ".gguf":
        if not path.is_file():
            raise TargetError(f"There is no file {path}.")
        return str(path.parent), {"gguf_file": path.name}
    if path.exists() and not path.is_dir():
        raise TargetError(
            f"{path} is a file; expected a directory as save_pretrained makes one, a .gguf file, a llama2.c "
            "checkpoint (.bin), or a name on the Hugging Face Hub."
        )
    looks_local = path.is_absolute() or str(name).startswith((".", "~")) or str(name).count("/") > 1
    if looks_local and not path.is_dir():
        raise TargetError(f"There is no directory {path}.")
    return str(name), {}


def _cannot(name: str | Path, what: str, error: Exception) -> TargetError:
    path, first = Path(name), str(error).strip().partition("\n")[0]
    if path.is_dir():
        has = ", ".join(sorted(os.listdir(path))[:8]) or "nothing"
        hint = f"The directory holds {has}; it needs config.json with a known model_type, and safetensors."
    elif path.suffix == ".gguf":
        hint = "Reading GGUF needs the package gguf (pip install gguf) and an architecture that transformers knows."
    else:
        hint = (
            "It is no directory here, so it was looked for on the Hugging Face Hub. Check the name and the "
            "network, or pass the directory of a model that you downloaded."
        )
    return TargetError(f"The {what} {str(name)!r} cannot be loaded: {first} {hint}")
