"""A network of the user's own as a run: from a file named on the command line, or handed over in Python."""

import json
import os
import signal
import subprocess
import sys
import textwrap

import pytest
import torch
import yaml

import rankone
from conftest import rankone_main, small_mlp, uniform
from rankone import RankoneError, cli
from rankone.errors import ConfigError
from rankone.runs.own import own_config
from rankone.targets.own import handing_over, made_by
from rankone.train import Interrupted

CONFIG = rankone.DecompositionConfig(
    steps=8, log_every=2, checkpoint_every=4, importance={"kind": "layer_mlp"}
)
FILE = """
    import torch
    import helper_of_mine

    def data(generator):
        return torch.rand(16, 4, generator=generator)

    def make():
        \"\"\"A small network of mine.\"\"\"
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.ReLU(), torch.nn.Linear(6, 4)).eval()
        return model, data, {"*": 5}

    def other():
        model, _, layers = make()
        with torch.no_grad():
            model[0].weight.add_(1)
        return {"model": model, "data": data, "layers": layers, "config": {"optimizer": {"lr": 0.5}}}

    def needs(argument):
        return make()

    def nothing():
        return None

    def typo():
        return {"modle": 1}

    def two():
        return make()[:2]

    def named():
        return {"model": make()[0], "data": data, "layers": ["0"]}
"""
QUICK = ("--steps", "6", "log_every=2", "checkpoint_every=3", "importance.kind=layer_mlp")


