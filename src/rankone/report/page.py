"""report.html: one file that tells a reader who has not seen the code what was decomposed and
whether it worked.

Needs the extra `report` (matplotlib, jinja2). Figures are drawn once as SVG, kept in figures/ and
set into the page.
"""

import re
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path

from rankone.decomposition import Decomposition
from rankone.evaluate import Evaluation
from rankone.files import RunDirectory
from rankone.metrics import CERTAIN, IMPORTANT
from rankone.report import plots
from rankone.report.plots import Picture
from rankone.runs.config import RunConfig
from rankone.runs.run import program
from rankone.runs.summary import Summary
from rankone.settings import to_yaml

MASK_MEANINGS = {
    "ones": "all subcomponents kept",
    "stochastic": "unimportant ones ablated by random amounts, as in training",
    "importance": "every subcomponent scaled by its importance",
    "rounded": "important ones kept, all others removed",
    "zero": "everything removed: the scale to compare with",
}


SHARE_MEANINGS = {
    "sum": "all subcomponents kept: is their sum the network?",
    "stochastic": "random masks, as in training",
    "importance": "every subcomponent scaled by its importance",
    "rounded": "important ones alone",
    "attack_20": "the masks that an adversary finds in 20 steps",
    "union_16": "what is important to a datapoint or to 16 others",
    "deletion": "what is never important, deleted",
}


def can_report() -> bool:
    """Whether the extra `report` is installed."""
    return find_spec("matplotlib") is not None and find_spec("jinja2") is not None


def write_report(
    directory: RunDirectory,
    config: RunConfig,
    result: Decomposition,
    evaluation: Evaluation,
    summary: Summary,
) -> Path:
    """Draw the figures and write report.html into a run directory; return its path."""
    from jinja2 import Environment, StrictUndefined

    drawings = [
        (picture, f"figures/{_file_name(picture.name)}", plots.to_svg(picture.figure, picture.name))
        for picture in draw(config, result, evaluation, summary)
    ]
    for _, name, svg in drawings:
        directory.write(name, svg)
    for old in set(directory.names("figures/")) - {name for _, name, _ in drawings}:
        directory.remove(old)
    shown = [(picture.title, picture.caption, _inline(svg)) for picture, _, svg in drawings]
    template = (files("rankone.report") / "template.html.j2").read_text(encoding="utf-8")
    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters["number"] = _number
    page = environment.from_string(template).render(
        config=config,
        config_yaml=to_yaml(config),
        summary=summary,
        layers=[
            {
                "name": name,
                "shape": " × ".join(str(n) for n in layer.matrix().shape),
                "C": layer.C,
                "tied": result.model.tied.get(name),
                "alive": len(evaluation.alive[name]),
                "l0": evaluation.l0[name],
                "check": evaluation.checks.get(name),
            }
            for name, layer in result.model.layers.items()
        ],
        pictures=shown[:-1],
        training_pictures=shown[-1:],
        masks=[
            (name, MASK_MEANINGS.get(name, ""), value) for name, value in evaluation.reconstruction.items()
        ],
        shares=[(name, meaning, evaluation.relative.get(name)) for name, meaning in SHARE_MEANINGS.items()],
        well_tempered=evaluation.well_tempered,
        important=IMPORTANT,
        certain=CERTAIN,
        program=program(),
    )
    directory.write("report.html", page)
    return directory.path / "report.html"


def draw(config: RunConfig, result: Decomposition, evaluation: Evaluation, summary: Summary) -> list[Picture]:
    """Every figure that suits this decomposition, that of training last."""
    views = {name: result.components(name) for name in result.layers}
    checks = evaluation.checks
    worth = {n: checks[n].expected if n in checks else len(evaluation.alive[n]) for n in views}
    pictures = plots.weight_pictures(views, result.model.tied, worth)
    if evaluation.probe_importances:
        pictures.append(
            plots.importance_picture(evaluation.probe_importances, checks, config.target.probe_in_words)
        )
    pictures += config.target.figures(config.target.figure_data(result), summary.details)
    caption = (
        "Left: the terms of the loss on a logarithmic scale. Right: how many subcomponents are "
        "important on an average datapoint."
    )
    pictures.append(Picture("losses", "Training", caption, plots.loss_curves(result.history)))
    return pictures


def _file_name(name: str) -> str:
    """A file for a picture, whatever characters its layer's name has."""
    return re.sub(r"[^\w.+-]", "_", name, flags=re.ASCII)[:150] + ".svg"


def _inline(svg: str) -> str:
    """An SVG file as an element of a page: no XML prologue, width left to the page."""
    body = svg[svg.index("<svg") :]
    width = re.search(r'width="([0-9.]+)pt"', body)
    body = re.sub(r' (width|height)="[0-9.]+pt"', "", body, count=2)
    points = float(width.group(1)) if width else 600.0
    style = f"width: {points * 4 / 3:.0f}px; max-width: 100%; height: auto"
    return body.replace("<svg", f'<svg style="{style}"', 1)


def _number(value: float | None) -> str:
    if value is None:
        return "–"
    if value == 0:
        return "0"
    return f"{value:.4f}" if 1e-3 <= abs(value) < 1e4 else f"{value:.2e}"
