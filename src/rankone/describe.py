"""A decomposition in ten lines, as text and as HTML: what it is of, what was found, how good it is.

Everything here is cheap: it says what is known already, and what would have to be measured.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

MOST_LAYERS = 5
"""Layers that are shown; with more, the first and the last ones."""
SHARES = {"sum": "sum", "rounded": "important ones alone", "attack_20": "attack", "deletion": "deletion"}
"""The shares of removing everything that are shown, and their words."""


@dataclass(frozen=True)
class Facts:
    """What is known about a decomposition."""

    target: str
    """The class of the network."""
    shapes: Mapping[str, tuple[int, ...]]
    C: Mapping[str, int]
    tied: Mapping[str, str]
    alive: Mapping[str, int] | None
    """None where it was not measured."""
    l0: Mapping[str, float]
    relative: Mapping[str, float | None]
    """Shares of what removing everything costs; empty where they were not measured."""
    steps: int
    steps_done: int
    seconds: float
    judgement: str = ""
    """A sentence about how good it is, where one was passed."""


HEAD = ("layer", "shape", "C", "alive", "L0")


def headline(facts: Facts) -> str:
    n = len(facts.C)
    own = sum(C for name, C in facts.C.items() if name not in facts.tied)
    steps = f"{facts.steps_done:,} steps"
    if facts.steps_done < facts.steps:
        steps = f"unfinished: {facts.steps_done:,} of {facts.steps:,} steps"
    took = f" in {facts.seconds:.0f} s" if facts.seconds >= 1 else ""
    return f"Decomposition of {facts.target}: {n} layer{'s' * (n != 1)}, {own:,} subcomponents, {steps}{took}"


def rows(facts: Facts) -> list[Sequence[str]]:
    """A row for each layer, some of many."""
    names = list(facts.C)
    shown = names if len(names) <= MOST_LAYERS else [*names[: MOST_LAYERS - 2], "", names[-1]]
    result: list[Sequence[str]] = []
    for name in shown:
        if not name:
            result.append((f"... {len(names) - MOST_LAYERS + 1} more", "", "", "", ""))
            continue
        d_out, d_in = facts.shapes[name]
        label = f"{name} (shares {facts.tied[name]})" if name in facts.tied else name
        label = label if len(label) <= 44 else f"{label[:20]}...{label[-21:]}"
        alive = "?" if facts.alive is None else f"{facts.alive[name]}"
        l0 = f"{facts.l0[name]:.2f}" if name in facts.l0 else "?"
        result.append((label, f"{d_out} x {d_in}", f"{facts.C[name]}", alive, l0))
    return result


def quality(facts: Facts) -> list[str]:
    """How good it is, in one or two sentences."""
    if not facts.relative:
        known = [] if not facts.judgement else [facts.judgement]
        return [*known, "How good it is was not measured yet: result.evaluate(data)."]
    shares = ", ".join(
        f"{words} {percent(facts.relative[name])}"
        for name, words in SHARES.items()
        if facts.relative.get(name) is not None
    )
    said = [facts.judgement] if facts.judgement else []
    return [*said, f"Lost, of what removing everything costs: {shares}."]


def brief(word: str, reasons: Sequence[str], *, good: bool | None) -> str:
    """A verdict in a line: what is wrong by name, without its numbers."""
    if good:
        return word
    names = [reason.partition(":")[0] for reason in reasons] if good is False else reasons
    return f"{word}: {'; '.join(names)}"


def findings_as_text(findings: Sequence[Any]) -> str:
    """What is wrong with a decomposition, gravest first, and what to do about it."""
    if not findings:
        return "Nothing wrong was found."
    return "\n".join(f"{f.name}: {f.seen}.\n  It means: {f.means}.\n  Do: {f.do}." for f in findings)


def findings_as_html(findings: Sequence[Any]) -> str:
    """The same for a notebook."""
    if not findings:
        return "<p>Nothing wrong was found.</p>"
    items = (
        f"<li><b>{escape(f.name)}</b>: {escape(f.seen)}.<br>It means: {escape(f.means)}.<br>"
        f"Do: {escape(f.do)}.</li>"
        for f in findings
    )
    return f"<ol>{''.join(items)}</ol>"


def percent(share: float | None) -> str:
    """A share of what removing everything costs; it may be any number above 0."""
    return "-" if share is None else f"{share:.2%}" if share < 1 else f"{share:,.0%}"


def as_text(facts: Facts) -> str:
    """At most ten lines."""
    cells = [HEAD, *rows(facts)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(HEAD))]
    lines = [
        "  ".join(
            cell.ljust(width) if i < 2 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in cells
    ]
    return "\n".join([headline(facts), *(f"  {line}" for line in lines), *quality(facts)])


def as_html(facts: Facts) -> str:
    """The same for a notebook."""
    head = "".join(f"<th>{name}</th>" for name in HEAD)
    body = "".join(
        "<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows(facts)
    )
    said = "".join(f"<p>{escape(sentence)}</p>" for sentence in quality(facts))
    return f"<p><b>{escape(headline(facts))}</b></p><table><tr>{head}</tr>{body}</table>{said}"
