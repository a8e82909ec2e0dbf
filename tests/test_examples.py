"""The networks in examples/, each trained, decomposed for a few steps, and told about."""

import json
import re
import runpy
import sys

import pytest
import torch

from conftest import ROOT

EXAMPLES = ("tumours", "digits", "encoder", "fine_tune")


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_at_a_few_steps(name, tmp_path, monkeypatch, capsys):
    monkeypatch.syspath_prepend(ROOT / "examples")
    monkeypatch.setattr(sys, "argv", [f"{name}.py", "--steps", "8", "--out", str(tmp_path / "kept")])
    runpy.run_path(str(ROOT / f"examples/{name}.py"), run_name="__main__")
    said = capsys.readouterr().out
    assert "Decomposition of" in said
    assert "One mechanism: subcomponent" in said
    assert "Without it the network forgets" in said
    kept = {path.name: path for path in (tmp_path / "kept").iterdir()}
    assert set(kept) == {"mechanism.txt", "numbers.json", "report.html"}
    assert kept["mechanism.txt"].read_text().split("\n\n")[-1].strip() in said
    assert json.loads(kept["numbers.json"].read_text())["steps"] == 8


@pytest.mark.parametrize("name", EXAMPLES)
def test_what_is_kept_shows_one_mechanism(name):
    """One skill goes, and nothing else does; and what is kept is small."""
    kept = ROOT / "results/examples" / name
    text = (kept / "mechanism.txt").read_text()
    told = re.search(r"\((\S+) before, (\S+) after\); nothing else loses more than (\S+)\.\n", text)
    before, after, other = map(float, told.groups())
    assert before - after > 0.6
    assert other <= 0.05
    assert json.loads((kept / "numbers.json").read_text())["steps"] >= 6000
    assert sum(path.stat().st_size for path in kept.iterdir()) < 1_000_000


def test_the_clearest_mechanism_is_the_one_whose_loss_is_alone(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "examples")
    from mechanism import Mechanism, table

    one = Mechanism("a", 3, torch.tensor([1.0, 0.9]), torch.tensor([0.1, 0.8]))
    assert one.skill == 0
    assert one.else_lost == pytest.approx(0.1)
    assert table(["x", "longer"], {"r": torch.tensor([1.0, 0.5])}) == "      x  longer\nr  1.00    0.50"
