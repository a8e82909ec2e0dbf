"""Every block of docs/extending.md runs as it is written, and does what the page says it does."""

import re
import subprocess
import sys

import pytest
import torch

from conftest import ROOT
from rankone.components import DATA_INITS, INITS
from rankone.config import over_recipe
from rankone.importance import IMPORTANCES
from rankone.losses import DIVERGENCES, LOSSES
from rankone.masks import ROUTINGS, SOURCES
from rankone.runs.config import experiment_config, experiment_names, register_experiments
from rankone.targets.base import TARGETS

PAGE = (ROOT / "docs/extending.md").read_text(encoding="utf-8")
SECTIONS = {
    section.split("\n", 1)[0]: re.findall(r"```(\w+)\n(.*?)```", section, flags=re.S)
    for section in PAGE.split("\n## ")[1:]
}
((_, PRELUDE),) = re.findall(r"```(python)\n(.*?)```", PAGE.split("\n## ")[0], flags=re.S)
REGISTRIES = (LOSSES, SOURCES, ROUTINGS, IMPORTANCES, TARGETS, DIVERGENCES, INITS, DATA_INITS)


@pytest.fixture(autouse=True)
def _registries_as_they_were():
    before = [list(registry) for registry in REGISTRIES]
    yield
    for registry, names in zip(REGISTRIES, before, strict=True):
        for name in list(registry):
            if name not in names:
                del registry[name]


def test_the_page_covers_what_can_be_added():
    assert list(SECTIONS) == [
        "A loss", "A mask source", "A routing", "A layer type", "An importance function", "A target family",
        "A tracker", "And the rest",
    ]  # fmt: skip


@pytest.mark.parametrize("section", [s for s in SECTIONS if s not in ("A target family", "And the rest")])
def test_every_block_runs(section, capsys):
    results = []
    for _, code in SECTIONS[section]:
        namespace: dict = {}
        exec(PRELUDE, namespace)
        exec(code, namespace)
        result = namespace["result"]
        results.append(result)
        assert len(result.history) >= 1
        assert all(torch.isfinite(p).all() for p in result.model.trained().values())
        named = {"A loss": "few_at_once", "A mask source": "coin_recon", "A routing": "pairwise_recon"}
        if section in named:
            assert result.history[-1]["loss"][named[section]] > 0
    if section == "A tracker":
        assert re.search(r"5/5: loss [\d.e-]+, L0 [\d.]+", capsys.readouterr().out)
    if section == "A layer type":
        scaled, gated = results
        assert torch.equal(scaled.components("0").target, 2 * scaled.model.target[0].kernel.T)
        assert torch.equal(gated.components("0.gate").target, gated.model.target[0].kernel[1].T)


def test_a_target_family_from_the_command_line(tmp_path):
    blocks = SECTIONS["A target family"]
    code = "\n".join(text for kind, text in blocks if kind == "python")
    (tmp_path / "mine.py").write_text(f"import torch\n{code}", encoding="utf-8")
    config, _ = (text for kind, text in blocks if kind == "yaml")
    (tmp_path / "mine.yaml").write_text(config, encoding="utf-8")
    words = [sys.executable, "mine.py", "run", "mine.yaml", "--out", "out"]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "copier" in done.stdout
    assert (tmp_path / "out/report.html").is_file()
    assert (tmp_path / "out/summary.json").is_file()


def test_an_experiment_of_ones_own(tmp_path, monkeypatch):
    blocks = SECTIONS["A target family"]
    exec("import torch\n" + next(text for kind, text in blocks if kind == "python"), {"__name__": "mine"})
    _, experiment = (text for kind, text in blocks if kind == "yaml")
    (tmp_path / "my_experiments").mkdir()
    (tmp_path / "my_experiments/copy4.yaml").write_text(experiment, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr("rankone.runs.config._PACKAGES", ["rankone.paper"])
    register_experiments("my_experiments")
    assert "copy4" in experiment_names()
    config = experiment_config("copy4")
    assert (config.preset, config.steps, config.target.width) == ("recipe", 2000, 4)
    assert config.losses == over_recipe({}).losses
    assert config.relative
