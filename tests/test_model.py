"""DecomposedModel on arbitrary modules: nothing is altered, and every refusal names the thing."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

import rankone
from conftest import small_mlp
from rankone import DecomposedModel, RankoneError
from rankone.data import call_with
from rankone.files import fingerprint
from rankone.masks import Mask
from rankone.naming import choose_layers


def snapshot(module: nn.Module):
    instance = {name: set(m.__dict__) for name, m in module.named_modules()}
    return (
        fingerprint(module),
        instance,
        [p.grad for p in module.parameters()],
        [p.requires_grad for p in module.parameters()],
    )


def test_the_target_is_not_altered():
    target = small_mlp()
    before = snapshot(target)
    x = torch.randn(8, 4)
    output = target(x)
    config = rankone.DecompositionConfig(steps=3)
    rankone.decompose(target, [x], {"*": 5}, config)
    assert snapshot(target) == before
    assert torch.equal(target(x), output)


def test_the_target_is_restored_after_an_exception():
    class Fails(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = nn.Linear(3, 3)
            self.fail = False

        def forward(self, x):
            y = self.a(x)
            if self.fail:
                raise RuntimeError("as planned")
            return y

    target = Fails().eval()
    model = DecomposedModel(target, {"a": 2})
    before = snapshot(target)
    target.fail = True
    for attempt in (
        lambda: model.clean(torch.zeros(1, 3)),
        lambda: model.masked(torch.zeros(1, 3), {"a": Mask(torch.ones(2))}),
    ):
        with pytest.raises((RuntimeError, RankoneError), match="as planned"):
            attempt()
        assert snapshot(target) == before


def test_a_forward_of_the_users_own_is_put_back():
    target = small_mlp()
    original = target[0].forward
    target[0].forward = lambda x: original(x)
    mine = target[0].__dict__["forward"]
    model = DecomposedModel(target, {"0": 3})
    x = torch.randn(2, 4)
    torch.testing.assert_close(model.clean(x).output, target(x))
    model.masked(x, {"0": Mask(torch.ones(3))})
    assert target[0].__dict__["forward"] is mine


class Scaled(nn.Embedding):
    """A subclass that does more than its parent, as some language models' embeddings do."""

    def forward(self, input):
        return 10 * super().forward(input)


def test_layers_that_do_more_than_their_matrix_are_refused():
    patched = small_mlp()
    original = patched[0].forward
    patched[0].forward = lambda x: 2 * original(x)
    with pytest.raises(RankoneError, match=r"Layer '0' \(Linear\) does not just multiply by its matrix"):
        DecomposedModel(patched, {"0": 3}).clean(torch.randn(2, 4))
    with pytest.raises(
        RankoneError, match=r"Layer '0' \(Scaled\) does not just multiply.*register an Adapter"
    ):
        DecomposedModel(nn.Sequential(Scaled(5, 3)), {"0": 3}).clean(torch.tensor([1, 2]))


def test_a_stock_transformer_layer_is_seen_through_its_fast_path():
    target = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True).eval()
    model = DecomposedModel(target, {"linear*": 4})
    assert model.importances(torch.randn(2, 3, 8))["linear1"].shape == (2, 3, 4)
    assert torch.backends.mha.get_fastpath_enabled()


def test_activations_that_work_in_place():
    target = nn.Sequential(nn.Linear(4, 6), nn.ReLU(inplace=True), nn.Linear(6, 4)).eval()
    plain = nn.Sequential(target[0], nn.ReLU(), target[2]).eval()
    config = rankone.DecompositionConfig(steps=3)
    histories = [rankone.decompose(m, [torch.ones(5, 4)], {"*": 5}, config).history for m in (target, plain)]
    assert histories[0] == histories[1]


def test_inputs_that_the_target_overwrites_are_kept():
    class InPlace(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = nn.Linear(3, 3)

        def forward(self, x):
            x = x + 0
            x += self.a(x)
            return x

    x = torch.randn(4, 3)
    assert torch.equal(DecomposedModel(InPlace(), {"a": 2}).clean(x).inputs["a"], x)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64], ids=str)
