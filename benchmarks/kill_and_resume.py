"""Kill real runs with SIGKILL at random moments, resume each, and compare with a run that was never killed.

    python benchmarks/kill_and_resume.py --kills 100 --cold --jobs 2

One run is left alone. Then, for every kill, a fresh run is started in a directory of its own, killed at
a random moment, and resumed to its end. It must then hold the same bytes as the undisturbed run:
metrics, components, optimiser state, figures. Half of the moments fall into training, the writing of
checkpoints included, a quarter before it, and a quarter between the last step and the last file.

With --cold, each of the two processes of a run finds its own cache of compiled kernels: full, empty
(as after installation), or damaged. Without it, all share one.
"""

import argparse
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from rankone import __version__
from rankone.files import load_sealed

CACHES = ("full", "empty", "damaged")


@dataclass
class Trial:
    """One killed run and what came of it."""

    moment: str
    caches: tuple[str, str]
    step: int
    differences: list[str]


def command(out: Path, steps: int, every: int) -> list[str]:
    settings = [f"checkpoint_every={every}", "log_every=7", "batch_size=512", "--out", str(out)]
    return [
        sys.executable,
        "-m",
        "rankone",
        "run",
        "tms_5-2-id",
        "--preset",
        "tuned",
        "--steps",
        str(steps),
        *settings,
        "--resume",
    ]


def start(words: list[str], cache: Path) -> subprocess.Popen:
    environment = {**os.environ, "RANKONE_CACHE_DIR": str(cache)}
    return subprocess.Popen(
        words, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, env=environment
    )


def finish(process: subprocess.Popen) -> None:
    _, errors = process.communicate()
    if process.returncode != 0:
        raise SystemExit(f"A run failed with exit code {process.returncode}:\n{errors}")


def last_step(out: Path) -> int:
    """The last step that metrics.jsonl shows whole; -1 before the first."""
    try:
        lines = (out / "metrics.jsonl").read_text().split("\n")[:-1]
    except FileNotFoundError:
        return -1
    return json.loads(lines[-1])["step"] if lines else -1


def wait_for_step(out: Path, step: int, process: subprocess.Popen) -> None:
    while last_step(out) < step and process.poll() is None:
        time.sleep(0.003)


def make_cache(kind: str, full: Path, folder: Path, chance: random.Random) -> Path:
    """A cache of compiled kernels in one of three states."""
    if kind == "full":
        return full
    cache = Path(tempfile.mkdtemp(dir=folder))
    if kind == "damaged":
        shutil.copytree(full, cache, dirs_exist_ok=True)
        victim = chance.choice(sorted(p for p in cache.rglob("*") if p.is_file() and p.suffix != ".lock"))
        content = bytearray(victim.read_bytes())
        if chance.random() < 0.3:
            victim.unlink()
        elif chance.random() < 0.5:
            victim.write_bytes(content[: chance.randrange(len(content))])
        else:
            content[chance.randrange(len(content))] ^= 1 << chance.randrange(8)
            victim.write_bytes(content)
    return cache


def differences(a: Path, b: Path) -> list[str]:
    """What differs between two finished runs."""
    names = ["config.yaml", "metrics.jsonl", "decomposition/components.safetensors"]
    names += [f"figures/{p.name}" for p in sorted((a / "figures").glob("*.svg"))]
    found = [name for name in names if (a / name).read_bytes() != (b / name).read_bytes()]
    first, second = (load_sealed(max((d / "checkpoints").glob("step-*")))[0] for d in (a, b))
    found += [f"checkpoint: {key}" for key in first if not first[key].equal(second[key])]
    one, two = (json.loads((d / "summary.json").read_text()) for d in (a, b))
    measured = ("wall_seconds", "train_seconds", "ms_per_step", "peak_rss_mb")
    return found + [f"summary: {k}" for k in one if one[k] != two[k] and k not in measured]


class Trials:
    """The undisturbed run, and killed ones to compare with it."""

    def __init__(self, folder: Path, steps: int, every: int, cold: bool) -> None:
        self.folder, self.steps, self.every, self.cold = folder, steps, every, cold
        self.full = folder / "cache"
        self.whole = folder / "whole"
        began = time.perf_counter()
        process = start(command(self.whole, steps, every), self.full)
        wait_for_step(self.whole, 0, process)
        self.starting = time.perf_counter() - began
        wait_for_step(self.whole, steps - 1, process)
        trained = time.perf_counter()
        finish(process)
        self.finishing = time.perf_counter() - trained

    def run(self, number: int, seed: int) -> Trial:
        chance = random.Random(seed * 100_000 + number)
        out = self.folder / f"killed-{number}"
        caches = tuple(chance.choice(CACHES) if self.cold else "full" for _ in range(2))
        words = command(out, self.steps, self.every)
        process = start(words, make_cache(caches[0], self.full, self.folder, chance))
        moment = chance.choice(("starting", "training", "training", "finishing"))
        if moment == "starting":
            time.sleep(chance.uniform(0, self.starting))
        elif moment == "training":
            wait_for_step(out, chance.randrange(self.steps), process)
            time.sleep(chance.uniform(0, 0.02))
        else:
            wait_for_step(out, self.steps - 1, process)
            time.sleep(chance.uniform(0, self.finishing))
        process.kill()
        process.communicate()
        step = last_step(out)
        finish(start(words, make_cache(caches[1], self.full, self.folder, chance)))
        trial = Trial(moment, (caches[0], caches[1]), step, differences(self.whole, out))
        shutil.rmtree(out)
        print(f"{number}: killed while {moment} after step {step}, caches {' and '.join(caches)}: ", end="")
        print(
            "identical" if not trial.differences else f"DIFFERS in {', '.join(trial.differences)}", flush=True
        )
        return trial


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--checkpoint-every", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0, help="of the random moments")
    parser.add_argument("--cold", action="store_true", help="mix full, empty and damaged kernel caches")
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        trials = Trials(Path(name), options.steps, options.checkpoint_every, options.cold)
        with ThreadPoolExecutor(options.jobs) as pool:
            results = list(pool.map(trials.run, range(1, options.kills + 1), [options.seed] * options.kills))
    caches = Counter(cache for trial in results for cache in trial.caches)
    moments = Counter(trial.moment for trial in results)
    differing = sum(bool(trial.differences) for trial in results)
    print(
        f"rankone {__version__}, {options.steps} steps of tms_5-2-id, checkpoint every {options.checkpoint_every}"
    )
    print("kills while " + ", ".join(f"{kind}: {n}" for kind, n in sorted(moments.items())))
    print("kernel caches found " + ", ".join(f"{kind}: {n}" for kind, n in sorted(caches.items())))
    print(f"{options.kills} kills, {options.kills - differing} identical ends")
    if differing:
        raise SystemExit(f"{differing} resumed runs differ")


if __name__ == "__main__":
    main()
