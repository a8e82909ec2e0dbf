"""Finding layers, ties, what fine-tuning changed, quantised and low-rank layers."""

import copy

import pytest
import torch
from torch import Tensor, nn

import rankone
from rankone import DecomposedModel, RankoneError
from rankone.consolidate import observe
from rankone.files import fingerprint
from rankone.finetune import difference
from rankone.found_layers import find_layers
from rankone.masks import Mask
from rankone.naming import Matrices, choose_layers
from rankone.targets.tms import TMS


class Mixed(nn.Module):
    """Layers of many kinds; some cannot be decomposed."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(4, 4, 3, padding=1)
        self.attn = nn.MultiheadAttention(4, 2, batch_first=True)
        self.norm = nn.LayerNorm((5, 4))
        self.idle = nn.Linear(4, 4)
        self.doubled = Doubled(4, 4)
        self.head = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv(x.transpose(1, 2)).transpose(1, 2)
        x = self.norm(x + self.attn(x, x, x)[0])
        return self.head(self.doubled(x))


class Doubled(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return 2 * super().forward(input)


def test_every_layer_that_can_be_decomposed_is_found():
    target, x = Mixed().eval(), torch.randn(2, 5, 4)
    before = fingerprint(target), [set(vars(m)) for m in target.modules()]
    found = find_layers(target, x)
    assert (fingerprint(target), [set(vars(m)) for m in target.modules()]) == before
    attention = {f"attn.{n}": (4, 4) for n in ("q", "k", "v", "out_proj")}
    assert found.shapes == {"conv": (4, 12), **attention, "head": (2, 4)}
    assert list(found.shapes) == ["conv", "attn.q", "attn.k", "attn.v", "attn.out_proj", "head"]
    assert set(found.left_out) == {"norm", "idle", "doubled"}
    assert "LayerNorm, which rankone does not know" in found.left_out["norm"]
    assert "does not call it" in found.left_out["idle"]
    assert "does more than multiply" in found.left_out["doubled"]
    model = DecomposedModel(target, dict.fromkeys(found.shapes, 3))
    assert {n: g.shape[-1] for n, g in model.importances(x).items()} == dict.fromkeys(found.shapes, 3)


def test_declared_matrices_are_found():
    class Uses(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.W = nn.Parameter(torch.randn(4, 6))
            self.qkv = nn.Linear(6, 9)

        def forward(self, x: Tensor) -> Tensor:
            return self.qkv(x @ self.W)

    declared = Matrices(parameters={"W": "x @ W"}, fused={"qkv": ["q", "k", "v"]}, biases=["qkv.*"])
    undeclared = find_layers(Uses(), torch.randn(2, 4))
    assert undeclared.shapes == {"qkv": (9, 6)}
    assert undeclared.left_out == {"W": "a plain parameter: say in matrices.parameters how it is used"}
    found = find_layers(Uses(), torch.randn(2, 4), declared)
    assert not found.left_out
    assert found.shapes == {"W": (6, 4), "qkv.q": (3, 6), "qkv.k": (3, 6), "qkv.v": (3, 6)}


def test_a_module_with_a_plain_parameter_says_what_to_declare():
    class Multiplies(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.W = nn.Parameter(torch.randn(4, 4))

        def forward(self, x: Tensor) -> Tensor:
            return x @ self.W

    target = nn.Sequential(nn.Linear(4, 4), Multiplies())
    with pytest.raises(RankoneError, match=r"Layer '1' is a Multiplies.*'1.W' .*matrices.parameters"):
        DecomposedModel(target, {"*": 2})
    declared = Matrices(parameters={"1.W": "x @ W"})
    assert list(DecomposedModel(target, {"*": 2}, matrices=declared).layers) == ["0", "1.W"]
    assert set(find_layers(target, torch.randn(2, 4)).left_out) == {"1"}


def test_a_batch_that_does_not_fit():
    with pytest.raises(RankoneError, match=r"cannot be run on a batch of \(2, 3\)"):
        find_layers(nn.Sequential(nn.Linear(4, 4)), torch.randn(2, 3))


def test_layers_that_are_called_several_times_need_no_name():
    class Again(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.cell = nn.Conv1d(2, 2, 3, padding=1), nn.GRUCell(2, 3)

        def forward(self, x: Tensor) -> Tensor:
            x, state = torch.relu(self.conv(torch.relu(self.conv(x)))), None
            for t in range(x.shape[-1]):
                state = self.cell(x[..., t], state)
            return state

    torch.manual_seed(0)
    target, x = Again().eval(), torch.randn(20, 2, 4)
    result = rankone.decompose(target, [x], config={"steps": 5})
    importances = result.importances(x)
    assert {n: tuple(g.shape[:-1]) for n, g in importances.items()} == {
        "conv": (20, 2, 4), "cell.ih": (20, 4), "cell.hh": (20, 4)
    }  # fmt: skip
    for name, seen in observe(result.model, [x]).items():
        assert seen.inputs.shape[0] == importances[name][..., 0].numel()


class TestTies:
    def test_a_language_models_embedding_and_head(self):
        class Tied(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.wte, self.head = nn.Embedding(7, 4), nn.Linear(4, 7, bias=False)
                self.head.weight = self.wte.weight

            def forward(self, x: Tensor) -> Tensor:
                return self.head(self.wte(x))

        target = Tied()
        model = DecomposedModel(target, {"*": 3})
        assert model.tied == {"head": "wte"}
        assert torch.equal(
            model.layers["head"].subcomponents.weight(), model.layers["wte"].subcomponents.weight().T
        )
        assert find_layers(target, torch.tensor([[1, 2]])).tied == {"head": "wte"}
        assert DecomposedModel(target, {"*": 3}, tied={}).tied == {}
        assert DecomposedModel(target, {"wte": 3, "head": 4}).tied == {}

    def test_the_same_weight_twice_and_a_transpose_that_is_no_parameter(self):
        a, b = nn.Linear(3, 3), nn.Linear(3, 3)
        b.weight = a.weight
        assert DecomposedModel(nn.Sequential(a, b), {"*": 2}).tied == {"1": "0"}
        assert DecomposedModel(TMS(4, 2), {"*": 2}).tied == {"unembed": "embed"}

    def test_equal_numbers_are_no_tie(self):
        a, b = nn.Linear(3, 3), nn.Linear(3, 3)
        b.load_state_dict(a.state_dict())
        assert DecomposedModel(nn.Sequential(a, b), {"*": 2}).tied == {}

    def test_slices_of_one_packed_weight_are_no_tie(self):
        target = nn.TransformerEncoderLayer(4, 2, 4, batch_first=True).eval()
        assert DecomposedModel(target, {"self_attn.*": 2}).tied == {}

    def test_a_saved_result_has_its_ties(self, tmp_path):
        a, b = nn.Linear(3, 3), nn.Linear(3, 3)
        b.weight = a.weight
        target = nn.Sequential(a, nn.ReLU(), b).eval()
        result = rankone.decompose(
            target, [torch.randn(4, 3)], {"*": 3}, rankone.DecompositionConfig(steps=1)
        )
        loaded = rankone.load(result.save(tmp_path / "kept"), target)
        assert loaded.model.tied == {"2": "0"}


@pytest.mark.filterwarnings("ignore")  # torch announces that quantisation moves to another package
def test_a_quantised_layer_is_its_dequantised_matrix():
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)).eval()
    target = torch.ao.quantization.quantize_dynamic(plain, {nn.Linear}, dtype=torch.qint8)
    assert choose_layers(target, {"*": 3}) == {"0": 3, "2": 3}
    model = DecomposedModel(target, {"0": 8, "2": 4})
    W = model.layers["0"].matrix()
    assert torch.equal(W, target[0].weight().dequantize())
    assert 0 < (W - plain[0].weight).abs().max() < 0.01
    x = torch.randn(5, 8)
    clean = model.clean(x)
    hidden = torch.relu(x @ W.T + target[0].bias())
    torch.testing.assert_close(clean.output, hidden @ model.layers["2"].matrix().T + target[2].bias())
    assert find_layers(target, x).shapes == {"0": (16, 8), "2": (4, 16)}


def test_weight_norm_by_hooks():
    with pytest.warns(FutureWarning):
        target = nn.Sequential(nn.utils.weight_norm(nn.Linear(4, 3)))
    x = torch.randn(5, 4)
    model = DecomposedModel(target, {"*": 3})
    torch.testing.assert_close(model.clean(x).output, target(x))
    torch.testing.assert_close(model.layers["0"].matrix(), target[0].weight.detach())


class TestDifference:
    def pair(self) -> tuple[nn.Module, nn.Module]:
        torch.manual_seed(0)
        base = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 5), nn.Conv1d(3, 3, 1), nn.LayerNorm(5))
        tuned = nn.Sequential(
            nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 5), nn.Conv1d(3, 3, 1), nn.LayerNorm(5)
        )
        tuned.load_state_dict(base.state_dict())
        with torch.no_grad():
            tuned[2].weight += torch.outer(torch.randn(5), torch.randn(6))
            tuned[2].bias += 1
            tuned[4].weight += 0.5
        return base.eval(), tuned.eval()

    def test_it_is_the_tuned_network(self):
        base, tuned = self.pair()
        before = fingerprint(base), fingerprint(tuned)
        target = difference(base, tuned)
        x = torch.randn(2, 3, 4)
        torch.testing.assert_close(target(x), tuned(x))
        torch.testing.assert_close(target[2].change.weight, tuned[2].weight - base[2].weight)
        assert isinstance(target[0], nn.Linear)  # what was not changed is not split
        assert (fingerprint(base), fingerprint(tuned)) == before

    def test_without_the_change_the_base_is_left(self):
        base, tuned = self.pair()
        x = torch.randn(2, 3, 4)
        result = rankone.decompose_difference(base, tuned, [x], config=rankone.DecompositionConfig(steps=2))
        assert result.layers == ["2.change"]
        assert result.model.layers["2.change"].C == 2  # twice its rank
        without = result.ablated({"2.change": []})(x)
        with torch.no_grad():
            tuned[2].weight.copy_(base[2].weight)
        torch.testing.assert_close(without, tuned(x))  # norms and biases belong to the tuned network

    def test_names_are_those_of_the_network(self, tmp_path):
        base, tuned = self.pair()
        config = rankone.DecompositionConfig(steps=1)
        result = rankone.decompose_difference(base, tuned, [torch.randn(2, 3, 4)], {"2": 3}, config)
        loaded = rankone.load(result.save(tmp_path / "kept"), difference(base, tuned))
        assert loaded.layers == ["2.change"]
        with pytest.raises(RankoneError, match=r"'0' matches no layer that was changed.*'2'"):
            rankone.decompose_difference(base, tuned, [torch.randn(2, 3, 4)], {"0": 3}, config)

    def test_shared_weights_stay_shared(self):
        class Tied(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.wte, self.head = nn.Embedding(7, 4), nn.Linear(4, 7, bias=False)
                self.head.weight = self.wte.weight

            def forward(self, x: Tensor) -> Tensor:
                return self.head(self.wte(x))

        base, tuned = Tied(), Tied()
        target, x = difference(base, tuned), torch.tensor([[1, 2, 3]])
        torch.testing.assert_close(target(x), tuned(x))
        assert DecomposedModel(target, {"*.change": 3}).tied == {"head.change": "wte.change"}

    def test_what_is_no_difference(self):
        base, _ = self.pair()
        with pytest.raises(RankoneError, match="same matrices as its base"):
            difference(base, base)
        with pytest.raises(RankoneError, match=r"different architectures: only the base has '2.bias'"):
            difference(base, nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 5, bias=False)))
        other = nn.Sequential(
            nn.Linear(4, 7), nn.ReLU(), nn.Linear(7, 5), nn.Conv1d(3, 3, 1), nn.LayerNorm(5)
        )
        with pytest.raises(RankoneError, match=r"'0.weight' has shape \(6, 4\) in the base and \(7, 4\)"):
            difference(base, other)
        a, b = (nn.Sequential(nn.MultiheadAttention(4, 2)) for _ in range(2))
        with pytest.raises(RankoneError, match=r"a matrix of a MultiheadAttention that was changed"):
            difference(a, b)


class TestLowRankAdapters:
    def tuned(self, **kwargs):
        peft = pytest.importorskip("peft")
        torch.manual_seed(0)
        base = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 5)).eval()
        config = peft.LoraConfig(r=2, target_modules=["0", "2"], init_lora_weights=False, **kwargs)
        return base, peft.get_peft_model(copy.deepcopy(base), config).eval()

    def test_the_change_is_a_layer(self):
        base, tuned = self.tuned()
        x = torch.randn(3, 4)
        found = find_layers(tuned, x)
        assert [n.removeprefix("base_model.model.") for n in found.shapes] == [
            "0.base_layer",
            "0.change",
            "2.base_layer",
            "2.change",
        ]
        model = DecomposedModel(tuned, {"*.change": 3})
        torch.testing.assert_close(model.clean(x).output, tuned(x))
        assert torch.linalg.matrix_rank(model.layers["base_model.model.0.change"].matrix()) == 2
        none = {name: Mask(torch.zeros(3)) for name in model.layers}
        torch.testing.assert_close(model.masked(x, none), base(x))

    def test_the_difference_from_the_base(self):
        base, tuned = self.tuned()
        x = torch.randn(3, 4)
        expected = tuned(x)
        target = difference(base, tuned)
        torch.testing.assert_close(target(x), expected, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(tuned(x), expected)
        result = rankone.decompose_difference(base, tuned, [x], config=rankone.DecompositionConfig(steps=1))
        assert {n: result.model.layers[n].C for n in result.layers} == {"0.change": 4, "2.change": 4}

    def test_a_base_into_which_peft_put_its_matrices(self):
        base, tuned = self.tuned()
        inside = tuned.get_base_model()  # what `get_peft_model(base, ...)` makes of its argument
        x = torch.randn(3, 4)
        target = difference(inside, tuned)
        torch.testing.assert_close(target(x), tuned(x), rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(target[0].base(x), base[0](x))
        torch.testing.assert_close(difference(base, inside)(x), tuned(x), rtol=1e-4, atol=1e-5)

    def test_what_is_refused(self):
        _, tuned = self.tuned()
        tuned.merge_adapter()
        with pytest.raises(RankoneError, match=r"merged into the base. Call unmerge_adapter"):
            DecomposedModel(tuned, {"*.change": 2})
        _, tuned = self.tuned(use_dora=True)
        with pytest.raises(RankoneError, match="DoRA rescales the base"):
            DecomposedModel(tuned, {"*.change": 2})
