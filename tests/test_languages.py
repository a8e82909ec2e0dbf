"""The small languages: their rules hold, their networks follow them, and rules that were found are counted."""

from types import SimpleNamespace

import pytest
import torch

from rankone.data import generator_for
from rankone.decomposition import Decomposition
from rankone.runs.config import experiment_config
from rankone.targets.induction import SIGN, InductionTarget
from rankone.targets.language import count_rules, in_words
from rankone.targets.sparse import Recipe
from rankone.targets.toy_language import BEGIN, ToyLanguageTarget, _grammar

TOY = ToyLanguageTarget()


def test_the_toy_language_follows_its_rules():
    ids, answers = TOY.sample(200, generator_for(0, "test"))
    chances, rule, place = TOY.heard(ids)
    verbs, connectives, usual = _grammar()
    assert int((connectives >= 0).sum()) == 24
    torch.testing.assert_close(usual.sum(), torch.tensor(1.0))
    torch.testing.assert_close(chances.sum(-1), torch.ones(ids.shape))
    assert ids[:, 0].eq(BEGIN).all()
    assert (chances.gather(-1, answers.unsqueeze(-1)) > 0).all()
    first = rule == 1
    for subject in range(8):
        followed = answers[first & (ids == subject)]
        assert set(followed.tolist()) <= set(verbs[subject].tolist())
        assert abs(float((followed == verbs[subject][0]).double().mean()) - 0.7) < 0.15
    for row, t in (rule == 2).nonzero().tolist()[:200]:
        before = ids[row, max(0, t - 11) : t + 1]
        places = [int(word) - 20 for word in before if 20 <= word < 28]
        assert places[-1] == place[row, t]
        assert answers[row, t] == 36 + connectives[places[-1], ids[row, t] - 28]
    for row, t in (rule == 3).nonzero().tolist()[:200]:
        earlier = (ids[row, :t] == ids[row, t]).nonzero().flatten()
        assert len(earlier) == 1
        assert chances[row, t, ids[row, earlier[0] + 1]] >= 0.9


def test_induction_asks_for_what_followed_the_sign():
    ids, answers = InductionTarget().sample(50, generator_for(0, "test"))
    for row, answer in zip(ids.tolist(), answers.tolist(), strict=True):
        assert row.count(SIGN) == 2
        assert row[-1] == SIGN
        assert row[row.index(SIGN) + 1] == answer


def test_rules_are_counted():
    """Parts that are on exactly where a rule holds are found; one that is always on is not."""
    target = InductionTarget()

    class Result(Decomposition):
        def __init__(self):
            self.model = SimpleNamespace(layers={"x": SimpleNamespace(C=3)})

        def data_or(self, data):
            return lambda generator: target.sample(20, generator)[0]

        def importances(self, ids):
            before, last = (rule.where.float() for rule in target.rules(ids))
            return {"x": torch.stack([torch.ones_like(last), last, 0.4 * before], -1)}

    found = count_rules(target, Result())
    (last,), (before,) = found["finding it again"], found["remembering what came before"]
    assert (last["part"], last["f1"]) == (1, 1.0)
    assert before["f1"] < 0.1
    assert in_words(found) == [
        "remembering what came before: 0 of 1 have a part of their own (F1 of at least 0.8; mean "
        f"{before['f1']:.2f})",
        "finding it again: 1 of 1 have a part of their own (F1 of at least 0.8; mean 1.00), in x",
    ]


@pytest.mark.parametrize("name", ["toy_language", "induction"])
def test_a_network_can_be_trained_again_and_the_check_can_fail(name):
    target = experiment_config(name).target.model_copy(update={"training": Recipe(steps=3, batch_size=4)})
    first, again = (target.train(0)[0] for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), again.parameters(), strict=True))
    assert not target.check(first)[0]
