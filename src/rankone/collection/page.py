"""The results of a benchmark as one table, and as one page that needs nothing else."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rankone.collection.base import ENTRIES
from rankone.collection.bench import Result
from rankone.files import RunDirectory
from rankone.metrics import wilson
from rankone.paper.tables import Table

HEAD = (
    "network", "half", "recovered", "called good", "errors", "missing", "stray", "split", "merged", "cosine", "L0",
    "true L0", "sum", "importance", "rounded", "deletion", "attack", "attack on truth", "seconds",
)  # fmt: skip
KINDS = ("missing", "stray", "split", "merged")
MEASURED = ("sum", "importance", "rounded", "deletion", "attack_20")
NOTE = (
    "Errors of each seed, then how many of each kind over all seeds; means over seeds of everything else. "
    "Sum to attack are divergences from the network in per cent of what removing everything costs, the "
    "last of them also for the true decomposition."
)


def table(results: Sequence[Result]) -> Table:
    """One row for each network."""
    rows = [
        _row(name, [r for r in results if r.name == name]) for name in dict.fromkeys(r.name for r in results)
    ]
    return Table(f"Benchmark: {verdict(results)}", f"{NOTE} {calibration(results)}".strip(), HEAD, rows)


def calibration(results: Sequence[Result]) -> str:
    """How often the method's own verdict was right; nothing where it gave none."""
    called = [r for r in results if r.called_good is not None]
    if not called:
        return ""
    good = [r.recovered for r in called if r.called_good]
    wrong = [not r.called_good for r in results if not r.recovered]
    return (
        f"Its own verdict, made without the truth: of {len(good)} results called good {sum(good)} are recovered; "
        f"of {len(wrong)} that are not recovered {sum(wrong)} are not called good."
    )


def verdict(results: Sequence[Result]) -> str:
    """How many results are recovered, in all and by half."""
    words = []
    for half in dict.fromkeys(r.half for r in results):
        of = [r.recovered for r in results if r.half == half]
        low, high = wilson(sum(of), len(of))
        words.append(f"{half} {sum(of)} of {len(of)} recovered (95 % interval {low:.0%} to {high:.0%})")
    return ", ".join(words)


def _row(name: str, results: Sequence[Result]) -> tuple[str, ...]:
    judged = [r.judgement for r in results if r.judgement is not None]
    share = f"{sum(r.recovered for r in results)} of {len(results)}"
    if not judged:
        return (name, results[0].half, share, "", "failed", *[""] * (len(HEAD) - 5))
    truth = _mean([r.truth.get("attack_20") for r in results])
    return (
        name,
        results[0].half,
        share,
        f"{sum(bool(r.called_good) for r in results)} of {len(results)}",
        "/".join("-" if r.judgement is None else str(r.judgement["errors"]) for r in results),
        *(str(sum(j[kind] for j in judged)) for kind in KINDS),
        _number(_mean([j["cosine"] for j in judged])),
        *(_number(_mean([j[key] for j in judged]), 2) for key in ("l0", "true_l0")),
        *(_percent(_mean([j["shares"].get(key) for j in judged])) for key in MEASURED),
        _percent(truth),
        f"{_mean([r.seconds for r in results]):.0f}",
    )


def write(directory: RunDirectory, results: Sequence[Result], about: Mapping[str, Any]) -> Path:
    """benchmark.json, and benchmark.html (or benchmark.md where jinja2 is missing); the page's path."""
    directory.write_json("benchmark.json", {"about": dict(about), "results": [asdict(r) for r in results]})
    made = table(results)
    if find_spec("jinja2") is None:
        directory.write("benchmark.md", made.markdown())
        return directory.path / "benchmark.md"
    from jinja2 import Environment, StrictUndefined

    template = (files("rankone.collection") / "benchmark.html.j2").read_text(encoding="utf-8")
    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    recovered = {
        name: all(r.recovered for r in results if r.name == name) for name in {r.name for r in results}
    }
    page = environment.from_string(template).render(
        table=made,
        about=about,
        recovered=recovered,
        meaning={name: ENTRIES[name].about for name in recovered if name in ENTRIES},
        failures=[r for r in results if not r.recovered],
    )
    directory.write("benchmark.html", page)
    return directory.path / "benchmark.html"


def _mean(values: Sequence[float | None]) -> float | None:
    known = [v for v in values if v is not None]
    return sum(known) / len(known) if known else None


def _number(value: float | None, digits: int = 3) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{share:.2%}" if share < 1 else f"{share:,.0%}"
