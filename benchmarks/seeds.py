"""Is it better to run seeds side by side on one thread each, or one after the other on all threads?

    python benchmarks/seeds.py [RUN ...] [--steps N]

Runs as many seeds as there are cores both ways with `rankone run --seeds`, and prints how many
milliseconds of wall time a step of one seed costs. As a measure of what a batched dimension over seeds
could give, it also times one step on as many times the rows in one process, on all threads: a batched
step does at least that work in at least as many operations.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median

import runs
import step_time
import torch

from rankone.data import generator_for
from rankone.runs.config import experiment_config
from rankone.runs.run import cores


def milliseconds(name: str, steps: int, *, jobs: int, threads: int, seeds: int) -> float:
    """Wall time per step and seed, from the slowest of the runs that share the machine."""
    with tempfile.TemporaryDirectory() as folder:
        words = [
            sys.executable,
            "-m",
            "rankone",
            "run",
            name,
            "--preset",
            "tuned",
            f"threads={threads}",
            "faithfulness_warmup.steps=0",
        ]
        words += ["--steps", str(steps), "--seeds", str(seeds), "--jobs", str(jobs), "--out", f"{folder}/all"]
        subprocess.run(words, stdout=subprocess.DEVNULL, check=True)
        summaries = [json.loads(p.read_text()) for p in Path(folder).glob("all/seed*/summary.json")]
    return max(summary["ms_per_step"] for summary in summaries) / jobs


def batched(name: str, seeds: int) -> float:
    """Milliseconds per seed of one step on `seeds` times the rows."""
    config = experiment_config(name, preset="paper")
    run = runs.make(name)
    run.data = config.target.data(seeds * config.batch_size)
    training = run.training("fast")
    with training.ready():
        times = [
            step_time.timed(lambda i: training.take_step(i, run.data(generator_for(0, "data", i))), i)
            for i in range(40)
        ]
    return median(times[5:]) / seeds


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("runs", nargs="*", default=["tms_5-2", "tms_40-10"])
    parser.add_argument("--steps", type=int, default=200)
    options = parser.parse_args()
    n = cores()
    print(
        "| run | one after the other, all threads | side by side, one thread each | rows of all "
        "seeds in one step |"
    )
    print("|---|---|---|---|")
    for name in options.runs:
        apart = milliseconds(name, options.steps, jobs=1, threads=n, seeds=2)
        beside = milliseconds(name, options.steps, jobs=n, threads=1, seeds=n)
        torch.set_num_threads(n)
        print(f"| {name} | {apart:.2f} ms | {beside:.2f} ms | {batched(name, n):.2f} ms |")


if __name__ == "__main__":
    main()
