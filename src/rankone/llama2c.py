"""Small Llamas as llama2.c stores them: one file of plain numbers, with or without the tokenizer behind.

The format (version 0): seven 32-bit whole numbers (width, hidden width of the MLP, layers, heads, key
and value heads, size of the vocabulary, negative if the unembedding has weights of its own, context),
then the weights in single precision, tensor by tensor, those of all layers together. A tokenizer is the
length of its longest token, then for each token a score, a length and its bytes. stories15M, a model of
children's stories, is distributed like that.

The result is an ordinary `LlamaForCausalLM`. llama2.c turns neighbouring pairs of a query or key,
transformers its two halves, so rows of these matrices are put in another order.
"""

import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from rankone.errors import ConfigError, TargetError

HEAD = struct.Struct("<7i")


@dataclass(frozen=True)
class Shape:
    """What the head of a checkpoint says."""

    width: int
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    vocabulary: int
    context: int

    @property
    def kv_width(self) -> int:
        return self.width // self.heads * self.kv_heads


@dataclass(frozen=True)
class ScoredTokenizer:
    """Byte-pair encoding by scores, as llama2.c does it: the best pair of neighbours is joined first."""

    vocabulary: Sequence[bytes]
    scores: Sequence[float]
    bos_token_id: int = 1
    ids: dict[bytes, int] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        # Of a byte and the letter that looks the same, the letter, which comes later, is the one in use.
        self.ids.update({token: i for i, token in enumerate(self.vocabulary)})

    def encode(self, text: str) -> list[int]:
        """The ids of a text, without a first token."""
        if not text:
            return []
        ids = [self.ids[b" "]] if b" " in self.ids else []
        for character in text:
            known = self.ids.get(character.encode())
            # What has no token is written as bytes, which begin after three special tokens.
            ids += [known] if known is not None else [3 + byte for byte in character.encode()]
        while True:
            best, place, joined = -1e10, -1, -1
            for i in range(len(ids) - 1):
                pair = self.ids.get(self.vocabulary[ids[i]] + self.vocabulary[ids[i + 1]])
                if pair is not None and self.scores[pair] > best:
                    best, place, joined = self.scores[pair], i, pair
            if place < 0:
                return ids
            ids[place : place + 2] = [joined]

    def decode(self, ids: Sequence[int]) -> str:
        """The text of some ids."""
        pieces = []
        for n, i in enumerate(ids):
            piece = self.vocabulary[i] if 0 <= i < len(self.vocabulary) else b"?"
            if 3 <= i < 259 and piece.startswith(b"<0x"):
                piece = bytes([int(piece[3:5], 16)])
            if n and ids[n - 1] == self.bos_token_id and piece.startswith(b" "):
                piece = piece[1:]
            pieces.append(b"" if i in (self.bos_token_id, self.bos_token_id + 1) else piece)
        return b"".join(pieces).decode("utf-8", "replace")


@dataclass(frozen=True)
class Llama2c:
    """A checkpoint that was read."""

    model: nn.Module
    tokenizer: ScoredTokenizer | None


def load_llama2c(path: str | Path) -> Llama2c:
    """A checkpoint of llama2.c as a model of transformers, with the tokenizer if it is in the file."""
    path = Path(path)
    if not path.is_file():
        raise TargetError(f"There is no file {path}.")
    content = path.read_bytes()
    shape, own_head = _shape(path, content)
    tensors, end = _tensors(path, content, shape, own_head)
    return Llama2c(_model(shape, tensors, own_head), _tokenizer(content[end:], shape.vocabulary))


def _shape(path: Path, content: bytes) -> tuple[Shape, bool]:
    numbers = HEAD.unpack_from(content) if len(content) >= HEAD.size else (0,) * 7
    width, hidden, layers, heads, kv_heads, vocabulary, context = numbers
    shape = Shape(width, hidden, layers, heads, kv_heads, abs(vocabulary), context)
    sensible = all(
        0 < n < 2**20 for n in (shape.width, shape.hidden, shape.layers, shape.heads, shape.context)
    )
    if not sensible or shape.width % shape.heads or not 0 < shape.kv_heads <= shape.heads:
        raise TargetError(
            f"{path} is no checkpoint of llama2.c: its first numbers are {list(numbers)}, and should be "
            "width, MLP width, layers, heads, key-value heads, vocabulary and context."
        )
    return shape, vocabulary < 0


