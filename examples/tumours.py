"""An MLP on tabular data: what the largest cells of a tumour look like, foretold from the average ones.

    python examples/tumours.py

scikit-learn's breast-cancer data has ten measurements of cells in 569 tumours: their mean, their
standard error, and the mean of the three largest ("worst"). The network foretells the last ten columns
from the first twenty. rankone takes both of its matrices apart without a setting, and we look for the
subcomponent without which one of the ten is no longer foretold, and the other nine still are.
"""

from collections.abc import Callable
from pathlib import Path

import torch
from mechanism import arguments, clearest, keep, settings, story, train
from sklearn.datasets import load_breast_cancer
from torch import Tensor, nn

import rankone


def tumours() -> tuple[Tensor, Tensor, list[str]]:
    """Means and errors, the worst, both in units of their standard deviations, and their names."""
    data = load_breast_cancer()
    x = torch.tensor(data.data, dtype=torch.float32)
    x = (x - x.mean(0)) / x.std(0)
    return x[:, :20], x[:, 20:], [str(name) for name in data.feature_names]


def main(steps: int | None = None, out: Path | None = None) -> rankone.Decomposition:
    x, worst, measured = tumours()
    names = [name.removeprefix("worst ") for name in measured[20:]]
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(20, 24), nn.ReLU(), nn.Linear(24, 10))
    train(model, x, worst, nn.functional.mse_loss, steps=1000)

    def foretold(network: Callable[[Tensor], Tensor]) -> Tensor:
        """The share of the variance of each measurement that is foretold."""
        return (1 - (network(x) - worst).square().mean(0) / worst.square().mean(0)).clamp(min=0).detach()

    result = rankone.decompose(model, x, config=settings(steps))

    found = clearest(result, foretold, ["0"])
    read = result.components(found.layer)[found.index].v
    strongest = read.abs().argsort(descending=True)[:4].tolist()
    sign = read[strongest[0]].sign()
    reads = "It reads " + ", ".join(f"{measured[i]} ({sign * read[i] / read.norm():+.2f})" for i in strongest)
    g = result.importances(x)[found.layer][:, found.index]
    unusual = worst.abs() > 1
    on = torch.stack([g[unusual[:, i]].mean() for i in range(10)])
    keep(result, story(found, names, reads + ".", "on where that is unusual", on), out)
    return result


if __name__ == "__main__":
    given = arguments(__doc__)
    main(given.steps, given.out)