def test_other_precisions_train_like_single(dtype):
    """Factors stay in at least single precision, and row weights may be of another type than the model."""

    def final(kind):
        def data(generator):
            return rankone.WeightedBatch(torch.rand(32, 4, generator=generator).to(kind), torch.ones(32))

        config = rankone.DecompositionConfig(steps=60, optimizer={"lr": 1e-2})
        decomposition = rankone.decompose(small_mlp().to(kind), data, {"*": 6}, config)
        return decomposition.history[-1]["loss"]["total"], decomposition.components("0").U.dtype

    single, _ = final(torch.float32)
    other, kept = final(dtype)
    assert kept == (torch.float64 if dtype == torch.float64 else torch.float32)
    # Double precision draws other random numbers, so it trains alike but not the same.
    assert other == pytest.approx(single, rel=1.0 if dtype == torch.float64 else 0.1)


def test_exact_subcomponents_reproduce_the_target_and_hooks_still_fire():
    target = small_mlp().double()
    model = DecomposedModel(target, {"*": 4})
    for layer in model.layers.values():
        left, size, right = torch.linalg.svd(layer.matrix(), full_matrices=False)
        with torch.no_grad():
            layer.subcomponents.U.copy_(left * size)
            layer.subcomponents.V.copy_(right)
    seen = []
    target[2].register_forward_hook(lambda m, i, o: seen.append(o))
    x = torch.randn(5, 4, dtype=torch.float64)
    torch.testing.assert_close(model(x), target(x))
    assert len(seen) == 2


