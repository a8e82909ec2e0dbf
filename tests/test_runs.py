"""A run from settings to summary: what it accepts, where it writes, and what it notices on the way
back."""

import io
import json
import os
import shutil
import sys
import time
import zipfile
from contextlib import suppress
from typing import ClassVar

import numpy as np
import pytest
import torch
from pydantic import Field
from torch import nn

from rankone.config import over_recipe
from rankone.errors import CheckpointError, ConfigError, RankoneError
from rankone.files import RunDirectory
from rankone.report.canvas import to_svg
from rankone.runs import run as run_module
from rankone.runs.config import (
    RunConfig,
    experiment_config,
    experiment_file,
    experiment_names,
    parse_config,
    real_differences,
    register_experiments,
)
from rankone.runs.kept import KeptRun, changes, groups, keep, kept_runs
from rankone.runs.run import evaluate_again, load_run, load_warning, run
from rankone.runs.summary import Summary
from rankone.settings import to_yaml, validated
from rankone.targets import TARGETS, ResidualTarget, Target, register_target, save_target

QUICK = ["batch_size=64", "faithfulness_warmup.steps=0", "log_every=2", "checkpoint_every=4"]


def quick(name="tms_5-2", *assignments, steps=6, seed=0):
    return experiment_config(name, steps=steps, seed=seed, assignments=[*QUICK, *assignments])


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    out = tmp_path_factory.mktemp("runs") / "finished"
    run(quick(), out)
    return out


@pytest.fixture
def copy(finished, tmp_path):
    return shutil.copytree(finished, tmp_path / "copy")


class StopTraining(Exception):
    pass


def interrupted(out, config, step):
    def stop(progress):
        if progress.step > step:
            raise StopTraining

    with pytest.raises(StopTraining):
        run(config, out, observer=stop)


# --- settings


def test_shipped_experiments_read_back_from_their_yaml():
    for name in experiment_names():
        for preset in experiment_file(name).presets:
            config = experiment_config(name, preset=preset)
            assert parse_config(to_yaml(config), source=name) == config
            assert config.run_name == f"{name}-{preset}-seed0"


@pytest.mark.parametrize(
    "name",
    ["../../escaped", "/tmp/escaped", "a/b", "..", ".hidden", "-rf", "", "a" * 101, "a\nb", "a b", "é"],
)
def test_an_experiment_cannot_be_called_what_leaves_the_run_directory(name):
    values = quick().model_dump(mode="json") | {"experiment": name}
    with pytest.raises(ConfigError, match=r"  experiment: "):
        validated(RunConfig, values, source="x.yaml")


@pytest.mark.parametrize(
    ("assignment", "place"),
    [
        ("target.n_identity=10000000", "target.n_identity"),
        ("target.n_features=100000000", "target.n_features"),
        ("target.n_hidden=0", "target.n_hidden"),
        ("target.training.steps=1000000000000", "target.training.steps"),
        ("target.training.lr=.nan", "target.training.lr"),
        ("target.feature_probability=1e-300", "target.feature_probability"),
        ("batch_size=100000000000", "batch_size"),
        ("threads=1000000", "threads"),
        ("layers={embed: 1000000000}", "layers"),
    ],
)
def test_numbers_are_bounded(assignment, place):
    with pytest.raises(ConfigError, match=rf"  {place}"):
        quick("tms_5-2", assignment)


@pytest.mark.parametrize("key", ["title", "recovers", "preset"])
def test_text_is_one_printable_line(key):
    values = quick().model_dump(mode="json")
    for text in ("two\nlines", "\x1b[31mred", "x" * 10_000, "\u202eback"):
        with pytest.raises(ConfigError, match=rf"  {key}: "):
            validated(RunConfig, values | {key: text}, source="x.yaml")


def test_unknown_kinds_get_near_matches():
    values = quick().model_dump(mode="json") | {"target": {"kind": "tmz"}}
    with pytest.raises(ConfigError, match=r"  target: Unknown kind of target 'tmz'. Did you mean 'tms'"):
        validated(RunConfig, values, source="x.yaml")
    with pytest.raises(ConfigError, match=r"  target: .*kind"):
        validated(RunConfig, values | {"target": {"n_features": 5}}, source="x.yaml")


