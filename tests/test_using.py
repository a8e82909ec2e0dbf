"""Doing things with a result, as the documentation says it: edited, examples, compare."""

import pytest
import torch

import rankone
from rankone.errors import BatchError, LayerError


@pytest.fixture(scope="module")
def made():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.ReLU(), torch.nn.Linear(6, 3)).eval()
    data = [torch.randn(16, 4) for _ in range(2)]
    return rankone.decompose(model, data, {"*": 5}, {"steps": 2}, progress=False)


def test_edited_is_the_network_with_parts_multiplied(made):
    x = torch.randn(7, 4)
    edited = made.edited({("0", 3): 0.0, ("2", 1): 2.0})
    assert torch.equal(edited(x), made.ablated(scale={"0": {3: 0.0}, "2": {1: 2.0}})(x))
    part = made.components("0")[3].matrix()
    first = torch.nn.functional.linear(x, made.model.target[0].weight - part, made.model.target[0].bias)
    alone = made.edited({("0", 3): 0.0})(x)
    torch.testing.assert_close(alone, made.model.target[2](torch.relu(first)))
    assert repr(edited) == "<Sequential with 0 3 x 0, 2 1 x 2>"
    assert torch.equal(made.edited({("0", -2): 0.0})(x), alone), "negative indices count from the end"


def test_by_component_and_by_condition(made):
    x = torch.randn(9, 4)
    group = max(made.clusters(), key=lambda c: c.rank)
    whole = made.edited({group: 0.0})
    assert torch.equal(whole(x), made.ablated(drop=group.in_layers)(x))
    where = made.edited({group: 0.0}, where=lambda x: x[:, 0] > 0)
    chosen = x[:, 0] > 0
    assert torch.equal(where(x)[chosen], whole(x)[chosen])
    assert torch.equal(where(x)[~chosen], made.model.target(x)[~chosen])
    assert "condition" in repr(where)
    with pytest.raises(BatchError, match="expected one boolean for each row"):
        made.edited({group: 0.0}, where=lambda x: x)(x)


def test_examples_by_pair_and_by_component(made):
    table = made.examples(("0", 3), count=4)
    assert repr(table) == repr(made.examples("0", 3, count=4))
    assert repr(made.examples(("0", 3), made.data, count=4)) == repr(table)
    values = table.column("importance")
    assert values == sorted(values, reverse=True)
    group = max(made.clusters(), key=lambda c: c.rank)
    of_all = made.examples(group, count=4)
    best = max(made.examples(m, count=1)[0]["importance"] for m in group.members)
    assert of_all[0]["importance"] == best


def test_compare_prints_well_and_can_be_used(made):
    same = made.compare(made)
    assert all(layer.cosine == pytest.approx(1) for layer in same.layers.values() if layer.alive[0])
    assert "mean cosine" in repr(same)
    assert "<table>" in same._repr_html_()


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        ({("nothing", 3): 0.0}, "nothing"),
        ({("0", 9): 0.0}, "has subcomponents 0 to 4, but 9 was asked for"),
        ({("0", 3): 0.0, ("0", -2): 1.0}, "named twice"),
    ],
)
def test_bad_edits(made, edit, message):
    with pytest.raises(LayerError, match=message):
        made.edited(edit)
