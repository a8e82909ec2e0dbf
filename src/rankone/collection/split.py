"""Which half of the collection a network belongs to: to develop with, or held out.

The split was drawn once, at random, before anything was tuned on these networks: within each family,
in the order of `sorted`, by `drawn` below with the seed 14. It is written down here so that it stays
as it is when networks are added. **The held-out half is only ever run for the final table.** Who looks
at it while changing a method has no held-out half any more.

The seven networks of the paper are in neither half; they are reported by themselves.
"""

import random
from collections.abc import Iterable, Mapping

from rankone.collection.base import ENTRIES
from rankone.errors import ConfigError, near_matches

SEED = 14

DEVELOP = frozenset(
    [
        "ands_built",
        "attention_embedded",
        "attention_head",
        "bilinear_joined",
        "blocks_copies",
        "blocks_gelu",
        "blocks_mixed",
        "blocks_rank3",
        "blocks_ten_times",
        "blocks_three",
        "dense_gelu",
        "depth_relay",
        "depth_two_blocks",
        "tms_10-5_importances",
        "tms_20-5",
        "tms_8-3_enough",
        "tms_8-3_ten_times",
        "tms_8-3_untied",
        "units_blocks_in_hundredth",
        "units_tms_in_hundredfold",
        "units_tms_out_hundredfold",
        "units_tms_out_hundredth",
        "xors_built",
    ]
)
HELD_OUT = frozenset(
    [
        "ands_trained",
        "bilinear_cut",
        "blocks_always",
        "blocks_correlated",
        "blocks_enough",
        "blocks_rank1",
        "blocks_rank2",
        "blocks_twins",
        "blocks_two_jobs",
        "dense_relu",
        "depth_identities",
        "embedding_table",
        "ors_built",
        "tms_10-5_frequencies",
        "tms_12-4_unseen",
        "tms_12-4_untied",
        "tms_20-12_three",
        "tms_30-8_untied",
        "tms_8-3",
        "units_blocks_in_hundredfold",
        "units_blocks_out_hundredfold",
        "units_blocks_out_hundredth",
        "units_tms_in_hundredth",
    ]
)

HALVES = ("develop", "held_out", "paper", "all")


def drawn(families: Mapping[str, str], seed: int = SEED) -> tuple[set[str], set[str]]:
    """(to develop with, held out): each family cut in halves; the odd ones take turns."""
    generator = random.Random(seed)
    halves: tuple[set[str], set[str]] = (set(), set())
    turn = 0
    for family in sorted(set(families.values()) - {"paper"}):
        names = sorted(name for name, of in families.items() if of == family)
        generator.shuffle(names)
        for name in names:
            halves[turn].add(name)
            turn = 1 - turn
    return halves


def half_of(name: str) -> str:
    """`develop`, `held_out` or `paper`; a network of your own has no half and is called `own`."""
    if ENTRIES.get(name).family == "paper":
        return "paper"
    return "develop" if name in DEVELOP else "held_out" if name in HELD_OUT else "own"


def names_in(half: str) -> list[str]:
    """The networks of a half, of the paper, or all of them."""
    if half not in HALVES:
        raise ConfigError(f"There is no half {half!r} of the collection. {near_matches(half, HALVES)}")
    return [name for name in ENTRIES if half in ("all", half_of(name))]


def hint() -> str:
    """Where to find the names."""
    return (
        f"There are {len(ENTRIES)}, among them {', '.join(list(ENTRIES)[:3])}; docs/benchmark.md lists all."
    )


def chosen(only: Iterable[str] | None, half: str) -> list[str]:
    """The networks named, or those of a half; an unknown name gets its near matches."""
    if only is None:
        return names_in(half)
    return [ENTRIES.known(name) for name in dict.fromkeys(only)]
