"""The command line as a user meets it: every command, every shipped config, and what it says when
something is wrong."""

import json
import os
import subprocess
import sys

import pytest
import yaml

from rankone import cli, watch
from rankone.config import over_recipe
from rankone.files import RunDirectory
from rankone.runs.config import RunConfig, experiment_config, experiment_file, experiment_names

SMALL = ("--steps", "12", "batch_size=128", "log_every=5", "checkpoint_every=5")


@pytest.fixture
def rankone(monkeypatch, capsys, tmp_path):
    """Run one command line in an empty directory; give back (exit code, standard output, standard
    error)."""
    monkeypatch.chdir(tmp_path)

    def run(*words: str) -> tuple[int, str, str]:
        code = 0
        try:
            cli.main(list(words))
        except SystemExit as stop:
            code = stop.code or 0
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


EVERY = [(name, preset) for name in experiment_names() for preset in experiment_file(name).presets]
OF_THE_PAPER = [name for name in experiment_names() if experiment_file(name).paper is not None]


@pytest.mark.parametrize(("name", "preset"), EVERY)
def test_every_shipped_experiment_runs(rankone, tmp_path, name, preset):
    code, out, err = rankone("run", name, "--preset", preset, "--seed", "3", *SMALL)
    assert code == 0, err
    changed = "batchsize128-logevery5-checkpointevery5-steps12"
    directory = tmp_path / "runs" / f"{name}-{preset}-{changed}-seed3"
    assert f"Report: {directory.relative_to(tmp_path)}/report.html" in out
    assert f"What is wrong, and what to do: rankone diagnose {directory.relative_to(tmp_path)}" in out
    assert "step 12/12" in err
    assert "step 12/12" not in out
    assert "ms/step" in out
    summary = json.loads((directory / "summary.json").read_text())
    needed = (
        "experiment preset seed steps wall_seconds ms_per_step peak_rss_mb recovered checks mmcs ml2r "
        "mmcs_all ml2r_all n_alive l0 losses versions"
    )
    assert set(needed.split()) <= set(summary)
    truth = experiment_config(name).target.truth()
    assert summary["recovered"] is (False if truth else None)
    assert summary["steps"] == 12
    checks = summary["checks"]
    assert {n: (check["pattern"], check["expected"]) for n, check in checks.items()} == truth
    if truth:
        assert sum(check["errors"] for check in checks.values()) > 0, "twelve steps recover nothing"
    else:
        assert summary["details"]["in_words"][0] in out.replace("\n", " ")
    files = {p.relative_to(directory).as_posix() for p in directory.rglob("*") if p.is_file()}
    assert {
        "config.yaml",
        "metrics.jsonl",
        "summary.json",
        "report.html",
        "decomposition/components.safetensors",
    } <= files
    assert {"decomposition/decomposition.json", "checkpoints/step-000000012.safetensors"} <= files
    special = {"contributions.svg", "scatter.svg"} if name.startswith("resid") else {"networks.svg"}
    expected = {"importances.svg", *special} if name in OF_THE_PAPER else set()
    assert {f"figures/{figure}" for figure in {"losses.svg", *expected}} <= files
    assert not [f for f in files if f.endswith(".tmp")]


def test_a_config_file_repeats_a_run(rankone, tmp_path):
    assert rankone("run", "tms_5-2-id", *SMALL, "--out", "a")[0] == 0
    code, _, _ = rankone("run", "a/config.yaml", "--out", "b")
    assert code == 0
    assert (tmp_path / "a/metrics.jsonl").read_bytes() == (tmp_path / "b/metrics.jsonl").read_bytes()
    assert (tmp_path / "a/config.yaml").read_bytes() == (tmp_path / "b/config.yaml").read_bytes()
    for name in ("importances", "networks", "losses", "columns-embed", "matrices-hidden.0"):
        assert (tmp_path / f"a/figures/{name}.svg").read_bytes() == (
            tmp_path / f"b/figures/{name}.svg"
        ).read_bytes()


