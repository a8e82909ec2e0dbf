"""Several seeds at once: the same bits as one at a time, one summary, and nothing lost when something goes wrong."""

import json
import os
import re
import signal
import subprocess
import sys
import time

import pytest

from rankone.errors import RankoneError
from rankone.runs.config import experiment_config
from rankone.runs.many import ParallelRun, cores, jobs_for, run_all

SMALL = ("batch_size=64", "--steps", "12", "faithfulness_warmup.steps=0")


def rankone(*words, cwd):
    return subprocess.run([sys.executable, "-m", "rankone", *words], cwd=cwd, capture_output=True, text=True)


def test_seeds_are_the_runs_that_one_makes_alone(tmp_path):
    done = rankone("run", "tms_5-2", *SMALL, "--seed", "3", "--seeds", "2", "--jobs", "2", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "seeds 3 to 4, 12 steps, 2 at a time, into runs" in done.stdout
    assert re.search(r"Recovered 0 of 2 seeds \(95 % interval 0% to 66%\)", done.stdout)
    for seed in (3, 4):
        assert f"seed {seed}: not recovered" in done.stdout
        assert (tmp_path / f"runs/tms_5-2-default-seed{seed}/report.html").exists()
    together = json.loads((tmp_path / "runs/tms_5-2-default-seeds3-4.json").read_text())
    assert [run["seed"] for run in together["runs"]] == [3, 4]
    alone = rankone("run", "tms_5-2", *SMALL, "--seed", "4", "--out", "alone", cwd=tmp_path)
    assert alone.returncode == 0
    for name in ("decomposition/components.safetensors", "metrics.jsonl"):
        one, other = tmp_path / "alone" / name, tmp_path / "runs/tms_5-2-default-seed4" / name
        assert one.read_bytes() == other.read_bytes()
    # A second time: nothing is overwritten; --resume adds the seed that is missing and leaves the others.
    again = rankone("run", "tms_5-2", *SMALL, "--seed", "3", "--seeds", "2", cwd=tmp_path)
    assert again.returncode == 1
    assert "already holds a run, which is complete" in again.stderr
    before = (tmp_path / "runs/tms_5-2-default-seed3/summary.json").stat().st_mtime_ns
    more = rankone("run", "tms_5-2", *SMALL, "--seed", "3", "--seeds", "3", "--resume", cwd=tmp_path)
    assert more.returncode == 0, more.stderr
    assert "of 3 seeds" in more.stdout
    assert (tmp_path / "runs/tms_5-2-default-seed3/summary.json").stat().st_mtime_ns == before


@pytest.mark.parametrize(
    ("signum", "to_all"),
    [(signal.SIGINT, True), (signal.SIGINT, False), (signal.SIGTERM, False)],
    ids=["Ctrl-C", "SIGINT", "SIGTERM"],
)
def test_interrupted_seeds_are_saved_and_resumed(tmp_path, signum, to_all):
    words = ["run", "tms_5-2", "batch_size=64", "--steps", "100000", "--seeds", "3", "--jobs", "2", "--out", "all"]
    command = [sys.executable, "-m", "rankone", *words, "checkpoint_every=1000000", "log_every=10"]
    process = subprocess.Popen(
        command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    deadline = time.monotonic() + 120
    while not all((tmp_path / f"all/seed{s}/metrics.jsonl").exists() for s in (0, 1)):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    time.sleep(1)
    if to_all:
        os.killpg(process.pid, signum)  # as a terminal does it
    else:
        process.send_signal(signum)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 128 + signum, out + err
    assert "Interrupted; everything is saved. Go on with the same command and --resume." in err
    assert "Traceback" not in err
    for seed in (0, 1):
        assert len(list((tmp_path / f"all/seed{seed}/checkpoints").iterdir())) == 1
    assert not (tmp_path / "all/seed2").exists()


def test_a_seed_that_fails_takes_no_other_with_it(tmp_path):
    config = experiment_config("tms_5-2", steps=5, assignments=["batch_size=64", "faithfulness_warmup.steps=0"])
    broken = config.model_copy(update={"seed": 1, "target": config.target.model_copy(update={"sha256": "0" * 64})})
    runs = [ParallelRun(config, tmp_path / "a", "a"), ParallelRun(broken, tmp_path / "b", "b")]
    seen = []
    assert run_all(runs, jobs=1, observer=lambda runs: seen.append([one.state for one in runs])) == 0
    assert [one.state for one in runs] == ["done", "failed"]
    assert "0000" in runs[1].message
    assert ["running", "waiting"] in seen


def test_how_many_at_a_time():
    config = experiment_config("tms_5-2")
    assert jobs_for(config, None) == cores()
    assert jobs_for(config.model_copy(update={"threads": 1000}), None) == 1
    assert jobs_for(config, 3) == 3
    with pytest.raises(RankoneError, match="--jobs is 0; it must be at least 1"):
        jobs_for(config, 0)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--seeds", "0"], "--seeds is 0; it must be at least 1"),
        (["--jobs", "2"], "--jobs says how many seeds run at a time; it needs --seeds"),
    ],
)
def test_senseless_numbers(tmp_path, words, message):
    done = rankone("run", "tms_5-2", *words, cwd=tmp_path)
    assert done.returncode == 1
    assert message in done.stderr
