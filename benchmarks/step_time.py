"""How much faster is rankone's training step than the paper's equations as they stand, and what is
left to gain?

    python benchmarks/step_time.py [RUN ...] [--json results/step_time.json]
    python benchmarks/step_time.py --pieces [RUN ...]

For every run, at the paper's batch size, C and d_gate: the literal step (literal.py: eager torch,
default allocator, default Adam), rankone's exact engine and its fast engine take turns in one
process, so that whatever else the machine does hits all alike. Times are medians; the speed-up is
that of the medians. Peak memory is of separate processes that do nothing else. The error is that of
the fast engine's losses and gradients against the literal ones, same parameters, same masks. The
floor is the time that the step's own matrix products would take at the rate of a large sgemm,
measured in the same process. With `--pieces`, the fast engine with each piece that the paper does not
have takes turns with the plain step.
"""

import argparse
import json
import platform
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import runs
import torch
from torch.profiler import ProfilerActivity, profile
from torch.utils.flop_counter import FlopCounterMode

from rankone import __version__
from rankone.data import generator_for

MS_PER_TURN = 500.0
"""How long an engine keeps its turn: long enough to run as in training, short enough that all see
the same machine."""
SECONDS_PER_RUN = 15.0
"""About how long the three take turns, per run; the literal step is taken at least three times."""


def stepper(run: runs.Run, engine: str) -> Callable[[int], Any]:
    """A function that takes step i, data included."""
    if engine == "literal":
        return runs.LiteralTraining(run).take_step
    training = run.training(engine)
    return lambda i: training.take_step(i, run.data(generator_for(0, "data", i)))


def timed(step: Callable[[int], Any], i: int) -> float:
    start = time.perf_counter()
    step(i)
    return 1000 * (time.perf_counter() - start)


def take_turns(run: runs.Run) -> dict[str, list[float]]:
    """Times of single steps in milliseconds, the engines in turn."""
    steppers = {engine: stepper(run, engine) for engine in ("literal", "exact", "fast")}
    taken: dict[str, list[float]] = {engine: [] for engine in steppers}
    once = {engine: (timed(step, 0), timed(step, 1))[1] for engine, step in steppers.items()}
    per_turn = {engine: max(1, round(MS_PER_TURN / once[engine])) for engine in steppers}
    began = time.perf_counter()
    i = 2
    while len(taken["literal"]) < 3 or time.perf_counter() - began < SECONDS_PER_RUN:
        for engine, step in steppers.items():
            for _ in range(per_turn[engine]):
                taken[engine].append(timed(step, i))
                i += 1
    return taken


SUBSET = {"stochastic_recon_layerwise": None, "stochastic_recon_subset": {}}
PIECES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain": ({}, {}),
    "straight-through": ({"sigmoid": "straight_through"}, {}),
    "delta": ({"delta": True}, {}),
    "subset": ({}, SUBSET),
    "one ascent": ({}, {"adversarial_recon": {"steps": 1}}),
    "persistent": ({}, {"adversarial_recon": {"persistent": True}}),
    "delta, one ascent": ({"delta": True}, {"adversarial_recon": {"steps": 1}}),
    "delta, persistent": ({"delta": True}, {"adversarial_recon": {"persistent": True}}),
    "delta, persistent, subset": ({"delta": True}, SUBSET | {"adversarial_recon": {"persistent": True}}),
}
"""Name -> (settings of masks, losses that are added, or taken away)."""


def with_piece(run: runs.Run, name: str) -> runs.Run:
    masks, changed = PIECES[name]
    plain = run.config.model_dump(mode="json")
    losses = {k: v for k, v in (plain["losses"] | changed).items() if v is not None}
    config = type(run.config).model_validate(plain | {"losses": losses, "masks": masks})
    return replace(run, config=config)


def measure_pieces(name: str) -> dict[str, float]:
    """Piece -> how many times as long as the plain step one with it takes, in turns."""
    run = runs.make(name)
    trainings = {piece: with_piece(run, piece).training("fast") for piece in PIECES}
    with ExitStack() as stack:
        for training in trainings.values():
            stack.enter_context(training.ready())
        return _measure_pieces(run, trainings)


