"""Padding is no data: the same sentences with more of it give the same numbers, everywhere."""

import pytest
import torch
from torch import Tensor, nn
from transformers import BertConfig, BertForSequenceClassification, BertModel

import rankone
from rankone import DecomposedModel, RankoneError, WeightedBatch
from rankone.balance import in_units_of_data
from rankone.compare import compare
from rankone.consolidate import observe
from rankone.data import batches, mean_over_data, row_weights, weights_for
from rankone.diagnose import diagnose
from rankone.evaluate import evaluate
from rankone.fast.step import FastStep
from rankone.losses import DIVERGENCES, LOSSES, mse
from rankone.room import chosen_layers
from rankone.step import Step

LENGTHS = torch.tensor([12, 7, 9, 3, 11, 5, 8, 10])


class Encoder(nn.Module):
    """Tokens and positions, one attention layer, an MLP; a vector for each token, or one for all."""

    def __init__(self, pooled: bool = False) -> None:
        super().__init__()
        self.pooled = pooled
        self.wte, self.wpe = nn.Embedding(20, 8), nn.Embedding(64, 8)
        self.attn = nn.MultiheadAttention(8, 2, batch_first=True)
        self.fc, self.head = nn.Linear(8, 12), nn.Linear(12, 4)

    def forward(self, tokens: Tensor) -> Tensor:
        padding = tokens == 0
        x = self.wte(tokens) + self.wpe(torch.arange(tokens.shape[1]))
        x = x + self.attn(x, x, x, key_padding_mask=padding, need_weights=False)[0]
        x = torch.relu(self.fc(x))
        if self.pooled:
            kept = ~padding.unsqueeze(-1)
            x = (x * kept).sum(1) / kept.sum(1)
        return self.head(x)


def encoder(*, pooled: bool = False) -> Encoder:
    torch.manual_seed(0)
    return Encoder(pooled).eval()


def sentences(width: int) -> Tensor:
    """The same eight sentences, padded with 0 to this many tokens."""
    tokens = torch.randint(1, 20, (8, 12), generator=torch.Generator().manual_seed(3))
    tokens = tokens * (torch.arange(12) < LENGTHS.unsqueeze(1))
    return nn.functional.pad(tokens, (0, width - 12))


def padded(width: int) -> WeightedBatch:
    return WeightedBatch(sentences(width), sentences(width) != 0)


def result_of(model: nn.Module, width: int = 12, *, positions: bool = True):
    config = {"steps": 30, "seed": 1, "init": "datapoints"}
    layers = {"wte": 6, "attn.*": 6, "fc": 6, "head": 6} | ({"wpe": 6} if positions else {})
    return rankone.decompose(model, [padded(width)], layers, config)


def close(a, b, tolerance=2e-5):
    assert a.keys() == b.keys()
    for name in a:
        if isinstance(a[name], dict):
            close(a[name], b[name], tolerance)
        else:
            assert a[name] == pytest.approx(b[name], rel=tolerance, abs=1e-7), name


@pytest.mark.parametrize("pooled", [False, True])
@pytest.mark.parametrize("engine", [Step, FastStep])
def test_losses_do_not_see_padding(pooled, engine):
    model = result_of(encoder(pooled=pooled)).model
    terms = {
        "importance_recon": LOSSES["importance_recon"](),
        "importance_minimality": LOSSES["importance_minimality"](p=0.9),
        "smooth_l0": LOSSES["smooth_l0"](),
        "frequency": LOSSES["frequency"](),
        "adversarial_recon": LOSSES["adversarial_recon"](steps=3),
    }
    found = {}
    for width in (12, 48):
        with engine.ready(model):
            _, values = engine(model, padded(width), terms, mse).total()
            gradients = torch.autograd.grad(sum(values.values()), model.factors())
        found[width] = values, gradients
    for name, value in found[12][0].items():
        torch.testing.assert_close(value, found[48][0][name], rtol=1e-4, atol=1e-8, msg=name)
    for a, b in zip(found[12][1], found[48][1], strict=True):
        assert (a - b).norm() <= 1e-3 * a.norm()
    plain = Step(model, sentences(48), terms, mse).total()[1]["importance_minimality"].item()
    assert plain != pytest.approx(values["importance_minimality"].item(), rel=0.05)


