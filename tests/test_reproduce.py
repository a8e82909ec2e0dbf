"""Reproducing the paper: the right runs, kept and resumed, tables and figures from what is kept."""

import json
import time

import numpy as np
import pytest

from conftest import ROOT, rankone_main
from rankone import cli
from rankone.experiments import PRESETS, experiment_names, reproduce, stored
from rankone.experiments.reproduce import EXPERIMENTS, FIGURES, Wanted, make_figures, make_tables, wanted_for

RESULTS = ROOT / "results"


def test_every_experiment_of_the_paper_is_planned_with_enough_seeds():
    assert set(EXPERIMENTS) == set(experiment_names())
    planned = wanted_for("all", None, "default", None)
    assert len(set(planned)) == len(planned)
    assert len({run.name for run in planned}) == len(planned)
    seeds = {name: len({r.seed for r in planned if r.experiment == name}) for name in EXPERIMENTS}
    asked = {
        "tms_5-2": 10,
        "tms_5-2-id": 10,
        "tms_40-10": 5,
        "tms_40-10-id": 5,
        "resid_mlp1": 5,
        "resid_mlp2": 3,
        "resid_mlp3": 1,
    }
    assert seeds == asked
    assert len(wanted_for("table1", None, "default", 2)) == 8
    for figure in FIGURES.values():
        assert set(figure.runs("default")) <= set(planned)


