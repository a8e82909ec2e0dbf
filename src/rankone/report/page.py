"""report.html: one file that tells a reader who has not seen the code what was decomposed and
whether it worked.

Needs the extra `report` (matplotlib, jinja2). Figures are drawn once as SVG, kept in figures/ and
set into the page.
"""

import re
import shlex
from collections.abc import Mapping
from html import escape
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rankone.data import Data
from rankone.decomposition import Decomposition
from rankone.errors import ConfigError
from rankone.evaluate import Evaluation
from rankone.files import RunDirectory, write_atomic
from rankone.looking import LOOK_AT, Usage, usage
from rankone.metrics import CERTAIN, IMPORTANT
from rankone.report import plots
from rankone.report.alive import alive_layers, sample_picture
from rankone.report.canvas import Picture, to_svg
from rankone.runs.config import RunConfig
from rankone.runs.own import python_config
from rankone.runs.run import program, summarised
from rankone.runs.summary import Summary
from rankone.settings import to_yaml
from rankone.targets.own import Own
from rankone.verdict import Verdict

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
    page, drawings = make_page(config, result, evaluation, summary, directory.path)
    for name, svg in drawings.items():
        directory.write(name, svg)
    for old in set(directory.names("figures/")) - set(drawings):
        directory.remove(old)
    # A path that is no UTF-8 holds surrogates, which cannot be written: a letter is lost, not a run.
    directory.write("report.html", page.encode("utf-8", "replace"))
    return directory.path / "report.html"


def report_on(result: Decomposition, path: str | Path, data: Data | None = None) -> Path:
    """Write a report about any decomposition as one file, and return where."""
    if not can_report():
        raise ConfigError(
            "A report needs matplotlib and jinja2. Install them with: pip install 'rankone[report]'"
        )
    path = Path(path)
    if path.suffix.lower() not in (".html", ".htm"):
        raise ConfigError(f"{path} does not end in .html: a report is one page, such as report.html.")
    given = result.data_or(data)
    again = data is not None or result.evaluation is None
    measured: Any = result.evaluate(given) if again else result.evaluation
    if data is not None:
        result.diagnose(data)
    evaluation: Evaluation = measured
    config = result.config
    if not isinstance(config, RunConfig):
        own = Own(result.model.target, given, None, result.model.output, result.divergence)
        layers = {name: layer.C for name, layer in result.model.layers.items()}
        config = python_config(own, layers, config)
    summary = summarised(config, result, evaluation)
    page, _ = make_page(config, result, evaluation, summary, None, given)
    write_atomic(path, page)
    return path


def make_page(
    config: RunConfig,
    result: Decomposition,
    evaluation: Evaluation,
    summary: Summary,
    where: Path | None,
    data: Data | None = None,
) -> tuple[str, dict[str, str]]:
    """The page, and the figures in it as the files they are kept in."""
    from jinja2 import Environment, StrictUndefined

    given = result.data_or(data)
    own = [name for name in result.layers if name not in result.model.tied]
    usages = {n: u for n, u in usage(result.model, given, LOOK_AT).items() if n in own}
    drawings = [
        (picture, f"figures/{_file_name(picture.name)}", to_svg(picture.figure, picture.name))
        for picture in draw(config, result, evaluation, summary, usages)
    ]
    shown = [(p.title, p.caption, _inline(svg, f"{p.title}. {p.caption}")) for p, _, svg in drawings]
    template = (files("rankone.report") / "template.html.j2").read_text(encoding="utf-8")
    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters["number"] = _number
    has_history = bool(result.history)
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
        alive_layers=alive_layers(result, usages, evaluation.probe_importances),
        has_probe=bool(evaluation.probe_importances),
        quality=quality(result.verdict, evaluation) if summary.recovered is None else None,
        pictures=shown[:-1] if has_history else shown,
        training_pictures=shown[-1:] if has_history else [],
        masks=[
            (name, MASK_MEANINGS.get(name, ""), value) for name, value in evaluation.reconstruction.items()
        ],
        shares=[(name, meaning, evaluation.relative.get(name)) for name, meaning in SHARE_MEANINGS.items()],
        well_tempered=evaluation.well_tempered,
        important=IMPORTANT,
        certain=CERTAIN,
        own=config.target.begun_in_python,
        diagnose=_how_to_diagnose(config, where),
        repeat=f"{program()} run config.yaml{config.target.again}",
    )
    return page, {name: svg for _, name, svg in drawings}


