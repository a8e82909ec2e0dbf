"""Importance functions, the two squashings, and mask sources."""

import pytest
import torch

import rankone
from conftest import small_mlp, uniform
from rankone import ImportanceFunction, RankoneError, register_importance
from rankone.importance import (
    IMPORTANCES,
    JointImportance,
    LayerShape,
    clipped,
    lower_leaky,
    make_importance,
    upper_leaky,
)
from rankone.masks import SOURCES, Draw

RAW = torch.tensor([-200.0, -2.0, 0.0, 0.25, 1.0, 3.0])


OF_ONE_LAYER = sorted(n for n in IMPORTANCES if issubclass(IMPORTANCES[n], ImportanceFunction))
"""The others see more than inner activations: test_context.py."""


def test_squashings_leak_on_their_own_side_only():
    assert lower_leaky(RAW).tolist() == pytest.approx([-2.0, -0.02, 0, 0.25, 1, 1])
    assert upper_leaky(RAW).tolist() == pytest.approx([0, 0, 0, 0.25, 1, 1.02])
    assert clipped(RAW).tolist() == pytest.approx([0, 0, 0, 0.25, 1, 1])


def test_squashings_have_gradients_where_they_leak():
    for squash, expected in ((lower_leaky, [0.01, 1, 0]), (upper_leaky, [0, 1, 0.01])):
        raw = torch.tensor([-1.0, 0.5, 2.0], requires_grad=True)
        (gradient,) = torch.autograd.grad(squash(raw).sum(), raw)
        assert gradient.tolist() == pytest.approx(expected)


def function(kind, C, **options):
    """The function of one layer."""
    return make_importance(kind, options, {"layer": LayerShape(C, 5)}, seed=1).functions["layer"]


@pytest.mark.parametrize("kind", OF_ONE_LAYER)
@pytest.mark.parametrize("lead", [(5,), (2, 3), ()], ids=str)
def test_every_function_keeps_shapes_and_is_reproducible(kind, lead):
    made = [function(kind, 4) for _ in range(2)]
    h = torch.randn(*lead, 4)
    assert made[0](h).shape == h.shape
    assert torch.equal(made[0](h), made[1](h))


