"""A transformer encoder with nn.MultiheadAttention that looks things up: one part, one address.

    python examples/encoder.py

A sequence is an address and up to six letters; the encoder answers with the letter that stands at that
address. Shorter sequences are padded, and padding is no data: a WeightedBatch says where there is some.
rankone takes the four matrices of attention apart by the recipe: queries, keys, values and what is made
of them. We look for the subcomponent without which the network no longer finds one address, and still
finds all others.
"""

from pathlib import Path

import torch
from mechanism import arguments, by_class, clearest, keep, settings, smoothed, story
from torch import Tensor, nn

import rankone

PLACES, LETTERS, PAD = 6, 6, 0
"""Tokens: 0 is padding, 1 to 6 are letters, 7 to 12 are addresses."""


class Encoder(nn.Module):
    """Attention beside what it reads; the answer is read off the address."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.tokens = nn.Embedding(1 + LETTERS + PLACES, width)
        self.places = nn.Embedding(1 + PLACES, width)
        self.attention = nn.MultiheadAttention(width, 1, batch_first=True)
        self.head = nn.Linear(width, LETTERS)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.places(torch.arange(tokens.shape[1]))
        x = x + self.attention(x, x, x, key_padding_mask=tokens == PAD, need_weights=False)[0]
        return self.head(x[:, 0])


def sequences(generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """128 sequences, their addresses, and the letters that stand there."""
    letters = torch.randint(LETTERS, (128, PLACES), generator=generator)
    length = torch.randint(2, PLACES + 1, (128,), generator=generator)
    address = (torch.rand(128, generator=generator) * length).long()
    beyond = torch.arange(PLACES) >= length.unsqueeze(1)
    tokens = torch.cat([(1 + LETTERS + address).unsqueeze(1), (1 + letters).masked_fill(beyond, PAD)], 1)
    return tokens, address, letters.gather(1, address.unsqueeze(1)).squeeze(1)


def batch(generator: torch.Generator) -> rankone.WeightedBatch:
    tokens, _, _ = sequences(generator)
    return rankone.WeightedBatch(tokens, tokens != PAD)


def trained(steps: int = 1500) -> Encoder:
    torch.manual_seed(0)
    model, generator = Encoder(), torch.Generator().manual_seed(0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3, weight_decay=1e-2)
    for _ in range(steps):
        tokens, _, answers = sequences(generator)
        loss = smoothed(model(tokens), answers)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model.eval()


def main(steps: int | None = None, out: Path | None = None) -> rankone.Decomposition:
    model = trained()

    result = rankone.decompose(model, batch, ["attention.*"], settings(steps, divergence="kl"))

    tokens, address, answers = sequences(torch.Generator().manual_seed(1))
    names = [f"address {i}" for i in range(PLACES)]
    found = clearest(
        result,
        lambda network: by_class((network(tokens).argmax(-1) == answers).float(), address),
        ["attention.q"],
    )
    with torch.no_grad():
        read = result.components(found.layer)[found.index].v
        asked = (model.tokens.weight[1 + LETTERS :] + model.places.weight[0]) @ read
    reads = "It reads, of each address: " + ", ".join(f"{h / asked.abs().max():+.2f}" for h in asked.tolist())
    g = result.importances(rankone.WeightedBatch(tokens, tokens != PAD))[found.layer]
    on = by_class(g[:, 0, found.index], address)
    keep(result, story(found, names, reads + ".", "on (mean importance)", on), out)
    return result


if __name__ == "__main__":
    given = arguments(__doc__)
    main(given.steps, given.out)