def test_report_is_one_readable_file(rankone, tmp_path):
    rankone("run", "tms_5-2", *SMALL, "--out", "a")
    page = (tmp_path / "a/report.html").read_text()
    for words in (
        "Not recovered",
        "How recovery is judged",
        "What was decomposed",
        "All settings",
        "feature_probability: 0.05",
        "12 steps",
    ):
        assert words in page
    assert page.count("<svg") == 4
    links = [part.split('"')[0] for mark in ('src="', 'href="') for part in page.split(mark)[1:]]
    assert all(link.startswith(("#", "data:image/png;base64,")) for link in links), (
        "the page must not load anything"
    )


def test_evaluate_and_report_again(rankone, tmp_path):
    rankone("run", "tms_5-2", *SMALL, "--out", "a")
    before = json.loads((tmp_path / "a/summary.json").read_text())
    page = (tmp_path / "a/report.html").read_text()
    code, out, _ = rankone("evaluate", "a")
    assert code == 0
    assert "not recovered" in out
    assert json.loads((tmp_path / "a/summary.json").read_text()) == before
    (tmp_path / "a/report.html").unlink()
    code, out, _ = rankone("report", "a")
    assert code == 0
    assert "Report: a/report.html" in out
    assert (tmp_path / "a/report.html").read_text() == page


def test_list(rankone):
    code, out, _ = rankone("list")
    assert code == 0
    for name in experiment_names():
        assert name in out


def test_config_show_is_complete_and_runs(rankone, tmp_path):
    code, out, _ = rankone(
        "config", "show", "tms_5-2", "--preset", "paper", "--seed", "4", "optimizer.lr=2e-3"
    )
    assert code == 0
    values = yaml.safe_load(out)
    assert values["preset"] == "paper"
    assert values["seed"] == 4
    assert values["optimizer"]["lr"] == 2e-3
    assert values["overrides"] == ["optimizer.lr=2e-3"]
    (tmp_path / "mine.yaml").write_text(out)
    assert rankone("run", "mine.yaml", *SMALL)[0] == 0


def test_config_explain(rankone):
    code, out, _ = rankone("config", "explain")
    assert code == 0
    for setting in (
        "optimizer.lr",
        "losses.importance_minimality.p",
        "target.n_features",
        "faithfulness_warmup.steps",
    ):
        assert setting in out


def test_train_target(rankone, tmp_path, monkeypatch):
    import rankone.targets.tms as tms

    monkeypatch.setattr(tms.TMSTarget, "check", lambda self, model: (True, {"number": 1.0}))
    config = yaml.safe_load(rankone("config", "show", "tms_5-2")[1])
    config["target"]["training"]["steps"] = 5
    (tmp_path / "quick.yaml").write_text(yaml.safe_dump(config))
    code, out, _ = rankone("train-target", "quick.yaml", "--seed", "7")
    assert code == 0
    assert "seed 7: loss" in out
    assert "Wrote targets/tms_5-2-seed7.safetensors" in out
    command = out.split("Decompose it with: rankone ")[1].split()
    assert rankone(*command, *SMALL)[0] == 0