@pytest.mark.parametrize("kind", OF_ONE_LAYER)
def test_stretching_moves_every_importance_away_from_a_half(kind):
    made = function(kind, 4)
    h = torch.randn(7, 4)
    before = made(h)
    made.stretch(3.0)
    torch.testing.assert_close(made(h) - 0.5, 3 * (before - 0.5), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("d_gate", [4, 16, 128])
def test_open_above_zero_is_one_there_and_about_a_half_below(d_gate):
    made = function("mlp", C=50, d_gate=d_gate)
    made.open_above_zero()
    h = torch.tensor([-3.0, -1.0, -0.3, 0.0, 0.3, 1.0, 3.0]).unsqueeze(1).expand(-1, 50)
    raw = made(h).detach().mean(1)
    assert (raw[:3] > 0.3).all()
    assert (raw[:3] < 0.61).all()
    assert raw[3] == pytest.approx(0.6)
    assert (raw[4:] > 0.8).all()
    assert (raw[3:].diff() > 0).all()


def test_only_the_layer_function_sees_its_neighbours():
    for kind, sees in (("mlp", False), ("linear", False), ("layer_mlp", True)):
        gate = function(kind, 3)
        before, after = gate(torch.tensor([0.5, 0.5, 0.5])), gate(torch.tensor([0.5, 0.5, 2.0]))
        assert (before[0] != after[0]).item() is sees
        assert before[2] != after[2]


def test_unknown_names_get_hints():
    with pytest.raises(RankoneError, match=r"Unknown importance function 'mpl'. Did you mean 'mlp'"):
        function("mpl", 2)
    with pytest.raises(RankoneError, match=r"'mlp' has no option 'd_gat'. Did you mean 'd_gate'"):
        function("mlp", 2, d_gat=3)
    with pytest.raises(RankoneError, match=r"'linear' has no option 'd_gate'. It takes no options"):
        function("linear", 2, d_gate=3)
    with pytest.raises(RankoneError, match=r"d_gate is 0; it must be a whole number from 1"):
        function("mlp", 2, d_gate=0)
    with pytest.raises(RankoneError, match=r"d_gate is 4.5; it must be a whole number"):
        function("mlp", 2, d_gate=4.5)
    with pytest.raises(RankoneError, match=r"Unknown mask source 'rounde'. Did you mean 'rounded'"):
        SOURCES.get("rounde")


def test_a_user_can_register_a_function():
    @register_importance("always")
    class Always(ImportanceFunction):
        def __init__(self, C, generator, *, value=1.0):
            super().__init__()
            self.value = value

        def forward(self, h):
            return torch.full_like(h, self.value)

    try:
        assert function("always", 2, value=0.5)(torch.zeros(2)).tolist() == [0.5, 0.5]
    finally:
        del IMPORTANCES["always"]


def test_mask_sources():
    raw = torch.tensor([[-1.0, 0.4, 0.6, 2.0]]).expand(2000, 4)
    draw = Draw({"layer": raw}, lambda layer: 7)
    masks = {name: SOURCES[name](draw)["layer"].values for name in SOURCES if name != "adversarial"}
    assert masks["ones"].min() == 1
    assert masks["zero"].max() == 0
    assert masks["importance"][0].tolist() == pytest.approx([0, 0.4, 0.6, 1])
    assert masks["rounded"][0].tolist() == [0, 0, 1, 1]
    stochastic = masks["stochastic"]
    assert stochastic.amin(0).tolist() == pytest.approx([-0.01, 0.4, 0.6, 1], abs=0.01)
    assert stochastic.amax(0).tolist() == pytest.approx([1, 1, 1, 1], abs=0.01)
    assert stochastic.mean(0).tolist() == pytest.approx([0.495, 0.7, 0.8, 1], abs=0.02)


def test_a_function_may_see_all_layers_and_their_inputs(tmp_path):
    """It is trained, saved and loaded like any other, and reads what the clean pass shows of every
    layer."""

    @register_importance("joint")
    class Joint(JointImportance):
        def __init__(self, shapes, generator, *, scale=1.0):
            super().__init__()
            self.scale = scale
            width = sum(shape.d_in for shape in shapes.values())
            self.sizes = {name: shape.C for name, shape in shapes.items()}
            self.w = torch.nn.Parameter(torch.randn(width, sum(self.sizes.values()), generator=generator))

        def forward(self, layers):
            inputs = torch.cat([seen.vectors() for seen in layers.values()], -1)
            raw = self.scale * inputs @ self.w
            return dict(zip(self.sizes, raw.split(list(self.sizes.values()), -1), strict=True))

    try:
        target = small_mlp()
        config = {"steps": 5, "importance": {"kind": "joint", "options": {"scale": 0.5}}}
        result = rankone.decompose(target, uniform(), {"0": 5, "2": 7}, config)
        assert "importance.w" in result.model.trained()
        x = torch.rand(3, 4)
        hidden = torch.relu(target[0](x))
        expected = (0.5 * torch.cat([x, hidden], -1) @ result.model.importance.w).clamp(0, 1)
        torch.testing.assert_close(result.importances(x)["0"], expected[:, :5])
        torch.testing.assert_close(result.importances(x)["2"], expected[:, 5:])
        again = rankone.load(result.save(tmp_path / "d"), target)
        assert torch.equal(again.model.importance.w, result.model.importance.w)
        with pytest.raises(RankoneError, match=r"'joint' has no option 'scal'. Did you mean 'scale'"):
            make_importance("joint", {"scal": 1.0}, {"0": LayerShape(2, 2)}, 0)
    finally:
        del IMPORTANCES["joint"]
