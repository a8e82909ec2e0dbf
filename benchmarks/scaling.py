"""How do the time and the memory of a training step grow with C, batch, d_gate and the number of
layers?

    python benchmarks/scaling.py [--out results/scaling]

Doubles one of them at a time on a plain MLP (dense data, ordinary linear layers), each point in a
process of its own. Time is split into matrix products and everything else (torch's profiler);
memory is what the steps add to the process at their peak. The fitted exponents are slopes in the
log-log plot over the last three points: 0 for no growth, 1 for linear. Writes OUT.svg, OUT.json and
prints the table.
"""

import argparse
import json
import resource
import subprocess
import sys
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import runs
import step_time
import torch

BASE = {"C": 250, "batch": 1024, "d_gate": 16, "layers": 2}
DOUBLED = {
    "C": [125, 250, 500, 1000, 2000],
    "batch": [512, 1024, 2048, 4096, 8192],
    "d_gate": [16, 32, 64, 128, 256],
    "layers": [2, 4, 8, 16, 32],
}
WIDTH = 128
SUBSET = "fast, subset routing"
ENGINES = {"d_gate": ("fast", "exact"), "layers": ("fast", SUBSET)}
"""What is measured besides the fast engine, which is the only one for the others."""
MEASURES = {"ms": "ms per step", "other_ms": "of it, outside matrix products", "mb": "memory, MB"}


def measure(engine: str, C: int, batch: int, d_gate: int, layers: int) -> dict[str, float]:
    """One point: milliseconds per step, those outside matrix products, and megabytes that steps add."""
    run = runs.plain_mlp((WIDTH,) * (layers + 1), C, batch, d_gate)
    if engine == SUBSET:
        run, engine = step_time.with_piece(run, "subset"), "fast"
    with run.training("fast").ready():
        run.training("fast").take_step(
            0, run.data(torch.Generator())
        )  # compiles, and fills every pool of memory a little
        before = resident_mb()
        step = step_time.stepper(run, engine)
        step(0)
        once = step_time.timed(step, 1)
        times = [step_time.timed(step, i) for i in range(2, 2 + max(3, min(100, int(2500 / once))))]
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        products = step_time.where_it_goes(run)["matrix products"] if engine == "fast" else 0.0
    ms = median(times)
    return {"ms": ms, "other_ms": ms * (1 - products), "mb": max(1.0, peak - before)}


def resident_mb() -> float:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize() / 1024**2


def exponent(sizes: list[int], values: list[float]) -> float:
    """The slope of log(value) over log(size), over the last three points."""
    return float(np.polyfit(np.log(sizes[-3:]), np.log(values[-3:]), 1)[0])


def table(found: dict[str, Any]) -> str:
    lines = [
        "| doubled | engine | measure | " + " | ".join(["smallest", *[""] * 3, "largest"]) + " | exponent |"
    ]
    lines.append("|---|---|---|" + "---|" * 6)
    for series in found["series"]:
        for key, name in MEASURES.items():
            if series["engine"] == "exact" and key == "other_ms":
                continue
            cells = [f"{p[key]:.1f}" for p in series["points"]]
            lines.append(
                f"| {series['doubled']} {series['sizes'][0]} to {series['sizes'][-1]} | "
                f"{series['engine']} | {name} | "
                + " | ".join(cells)
                + f" | **{series['exponents'][key]:.2f}** |"
            )
    return "\n".join(lines)


def draw(found: dict[str, Any], path: Path) -> None:
    import matplotlib as mpl

    mpl.use("svg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(2, len(DOUBLED), figsize=(13, 6), sharey="row", layout="constrained")
    for column, doubled in enumerate(DOUBLED):
        for series in (s for s in found["series"] if s["doubled"] == doubled):
            exact = series["engine"] != "fast"
            other = "exact engine" if series["engine"] == "exact" else "subset routing"
            style = {"color": "0.55", "linestyle": "--"} if exact else {}
            for key, row, shade, words in (
                ("ms", 0, "C0", "whole step"),
                ("other_ms", 0, "C1", "outside matrix products"),
                ("mb", 1, "C0", ""),
            ):
                if exact and key == "other_ms":
                    continue
                label = f"{other if exact else words}, exponent {series['exponents'][key]:.2f}".strip(", ")
                values = [p[key] for p in series["points"]]
                axes[row, column].loglog(
                    series["sizes"], values, marker="o", label=label, **({"color": shade} | style)
                )
        for row in (0, 1):
            axis = axes[row, column]
            axis.set_xticks(DOUBLED[doubled], [str(n) for n in DOUBLED[doubled]])
            axis.minorticks_off()
            axis.grid(alpha=0.3)
            axis.legend(fontsize=7, loc="upper left")
        axes[1, column].set_xlabel(
            {"layers": "decomposed layers", "batch": "batch size"}.get(doubled, doubled)
        )
    axes[0, 0].set_ylabel("ms per step")
    axes[1, 0].set_ylabel("memory that steps add, MB")
    low, high = axes[0, 0].get_ylim()
    axes[0, 0].set_ylim(low, high * 4)  # room for the legends
    low, high = axes[1, 0].get_ylim()
    axes[1, 0].set_ylim(low, high * 3)
    figure.suptitle(
        "A training step of the fast engine; the others fixed at "
        f"{', '.join(f'{k} = {v}' for k, v in BASE.items())}, width {WIDTH}"
    )
    figure.savefig(path, metadata={"Date": None})


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("results/scaling"))
    parser.add_argument("--only", choices=DOUBLED, help="double this one alone, and draw nothing")
    parser.add_argument("--point", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.point:
        print(json.dumps(measure(**json.loads(options.point))))
        return
    found: dict[str, Any] = {"base": BASE, "width": WIDTH, "torch": torch.__version__, "series": []}
    for doubled, sizes in DOUBLED.items():
        if options.only not in (None, doubled):
            continue
        for engine in ENGINES.get(doubled, ("fast",)):
            points = []
            for size in sizes:
                words = json.dumps(BASE | {doubled: size, "engine": engine})
                done = subprocess.run(
                    [sys.executable, __file__, "--point", words],
                    stdout=subprocess.PIPE,
                    text=True,
                    check=True,
                )
                points.append(json.loads(done.stdout.splitlines()[-1]))
                print(f"{engine}, {doubled} = {size}: {points[-1]['ms']:.1f} ms", file=sys.stderr)
            exponents = {key: exponent(sizes, [p[key] for p in points]) for key in MEASURES}
            found["series"].append(
                {
                    "doubled": doubled,
                    "engine": engine,
                    "sizes": sizes,
                    "points": points,
                    "exponents": exponents,
                }
            )
    if options.only:
        print(table(found))
        return
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.with_suffix(".json").write_text(json.dumps(found, indent=1) + "\n")
    draw(found, options.out.with_suffix(".svg"))
    print(table(found))


if __name__ == "__main__":
    main()
