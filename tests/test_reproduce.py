"""Reproducing the paper: the right runs, kept and resumed, tables and figures from what is kept."""

import json
import shutil
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from conftest import ROOT, rankone_main
from rankone.files import RunDirectory
from rankone.paper import figures, plan, tables
from rankone.paper.figures import make
from rankone.paper.plan import EXPERIMENTS, FIGURE_RUNS, RunSpec, runs_for
from rankone.runs import kept as kept_module
from rankone.runs.config import PRESETS, experiment_file, experiment_names
from rankone.runs.kept import kept_runs
from rankone.runs.summary import Summary
from rankone.settings import to_yaml

RESULTS = ROOT / "results"


def test_every_experiment_of_the_paper_is_planned_with_enough_seeds():
    assert set(EXPERIMENTS) == {
        name for name in experiment_names() if experiment_file(name).paper is not None
    }
    planned = runs_for("all", None, "tuned", None)
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
    of_the_paper = runs_for("all", None, "paper", None)
    seeds = {name: sum(r.experiment == name for r in of_the_paper) for name in EXPERIMENTS}
    assert seeds == {
        name: 3 if name in ("tms_5-2", "tms_5-2-id", "resid_mlp1") else 1 for name in EXPERIMENTS
    }
    of_the_recipe = runs_for("all", None, "recipe", None)
    seeds = {name: sum(r.experiment == name for r in of_the_recipe) for name in EXPERIMENTS}
    assert seeds == dict(zip(EXPERIMENTS, (5, 5, 5, 5, 3, 3, 2), strict=True))
    assert len(runs_for("table1", None, "tuned", 2)) == 8
    for figure in FIGURE_RUNS.values():
        assert set(figure.of("tuned")) <= set(planned)
    assert set(figures.FIGURES) == set(FIGURE_RUNS), "every figure is planned and drawn"
    assert set(tables.TABLES) == set(plan.TABLE_RUNS), "every table is planned and made"


def test_the_runs_of_varied_settings():
    right = RunSpec("resid_mlp1").config.losses["importance_minimality"].coefficient
    betas = [run.config.losses["importance_minimality"].coefficient for run in plan.beta3_runs("tuned")]
    assert betas == pytest.approx([right / 100, right / 10, right, right * 10, right * 100])
    sizes = [run.config.layers for run in plan.splitting_runs("tuned")]
    assert [s["hidden.0"] for s in sizes] == [20, 40, 80, 200, 400, 800]
    assert all(len(set(s.values())) == 1 for s in sizes)
    command = plan.splitting_runs("tuned")[1].command
    assert command == (
        "rankone run tms_5-2-id --preset tuned --seed 0 "
        "layers.embed=40 layers.hidden.0=40 layers.unembed=40 threads=1"
    )


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["table2"], "There is no table 'table2' to reproduce. Did you mean 'table1'"),
        (["figures", "beta3"], "There is no table 'figures' to reproduce. Did you mean 'figure'"),
        (["beta3"], "There is no table 'beta3' to reproduce. Did you mean `figure beta3`?"),
        (["figure", "beta4"], "There is no figure 'beta4'. Did you mean 'beta3'"),
        (["figure"], "Name a figure: tms_5-2, tms_5-2-id,"),
        (["splitting", "--seeds", "2"], "Feature splitting is tested on seed 0"),
        (["table1", "tms_5-2"], "'table1' takes no name"),
        (["table1", "--preset", "papr"], "There is no preset 'papr'. Did you mean 'paper'"),
        (["table1", "--seeds", "0"], "--seeds is 0; it must be at least 1 and at most 10,000"),
        (["figure", "beta3", "--seeds", "2"], "A figure shows seed 0; --seeds is for tables"),
        (
            ["table1", "--from", "nowhere", "--seeds", "2"],
            "--from uses every run that is kept and makes none; leave out --seeds and --jobs.",
        ),
        (
            ["table1", "--from", "nowhere", "--jobs", "2"],
            "--from uses every run that is kept and makes none; leave out --seeds and --jobs.",
        ),
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
    full = RunSpec.config.fget

    def config(self):
        settings = full(self)
        warm_up = settings.faithfulness_warmup.model_copy(update={"steps": 0})
        return settings.model_copy(update={"steps": 12, "batch_size": 64, "faithfulness_warmup": warm_up})

    monkeypatch.setattr(RunSpec, "config", property(config))
    monkeypatch.setattr(kept_module, "real_differences", lambda *_, **__: [])