def test_batches_as_tensor_tuple_and_dict_and_outputs_that_need_a_getter():
    class Pair(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = nn.Linear(3, 2)

        def forward(self, x, scale=1.0):
            return {"logits": self.a(input=x) * scale, "other": None}

    target = Pair().eval()
    x, scale = torch.randn(4, 3), torch.tensor(2.0)
    expected = target(x, scale)["logits"]
    for batch in ((x, scale), [x, scale], {"x": x, "scale": scale}):
        for getter in ("logits", lambda result: result["logits"]):
            model = DecomposedModel(target, {"a": 2}, output=getter)
            assert torch.equal(model.clean(batch).output, expected)
    attribute = DecomposedModel(Wrapped(lambda y: SimpleNamespace(logits=y)), {"a": 2}, output="logits")
    assert attribute.clean(x).output.shape == (4, 2)
    assert DecomposedModel(Wrapped(lambda y: (None, y)), {"a": 2}, output=1).clean(x).output.shape == (4, 2)


class Wrapped(nn.Module):
    def __init__(self, wrap):
        super().__init__()
        self.a = nn.Linear(3, 2)
        self.wrap = wrap
        self.eval()

    def forward(self, x):
        return self.wrap(self.a(x))


def test_outputs_without_a_getter_are_explained():
    with pytest.raises(RankoneError, match=r"returns a tuple, but a tensor is needed.*output='logits'"):
        DecomposedModel(Wrapped(lambda y: (y,)), {"a": 2}).clean(torch.zeros(1, 3))
    with pytest.raises(
        RankoneError, match=r"output='logit': the target returns a dict.*Did you mean 'logits'"
    ):
        DecomposedModel(Wrapped(lambda y: {"logits": y}), {"a": 2}, output="logit").clean(torch.zeros(1, 3))
    with pytest.raises(RankoneError, match=r"output=0: the target returns a Tensor, which has no element 0"):
        DecomposedModel(Wrapped(lambda y: y), {"a": 2}, output=0).clean(torch.zeros(1, 3))
    with pytest.raises(RankoneError, match=r"output=5: the target returns a tuple of 1"):
        DecomposedModel(Wrapped(lambda y: (y,)), {"a": 2}, output=5).clean(torch.zeros(1, 3))


@pytest.mark.parametrize("lead", [(6,), (2, 3), (2, 3, 2)], ids=str)
def test_any_number_of_leading_dimensions(lead):
    decomposition = rankone.decompose(
        small_mlp(), [torch.randn(*lead, 4)], {"0": 3, "2": 7}, rankone.DecompositionConfig(steps=2)
    )
    importances = decomposition.importances(torch.randn(*lead, 4))
    assert importances["0"].shape == (*lead, 3)
    assert importances["2"].shape == (*lead, 7)


def test_patterns():
    target = nn.ModuleDict(
        {
            "block": nn.ModuleDict({"fc1": nn.Linear(2, 3), "act": nn.ReLU(), "norm": nn.LayerNorm(3)}),
            "head": nn.Linear(3, 2),
        }
    )
    assert choose_layers(target, {"block.*": 5, "head": 7}) == {"block.fc1": 5, "head": 7}
    assert choose_layers(target, {"*": 4}) == {"block.fc1": 4, "head": 4}


@pytest.mark.parametrize(
    ("patterns", "message"),
    [
        ({}, "No layers were chosen"),
        ({"block.fc": 2}, r"'block.fc' matches no module in ModuleDict. Did you mean 'block.fc1'"),
        ({"nothing*": 2}, r"'nothing\*' matches no module"),
        ({"block.a*": 2}, r"matches 'block.act', which has no weight matrix, in ModuleDict"),
        ({"block.*": 2, "*fc1": 3}, r"'block.fc1' is matched twice, by the patterns 'block.\*' and '\*fc1'"),
        ({"head": 0}, r"Pattern 'head' asks for C = 0.*at least 1"),
        ({"head": 2.5}, r"C = 2.5"),
        ({"head": True}, r"C = True"),
    ],
)
def test_patterns_that_cannot_be_meant(patterns, message):
    target = nn.ModuleDict(
        {"block": nn.ModuleDict({"fc1": nn.Linear(2, 3), "act": nn.ReLU()}), "head": nn.Linear(3, 2)}
    )
    with pytest.raises(RankoneError, match=message):
        choose_layers(target, patterns)


def test_second_names_and_bare_layers():
    shared = nn.Linear(2, 2)
    with pytest.raises(RankoneError, match=r"'1' is a second name of the module '0'. Use '0'"):
        choose_layers(nn.Sequential(shared, shared), {"1": 2})
    with pytest.raises(RankoneError, match=r"bare Linear.*nn.Sequential\(model\)"):
        choose_layers(nn.Linear(2, 2), {"*": 2})


class Twisted(nn.Module):
    """A layer with a matrix, of a type that nobody knows."""

    def __init__(self):
        super().__init__()
        self.kernel = nn.Parameter(torch.eye(2))

    def forward(self, x):
        return x @ self.kernel


def test_unsupported_layers_are_never_skipped():
    with pytest.raises(RankoneError, match="Layer '0' is a Twisted"):
        DecomposedModel(nn.Sequential(Twisted(), nn.Linear(2, 2)), {"*": 3})
    with pytest.raises(RankoneError, match="Layer '0' is a ReLU"):
        DecomposedModel(nn.Sequential(nn.ReLU(), nn.Linear(2, 2)), {"0": 3})


def test_a_layer_that_is_never_called():
    class Idle(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(3, 3), nn.Linear(3, 3)

        def forward(self, x):
            return self.a(x) + x @ self.b.weight

    with pytest.raises(RankoneError, match=r"'b' was chosen, but .* never calls it"):
        DecomposedModel(Idle().eval(), {"*": 4}).clean(torch.randn(2, 3))


@pytest.mark.parametrize(
    ("module", "word"),
    [
        (nn.Dropout(0.1), "draws random numbers"),
        (nn.BatchNorm1d(4), "changes its statistics"),
        (nn.MultiheadAttention(4, 2, dropout=0.1), "draws random numbers"),
    ],
    ids=["dropout", "batchnorm", "attention"],
)
def test_training_mode_is_refused_where_it_matters(module, word):
    target = nn.Sequential(nn.Linear(4, 4), module)
    with pytest.raises(
        RankoneError,
        match=rf"training mode and its layer '1' \({type(module).__name__}\) {word}.*model.eval\(\)",
    ):
        DecomposedModel(target, {"0": 2})
    DecomposedModel(target.eval(), {"0": 2})
    DecomposedModel(nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.0)), {"0": 2})


