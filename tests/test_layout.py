"""The shape of the repository: imports go one way, documented files exist, nothing of a machine is written down."""

import ast
import re
import shutil
import subprocess

import pytest

from conftest import ROOT

ORDER = [
    "errors",
    "checkpoint",
    "components",
    "factored",
    "adapters",
    "importance",
    "masks",
    "kernels",
    "fast",
    "data",
    "surgery",
    "model",
    "losses",
    "config",
    "trackers",
    "metrics",
    "train",
    "decomposition",
    "evaluate",
    "diagnose",
    "plot",
    "targets",
    "experiments",
    "report",
    "experiments.run",
    "experiments.parallel",
    "experiments.stored",
    "experiments.reproduce",
    "progress",
    "cli",
]


def imported(path) -> set[str]:
    """Modules of rankone that a file imports when it is run, not for type checking only."""
    found = set()
    tree = ast.parse(path.read_text())
    checking = {
        id(n)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)
        for n in ast.walk(node)
    }
    for node in ast.walk(tree):
        if id(node) in checking:
            continue
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "rankone":
            inside = node.module.removeprefix("rankone").removeprefix(".")
            found |= {inside} if inside else {alias.name for alias in node.names if alias.name in ORDER}
    return found


@pytest.mark.parametrize(
    "path", sorted((ROOT / "src/rankone").rglob("*.py")), ids=lambda p: p.relative_to(ROOT / "src/rankone").as_posix()
)
def test_imports_go_upward_only(path):
    name = path.relative_to(ROOT / "src/rankone").with_suffix("").as_posix().replace("/", ".").removesuffix(".__init__")
    if name in ("__init__", "__main__"):
        return
    place = next(known for known in (name, name.split(".")[0]) if known in ORDER)
    for other in imported(path):
        known = next(candidate for candidate in (other, other.split(".")[0]) if candidate in ORDER)
        assert ORDER.index(known) <= ORDER.index(place), f"{name} imports {other}"


def tracked() -> list[str]:
    """Files of the repository; without git, every file of the folders that hold them."""
    if shutil.which("git") and (ROOT / ".git").exists():
        words = ["git", "ls-files", "-co", "--exclude-standard"]
        return subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    folders = ("src", "tests", "benchmarks", "examples", "results")
    found = [p for folder in folders for p in (ROOT / folder).rglob("*") if p.is_file() and p.suffix != ".pyc"]
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
