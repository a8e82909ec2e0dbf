"""What is shipped: typed, quick to start, complete enough that an unpacked sdist passes these tests."""

import re
import runpy
import subprocess
import sys
import tomllib

import pytest

from conftest import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def python(code: str) -> str:
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout.strip()


def test_types_are_shipped():
    assert (ROOT / "src/rankone/py.typed").is_file()
    assert "Typing :: Typed" in PROJECT["project"]["classifiers"]


def test_help_does_not_wait_for_torch():
    heavy = "[m for m in ('torch', 'numba', 'scipy', 'matplotlib', 'numpy') if m in sys.modules]"
    assert python(f"import sys, rankone, rankone.cli; print({heavy})") == "[]"


def test_what_decomposes_imports_nothing_that_only_reports_need():
    heavy = "[m for m in ('scipy', 'matplotlib', 'jinja2', 'numba', 'cyclopts') if m in sys.modules]"
    assert python(f"import sys, rankone; rankone.decompose; print({heavy})") == "[]"


def test_the_sdist_has_what_tests_read():
    included = {name.strip("/") for name in PROJECT["tool"]["hatch"]["build"]["targets"]["sdist"]["include"]}
    for name in included:
        assert (ROOT / name).exists(), name
    read = {"src", "tests", "docs", "examples", "benchmarks", "results", ".ci", "README.md", "CHANGELOG.md"}
    assert read <= included


def test_links_of_the_readme_on_a_package_index():
    pytest.importorskip("hatchling")
    namespace = runpy.run_path(str(ROOT / "hatch_build.py"))
    absolute = namespace["absolute"]
    text = "![a figure](results/a.svg) [b](docs/b.md#c) [d](https://d.org) [e](#e)"
    assert absolute(text, "") == text
    assert absolute(text, "https://x.org/blob/v1") == (
        "![a figure](https://x.org/raw/v1/results/a.svg) [b](https://x.org/blob/v1/docs/b.md#c) "
        "[d](https://d.org) [e](#e)"
    )
    page = absolute((ROOT / "README.md").read_text(), "https://x.org/blob/v1")
    assert not re.search(r"\]\((?!https?:|#)", page)


def test_public_names_are_what_a_type_checker_sees():
    """`__init__` says every name twice: for type checkers, and where it is found."""
    import ast

    import rankone

    tree = ast.parse((ROOT / "src/rankone/__init__.py").read_text())
    seen = {
        alias.asname or alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("rankone.")
        for alias in node.names
    }
    assert seen == set(rankone.__all__) == set(rankone._HOME)
    for name in (*rankone.__all__, *rankone._MODULES):
        assert getattr(rankone, name) is not None
        assert name in dir(rankone)


def test_a_shell_completes_experiments():
    from rankone.cli import app

    script = app.generate_completion(shell="bash")
    for word in ("tms_5-2", "resid_mlp1", "diagnose", "--start-from"):
        assert word in script
