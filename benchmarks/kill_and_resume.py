"""Kill real runs with SIGKILL at random moments, resume each, and compare with a run that was never
killed.

    python benchmarks/kill_and_resume.py --kills 20

One run is left alone. Then, for every kill, a fresh run is started in a directory of its own,
killed at a random moment, and resumed to its end. It must then hold the same bytes as the
undisturbed run: metrics, components, optimiser state, figures. Most moments fall into training, the
writing of checkpoints included; the others between the last step and the last file.
"""

import argparse
import json
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from rankone.files import load_sealed
from rankone.train import checkpoints


def command(out: Path, steps: int, every: int) -> list[str]:
    settings = [f"checkpoint_every={every}", "log_every=7", "batch_size=512"]
    return [
        sys.executable,
        "-m",
        "rankone",
        "run",
        "tms_5-2-id",
        "--steps",
        str(steps),
        "--out",
        str(out),
        *settings,
    ]


def start(words: list[str], out: Path) -> subprocess.Popen:
    """Start a run and return when its first metrics are there."""
    process = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    metrics = out / "metrics.jsonl"
    while not (metrics.exists() and metrics.stat().st_size):
        if process.poll() is not None:
            raise SystemExit(
                f"A run ended before it began: {process.stderr.read() if process.stderr else ''}"
            )
        time.sleep(0.01)
    return process


def wait_for_step(out: Path, step: int, process: subprocess.Popen) -> None:
    while last_step(out) < step and process.poll() is None:
        time.sleep(0.003)


def finish(words: list[str]) -> None:
    done = subprocess.run(words, capture_output=True, text=True)
    if done.returncode != 0:
        raise SystemExit(
            f"A resumed run failed with exit code {done.returncode}:\n{done.stdout}{done.stderr}"
        )


def last_step(out: Path) -> int:
    """The last step that metrics.jsonl shows whole."""
    lines = (out / "metrics.jsonl").read_text().split("\n")[:-1]
    return json.loads(lines[-1])["step"]


def differences(a: Path, b: Path) -> list[str]:
    """The files in which two finished runs differ."""
    exact = [
        "config.yaml",
        "metrics.jsonl",
        "decomposition/components.safetensors",
        "decomposition/history.jsonl",
    ]
    exact += [f"figures/{p.name}" for p in sorted((a / "figures").glob("*.svg"))]
    found = [name for name in exact if (a / name).read_bytes() != (b / name).read_bytes()]
    first, second = (load_sealed(checkpoints(d)[-1])[0] for d in (a, b))
    found += [f"checkpoint: {key}" for key in first if not first[key].equal(second[key])]
    one, two = (json.loads((d / "summary.json").read_text()) for d in (a, b))
    measured = ("wall_seconds", "ms_per_step", "peak_rss_mb")
    return found + [f"summary: {k}" for k in one if one[k] != two[k] and k not in measured]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--checkpoint-every", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0, help="of the random moments")
    options = parser.parse_args()
    chance = random.Random(options.seed)
    differing: list[str] = []
    training = 0
    with tempfile.TemporaryDirectory() as folder:
        whole = Path(folder) / "whole"
        process = start(command(whole, options.steps, options.checkpoint_every), whole)
        wait_for_step(whole, options.steps - 1, process)
        trained = time.perf_counter()
        process.communicate()
        finishing = time.perf_counter() - trained
        for number in range(1, options.kills + 1):
            out = Path(folder) / f"killed-{number}"
            words = command(out, options.steps, options.checkpoint_every)
            process = start(words, out)
            # Three kills in four strike at a random step, the others while the run evaluates, draws
            # and writes its report.
            in_training = chance.random() < 0.75
            wait_for_step(out, chance.randrange(options.steps) if in_training else options.steps - 1, process)
            time.sleep(chance.uniform(0, 0.02 if in_training else finishing))
            process.kill()
            process.communicate()
            step = last_step(out)
            training += step < options.steps - 1
            where = f"at step {step}" if step < options.steps - 1 else "after the last step"
            if (out / "summary.json").exists():
                where = "after the end"
            finish([*words, "--resume"])
            found = differences(whole, out)
            differing += found
            print(f"kill {number}: {where}: {found or 'same'}", flush=True)
    verdict = "bit-identical" if not differing else f"DIFFERENT in {', '.join(sorted(set(differing)))}"
    print(f"{options.kills} kills, {training} of them during training; all resumed runs are {verdict}")
    raise SystemExit(1 if differing else 0)


if __name__ == "__main__":
    main()
