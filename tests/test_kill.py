"""SIGKILL and SIGINT on a real process. (`benchmarks/kill_and_resume.py --kills 20` does the same at length.)"""

import os
import re
import signal
import subprocess
import sys
import time

from conftest import ROOT


def test_killed_runs_end_bit_identical():
    words = [
        sys.executable,
        str(ROOT / "benchmarks/kill_and_resume.py"),
        "--kills",
        "4",
        "--steps",
        "300",
        "--checkpoint-every",
        "20",
    ]
    done = subprocess.run(words, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "4 kills" in done.stdout
    assert "bit-identical" in done.stdout


def test_interrupting_says_how_to_go_on(tmp_path):
    words = [
        sys.executable,
        "-m",
        "rankone",
        "run",
        "tms_5-2",
        "batch_size=64",
        "log_every=10",
        "--steps",
        "100000",
        "--out",
        "a run",
    ]
    process = subprocess.Popen(words, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        metrics = tmp_path / "a run" / "metrics.jsonl"
        if metrics.exists() and metrics.stat().st_size:
            break
        time.sleep(0.1)
    os.kill(process.pid, signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "Traceback" not in err
    assert re.search(
        r"Interrupted at step \d+ of 100000; everything is saved in a run/checkpoints/step-\d+.safetensors", err
    )
    assert "Go on with: rankone run 'a run' --resume" in err
    process = subprocess.Popen(
        [sys.executable, "-m", "rankone", "run", "a run", "--resume"], cwd=tmp_path, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    seen = [process.stdout.readline() for _ in range(2)]
    process.kill()
    process.communicate()
    assert "Resuming from step-" in seen[1]