def test_stochastic_losses_see_padding_by_chance_alone():
    """Masks are drawn for every position; their mean is the same."""
    model = result_of(encoder()).model
    loss = LOSSES["stochastic_recon"](samples=60)
    with torch.no_grad():
        few, many = (float(loss.value(Step(model, padded(width), {}, mse))) for width in (12, 48))
    assert few == pytest.approx(many, rel=0.1)


@pytest.mark.parametrize("pooled", [False, True])
def test_measures_do_not_see_padding(pooled):
    result = result_of(encoder(pooled=pooled), positions=pooled)
    few, many = (evaluate(result, [padded(width)], n_batches=2) for width in (12, 48))
    close(few.l0, many.l0)
    assert few.alive == many.alive
    random = {"stochastic"}
    for a, b in ((few.relative, many.relative), (few.reconstruction, many.reconstruction)):
        close(*({name: v for name, v in of.items() if name not in random} for of in (a, b)), 1e-3)
    if not pooled:  # one divergence for each position of every layer
        assert few.well_tempered == pytest.approx(many.well_tempered, rel=1e-3)
    numbers = [diagnose(result, [padded(width)], n_batches=1).numbers for width in (12, 48)]
    for name in ("l0", "near_one", "unsure"):
        close(*(getattr(n, name) for n in numbers), 1e-3)
    for name in ("too_many", "split_pairs", "alive", "datapoints"):
        assert getattr(numbers[0], name) == getattr(numbers[1], name)


def test_tables_do_not_see_padding():
    result = result_of(encoder())
    part = result.alive["fc"][0]
    for width in (12, 48):
        data = [padded(width)]
        rows = result.examples("fc", part, data, count=100).rows
        assert len(rows) == int(LENGTHS.sum())
        assert all(position < LENGTHS[row] for _, _, row, (position,), _ in rows)
    few, many = (result.effect(drop={"fc": [part]}, data=[padded(width)]) for width in (12, 48))
    torch.testing.assert_close(torch.tensor(few.rows), torch.tensor(many.rows), rtol=1e-3, atol=1e-6)
    few, many = (result.importances_by("position", "fc", [padded(width)]) for width in (12, 48))
    assert many.head == few.head
    torch.testing.assert_close(torch.tensor(few.rows), torch.tensor(many.rows), rtol=1e-3, atol=1e-6)
    few, many = (compare(result, result, [padded(width)]) for width in (12, 48))
    assert few.layers["fc"].alive == many.layers["fc"].alive


def test_starts_and_units_do_not_see_padding():
    target = encoder()
    room = [chosen_layers(target, [padded(width)], None) for width in (12, 48)]
    assert room[0] == room[1]
    started = []
    for width in (12, 48):
        model = DecomposedModel(target, {"fc": 3, "wpe": 2}, init="datapoints")
        model.start_from_data(iter([padded(width)] * 2), 0)
        units = in_units_of_data(model, [padded(width)])
        seen = observe(model, [padded(width)])["fc"]
        assert len(seen.inputs) == int(LENGTHS.sum())
        started.append((model.layer("fc").subcomponents.V.detach(), units))
    torch.testing.assert_close(started[0][0], started[1][0], rtol=1e-3, atol=1e-5)
    close(started[0][1], started[1][1], 1e-4)


def bert(classes: bool = False) -> nn.Module:
    torch.manual_seed(0)
    small = BertConfig(
        vocab_size=30, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=24,
        num_labels=3, max_position_embeddings=64,
    )  # fmt: skip
    return (BertForSequenceClassification if classes else BertModel)(small).eval()


