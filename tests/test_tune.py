"""The trade-off: what is varied, what is recommended, and that no worker's death loses anything."""

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from dataclasses import replace
from pathlib import Path

import optuna
import pytest
import torch
from optuna.trial import TrialState

import rankone
import rankone.tune as tuning
from conftest import ROOT, rankone_main, small_mlp, uniform
from rankone.config import DecompositionConfig, over_recipe
from rankone.errors import CheckpointError, ConfigError, TrainingError
from rankone.files import RunDirectory
from rankone.runs.config import experiment_config
from rankone.runs.run import load_run
from rankone.settings import to_yaml
from rankone.tune import Curve, Failure, OwnWork, Point, pressed, study, tune, tune_work
from rankone.tune.journal import Journal
from rankone.tune.study import FIRST, JOURNAL
from rankone.tune.work import Measured

QUICK = {
    "steps": 6,
    "checkpoint_every": 3,
    "engine": "exact",
    "relative": False,  # the recipe's guard lets nothing be pressed as early as this
    "losses": {"importance_minimality": {"coefficient": 0.1, "coefficient_start": 0.2}},
}


def quick(out, trials, **options):
    return tune(small_mlp(), uniform(), {"*": 5}, QUICK, trials=trials, out=out, **options)


def results(curve):
    """What must not depend on who made it; the time it took may."""
    return [(p.factor, p.attack, p.l0, p.rounded, p.sum, p.deletion, p.alive) for p in curve.points]


def trials_of(out):
    storage = optuna.storages.JournalStorage(Journal(out / JOURNAL))
    (one,) = optuna.get_all_study_summaries(storage)
    return optuna.load_study(storage=storage, study_name=one.study_name).trials