def test_the_runs_of_varied_settings():
    right = Wanted("resid_mlp1").config.losses["importance_minimality"].coefficient
    betas = [run.config.losses["importance_minimality"].coefficient for run in reproduce.beta3_runs("default")]
    assert betas == pytest.approx([right / 100, right / 10, right, right * 10, right * 100])
    sizes = [run.config.layers for run in reproduce.splitting_runs("default")]
    assert [s["hidden.0"] for s in sizes] == [20, 40, 80, 200, 400, 800]
    assert all(len(set(s.values())) == 1 for s in sizes)
    command = reproduce.splitting_runs("default")[1].command
    assert command == (
        "rankone run tms_5-2-id --preset default --seed 0 layers.embed=40 layers.hidden.0=40 layers.unembed=40 threads=1"
    )


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["table2"], "There is nothing called 'table2' to reproduce. Did you mean 'table1'"),
        (["figure", "beta4"], "There is no figure 'beta4'. Did you mean 'beta3'"),
        (["figure"], "There is no figure None"),
        (["table1", "tms_5-2"], "'table1' takes no name"),
        (["table1", "--preset", "papr"], "There is no preset 'papr'. Did you mean 'paper'"),
        (["table1", "--seeds", "0"], "--seeds is 0; it must be at least 1"),
        (["figure", "beta3", "--seeds", "2"], "A figure shows seed 0; --seeds is for tables"),
        (["table1", "--from", "nowhere", "--seeds", "2"], "--from uses every run that is kept; leave --seeds away"),
        (["table1", "--from", "nowhere"], "nowhere keeps no finished runs"),
    ],
)
def test_mistakes_are_explained(words, message, capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as stop:
        rankone_main(["reproduce", *words])
    assert stop.value.code == 1
    assert message in capsys.readouterr().err


@pytest.fixture
def short(monkeypatch):
    """The same runs with few steps and rows, so that a test can make them."""
    full = Wanted.config.fget

    def config(self):
        found = full(self)
        warm_up = found.faithfulness_warmup.model_copy(update={"steps": 0})
        return found.model_copy(update={"steps": 12, "batch_size": 64, "faithfulness_warmup": warm_up})

    monkeypatch.setattr(Wanted, "config", property(config))
    for module in (stored, reproduce, cli):
        monkeypatch.setattr(module, "outdated", lambda run: [])


def test_kept_runs_that_mean_something_else_today_are_left_out(short, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    rankone_main(["reproduce", "figure", "tms_5-2"])
    monkeypatch.undo()
    monkeypatch.chdir(tmp_path)
    capsys.readouterr()
    with pytest.raises(SystemExit):
        rankone_main(["reproduce", "table1", "--from", "reproduction"])
    said = capsys.readouterr().out
    assert "Left out, because the settings have changed since: tms_5-2-default-seed0" in said


def test_from_nothing_to_a_table_and_again_without_training(short, capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    rankone_main(["reproduce", "figure", "tms_5-2-id"])
    said = capsys.readouterr().out
    assert "1 runs are needed, 0 are there." in said
    kept = tmp_path / "reproduction/tms_5-2-id-default-seed0"
    assert {p.name for p in kept.iterdir()} == {"summary.json", "config.yaml", "figure_data.npz"}
    summary = json.loads((kept / "summary.json").read_text())
    assert summary["command"] == "rankone run tms_5-2-id --preset default --seed 0 threads=1"
    drawn = {p.name for p in (tmp_path / "reproduction/figures").iterdir()}
    assert drawn == {"tms_5-2-id-columns-embed.svg", "tms_5-2-id-matrices-hidden.0.svg", "tms_5-2-id-networks.svg"}
    # A second seed is added to what is there; nothing is made twice.
    before = (kept / "summary.json").stat().st_mtime_ns
    monkeypatch.setattr(reproduce, "TMS", ("tms_5-2-id",))
    rankone_main(["reproduce", "table1", "--seeds", "2"])
    said = capsys.readouterr().out
    assert "2 runs are needed, 1 are there." in said
    assert (kept / "summary.json").stat().st_mtime_ns == before
    row = next(line for line in said.splitlines() if line.startswith("tms_5-2-id "))
    assert row.split()[:3] == ["tms_5-2-id", "default", "2"]
    assert "0.992" in row
    # Another directory, from what is kept.
    rankone_main(["reproduce", "table1", "--from", "reproduction", "--out", "again"])
    assert (tmp_path / "again/table1.md").read_text() == (tmp_path / "reproduction/table1.md").read_text()
    assert not (tmp_path / "again/runs").exists()


def test_kept_runs_with_other_settings_are_not_mixed_in(short, capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    rankone_main(["reproduce", "figure", "tms_5-2"])
    monkeypatch.undo()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit):
        rankone_main(["reproduce", "figure", "tms_5-2"])
    error = capsys.readouterr().err
    assert "1 of the runs that reproduction keeps were made with other settings" in error
    assert "steps was 12 and is now" in error


def test_what_is_kept_draws_what_the_run_showed(short, tmp_path):
    """Importances to 1/255, contributions to half precision, matrices as they are."""
    from rankone.experiments.run import evaluate_run, reopen
    from rankone.experiments.run import run as run_experiment

    wanted = Wanted("resid_mlp1")
    run_experiment(wanted.config, tmp_path / "run")
    kept = stored.keep(tmp_path / "run", tmp_path / "kept", command=wanted.command, figures=True)
    config, result, _ = reopen(tmp_path / "run")
    evaluation = evaluate_run(config, result)
    for name, g in evaluation.probe_importances.items():
        np.testing.assert_allclose(kept.importances[name], g, atol=0.5 / 255 + 1e-6)
        assert kept.checks[name].errors == evaluation.checks[name].errors
    exact = config.target.contributions(result)
    np.testing.assert_allclose(kept.contributions.model, exact.model, atol=1e-3)
    assert kept.views == {}
    assert (tmp_path / "kept/figure_data.npz").stat().st_size < 200_000


def test_results_in_the_repository_are_redrawn_quickly(tmp_path):
    began = time.monotonic()
    runs = stored.stored_runs(RESULTS)
    tables = make_tables("all", runs, tmp_path)
    files = [path for preset in PRESETS for path in make_figures("all", None, preset, runs, tmp_path)[0]]
    assert time.monotonic() - began < 60
    assert [table.title.split(":")[0] for table in tables][:2] == ["Table 1", "Recovery"]
    assert {p.name for p in files} == {p.name for p in (RESULTS / "figures").glob("*.svg")}
    assert (tmp_path / "tables.md").read_text() == (RESULTS / "tables.md").read_text()