def tokenized(width: int) -> dict[str, Tensor]:
    tokens = sentences(width)
    return {"input_ids": tokens, "attention_mask": (tokens != 0).long()}


@pytest.mark.parametrize("classes", [False, True])
def test_the_attention_mask_of_a_dict_says_what_is_data(classes):
    """With embeddings of positions, whose one row serves all sentences."""
    output = "logits" if classes else "last_hidden_state"
    layers = {"*embeddings.*": 6, "*.0.*": 6}
    config = {"steps": 10, "faithfulness_warmup": {"steps": 0}, "init": "datapoints"}
    result = rankone.decompose(bert(classes), tokenized(12), layers, config, output=output)
    few, many = (evaluate(result, tokenized(width), n_batches=1) for width in (12, 48))
    close(few.l0, many.l0)
    assert few.alive == many.alive
    for name in ("importance", "sum", "attack_20", "union_16", "deletion"):
        assert few.relative[name] == pytest.approx(many.relative[name], rel=1e-3), name
    counted = evaluate(result, [WeightedBatch(tokenized(48), torch.ones(8))], n_batches=1)
    assert counted.l0 != pytest.approx(few.l0, rel=0.01)


def test_an_attention_mask_that_masks_nothing_changes_no_bit():
    tokens = sentences(12).clamp(min=1)
    whole = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}
    assert row_weights(whole) is None
    assert row_weights({"attention_mask": torch.zeros(2, 1, 3, 3)}) is None  # who attends to whom
    assert row_weights({"attention_mask": torch.tensor([[0.0, -1e9]])}) is None  # to be added
    assert row_weights(tokenized(12)).sum() == pytest.approx(1)
    with pytest.raises(RankoneError, match="attention_mask is 0 everywhere"):
        rankone.decompose(bert(), {**whole, "attention_mask": 0 * tokens}, config={"steps": 1}, output=0)


def test_layers_that_are_called_several_times():
    """Every call has the positions of the data; a call for each moment is one of them."""

    class Looped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.shared, self.rnn = nn.Linear(4, 4), nn.RNN(4, 4, batch_first=True, bidirectional=True)
            self.cut = nn.Linear(4, 4)

        def forward(self, x):
            for _ in range(3):
                x = torch.tanh(self.shared(x))
            return self.rnn(x)[0] + self.cut(x).repeat(1, 1, 2) + self.cut(x[:, :1]).repeat(1, 1, 2)

    x, mask = torch.rand(5, 3, 4), torch.tensor([[1, 1, 0]] * 4 + [[1, 1, 1]])
    layers = ["shared", "rnn.hh_l0", "rnn.hh_l0_reverse"]
    model = DecomposedModel(Looped().eval(), dict.fromkeys(layers, 2))
    step = Step(model, WeightedBatch(x, mask), {}, mse)
    of = {name: step.weights_of(name) * (33 if name == "shared" else 11) for name in layers}
    torch.testing.assert_close(of["shared"], mask.float().unsqueeze(1).expand(5, 3, 3))
    torch.testing.assert_close(of["rnn.hh_l0"], mask.float())
    torch.testing.assert_close(of["rnn.hh_l0_reverse"], mask.float().flip(1))
    step = Step(DecomposedModel(Looped().eval(), {"cut": 2}), WeightedBatch(x, mask), {}, mse)
    torch.testing.assert_close(16 * step.weights_of("cut"), torch.cat([mask.float(), torch.ones(5, 1)], 1))


