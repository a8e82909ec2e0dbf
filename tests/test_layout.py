"""The shape of the repository: imports go one way, documented files exist, nothing of a machine is
written down."""

import ast
import re
import shutil
import subprocess

import pytest

from conftest import ROOT

ORDER = [
    "errors",
    "terminal",
    "files",
    "settings",
    "tokens",
    "share",
    "data",
    "llama2c",
    "hub",
    "corpus",
    "targeting",
    "tables",
    "views",
    "describe",
    "components",
    "adapters",
    "fast.products",
    "fast.factored",
    "convolution",
    "joint_inputs",
    "composites",
    "recurrent",
    "parameters",
    "naming",
    "importance",
    "context",
    "masks",
    "patching",
    "replay",
    "layer",
    "found_layers",
    "heads",
    "model",
    "neurons",
    "editing",
    "adversary",
    "balance",
    "step",
    "losses",
    "config",
    "metrics_log",
    "trackers",
    "progress",
    "metrics",
    "looking",
    "passages",
    "text_measures",
    "cooccurrence",
    "clusters",
    "attribution",
    "edited",
    "using",
    "fast.kernels",
    "fast.compiled",
    "fast.gates",
    "fast.step",
    "fast",
    "optim",
    "consolidate",
    "checkpoint",
    "processes",
    "train",
    "room",
    "sharing",
    "decomposition",
    "finetune",
    "measures",
    "evaluate",
    "findings",
    "compare",
    "diagnose",
    "verdict",
    "view.encode",
    "view.harvest",
    "view.gather",
    "view.write",
    "report.canvas",
    "report.plots",
    "targets.base",
    "targets.own",
    "targets.sparse",
    "targets.language",
    "targets",
    "runs.config",
    "runs.summary",
    "runs.run",
    "runs.own",
    "runs.choose",
    "runs.many",
    "runs.kept",
    "runs",
    "plan",
    "report.alive",
    "report.page",
    "view.runs",
    "view",
    "report",
    "languages",
    "paper.plan",
    "paper.tables",
    "paper.figures",
    "paper",
    "collection.base",
    "collection.opposites",
    "collection.judge",
    "collection.grouping",
    "collection.blocks",
    "collection",
    "tune.curve",
    "tune.work",
    "tune.journal",
    "tune.study",
    "tune.figure",
    "tune",
    "console",
    "watch",
    "options",
    "config_commands",
    "using_commands",
    "cli",
]
"""A module imports only from those before it."""


DOORS = {
    "corpus": {"passages"},
    "sharing": {"decomposition"},
    "using": {"compare"},
    "decomposition": {"evaluate", "diagnose", "verdict", "runs.own", "report.page", "view.write"},
}
"""Methods of a result that lead to rooms above it: imported when they are called, never before."""


def imported(path, *, at_once=False) -> set[str]:
    """Modules of rankone that a file imports when it is run, not for type checking only; `at_once`: without
    those that a function imports when it is called."""
    found = set()
    tree = ast.parse(path.read_text())
    late = {
        id(n)
        for node in ast.walk(tree)
        if at_once and isinstance(node, ast.FunctionDef)
        for n in ast.walk(node)
    }
    checking = {
        id(n)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)
        for n in ast.walk(node)
    }
    for node in ast.walk(tree):
        if id(node) in checking or id(node) in late:
            continue
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "rankone":
            inside = node.module.removeprefix("rankone").removeprefix(".")
            for alias in node.names:
                full = f"{inside}.{alias.name}".removeprefix(".")
                if full in ORDER or inside:
                    found.add(full if full in ORDER else inside)
    return found


@pytest.mark.parametrize(
    "path",
    sorted((ROOT / "src/rankone").rglob("*.py")),
    ids=lambda p: p.relative_to(ROOT / "src/rankone").as_posix(),
)
def test_imports_go_upward_only(path):
    name = (
        path.relative_to(ROOT / "src/rankone")
        .with_suffix("")
        .as_posix()
        .replace("/", ".")
        .removesuffix(".__init__")
    )
    if name in ("__init__", "__main__"):
        return
    place = next(known for known in (name, name.split(".")[0]) if known in ORDER)
    doors = DOORS.get(name, set())
    assert not imported(path, at_once=True) & doors, "a door is opened by a call"
    for other in imported(path) - doors:
        known = next(candidate for candidate in (other, other.split(".")[0]) if candidate in ORDER)
        assert ORDER.index(known) <= ORDER.index(place), f"{name} imports {other}"


def test_the_method_knows_neither_its_accelerator_nor_the_paper():
    """Algorithm 1 and the losses are plain torch; only training chooses an engine."""
    for name in ("components", "adapters", "importance", "masks", "patching", "model", "step", "losses"):
        for other in imported(ROOT / f"src/rankone/{name}.py"):
            assert other.split(".")[0] not in ("fast", "targets", "runs", "paper", "report"), (
                f"{name} imports {other}"
            )


def test_no_family_of_targets_is_asked_for_outside_its_file():
    for path in (ROOT / "src/rankone").rglob("*.py"):
        if path.parent.name != "targets":
            assert not re.search(r"\b(TMSTarget|ResidualTarget|SparseTarget)\b", path.read_text()), path


def test_lines_are_wrapped():
    """Text is wrapped: a line that has to be scrolled is not read."""
    for path in [*(ROOT / "src").rglob("*.py"), *(ROOT / "tests").glob("*.py")]:
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            assert len(line) <= 120, f"{path}:{number}"


def tracked() -> list[str]:
    """Files of the repository; without git, every file of the folders that hold them."""
    if shutil.which("git") and (ROOT / ".git").exists():
        words = ["git", "ls-files", "-co", "--exclude-standard"]
        return subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    folders = ("src", "tests", "benchmarks", "examples", "results")
    found = [
        p for folder in folders for p in (ROOT / folder).rglob("*") if p.is_file() and p.suffix != ".pyc"
    ]
    return [p.relative_to(ROOT).as_posix() for p in [*found, *ROOT.glob("*.md"), ROOT / "pyproject.toml"]]


def test_no_path_of_a_machine_in_any_file():
    pattern = re.compile(r"(?<![\w.])/(work|root|home|Users)/\w")
    names = tracked()
    assert len(names) > 40
    for name in names:
        if name.endswith((".safetensors", ".npz", ".png", ".lock")) or not (ROOT / name).is_file():
            continue
        text = (ROOT / name).read_text()
        assert not pattern.search(text), name


def test_files_stay_readable():
    for path in (ROOT / "src").rglob("*.py"):
        assert len(path.read_text().splitlines()) < 500, path
        assert ast.get_docstring(ast.parse(path.read_text())), f"{path} has no module docstring"
