"""What the numbers of a diagnosis mean: the heuristics of appendix A.3 of the paper, and what the field
has learned since, as rules.

Each rule is a number with a limit; one that is over its limit becomes a `Finding` that says what was
seen, what it means, and what to do. Limits are at the top of the file, with the reason for each.
diagnose.py measures the numbers.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rankone.components import DATA_INITS
from rankone.describe import findings_as_html, findings_as_text
from rankone.measures import ATTACK_STEPS
from rankone.metrics import CERTAIN

UNMASKED = 0.01
"""Largest divergence of the sum of all subcomponents, relative to removing everything: it is the
target, up to rounding and a last bit of training."""
MASKED = 0.1
"""Largest divergence under random masks, relative to removing everything; runs of the paper's
experiments that are right have 0.003 to 0.02."""
NOISE = 3.0
"""How many times larger the reconstruction loss may be than the interference of inactive
subcomponents explains, if it is large at all."""
ATTACKED = 0.04
"""Largest divergence under an attack of 20 steps, relative to removing everything. On the networks to
develop with, results that are right have up to 0.022, a mechanism left out 0.05 to 0.25."""
DELETED = 0.005
"""Largest divergence, relative to removing everything, after what is never important was deleted. On the
networks to develop with, results that are right have up to 0.0013, wrong ones often 0.007 to 0.012."""
ALONE = 0.03
"""The same with the important subcomponents alone."""
ROOM = 0.005
"""Below this divergence under random masks, relative to removing everything, minimality could cost
more."""
UNUSED_ROOM = 6.0
"""With so much room, how many times the interference of inactive subcomponents the reconstruction
loss may be.

Runs that are right have 0.7 to 4.6; residual MLPs with a tenth and a hundredth of the right
coefficient have 7.5 to 8.5: what is left of the error comes from importances between 0 and 1, of
far more subcomponents than are needed.
"""
REACHING_ONE = 0.5
"""In every layer, on at least this share of inputs some importance must be near 1. Right runs have
0.83 or more, a residual MLP with ten times the right coefficient 0.05 in W_in."""
FALLING = 0.12
"""By how much the loss, or the number of important subcomponents, may fall over the last three
fifths of training.

