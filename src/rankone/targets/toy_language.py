"""A typed toy language, and a transformer of two layers that speaks it.

Its words have types, and three rules say what comes next, the first that applies:

1. after a subject, one of its three favourite verbs (0.7, 0.2, 0.1);
2. after an adjective, if the last place within twelve words has a rule with it, the connective that
   the 24 fixed (place, adjective) pairs say;
3. after a word that occurred exactly once before, what followed it then, with probability 0.9.

Otherwise words come by the frequency of their types. The true chances of every next word are known, so
it is known how good the network is.
"""

from collections.abc import Sequence
from typing import ClassVar

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from rankone.data import generator_for
from rankone.targets.base import register_target
from rankone.targets.language import LanguageTarget, Rule

TYPES = {"subject": 8, "verb": 12, "place": 8, "adjective": 8, "connective": 8, "filler": 16}
FREQUENCIES = {
    "filler": 0.55, "place": 0.12, "subject": 0.10, "adjective": 0.10, "connective": 0.07, "verb": 0.06,
}  # fmt: skip
FAVOURITES = (0.7, 0.2, 0.1)
PAIRS, WINDOW, AGAIN = 24, 12, 0.9
WORDS = sum(TYPES.values())
BEGIN, SPECIAL = WORDS, 3
"""The first of three special tokens begins a sequence; the others are never used."""


def _first(kind: str) -> int:
    return sum(n for name, n in list(TYPES.items())[: list(TYPES).index(kind)])


def _is(ids: Tensor, kind: str) -> Tensor:
    return (ids >= _first(kind)) & (ids < _first(kind) + TYPES[kind])


def _grammar() -> tuple[Tensor, Tensor, Tensor]:
    """The favourite verbs of each subject, the connective of each (place, adjective) or -1, and the
    chances of words that no rule decides."""
    generator = generator_for(0, "toy_language/grammar")
    n = TYPES["subject"]
    verbs = torch.stack([torch.randperm(TYPES["verb"], generator=generator)[:3] for _ in range(n)])
    places, adjectives = TYPES["place"], TYPES["adjective"]
    chosen = torch.randperm(places * adjectives, generator=generator)[:PAIRS]
    connectives = torch.full((places * adjectives,), -1)
    each = torch.arange(PAIRS) % TYPES["connective"]
    connectives[chosen] = each[torch.randperm(PAIRS, generator=generator)]
    usual = torch.zeros(WORDS + SPECIAL)
    for kind, share in FREQUENCIES.items():
        usual[_first(kind) : _first(kind) + TYPES[kind]] = share / TYPES[kind]
    return verbs + _first("verb"), connectives.view(places, adjectives), usual


class Speaker:
    """What is known of some sequences, word by word: enough to say what may come next."""

    def __init__(self, rows: int) -> None:
        self.verbs, self.connectives, self.usual = _grammar()
        self.rows = torch.arange(rows)
        self.count = torch.zeros(rows, WORDS + SPECIAL, dtype=torch.long)
        self.followed = torch.full((rows, WORDS + SPECIAL), -1)
        self.place, self.since = torch.zeros(rows, dtype=torch.long), torch.full((rows,), 10**6)
        self.last = torch.full((rows,), BEGIN)

    def hear(self, word: Int[Tensor, " rows"]) -> None:
        """The next word of every sequence."""
        fresh = self.followed[self.rows, self.last] < 0
        self.followed[self.rows[fresh], self.last[fresh]] = word[fresh]
        self.count[self.rows, word] += 1
        here = _is(word, "place")
        self.place = torch.where(here, word - _first("place"), self.place)
        self.since = torch.where(here, 0, self.since + 1)
        self.last = word

    def rule(self) -> tuple[Tensor, Tensor]:
        """Which of the rules 1, 2, 3 decides the next word (0: none), and the word that 2 and 3 say."""
        last = self.last
        adjective = (last - _first("adjective")).clamp(0, TYPES["adjective"] - 1)
        said = self.connectives[self.place, adjective]
        second = _is(last, "adjective") & (self.since < WINDOW) & (said >= 0)
        old = self.followed[self.rows, last]
        third = (self.count[self.rows, last] == 2) & (old >= 0) & (last < WORDS)
        rule = torch.where(second, 2, torch.where(third, 3, 0))
        rule = torch.where(_is(last, "subject"), 1, rule)
        return rule, torch.where(rule == 2, said + _first("connective"), old)

    def chances(self) -> Float[Tensor, "rows words"]:
        """How likely each next word is."""
        rule, word = self.rule()
        chances = self.usual.expand(len(rule), -1).clone()
        weight = torch.where(rule == 2, 1.0, torch.where(rule == 3, AGAIN, 0.0)).unsqueeze(1)
        said = torch.zeros_like(chances).scatter_(1, word.clamp(min=0).unsqueeze(1), 1.0)
        chances = (1 - weight) * chances + weight * said
        subject = self.last.clamp(max=TYPES["subject"] - 1)
        favourite = torch.zeros_like(chances).scatter_(
            1, self.verbs[subject], torch.tensor(FAVOURITES).expand(len(rule), -1)
        )
        return torch.where((rule == 1).unsqueeze(1), favourite, chances)


