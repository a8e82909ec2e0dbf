"""What the example networks share: find one mechanism, show it, keep what was found.

A *skill* is something a network can do, with a number from 0 to 1 for how well: the accuracy on each
class. The clearest mechanism is the subcomponent without which one skill is lost and the others are not.
"""

import argparse
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor, nn

import rankone

Network = TypeVar("Network", bound=nn.Module)
Skills = Callable[[Callable[..., Tensor]], Tensor]
"""A network, whole or edited -> how well it does each thing."""


@dataclass(frozen=True)
class Mechanism:
    """One subcomponent, and what the network can do with and without it."""

    layer: str
    index: int
    before: Tensor
    after: Tensor

    @property
    def lost(self) -> Tensor:
        return self.before - self.after

    @property
    def skill(self) -> int:
        """The skill that goes with it."""
        return int(self.lost.argmax())

    @property
    def else_lost(self) -> float:
        """The most that any other skill loses."""
        return float(torch.cat([self.lost[: self.skill], self.lost[self.skill + 1 :]]).max())


def arguments(description: str) -> argparse.Namespace:
    """`--steps` and `--out`, which every example has."""
    parser = argparse.ArgumentParser(description=description.splitlines()[0])
    parser.add_argument("--steps", type=int, help="training steps; without it, the recipe's")
    parser.add_argument("--out", type=Path, help="a directory for the report and the numbers")
    return parser.parse_args()


def settings(steps: int | None, **others: object) -> dict[str, object]:
    """What is laid over the recipe: as good as nothing."""
    return others | ({} if steps is None else {"steps": steps})


def by_class(values: Tensor, labels: Tensor) -> Tensor:
    """The mean of one number per datapoint over the datapoints of each class."""
    return torch.stack([values[labels == label].mean() for label in labels.unique()])


def accuracies(answers: Tensor, labels: Tensor) -> Tensor:
    """The share of right answers among the datapoints of each class."""
    return by_class((answers == labels).float(), labels)


@torch.no_grad()
def clearest(result: rankone.Decomposition, skills: Skills, layers: Sequence[str] = ()) -> Mechanism:
    """Of all alive subcomponents (of these layers) the one whose removal costs one skill, and least else."""
    before = skills(result.model.target)
    found = [
        Mechanism(layer, index, before, skills(result.ablated(drop={layer: [index]})))
        for layer in layers or result.layers
        for index in result.alive[layer]
    ]
    if not found:
        raise SystemExit("Nothing is alive: there is no mechanism to show. Train for more steps.")
    return max(found, key=lambda m: float(m.lost.max()) - max(m.else_lost, 0.0))


def table(head: Sequence[str], rows: dict[str, Tensor]) -> str:
    """Numbers by skill, a row each."""
    width = max(map(len, rows))
    columns = [max(len(name), 4) for name in head]
    lines = ["  ".join([" " * width, *(f"{name:>{n}}" for name, n in zip(head, columns, strict=True))])]
    for label, values in rows.items():
        cells = [f"{float(v):>{n}.2f}" for v, n in zip(values, columns, strict=True)]
        lines.append("  ".join([f"{label:<{width}}", *cells]))
    return "\n".join(lines)


def story(
    mechanism: Mechanism,
    names: Sequence[str],
    reads: str,
    when: str,
    on: Tensor,
    beside: dict[str, Tensor] | None = None,
) -> str:
    """What a mechanism reads, when it is on, what is forgotten without it, and that nothing else is."""
    m = mechanism
    rows = {when: on, "whole network": m.before, "without it": m.after, **(beside or {})}
    return "\n".join(
        [
            f"One mechanism: subcomponent {m.index} of {m.layer!r}.",
            reads,
            table(names, rows),
            f"Without it the network forgets {names[m.skill]} ({m.before[m.skill]:.2f} before, "
            f"{m.after[m.skill]:.2f} after); nothing else loses more than {max(m.else_lost, 0.0):.2f}.",
        ]
    )


def keep(result: rankone.Decomposition, text: str, out: Path | None) -> None:
    """Print what was found; in a directory, also the report and the numbers."""
    print(result)
    print()
    print(text)
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        (out / "mechanism.txt").write_text(f"{result!r}\n\n{text}\n")
        numbers = {"steps": result.config.steps, "seconds": round(result.seconds, 1)}
        numbers |= {"good": result.verdict.good, "reasons": result.verdict.reasons}
        numbers |= result.evaluate().to_dict()
        (out / "numbers.json").write_text(json.dumps(numbers, indent=1) + "\n")
        result.report(out / "report.html")


def smoothed(logits: Tensor, labels: Tensor) -> Tensor:
    """Cross-entropy with labels that leave some doubt, so that the network is no surer than it should be."""
    return nn.functional.cross_entropy(logits, labels, label_smoothing=0.1)


def train(
    model: Network,
    x: Tensor,
    wanted: Tensor,
    loss_of: Callable[[Tensor, Tensor], Tensor] = nn.functional.cross_entropy,
    *,
    steps: int,
    lr: float = 5e-3,
) -> Network:
    """Train a network on all datapoints at once: a few seconds for one as small as these."""
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=lr, weight_decay=1e-2)
    for _ in range(steps):
        loss = loss_of(model(x), wanted)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model.eval()