@pytest.fixture
def mine(tmp_path, monkeypatch):
    """A folder with my_model.py, and the command line in it."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_model.py").write_text(textwrap.dedent(FILE))
    (tmp_path / "helper_of_mine.py").write_text("")
    before, modules = list(sys.path), set(sys.modules)
    yield tmp_path
    sys.path[:] = before
    for name in {"my_model", "helper_of_mine", "rankone_own_my_model"} - modules:
        sys.modules.pop(name, None)


@pytest.fixture
def command(mine, capsys):
    def run(*words):
        code = 0
        try:
            cli.main(list(words))
        except SystemExit as stop:
            code = stop.code or 0
        said = capsys.readouterr()
        return code, said.out, said.err

    return run


def test_from_a_file_to_every_command(mine, command):
    code, out, err = command("run", "my_model.py:make", *QUICK, "--out", "a")
    assert code == 0, err
    assert "no ground truth known" in out
    assert {"summary.json", "config.yaml", "report.html", "metrics.jsonl"} <= {
        p.name for p in mine.glob("a/*")
    }
    config = yaml.safe_load((mine / "a/config.yaml").read_text())
    assert config["title"] == "A small network of mine."
    assert config["target"]["made_by"] == "my_model.py:make"
    assert str(mine) not in (mine / "a/config.yaml").read_text()
    for words in (
        ["report", "a"],
        ["diagnose", "a"],
        ["compare", "a", "a"],
        ["evaluate", "a", "--attack", "2"],
    ):
        code, out, err = command(*words)
        assert code == 1
        assert "no code is run because a file says so" in err.replace("\n", " ")
        assert "--model my_model.py:make" in err
        code, out, err = command(*words, "--model", "my_model.py")
        assert code == 0, err
        assert out
    numbers = json.loads((mine / "a/summary.json").read_text())
    code, out, err = command("evaluate", "a", "--json")
    assert json.loads(out) == numbers
    assert "Not measured again" in err
    code, out, err = command("evaluate", "a", "--json", "--model", "my_model.py:make")
    assert json.loads(out) == numbers
    assert err == ""
    code, _, err = command("report", "a", "--model", "my_model.py:other")
    assert code == 1
    assert "my_model.py:other is a Sequential with" in err
    assert "It must be the very network" in err


def test_a_received_directory_runs_no_code(mine, command):
    """The directory names a file, the file is there, and it is not run."""
    assert command("run", "my_model.py:make", *QUICK, "--out", "a")[0] == 0
    sys.modules.pop("my_model")
    (mine / "my_model.py").write_text("open('executed', 'w').close()\n")
    for words in (["report", "a"], ["diagnose", "a"], ["run", "a", "--resume"], ["evaluate", "a"]):
        command(*words)
    with pytest.raises(RankoneError, match="a network of your own"):
        rankone.open("a")
    assert not (mine / "executed").exists()


def test_resume_seeds_and_quiet(mine, command):
    code, out, err = command("run", "my_model.py:make", *QUICK, "--quiet", "--json")
    assert code == 0
    assert err == ""
    (folder,) = (mine / "runs").iterdir()
    assert folder.name.startswith("my_model-recipe-logevery2-checkpointevery3-")
    assert folder.name.endswith("-seed0")
    assert json.loads(out) == json.loads((folder / "summary.json").read_text())
    code, _, err = command("run", str(folder), "--resume")
    assert code == 1
    assert "--model my_model.py:make" in err
    code, _, err = command("run", str(folder), "--resume", "--model", "my_model.py:make")
    assert code == 0
    assert "is already complete" in err


@pytest.mark.slow
def test_several_seeds(mine, command):
    code, out, err = command("run", "my_model.py:make", *QUICK, "--seeds", "2", "--jobs", "1", "--out", "s")
    assert code == 0, err
    assert {"seed0", "seed1"} <= {p.name for p in (mine / "s").iterdir()}
    assert "Numbers: s/seeds.json" in out


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("my_model.py:mkae", r"my_model.py has no function 'mkae'. Did you mean 'make'"),
        ("my_model.py:needs", r"my_model.py:needs needs argument; it is called without arguments"),
        ("my_model.py:nothing", r"returned a NoneType; expected \(model, data\)"),
        ("my_model.py:typo", r"returned 'modle'. Did you mean 'model'"),
        ("none.py:make", r"There is no file 'none.py'; name a network as FILE.py:FUNCTION"),
    ],
)
def test_what_is_no_network(mine, name, message):
    with pytest.raises(ConfigError, match=message):
        made_by(name)


def test_settings_of_make_and_of_the_command_line(mine):
    own = made_by("my_model.py:other")
    assert own_config(own).optimizer.lr == 0.5
    assert own_config(own).relative
    config = own_config(
        own, steps=3, seed=2, assignments=["optimizer.lr=0.25", "losses.importance_minimality.p=0.9"]
    )
    assert (config.steps, config.seed, config.optimizer.lr) == (3, 2, 0.25)
    assert set(config.losses) == set(own_config(own).losses), "one loss changed is no loss dropped"
    for assignment in ("batch_size=3", "target.kind=tms"):
        with pytest.raises(ConfigError, match="cannot be given for a network of your own"):
            own_config(own, assignments=[assignment])
    with pytest.raises(ConfigError, match="--preset chooses among"):
        own_config(own, preset="paper")


def test_layers_that_nobody_names_are_found(mine):
    found = own_config(made_by("my_model.py:two")).layers
    assert set(found) == {"0", "2"}
    assert min(found.values()) >= 4
    assert set(own_config(made_by("my_model.py:named")).layers) == {"0"}
    assert own_config(made_by("my_model.py:two"), assignments=["layers={'2': 3}"]).layers == {"2": 3}


def test_a_directory_of_decompose_is_a_run(tmp_path, capsys):
    target = small_mlp()
    result = rankone.decompose(target, uniform(), {"0": 5, "2": 7}, CONFIG, out=tmp_path / "a")
    assert result.evaluation is not None
    assert "Lost, of what removing everything costs" in repr(result)
    again = rankone.open(tmp_path / "a", model=target, data=uniform())
    assert repr(again).splitlines()[1:] == repr(result).splitlines()[1:]
    x = torch.rand(3, 4)
    for name, g in result.importances(x).items():
        assert torch.equal(again.importances(x)[name], g)
    assert again.alive == result.alive
    assert len(again.examples("0", 0)) == 10
    alone = rankone.open(tmp_path / "a", model=target)
    with pytest.raises(RankoneError, match="Pass data="):
        alone.examples("0", 0)
    with pytest.raises(RankoneError, match=r"rankone.open\(DIRECTORY, model=..., data=...\)"):
        rankone.open(tmp_path / "a")
    with pytest.raises(RankoneError, match="It must be the very network"):
        rankone.open(tmp_path / "a", model=small_mlp(seed=1))
    with pytest.raises(SystemExit):
        rankone_main(["run", str(tmp_path / "a"), "--resume"])
    assert "was begun in Python" in capsys.readouterr().err.replace("\n", " ")
    rankone_main(["evaluate", str(tmp_path / "a")])
    assert "no ground truth known" in capsys.readouterr().out


def test_open_takes_artifacts_and_unfinished_runs(tmp_path):
    target = small_mlp()
    result = rankone.decompose(target, uniform(), {"0": 5}, CONFIG)
    result.save(tmp_path / "d")
    assert rankone.open(str(tmp_path / "d"), model=target, data=uniform()).layers == ["0"]
    with pytest.raises(RankoneError, match=r"is a saved decomposition, without its network. Pass model="):
        rankone.open(tmp_path / "d")
    with pytest.raises(RankoneError, match="There is no directory"):
        rankone.open(tmp_path / "nothing")
    (tmp_path / "empty").mkdir()
    with pytest.raises(RankoneError, match=r"neither a run .* nor a saved decomposition"):
        rankone.open(tmp_path / "empty")

    class Stop(Exception):
        pass

    def stop(progress):
        if progress.step > 6:
            raise Stop

    with pytest.raises(Stop):
        rankone.decompose(target, uniform(), {"0": 5}, CONFIG, out=tmp_path / "r", observer=stop)
    unfinished = rankone.open(tmp_path / "r", model=target, data=uniform())
    assert "unfinished: 4 of 8 steps" in repr(unfinished)


def test_a_shipped_run_opens_by_its_path_alone(tmp_path):
    from rankone.runs.config import experiment_config
    from rankone.runs.run import run

    run(experiment_config("tms_5-2", steps=4, assignments=["batch_size=64"]), tmp_path / "a")
    result = rankone.open(str(tmp_path / "a"))
    assert result.layers == ["embed", "unembed"]
    assert result.alive
    assert result.importances_by("output", "embed").head[0] == "subcomponent"
    with pytest.raises(RankoneError, match="data= goes with model="):
        rankone.open(tmp_path / "a", data=uniform())


def test_a_function_is_the_same_in_another_script(tmp_path):
    def other_module(function):
        function.__module__ = "elsewhere"
        return function

    def absolute(output, target):
        return (output - target).abs().mean(-1)

    target = small_mlp()
    rankone.decompose(target, uniform(), {"0": 3}, CONFIG, divergence=absolute, out=tmp_path)
    rankone.decompose(
        target, uniform(), {"0": 3}, CONFIG, divergence=other_module(absolute), out=tmp_path, resume=True
    )


# --- lengthening, starting from an earlier result, interruptions


def test_a_complete_run_is_lengthened(tmp_path):
    target = small_mlp()
    longer = CONFIG.model_copy(update={"steps": 12})
    rankone.decompose(target, uniform(), {"0": 5}, CONFIG, out=tmp_path)
    result = rankone.decompose(target, uniform(), {"0": 5}, longer, out=tmp_path, resume=True)
    assert result.history[-1]["step"] == 11
    assert [r["step"] for r in result.history] == [0, 2, 4, 6, 7, 8, 10, 11]
    assert json.loads((tmp_path / "summary.json").read_text())["steps"] == 12
    config = yaml.safe_load((tmp_path / "config.yaml").read_text())
    assert (config["steps"], config["lengthened"]) == (12, [8])
    shorter = CONFIG.model_copy(update={"steps": 4})
    with pytest.raises(RankoneError, match="steps was 12 and is now 4"):
        rankone.decompose(target, uniform(), {"0": 5}, shorter, out=tmp_path, resume=True)


def test_a_run_on_the_command_line_is_lengthened(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    quick = ["batch_size=64", "log_every=2", "checkpoint_every=3", "--quiet"]
    rankone_main(["run", "tms_5-2", "--steps", "6", *quick, "--out", "a"])
    rankone_main(["run", "a", "--resume", "--steps", "1e1"])
    assert json.loads((tmp_path / "a/summary.json").read_text())["steps"] == 10
    assert yaml.safe_load((tmp_path / "a/config.yaml").read_text())["lengthened"] == [6]
    capsys.readouterr()
    rankone_main(["run", "tms_5-2", "--steps", "6", *quick, "--start-from", "a", "--out", "b"])
    assert yaml.safe_load((tmp_path / "b/config.yaml").read_text())["start_from"] == "a"
    before, after = (
        [json.loads(line) for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()]
        for name in ("a", "b")
    )
    first, last, fresh = after[0], before[-1], before[0]
    near, far = (abs(first["loss"]["faithfulness"] - r["loss"]["faithfulness"]) for r in (last, fresh))
    assert near < far


def test_a_new_run_starts_from_an_earlier_result(tmp_path):
    target = small_mlp()
    first = rankone.decompose(target, uniform(), {"0": 5, "2": 7}, CONFIG, out=tmp_path / "a")
    seen = []

    def look(progress):
        seen.append(progress.record["loss"]["faithfulness"])

    other = {"steps": 2, "seed": 3, "relative": True, "optimizer": {"lr": 1e-9}, "log_every": 1,
             "importance": {"kind": "layer_mlp"}}  # fmt: skip
    for start in (first, tmp_path / "a", str(tmp_path / "a" / "decomposition")):
        result = rankone.decompose(
            target, uniform(), {"0": 5, "2": 7}, other, start_from=start, observer=look
        )
        for name in result.layers:
            torch.testing.assert_close(
                result.components(name).U, first.components(name).U, rtol=1e-4, atol=1e-6
            )
        x = torch.rand(5, 4)
        torch.testing.assert_close(
            result.importances(x)["0"], first.importances(x)["0"], rtol=1e-3, atol=1e-4
        )
    with pytest.raises(
        RankoneError, match=r"start_from has 0.U of shape \(6, 5\), and layer '0' with C = 6 needs"
    ):
        rankone.decompose(target, uniform(), {"0": 6}, other, start_from=first)
    with pytest.raises(RankoneError, match="a decomposition of another network"):
        rankone.decompose(small_mlp(seed=1), uniform(), {"0": 5}, other, start_from=first)
    with pytest.raises(RankoneError, match="is a run of another network"):
        rankone.decompose(small_mlp(seed=1), uniform(), {"0": 5}, other, start_from=tmp_path / "a")
    only = rankone.decompose(target, uniform(), {"0": 5}, CONFIG)
    with pytest.raises(RankoneError, match="start_from has none of the layers 2"):
        rankone.decompose(target, uniform(), {"2": 7}, other, start_from=only)


def test_ctrl_c_without_a_directory_loses_nothing():
    before = signal.getsignal(signal.SIGINT)

    def interrupt(progress):
        if progress.step == 3:
            signal.raise_signal(signal.SIGINT)

    config = CONFIG.model_copy(update={"steps": 10_000})
    with pytest.raises(Interrupted, match=r"Interrupted at step 3 of 10000; .*stop.decomposition") as stopped:
        rankone.decompose(small_mlp(), uniform(), {"0": 5}, config, observer=interrupt)
    assert signal.getsignal(signal.SIGINT) is before
    result = stopped.value.decomposition
    assert "unfinished: 3 of 10,000 steps" in repr(result)
    short = CONFIG.model_copy(update={"steps": 3, "optimizer": config.optimizer})
    torch.testing.assert_close(
        result.components("0").U,
        rankone.decompose(small_mlp(), uniform(), {"0": 5}, short).components("0").U,
    )
    assert len(result.diagnose(n_batches=1).findings)


def test_progress_is_on_standard_error_and_can_be_switched_off():
    script = """