class Functional(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(4, 4)

    def forward(self, x):
        return nn.functional.dropout(self.a(x), 0.5, self.training)


def test_randomness_and_state_that_no_type_shows():
    x = torch.randn(3, 4)
    with pytest.raises(RankoneError, match=r"different outputs for the same batch.*model.eval\(\)"):
        DecomposedModel(Functional(), {"a": 2}).clean(x)
    target = nn.Sequential(
        nn.Linear(4, 4), nn.Unflatten(1, (2, 2)), nn.InstanceNorm1d(2, track_running_stats=True)
    )
    before = fingerprint(target)
    with pytest.raises(
        RankoneError, match=r"changes its own state when it is run .*running_mean.* Call model.eval\(\)"
    ):
        DecomposedModel(target, {"0": 2}).clean(x)
    assert fingerprint(target) == before


def test_going_back_to_training_mode_is_noticed():
    target = Functional().eval()
    decomposition = rankone.decompose(
        target, [torch.randn(3, 4)], {"a": 2}, rankone.DecompositionConfig(steps=1)
    )
    target.train()
    with pytest.raises(RankoneError, match=r"model.eval\(\)"):
        decomposition.importances(torch.randn(3, 4))


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        (
            torch.tensor([[1.0, float("nan"), 0, 0]]),
            r"batch of shape \(1, 4\) holds 1 NaN and 0 infinite values",
        ),
        ((torch.tensor([[1.0, float("inf"), 0, 0]]),), r"batch's element 0 .*1 infinite"),
        ({"input": torch.full((2, 4), float("nan"))}, r"batch's entry 'input' .*8 NaN"),
        (torch.zeros(0, 4), r"batch is empty: its shape is \(0, 4\)"),
        (
            rankone.WeightedBatch(torch.zeros(2, 4), torch.tensor([-1.0, 2.0])),
            "weights of a WeightedBatch must be non-negative",
        ),
        (rankone.WeightedBatch(torch.zeros(3, 4), torch.ones(2)), r"3 rows and 2 weights"),
    ],
)
def test_bad_batches(batch, message):
    with pytest.raises(RankoneError, match=message):
        rankone.decompose(small_mlp(), [batch], {"0": 3}, rankone.DecompositionConfig(steps=1))


def test_labels_in_the_data_are_explained():
    with pytest.raises(
        RankoneError, match=r"A batch is a tuple of 2, which the model does not take.*leave labels out"
    ):
        call_with(small_mlp(), (torch.zeros(1, 4), torch.zeros(1)))
    with pytest.raises(RankoneError, match=r"A batch is a dict with x, y"):
        call_with(small_mlp(), {"x": torch.zeros(1, 4), "y": torch.zeros(1)})


def test_a_batch_of_another_type():
    with pytest.raises(
        RankoneError, match=r"A batch is a str; expected a tensor, a tuple .*a dict .*WeightedBatch"
    ):
        call_with(small_mlp(), "text")


def test_masks_of_the_wrong_width():
    model = DecomposedModel(small_mlp(), {"0": 3})
    with pytest.raises(RankoneError, match=r"mask for layer '0' has 4 entries.*C = 3"):
        model.masked(torch.zeros(1, 4), {"0": Mask(torch.ones(4))})
    with pytest.raises(RankoneError, match="No decomposed layer is called '2'"):
        model.masked(torch.zeros(1, 4), {"2": Mask(torch.ones(4))})


class TestTied:
    def two(self, same: bool = True, transpose: bool = True) -> nn.Sequential:
        a, b = nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False)
        if same:
            b.weight = nn.Parameter(a.weight.detach().T.clone() if transpose else a.weight.detach().clone())
        return nn.Sequential(a, b)

    @pytest.mark.parametrize("transpose", [True, False])
    def test_one_parameter_for_both(self, transpose):
        model = DecomposedModel(self.two(transpose=transpose), {"*": 4}, tied={"1": "0"})
        assert {n for n in model.named_tensors() if "importance" not in n} == {"0.U", "0.V"}
        first, second = model.layers["0"].subcomponents, model.layers["1"].subcomponents
        expected = first.weight().T if transpose else first.weight()
        assert torch.equal(second.weight(), expected)
        assert len(list(model.parameters())) == 2 + 2 * 4

    def test_untied_by_choice(self):
        assert "1.U" in DecomposedModel(self.two(), {"*": 4}).named_tensors()

    @pytest.mark.parametrize(
        ("same", "C", "tied", "message"),
        [
            (False, {"*": 4}, {"1": "0"}, "neither equal nor each other's transpose"),
            (True, {"0": 4, "1": 5}, {"1": "0"}, r"'1' has C = 5 but is tied to '0', which has C = 4"),
            (True, {"*": 4}, {"1": "2"}, r"tied names the layer '2', which is not decomposed"),
            (True, {"*": 4}, {"1": "1"}, r"which is itself tied"),
        ],
    )
    def test_ties_that_cannot_be(self, same, C, tied, message):
        with pytest.raises(RankoneError, match=message):
            DecomposedModel(self.two(same), C, tied=tied)


def test_integer_weights_are_refused():
    module = nn.Sequential(nn.Linear(2, 2, bias=False))
    module[0].weight = nn.Parameter(torch.ones(2, 2, dtype=torch.int8), requires_grad=False)
    with pytest.raises(RankoneError, match=r"'0' has a weight of type torch.int8"):
        DecomposedModel(module, {"0": 2})