def test_kept_runs_that_mean_something_else_today_are_left_out(short, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    rankone_main(["reproduce", "figure", "tms_5-2"])
    monkeypatch.undo()
    monkeypatch.chdir(tmp_path)
    capsys.readouterr()
    with pytest.raises(SystemExit):
        rankone_main(["reproduce", "table1", "--from", "reproduction"])
    shown = capsys.readouterr()
    assert "Left out: tms_5-2-tuned-seed0 (batch_size was 64 and is now 4096)" in shown.out
    assert "reproduction keeps no run that this could be made of" in shown.err


def test_from_nothing_to_a_table_and_again_without_training(short, capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    rankone_main(["reproduce", "figure", "tms_5-2-id"])
    shown = capsys.readouterr().out
    assert "1 runs are needed, 0 are there." in shown
    kept = tmp_path / "reproduction/runs/tms_5-2-id-tuned-seed0"
    assert set(RunDirectory.open(kept).names()) >= {"summary.json", "config.yaml", "figure_data.npz"}
    assert (tmp_path / "reproduction/work/tms_5-2-id-tuned-seed0/checkpoints").is_dir()
    summary = json.loads((kept / "summary.json").read_text())
    assert summary["command"] == "rankone run tms_5-2-id --preset tuned --seed 0 threads=1"
    drawn = {p.name for p in (tmp_path / "reproduction/figures").iterdir()}
    assert drawn == {
        "tms_5-2-id-columns-embed.svg",
        "tms_5-2-id-matrices-hidden.0.svg",
        "tms_5-2-id-networks.svg",
    }
    # A second seed is added to what is there; nothing is made twice.
    before = (kept / "summary.json").stat().st_mtime_ns
    monkeypatch.setattr(plan, "TMS", ("tms_5-2-id",))
    rankone_main(["reproduce", "table1", "--seeds", "2"])
    shown = capsys.readouterr().out
    assert "2 runs are needed, 1 are there." in shown
    assert (kept / "summary.json").stat().st_mtime_ns == before
    row = next(line for line in shown.splitlines() if line.startswith("tms_5-2-id "))
    assert row.split()[:3] == ["tms_5-2-id", "tuned", "2"]
    assert "0.992" in row
    # Another directory, from what is kept.
    rankone_main(["reproduce", "table1", "--from", "reproduction", "--out", "again"])
    assert (tmp_path / "again/table1.md").read_text() == (tmp_path / "reproduction/table1.md").read_text()
    assert not (tmp_path / "again/runs").exists()
    assert not (tmp_path / "again/work").exists()


def test_kept_runs_with_other_settings_are_not_mixed_in(short, capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    rankone_main(["reproduce", "figure", "tms_5-2"])
    monkeypatch.undo()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit):
        rankone_main(["reproduce", "figure", "tms_5-2"])
    error = capsys.readouterr().err
    assert "1 of the runs in reproduction were started with other settings" in error
    assert "steps was 12 and is now" in error


def test_results_in_the_repository_are_redrawn_quickly(tmp_path):
    began = time.process_time()
    made = make("all", None, PRESETS, kept_runs(RESULTS), RunDirectory.claim(tmp_path))
    assert time.process_time() - began < 60
    assert [table.title.split(":")[0] for table in made.tables][:2] == ["Table 1", "Recovery"]
    assert {p.name for p in made.figures} == {p.name for p in (RESULTS / "figures").glob("*.svg")}
    for path in made.figures:
        assert path.read_bytes() == (RESULTS / "figures" / path.name).read_bytes(), (
            f"{path.name} is not what results/ draw"
        )
    assert not made.left_out
    assert not [name for name in made.undrawn if not name.endswith("-paper")]
    assert (tmp_path / "tables.md").read_bytes() == (RESULTS / "tables.md").read_bytes()


def kept_by_hand(folder, spec, *, errors=0, alive=None, **numbers):
    """A kept run that was never made, so that what a table says of it can be known."""
    directory = RunDirectory.claim(folder / "runs" / spec.name)
    directory.write("config.yaml", to_yaml(spec.config))
    truth = spec.config.target.truth()
    checks = {name: {"pattern": pattern, "expected": k, "errors": 0} for name, (pattern, k) in truth.items()}
    next(iter(checks.values()))["errors"] = errors
    alive = alive or {name: k for name, (_, k) in truth.items()}
    summary = {
        "experiment": spec.experiment,
        "preset": spec.preset,
        "seed": spec.seed,
        "steps": spec.config.steps,
        "overrides": spec.config.overrides,
        "recovered": errors == 0,
        "checks": checks,
        "n_alive": alive,
        "l0": dict.fromkeys(alive, 1.0),
        "reconstruction": {"ones": 0.002, "zero": 0.5},
        "faithfulness": 0.0,
        **dict.fromkeys(("mmcs", "ml2r", "mmcs_all", "ml2r_all", "similarity_of")),
        "details": {},
        "target_check": {},
        "losses": {"total": 0.1},
        "target_sha256": "0" * 64,
        "threads": 1,
        "versions": {"rankone": "0"},
        "ms_per_step": 1.0,
        "wall_seconds": 90.0,
    }
    Summary.from_json(summary | numbers, source="this test")
    directory.write("summary.json", json.dumps(summary | numbers))
    return directory


def test_recovery_says_what_holds_in_the_worst_seed(tmp_path):
    """Runs of before there were these measures say what their mask sources tell, and else nothing."""
    measured = {"sum": 0.001, "rounded": 0.02, "attack_20": 0.5, "union_16": 0.03, "deletion": 0.0}
    worse = measured | {"attack_20": 2.5, "rounded": 0.01, "deletion": None}
    earlier = {"ones": 0.1, "rounded": 0.2, "zero": 0.5}
    for seed, relative in enumerate((measured, worse)):
        kept_by_hand(tmp_path, RunSpec("tms_5-2", seed=seed), mmcs=1.0, ml2r=1.0, relative=relative)
    kept_by_hand(tmp_path, RunSpec("tms_5-2-id", seed=0), mmcs=1.0, ml2r=1.0, reconstruction=earlier)
    kept_by_hand(tmp_path, RunSpec("tms_40-10", seed=0), mmcs=1.0, ml2r=1.0, reconstruction=earlier)
    kept_by_hand(tmp_path, RunSpec("tms_40-10", seed=1), mmcs=1.0, ml2r=1.0, relative=measured)
    table = tables.recovery(kept_runs(tmp_path))
    assert table.head[5:10] == ("sum is off by", "rounded", "attack", "union with 16", "deletion")
    assert [row[5:10] for row in table.rows] == [
        ("0.1%", "2.0%", "250.0%", "3.0%", "-"),
        ("20.0%", "40.0%", "-", "-", "-"),
        ("20.0%", "40.0%", "-", "-", "-"),
    ]


def test_what_the_tables_say(tmp_path):
    match = {
        "correlation": 0.99987,
        "slope": 1.0123,
        "largest_deviation": 0.0061,
        "largest_contribution": 0.5,
    }
    other = match | {"slope": 1.0323}
    kept_by_hand(tmp_path, RunSpec("tms_5-2", seed=0), mmcs=1.0, ml2r=0.99)
    more = {"embed": 7, "unembed": 5}
    kept_by_hand(
        tmp_path, RunSpec("tms_5-2", seed=1), mmcs=0.9, ml2r=1.01, errors=7, alive=more, wall_seconds=150.0
    )
    kept_by_hand(
        tmp_path, RunSpec("tms_5-2", "paper"), mmcs=1.0, ml2r=1.0, reconstruction={"ones": 0.1, "zero": 0.5}
    )
    kept_by_hand(tmp_path, RunSpec("resid_mlp1", seed=0), details={"neuron_contributions": match})
    kept_by_hand(tmp_path, RunSpec("resid_mlp1", seed=1), details={"neuron_contributions": other})
    usual, twice, _ = plan.splitting_runs("tuned")[:3]
    kept_by_hand(tmp_path, usual, mmcs=1.0, ml2r=1.0)
    kept_by_hand(
        tmp_path, twice, alive={"embed": 6, "hidden.0": 2, "unembed": 5}, errors=1, mmcs=1.0, ml2r=1.0
    )
    out = RunDirectory.claim(tmp_path / "out")
    made = make("all", None, PRESETS, kept_runs(tmp_path), out)
    rows = {table.title.split(":")[0]: [tuple(row) for row in table.rows] for table in made.tables}
    assert rows["Table 1"][:2] == [
        ("tms_5-2", "tuned", "2", "0.950 ± 0.071", "1.000 ± 0.000", "1.000 ± 0.014", "0.993 ± 0.002"),
        ("tms_5-2", "paper", "1", "1.000", "1.000 ± 0.000", "1.000", "0.993 ± 0.002"),
    ]
    assert rows["Recovery"][:2] == [
        ("tms_5-2", "tuned", "10,000", "1 of 2 (9% to 91%)", "1 (7)", "0.4%", *["-"] * 4, "2.0"),
        ("tms_5-2", "paper", "40,000", "1 of 1 (21% to 100%)", "none", "20.0%", *["-"] * 4, "1.5"),
    ]
    assert rows["Neuron contributions"] == [
        ("resid_mlp1", "tuned", "2", "0.9999 ± 0.0000", "1.022 ± 0.014", "0.006 ± 0.000", "0.500 ± 0.000")
    ]
    assert rows["Feature splitting"] == [
        ("tms_5-2-id", "tuned", "20", "embed 5, hidden.0 2, unembed 5", "5, 2, 5", "yes"),
        ("tms_5-2-id", "tuned", "40", "embed 6, hidden.0 2, unembed 5", "5, 2, 5", "no"),
    ]
    assert rows["Subcomponents"][0] == ("tms_5-2", "tuned", "2", "embed 5 to 7, unembed 5", "5, 5")
    # The varied run counts as no seed of the experiment; what cannot be drawn is named with what it
    # lacks.
    assert [row[:4] for row in rows["Recovery"] if row[0] == "tms_5-2-id"] == [
        ("tms_5-2-id", "tuned", "10,000", "1 of 1 (21% to 100%)")
    ]
    assert made.undrawn["splitting"][0] == "tms_5-2-id-tuned-seed0-C-4x"
    assert made.undrawn["tms_5-2-paper"] == ["tms_5-2-paper-seed0"]
    # With the paper's settings, other coefficients and other C are looked for only if they are
    # asked for.
    kept_by_hand(tmp_path, RunSpec("tms_5-2-id", "paper"), mmcs=1.0, ml2r=1.0)
    runs = kept_runs(tmp_path)
    for presets, missed in ((PRESETS, {"splitting"}), (["paper"], {"splitting-paper"})):
        split = make("splitting", None, presets, runs, out)
        assert set(split.undrawn) == missed
        assert "paper" not in {row[1] for table in split.tables for row in table.rows}
    only = make("recovery", None, ["paper"], runs, out)
    assert [row[:2] for row in only.tables[0].rows] == [("tms_5-2", "paper"), ("tms_5-2-id", "paper")]


def test_folders_that_are_no_runs_of_the_paper_are_left_out(tmp_path, capsys):
    kept_by_hand(tmp_path, RunSpec("tms_5-2"), mmcs=1.0, ml2r=1.0)
    for name, changes in {
        "own": {"preset": "custom"},
        "gone": {"overrides": ["no.such=1"]},
        "new": {"experiment": "x"},
    }.items():
        kept_by_hand(tmp_path / "more", RunSpec("tms_5-2"), **changes)
        (tmp_path / "more/runs" / RunSpec("tms_5-2").name).rename(tmp_path / "runs" / name)
    (tmp_path / "runs/alien[red]").mkdir()
    (tmp_path / "runs/alien[red]/summary.json").write_text("{}")
    rankone_main(["reproduce", "recovery", "--from", str(tmp_path), "--out", str(tmp_path / "out")])
    shown = " ".join(capsys.readouterr().out.split())
    assert "1 of 1" in shown
    assert "Left out: own (There is no preset 'custom'" in shown
    assert "Left out: gone (There is no setting 'no.such'" in shown
    assert "Left out: new (There is no experiment 'x'" in shown
    assert "Left out: alien[red] (" in shown
    assert "it has no manifest.json" in shown


def test_copies_and_damaged_folders_are_left_out(tmp_path, capsys):
    for seed in range(2):
        kept_by_hand(tmp_path, RunSpec("tms_5-2", seed=seed), mmcs=1.0, ml2r=1.0)
    runs = tmp_path / "runs"
    first = runs / "tms_5-2-tuned-seed0"
    usual, twice, _ = (run.name for run in plan.splitting_runs("tuned")[:3])
    # Two of these names are known for what is special about their runs.
    copies = ("copy", "tms_5-2-tuned-seed2", usual, twice)
    for name in copies:
        shutil.copytree(first, runs / name)
    for name, summary in {"null": "null", "cut": '{"experiment": "tms', "list": "[1]"}.items():
        shutil.copytree(first, runs / name)
        RunDirectory.open(runs / name).write("summary.json", summary)
    shutil.copytree(first, runs / "edited")
    summary = (first / "summary.json").read_text()
    (runs / "edited/summary.json").write_text(summary.replace("90.0", "9.0"))
    kept_by_hand(tmp_path, RunSpec("tms_5-2", seed=3), seed=4)
    rankone_main(["reproduce", "recovery", "--from", str(tmp_path), "--out", str(tmp_path / "out")])
    shown = " ".join(capsys.readouterr().out.split())
    assert "2 of 2 (34% to 100%)" in shown
    for name in copies:
        assert f"Left out: {name} (its name is not that of the run it holds)" in shown
    for name in ("null", "list"):
        assert f"{name}/summary.json is not the summary of a run" in shown
    assert "cut/summary.json is not valid JSON" in shown
    assert "edited/summary.json was changed after rankone wrote it" in shown
    assert "Left out: tms_5-2-tuned-seed3 (its summary.json is of seed 4, its config.yaml of seed 3)" in shown
    with pytest.raises(SystemExit):
        rankone_main(["reproduce", "recovery", "--from", str(tmp_path), "--preset", "paper"])
    assert "keeps no run of the preset paper that this could be made of" in capsys.readouterr().err


def test_a_damaged_config_is_made_again(short, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    rankone_main(["reproduce", "figure", "importances-tms_5-2"])
    config = tmp_path / "reproduction/runs/tms_5-2-tuned-seed0/config.yaml"
    good = config.read_text()
    config.write_text("")
    rankone_main(["reproduce", "figure", "importances-tms_5-2"])
    assert config.read_text() == good
    assert "1 runs are needed, 0 are there." in capsys.readouterr().out


@pytest.mark.parametrize("content", [b"", b"PK cut", "of another program"])
def test_figure_data_that_cannot_be_read_counts_as_missing(short, content, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    rankone_main(["reproduce", "figure", "importances-tms_5-2"])
    data = tmp_path / "reproduction/runs/tms_5-2-tuned-seed0/figure_data.npz"
    good = data.read_bytes()
    if isinstance(content, bytes):
        data.write_bytes(content)
    else:
        np.savez(data, something=np.zeros(3))
    with pytest.raises(SystemExit):
        rankone_main(["reproduce", "figure", "importances-tms_5-2", "--from", "reproduction"])
    assert "These runs are missing: tms_5-2-tuned-seed0" in capsys.readouterr().out
    rankone_main(["reproduce", "figure", "importances-tms_5-2"])
    assert data.read_bytes() == good


def test_a_run_that_cannot_be_kept_does_not_stop_the_others(short, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    rankone_main(["reproduce", "figure", "importances-tms_5-2"])
    shutil.rmtree("reproduction/runs/tms_5-2-tuned-seed0")
    shutil.rmtree("reproduction/work/tms_5-2-tuned-seed0/decomposition")
    monkeypatch.setattr(plan, "TMS", ("tms_5-2",))
    with pytest.raises(SystemExit) as stop:
        rankone_main(["reproduce", "table1", "--seeds", "2"])
    assert stop.value.code == 1
    shown = capsys.readouterr()
    assert "2 runs are needed, 0 are there." in shown.out
    assert "tms_5-2-tuned-seed0: failed" in shown.err
    assert "holds the summary of a run but not its decomposition. Make the run again." in " ".join(
        shown.err.split()
    )
    assert not (tmp_path / "reproduction/runs/tms_5-2-tuned-seed0").exists()
    assert (tmp_path / "reproduction/runs/tms_5-2-tuned-seed1/summary.json").is_file()
    shutil.rmtree("reproduction/work/tms_5-2-tuned-seed0")
    rankone_main(["reproduce", "table1", "--seeds", "2"])
    assert "2 runs are needed, 1 are there." in capsys.readouterr().out


def test_an_interrupted_reproduction_goes_on_where_it_stopped(tmp_path):
    """The real command, stopped as a user would and called again.

    That resumed runs end in the same bits is tested elsewhere.
    """
    words = [
        sys.executable,
        "-m",
        "rankone",
        "reproduce",
        "figure",
        "tms_5-2",
        "--out",
        str(tmp_path / "out"),
    ]
    begun = tmp_path / "out/work/tms_5-2-tuned-seed0/checkpoints"
    process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    while not list(begun.glob("*")) and process.poll() is None:
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    _, shown = process.communicate(timeout=120)
    assert process.returncode == 130, shown
    assert "Interrupted; everything is saved. Go on with the same command." in shown
    assert not (tmp_path / "out/runs/tms_5-2-tuned-seed0").exists()
    again = subprocess.run(words, capture_output=True, text=True, check=False)
    assert again.returncode == 0, again.stderr
    assert (
        json.loads((tmp_path / "out/runs/tms_5-2-tuned-seed0/summary.json").read_text())["recovered"] is True
    )
    assert (tmp_path / "out/figures/tms_5-2-columns-embed.svg").is_file()


def test_a_run_begun_with_other_settings_is_noticed_before_anything_runs(
    short, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    RunDirectory.claim(tmp_path / "reproduction")
    begun = RunDirectory.claim(tmp_path / "reproduction/work" / RunSpec("tms_5-2-id").name)
    begun.write("config.yaml", to_yaml(RunSpec("tms_5-2-id").config.model_copy(update={"steps": 13})))
    with pytest.raises(SystemExit):
        rankone_main(["reproduce", "table1", "--seeds", "1"])
    error = " ".join(capsys.readouterr().err.split())
    assert "1 of the runs in reproduction were started with other settings: tms_5-2-id-tuned-seed0" in error
    assert "steps was 13 and is now 12" in error
    assert list((tmp_path / "reproduction/work").iterdir()) == [begun.path]


def test_figure_data_that_is_missing_is_made_from_the_finished_run(short, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    rankone_main(["reproduce", "figure", "importances-tms_5-2"])
    data = tmp_path / "reproduction/runs/tms_5-2-tuned-seed0/figure_data.npz"
    metrics = tmp_path / "reproduction/work/tms_5-2-tuned-seed0/metrics.jsonl"
    trained = metrics.stat().st_mtime_ns
    data.unlink()
    rankone_main(["reproduce", "figure", "importances-tms_5-2"])
    assert data.is_file()
    assert metrics.stat().st_mtime_ns == trained
