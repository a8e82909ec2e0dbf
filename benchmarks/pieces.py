"""Which pieces of the method make a decomposition right, faithful and safe? One change at a time.

    python benchmarks/pieces.py tms_5-2-id --seeds 2
    python benchmarks/pieces.py resid_mlp1 --only base delta+adversary --set steps=8000
    python benchmarks/pieces.py --table

Every run is `rankone run EXPERIMENT SETTINGS` on one thread, two at a time, in a directory that is kept;
a run that is there is not made again. The table is made of the summaries: errors of the recovery checks,
then divergences in per cent of what removing everything costs.
"""

import argparse
import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from rankone.runs.config import experiment_config

SUBSET = ("losses.stochastic_recon_layerwise.coefficient=0", "losses.stochastic_recon_subset.coefficient=1")
PERSISTENT = ("losses.adversarial_recon.persistent=true",)
ADVERSARY = ("losses.adversarial_recon.steps=1",)


def variants(experiment: str) -> dict[str, tuple[str, ...]]:
    """Name -> settings; those that depend on the experiment's own coefficient take it from there."""
    beta = experiment_config(experiment, preset="tuned").losses["importance_minimality"].coefficient
    pieces = {
        "base": (),
        "straight-through": ("masks.sigmoid=straight_through",),
        "delta": ("masks.delta=true",),
        "subset": SUBSET,
        "ends": ("masks.at_zero=0.25", "masks.at_one=0.25"),
        "zeros": ("masks.at_zero=0.5",),
        "importance recon": ("losses.importance_recon.coefficient=1",),
        "adversary": ADVERSARY,
        "persistent": PERSISTENT,
        "frequency": (f"losses.frequency.coefficient={beta / 2}",),
        "smooth L0": (
            "losses.importance_minimality.coefficient=0",
            f"losses.smooth_l0.coefficient={beta}",
            "losses.smooth_l0.gamma=0.1",
        ),
        "ramp": ("losses.importance_minimality.ramp=0.2",),
        "faithful": ("losses.faithfulness.coefficient=100",),
    }
    if experiment in HOLDS:
        pieces["holds"] = HOLDS[experiment]
    pieces["st+delta"] = pieces["straight-through"] + pieces["delta"]
    pieces["st+delta+adversary"] = pieces["st+delta"] + ADVERSARY
    pieces["st+delta+persistent"] = pieces["st+delta"] + PERSISTENT
    pieces["st+delta+persistent+subset"] = pieces["st+delta+persistent"] + SUBSET
    pieces["st+persistent+faithful"] = pieces["straight-through"] + PERSISTENT + pieces["faithful"]
    pieces["st+ends+faithful"] = pieces["straight-through"] + pieces["ends"] + pieces["faithful"]
    return pieces


MINIMALITY = "losses.importance_minimality"
HOLDS = {
    experiment: (
        "masks.sigmoid=straight_through", "masks.delta=true", "losses.importance_recon.coefficient=1",
        f"{MINIMALITY}.p_start=2", f"{MINIMALITY}.p=1", f"{MINIMALITY}.saturation=30",
        f"{MINIMALITY}.hold=0.5", f"{MINIMALITY}.anneal=0.3", "steps=10000", *own,
    )
    for experiment, own in {
        "resid_mlp1": (
            f"{MINIMALITY}.coefficient_start=5e-5", f"{MINIMALITY}.coefficient=2e-5",
            f"{MINIMALITY}.price_of={{'*.mlp_out': 0.2}}",
        ),
        "resid_mlp2": (
            f"{MINIMALITY}.coefficient_start=6e-5", f"{MINIMALITY}.coefficient=4e-5",
            f"{MINIMALITY}.price_of={{'*.mlp_out': 0.15}}",
            'layers={"blocks.*.mlp_in": 200, "blocks.*.mlp_out": 50}',
        ),
    }.items()
}  # fmt: skip
"""All pieces together, as they were found to be faithful and to hold under attack."""

COLUMNS = ("sum", "stochastic", "importance", "rounded", "attack_20", "union_16", "deletion")


def table(root: Path) -> str:
    lines = [
        "| experiment | pieces | seed | errors | alive | L0 | " + " | ".join(COLUMNS) + " | seconds |",
        "|" + "---|" * (7 + len(COLUMNS)),
    ]
    for path in sorted(root.glob("*/*/seed*/summary.json")):
        of = json.loads(path.read_text())
        errors = " + ".join(str(check["errors"]) for check in of["checks"].values())
        alive = " + ".join(str(n) for n in of["n_alive"].values())
        shares = [f"{100 * of['relative'][name]:.2f} %" for name in COLUMNS]
        row = (
            of["experiment"], path.parts[-3], of["seed"], errors, alive, f"{sum(of['l0'].values()):.2f}",
            *shares, f"{of['train_seconds']:.0f}",
        )  # fmt: skip
        lines.append("| " + " | ".join(str(cell) for cell in row) + " |")
    return "\n".join(lines)


def make(experiment: str, name: str, settings: tuple[str, ...], seed: int, root: Path) -> None:
    out = root / experiment / name / f"seed{seed}"
    if (out / "summary.json").exists():
        return
    words = ["run", experiment, "--preset", "tuned", *settings, "threads=1"]
    words += ["--seed", str(seed), "--out", str(out), "--resume"]
    out.parent.mkdir(parents=True, exist_ok=True)
    done = subprocess.run([sys.executable, "-m", "rankone", *words], capture_output=True, text=True)
    print(experiment, name, seed, "done" if done.returncode == 0 else f"FAILED: {done.stderr}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("experiment", nargs="?")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="of these pieces alone")
    parser.add_argument("--also", nargs="+", default=[], metavar="NAME=SETTINGS", help="pieces of your own")
    parser.add_argument("--set", nargs="+", default=[], metavar="KEY=VALUE", help="in every run")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--root", type=Path, default=Path("pieces"))
    parser.add_argument("--table", action="store_true", help="only print what there is")
    options = parser.parse_args()
    if not options.table:
        known = variants(options.experiment)
        known |= {name: tuple(rest.split()) for name, rest in (one.split("=", 1) for one in options.also)}
        chosen = options.only or [name for name in known if not options.also]
        chosen += [one.split("=", 1)[0] for one in options.also if one.split("=", 1)[0] not in chosen]
        with ThreadPoolExecutor(options.jobs) as pool:
            for seed in options.seeds:
                for name in chosen:
                    settings = (*options.set, *known[name])
                    pool.submit(make, options.experiment, name, settings, seed, options.root)
    print(table(options.root))


if __name__ == "__main__":
    main()