def test_interrupted_and_finished_runs(rankone, tmp_path):
    rankone("run", "tms_5-2", *SMALL, "--out", "a")
    code, _, err = rankone("run", "tms_5-2", *SMALL, "--out", "a")
    assert code == 1
    assert "a already holds a run, which is complete. Add --resume to keep it" in err
    code, _, err = rankone("run", "a", "--resume")
    assert code == 0
    assert "a is already complete" in err
    summary = (tmp_path / "a/summary.json").read_text()
    RunDirectory.open(tmp_path / "a").remove("summary.json")
    code, _, err = rankone("report", "a")
    assert code == 1
    assert "a is not complete yet. Finish it with: rankone run a --resume" in err
    assert rankone("run", "a", "--resume")[0] == 0
    same = ("checks", "mmcs", "losses", "reconstruction", "l0")
    assert all(
        json.loads(summary)[k] == json.loads((tmp_path / "a/summary.json").read_text())[k] for k in same
    )


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["run", "tms_5-3"], "There is no experiment 'tms_5-3'. Did you mean 'tms_5-2'"),
        (["run", "none.yaml"], "There is no config file none.yaml"),
        (["run", "tms_5-2", "--preset", "papr"], "There is no preset 'papr'. Did you mean 'paper'"),
        (["run", "tms_5-2", "--sede", "3"], "There is no setting 'sede'. Did you mean 'seed'"),
        (
            ["run", "tms_5-2", "optimizer.lrr=3"],
            "There is no setting 'optimizer.lrr'. Did you mean 'optimizer.lr'",
        ),
        (["run", "tms_5-2", "optimizer.lr"], "has no value; write key=value"),
        (["run", "tms_5-2", "--optimizer.lr"], "has no value"),
        (["run", "tms_5-2", "optimizer=3"], "optimizer: Input should be a valid dictionary"),
        (
            ["run", "tms_5-2", "optimizer=3", "optimizer.lr=1"],
            "optimizer.lr cannot be set, because optimizer was set to a plain value",
        ),
        (["run", "tms_5-2", "losses={foo: {}}"], "Unknown loss 'foo'. There are: 'adversarial_recon'"),
        (
            ["run", "tms_5-2", "losses.importance_minimality=null"],
            "importance_minimality: Input should be a valid",
        ),
        (["run", "tms_5-2", "optimizer.lr=fast"], "optimizer.lr: Input should be a valid number"),
        (["run", "tms_5-2", "--steps", "0"], "steps: Input should be greater than or equal to 1"),
        (
            ["run", "tms_5-2", "layers={embde: 3}"],
            "Pattern 'embde' matches no module in TMS. Did you mean 'embed' or 'unembed'",
        ),
        (["run", "tms_5-2", "target.sha256=ab"], "but the config pins ab"),
        (["run", "tms_5-2", "preset=paper"], "'preset=paper' cannot be given as an override. Use --preset"),
        (["run", "tms_5-2", "importance.options.d_gate=4.5"], "d_gate is 4.5; it must be a whole number"),
        (["evaluate", "nothing"], "is not a run directory: it has no manifest.json. `rankone run` makes one"),
        (["report", "nothing"], "is not a run directory: it has no manifest.json"),
        (["config", "show", "tms"], "There is no experiment 'tms'"),
    ],
)
def test_mistakes_get_one_message(rankone, words, message):
    code, _, err = rankone(*words)
    assert code == 1
    assert message in err.replace("\n", " ")
    assert "Traceback" not in err


@pytest.mark.parametrize(
    ("settings", "checked"),
    [(("layers={embed: 20}", "tied={}"), {"embed"}), (("layers={unembed: 9}", "tied={}"), {"unembed"})],
)
def test_some_layers_only(rankone, tmp_path, settings, checked):
    code, _, err = rankone("run", "tms_5-2", *SMALL, *settings, "--out", "a")
    assert code == 0, err
    summary = json.loads((tmp_path / "a/summary.json").read_text())
    assert set(summary["checks"]) == checked
    assert (summary["mmcs"] is not None) is ("embed" in checked)


def test_one_layer_may_have_another_number_of_subcomponents(rankone, tmp_path):
    assert rankone("run", "tms_5-2-id", *SMALL, "layers.hidden.0=30", "--out", "a")[0] == 0
    assert yaml.safe_load((tmp_path / "a/config.yaml").read_text())["layers"] == {
        "embed": 20,
        "hidden.0": 30,
        "unembed": 20,
    }


def test_a_refused_run_does_not_stand_in_the_way(rankone):
    code, _, err = rankone("run", "tms_5-2", *SMALL, "layers={embde: 3}", "--out", "a")
    assert code == 1
    assert "matches no module" in err
    assert rankone("run", "tms_5-2", *SMALL, "--out", "a")[0] == 0


def test_an_edited_preset_is_no_preset(rankone, tmp_path):
    shown = rankone("config", "show", "tms_5-2", "--preset", "paper", "--seed", "8")[1]
    (tmp_path / "same.yaml").write_text(shown)
    (tmp_path / "edited.yaml").write_text(shown.replace("lr: 0.001", "lr: 0.003"))
    assert yaml.safe_load(rankone("config", "show", "same.yaml")[1])["preset"] == "paper"
    assert yaml.safe_load(rankone("config", "show", "edited.yaml")[1])["preset"] == "custom"