Runs that are right stay below 0.1, and are above 0.15 at a tenth of their steps. The parts that are
compared are not next to each other because a falling learning rate makes the end of any run look
settled; they are after the point where the penalty stops changing, which moves both.
"""
UNSURE = 0.1
"""Largest share of what important subcomponents do that may be done at importances between 0.1 and 0.9."""
AGREEMENT = 0.85
"""What the importances of two seeds must have in common, over what either has, in every layer. Pairs of
right results have 0.94 or more; where one of two is wrong, some layer has at most 0.75."""
TOGETHER = 0.5
"""Share of a known mechanism's subcomponents that must act where any of them does. (Not all: an
input may need only some directions.)"""
MISSING = 0.1
"""How far the alive subcomponents of a known mechanism may be from its matrix, relative to its size."""


@dataclass(frozen=True)
class Finding:
    """Something that is wrong: what was seen, what it means, what to do."""

    name: str
    seen: str
    means: str
    do: str
    matters: bool = True
    """Whether a decomposition with it is not good, or may be."""


@dataclass(frozen=True)
class Identity:
    """A matrix that is known to be one mechanism, and how it came back."""

    rank: int
    alive: int
    act_together: float
    """The share of its subcomponents that are important where any is."""
    missing: float
    """How far the sum of the alive ones is from it, relative to its size."""


@dataclass(frozen=True)
class Numbers:
    """Everything that is measured. Dictionaries are by layer, unless they say otherwise."""

    divergence: dict[str, float]
    """Mask source -> divergence from the target."""
    superposition_noise: float
    """Divergence from the target when all important subcomponents are whole and all others random."""
    near_one: dict[str, float]
    """The share of inputs, each weighted by what the layers change in its output, on which some
    importance is near 1; without layers if they change nothing."""
    alive: dict[str, int]
    C: dict[str, int]
    falling: dict[str, float] | None
    """By what share `loss` and `l0` fell between two late parts of training; None for too few records."""
    cramped: list[str]
    """Layers that came back as exactly their rank although their inputs could not have had one part
    each."""
    split_pairs: dict[str, int]
    """Pairs of subcomponents that are one mechanism cut in two."""
    identities: dict[str, Identity]
    tied: dict[str, str]
    init: str
    steps: int
    steps_done: int | None
    relative: dict[str, float | None] = field(default_factory=dict)
    """The shares that evaluation gives: under attack, after deletion and so on."""
    unsure: dict[str, float] = field(default_factory=dict)
    """Of what subcomponents with an importance above 0.1 do, the share of those below 0.9."""
    too_many: dict[str, tuple[int, int]] = field(default_factory=dict)
    """Groups of subcomponents that are more than their rank needs: how many, and how many would do."""
    l0: dict[str, float] = field(default_factory=dict)
    rank: dict[str, int] = field(default_factory=dict)
    """Of the original matrices."""
    well_tempered: float | None = None
    coefficient_start: float | None = None
    """Of minimality, where its pressure is higher at first than in the end."""
    agreement: dict[str, float] = field(default_factory=dict)
    """With a decomposition from another seed, if there was one to compare with: what importances of
    matched subcomponents have in common, over what either has."""
    datapoints: int | None = None
    """How many of the inputs that were looked at differ from each other."""

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "Numbers":
        """What `dataclasses.asdict` made of numbers, after a way through JSON."""
        identities = {name: Identity(**identity) for name, identity in values["identities"].items()}
        return cls(**{**values, "identities": identities})

    @property
    def unmasked_share(self) -> float:
        """Divergence of the sum of all subcomponents, relative to removing everything."""
        return self.divergence["ones"] / max(self.divergence["zero"], 1e-30)

    @property
    def masked_share(self) -> float:
        """Divergence under random masks, relative to removing everything."""
        return self.divergence["stochastic"] / max(self.divergence["zero"], 1e-30)

    @property
    def attack_share(self) -> float | None:
        """Divergence under attack, relative to removing everything; None where it was not measured."""
        return self.relative.get(f"attack_{ATTACK_STEPS}")


@dataclass(frozen=True, repr=False)
class Diagnosis:
    """Every number that was looked at, and what is wrong, gravest first."""

    numbers: Numbers
    findings: list[Finding] = field(default_factory=list)

    def __repr__(self) -> str:
        return findings_as_text(self.findings)

    def _repr_html_(self) -> str:
        return findings_as_html(self.findings)


def _with_tied(n: Numbers, names: Sequence[str]) -> str:
    """Layers with those that share their parameters, which must have as many subcomponents."""
    groups = [{name, n.tied.get(name, name), *(a for a, b in n.tied.items() if b == name)} for name in names]
    return ", ".join(layer for layer in n.C if any(layer in group for group in groups))


BETA3 = "`losses.importance_minimality.coefficient`"
BETA3_START = "`losses.importance_minimality.coefficient_start`"


def findings(numbers: Numbers) -> list[Finding]:
    """What the numbers mean."""
    return [finding for rule in RULES for finding in rule(numbers)]


def _unfinished(n: Numbers) -> Iterator[Finding]:
    if n.steps_done is not None and n.steps_done < n.steps:
        yield Finding(
            "unfinished",
            f"training has reached step {n.steps_done:,} of {n.steps:,}",
            "whatever else is found may be gone at the end",
            "finish the run, with --resume",
        )


def _unconverged(n: Numbers) -> Iterator[Finding]:
    names = {"loss": "the loss", "l0": "the number of important subcomponents"}
    fell = [f"{names[k]} fell by {share:.0%}" for k, share in (n.falling or {}).items() if share > FALLING]
    if fell:
        yield Finding(
            "unconverged",
            f"late in training {' and '.join(fell)} (limit {FALLING:.0%})",
            "training stopped before it had settled",
            "raise `steps`",
        )


def _unfaithful(n: Numbers) -> Iterator[Finding]:
    if n.unmasked_share > UNMASKED:
        warm_up = "" if n.init in DATA_INITS else "give `faithfulness_warmup.steps` 200, "
        yield Finding(
            "unfaithful",
            f"with all subcomponents kept, the output differs from the target by {n.unmasked_share:.1%} "
            f"of what removing all of them does (limit {UNMASKED:.0%})",
            "the subcomponents do not sum to the network",
            f"raise `losses.faithfulness.coefficient`, {warm_up}or raise `steps`",
        )


def _too_few(n: Numbers) -> Iterator[Finding]:
    if n.cramped:
        parts = [
            f"{name} came back as {n.alive[name]} subcomponents, exactly its rank, out of {n.C[name]}, "
            "which is less than it has inputs"
            for name in n.cramped
        ]
        yield Finding(
            "C perhaps too small",
            "; ".join(parts),
            "it is one mechanism, or there was too little room for a sparser decomposition",
            f"raise C for {_with_tied(n, n.cramped)} to twice as many; if as few are alive then, "
            "it is one mechanism",
            matters=False,
        )
    full = [name for name, alive in n.alive.items() if alive == n.C[name]]
    if full:
        yield Finding(
            "C too small",
            f"no subcomponent is dead in {', '.join(full)} (C = "
            f"{', '.join(str(n.C[name]) for name in full)})",
            "there may be more mechanisms than subcomponents, so that some must share one",
            f"raise C for {_with_tied(n, full)}, until some stay dead",
        )


def _shrunken(n: Numbers) -> dict[str, float]:
    return {name: share for name, share in n.near_one.items() if share < REACHING_ONE}


def _coefficient_too_high(n: Numbers) -> Iterator[Finding]:
    if shrunken := _shrunken(n):
        shares = ", ".join(f"{share:.0%} of the inputs in {name}" for name, share in shrunken.items())
        yield Finding(
            "importance coefficient too high",
            f"some importance reaches {CERTAIN} on {shares}, weighted by how much they need these "
            f"layers (at least {REACHING_ONE:.0%})",
            "minimality costs more than it is worth to reconstruct the output, so everything is "
            "ablated in part",
            f"lower {BETA3}, to a third at first",
        )


def _far_from_target(n: Numbers) -> Iterator[Finding]:
    if n.masked_share > MASKED:
        yield Finding(
            "masked model too far from the target",
            f"under random masks the output differs from the target by {n.masked_share:.1%} of what "
            f"removing everything does (limit {MASKED:.0%})",
            "subcomponents that matter are ablated",
            f"lower {BETA3}, to a third at first; if the loss is still falling, raise `steps`",
        )
    if n.divergence["stochastic"] > NOISE * n.superposition_noise and n.masked_share > UNMASKED:
        yield Finding(
            "more error than superposition explains",
            f"reconstruction under random masks is {n.divergence['stochastic']:.1e}; inactive "
            f"subcomponents alone give {n.superposition_noise:.1e} (limit {NOISE:.0f} times that)",
            "more than interference is lost: active mechanisms are ablated in part",
            f"lower {BETA3}, or raise `steps`",
        )


def _unsafe(n: Numbers) -> Iterator[Finding]:
    share = n.attack_share
    if share is not None and share > ATTACKED:
        yield Finding(
            "fails under attack",
            f"masks that an adversary chooses, out of those that importances allow, change the output by "
            f"{share:.1%} of what removing everything does (limit {ATTACKED:.0%}); random masks by "
            f"{n.masked_share:.1%}",
            "what importances call unimportant is unimportant on average, not always",
            f"set {BETA3_START} to {n.coefficient_start / 2:g}: pressure was so high at first that "
            "mechanisms with a small effect were given up"
            if n.coefficient_start
            else f"add `losses.adversarial_recon.persistent=true`, or lower {BETA3}",
        )


def _loses_what_it_deletes(n: Numbers) -> Iterator[Finding]:
    limits = {
        "deletion": ("deleting every subcomponent that is never important", DELETED),
        "rounded": ("keeping only the important subcomponents of each datapoint", ALONE),
    }
    lost = [
        f"{doing} changes the output by {share:.1%} (limit {limit:.1%})"
        for name, (doing, limit) in limits.items()
        if (share := n.relative.get(name)) is not None and share > limit
    ]
    if lost:
        yield Finding(
            "the rest does work",
            f"{'; '.join(lost)} of what removing everything does",
            "training came to rely on what is left of unimportant subcomponents under random masks",
            "set `masks.delta=true` and `masks.sigmoid=straight_through`, or add "
            "`losses.importance_recon.coefficient=1`",
        )


def _unstable(n: Numbers) -> Iterator[Finding]:
    apart = {name: share for name, share in n.agreement.items() if share < AGREEMENT}
    if apart:
        shares = ", ".join(f"{share:.0%} in {name}" for name, share in apart.items())
        yield Finding(
            "seeds disagree",
            f"importances of this decomposition and of the one it was held against have in common {shares} "
            f"(at least {AGREEMENT:.0%})",
            "at least one of the two is not what the network does, or several answers serve equally well",
            "decompose these layers with a third seed, and trust the subcomponents that come back "
            "(`rankone compare` lists them)",
        )


def _unsure(n: Numbers) -> Iterator[Finding]:
    unsure = {name: share for name, share in n.unsure.items() if share > UNSURE}
    if unsure:
        shares = ", ".join(f"{share:.0%} in {name}" for name, share in unsure.items())
        yield Finding(
            "importances between 0 and 1",
            f"much of what important subcomponents do is done at importances below 0.9: {shares} (limit "
            f"{UNSURE:.0%})",
            "whether these subcomponents matter is not decided: several may share one mechanism",
            "raise `steps`; if it stays, look at these layers with another seed before trusting them",
        )


def _more_than_rank(n: Numbers) -> Iterator[Finding]:
    if n.too_many:
        groups = ", ".join(
            f"{some} of {name} ({fewer} would do)" for name, (some, fewer) in n.too_many.items()
        )
        yield Finding(
            "more subcomponents than their rank needs",
            f"groups that could be written as fewer subcomponents: {groups}",
            "a mechanism of higher rank is spread over subcomponents that take turns",
            "set `consolidate_at` to [0.3, 0.55, 0.8], or raise `steps`",
        )


def _coefficient_too_low(n: Numbers) -> Iterator[Finding]:
    split = ", ".join(f"{pairs} in {name}" for name, pairs in n.split_pairs.items() if pairs)
    excess = n.divergence["stochastic"] / max(n.superposition_noise, 1e-30)
    signs = []
    if split:
        signs.append(
            f"pairs of subcomponents read or write one direction and are always used together: {split}"
        )
    if n.masked_share < ROOM and excess > UNUSED_ROOM:
        signs.append(
            f"random masks change the output by {n.masked_share:.2%} of what removing everything does, "
            f"so minimality could cost more, yet inactive subcomponents explain only 1/{excess:.0f} of "
            "that: the rest comes from importances between 0 and 1"
        )
    if signs and not _shrunken(n):
        yield Finding(
            "importance coefficient too low",
            "; ".join(signs),
            "one mechanism is spread over several subcomponents, which costs too little",
            f"raise {BETA3}, to three times as much at first",
        )


def _identity_lost(n: Numbers) -> Iterator[Finding]:
    for name, identity in n.identities.items():
        whole = identity.act_together >= TOGETHER and identity.missing <= MISSING
        if identity.alive == identity.rank and whole:
            continue
        yield Finding(
            "known mechanism not recovered",
            f"{name} is an identity of rank {identity.rank}: one mechanism. It came back as "
            f"{identity.alive} subcomponents, of which {identity.act_together:.0%} act when any does "
            f"and which lack {identity.missing:.0%} of it",
            "the settings do not recover what is known, so what they say about the rest cannot be trusted",
            f"{'raise' if identity.alive > identity.rank else 'lower'} {BETA3}, or raise `steps`",
        )


RULES: tuple[Callable[[Numbers], Iterator[Finding]], ...] = (
    _unfinished,
    _unconverged,
    _unfaithful,
    _too_few,
    _coefficient_too_high,
    _far_from_target,
    _unsafe,
    _loses_what_it_deletes,
    _unsure,
    _unstable,
    _more_than_rank,
    _coefficient_too_low,
    _identity_lost,
)
"""Gravest first."""
