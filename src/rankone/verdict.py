"""Is a decomposition good? A verdict made without knowing the true mechanisms.

It sums up a diagnosis: good if nothing was found that matters, not good with every reason, and None
where it could not be judged. The limits behind it (findings.py) were chosen on the development half of
the collection of networks with known mechanisms; docs/recipe.md says how it fared there.
"""

import math
from dataclasses import dataclass

from rankone.findings import Diagnosis, Numbers


@dataclass(frozen=True)
class Verdict:
    """Whether a decomposition is good, and why one should think so."""

    good: bool | None
    """None: it could not be judged."""
    reasons: tuple[str, ...]
    """What speaks for it, or everything that speaks against it."""

    @property
    def word(self) -> str:
        return {True: "good", False: "not good", None: "could not be judged"}[self.good]

    def __str__(self) -> str:
        return f"{self.word}: {'; '.join(self.reasons)}"


def verdict(diagnosis: Diagnosis) -> Verdict:
    """The verdict on what was measured."""
    n = diagnosis.numbers
    measured = [*n.divergence.values(), *(share for share in n.relative.values() if share is not None)]
    if not all(map(math.isfinite, measured)):
        return Verdict(None, ("some of what was measured is not a finite number",))
    if n.divergence["zero"] <= 0:
        return Verdict(None, ("removing everything changes nothing on this data",))
    against = [f"{finding.name}: {finding.seen}" for finding in diagnosis.findings if finding.matters]
    if against:
        return Verdict(False, tuple(against))
    if unknown := _unknown(n):
        return Verdict(None, tuple(unknown))
    return Verdict(True, tuple(_for(n)))


def _unknown(n: Numbers) -> list[str]:
    """What would have to be known to call it good, and is not."""
    unknown = []
    if n.falling is None:
        unknown.append("training was too short to see whether it had settled")
    if n.attack_share is None or n.relative.get("rounded") is None:
        unknown.append("it was not measured under attack")
    if n.datapoints is not None and n.datapoints < 2:
        unknown.append("the data is one datapoint, again and again")
    return unknown


def _for(n: Numbers) -> list[str]:
    shares = {
        "all subcomponents together": n.relative.get("sum"),
        "importances rounded to 0 and 1": n.relative.get("rounded"),
        "under attack": n.attack_share,
        "without what is never important": n.relative.get("deletion"),
    }
    lost = [f"{name} {share:.2%}" for name, share in shares.items() if share is not None]
    alive = ", ".join(f"{name} {n.alive[name]} of {n.C[name]}" for name in n.alive)
    return [
        f"it loses, of what removing everything costs: {', '.join(lost)}",
        f"on a datapoint {sum(n.l0.values()):.2f} subcomponents are important",
        f"alive subcomponents: {alive}",
        "training had settled",
        *(
            [f"with another seed, importances agree by {min(n.agreement.values()):.0%}"]
            if n.agreement
            else []
        ),
    ]
