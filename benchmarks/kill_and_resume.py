"""Kill a real run with SIGKILL at random moments, resume it each time, and compare with a run that was never killed.

    python benchmarks/kill_and_resume.py --kills 20

One run is left alone. A second one is started, killed after a random time, resumed, killed again, and so on; after the last kill
it may finish. Both must then hold the same bytes: metrics, components, optimiser state and figures. Kills fall anywhere:
during start-up, training, the writing of a checkpoint, evaluation and the drawing of the report.
"""

import argparse
import json
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from rankone.checkpoint import load_sealed
from rankone.train import checkpoints


def command(out: Path, steps: int, every: int) -> list[str]:
    settings = [f"checkpoint_every={every}", "log_every=7", "batch_size=512"]
    return [sys.executable, "-m", "rankone", "run", "tms_5-2-id", "--steps", str(steps), "--out", str(out), *settings]


def killed_run(out: Path, kills: int, steps: int, every: int, longest: float, chance: random.Random) -> list[dict]:
    """Run to the end in spite of `kills` kills; return where each of them struck."""
    struck = []
    while True:
        words = [*command(out, steps, every), *(["--resume"] if (out / "config.yaml").exists() else [])]
        process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        wait = chance.uniform(0.2, longest) if len(struck) < kills else None
        try:
            text, _ = process.communicate(timeout=wait)
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()
            found = checkpoints(out)
            struck.append({"after_seconds": round(wait or 0, 2), "newest": found[-1].name if found else None})
            continue
        if process.returncode != 0:
            raise SystemExit(f"A resumed run failed with exit code {process.returncode}:\n{text}")
        if len(struck) >= kills:
            return struck
        # It finished before all kills were used up: take the finish away and go on killing at the end of the run.
        (out / "summary.json").unlink()


def differences(a: Path, b: Path) -> list[str]:
    """The files in which two finished runs differ."""
    found = []
    exact = ["config.yaml", "metrics.jsonl", "decomposition/components.safetensors", "decomposition/history.jsonl"]
    exact += [f"figures/{p.name}" for p in sorted((a / "figures").glob("*.svg"))]
    found += [name for name in exact if (a / name).read_bytes() != (b / name).read_bytes()]
    first, second = (load_sealed(checkpoints(d)[-1])[0] for d in (a, b))
    found += [f"checkpoint: {key}" for key in first if not first[key].equal(second[key])]
    one, two = (json.loads((d / "summary.json").read_text()) for d in (a, b))
    found += [
        f"summary: {k}" for k in one if one[k] != two[k] and k not in ("wall_seconds", "ms_per_step", "peak_rss_mb")
    ]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--steps", type=int, default=3000)
    parser.add_argument("--checkpoint-every", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0, help="of the random moments")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        whole, broken = Path(folder) / "whole", Path(folder) / "broken"
        began = time.perf_counter()
        subprocess.run(command(whole, options.steps, options.checkpoint_every), check=True, stdout=subprocess.DEVNULL)
        undisturbed = time.perf_counter() - began
        chance = random.Random(options.seed)
        struck = killed_run(broken, options.kills, options.steps, options.checkpoint_every, undisturbed, chance)
        for number, kill in enumerate(struck, 1):
            print(f"kill {number}: after {kill['after_seconds']} s, newest checkpoint {kill['newest']}")
        differing = differences(whole, broken)
        verdict = "bit-identical" if not differing else f"DIFFERS in {', '.join(differing)}"
        print(f"{len(struck)} kills; undisturbed run {undisturbed:.1f} s; result: {verdict}")
        raise SystemExit(1 if differing else 0)


if __name__ == "__main__":
    main()
