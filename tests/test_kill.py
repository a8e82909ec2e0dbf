"""SIGKILL and SIGINT on a real process. (`benchmarks/kill_and_resume.py --kills 20` does the same
at length.)"""

import os
import re
import signal
import subprocess
import sys
import time

import pytest

from conftest import ROOT


def start(words, cwd):
    """A process that Ctrl-C reaches, also where this one was started in the background and ignores it."""
    return subprocess.Popen(
        words,
        cwd=cwd,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )


def test_killed_runs_end_bit_identical():
    words = [
        sys.executable,
        str(ROOT / "benchmarks/kill_and_resume.py"),
        "--kills",
        "3",
        "--steps",
        "400",
        "--checkpoint-every",
        "20",
    ]
    done = subprocess.run(words, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "3 kills, 3 identical ends" in done.stdout


@pytest.mark.parametrize(
    ("signum", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)], ids=["SIGINT", "SIGTERM"]
)
def test_interrupting_the_report_says_how_to_go_on(tmp_path, signum, code):
    words = [
        sys.executable,
        "-u",
        "-m",
        "rankone",
        "run",
        "tms_5-2",
        "batch_size=64",
        "--steps",
        "20",
        "--out",
        "a",
    ]
    process = start(words, tmp_path)
    assert process.stderr is not None
    for line in process.stderr:
        if line.startswith("Drawing"):
            break
    os.kill(process.pid, signum)
    _, err = process.communicate(timeout=60)
    assert process.returncode == code, err
    assert "Interrupted. Go on with: rankone run a --resume" in err
    assert "Traceback" not in err


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
    process = start(words, tmp_path)
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
        r"Interrupted at step \d+ of 100000; everything is saved in a run/checkpoints/step-\d+.safetensors",
        err,
    )
    assert "Go on with: rankone run 'a run' --resume" in err
    process = subprocess.Popen(
        [sys.executable, "-m", "rankone", "run", "a run", "--resume"],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None
    seen = [process.stderr.readline() for _ in range(2)]
    process.kill()
    process.communicate()
    assert "Resuming from step-" in seen[1]
