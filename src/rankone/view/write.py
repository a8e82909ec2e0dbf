"""view.html: one file with its data, style, code and libraries inside, which opens from anywhere.

The page's own parts are files beside this one, readable as they are; vendor/ holds what others wrote,
with its licence.
"""

from html import escape
from importlib.resources import files
from pathlib import Path
from typing import Any

from rankone.compare import compare
from rankone.data import Data
from rankone.decomposition import Decomposition
from rankone.errors import ConfigError, RankoneError
from rankone.files import write_atomic
from rankone.view import encode
from rankone.view.gather import gather

FORMAT = 1


def page(runs: list[dict[str, Any]], comparison: dict[str, Any] | None = None) -> str:
    """The page about one decomposition, or about two side by side."""
    parts = files("rankone.view")

    def text(name: str) -> str:
        return (parts / name).read_text(encoding="utf-8")

    content = {"format": FORMAT, "runs": runs, "comparison": comparison}
    filled = {
        "title": escape(" and ".join(str(run["name"]) for run in runs)),
        "style": text("vendor/uPlot.min.css") + text("style.css"),
        "licence": text("vendor/uPlot.LICENSE"),
        "library": text("vendor/uPlot.min.js"),
        "draw": text("draw.js"),
        "app": text("app.js"),
        "data": encode.as_json(content),
    }
    html = text("page.html")
    for name in filled:
        if html.count(f"{{{{{name}}}}}") != 1:
            raise AssertionError(f"page.html does not have {name} once")
    head, *rest = html.split("{{")
    return head + "".join(
        filled[name] + after for name, _, after in (piece.partition("}}") for piece in rest)
    )


def view_of(
    result: Decomposition,
    path: str | Path,
    data: Data | None = None,
    other: Decomposition | None = None,
    *,
    attack: int = 80,
) -> Path:
    """Write the page about any decomposition, or about two of one network; return where."""
    path = Path(path)
    if path.suffix.lower() not in (".html", ".htm"):
        raise ConfigError(f"{path} does not end in .html: the viewer is one page, such as view.html.")
    name = type(result.model.target).__name__
    names = [name] if other is None else [f"{name} (first)", f"{name} (second)"]
    both = [result] if other is None else [result, other]
    runs = [gather(r, n, data, attack=attack) for r, n in zip(both, names, strict=True)]
    write_atomic(path, page(runs, None if other is None else compared(result, other, data)))
    return path


def compared(a: Decomposition, b: Decomposition, data: Data | None) -> dict[str, Any]:
    """How two decompositions compare, or why they cannot be compared."""
    given = next((d for d in (data, a.data, b.data) if d is not None), None)
    if given is None:
        return {"why": "There is no data at hand on which the two could be compared."}
    try:
        found = compare(a, b, given)
    except RankoneError as error:
        return {"why": str(error)}
    return {
        "only_in": [list(names) for names in found.only_in],
        "layers": {
            name: {
                "alive": list(of.alive),
                "same": of.same,
                "cosine": encode.number(of.cosine, 4),
                "agreement": encode.number(of.agreement, 4),
                "matches": [
                    [m.a, m.b, encode.number(m.cosine, 4), encode.number(m.agreement, 4)] for m in of.matches
                ],
            }
            for name, of in found.layers.items()
        },
    }
