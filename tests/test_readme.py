"""What the README says is true: its commands run, its code runs, its files exist."""

import re
import shlex
import subprocess
import sys

import pytest

from conftest import ROOT
from rankone import cli
from rankone.runs.config import PRESETS, experiment_file, experiment_names

README = (ROOT / "README.md").read_text()
REPRODUCTION = (ROOT / "docs/reproduction.md").read_text()
ARCHITECTURE = (ROOT / "docs/architecture.md").read_text()
LANGUAGES = (ROOT / "docs/language-models.md").read_text()
BLOCKS = re.findall(r"```(\w*)\n(.*?)```", README, flags=re.S)
COMMANDS = [
    line
    for kind, block in BLOCKS
    if kind == "bash"
    for line in block.splitlines()
    if line.startswith("rankone ")
]
CHAINS = [
    line
    for kind, block in BLOCKS
    if kind == "bash"
    for line in block.splitlines()
    if line.startswith("python3 ")
]


def shortened(words: list[str]) -> list[str]:
    """The same command with few steps on small batches: the full runs are in results/."""
    if words[0] == "reproduce":
        if "--seeds" in words:  # would train: make it of what is kept
            at = words.index("--seeds")
            assert int(words[at + 1]) > 0
            words = [*words[:at], *words[at + 2 :], "--from", "results"]
        words[words.index("--from") + 1] = str(ROOT / "results")
        return words
    if words[0] == "tune":
        words[words.index("--trials") + 1] = "1"
        return [*words, "--steps", "20", "batch_size=64"]
    if words[0] == "benchmark":
        return [*words, "steps=20"]
    if words[0] == "view":
        return [*words, "--no-open"]
    if words[0] != "run":  # what was changed is part of a run's name
        return [re.sub(r"(runs/.+)-(seed\d+)$", r"\1-batchsize64-steps20-\2", word) for word in words]
    if "--steps" in words:
        words[words.index("--steps") + 1] = "20"
    else:
        words += ["--steps", "20"]
    return [*words, "batch_size=64"]


def test_every_command_in_order(monkeypatch, tmp_path, capsys):
    monkeypatch.chdir(tmp_path)
    assert len(COMMANDS) >= 8
    assert {shlex.split(c)[1] for c in COMMANDS} == {
        "list",
        "run",
        "config",
        "evaluate",
        "compare",
        "report",
        "diagnose",
        "train-target",
        "reproduce",
        "tune",
        "benchmark",
        "view",
    }
    for command in COMMANDS:
        try:
            cli.main(shortened(shlex.split(command)[1:]))
        except SystemExit as stop:
            assert not stop.code, f"{command}: {capsys.readouterr().err}"  # noqa: PT017
    assert "the same as the pinned target" in capsys.readouterr().out


def test_the_two_commands():
    main, test = CHAINS
    assert (
        main == "python3 -m venv .venv && .venv/bin/pip install '.[report]' && .venv/bin/rankone run tms_5-2"
    )
    assert test in (ROOT / ".ci/run").read_text().splitlines(), (
        "CI must run the README's test command, word for word"
    )


def test_python_code(tmp_path):
    """As it is written, in a process where shapes are not checked at every call; then what it prints."""
    (code,) = [block for kind, block in BLOCKS if kind == "python"]
    (printed,) = [block for kind, block in BLOCKS if not kind]
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    shape = re.compile(
        r"True\n(feature \d needs subcomponent \[\d+\]\n){5}tensor\(\[0.0000(, 0.[67]\d+){4}\]\)\n"
    )
    assert shape.fullmatch(done.stdout), done.stdout
    assert shape.fullmatch(printed)


def test_the_example(monkeypatch, tmp_path, capsys):
    monkeypatch.chdir(tmp_path)
    scope: dict = {"__name__": "example"}
    exec(compile((ROOT / "examples/own_model.py").read_text(), "own_model.py", "exec"), scope)
    result = scope["main"](steps=20)
    assert result.layers == ["0", "2"]
    assert "without them" in capsys.readouterr().out


@pytest.mark.parametrize(
    "page",
    [
        "README.md",
        "CONTRIBUTING.md",
        "examples/README.md",
        *(f"docs/{p.name}" for p in (ROOT / "docs").glob("*.md")),
    ],
)
def test_links_exist(page):
    path = ROOT / page
    prose = re.sub(r"```.*?```", "", path.read_text(), flags=re.S)
    for link in re.findall(r"\]\(([^)]+)\)", prose):
        assert link.startswith(("https://", "#")) or (path.parent / link.split("#")[0]).exists(), link


def test_every_file_is_documented():
    (tree,) = re.findall(r"```\n(src/rankone/.*?)```", ARCHITECTURE, flags=re.S)
    listed = {line.split()[0].rstrip("/") for line in tree.splitlines()[1:]}
    present = {p.name for p in (ROOT / "src/rankone").iterdir()}
    assert listed == present - {"__init__.py", "__main__.py", "__pycache__", "py.typed"}
    fast = (ROOT / "src/rankone/fast/README.md").read_text()
    for path in (ROOT / "src/rankone/fast").glob("[!_]*.py"):
        assert f"| `{path.name}` |" in fast, path


def test_the_readme_is_short():
    assert len(README.split()) <= 1000


def test_experiments_are_described_as_rankone_list_does():
    for name in experiment_names():
        file = experiment_file(name)
        if file.paper is None:
            assert f"rankone run {name}" in LANGUAGES
            continue
        row = f"| `{name}` | {file.recovers} | {file.takes['tuned']} | {file.takes['paper']} |"
        assert row in REPRODUCTION.splitlines(), row


def test_documented_numbers_are_those_in_results():
    kept = (ROOT / "results/tables.md").read_text()
    documented = (ROOT / "docs/reproduction.md").read_text().splitlines()
    for row in kept.splitlines():
        assert not row.startswith("|") or row in documented, row
    # And the other way round: no row of an experiment that results/ do not have.
    for row in documented:
        cells = [cell.strip() for cell in row.strip("|").split("|")]
        if row.startswith("|") and cells[0] in experiment_names() and cells[1] in PRESETS:
            assert row in kept.splitlines(), row
    # The README counts the tuned preset's recovered runs.
    recovery = kept.split("## Recovery")[1].split("## ")[0]
    shares = [re.search(r"(\d+) of (\d+)", row) for row in recovery.splitlines() if "| tuned |" in row]
    recovered, runs = (sum(int(share.group(i)) for share in shares) for i in (1, 2))
    assert recovered == runs
    assert f"every seed of all seven experiments of the paper is recovered ({runs} runs)" in " ".join(
        README.split()
    )