def test_weights_of_other_shapes():
    weights = torch.tensor([[1.0, 2, 0], [3, 0, 0]])
    torch.testing.assert_close(weights_for(weights, (2, 3, 4)), weights.unsqueeze(-1).expand(2, 3, 4))
    assert weights_for(weights, (2,)).tolist() == [2, 3]
    assert weights_for(weights, (3,)).tolist() == [3, 2, 0]
    assert weights_for(weights, (1, 3)).tolist() == [[3, 2, 0]]
    assert weights_for(weights[:, 0], (1, 3)).tolist() == [[3, 3, 3]]
    assert float(mean_over_data(torch.tensor([[1.0, 2, 9], [3, 9, 9]]), weights / 6)) == pytest.approx(14 / 6)
    assert weights_for(weights, (3, 2)).equal(weights.T)
    for lead in ((), (4,), (2, 4)):
        with pytest.raises(
            RankoneError, match=r"weights of positions \(or an attention mask\) of shape \(2, 3\)"
        ):
            weights_for(weights, lead)


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        (WeightedBatch(torch.zeros(2, 3, 4), torch.zeros(2, 3)), "non-negative numbers with a positive sum"),
        (WeightedBatch(torch.zeros(2, 3, 4), torch.ones(3, 2)), "2 rows and 3 weights"),
        (
            WeightedBatch(torch.zeros(2, 3, 4), torch.ones(2, 5)),
            r"datapoints of shape \(2, 3\), but .* \(2, 5\)",
        ),
    ],
)
def test_masks_that_do_not_fit_are_said_so(batch, message):
    model = nn.Sequential(nn.Linear(4, 4)).eval()
    with pytest.raises(RankoneError, match=message):
        rankone.decompose(model, [batch], {"0": 3}, {"steps": 1})


def test_one_number_for_all_positions_is_refused():
    """A mean that a divergence takes itself has the padding in it."""
    with pytest.raises(RankoneError, match="one number per datapoint, rows first"):
        Step(
            DecomposedModel(encoder(), {"fc": 3}), padded(12), {}, lambda a, b: (a - b).square().mean()
        ).distance(torch.zeros(8, 12, 4))


@pytest.mark.parametrize("weighted", [False, True])
def test_all_datapoints_as_a_dict_or_with_weights(weighted):
    """Rows are drawn from all tensors alike."""
    n = 3000
    rows = {"x": torch.arange(n), "attention_mask": torch.ones(n, 4)}
    data = WeightedBatch(rows, torch.arange(n)) if weighted else rows
    drawn = next(batches(data, 0))
    inputs = drawn.inputs if weighted else drawn
    assert inputs["x"].shape == (1024,)
    assert inputs["attention_mask"].shape == (1024, 4)
    if weighted:
        assert drawn.weights.equal(drawn.inputs["x"])
    few = {"x": torch.zeros(5)}
    assert next(batches(few, 0)) is few
    with pytest.raises(RankoneError, match=r"'x' is a list; .* return_tensors='pt'"):
        next(batches({"x": [1, 2]}, 0))
    with pytest.raises(RankoneError, match="one row for each datapoint"):
        next(batches({"x": torch.zeros(5), "y": torch.zeros(4)}, 0))


def test_compiled_gates_know_positions():
    """In single precision and with enough datapoints the fast engine's kernels take the weights."""
    torch.manual_seed(0)
    target = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 4)).eval()
    model = DecomposedModel(target, {"*": 8})
    batch = WeightedBatch(torch.rand(20, 10, 4), torch.rand(20, 10) < 0.6)
    terms = {name: LOSSES[name]() for name in ("importance_minimality", "stochastic_recon")}
    found = []
    for engine in (Step, FastStep):
        with engine.ready(model):
            step = engine(model, batch, terms, DIVERGENCES["mse"])
            total, values = step.total()
            found.append((values, torch.autograd.grad(total, model.factors())))
            assert engine is Step or set(step._gated) == {"0", "2"}
    for name, value in found[0][0].items():
        torch.testing.assert_close(value, found[1][0][name], rtol=1e-4, atol=1e-7)
    for a, b in zip(found[0][1], found[1][1], strict=True):
        torch.testing.assert_close(a, b, rtol=5e-3, atol=1e-6)
