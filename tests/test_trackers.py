"""Trackers by name: what each of them is told, and what happens when one is missing or fails."""

import json
import os
import sqlite3
import subprocess
import sys
import textwrap

import pytest

from conftest import rankone_main
from rankone import RankoneError, trackers
from rankone.metrics_log import Progress
from rankone.trackers import TRACKERS, Tracker, tracking


def progress(step: int, loss: float = 0.5) -> Progress:
    record = {"step": step, "lr": 1e-3, "loss": {"total": loss, "faithfulness": 0.1}, "l0": {"embed": 2.0}}
    return Progress(record, step + 1, 100, 1.0, 3.0)


def scalars(directory) -> dict:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(directory))
    events.Reload()
    return {tag: [(e.step, e.value) for e in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


@pytest.mark.filterwarnings("ignore")  # of other people's packages
def test_tensorboard_has_every_number_and_a_resumed_run_no_number_twice(tmp_path):
    with tracking(["tensorboard"], tmp_path, {"seed": 3}, print) as observe:
        observe(progress(0, 1.0))
        observe(progress(10, 0.5))
        observe(progress(20, 0.25))
    with tracking(["tensorboard"], tmp_path, {"seed": 3}, print) as observe:  # from the checkpoint of step 10
        observe(progress(10, 0.5))
    seen = scalars(tmp_path / "tensorboard")
    assert set(seen) == {"lr", "loss/total", "loss/faithfulness", "l0/embed", "ms_per_step"}
    assert seen["loss/total"] == [(0, 1.0), (10, 0.5)]


@pytest.mark.filterwarnings("ignore")
def test_from_the_command_line(tmp_path):
    words = ["run", "tms_5-2", "--steps", "3", "log_every=1", "batch_size=64", "-q"]
    rankone_main([*words, "--out", str(tmp_path / "run"), "--track", "tensorboard"])
    records = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    seen = scalars(tmp_path / "run/tensorboard")["loss/total"]
    assert seen == [(r["step"], pytest.approx(r["loss"]["total"], rel=1e-6)) for r in records]
    assert len(records) == 3


def test_wandb_offline_and_trackio(tmp_path):
    """In a process of their own: both start threads and read the environment when they are imported."""
    code = """
        from pathlib import Path
        from rankone.metrics_log import Progress
        from rankone.trackers import tracking
        with tracking(["wandb-offline", "trackio"], Path("run"), {"experiment": "small"}, print) as observe:
            for step in (0, 10):
                losses = {"total": 0.5, "faithfulness": 0.1}
                record = {"step": step, "lr": 0.1, "loss": losses, "l0": {"a": 2.0}}
                observe(Progress(record, step + 1, 100, 1.0, 3.0))
    """
    (tmp_path / "run").mkdir()
    environment = os.environ | {"TRACKIO_DIR": str(tmp_path / "projects"), "WANDB_SILENT": "true"}
    made = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert made.returncode == 0, made.stderr
    assert made.stdout == ""
    (log,) = (tmp_path / "run/wandb").glob("offline-run-*/run-*.wandb")
    assert b"loss/faithfulness" in log.read_bytes()
    database = sqlite3.connect(tmp_path / "projects/small.db")
    rows = database.execute("select step, metrics from metrics order by step").fetchall()
    database.close()
    assert [step for step, _ in rows] == [0, 10]
    assert '"loss/total"' in str(rows[0][1])


def test_a_tracker_that_is_not_there(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(trackers, "find_spec", lambda name: None)
    with pytest.raises(SystemExit):
        rankone_main(["run", "tms_5-2", "--steps", "3", "--out", str(tmp_path / "run"), "--track", "wandb"])
    said = " ".join(capsys.readouterr().err.split())
    assert "--track wandb needs the package wandb, which is not installed" in said
    assert "pip install 'rankone[trackers]'" in said
    assert not (tmp_path / "run").exists()
    with pytest.raises(RankoneError, match=r"Unknown tracker 'tensorbord'. Did you mean 'tensorboard'"):
        trackers.refuse_unusable(["tensorbord"])


class Falls(Tracker):
    def __init__(self, *args, at):
        super().__init__(*args)
        self.at, self.steps = at, []

    def open(self, first):
        if self.at == "open":
            raise OSError("no route to host")

    def log(self, values, step):
        self.steps.append(step)
        if self.at == step:
            raise OSError("no space left")

    def close(self):
        if self.at == "close":
            raise OSError("gone")


def test_a_tracker_that_fails(monkeypatch, tmp_path):
    def named(at):
        return lambda *args: Falls(*args, at=at)

    entries = {name: named(at) for name, at in [("early", "open"), ("midway", 10), ("late", "close")]}
    for entry in entries.values():
        entry.needs = ""
    monkeypatch.setattr(TRACKERS, "_entries", entries)
    said = []
    with (
        pytest.raises(RankoneError, match=r"--track early could not begin \(no route to host\)"),
        tracking(["early"], tmp_path, {}, said.append) as observe,
    ):
        observe(progress(0))
    with tracking(["midway", "late"], tmp_path, {}, said.append) as observe:
        for step in (0, 10, 20):
            observe(progress(step))
    assert said == [
        "--track midway stopped working (no space left); metrics.jsonl goes on.",
        "--track late did not end well (gone); metrics.jsonl has every number.",
    ]


def test_without_trackers_there_is_nothing_to_call(tmp_path):
    with tracking([], tmp_path, {}, print) as observe:
        assert observe is None
