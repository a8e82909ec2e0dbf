"""The numbers of a finished run: what summary.json holds, typed."""

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from rankone.errors import CheckpointError
from rankone.evaluate import Evaluation
from rankone.metrics import Check, Pattern
from rankone.verdict import Verdict


class CheckResult(BaseModel):
    """How the importances of one matrix compare with the pattern that a known mechanism must show."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    pattern: Pattern
    expected: int
    errors: int


class Summary(BaseModel):
    """What a run was, what it found, and what it took."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    command: str | None = None
    """How to repeat the run, where it was kept."""
    experiment: str
    preset: str
    overrides: list[str]
    seed: int
    steps: int
    wall_seconds: float | None = None
    """Training, evaluation and report together."""
    train_seconds: float | None = None
    ms_per_step: float
    peak_rss_mb: float | None = None
    """None where the system does not tell."""
    recovered: bool | None
    """Whether every known mechanism was found; None where no truth is known."""
    verdict: Verdict | None = None
    """Where no truth is known: whether it is good, and why. None also in runs of before 0.2.0."""
    checks: dict[str, CheckResult]
    mmcs: float | None
    ml2r: float | None
    mmcs_all: float | None
    """Over all subcomponents, dead ones included."""
    ml2r_all: float | None
    similarity_of: str | None
    """The matrix that these four are about."""
    n_alive: dict[str, int]
    """Layer -> subcomponents that are important on some datapoint or probe."""
    alive: dict[str, list[int]] = {}
    """Layer -> which these are, by their true indices; empty in runs of before 0.2.0."""
    l0: dict[str, float]
    """Layer -> mean number of important subcomponents per datapoint."""
    reconstruction: dict[str, float]
    """Mask source -> divergence from the target."""
    relative: dict[str, float | None] = {}
    """Divergences as shares of what removing everything costs; empty in runs of before 0.2.0."""
    well_tempered: float | None = None
    """How often the more important of two subcomponents is missed more; 0.5 is chance."""
    faithfulness: float
    details: dict[str, Any]
    """What the target's family has to add."""
    target_check: dict[str, float]
    """The numbers that decide whether the target is a good one."""
    losses: dict[str, float]
    """At the last step."""
    target_sha256: str
    decomposition_sha256: str | None = None
    """Of the run's components.safetensors."""
    threads: int
    versions: dict[str, str]

    @classmethod
    def from_json(cls, values: Any, *, source: str) -> "Summary":
        """A summary from the content of a summary.json; what is none is refused by name."""
        try:
            return cls.model_validate(values)
        except ValidationError as error:
            first = error.errors()[0]
            place = ".".join(str(part) for part in first["loc"]) or "content"
            raise CheckpointError(
                f"{source} is not the summary of a run ({place}: {first['msg']}). Make the run again."
            ) from None

    def to_json(self) -> dict[str, Any]:
        return self.model_dump(mode="json")

    @property
    def errors(self) -> int:
        """Errors of all checks together."""
        return sum(check.errors for check in self.checks.values())

    def evaluation(self) -> Evaluation | None:
        """The evaluation that these numbers are of, without what it drew; None in runs of before 0.2.0."""
        if not self.alive:
            return None
        checks = {n: Check(c.pattern, c.expected, c.errors, []) for n, c in self.checks.items()}
        return Evaluation(
            reconstruction=self.reconstruction,
            relative=self.relative,
            well_tempered=self.well_tempered,
            faithfulness=self.faithfulness,
            l0=self.l0,
            alive=self.alive,
            checks=checks,
            similarity=None,
            probe_importances={},
        )

    def updated(self, values: Mapping[str, Any]) -> "Summary":
        """The same run with some numbers measured again."""
        return type(self).from_json(self.to_json() | dict(values), source="These numbers")