def test_settings_of_kept_runs_of_earlier_versions_still_parse():
    old = "experiment: tms_5-2\nlayers: {embed: 20}\ntarget: {kind: tms, weights: tms_5-2}\n"
    config = parse_config(old, source="old")
    assert config.output is None
    assert config.threads == 1


# --- a family and an experiment of one's own


class Pair(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.layer = nn.Linear(width, width, bias=False)
        with torch.no_grad():
            self.layer.weight.copy_(torch.eye(width))

    def forward(self, x):
        return {"noise": x.sum(), "answer": self.layer(x)}


EXPERIMENT = """
title: A network of my own
recipe:
  target: {kind: pair, width: 3}
  layers: {layer: 4}
  output: answer
  steps: 6
  batch_size: 8
  log_every: 2
"""


@pytest.fixture
def pair(tmp_path, monkeypatch):
    @register_target("pair")
    class PairTarget(Target):
        kind: str = "pair"
        """A family of my own."""
        width: int = Field(default=2, ge=1, le=10)
        """Width."""
        similarity_of: ClassVar[str | None] = "layer"

        def load(self):
            return Pair(self.width).eval()

        def data(self, batch_size):
            return lambda generator: torch.rand(batch_size, self.width, generator=generator)

    package = tmp_path / "my_experiments"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "mine.yaml").write_text(EXPERIMENT, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr("rankone.runs.config._PACKAGES", ["rankone.paper"])
    register_experiments("my_experiments")
    yield PairTarget
    del TARGETS["pair"]
    sys.modules.pop("my_experiments", None)


def test_a_family_of_ones_own_runs_from_yaml_to_its_summary(pair, tmp_path):
    assert "mine" in experiment_names()
    config = experiment_config("mine", seed=1)
    assert isinstance(config.target, pair)
    assert config.getter == "answer"
    summary = run(config, tmp_path / "out")
    assert summary.recovered is None
    assert summary.checks == {}
    assert summary.similarity_of == "layer"
    assert summary.details == {}
    assert summary.n_alive.keys() == {"layer"}
    loaded = load_run(tmp_path / "out")
    assert loaded.config == config
    assert loaded.finished() == summary
    # The file that the run wrote repeats it.
    again = experiment_config(str(tmp_path / "out/config.yaml"))
    assert (again.preset, real_differences(again, config)) == ("recipe", [])


def test_without_a_paper_settings_are_laid_over_the_recipe(pair, tmp_path):
    file = tmp_path / "my_experiments/mine.yaml"
    file.write_text(EXPERIMENT + "  losses: {importance_minimality: {coefficient: 0.03}}\n", encoding="utf-8")
    values = experiment_config("mine").model_dump(mode="json")
    changed = {"steps": 6, "log_every": 2, "losses": {"importance_minimality": {"coefficient": 0.03}}}
    expected = over_recipe(changed).model_dump(mode="json")
    assert {key: values[key] for key in expected} == expected
    assert values["differs_from_paper"] == []


def test_a_paper_need_not_have_a_tuned_preset(pair, tmp_path):
    file = tmp_path / "my_experiments/mine.yaml"
    file.write_text(EXPERIMENT.replace("recipe:", "paper:"), encoding="utf-8")
    assert experiment_file("mine").presets == ("recipe", "paper")
    assert experiment_config("mine", preset="paper").steps == 6
    config = experiment_config("mine")
    assert (config.steps, config.batch_size, config.output) == (over_recipe({}).steps, 8, "answer")
    with pytest.raises(ConfigError, match="mine has no preset 'tuned': it has 'recipe', 'paper'"):
        experiment_config("mine", preset="tuned")


def test_without_a_paper_there_is_no_paper_preset(pair):
    with pytest.raises(ConfigError, match="mine has no preset 'paper': its only one is 'recipe'"):
        experiment_config("mine", preset="paper")


def test_output_is_what_the_family_says_unless_the_settings_say_otherwise(pair, monkeypatch, tmp_path):
    config = experiment_config("mine", assignments=["output=null"])
    with pytest.raises(RankoneError):
        run(config, tmp_path / "wrong")
    monkeypatch.setattr(pair, "output", "answer")
    assert run(config, tmp_path / "right").steps == 6


def test_experiment_files_that_make_no_sense(pair, tmp_path):
    file = tmp_path / "my_experiments/mine.yaml"
    for text, message in (
        ("title: x\n", "expected either `recipe`, .* or `paper`, .*; got neither"),
        ("title: x\nrecipe: {}\npaper: {}\n", "; got both"),
        ("title: x\nrecipe: {}\ntuned: []\n", "`tuned` is a list of changes to `paper`, which is not there"),
        ("title: x\nrecipe: []\n", "recipe: .*dictionary"),
        ("title: x\nrecipe: {steps: 5}\n", r"target: Field required"),
        ("title: x\ndefault: {steps: 5}\n", "default: unknown setting"),
    ):
        file.write_text(text)
        with pytest.raises(ConfigError, match=message):
            experiment_config("mine")
    with pytest.raises(ConfigError, match="my_experiments holds an experiment 'mine', and there is one"):
        register_experiments("my_experiments")


# --- threads


def test_omp_num_threads_is_respected_and_said(tmp_path, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    said = []
    config = quick("tms_5-2", "threads=2")
    summary = run(config, tmp_path / "run", say=said.append)
    assert said[0] == "This run uses 1 thread instead of 2: OMP_NUM_THREADS is 1."
    assert torch.get_num_threads() == summary.threads == 1
    stored = load_run(tmp_path / "run").config
    assert stored.threads == 1
    assert experiment_config(str(tmp_path / "run/config.yaml")).preset == "recipe"  # it says what it changed


def test_a_resumed_run_keeps_its_number_of_threads(tmp_path, monkeypatch):
    out = tmp_path / "run"
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    interrupted(out, quick("tms_5-2", "threads=2"), 4)
    monkeypatch.delenv("OMP_NUM_THREADS")
    said = []
    summary = run(quick("tms_5-2", "threads=2"), out, resume=True, say=said.append)
    assert "This run uses 1 thread instead of 2: it was begun with that number." in said
    assert summary.threads == 1


def test_a_busy_machine_is_mentioned(monkeypatch):
    monkeypatch.setattr(run_module, "cores", lambda: 4)
    monkeypatch.setattr(os, "getloadavg", lambda: (0.3, 0, 0))
    assert load_warning(4) is None
    monkeypatch.setattr(os, "getloadavg", lambda: (3.9, 0, 0))
    assert load_warning(2) == (
        "Other work is using the cores (load 3.9, 4 cores, 2 threads asked for): this run will be slower."
    )


# --- what a run directory notices


def test_a_directory_with_other_files_is_refused_and_left_alone(tmp_path):
    (tmp_path / "mine").mkdir()
    for name in ("config.yaml", ".notes.tmp", "metrics.jsonl"):
        (tmp_path / "mine" / name).write_text("precious")
    with pytest.raises(CheckpointError, match="mine"):
        run(quick(), tmp_path / "mine")
    assert sorted(p.name for p in (tmp_path / "mine").iterdir()) == [
        ".notes.tmp",
        "config.yaml",
        "metrics.jsonl",
    ]
    assert all(p.read_text() == "precious" for p in (tmp_path / "mine").iterdir())


@pytest.mark.parametrize("name", ["config.yaml", "metrics.jsonl", "summary.json"])
@pytest.mark.parametrize("read", [load_run, evaluate_again])
def test_a_file_that_was_changed_by_hand_is_noticed_by_name(copy, name, read):
    path = copy / name
    path.write_bytes(path.read_bytes() + b"\n")
    with pytest.raises(CheckpointError, match=rf"{name} was changed after rankone wrote it"):
        read(copy)


@pytest.mark.parametrize("name", ["config.yaml", "summary.json"])
def test_resuming_notices_it_too(copy, name):
    (copy / name).write_bytes((copy / name).read_bytes().replace(b"64", b"65"))
    with pytest.raises(CheckpointError, match=rf"{name} was changed after rankone wrote it"):
        run(quick(), copy, resume=True)


def test_another_runs_decomposition_is_noticed(copy, tmp_path):
    run(quick(seed=1), tmp_path / "other")
    shutil.rmtree(copy / "decomposition")
    shutil.copytree(tmp_path / "other/decomposition", copy / "decomposition")
    with pytest.raises(CheckpointError, match=r"components.safetensors is not the one that .*summary.json"):
        load_run(copy)


def test_evaluating_again_rewrites_the_summary_and_the_directory_still_opens(copy):
    before = load_run(copy).finished()
    assert evaluate_again(copy) == before
    assert load_run(copy).finished() == before


def test_an_unfinished_run_can_be_looked_at_and_finished(tmp_path, finished):
    out = tmp_path / "run"
    interrupted(out, quick(), 4)
    loaded = load_run(out)
    assert (loaded.steps, loaded.summary) == (4, None)
    assert [record["step"] for record in loaded.result.history] == [0, 2]
    with pytest.raises(CheckpointError, match=r"is not complete yet. Finish it with: rankone run"):
        loaded.finished()
    with pytest.raises(
        CheckpointError, match=r"already holds a run, which has reached step-000000004. Add --resume"
    ):
        run(quick(), out)
    with pytest.raises(
        CheckpointError, match="holds a run with other settings: batch_size was 64 and is now 32"
    ):
        run(quick("tms_5-2", "batch_size=32"), out, resume=True)
    metrics = out / "metrics.jsonl"
    whole = metrics.read_bytes()
    metrics.write_bytes(whole.replace(b"0", b"1", 1))
    with pytest.raises(CheckpointError, match=r"metrics.jsonl was changed"):
        load_run(out)
    metrics.write_bytes(whole)
    run(quick(), out, resume=True)
    for name in ("metrics.jsonl", "decomposition/components.safetensors", "config.yaml"):
        assert (out / name).read_bytes() == (finished / name).read_bytes()
    with pytest.raises(CheckpointError, match=r"which is complete. Add --resume to keep it"):
        run(quick(), out)


def test_settings_that_cannot_work_leave_no_config_behind(tmp_path):
    with pytest.raises(RankoneError, match="no_such_layer"):
        run(quick("tms_5-2", "layers={no_such_layer: 3}", "tied={}"), tmp_path / "run")
    assert RunDirectory.open(tmp_path / "run").names() == []
    run(quick(), tmp_path / "run")


def test_a_run_without_a_checkpoint_has_nothing_to_look_at(tmp_path):
    interrupted(tmp_path / "run", quick(), 0)
    with pytest.raises(CheckpointError, match="has no checkpoint yet"):
        load_run(tmp_path / "run")
    run(quick(), tmp_path / "run")  # and nothing to lose


def test_only_one_process_at_a_time(tmp_path):
    directory = RunDirectory.claim(tmp_path / "run")
    with directory.lock(), pytest.raises(CheckpointError, match="Another rankone process is running in"):
        run(quick(), tmp_path / "run")


def test_the_report_is_written_before_the_summary(tmp_path):
    order = []

    def report(directory, config, result, evaluation, summary):
        order.append(directory.has("summary.json"))
        directory.write("report.html", summary.experiment)

    summary = run(quick(), tmp_path / "run", report=report)
    assert order == [False]
    assert summary.wall_seconds >= summary.train_seconds > 0


# --- summaries


def test_summaries_read_back_and_damaged_ones_are_refused_by_name(finished):
    values = json.loads((finished / "summary.json").read_text())
    summary = Summary.from_json(values, source="x")
    assert summary.to_json() == values
    assert summary.errors == sum(check["errors"] for check in values["checks"].values())
    for damage in ([], None, {}, values | {"seed": "x"}, values | {"more": 1}, values | {"checks": {"a": 1}}):
        with pytest.raises(CheckpointError, match=r"here/summary.json is not the summary of a run \("):
            Summary.from_json(damage, source="here/summary.json")


# --- kept runs


@pytest.fixture(scope="module")
def kept(finished, tmp_path_factory):
    out = tmp_path_factory.mktemp("kept")
    return keep(finished, out / "runs/tms", command="rankone run tms_5-2", figures=True)


def test_what_is_kept_of_a_run(kept, finished):
    runs = kept_runs(kept.path.parent.parent)
    assert list(runs) == ["tms"]
    again = runs["tms"]
    assert again.summary.command == "rankone run tms_5-2"
    assert again.summary.model_copy(update={"command": None}) == load_run(finished).finished()
    assert again.objection is None
    assert again.has_figures
    assert changes(again.summary) == {*QUICK, "steps=6"}
    assert groups(runs) == {}
    result = load_run(finished).result
    probe = result.importances(again.config.target.probe())
    for name in result.layers:
        assert (again.importances[name] - probe[name]).abs().max() <= 0.5 / 255 + 1e-6
        assert torch.equal(again.views[name].U, result.components(name).U)
        assert again.checks[name].errors == again.summary.checks[name].errors
    assert again.figures() == []
    with pytest.raises(
        CheckpointError, match=r"not its decomposition. Make the run itself with: rankone run tms_5-2"
    ):
        load_run(kept.path)


def test_what_a_family_draws_is_kept_too(tmp_path):
    pytest.importorskip("matplotlib")
    target = ResidualTarget(
        n_features=4, d_stream=6, n_neurons=3, weights=str(tmp_path / "weights.safetensors")
    )
    save_target(tmp_path / "weights.safetensors", target.build(), target, 0)
    values = {
        "experiment": "small",
        "target": target,
        "layers": {"blocks.*": 5},
        "steps": 4,
        "batch_size": 16,
    }
    run(validated(RunConfig, values, source="here"), tmp_path / "run")
    kept = keep(tmp_path / "run", tmp_path / "runs/small", command="", figures=True)
    result = load_run(tmp_path / "run").result
    assert [picture.name for picture in kept.figures()] == ["contributions", "scatter"]
    drawn = [to_svg(picture.figure, "x") for picture in kept.figures()]
    rounded = {name: t.half().float() for name, t in target.figure_data(result).items()}
    assert drawn == [to_svg(p.figure, "x") for p in target.figures(rounded, kept.summary.details)]
    # A part of the matrices gives no contributions, and no figures.
    part = validated(RunConfig, values | {"layers": {"blocks.0.mlp_in": 5}}, source="here")
    summary = run(part, tmp_path / "part")
    assert "neuron_contributions" not in summary.details
    assert target.figures(target.figure_data(load_run(tmp_path / "part").result), summary.details) == []


def test_changed_folders_are_not_counted(kept, tmp_path):
    for name in ("summary.json", "config.yaml"):
        folder = shutil.copytree(kept.path, tmp_path / name)
        (folder / name).write_text((folder / name).read_text() + " ")
        assert f"{name} was changed after rankone wrote it" in KeptRun(folder).objection
    folder = shutil.copytree(kept.path, tmp_path / "foreign")
    (folder / "manifest.json").unlink()
    assert "is not a run directory" in KeptRun(folder).objection


def bomb():
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("importance/embed.npy", bytes(300_000_000))
    return packed.getvalue()


def npz(**arrays):
    packed = io.BytesIO()
    np.savez(packed, **arrays)
    return packed.getvalue()


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"not a zip",
        b"PK\x03\x04" + bytes(100),
        bomb(),
        npz(x=np.array([object()], dtype=object)),
        npz(**{"importance/embed": np.zeros(3)}),
        npz(**{"importance/embed": np.array([["a"]])}),
        npz(**{"matrix/embed/target": np.zeros((2, 2))}),
        npz(**{f"matrix/embed/{key}": np.zeros((2, 3)) for key in ("target", "U", "V")}),
    ],
    ids=["empty", "text", "header", "bomb", "pickle", "vector", "strings", "parts missing", "shapes"],
)
def test_damaged_figure_data_is_refused_by_name(kept, tmp_path, content):
    """Also where the manifest was made for it: whoever sends a folder can make one."""
    folder = shutil.copytree(kept.path, tmp_path / "copy")
    RunDirectory.open(folder).write("figure_data.npz", content)
    run = KeptRun(folder)
    began = time.monotonic()
    with pytest.raises(CheckpointError, match=r"figure_data.npz cannot be read \("):
        _ = (run.importances, run.views)
    assert time.monotonic() - began < 2
    assert run.objection is None


def test_flipped_bytes_of_figure_data_never_end_in_another_error(kept, tmp_path):
    folder = shutil.copytree(kept.path, tmp_path / "copy")
    content = (folder / "figure_data.npz").read_bytes()
    rng = np.random.default_rng(0)
    for _ in range(60):
        damaged = bytearray(content)
        for place in rng.integers(len(content), size=3):
            damaged[place] = rng.integers(256)
        (folder / "figure_data.npz").write_bytes(bytes(damaged[: rng.integers(1, len(content))]))
        with pytest.raises(CheckpointError, match=r"figure_data.npz was changed after"):
            _ = KeptRun(folder).importances
        RunDirectory.open(folder).remove("figure_data.npz")
        RunDirectory.open(folder).write("figure_data.npz", bytes(damaged))
        with suppress(CheckpointError):
            run = KeptRun(folder)
            _ = (run.importances, run.views, run.checks, run.figures())