def test_what_an_override_undoes_is_no_longer_called_a_difference(rankone, tmp_path):
    shown = rankone("config", "show", "tms_5-2", "--steps", "123")[1]
    assert yaml.safe_load(shown)["steps"] == 123
    assert "steps" not in {d["setting"] for d in yaml.safe_load(shown)["differs_from_paper"]}
    (tmp_path / "x.yaml").write_text(shown)
    assert yaml.safe_load(rankone("config", "show", "x.yaml")[1])["preset"] == "recipe"


def test_a_loss_that_is_changed_drops_no_other(rankone):
    before = yaml.safe_load(rankone("config", "show", "tms_5-2")[1])["losses"]
    changed = "losses={importance_minimality: {coefficient: 3e-4}}"
    after = yaml.safe_load(rankone("config", "show", "tms_5-2", changed)[1])["losses"]
    assert set(after) == set(before)
    assert after["importance_minimality"] == before["importance_minimality"] | {"coefficient": 3e-4}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["run", "tms_5-2", "lr=1e-3"], "There is no setting 'lr'. Did you mean 'optimizer.lr'"),
        (
            ["run", "tms_5-2", "--device", "cuda"],
            "There is no setting 'device'. A decomposition is made where",
        ),
        (["run", "tms_5-2", "learning_rate=1"], "Did you mean 'optimizer.lr'?"),
        (["config", "explain", "lr"], "it is optimizer.lr or faithfulness_warmup.lr"),
        (["config", "explain", "optimiser"], "There is no setting and no experiment 'optimiser'"),
        (["config", "explain", "tms_5-2", "tms_40-10"], "are two experiments; name one"),
    ],
)
def test_hints_hit(rankone, words, message):
    code, _, err = rankone(*words)
    assert code == 1
    assert message in err.replace("\n", " ")


def test_steps_as_people_write_them(rankone):
    for text, steps in (("1e4", 10_000), ("20_000", 20_000), ("300", 300)):
        shown = yaml.safe_load(rankone("config", "show", "tms_5-2", "--steps", text)[1])
        assert shown["steps"] == steps
    code, _, err = rankone("run", "tms_5-2", "--steps", "1.5")
    assert code == 2
    assert "'1.5' is no whole number; write 10000 or 1e4" in err


def test_one_setting_is_explained(rankone):
    code, out, _ = rankone("config", "explain", "optimizer.lr")
    assert code == 0
    assert out.splitlines()[0].startswith("optimizer.lr = ")
    assert "seed" not in out
    assert "optimizer.schedule" in rankone("config", "explain", "tms_40-10", "optimizer")[1]


def test_a_config_file_of_ones_own_has_a_directory_of_its_own(tmp_path):
    from pathlib import Path

    from rankone.runs.choose import chosen_run
    from rankone.settings import to_yaml

    none = {"preset": None, "seed": None, "assignments": []}
    config, out = chosen_run("tms_5-2", None, resume=False, seeds=None, steps=60, **none)
    assert out is None
    assert config.run_name == "tms_5-2-recipe-steps60-seed0"
    (tmp_path / "mine.yaml").write_text(to_yaml(config).replace("  lr: ", "  lr: 1"))
    config, out = chosen_run(str(tmp_path / "mine.yaml"), None, resume=False, seeds=None, steps=None, **none)
    assert out == Path("runs/mine-tms_5-2-custom-steps60-seed0")
    long = experiment_config(
        "tms_5-2", assignments=["layers={embed: 20, unembed: 20}", "losses.frequency.coefficient=1"]
    )
    assert len(long.run_name) < 80
    assert (
        long.run_name
        != experiment_config("tms_5-2", assignments=["layers={embed: 20, unembed: 20}"]).run_name
    )


def test_a_run_with_other_settings_is_not_resumed(rankone):
    rankone("run", "tms_5-2", *SMALL, "--out", "a")
    code, _, err = rankone("run", "tms_5-2", *SMALL, "--out", "a", "--seed", "1", "--resume")
    assert code == 1
    assert "holds a run with other settings: seed was 0 and is now 1" in err
    code, _, err = rankone("run", "a", "--resume", "--seed", "2")
    assert code == 1
    assert "resumed with its own settings" in err
    code, _, err = rankone("run", "a")
    assert code == 1
    assert "a is a run directory. Add --resume" in err