def _how_to_diagnose(config: RunConfig, where: Path | None) -> str:
    if where is None or config.target.begun_in_python:
        return "result.diagnose()"
    return f"{program()} diagnose {shlex.quote(str(where))}{config.target.again}"


def quality(verdict: Verdict, evaluation: Evaluation) -> tuple[str, str, list[str]]:
    """How good a decomposition is: a class (`yes`, `no`, `open`), a headline, and sentences that say why."""
    alive = sum(map(len, evaluation.alive.values()))
    if not alive:
        nothing = "Nothing is alive: no subcomponent is important on any datapoint that was looked at."
        return "no", "Not good", [nothing]
    kind = {True: "yes", False: "no", None: "open"}[verdict.good]
    sentences = [f"{reason[:1].upper()}{reason[1:]}." for reason in verdict.reasons]
    if not verdict.good:
        on = sum(evaluation.l0.values())
        sentences.append(f"Of {alive} alive subcomponents, {on:.1f} are important on an average datapoint.")
    return kind, verdict.word.capitalize(), sentences


def draw(
    config: RunConfig,
    result: Decomposition,
    evaluation: Evaluation,
    summary: Summary,
    usages: Mapping[str, Usage],
) -> list[Picture]:
    """Every figure that suits this decomposition, that of training last."""
    views = {name: result.components(name) for name in result.layers}
    checks = evaluation.checks
    worth = {n: checks[n].expected if n in checks else len(evaluation.alive[n]) for n in views}
    pictures = plots.weight_pictures(views, result.model.tied, worth)
    if evaluation.probe_importances:
        pictures.append(
            plots.importance_picture(evaluation.probe_importances, checks, config.target.probe_in_words)
        )
    elif (sample := sample_picture(usages)) is not None:
        pictures.append(sample)
    pictures += config.target.figures(config.target.figure_data(result), summary.details)
    caption = (
        "Left: the terms of the loss on a logarithmic scale. Right: how many subcomponents are "
        "important on an average datapoint."
    )
    if result.history:
        pictures.append(Picture("losses", "Training", caption, plots.loss_curves(result.history)))
    return pictures


def _file_name(name: str) -> str:
    """A file for a picture, whatever characters its layer's name has."""
    return re.sub(r"[^\w.+-]", "_", name, flags=re.ASCII)[:150] + ".svg"


def _inline(svg: str, title: str) -> str:
    """An SVG file as an element of a page: no XML prologue, width left to the page, a title for those who
    do not see it. On a narrow screen it is scrolled rather than made too small to read."""
    body = svg[svg.index("<svg") :]
    width = re.search(r'width="([0-9.]+)pt"', body)
    body = re.sub(r' (width|height)="[0-9.]+pt"', "", body, count=2)
    points = float(width.group(1)) if width else 600.0
    pixels = round(points * 4 / 3)
    style = f"width: {pixels}px; max-width: 100%; min-width: {min(pixels, 560)}px; height: auto"
    body = body.replace("<svg", f'<svg role="img" style="{style}"', 1)
    end = body.index(">") + 1
    return f"{body[:end]}<title>{escape(title)}</title>{body[end:]}"


def _number(value: float | None) -> str:
    if value is None:
        return "–"
    if value == 0:
        return "0"
    return f"{value:.4f}" if 1e-3 <= abs(value) < 1e4 else f"{value:.2e}"
