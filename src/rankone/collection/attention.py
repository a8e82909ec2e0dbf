"""Attention and embeddings: a head that copies the token before, and a table of tokens.

The head is built by hand in random bases. Queries and keys have a part for each position, values
and outputs a part for each token. Positions form a ring, so that every query has the same choice,
and the attention is not saturated: a softmax that is sure of itself would not notice if a query or a
key lost half of its size, and its importance could be a half as well.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rankone.collection.base import KnownNetwork, Mechanisms, Truth, columns, linear, orthonormal, register
from rankone.data import generator_for

TOKENS, LENGTH, WIDTH = 8, 6, 20
CERTAINTY = 5.0
"""The score of the token before; that of all others is 0. It gets 97 % of the attention."""


class PreviousToken(nn.Module):
    """One attention head over tokens with positions; its output is what the tokens before were."""

    def __init__(self, tokens: Tensor, positions: Tensor, parts: dict[str, Tensor]) -> None:
        super().__init__()
        self.embed = nn.Embedding.from_pretrained(tokens)
        self.register_buffer("positions", positions)
        self.q, self.k, self.v, self.o = (linear(parts[name].sum(0)) for name in "qkvo")

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids) + self.positions
        scores = self.q(x) @ self.k(x).transpose(-1, -2)
        return self.o(scores.softmax(-1) @ self.v(x))


def _needed(ids: Tensor) -> dict[str, Tensor]:
    here = torch.eye(LENGTH, dtype=torch.bool).expand(*ids.shape, LENGTH)
    token = F.one_hot(ids, TOKENS).bool()
    before = F.one_hot(ids.roll(1, -1), TOKENS).bool()
    return {"embed": token, "q": here, "k": here, "v": token, "o": before}


def _head(name: str, *, embedding: bool) -> KnownNetwork:
    generator = generator_for(0, "collection/previous_token")
    basis = orthonormal(TOKENS + LENGTH, WIDTH, generator)
    tokens, positions = basis[:TOKENS], basis[TOKENS:]
    keys = orthonormal(LENGTH, 8, generator)
    values = orthonormal(TOKENS, 10, generator)
    answers = orthonormal(TOKENS, 12, generator)
    parts = {
        "q": torch.einsum("po,pi->poi", CERTAINTY * keys.roll(1, 0), positions),
        "k": torch.einsum("po,pi->poi", keys, positions),
        "v": torch.einsum("to,ti->toi", values, tokens),
        "o": torch.einsum("to,ti->toi", answers, values),
    }
    # Queries, keys and values see tokens and positions together, and nothing else.
    truth: dict[str, Truth] = {n: Mechanisms(p) for n, p in parts.items()}
    if embedding:
        truth = {"embed": Mechanisms(columns(tokens.T))} | truth

    def data(generator: torch.Generator) -> Tensor:
        return torch.randint(TOKENS, (256, LENGTH), generator=generator)

    return KnownNetwork(
        name,
        PreviousToken(tokens, positions, parts).eval().requires_grad_(False),
        data,
        dict.fromkeys(truth, 20),
        truth,
        torch.randint(TOKENS, (12, LENGTH), generator=generator),
        lambda ids: {n: needed for n, needed in _needed(ids).items() if n in truth},
    )


class Lookup(nn.Module):
    """Tokens of which each has a vector; neurons tell them apart."""

    def __init__(self, vectors: Tensor, W: Tensor) -> None:
        super().__init__()
        self.embed = nn.Embedding.from_pretrained(vectors)
        self.read = linear(W)

    def forward(self, ids: Tensor) -> Tensor:
        return F.relu(self.read(self.embed(ids)))


def _table(name: str) -> KnownNetwork:
    """Twenty tokens in eight dimensions, some five times as frequent as others."""
    n, generator = 20, generator_for(0, f"collection/{name}")
    vectors = F.normalize(torch.randn(n, 8, generator=generator), dim=1)
    W = torch.randn(30, 8, generator=generator)
    frequencies = torch.linspace(1, 5, n)

    def data(generator: torch.Generator) -> Tensor:
        return torch.multinomial(frequencies, 512, replacement=True, generator=generator)

    return KnownNetwork(
        name,
        Lookup(vectors, W).eval().requires_grad_(False),
        data,
        {"embed": 50},
        {"embed": Mechanisms(columns(vectors.T))},
        torch.arange(n),
        lambda ids: {"embed": F.one_hot(ids, n).bool()},
    )


register(
    "attention_head", "attention", "a head that copies the token before", lambda n: _head(n, embedding=False)
)
register(
    "attention_embedded", "attention", "the same, with its embedding", lambda n: _head(n, embedding=True)
)
register("embedding_table", "attention", "an embedding, a part for each token", _table)