def _tensors(path: Path, content: bytes, shape: Shape, own_head: bool) -> tuple[dict[str, Tensor], int]:
    """Every tensor by its name, and where they end."""
    n, d, h, kv, v = shape.layers, shape.width, shape.hidden, shape.kv_width, shape.vocabulary
    sizes: dict[str, tuple[int, ...]] = {
        "embed": (v, d), "attention_norm": (n, d), "q": (n, d, d), "k": (n, kv, d), "v": (n, kv, d),
        "o": (n, d, d), "mlp_norm": (n, d), "gate": (n, h, d), "down": (n, d, h), "up": (n, h, d),
        "norm": (d,), "rope": (2, shape.context, d // shape.heads // 2),
    }  # fmt: skip
    sizes |= {"unembed": (v, d)} if own_head else {}
    tensors, place = {}, HEAD.size
    for name, size in sizes.items():
        count = int(np.prod(size))
        if place + 4 * count > len(content):
            raise TargetError(
                f"{path} has {len(content):,} bytes, which end in the middle of {name} {size}: it is not the "
                "checkpoint that its head describes, or is incomplete."
            )
        numbers = np.frombuffer(content, "<f4", count, place).reshape(size)
        tensors[name] = torch.from_numpy(numbers.copy())
        place += 4 * count
    return tensors, place


def _model(shape: Shape, tensors: dict[str, Tensor], own_head: bool) -> nn.Module:
    try:
        from transformers import LlamaConfig, LlamaForCausalLM
    except ImportError:
        raise ConfigError(
            "A llama2.c checkpoint becomes a model of transformers. Install it with: pip install 'rankone[text]'"
        ) from None
    config: Any = LlamaConfig(
        vocab_size=shape.vocabulary,
        hidden_size=shape.width,
        intermediate_size=shape.hidden,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        max_position_embeddings=shape.context,
        rms_norm_eps=1e-5,
        tie_word_embeddings=not own_head,
    )
    model: Any = LlamaForCausalLM(config)
    names = {"o": "self_attn.o_proj", "v": "self_attn.v_proj", "gate": "mlp.gate_proj", "up": "mlp.up_proj",
             "down": "mlp.down_proj", "attention_norm": "input_layernorm",
             "mlp_norm": "post_attention_layernorm"}  # fmt: skip
    state = {"model.embed_tokens.weight": tensors["embed"], "model.norm.weight": tensors["norm"]}
    state["lm_head.weight"] = tensors["unembed"] if own_head else tensors["embed"]
    for i in range(shape.layers):
        below = f"model.layers.{i}."
        state |= {f"{below}{name}.weight": tensors[key][i] for key, name in names.items()}
        state[f"{below}self_attn.q_proj.weight"] = _halves(tensors["q"][i], shape.heads)
        state[f"{below}self_attn.k_proj.weight"] = _halves(tensors["k"][i], shape.kv_heads)
    model.load_state_dict(state)
    return model.eval()


def _halves(W: Tensor, heads: int) -> Tensor:
    """Rows of every head with the first of each pair before the second of each."""
    pairs = W.reshape(heads, -1, 2, W.shape[1])
    return pairs.transpose(1, 2).reshape(W.shape).contiguous()


def _tokenizer(content: bytes, size: int) -> ScoredTokenizer | None:
    """The tokenizer behind a checkpoint; None if there is none."""
    vocabulary, scores, place = [], [], 4
    while place + 8 <= len(content) and len(vocabulary) < size:
        score, length = struct.unpack_from("<fi", content, place)
        place += 8
        if not 0 <= length <= 1000:
            return None
        vocabulary.append(content[place : place + length])
        scores.append(score)
        place += length
    return ScoredTokenizer(vocabulary, scores) if len(vocabulary) == size else None
