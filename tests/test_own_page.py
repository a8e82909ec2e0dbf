"""docs/own_model.md, as a reader would follow it: every block in order, with fewer steps."""

import re
import shlex

import pytest

from conftest import ROOT, rankone_main

PAGE = (ROOT / "docs/own_model.md").read_text()


@pytest.mark.slow
def test_python_from_top_to_bottom(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"```python\n(.*?)```", PAGE, flags=re.S)
    code = "\n".join(blocks).replace("range(3000)", "range(300)")
    code = re.sub(r'"steps": (\d+)000\b', r'"steps": \g<1>0', code)  # 60, 90 and 30
    scope: dict = {}
    exec(compile(code, "own_model.md", "exec"), scope)
    assert (tmp_path / "squares.html").is_file()
    said = capsys.readouterr().out
    assert "Decomposition of Sequential: 2 layers, 36 subcomponents, 60 steps" in said
    assert scope["longer"].config.steps == 90
    assert scope["sparser"].config.losses["importance_minimality"].coefficient == 0.1
    assert scope["edited"][0].weight.requires_grad


@pytest.mark.slow
def test_the_command_line(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    ((name, code),) = re.findall(r"```python file=(\S+)\n(.*?)```", PAGE, flags=re.S)
    (tmp_path / name).write_text(code)
    (block,) = [b for b in re.findall(r"```bash\n(.*?)```", PAGE, flags=re.S) if "rankone run" in b]
    for command in block.splitlines():
        words = shlex.split(command)[1:]
        if "--steps" in words:
            at = words.index("--steps") + 1
            words[at] = str(int(words[at]) // 50)
        rankone_main(words)
        capsys.readouterr()
    assert (tmp_path / "runs/mine/report.html").is_file()
    assert len(list((tmp_path / "runs").iterdir())) == 2