def _measure_pieces(run: runs.Run, trainings: dict[str, Any]) -> dict[str, float]:
    steppers: dict[str, Callable[[int], Any]] = {
        piece: lambda i, training=training: training.take_step(i, run.data(generator_for(0, "data", i)))
        for piece, training in trainings.items()
    }
    taken: dict[str, list[float]] = {piece: [] for piece in PIECES}
    once = max((timed(step, 0), timed(step, 1))[1] for step in steppers.values())
    began, i = time.perf_counter(), 2
    while len(taken["plain"]) < 5 or time.perf_counter() - began < 2 * SECONDS_PER_RUN:
        for piece, step in steppers.items():
            for _ in range(max(1, round(MS_PER_TURN / 4 / once))):
                taken[piece].append(timed(step, i))
                i += 1
    return {piece: median(times) / median(taken["plain"]) for piece, times in taken.items()}


def sgemm_rate() -> float:
    """GFLOP/s of a 2048 x 2048 x 2048 product in single precision, the best of ten."""
    a = torch.randn(2048, 2048)
    times = [timed(lambda _: a @ a, 0) for _ in range(10)]
    return 2 * 2048**3 / (min(times) * 1e6)


def where_it_goes(run: runs.Run) -> dict[str, float]:
    """Milliseconds per fast step in kinds of work, from torch's profiler; what no operation
    accounts for is Python."""
    step = stepper(run, "fast")
    for i in range(3):
        step(i)
    steps = 10
    with profile(activities=[ProfilerActivity.CPU]) as recorded:
        start = time.perf_counter()
        for i in range(steps):
            step(i)
        wall = 1000 * (time.perf_counter() - start) / steps
    kinds = {"matrix products": 0.0, "gates and masks": 0.0, "optimiser": 0.0, "other operations": 0.0}
    for event in recorded.key_averages():
        spent = event.self_cpu_time_total / 1000 / steps
        if event.key in ("aten::mm", "aten::addmm", "aten::bmm"):
            kinds["matrix products"] += spent
        elif event.key.startswith("_GatesAndMasks"):
            kinds["gates and masks"] += spent
        elif "adam" in event.key.lower():
            kinds["optimiser"] += spent
        elif not event.key.startswith("Profiler"):
            kinds["other operations"] += spent
    kinds["python and waiting"] = max(0.0, wall - sum(kinds.values()))
    return {kind: spent / wall for kind, spent in kinds.items()}


def measure(name: str) -> dict[str, Any]:
    """Everything about one run that one process can tell."""
    run = runs.make(name)
    with run.training("fast").ready():
        errors = {engine: runs.disagreement(run, engine) for engine in ("exact", "fast")}
        taken = take_turns(run)
        step = stepper(run, "fast")
        step(0)
        with FlopCounterMode(display=False) as counted:
            step(1)
        flops, rate = counted.get_total_flops(), sgemm_rate()
        shares = where_it_goes(run)
    ms = {engine: median(times) for engine, times in taken.items()}
    return {
        "run": name,
        "ms": ms,
        "quartiles": {engine: list(np.percentile(times, [25, 75])) for engine, times in taken.items()},
        "steps": {engine: len(times) for engine, times in taken.items()},
        "speedup": ms["literal"] / ms["fast"],
        "speedup_exact": ms["literal"] / ms["exact"],
        "error": errors,
        "gflop": flops / 1e9,
        "sgemm_gflop_per_s": rate,
        "floor_ms": flops / rate / 1e6,
        "floor_share": flops / rate / 1e6 / ms["fast"],
        "shares": shares,
    }


def peak_memory(name: str, engine: str) -> float:
    """Peak memory in MB of a process that takes a few steps and nothing else."""
    run = runs.make(name)
    with run.training("fast").ready():
        step = stepper(run, engine)
        for i in range(2 if engine == "literal" else 10):
            step(i)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / (1024**2 if sys.platform == "darwin" else 1024)


