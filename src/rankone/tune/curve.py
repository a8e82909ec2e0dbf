"""The trade-off between how few subcomponents are needed and how well they hold, and one point of it.

A point is one decomposition: how hard importances were pressed, how many are needed (L0, all layers
together) and how much of the network's behaviour an attack can take away. Which point is recommended
follows from a rule that is stated with it; nothing here knows how the points were found.
"""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rankone.errors import TrainingError
from rankone.paper.tables import Table

MOST_ATTACK = 0.10
"""What an attack of 20 steps may cost at a good point, as a share of removing everything."""
MOST_ROUNDED = 0.03
"""What it may cost to keep the important subcomponents and nothing else."""
SAME_L0 = 0.01
"""Numbers of needed subcomponents that differ by less than this share are taken as equal."""
HEAD = (
    "pressure", "attack", "L0", "rounded", "sum", "deletion", "alive", "recovered", "seconds", "",
)  # fmt: skip
NOTE = (
    "Pressure is what the coefficients of importance_minimality were multiplied by. Attack, rounded, sum "
    "and deletion are divergences from the network in per cent of what removing everything costs; L0 is "
    "the mean number of important subcomponents per datapoint, all layers together."
)


@dataclass(frozen=True)
class Point:
    """One decomposition on the curve."""

    factor: float
    """What the coefficients of importance_minimality were multiplied by."""
    attack: float
    """Divergence under an attack of 20 steps, as a share of what removing everything costs."""
    l0: float
    """Mean number of important subcomponents per datapoint, all layers together."""
    rounded: float | None
    sum: float | None
    deletion: float | None
    alive: dict[str, int]
    """Layer -> subcomponents that are important on some datapoint or probe."""
    recovered: bool | None
    """Whether every known mechanism was found; None where no truth is known."""
    seconds: float
    settings: dict[str, float]
    """The settings that make this decomposition."""
    trial: int
    """Its number in the study."""
    directory: str
    """Where the decomposition is, in the output directory of the worker that made it."""

    @property
    def good(self) -> bool:
        """Whether it holds, by the thresholds above."""
        return self.attack < MOST_ATTACK and self.rounded is not None and self.rounded < MOST_ROUNDED


@dataclass(frozen=True)
class Failure:
    """A trial that was finished without a result, and why."""

    factor: float
    message: str


@dataclass(frozen=True)
class Choice:
    """The recommended point, and by which rule."""

    point: Point
    rule: str
    """`fewest`, `knee` or `strongest`."""
    reason: str


@dataclass(frozen=True)
class Curve:
    """Everything that was found about one network."""

    name: str
    points: list[Point]
    """In the order of their factors."""
    failures: list[Failure] = field(default_factory=list)
    out: Path | None = None

    @property
    def front(self) -> list[Point]:
        """The points that no other beats in both respects, from few subcomponents to many."""
        best, front = math.inf, []
        for point in sorted(self.points, key=lambda p: (p.l0, p.attack, p.factor)):
            if point.attack < best:
                best = point.attack
                front.append(point)
        return front

    @property
    def choice(self) -> Choice:
        """The recommended point; an error if there is none."""
        if not self.points:
            why = f" The first said: {self.failures[0].message}" if self.failures else ""
            raise TrainingError(f"No trial of {self.name} has given a decomposition.{why}")
        good = [point for point in self.points if point.good]
        thresholds = f"attack below {MOST_ATTACK:.0%} and rounded below {MOST_ROUNDED:.0%}"
        if good:
            enough = min(point.l0 for point in good) * (1 + SAME_L0)
            best = min((p for p in good if p.l0 <= enough), key=lambda p: (p.attack, p.factor))
            of = f"{len(good)} of {len(self.points)} points with {thresholds}"
            return Choice(best, "fewest", f"the fewest important subcomponents among the {of}")
        none = f"no point has {thresholds}"
        bends = _knee(self.front)
        if bends is not None:
            return Choice(bends, "knee", f"{none}; the knee of the curve")
        return Choice(min(self.front, key=lambda p: p.attack), "strongest", f"{none}; the lowest attack")

    @property
    def recommended(self) -> Point:
        return self.choice.point

    def path(self, point: Point) -> Path | None:
        """The directory of a point's decomposition; None if another machine made it."""
        path = None if self.out is None else self.out / point.directory
        return path if path is not None and path.is_dir() else None

    def table(self) -> Table:
        """One row for each point."""
        choice = self.choice
        rows = [_row(p, "<- recommended" if p is choice.point else "") for p in self.points]
        rows += [(f"x{f.factor:g}", "failed", *[""] * (len(HEAD) - 3), f.message) for f in self.failures]
        title = f"{self.name}: attack against L0. Recommended: pressure x{choice.point.factor:g}"
        return Table(title, f"{NOTE}\nRecommended because: {choice.reason}.", HEAD, rows)

    def to_dict(self) -> dict[str, Any]:
        choice = self.choice
        return {
            "name": self.name,
            "recommended": asdict(choice.point),
            "rule": choice.rule,
            "reason": choice.reason,
            "points": [asdict(point) for point in self.points],
            "front": [point.factor for point in self.front],
            "failures": [asdict(failure) for failure in self.failures],
        }


def _knee(front: Sequence[Point]) -> Point | None:
    """Where a curve bends most: the point farthest below the line between its ends.

    Attack is taken on a logarithmic scale and both scales from 0 to 1. None if no point is below.
    """
    if len(front) < 3:
        return None
    needed = [point.l0 for point in front]
    harm = [math.log(max(point.attack, 1e-12)) for point in front]

    def below(i: int) -> float:
        along = (needed[i] - needed[0]) / (needed[-1] - needed[0])
        down = (harm[0] - harm[i]) / (harm[0] - harm[-1])
        return down - along

    best = max(range(len(front)), key=below)
    return front[best] if below(best) > 1e-9 else None


def _row(point: Point, mark: str) -> tuple[str, ...]:
    shares = (point.rounded, point.sum, point.deletion)
    return (
        f"x{point.factor:g}",
        percent(point.attack),
        f"{point.l0:.2f}",
        *("-" if share is None else percent(share) for share in shares),
        "/".join(map(str, point.alive.values())),
        {True: "yes", False: "no", None: "-"}[point.recovered],
        f"{point.seconds:.0f}",
        mark,
    )


def percent(share: float) -> str:
    """A share of removing everything, to three digits: small ones are told apart."""
    value = 100 * share
    if value >= 100:
        return f"{value:,.0f}%"
    return f"{value:.3g}%" if value >= 0.01 or value == 0 else f"{value:.0e}%"
