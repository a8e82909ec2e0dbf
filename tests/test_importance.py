"""Importance functions, the two squashings, and mask sources."""

import pytest
import torch

from rankone import ImportanceFunction, RankoneError, register_importance
from rankone.importance import IMPORTANCES, clipped, lower_leaky, make_importance, upper_leaky
from rankone.masks import SOURCES, source_named

RAW = torch.tensor([-200.0, -2.0, 0.0, 0.25, 1.0, 3.0])


def test_squashings_leak_on_their_own_side_only():
    assert lower_leaky(RAW).tolist() == pytest.approx([-2.0, -0.02, 0, 0.25, 1, 1])
    assert upper_leaky(RAW).tolist() == pytest.approx([0, 0, 0, 0.25, 1, 1.02])
    assert clipped(RAW).tolist() == pytest.approx([0, 0, 0, 0.25, 1, 1])


def test_squashings_have_gradients_where_they_leak():
    for squash, expected in ((lower_leaky, [0.01, 1, 0]), (upper_leaky, [0, 1, 0.01])):
        raw = torch.tensor([-1.0, 0.5, 2.0], requires_grad=True)
        (gradient,) = torch.autograd.grad(squash(raw).sum(), raw)
        assert gradient.tolist() == pytest.approx(expected)


@pytest.mark.parametrize("kind", sorted(IMPORTANCES))
@pytest.mark.parametrize("lead", [(5,), (2, 3), ()], ids=str)
def test_every_function_keeps_shapes_and_is_reproducible(kind, lead):
    made = [make_importance(kind, {}, 4, torch.Generator().manual_seed(1)) for _ in range(2)]
    h = torch.randn(*lead, 4)
    assert made[0](h).shape == h.shape
    assert torch.equal(made[0](h), made[1](h))


def test_only_the_layer_function_sees_its_neighbours():
    for kind, sees in (("mlp", False), ("linear", False), ("layer_mlp", True)):
        function = make_importance(kind, {}, 3, torch.Generator().manual_seed(0))
        before, after = function(torch.tensor([0.5, 0.5, 0.5])), function(torch.tensor([0.5, 0.5, 2.0]))
        assert (before[0] != after[0]).item() is sees
        assert before[2] != after[2]


def test_unknown_names_get_hints():
    generator = torch.Generator()
    with pytest.raises(RankoneError, match=r"Unknown importance function 'mpl'. Did you mean 'mlp'"):
        make_importance("mpl", {}, 2, generator)
    with pytest.raises(RankoneError, match=r"'mlp' has no option 'd_gat'. Did you mean 'd_gate'"):
        make_importance("mlp", {"d_gat": 3}, 2, generator)
    with pytest.raises(RankoneError, match=r"'linear' has no option 'd_gate'. It takes no options"):
        make_importance("linear", {"d_gate": 3}, 2, generator)
    with pytest.raises(RankoneError, match=r"d_gate is 0; it must be a whole number of at least 1"):
        make_importance("mlp", {"d_gate": 0}, 2, generator)
    with pytest.raises(RankoneError, match=r"d_gate is 4.5; it must be a whole number"):
        make_importance("mlp", {"d_gate": 4.5}, 2, generator)
    with pytest.raises(RankoneError, match=r"Unknown mask source 'rounde'. Did you mean 'rounded'"):
        source_named("rounde")


def test_a_user_can_register_a_function():
    @register_importance("always")
    class Always(ImportanceFunction):
        def __init__(self, C, generator, *, value=1.0):
            super().__init__()
            self.value = value

        def forward(self, h):
            return torch.full_like(h, self.value)

    try:
        assert make_importance("always", {"value": 0.5}, 2, torch.Generator())(torch.zeros(2)).tolist() == [0.5, 0.5]
    finally:
        del IMPORTANCES["always"]


def test_mask_sources():
    raw = torch.tensor([[-1.0, 0.4, 0.6, 2.0]]).expand(2000, 4)
    masks = {name: make(raw, 7) for name, make in SOURCES.items()}
    assert masks["ones"].min() == 1
    assert masks["zero"].max() == 0
    assert masks["importance"][0].tolist() == pytest.approx([0, 0.4, 0.6, 1])
    assert masks["rounded"][0].tolist() == [0, 0, 1, 1]
    stochastic = masks["stochastic"]
    assert stochastic.amin(0).tolist() == pytest.approx([-0.01, 0.4, 0.6, 1], abs=0.01)
    assert stochastic.amax(0).tolist() == pytest.approx([1, 1, 1, 1], abs=0.01)
    assert stochastic.mean(0).tolist() == pytest.approx([0.495, 0.7, 0.8, 1], abs=0.02)
