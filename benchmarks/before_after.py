"""Two installed versions of rankone side by side: the same bits, and as fast?

    python benchmarks/before_after.py bits --before OLD/.venv/bin/rankone --after .venv/bin/rankone
    python benchmarks/before_after.py speed --before OLD/.venv/bin/rankone --after .venv/bin/rankone

Both commands drive the two command lines, whatever is behind them. `bits` makes 300 steps of every
experiment with each, under the presets `tuned` and `paper`, and compares metrics.jsonl and all factors
byte for byte. `speed` keeps one run of each going and lets them take turns of a fraction of a second, so
that whatever else the machine does hits both alike. What is printed is a table in Markdown.
"""

import argparse
import hashlib
import statistics
import subprocess
import tempfile
from pathlib import Path

import safetensors
import torch

EXPERIMENTS = ("tms_5-2", "tms_5-2-id", "tms_40-10", "tms_40-10-id", "resid_mlp1", "resid_mlp2", "resid_mlp3")


def run(program: str, experiment: str, out: Path, *settings: str) -> None:
    done = subprocess.run(
        [program, "run", experiment, "--out", str(out), *settings], capture_output=True, text=True
    )
    if done.returncode:
        raise SystemExit(f"{program} run {experiment} failed:\n{done.stdout}{done.stderr}")


def factors(path: Path) -> dict[str, torch.Tensor]:
    with safetensors.safe_open(path, framework="pt") as file:
        return {name: file.get_tensor(name) for name in file.keys() if name != "history"}  # noqa: SIM118


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()[:12]


def bits(programs: list[str], experiments: list[str], steps: int, tuned_before: str) -> None:
    print("| experiment | preset | metrics.jsonl (SHA-256) before | after | factors |\n|---|---|---|---|---|")
    for preset in ("tuned", "paper"):
        for name in experiments:
            with tempfile.TemporaryDirectory() as folder:
                outs = [Path(folder) / side for side in ("before", "after")]
                names = (tuned_before if preset == "tuned" else preset, preset)
                for program, out, called in zip(programs, outs, names, strict=True):
                    run(program, name, out, "--preset", called, "--steps", str(steps))
                old, new = (factors(out / "decomposition/components.safetensors") for out in outs)
                same = old.keys() == new.keys() and all(torch.equal(old[k], new[k]) for k in old)
                logs = " | ".join(digest(out / "metrics.jsonl") for out in outs)
                verdict = f"{len(old)} of {len(old)} tensors identical" if same else "DIFFERENT"
                print(f"| {name} | {preset} | {logs} | {verdict} |", flush=True)


WORKER = """
import sys, time
try:
    from rankone.console import RunDisplay
except ImportError:  # 0.1.0
    from rankone.progress import RunDisplay
from rankone.cli import main

began = 0.0

def turn(display, progress):
    global began
    print("took", time.perf_counter() - began, file=sys.stderr, flush=True)
    sys.stdin.readline()
    began = time.perf_counter()

RunDisplay.__call__ = turn
main(sys.argv[1:])
"""
"""A run that stops at every log step until it is its turn."""


class Worker:
    """One of the two versions, in the middle of a run."""

    def __init__(self, program: str, experiment: str, block: int, out: Path) -> None:
        words = ["run", experiment, "--preset", "paper", f"log_every={block}", "checkpoint_every=1000000"]
        python = Path(program).parent / "python"
        self.process = subprocess.Popen(
            [python, "-c", WORKER, *words, "--out", str(out)],
            stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        self._answer()

    def turn(self) -> float:
        """Seconds that the next block of steps takes."""
        assert self.process.stdin is not None
        print(file=self.process.stdin, flush=True)
        return self._answer()

    def _answer(self) -> float:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            if line.startswith("took "):
                return float(line.split()[1])
        raise SystemExit("A run ended before its turn.")


def speed(programs: list[str], experiments: list[str], rounds: int, seconds: float) -> None:
    print(
        "| run | before, ms/step | after | before / after, median of turns | quartiles |\n|---|---|---|---|---|"
    )
    guess = dict(zip(EXPERIMENTS, (2.5, 3.5, 20, 30, 12, 80, 210), strict=True))
    for name in experiments:
        block = max(2, int(1000 * seconds / guess[name]))
        with tempfile.TemporaryDirectory() as folder:
            workers = [Worker(p, name, block, Path(folder) / str(i)) for i, p in enumerate(programs)]
            turns: list[list[float]] = [[], []]
            for turn in range(rounds + 2):
                for side in (0, 1) if turn % 2 else (1, 0):
                    turns[side].append(1000 * workers[side].turn() / block)
            for worker in workers:
                worker.process.kill()
                worker.process.communicate()
        old, new = (statistics.median(of[2:]) for of in turns)
        ratios = sorted(a / b for a, b in zip(turns[0][2:], turns[1][2:], strict=True))
        low, middle, high = statistics.quantiles(ratios, n=4)
        print(f"| {name} | {old:.2f} | {new:.2f} | {middle:.3f} | {low:.2f} to {high:.2f} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("what", choices=("bits", "speed"))
    parser.add_argument("--before", required=True, help="the older `rankone` command")
    parser.add_argument("--after", required=True, help="the newer one")
    parser.add_argument(
        "--tuned-before", default="tuned", metavar="NAME", help="the older one's preset: `default` in 0.1.0"
    )
    parser.add_argument("--steps", type=int, default=300, help="of each run, for bits")
    parser.add_argument("--rounds", type=int, default=40, help="turns of each, for speed")
    parser.add_argument("--seconds", type=float, default=0.3, help="of a turn, for speed")
    parser.add_argument("--only", nargs="+", choices=EXPERIMENTS, default=EXPERIMENTS, metavar="NAME")
    options = parser.parse_args()
    programs = [options.before, options.after]
    if options.what == "bits":
        bits(programs, options.only, options.steps, options.tuned_before)
    else:
        speed(programs, options.only, options.rounds, options.seconds)


if __name__ == "__main__":
    main()
