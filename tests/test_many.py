"""Several seeds at once: the same bits as one at a time, one summary, and nothing lost when one fails."""

import json
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import time

import pytest

from rankone.errors import RankoneError
from rankone.runs.config import experiment_config
from rankone.runs.many import ParallelRun, jobs_for, run_all, seed_runs
from rankone.runs.run import cores

SMALL = ("batch_size=64", "--steps", "12", "faithfulness_warmup.steps=0")
LABEL = "tms_5-2-recipe-batchsize64-faithfulnesswarmup.steps0-steps12"


def rankone(*words, cwd):
    return subprocess.run([sys.executable, "-m", "rankone", *words], cwd=cwd, capture_output=True, text=True)


def test_seeds_are_the_runs_that_one_makes_alone(tmp_path):
    done = rankone("run", "tms_5-2", *SMALL, "--seed", "3", "--seeds", "2", "--jobs", "2", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "seeds 3 to 4, 12 steps, 2 at a time, into runs" in done.stderr
    assert re.search(r"Recovered 0 of 2 seeds \(95 % interval 0% to 66%\)", done.stdout)
    for seed in (3, 4):
        assert f"seed {seed}: not recovered" in done.stderr
        assert (tmp_path / f"runs/{LABEL}-seed{seed}/report.html").exists()
    together = json.loads((tmp_path / f"runs/{LABEL}-seeds3-4/seeds.json").read_text())
    assert [run["seed"] for run in together["runs"]] == [3, 4]
    alone = rankone("run", "tms_5-2", *SMALL, "--seed", "4", "--out", "alone", cwd=tmp_path)
    assert alone.returncode == 0
    for name in ("decomposition/components.safetensors", "metrics.jsonl"):
        one, other = tmp_path / "alone" / name, tmp_path / f"runs/{LABEL}-seed4" / name
        assert one.read_bytes() == other.read_bytes()
    # A second time: nothing is overwritten; --resume adds the seed that is missing and leaves the
    # others.
    again = rankone("run", "tms_5-2", *SMALL, "--seed", "3", "--seeds", "2", cwd=tmp_path)
    assert again.returncode == 1
    assert "already holds a run, which is complete" in again.stderr
    before = (tmp_path / f"runs/{LABEL}-seed3/summary.json").stat().st_mtime_ns
    more = rankone("run", "tms_5-2", *SMALL, "--seed", "3", "--seeds", "3", "--resume", cwd=tmp_path)
    assert more.returncode == 0, more.stderr
    assert "of 3 seeds" in more.stdout
    assert (tmp_path / f"runs/{LABEL}-seed3/summary.json").stat().st_mtime_ns == before


@pytest.mark.parametrize(
    ("signum", "to_all"),
    [(signal.SIGINT, True), (signal.SIGINT, False), (signal.SIGTERM, False)],
    ids=["Ctrl-C", "SIGINT", "SIGTERM"],
)
def test_interrupted_seeds_are_saved_and_resumed(tmp_path, signum, to_all):
    words = [
        "run",
        "tms_5-2",
        "batch_size=64",
        "--steps",
        "100000",
        "--seeds",
        "3",
        "--jobs",
        "2",
        "--out",
        "all",
    ]
    command = [sys.executable, "-m", "rankone", *words, "checkpoint_every=1000000", "log_every=10"]
    process = subprocess.Popen(
        command,
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
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
    config = experiment_config(
        "tms_5-2", steps=5, assignments=["batch_size=64", "faithfulness_warmup.steps=0"]
    )
    broken = config.model_copy(
        update={"seed": 1, "target": config.target.model_copy(update={"sha256": "0" * 64})}
    )
    runs = [ParallelRun(config, tmp_path / "a", "a"), ParallelRun(broken, tmp_path / "b", "b")]
    seen = []
    assert run_all(runs, jobs=1, observer=lambda runs: seen.append([one.state for one in runs])) == 0
    assert [one.state for one in runs] == ["done", "failed"]
    assert "0000" in runs[1].message
    assert ["running", "waiting"] in seen


def test_a_run_that_is_killed_takes_no_other_with_it(tmp_path):
    quick = ["batch_size=64", "faithfulness_warmup.steps=0", "log_every=1"]
    long, short = (experiment_config("tms_5-2", steps=steps, assignments=quick) for steps in (10**6, 5))
    runs = [ParallelRun(long, tmp_path / "long", "long"), ParallelRun(short, tmp_path / "short", "short")]

    def kill(runs):
        if runs[0].progress is not None and runs[0].state == "running":
            for child in multiprocessing.active_children():
                os.kill(child.pid, signal.SIGKILL)

    assert run_all(runs, jobs=1, observer=kill) == 0
    assert [one.state for one in runs] == ["failed", "done"]
    assert runs[0].message == "its process ended with exit code -9"


def write_note(directory, config, result, evaluation, summary):
    directory.write("note.txt", f"{summary.errors} errors")


def test_each_run_gets_its_report(tmp_path):
    config = experiment_config(
        "tms_5-2", steps=5, assignments=["batch_size=64", "faithfulness_warmup.steps=0"]
    )
    runs = seed_runs(config, 2, tmp_path / "all")
    assert run_all(runs, jobs=2, observer=lambda _: None, report=write_note) == 0
    for one, seed in zip(runs, (0, 1), strict=True):
        assert one.out == tmp_path / f"all/seed{seed}"
        assert (one.out / "note.txt").read_text() == f"{one.summary.errors} errors"


def test_how_many_at_a_time(monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    config = experiment_config("tms_5-2")
    assert jobs_for(config, None) == cores()
    many = config.model_copy(update={"threads": 1000})
    assert jobs_for(many, None) == 1
    assert jobs_for(config, 3) == 3
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert jobs_for(many, None) == cores()
    for jobs in (0, 1025):
        with pytest.raises(RankoneError, match=f"--jobs is {jobs}; it must be at least 1 and at most 1,024"):
            jobs_for(config, jobs)


def test_how_many_seeds():
    config = experiment_config("tms_5-2", seed=7)
    assert [one.out.as_posix() for one in seed_runs(config, 2)] == [
        "runs/tms_5-2-recipe-seed7",
        "runs/tms_5-2-recipe-seed8",
    ]
    began = time.monotonic()
    for seeds in (0, 10**9):
        with pytest.raises(
            RankoneError, match=f"--seeds is {seeds}; it must be at least 1 and at most 10,000"
        ):
            seed_runs(config, seeds)
    assert time.monotonic() - began < 1


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--seeds", "0"], "--seeds is 0; it must be at least 1"),
        (["--seeds", "1000000000"], "--seeds is 1000000000; it must be at least 1 and at most 10,000"),
        (["--jobs", "2"], "--jobs says how many seeds run at a time; it needs --seeds"),
    ],
)
def test_senseless_numbers(tmp_path, words, message):
    done = rankone("run", "tms_5-2", *words, cwd=tmp_path)
    assert done.returncode == 1
    assert message in done.stderr
