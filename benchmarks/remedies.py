"""What decides whether a seed is recovered? One change at a time to a tuned preset, several seeds
of each.

    python benchmarks/remedies.py [--seeds N] [--only VARIANT ...] [--out DIR]

The preset is that of TMS 5-2+ID, the cheapest of those that do not recover every seed with just any
settings. Prints a table of how many seeds each variant recovers, and writes it to DIR/remedies.md
after every variant. Finished runs in DIR are not made again. Two of the remedies are not part of
rankone; they are written here, as a user would write them: a penalty of another shape is a
registered loss, and another gradient through the lower-leaky sigmoid replaces a function (which
takes the exact engine: kernels do not call it).
"""

import argparse
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rankone import masks
from rankone.data import mean_over_data
from rankone.files import RunDirectory
from rankone.importance import LEAK, upper_leaky
from rankone.losses import Loss, register_loss
from rankone.metrics import wilson
from rankone.runs.config import RunConfig, experiment_config
from rankone.runs.kept import SIDE_BY_SIDE
from rankone.runs.run import cores, read_summary, run
from rankone.runs.summary import Summary
from rankone.settings import validated
from rankone.step import Step


@register_loss("smooth_l0")
class SmoothL0(Loss):
    """g^2 / (g^2 + gamma^2): costs the same wherever an importance is well above gamma, which falls
    geometrically over training."""

    coefficient: float = 3e-3
    first: float = 1.0
    last: float = 0.01

    def value(self, step: Step) -> Tensor:
        gamma = self.first * (self.last / self.first) ** step.progress
        squares = (upper_leaky(raw).square() for raw in step.raw.values())
        terms = [mean_over_data((s / (s + gamma**2)).sum(-1), step.weights) for s in squares]
        return torch.stack(terms).sum()


class _RaisingOnly(torch.autograd.Function):
    """The lower-leaky sigmoid, whose leak lets a gradient through only where a step would raise the
    value."""

    @staticmethod
    def forward(ctx: Any, raw: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.save_for_backward(raw)
        return torch.nn.functional.leaky_relu(raw, LEAK).clamp(max=1)

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        (raw,) = ctx.saved_tensors
        leaking = torch.where(slope < 0, LEAK * slope, 0.0)
        return torch.where(raw <= 0, leaking, torch.where(raw <= 1, slope, 0.0))


def raising_only() -> None:
    masks.lower_leaky = _RaisingOnly.apply


EXPERIMENT = "tms_5-2-id"
PENALTY = "losses.importance_minimality"


@dataclass(frozen=True)
class Variant:
    """One change to the tuned preset."""

    what: str
    settings: tuple[str, ...] = ()
    patch: Callable[[], None] = lambda: None
    penalty: str | None = None
    """A loss that takes the place of importance minimality, with its coefficient."""

    def config(self, seed: int) -> RunConfig:
        changes = [*self.settings, SIDE_BY_SIDE]
        config = experiment_config(EXPERIMENT, preset="tuned", seed=seed, assignments=changes)
        if self.penalty is None:
            return config
        values = config.model_dump(mode="json")
        coefficient = values["losses"].pop("importance_minimality")["coefficient"]
        values["losses"][self.penalty] = {"coefficient": coefficient}
        return validated(RunConfig, values, source=self.what)


VARIANTS = {
    "tuned": Variant("the tuned preset as it is"),
    "overlap": Variant(
        "initialisation: scaled by the overlap with W, as in the released code", ("init=overlap",)
    ),
    "cold": Variant("no warm-up", ("faithfulness_warmup.steps=0",)),
    "constant": Variant("schedule: constant learning rate", ("optimizer.schedule=constant",)),
    "quarter": Variant("schedule: quarter cosine, as in the paper", ("optimizer.schedule=quarter_cosine",)),
    "slow": Variant("learning rate 1e-3, as in the paper", ("optimizer.lr=1e-3",)),
    "p1": Variant("p = 1 throughout, as in the paper", (f"{PENALTY}.p_start=null", f"{PENALTY}.p=1.0")),
    "p2": Variant("p = 2 throughout", (f"{PENALTY}.p_start=null", f"{PENALTY}.p=2.0")),
    "saturation": Variant("penalty shape: flat near 1", (f"{PENALTY}.saturation=9.0",)),
    "smooth_l0": Variant("penalty shape: smooth L0", penalty="smooth_l0"),
    "narrow": Variant("gates with 4 hidden neurons instead of 16", ("importance.options.d_gate=4",)),
    "wide": Variant("gates with 64 hidden neurons", ("importance.options.d_gate=64",)),
    "linear": Variant("gate function: linear", ("importance.kind=linear", "importance.options={}")),
    "layer_mlp": Variant(
        "gate function: one MLP for the layer", ("importance.kind=layer_mlp", "importance.options={}")
    ),
    "exact": Variant("the exact engine", ("engine=exact",)),
    "raising": Variant(
        "the exact engine, lower leak only where it would raise", ("engine=exact",), raising_only
    ),
}


def one(name: str, seed: int, out: Path) -> None:
    """A single run, in a process of its own."""
    variant = VARIANTS[name]
    variant.patch()
    run(variant.config(seed), out, resume=True)


def row(name: str, summaries: list[Summary]) -> str:
    good = sum(bool(s.recovered) for s in summaries)
    low, high = wilson(good, len(summaries))
    errors = ", ".join(f"{s.seed} ({s.errors})" for s in summaries if not s.recovered) or "none"
    share = f"{good} of {len(summaries)} ({low:.0%} to {high:.0%})"
    return f"| {VARIANTS[name].what} | {share} | {errors} |"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--only", nargs="*", choices=list(VARIANTS), default=list(VARIANTS))
    parser.add_argument("--out", type=Path, default=Path("remedies"))
    parser.add_argument("--one", nargs=2, metavar=("VARIANT", "SEED"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        one(options.one[0], int(options.one[1]), options.out)
        return

    def summary(name: str, seed: int) -> Summary:
        folder = options.out / name / f"seed{seed}"
        if not (folder / "summary.json").is_file():
            words = [sys.executable, __file__, "--one", name, str(seed), "--out", str(folder)]
            subprocess.run(words, check=True, stdout=subprocess.DEVNULL)
        return read_summary(RunDirectory.open(folder))

    lines = [
        f"What decides on {EXPERIMENT}: one change to its tuned preset, {options.seeds} seeds each.",
        "",
        "| change | recovered | failed seeds (errors) |",
        "|---|---|---|",
    ]
    print("\n".join(lines))
    with ThreadPoolExecutor(cores()) as pool:
        for name in options.only:
            summaries = list(pool.map(lambda seed, name=name: summary(name, seed), range(options.seeds)))
            lines.append(row(name, summaries))
            print(lines[-1], flush=True)
            (options.out / "remedies.md").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