import os, sys, torch, rankone
net = torch.nn.Sequential(torch.nn.Linear(4, 4)).eval()
for options in ({"progress": False}, {"observer": lambda p: None}, {}):
    print("silent so far", file=sys.stderr)
    rankone.decompose(net, [torch.rand(8, 4)], {"0": 3}, {"steps": 3, "engine": "exact"}, **options)
os.environ["RANKONE_PROGRESS"] = "0"
print("silent again", file=sys.stderr)
rankone.decompose(net, [torch.rand(8, 4)], {"0": 3}, {"steps": 3, "engine": "exact"})
print("the result")
"""
    clean = {k: v for k, v in os.environ.items() if k != "RANKONE_PROGRESS"}
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, env=clean, check=True
    )
    assert done.stdout == "the result\n"
    lines = done.stderr.splitlines()
    assert lines[:4] == [*["silent so far"] * 3, "Decomposing 1 layer of Sequential, 3 steps."]
    assert sum(line.startswith("step 3/3") for line in lines) == 1
    assert sum(line.startswith("Verdict: ") for line in lines) == 1
    assert lines[-1] == "silent again"


def test_a_network_is_at_hand_only_meanwhile(mine):
    own = made_by("my_model.py:make")
    config = own_config(own)
    with handing_over(own):
        assert config.target.load() is own.model
    with pytest.raises(RankoneError, match="a network of your own"):
        config.target.load()