@register_target("toy_language")
class ToyLanguageTarget(LanguageTarget):
    """A transformer that speaks a language with typed words."""

    kind: str = "toy_language"
    vocabulary: ClassVar[int] = WORDS + SPECIAL

    def sample(
        self, rows: int, generator: torch.Generator, length: int | None = None
    ) -> tuple[Tensor, Tensor]:
        speaker = Speaker(rows)
        words = [torch.full((rows,), BEGIN)]
        for _ in range(length or self.length):
            words.append(torch.multinomial(speaker.chances(), 1, generator=generator).squeeze(1))
            speaker.hear(words[-1])
        ids = torch.stack(words, 1)
        return ids[:, :-1], ids[:, 1:]

    def heard(self, ids: Int[Tensor, "rows positions"]) -> tuple[Tensor, Tensor, Tensor]:
        """At every position of sequences: the true chances of the next word, the rule that decides it,
        and the last place (-1 if none is near)."""
        speaker = Speaker(len(ids))
        chances, rules, places = [], [], []
        for t in range(ids.shape[1]):
            if t:
                speaker.hear(ids[:, t].cpu())
            chances.append(speaker.chances())
            rules.append(speaker.rule()[0])
            places.append(torch.where(speaker.since < WINDOW, speaker.place, -1))
        return torch.stack(chances, 1), torch.stack(rules, 1), torch.stack(places, 1)

    def rules(self, ids: Int[Tensor, "rows positions"]) -> Sequence[Rule]:
        _, rule, place = self.heard(ids)
        ids = ids.cpu()
        found = [
            Rule(f"subject {i}", "subjects and their verbs", ids == _first("subject") + i)
            for i in range(TYPES["subject"])
        ]
        for p, a in (_grammar()[1] >= 0).nonzero().tolist():
            where = (rule == 2) & (place == p) & (ids == _first("adjective") + a)
            found.append(Rule(f"place {p}, adjective {a}", "places and adjectives", where))
        return [*found, Rule("repeat", "repeating what followed", rule == 3)]

    @torch.no_grad()
    def check(self, model: nn.Module) -> tuple[bool, dict[str, float]]:
        """How far the network's chances are from the true ones, and how often it says what a rule says.

        A good one follows the first two rules. The third takes far longer to learn, and is reported.
        """
        ids, _ = self.sample(64, generator_for(0, "target/check"))
        chances, rule, _ = self.heard(ids)
        logits = model(ids).log_softmax(-1)
        true = chances.clamp(min=1e-30).log()
        far = (chances * (true - logits)).sum(-1)
        right = (logits.argmax(-1) == chances.argmax(-1)).double()
        numbers = {"kl_from_the_truth": float(far.mean()), "entropy": float(-(chances * true).sum(-1).mean())}
        for number, name in ((1, "subjects"), (2, "places_and_adjectives"), (3, "repeats")):
            numbers[f"right_on_{name}"] = float(right[rule == number].mean())
        good = min(numbers["right_on_subjects"], numbers["right_on_places_and_adjectives"]) > 0.95
        return good, numbers
