"""Every block of docs/extending.md runs as it is written, and does what the page says it does."""

import re
import subprocess
import sys

import pytest
import torch

from conftest import ROOT
from rankone.components import DATA_INITS, INITS
from rankone.importance import IMPORTANCES
from rankone.losses import DIVERGENCES, LOSSES
from rankone.masks import ROUTINGS, SOURCES
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
    for _, code in SECTIONS[section]:
        namespace: dict = {}
        exec(PRELUDE, namespace)
        exec(code, namespace)
        result = namespace["result"]
        assert len(result.history) >= 1
        assert all(torch.isfinite(p).all() for p in result.model.trained().values())
        named = {"A loss": "few_at_once", "A mask source": "coin_recon", "A routing": "pairwise_recon"}
        if section in named:
            assert result.history[-1]["loss"][named[section]] > 0
    if section == "A tracker":
        assert re.search(r"5/5: loss [\d.e-]+, L0 [\d.]+", capsys.readouterr().out)
    if section == "A layer type":
        assert torch.equal(result.components("0").target, 2 * result.model.target[0].kernel.T)


def test_a_target_family_from_the_command_line(tmp_path):
    blocks = SECTIONS["A target family"]
    code = "\n".join(text for kind, text in blocks if kind == "python")
    (tmp_path / "mine.py").write_text(f"import torch\n{code}", encoding="utf-8")
    (tmp_path / "mine.yaml").write_text(
        next(text for kind, text in blocks if kind == "yaml"), encoding="utf-8"
    )
    words = [sys.executable, "mine.py", "run", "mine.yaml", "--out", "out"]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "copier" in done.stdout
    assert (tmp_path / "out/report.html").is_file()
    assert (tmp_path / "out/summary.json").is_file()
