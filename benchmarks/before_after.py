"""Two installed versions of rankone side by side: the same bits, and as fast?

    python benchmarks/before_after.py bits --before OLD/.venv/bin/rankone --after .venv/bin/rankone
    python benchmarks/before_after.py speed --before OLD/.venv/bin/rankone --after .venv/bin/rankone

Both commands drive the two command lines, whatever is behind them. `bits` makes 300 steps of every
experiment under both presets with each and compares metrics.jsonl and all factors byte for byte. `speed`
lets them take turns, several rounds of each run, and compares the time between two checkpoints of one
run: no start, no compilation. What is printed is a table in Markdown.
"""

import argparse
import hashlib
import json
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


def bits(programs: list[str], steps: int) -> None:
    print("| experiment | preset | metrics.jsonl (SHA-256) before | after | factors |\n|---|---|---|---|---|")
    for preset in ("default", "paper"):
        for name in EXPERIMENTS:
            with tempfile.TemporaryDirectory() as folder:
                outs = [Path(folder) / side for side in ("before", "after")]
                for program, out in zip(programs, outs, strict=True):
                    run(program, name, out, "--preset", preset, "--steps", str(steps))
                old, new = (factors(out / "decomposition/components.safetensors") for out in outs)
                same = old.keys() == new.keys() and all(torch.equal(old[k], new[k]) for k in old)
                logs = " | ".join(digest(out / "metrics.jsonl") for out in outs)
                verdict = f"{len(old)} of {len(old)} tensors identical" if same else "DIFFERENT"
                print(f"| {name} | {preset} | {logs} | {verdict} |", flush=True)


def pace(out: Path) -> float:
    """Milliseconds per step between the first and the last checkpoint of a run."""
    points = []
    for path in sorted((out / "checkpoints").glob("step-*")):
        with safetensors.safe_open(path, framework="pt") as file:
            meta = json.loads(file.metadata()["rankone"])["meta"]
        points.append((meta["step"], meta["seconds"]))
    (first, began), (last, ended) = points[0], points[-1]
    return 1000 * (ended - began) / (last - first)


def speed(programs: list[str], rounds: int, seconds: float) -> None:
    print("| run | before, ms/step | after | before / after |\n|---|---|---|---|")
    guess = dict(zip(EXPERIMENTS, (1.5, 2.5, 16, 25, 10, 70, 200), strict=True))
    for name in EXPERIMENTS:
        every = max(10, int(1000 * seconds / guess[name] / 2))
        words = [
            "--preset",
            "paper",
            "--steps",
            str(3 * every),
            f"checkpoint_every={every}",
            "keep_checkpoints=9",
        ]
        paces: list[list[float]] = [[], []]
        for turn in range(rounds):
            for side in (0, 1) if turn % 2 else (1, 0):
                with tempfile.TemporaryDirectory() as folder:
                    run(programs[side], name, Path(folder) / "run", *words)
                    paces[side].append(pace(Path(folder) / "run"))
        old, new = (statistics.median(of) for of in paces)
        ratios = sorted(a / b for a, b in zip(*paces, strict=True))
        print(
            f"| {name} | {old:.2f} | {new:.2f} | {old / new:.3f} (turns: {ratios[0]:.2f} to {ratios[-1]:.2f}) |",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("what", choices=("bits", "speed"))
    parser.add_argument("--before", required=True, help="the older `rankone` command")
    parser.add_argument("--after", required=True, help="the newer one")
    parser.add_argument("--steps", type=int, default=300, help="of each run, for bits")
    parser.add_argument("--rounds", type=int, default=5, help="turns of each, for speed")
    parser.add_argument("--seconds", type=float, default=4.0, help="of training per turn, for speed")
    options = parser.parse_args()
    programs = [options.before, options.after]
    if options.what == "bits":
        bits(programs, options.steps)
    else:
        speed(programs, options.rounds, options.seconds)


if __name__ == "__main__":
    main()