def test_preset_does_not_go_with_a_file(rankone, tmp_path):
    (tmp_path / "x.yaml").write_text(rankone("config", "show", "tms_5-2")[1])
    code, _, err = rankone("run", "x.yaml", "--preset", "paper")
    assert code == 1
    assert "--preset chooses among the settings of" in err


def test_an_unknown_schema_is_refused(rankone, tmp_path):
    (tmp_path / "x.yaml").write_text(
        rankone("config", "show", "tms_5-2")[1].replace("schema_version: 1", "schema_version: 2")
    )
    code, _, err = rankone("run", "x.yaml")
    assert code == 1
    assert "schema_version: Input should be 1 (got 2)" in err


def test_an_unwritable_place_is_named(rankone, tmp_path):
    (tmp_path / "file").write_text("")
    code, _, err = rankone("run", "tms_5-2", *SMALL, "--out", "file/run")
    assert code == 1
    assert "file" in err
    assert "Traceback" not in err


def test_files_that_are_not_what_they_should_be(rankone, tmp_path):
    (tmp_path / "x.yaml").write_bytes(b"\xff\xfe")
    code, _, err = rankone("run", "x.yaml")
    assert code == 1
    assert "x.yaml is not" in err
    assert "UTF-8" in err
    rankone("run", "tms_5-2", *SMALL, "--out", "a")
    (tmp_path / "a/summary.json").write_text("{}")
    for command in ("report", "evaluate", "diagnose"):
        code, _, err = rankone(command, "a")
        assert code == 1
        assert "a/summary.json was changed after rankone wrote it" in err