def point(factor, attack, l0, rounded=0.0):
    return Point(float(factor), attack, l0, rounded, 0.0, 0.0, {"a": 1}, None, 1.0, {}, 0, "trials/000")


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A study of six trials, the last one chosen by Optuna, made by one worker in one go."""
    torch.set_num_threads(1)
    return quick(tmp_path_factory.mktemp("whole") / "study", 6)


# What is varied


@pytest.mark.parametrize("factor", [0.1, 1.0, 3.0])
def test_pressure_at_the_start_and_the_end_changes_and_nothing_else(factor):
    before = over_recipe({})
    after = pressed(before, factor)
    old, new = (config.losses["importance_minimality"] for config in (before, after))
    assert new.coefficient == pytest.approx(factor * old.coefficient)
    assert new.coefficient_start == pytest.approx(factor * old.coefficient_start)
    values = after.model_dump(mode="json")
    values["losses"]["importance_minimality"] |= {
        "coefficient": old.coefficient,
        "coefficient_start": old.coefficient_start,
    }
    assert values == before.model_dump(mode="json")


@pytest.mark.parametrize("preset", ["tuned", "paper"])
def test_pressure_in_a_preset_is_an_override(preset):
    config = experiment_config("tms_5-2", preset=preset)
    more = pressed(config, 3.0)
    assert more.losses["importance_minimality"].coefficient == pytest.approx(9e-3)
    assert more.losses["importance_minimality"].coefficient_start is None
    assert more.overrides == ["losses.importance_minimality.coefficient=0.009"]
    assert pressed(config, 1.0) == config


# What is recommended


def test_the_fewest_that_hold():
    few, holds, safer = point(3, 0.3, 1.0), point(1, 0.08, 2.0), point(0.3, 0.01, 4.0)
    curve = Curve("c", [few, holds, safer])
    assert curve.choice.point is holds
    assert curve.choice.rule == "fewest"
    assert "2 of 3 points with attack below 10% and rounded below 3%" in curve.choice.reason
    loses = replace(holds, rounded=0.04)
    assert Curve("c", [few, loses, safer]).recommended is safer
    unknown = replace(holds, rounded=None)
    assert Curve("c", [few, unknown, safer]).recommended is safer


def test_of_equally_few_the_one_that_holds_best():
    assert Curve("c", [point(1, 0.08, 2.0), point(2, 0.05, 2.01)]).recommended.factor == 2
    assert Curve("c", [point(1, 0.08, 2.0), point(2, 0.05, 2.1)]).recommended.factor == 1


def test_the_knee_where_nothing_holds():
    bent = [point(10, 4.0, 1.0), point(3, 0.5, 1.5), point(1, 0.4, 6.0), point(0.3, 0.3, 12.0)]
    choice = Curve("c", [*bent, point(0.1, 5.0, 20.0)]).choice
    assert (choice.point.factor, choice.rule) == (3, "knee")
    assert "no point has attack below 10%" in choice.reason
    choice = Curve("c", bent[:2]).choice
    assert (choice.point.factor, choice.rule) == (3, "strongest")


def test_the_front_is_what_nothing_beats():
    curve = Curve("c", [point(1, 0.2, 2.0), point(2, 0.2, 3.0), point(3, 0.1, 4.0), point(4, 0.3, 1.0)])
    assert [p.factor for p in curve.front] == [4, 1, 3]


def test_without_a_point_nothing_is_recommended():
    with pytest.raises(TrainingError, match=r"No trial of c .* The first said: it broke"):
        _ = Curve("c", [], [Failure(1.0, "it broke")]).choice


# A study from beginning to end


def test_a_model_of_ones_own(whole):
    assert [p.factor for p in whole.points if p.trial < 5] == sorted(FIRST)
    assert len({p.factor for p in whole.points}) == 6
    assert all(0.1 <= p.factor <= 10 for p in whole.points)
    assert len({(p.attack, p.l0) for p in whole.points}) == 6  # pressure matters
    out = whole.out
    assert RunDirectory.open(out).names() == [
        "journal.log", "settings.json", "tune.json", "tune.md", "tune.svg",
    ]  # fmt: skip
    kept = json.loads((out / "tune.json").read_text())
    assert [p["attack"] for p in kept["points"]] == [p.attack for p in whole.points]
    assert kept["recommended"]["factor"] == whole.recommended.factor
    assert kept["reason"] == whole.choice.reason
    svg = (out / "tune.svg").read_text()
    assert all(f"x{p.factor:g}" in svg for p in whole.points)
    assert "<- recommended" in (out / "tune.md").read_text()
    best = rankone.load(whole.path(whole.recommended) / "decomposition", small_mlp())
    assert best.config == pressed(over_recipe(QUICK), whole.recommended.factor)


def test_the_model_is_left_as_it_was(tmp_path):
    model, fresh = small_mlp(), small_mlp()
    tune(model, uniform(), {"*": 5}, QUICK, trials=1, out=tmp_path / "study")
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), fresh.parameters(), strict=True))
    assert all(p.requires_grad and p.grad is None for p in model.parameters())
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_trials_are_those_of_the_study_and_more_go_on(whole, tmp_path):
    said = []
    first = quick(tmp_path / "study", 2, say=said.append)
    assert len(said) == 2
    assert results(quick(tmp_path / "study", 2, say=said.append)) == results(first)
    assert len(said) == 2  # nothing was done
    assert results(quick(tmp_path / "study", 1, say=said.append)) == results(first)
    # In three goes the same trials with the same bits as in one, those that Optuna chose included.
    assert results(quick(tmp_path / "study", 6, say=said.append)) == results(whole)
    assert len(said) == 6


def test_a_trial_is_the_run_with_these_settings(tmp_path):
    words = ["tms_5-2", "--preset", "tuned", "--steps", "8", "batch_size=32"]
    less = "losses.importance_minimality.coefficient=0.0009"
    rankone_main(["run", *words, less, "--out", str(tmp_path / "run")])
    rankone_main(["tune", *words, "--trials", "2", "--out", str(tmp_path / "study")])
    one, other = load_run(tmp_path / "run"), load_run(tmp_path / "study/trials/001-x0.3")
    assert one.summary.decomposition_sha256 == other.summary.decomposition_sha256
    assert one.summary.relative == other.summary.relative


def test_a_trial_that_cannot_be_trained_is_finished_and_said(tmp_path):
    said = []
    curve = tune_work(Scripted(), 5, tmp_path / "study", name="scripted", say=said.append)
    assert [p.factor for p in curve.points] == [0.1, 0.3, 1.0, 10.0]
    assert curve.failures == [Failure(3.0, "x3 diverged")]
    assert "Pressure x3: failed: x3 diverged" in said
    assert curve.table().rows[-1][:2] == ("x3", "failed")


class Scripted:
    """Work whose results are known beforehand, for what a study makes of them."""

    config = DecompositionConfig()

    def identity(self):
        return {"scripted": True}

    def run(self, factor, directory, observer):
        if factor == 3.0:
            raise TrainingError("x3 diverged")
        notes = {"rounded": 0.0, "sum": 0.0, "deletion": None, "alive": {}, "recovered": None, "seconds": 0.0}
        return Measured(0.1 * factor, 5 / factor, notes)


# Workers come, go and die

WORKER = textwrap.dedent(
    """
    import os, signal, sys
    import torch
    from rankone.tune import tune

    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.ReLU(), torch.nn.Linear(6, 4)).eval()
    trials, out, dies_at = int(sys.argv[1]), sys.argv[2], int(sys.argv[3])
    drawn = 0

    def data(generator):
        global drawn
        drawn += 1
        if drawn == dies_at:
            os.kill(os.getpid(), signal.SIGKILL)
        return torch.rand(16, 4, generator=generator)

    curve = tune(
        model, data, {"*": 5}, {"steps": 40, "checkpoint_every": 10, "engine": "exact"}, trials=trials, out=out,
        storage=(sys.argv[4:] or [None])[0], say=lambda line: print(line, flush=True),
    )
    print(f"drew {drawn}")
    """
)


def worker(*words):
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src")}
    command = [sys.executable, "-c", WORKER, *map(str, words)]
    return subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def ended(process, code=0):
    printed, complaints = process.communicate(timeout=300)
    assert process.returncode == code, complaints
    return printed


def test_a_killed_workers_trial_is_taken_up_where_it_was(tmp_path):
    whole = ended(worker(3, tmp_path / "whole", -1))
    each = int(whole.split("drew ")[1]) // 3
    ended(worker(3, tmp_path / "killed", each + each // 2), -signal.SIGKILL)
    states = [t.state for t in trials_of(tmp_path / "killed")]
    assert states == [TrialState.COMPLETE, TrialState.RUNNING]
    ended(worker(3, tmp_path / "killed", each // 3), -signal.SIGKILL)  # and once more
    rest = ended(worker(3, tmp_path / "killed", -1))
    assert int(rest.split("drew ")[1]) < 2 * each  # it went on from a checkpoint
    trials = trials_of(tmp_path / "killed")
    assert [t.params["factor"] for t in trials if t.state == TrialState.COMPLETE] == [1.0, 0.3, 3.0]
    a, b = (json.loads((tmp_path / name / "tune.json").read_text()) for name in ("whole", "killed"))
    measured = ("factor", "attack", "l0", "rounded", "sum", "deletion", "alive", "directory")
    for one, other in zip(a["points"], b["points"], strict=True):
        assert [one[key] for key in measured] == [other[key] for key in measured]


@pytest.mark.parametrize("storage", ["journal", "sqlite"])
def test_two_workers_share_the_work(tmp_path, storage):
    url = [] if storage == "journal" else [f"sqlite:///{tmp_path / 'study.db'}"]
    both = [worker(6, tmp_path / "study", -1, *url) for _ in range(2)]
    printed = [ended(process) for process in both]
    curve = json.loads((tmp_path / "study/tune.json").read_text())
    assert len(curve["points"]) == 6
    assert sorted(p["factor"] for p in curve["points"] if p["trial"] < 5) == sorted(FIRST)
    assert all("attack" in text for text in printed)  # both did something
    assert sum(text.count("attack") for text in printed) == 6  # nothing was done twice


def test_a_worker_elsewhere_is_dead_when_its_beat_stops(tmp_path, monkeypatch):
    monkeypatch.setattr(study, "SILENT_FOR", 0.3)
    monkeypatch.setattr(study, "LOOK_EVERY", 0.05)
    url = f"sqlite:///{tmp_path / 'study.db'}"
    quick(tmp_path / "here", 1, storage=url)
    storage = optuna.storages.RDBStorage(url)
    gone = optuna.load_study(storage=storage, study_name="tune").ask({"factor": study.FACTORS})
    gone.set_user_attr("worker", {"where": "elsewhere", "directory": "trials/001"})
    began = time.monotonic()
    said = []
    curve = quick(tmp_path / "here", 2, storage=url, say=said.append)
    assert time.monotonic() - began > 0.3
    assert said[0].startswith("Nothing is left to begin; waiting")
    assert {p.factor for p in curve.points} == {1.0, gone.params["factor"]}
    # It was not dead after all: what it finds now is not taken twice.
    late = study.Worker(
        optuna.load_study(storage=storage, study_name="tune"),
        Scripted(), RunDirectory.claim(tmp_path / "elsewhere"), only_here=False, say=said.append,
    )  # fmt: skip
    job = study.Job(gone, 1, gone.params["factor"], late.directory)
    assert not late._record(job, Scripted().run(1.0, late.directory, None), "")
    storage.remove_session()
    storage.engine.dispose()


def test_an_interrupted_trial_is_given_back(tmp_path):
    class Stopped(Scripted):
        def run(self, factor, directory, observer):
            if factor == 0.3:
                raise KeyboardInterrupt
            return super().run(factor, directory, observer)

    with pytest.raises(KeyboardInterrupt):
        tune_work(Stopped(), 2, tmp_path / "study", name="s")
    states = [(t.state, t.user_attrs.get("retry_of")) for t in trials_of(tmp_path / "study")]
    assert states == [(TrialState.COMPLETE, None), (TrialState.FAIL, None), (TrialState.WAITING, 1)]
    curve = tune_work(Scripted(), 2, tmp_path / "study", name="s")
    assert [p.factor for p in curve.points] == [0.3, 1.0]


def test_a_journal_survives_a_kill_at_every_byte(tmp_path):
    path = tmp_path / "journal"
    path.touch()
    Journal(path).append_logs([{"op_code": 0, "n": 1}])
    before = path.read_bytes()
    Journal(path).append_logs([{"op_code": 0, "long": "x" * 9000}])
    after = path.read_bytes()
    for length in [*range(len(before), len(before) + 40), *range(len(before) + 40, len(after), 997)]:
        path.write_bytes(after[:length])
        journal = Journal(path)
        assert [log["op_code"] for log in journal.read_logs(0)] == [0]
        journal.append_logs([{"op_code": 7}])
        assert [log["op_code"] for log in journal.read_logs(0)] == [0, 7]
        assert [log["op_code"] for log in journal.read_logs(1)] == [7]
    path.write_bytes(after[:9])
    Journal(path).append_logs([{"op_code": 7}])
    assert path.read_bytes() == b'{"op_code":7}\n'


# What bad input gets


def refused(*words, capsys):
    capsys.readouterr()
    with pytest.raises(SystemExit) as stop:
        rankone_main(["tune", *map(str, words)])
    assert stop.value.code == 1
    printed = capsys.readouterr()
    assert "Trial " not in printed.out
    return " ".join(printed.err.split())


SHORT = ("tms_5-2", "--steps", 4, "batch_size=16", "--trials", 1)


def test_messages_before_anything_is_made(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert "Did you mean 'tms_5-2'" in refused("tms_52", capsys=capsys)
    assert "trials is 0; it must be at least 1" in refused("tms_5-2", "--trials", 0, capsys=capsys)
    assert "There is no setting 'optimiser.lr'" in refused(*SHORT, "optimiser.lr=1", capsys=capsys)
    loss = "losses.importance_minimality"
    nothing = [f"{loss}.{key}" for key in ("coefficient=0", "coefficient_start=null", "relax_after=null")]
    off = refused(*SHORT, *nothing, capsys=capsys)
    assert "have no loss importance_minimality with a coefficient above 0" in off
    assert "there are: faithfulness" in off
    assert "The URL of the storage is empty" in refused(*SHORT, "--storage", "", capsys=capsys)
    assert list(tmp_path.iterdir()) == []


def test_a_config_without_importance_minimality(tmp_path):
    losses = {"faithfulness": {}, "stochastic_recon": {}}
    config = DecompositionConfig.model_validate({"losses": losses})
    with pytest.raises(ConfigError, match=r"no loss importance_minimality .* faithfulness, stochastic_recon"):
        tune(small_mlp(), uniform(), {"*": 5}, config, out=tmp_path / "study")
    assert not (tmp_path / "study").exists()


@pytest.mark.parametrize(
    "url", ["sqlite:////no/such/place/x.db", "nonsense", "oracle+none://me:secret@host/x", "redis://host"]
)
def test_a_storage_that_cannot_be_reached(tmp_path, capsys, url):
    said = refused(*SHORT, "--storage", url, "--out", tmp_path / "study", capsys=capsys)
    assert "cannot be opened (" in said
    assert "such as sqlite:///tune.db" in said
    assert "secret" not in said


def test_other_settings_in_the_same_place(tmp_path, capsys):
    url = f"sqlite:///{tmp_path / 'study.db'}"
    rankone_main(["tune", *map(str, SHORT), "--storage", url, "--out", str(tmp_path / "a")])
    said = refused(*SHORT, "optimizer.lr=0.1", "--storage", url, "--out", tmp_path / "a", capsys=capsys)
    assert "config.optimizer.lr was 0.006 and is now 0.1" in said
    said = refused(*SHORT, "optimizer.lr=0.1", "--storage", url, "--out", tmp_path / "b", capsys=capsys)
    assert "The storage, under the name tms_5-2-recipe-seed0, holds a study with other settings" in said
    assert "config.optimizer.lr was 0.006 and is now 0.1" in said
    assert "another name with --study" in said
    # Under another name it is another study.
    words = [*SHORT, "optimizer.lr=0.1", "--storage", url, "--out", tmp_path / "c", "--study", "mine"]
    rankone_main(["tune", *map(str, words)])
    assert "holds the study 'mine'" in refused(*words[:-1], "other", capsys=capsys)


def test_a_directory_of_something_else(tmp_path, capsys):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/notes.txt").write_text("mine")
    assert "is not empty and not a run directory" in refused(
        *SHORT, "--out", tmp_path / "mine", capsys=capsys
    )
    RunDirectory.claim(tmp_path / "run").write("config.yaml", "x: 1")
    assert "something else that rankone made (config.yaml)" in refused(
        *SHORT, "--out", tmp_path / "run", capsys=capsys
    )


def test_a_study_of_somebody_else(tmp_path, capsys):
    url = f"sqlite:///{tmp_path / 'study.db'}"
    storage = optuna.storages.RDBStorage(url)
    optuna.create_study(storage=storage, study_name="theirs").ask({"x": study.FACTORS})
    said = refused(*SHORT, "--storage", url, "--study", "theirs", "--out", tmp_path / "study", capsys=capsys)
    assert "has a study 'theirs' that rankone did not make" in said
    storage.remove_session()
    storage.engine.dispose()


def test_a_damaged_journal(tmp_path):
    tune_work(Scripted(), 1, tmp_path / "study", name="s")
    path = tmp_path / "study" / JOURNAL
    lines = path.read_bytes().splitlines(keepends=True)
    for damage in (b"{half\n", b"[]\n", b'{"op_code": 99}\n', b'{"op_code": 4}\n'):
        path.write_bytes(b"".join([*lines[:2], damage, *lines[2:]]))
        with pytest.raises(CheckpointError, match="damaged or edited"):
            tune_work(Scripted(), 2, tmp_path / "study", name="s")


def test_optuna_is_loaded_only_when_it_is_used_and_missed_by_name(tmp_path, monkeypatch):
    code = "import sys, rankone, rankone.cli, rankone.tune; sys.exit('optuna' in sys.modules)"
    subprocess.run(
        [sys.executable, "-c", code], env=os.environ | {"PYTHONPATH": str(ROOT / "src")}, check=True
    )
    monkeypatch.setattr(tuning, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install 'rankone\[tune\]'"):
        quick(tmp_path / "study", 1)


# On the command line


def test_on_the_command_line(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = ["tune", "tms_5-2", "--trials", "2", "--steps", "4", "batch_size=16"]
    rankone_main(words)
    printed, progress = capsys.readouterr()
    out = Path("runs/tms_5-2-recipe-batchsize16-steps4-seed0-tune")
    assert progress.count("Trial ") == 2
    assert "Recommended because: no point has attack below 10%" in printed
    assert "<- recommended" in printed
    assert f"Figure: {out / 'tune.svg'}" in printed
    (use,) = [line for line in printed.splitlines() if line.startswith("Use it: rankone run tms_5-2 ")]
    assert "losses.importance_minimality.coefficient=" in use
    rankone_main([*words, "--json"])  # nothing new, and nothing but JSON
    again = capsys.readouterr().out
    assert json.loads(again) == json.loads((out / "tune.json").read_text())
    # A config file is the same network, and the same study.
    config = experiment_config("tms_5-2", steps=4, assignments=["batch_size=16"])
    Path("mine.yaml").write_text(to_yaml(config))
    rankone_main(["tune", "mine.yaml", "--trials", "2", "--out", str(out)])
    printed, progress = capsys.readouterr()
    assert "Trial " not in progress
    assert "Use it: rankone run mine.yaml" in printed
    monkeypatch.setattr(tuning, "can_draw", lambda: False)
    monkeypatch.setattr("rankone.watch.can_draw", lambda: False)
    rankone_main(["tune", "mine.yaml", "--trials", "2", "--out", str(out)])
    assert "matplotlib is missing" in capsys.readouterr().err


def test_a_signal_saves_and_the_same_command_goes_on(tmp_path):
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src")}
    words = ["tms_5-2", "--trials", "1", "--steps", "3000", "batch_size=64", "checkpoint_every=200"]
    command = [sys.executable, "-m", "rankone", "tune", *words, "--out", str(tmp_path / "study")]
    process = subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    checkpoints = tmp_path / "study/trials/000-x1/checkpoints"
    while process.poll() is None and not list(checkpoints.glob("step-*.safetensors")):
        time.sleep(0.02)
    process.send_signal(signal.SIGTERM)
    _, complaints = process.communicate(timeout=120)
    assert process.returncode == 128 + signal.SIGTERM, complaints
    assert "Go on with the same command" in complaints
    assert [t.state for t in trials_of(tmp_path / "study")] == [TrialState.FAIL, TrialState.WAITING]
    reached = int(max(checkpoints.glob("step-*")).stem.removeprefix("step-"))
    assert 0 < reached < 3000
    subprocess.run(command, env=environment, check=True, capture_output=True, timeout=120)
    assert len(json.loads((tmp_path / "study/tune.json").read_text())["points"]) == 1


def test_own_work_says_what_a_result_depends_on():
    work = OwnWork(small_mlp(), uniform(), {"*": 5}, over_recipe(QUICK))
    other = replace(work, model=small_mlp(seed=1))
    assert work.identity() == OwnWork(small_mlp(), uniform(), {"*": 5}, over_recipe(QUICK)).identity()
    assert work.identity()["target"] != other.identity()["target"]
    assert json.loads(json.dumps(work.identity())) == work.identity()