def in_process(*words: str) -> Any:
    """What this script prints as JSON when it is run with these words in a process of its own."""
    done = subprocess.run([sys.executable, __file__, *words], stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


COLUMNS: dict[str, Callable[[dict[str, Any]], str]] = {
    "run": lambda r: r["run"],
    "threads": lambda r: str(r["threads"]),
    "ms per step: literal": lambda r: f"{r['ms']['literal']:,.1f}",
    "exact": lambda r: f"{r['ms']['exact']:,.1f}",
    "fast": lambda r: f"{r['ms']['fast']:,.2f}",
    "speed-up": lambda r: f"**{r['speedup']:.1f}x**",
    "peak MB: literal": lambda r: f"{r['peak_mb']['literal']:,.0f}",
    "fast ": lambda r: f"{r['peak_mb']['fast']:,.0f}",
    "largest error: loss": lambda r: f"{r['error']['fast']['loss']:.0e}",
    "gradient": lambda r: f"{r['error']['fast']['gradient']:.0e}",
    "products alone would take": lambda r: f"{r['floor_ms']:.2f} ms",
    "share": lambda r: f"{r['floor_share']:.0%}",
}


def table(found: list[dict[str, Any]]) -> str:
    """The results as a Markdown table, and under it where the time of the fast step goes."""
    lines = ["| " + " | ".join(COLUMNS) + " |", "|" + "---|" * len(COLUMNS)]
    lines += ["| " + " | ".join(cell(r) for cell in COLUMNS.values()) + " |" for r in found]
    kinds = list(found[0]["shares"])
    lines += [
        "",
        "| where a fast step's time goes | " + " | ".join(kinds) + " |",
        "|---|" + "---|" * len(kinds),
    ]
    lines += [
        f"| {r['run']} | " + " | ".join(f"{r['shares'][kind]:.0%}" for kind in kinds) + " |" for r in found
    ]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "runs", nargs="*", metavar="RUN", help=f"one of {', '.join(runs.RUNS)}; all if none is given"
    )
    parser.add_argument("--json", type=Path, help="write all numbers to this file")
    parser.add_argument(
        "--threads", type=int, help="CPU threads for all engines; each run's own if not given"
    )
    parser.add_argument("--pieces", action="store_true", help="what each piece of the method costs")
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    parser.add_argument("--memory", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.threads:
        torch.set_num_threads(options.threads)
    if options.measure:
        print(json.dumps(measure(options.measure)))
        return
    if options.memory:
        print(json.dumps(peak_memory(*options.memory)))
        return
    for name in options.runs:
        if name not in runs.RUNS:
            parser.error(f"there is no run {name!r}; choose among {', '.join(runs.RUNS)}")
    if options.pieces:
        print("| run | " + " | ".join(PIECES) + " |\n|" + "---|" * (len(PIECES) + 1))
        for name in options.runs or runs.RUNS:
            torch.set_num_threads(options.threads or runs.make(name).threads)
            costs = measure_pieces(name)
            print(f"| {name} | " + " | ".join(f"{cost:.2f}" for cost in costs.values()) + " |", flush=True)
        return
    found = []
    for name in options.runs or runs.RUNS:
        n = options.threads or min(runs.make(name).threads, torch.get_num_threads())
        threads = ("--threads", str(n))
        result = in_process("--measure", name, *threads) | {"threads": n}
        result["peak_mb"] = {
            engine: in_process("--memory", name, engine, *threads) for engine in ("literal", "fast")
        }
        print(f"{name}: {result['ms']['fast']:.2f} ms, {result['speedup']:.1f}x", file=sys.stderr)
        found.append(result)
    about = {
        "rankone": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
    }
    print(table(found))
    print(f"\n{about}, sgemm {median(r['sgemm_gflop_per_s'] for r in found):.0f} GFLOP/s")
    if options.json:
        options.json.write_text(json.dumps({"about": about, "runs": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