def test_two_processes_in_one_directory(rankone, tmp_path):
    import fcntl

    assert rankone("run", "tms_5-2", *SMALL, "--out", "a")[0] == 0
    with open(tmp_path / "a/.lock", "a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        for words in (["run", "a", "--resume"], ["report", "a"], ["evaluate", "a"]):
            code, _, err = rankone(*words)
            assert code == 1
            assert "Another rankone process is running in a" in err


def test_without_the_report_extra(rankone, tmp_path, monkeypatch):
    for module in (watch, *(sys.modules[f"rankone.{name}"] for name in ("console", "report.page"))):
        monkeypatch.setattr(module, "can_report", lambda: False)
    code, out, err = rankone("run", "tms_5-2", *SMALL, "--out", "a")
    assert code == 0
    assert "pip install 'rankone[report]'" in err
    assert "Numbers: a/summary.json" in out
    assert not (tmp_path / "a/report.html").exists()
    code, _, err = rankone("report", "a")
    assert code == 1
    assert "pip install 'rankone[report]'" in err


def test_what_is_not_ours_is_left_alone(rankone, tmp_path):
    """A directory in use is refused; inside a run directory, a foreign figure outlives a new report."""
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/thesis.tex").write_text("x")
    for words in (
        ["run", "tms_5-2", *SMALL],
        ["run", "tms_5-2", *SMALL, "--seeds", "1"],
        ["reproduce", "figure", "tms_5-2"],
    ):
        code, _, err = rankone(*words, "--out", "mine")
        assert code == 1
        assert "mine is not empty" in err
        assert "'thesis.tex'" in err
        assert [p.name for p in (tmp_path / "mine").iterdir()] == ["thesis.tex"]
        code, _, err = rankone(*words, "--out", "")
        assert code == 2
        assert "--out: it is empty; name a file or a directory." in err
    assert [p.name for p in tmp_path.iterdir()] == ["mine"]
    assert rankone("run", "tms_5-2", *SMALL, "--out", "a")[0] == 0
    figures = tmp_path / "a/figures"
    (figures / "mine.svg").write_text("x")
    RunDirectory.open(tmp_path / "a").write("figures/old.svg", "drawn by an earlier version")
    assert rankone("report", "a")[0] == 0
    assert (figures / "mine.svg").read_text() == "x"
    assert not (figures / "old.svg").exists()
    assert (figures / "losses.svg").exists()


@pytest.mark.parametrize("name", ["a[/b]", "[bold]x", "a\x1b[31mb", "\udcff"])
def test_strange_names_are_printed_as_they_are_and_command_no_terminal(rankone, tmp_path, name):
    code, out, err = rankone("run", "tms_5-2", *SMALL, "--out", name)
    assert code == 0, err
    shown = name.replace("\x1b", "\ufffd").replace("\udcff", "\ufffd")
    assert f"Report: {shown}/report.html" in out
    assert "\x1b" not in out + err
    for words in (
        ["run", name],
        ["report", "no" + name],
        ["config", "show", name],
        [name],
        ["run", "tms_5-2", name],
    ):
        code, out, err = rankone(*words)
        assert code in (1, 2)
        assert err.startswith("error: ")
        assert "\x1b" not in out + err
        assert "Traceback" not in err


def command(*words, cwd, **environment):
    """The command in a process of its own."""
    return subprocess.run(
        [sys.executable, "-m", "rankone", *words],
        cwd=cwd,
        env=os.environ | environment,
        capture_output=True,
        check=False,
    )


ASCII = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONIOENCODING": "", "PYTHONCOERCECLOCALE": "0"}


def test_an_ascii_locale_costs_letters_and_not_a_run(tmp_path, rankone):
    done = command("run", "tms_5-2", *SMALL, "--out", "Größe", cwd=tmp_path, **ASCII)
    assert done.returncode == 0, done.stderr.decode()
    assert b"Report: Gr??e/report.html" in done.stdout.replace(b"????", b"??")
    page = (tmp_path / "Größe/report.html").read_text(encoding="utf-8")
    assert "2 × 5" in page
    config = tmp_path / "Größe/config.yaml"
    written = config.read_text(encoding="utf-8").replace("title: ", "title: Größe, ")
    (tmp_path / "x.yaml").write_text(written, encoding="utf-8")
    assert "Größe" in written
    shown = command("config", "show", "x.yaml", cwd=tmp_path, **ASCII)
    assert "Größe" in shown.stdout.decode("utf-8"), "a config file is UTF-8 whatever the locale"
    for words in (["list"], ["config", "explain"], ["--help"], ["run", "β"]):
        done = command(*words, cwd=tmp_path, **ASCII)
        assert b"Traceback" not in done.stderr, done.stderr.decode()


def test_the_backend_of_a_notebook_does_not_matter(tmp_path):
    done = command("run", "tms_5-2", *SMALL, "--out", "a", cwd=tmp_path)
    assert done.returncode == 0, done.stderr.decode()
    there = (tmp_path / "a/figures/networks.svg").read_bytes()
    again = command("report", "a", cwd=tmp_path, MPLBACKEND="module://matplotlib_inline.backend_inline")
    assert again.returncode == 0, again.stderr.decode()
    assert (tmp_path / "a/figures/networks.svg").read_bytes() == there


@pytest.mark.parametrize("seeds", [(), ("--seeds", "2", "--jobs", "1")], ids=["one run", "seeds"])
def test_a_reader_that_goes_away_costs_no_work(tmp_path, seeds):
    """`rankone run ... 2>&1 | head -1`: what was trained is saved."""
    words = [
        "run",
        "tms_5-2",
        "batch_size=64",
        "--steps",
        "1000000",
        "checkpoint_every=1000000",
        "log_every=10",
    ]
    with subprocess.Popen(
        [sys.executable, "-c", QUICK_LINES, *words, *seeds, "--out", "a"],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        while "ms/step" not in process.stdout.readline():
            assert process.poll() is None
        process.stdout.close()
        assert process.wait(timeout=120) == 141
    folder = tmp_path / ("a/seed0" if seeds else "a")
    assert len(list((folder / "checkpoints").glob("*.safetensors"))) == 1


QUICK_LINES = """
import rankone.progress, rankone.__main__
if __name__ == "__main__":
    rankone.progress.SECONDS_BETWEEN_LINES = 0.1
    rankone.__main__.main()
"""


def test_a_short_command_whose_reader_goes_away_is_quiet(tmp_path):
    for words in ("list", "config explain"):
        line = f"{sys.executable} -m rankone {words} | head -1; echo ${{PIPESTATUS[0]}}"
        done = subprocess.run(["bash", "-c", line], cwd=tmp_path, capture_output=True, text=True, check=False)
        assert done.stderr == ""
        assert done.stdout.split()[-1] in ("0", "141")


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (MemoryError(), "There is not enough memory for this. Make `batch_size`"),
        (
            RuntimeError(
                "[enforce fail at alloc_cpu.cpp:117] DefaultCPUAllocator: not enough memory: 8 bytes"
            ),
            "There is not enough memory for this.",
        ),
        (RecursionError("maximum recursion depth exceeded"), "nested too deeply"),
        (OSError(28, "No space left on device", "a/x"), "cannot read or write a/x: No space left on device"),
    ],
)
def test_what_can_happen_to_any_program_gets_one_message(rankone, monkeypatch, error, message):
    def broken(*_, **__):
        raise error

    monkeypatch.setattr("rankone.runs.choose.experiment_config", broken)
    code, _, err = rankone("run", "tms_5-2")
    assert code == 1
    assert message in err
    assert "Traceback" not in err


