"""Is clustering right where the answer is known, and how does it grow?

    python benchmarks/components.py truth                    # on the true importances of every network
    python benchmarks/components.py found --half develop     # on decompositions made by the recipe
    python benchmarks/components.py growth                   # synthetic data, up to 50,000 x 1,000,000

`found` keeps what is done in --out and goes on there. Every row has the adjusted Rand index (1: the known
grouping) and exact groups, at several alpha; the default is one for all networks.
"""

import argparse
import json
import resource
import time
from pathlib import Path

import numpy as np
import torch

from rankone.clusters import cluster
from rankone.collection import bench, network, true_decomposition
from rankone.collection.grouping import components_of, judge_grouping
from rankone.collection.split import names_in
from rankone.cooccurrence import OnSets

ALPHAS = (0.25, 0.5, 1.0)


def truth(names: list[str]) -> None:
    for name in names:
        known = network(name)
        found = true_decomposition(known)
        for alpha in ALPHAS:
            judged = judge_grouping(known, found, components_of(known, found, alpha))
            print(f"{name:28} alpha {alpha:<5} {_row(judged)}", flush=True)


def found(names: list[str], seed: int, out: Path) -> None:
    done = json.loads(out.read_text()) if out.exists() else {}
    for name in names:
        key = f"{name} seed {seed}"
        if key not in done:
            known = network(name)
            result = bench.Rankone()(known, seed)
            done[key] = {
                str(alpha): vars(judge_grouping(known, result, components_of(known, result, alpha)))
                for alpha in ALPHAS
            }
            out.write_text(json.dumps(done, indent=1) + "\n")
        print(key, {alpha: round(j["rand"], 3) for alpha, j in done[key].items()}, flush=True)
    for alpha in ALPHAS:
        of = [done[f"{name} seed {seed}"][str(alpha)]["rand"] for name in names]
        print(f"alpha {alpha}: mean {np.mean(of):.3f}, {sum(r == 1 for r in of)} of {len(of)} exactly right")


def growth(largest: int) -> None:
    """Groups of five subcomponents that come on together nine times in ten, 100 on per datapoint."""
    parts, rows = 781, 15_625
    while parts <= largest:
        began = time.perf_counter()
        on = synthetic(parts, rows, at_once=100)
        drawn = time.perf_counter()
        components = cluster(on)
        seconds = time.perf_counter() - drawn
        sizes = np.bincount([c.rank for c in components]).tolist()
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
        print(
            f"{parts} x {rows}: {sum(map(len, on.sets)):,} on, drawn in {drawn - began:.0f} s; clustered in "
            f"{seconds:.1f} s, {peak:.2f} GB at most; groups by size {sizes}",
            flush=True,
        )
        parts, rows = 2 * parts, 2 * rows


def synthetic(parts: int, rows: int, at_once: int, size: int = 5) -> OnSets:
    generator = np.random.default_rng(0)
    groups = parts // size
    frequency = at_once / parts
    sets = []
    for _ in range(groups):
        where = np.sort(generator.choice(rows, generator.binomial(rows, frequency), replace=False))
        sets += [where[generator.random(len(where)) < 0.9].astype(np.int32) for _ in range(size)]
    items = [("layer", i) for i in range(groups * size)]
    return OnSets(items, sets, np.full(rows, 1 / rows))


def _row(judged: object) -> str:
    j = vars(judged)
    return f"ARI {j['rand']:.3f}, {j['exact']} of {j['true_components']} exact, {j['components']} found"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=["truth", "found", "growth"])
    parser.add_argument("--half", default="develop")
    parser.add_argument("--only", nargs="*")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--largest", type=int, default=50_000)
    parser.add_argument("--out", type=Path, default=Path("components.json"))
    given = parser.parse_args()
    torch.set_num_threads(1)
    chosen = given.only or names_in(given.half)
    if given.what == "truth":
        truth(chosen)
    elif given.what == "found":
        found(chosen, given.seed, given.out)
    else:
        growth(given.largest)
