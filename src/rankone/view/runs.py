"""The page about runs: from their directories, as far as each can be opened."""

from importlib.resources import files
from pathlib import Path
from typing import Any

from rankone.decomposition import Decomposition
from rankone.errors import ConfigError, RankoneError
from rankone.files import RunDirectory, write_atomic
from rankone.runs.run import LoadedRun, load_run
from rankone.view.gather import gather, gather_artifact
from rankone.view.write import compared, page

PAGE = "view.html"
SHIPPED = Path(str(files("rankone.view") / "shipped"))
"""Decompositions that come with rankone, to look at without training: runs by the recipe, seed 0."""


def view_runs(paths: list[Path], out: Path | None = None, *, attack: int = 80) -> Path:
    """Write the page about one run, or about two side by side; return where.

    It goes into the directory of the first if nothing else is said.
    """
    shipped = _shipped(paths[0])
    if shipped and out is None:
        out = Path(f"{paths[0]}-view.html")
    paths = [_shipped(path) or path for path in paths]
    opened = [_opened(path) for path in paths]
    pages = [_page(path, run, attack) for path, run in zip(paths, opened, strict=True)]
    comparison: dict[str, Any] | None = None
    if len(paths) > 1:
        results = [run.result for run in opened if isinstance(run, LoadedRun)]
        whole = len(results) == len(paths)
        why = {"why": "One of the two could not be opened."}
        comparison = compared(results[0], results[1], None) if whole else why
    html = page(pages, comparison)
    if out is not None:
        if out.suffix.lower() not in (".html", ".htm"):
            raise ConfigError(f"{out} does not end in .html: the viewer is one page, such as view.html.")
        write_atomic(out, html)
        return out
    directory = RunDirectory.open(paths[0])
    with directory.lock():
        directory.write(PAGE, html.encode("utf-8", "replace"))
    return directory.path / PAGE


def _shipped(path: Path) -> Path | None:
    """The directory of a shipped decomposition, where a path is the name of one and no directory."""
    found = SHIPPED / path.name
    return found if len(path.parts) == 1 and not path.exists() and found.is_dir() else None


def _opened(path: Path) -> LoadedRun | str:
    """A run, or why it cannot be opened whole."""
    if not path.is_dir():
        names = ", ".join(sorted(p.name for p in SHIPPED.iterdir()))
        raise ConfigError(f"There is no directory {path}. To look at without training, there is: {names}.")
    try:
        return load_run(path)
    except RankoneError as error:
        if not (path / "manifest.json").exists():
            raise  # nothing here was made by rankone
        return f"This run could not be opened whole: {error}"


def _page(path: Path, run: LoadedRun | str, attack: int) -> dict[str, Any]:
    name = path.resolve().name
    if isinstance(run, str):
        return gather_artifact(path, name, run)
    result: Decomposition = run.result
    return gather(result, run.config.title or name, attack=attack)