def test_a_bug_keeps_its_traceback(rankone, monkeypatch):
    def broken(*_, **__):
        raise RuntimeError("a bug")

    monkeypatch.setattr("rankone.runs.choose.experiment_config", broken)
    with pytest.raises(RuntimeError, match="a bug"):
        rankone("run", "tms_5-2")


@pytest.mark.parametrize("number", ["0", "-1", "1000000000"])
def test_absurd_numbers_are_refused_at_once(rankone, number):
    for words in (["run", "tms_5-2"], ["reproduce", "table1"]):
        code, _, err = rankone(*words, f"--seeds={number}")
        assert code == 1
        assert f"--seeds is {number}; it must be at least 1 and at most 10,000" in err


def test_a_run_resumes_although_its_description_has_changed(tmp_path):
    """A better title, or a reason in better words, must not cost anyone a run."""
    from rankone.runs.run import run

    config = experiment_config("tms_5-2", assignments=["steps=30", "checkpoint_every=10", "batch_size=64"])

    def stop(progress):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(
            config.model_copy(update={"log_every": 21}),
            tmp_path,
            observer=lambda p: stop(p) if p.step > 20 else None,
        )
    described = config.model_copy(update={"log_every": 21, "title": "better", "differs_from_paper": []})
    assert run(described, tmp_path, resume=True).steps == 30


@pytest.mark.parametrize("preset", ["recipe", "tuned"])
def test_presets_differ_only_where_they_say(preset):
    for name in OF_THE_PAPER:
        paper = experiment_config(name, preset="paper").model_dump(mode="json")
        ours = experiment_config(name, preset=preset).model_dump(mode="json")
        stated = {d["setting"]: d["value"] for d in ours.pop("differs_from_paper")}
        assert paper.pop("differs_from_paper") == []
        from rankone.settings import differences, fields

        differing = {d.split(" was ")[0] for d in differences(paper, ours)} - {"preset"}
        new = {path for path, _, _ in fields(RunConfig, ours)} - {p for p, _, _ in fields(RunConfig, paper)}
        covered = {
            d: [key for key in stated if d == key or d.startswith(f"{key}.") or d == key.rpartition(".")[0]]
            for d in differing
        }
        assert all(covered.values()), (name, covered)
        assert {key for keys in covered.values() for key in keys} == set(stated), name
        assert new <= set(stated), name
        now = {path: value for path, value, _ in fields(RunConfig, ours)}
        assert all(now[key] == value for key, value in stated.items()), name
        assert all(d.why for d in experiment_config(name, preset=preset).differs_from_paper)


def test_without_a_preset_an_experiment_uses_the_one_recipe():
    method = over_recipe({}).model_dump(mode="json")
    of_the_network = {"tied", "matrices", "divergence"}
    for name in OF_THE_PAPER:
        config, paper = experiment_config(name), experiment_config(name, preset="paper")
        assert config.preset == "recipe"
        values = config.model_dump(mode="json")
        assert {key: values[key] for key in method if key not in of_the_network} == {
            key: value for key, value in method.items() if key not in of_the_network
        }
        for key in (*of_the_network, "target", "layers", "output", "batch_size", "threads", "paper_reports"):
            assert getattr(config, key) == getattr(paper, key), (name, key)
