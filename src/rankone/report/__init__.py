"""report.html: one file that tells a reader who has not seen the code what was decomposed and whether it worked.

Needs the extra `report` (matplotlib, jinja2). Figures are drawn once as SVG, kept in figures/ and set into the page.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.resources import files
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rankone.config import to_yaml
from rankone.decomposition import Decomposition
from rankone.evaluate import Evaluation
from rankone.files import write_atomic
from rankone.metrics import CERTAIN, IMPORTANT
from rankone.report import plots as plot
from rankone.targets import TargetSettings
from rankone.targets.resid_mlp import ResidualTarget, blocks_in_words, match_in_words

if TYPE_CHECKING:
    from rankone.runs.config import ExperimentConfig

MASK_MEANINGS = {
    "ones": "all subcomponents kept",
    "stochastic": "unimportant ones ablated by random amounts, as in training",
    "importance": "every subcomponent scaled by its importance",
    "rounded": "important ones kept, all others removed",
    "zero": "everything removed: the scale to compare with",
}


@dataclass(frozen=True)
class Picture:
    name: str
    title: str
    caption: str
    svg: str


def write_report(
    out: Path, config: "ExperimentConfig", result: Decomposition, evaluation: Evaluation, summary: Mapping[str, Any]
) -> Path:
    """Draw the figures and write report.html into a run directory; return its path."""
    from jinja2 import Environment, StrictUndefined

    pictures = draw(result, evaluation, config.target)
    for old in (out / "figures").glob("*.svg"):
        old.unlink()
    for picture in pictures:
        write_atomic(out / "figures" / f"{picture.name}.svg", picture.svg)
    template = (files("rankone.report") / "template.html.j2").read_text()
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
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
        pictures=[(p.title, p.caption, _inline(p.svg)) for p in pictures[:-1]],
        training_pictures=[(p.title, p.caption, _inline(p.svg)) for p in pictures[-1:]],
        masks=[(name, MASK_MEANINGS[name], evaluation.reconstruction[name]) for name in MASK_MEANINGS],
        important=IMPORTANT,
        certain=CERTAIN,
    )
    write_atomic(out / "report.html", page)
    return out / "report.html"


def draw(result: Decomposition, evaluation: Evaluation, target: TargetSettings) -> list[Picture]:
    """Every figure that suits this decomposition, that of training last."""
    views = {name: result.components(name) for name in result.layers}
    tied = result.model.tied
    own = {name: view for name, view in views.items() if name not in tied}
    worth = {
        name: evaluation.checks[name].expected if name in evaluation.checks else len(evaluation.alive[name])
        for name in own
    }
    shown = {name: min(7, n + 1) for name, n in worth.items()}
    pictures = []
    for name, view in own.items():
        if plot.is_plane(view):
            caption = (
                f"Each coloured line is one column of the matrix: where one input feature is written in the two hidden dimensions. "
                f"Of the {view.C} subcomponents the {min(view.C, shown[name])} largest are shown. A recovered subcomponent holds one "
                "column and nothing else; what is left over has no size."
            )
            pictures.append(
                _picture(f"columns-{name}", f"Columns of {name}", caption, plot.weight_columns(view, shown[name]))
            )
        elif view.target.numel() <= 1024:
            caption = f"The matrix, the sum of its {view.C} subcomponents, and the {min(view.C, shown[name])} largest ones by themselves."
            pictures.append(_picture(f"matrix-{name}", f"Weights of {name}", caption, plot.matrices(view, shown[name])))
    chain = list(views.values())
    connected = all(a.target.shape[0] == b.target.shape[1] for a, b in pairwise(chain))
    if connected and sum(view.target.numel() for view in chain) <= 2048:
        singles = plot.parts_to_show(own, worth)
        caption = (
            "Inputs at the bottom, outputs at the top; red lines are positive weights, blue negative, wider means larger. First the "
            "target, then the network made of all subcomponents, then networks made of one subcomponent each"
            f"{' (tied layers share theirs)' if tied else ''}."
        )
        pictures.append(
            _picture("networks", "The network and its parts", caption, plot.network_diagrams(views, singles, tied))
        )
    if evaluation.probe_importances:
        labels = {name: _label(name, evaluation) for name in evaluation.probe_importances}
        caption = (
            "One input feature is switched on at 0.75 at a time (rows); the colour says how important each subcomponent is for the output "
            "(columns, permuted). A diagonal means one subcomponent per feature; filled columns mean subcomponents that serve many features."
        )
        figure = plot.importance_heatmap(evaluation.probe_importances, evaluation.checks, labels)
        pictures.append(_picture("importances", "Causal importances on one-hot inputs", caption, figure))
    if isinstance(target, ResidualTarget) and set(target.ground_truth()) <= set(views):
        found = target.contributions(result)
        caption = (
            "How much each neuron contributes to computing the first ten features: in the target, and in the subcomponent of W_in that "
            "contributes most. Where the decomposition is right, the two look the same."
        )
        figure = plot.contribution_bars(found.model, found.subcomponents, target.n_blocks)
        pictures.append(_picture("contributions", "Neuron contributions", caption, figure))
        caption = "The same of all features and neurons; a perfect match is the diagonal."
        note = match_in_words(found.to_dict())
        legend = blocks_in_words(found.model, found.subcomponents, target.n_blocks)
        figure = plot.contribution_scatter(found.model, found.subcomponents, legend, note)
        pictures.append(_picture("scatter", "All neuron contributions", caption, figure))
    caption = "Left: the terms of the loss on a logarithmic scale. Right: how many subcomponents are important on an average datapoint."
    pictures.append(_picture("losses", "Training", caption, plot.loss_curves(result.history)))
    return pictures


def _label(name: str, evaluation: Evaluation) -> str:
    check = evaluation.checks.get(name)
    return f"{name}: {check.pattern}, {check.errors} errors" if check else name


def _picture(name: str, title: str, caption: str, figure: Any) -> Picture:
    return Picture(name, title, caption, plot.to_svg(figure, name))


def _inline(svg: str) -> str:
    """An SVG file as an element of a page: no XML prologue, width left to the page."""
    body = svg[svg.index("<svg") :]
    width = re.search(r'width="([0-9.]+)pt"', body)
    body = re.sub(r' (width|height)="[0-9.]+pt"', "", body, count=2)
    points = float(width.group(1)) if width else 600.0
    return body.replace("<svg", f'<svg style="width: {points * 4 / 3:.0f}px; max-width: 100%; height: auto"', 1)


def _number(value: float | None) -> str:
    if value is None:
        return "–"
    if value == 0:
        return "0"
    return f"{value:.4f}" if 1e-3 <= abs(value) < 1e4 else f"{value:.2e}"
