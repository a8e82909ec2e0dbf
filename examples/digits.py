"""A convolutional network on scikit-learn's digits: one part, one digit.

    python examples/digits.py

Two convolutions and a linear layer read 1,797 digits of 8 by 8 pixels. rankone takes all three apart
by the recipe, comparing logits by KL. We look for the subcomponent without which the network no longer
knows one digit, and still knows all others.
"""

from pathlib import Path

import torch
from mechanism import accuracies, arguments, by_class, clearest, keep, settings, smoothed, story, train
from sklearn.datasets import load_digits
from torch import Tensor, nn

import rankone

NAMES = [str(digit) for digit in range(10)]


def digits() -> tuple[Tensor, Tensor]:
    data = load_digits()
    return torch.tensor(data.images, dtype=torch.float32).unsqueeze(1) / 16, torch.tensor(data.target)


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Conv2d(8, 16, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(64, 10),
    )


def main(steps: int | None = None, out: Path | None = None) -> rankone.Decomposition:
    x, labels = digits()
    model = train(network(), x, labels, smoothed, steps=300, lr=1e-2)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    batches = list(x[order].split(200))

    result = rankone.decompose(model, batches, config=settings(steps, divergence="kl"))

    found = clearest(result, lambda network: accuracies(network(x).argmax(-1), labels), ["6"])
    part = result.components(found.layer)[found.index]
    best = model[:6](x).detach() @ part.v
    on = result.importances(x)[found.layer][:, found.index]
    digit = int(best.abs().argmax())
    writes = (part.u * best[digit].sign()).argsort(descending=True)[:3].tolist()
    reads = (
        "It reads the last feature map, most of all where it looks like this:\n"
        f"{drawn(x[digit, 0])}\nand writes "
        + ", ".join(f"{w} ({part.u[w] * best[digit]:+.1f})" for w in writes)
    )
    keep(result, story(found, NAMES, reads + ".", "on (mean importance)", by_class(on, labels)), out)
    return result


def drawn(image: Tensor) -> str:
    """A digit in letters."""
    return "\n".join("  " + "".join(" .:*#"[min(int(5 * p), 4)] * 2 for p in row) for row in image.tolist())


if __name__ == "__main__":
    given = arguments(__doc__)
    main(given.steps, given.out)
