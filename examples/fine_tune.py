"""What did a LoRA fine-tune teach? A network that knew the digits 0 to 7 learns 8 and 9.

    python examples/fine_tune.py

The base never saw an 8 or a 9. Low-rank adapters (peft) on both of its layers teach it all ten digits.
`rankone.decompose_difference` takes apart what they changed, and nothing else: the base runs untouched
below. We look for the part of the change without which the network no longer knows one of the new digits,
and still knows the other, and all old ones.
"""

import copy
from pathlib import Path

import torch
from mechanism import accuracies, arguments, by_class, clearest, keep, settings, smoothed, story, train
from peft import LoraConfig, get_peft_model
from sklearn.datasets import load_digits
from torch import Tensor, nn

import rankone

NAMES = [str(digit) for digit in range(10)]


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.hidden, self.head = nn.Linear(64, 32), nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.relu(self.hidden(x)))


def digits() -> tuple[Tensor, Tensor]:
    data = load_digits()
    return torch.tensor(data.data, dtype=torch.float32) / 16, torch.tensor(data.target)


def base_and_tuned() -> tuple[nn.Module, nn.Module]:
    x, labels = digits()
    torch.manual_seed(0)
    old = labels < 8
    base = train(Classifier(), x[old], labels[old], smoothed, steps=300, lr=1e-2)
    adapters = LoraConfig(r=2, lora_alpha=8, target_modules=["hidden", "head"])
    # peft puts its matrices into the network that it is given.
    return base, train(get_peft_model(copy.deepcopy(base), adapters), x, labels, smoothed, steps=600, lr=1e-2)


def main(steps: int | None = None, out: Path | None = None) -> rankone.Decomposition:
    base, tuned = base_and_tuned()
    x, labels = digits()

    result = rankone.decompose_difference(base, tuned, x, config=settings(steps, divergence="kl"))

    found = clearest(result, lambda network: accuracies(network(x).argmax(-1), labels))
    part = result.components(found.layer)[found.index]
    largest = part.u.abs().argsort(descending=True)[:3].tolist()
    what = "the logits of" if found.layer.startswith("head") else "hidden units"
    reads = f"It writes {what} " + ", ".join(f"{i} ({part.u[i] / part.u.norm():+.2f})" for i in largest)
    g = result.importances(x)[found.layer][:, found.index]
    known = {"the base knows": accuracies(base(x).argmax(-1), labels)}
    keep(result, story(found, NAMES, reads + ".", "on (mean importance)", by_class(g, labels), known), out)
    return result


if __name__ == "__main__":
    given = arguments(__doc__)
    main(given.steps, given.out)
