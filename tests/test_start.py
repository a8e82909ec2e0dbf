"""Where subcomponents start: `datapoints`, what a matrix does to single datapoints."""

import pytest
import torch
from torch import nn

import rankone
from conftest import small_mlp, uniform
from rankone.components import datapoints_init, mixed_init
from rankone.data import batches
from rankone.masks import Mask
from rankone.model import DecomposedModel
from rankone.neurons import add_neurons
from rankone.runs.config import experiment_config
from rankone.targets.sparse import SparseFeatures


def start(model, sampler, seed=0):
    model.start_from_data(batches(sampler, seed, stream="init"), seed)
    return model


def test_read_vectors_are_inputs_and_the_sum_is_the_matrix_where_they_reach():
    torch.manual_seed(0)
    W = torch.randn(3, 6)
    inputs = torch.cat([torch.randn(40, 4), torch.zeros(40, 2)], dim=1)
    inputs[::5] = 0
    U, V = datapoints_init(W, inputs, 9, torch.Generator().manual_seed(0))
    directions = nn.functional.normalize(inputs, dim=1)
    assert ((V @ directions.T).amax(1) > 1 - 1e-5).all()
    torch.testing.assert_close(V.norm(dim=1), torch.ones(9))
    # Every datapoint is treated as W treats it; where no datapoint reaches, there is nothing.
    torch.testing.assert_close(U @ V @ inputs.T, W @ inputs.T, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close((U @ V)[:, 4:], torch.zeros(3, 2), atol=1e-5, rtol=0)


def test_rare_directions_are_chosen_like_frequent_ones():
    """One feature in a thousand rows is on once; with as many subcomponents as features each still
    has its own."""
    inputs = torch.eye(5)[[0] * 500 + [1] * 300 + [2] * 150 + [3] * 49 + [4]] * torch.linspace(
        -1, 1, 1000
    ).unsqueeze(1)
    for seed in range(5):
        _, V = datapoints_init(torch.randn(3, 5), inputs, 5, torch.Generator().manual_seed(seed))
        assert sorted(V.abs().argmax(1).tolist()) == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("rows", [0, 1, 3])
def test_fewer_directions_than_subcomponents(rows):
    W = torch.randn(3, 4)
    inputs = torch.randn(1, 4) * torch.linspace(-1, 1, rows).unsqueeze(1)
    U, V = datapoints_init(W, inputs, 7, torch.Generator().manual_seed(0))
    assert U.shape == (3, 7)
    assert V.shape == (7, 4)
    torch.testing.assert_close(U @ V, W, atol=1e-4, rtol=1e-4)


def test_superposed_features_have_their_column_from_the_start():
    """In a Toy Model of Superposition most datapoints are one feature: the subcomponent of that
    datapoint is the column of W."""
    config = experiment_config("tms_5-2", assignments=["init=datapoints"])
    target = config.target.load()
    model = DecomposedModel(target, {"embed": 5}, init="datapoints")
    start(model, SparseFeatures(5, 0.02, 4096))
    factors = model.layer("embed").subcomponents
    parts = torch.einsum("oc,ci->coi", factors.U, factors.V)
    columns = torch.stack([torch.diag(row) for row in torch.eye(5)])
    true = target.embed.weight @ columns
    cosines = nn.functional.cosine_similarity(
        parts.flatten(1).unsqueeze(1), true.flatten(1).unsqueeze(0), dim=-1
    )
    assert (cosines.amax(0) > 0.95).sum() >= 3


def test_every_kind_of_layer_can_start_from_data():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = nn.Embedding(10, 6)
            self.wide = rankone.FactoredLinear(6, 30)
            self.read = nn.Linear(30, 4)

        def forward(self, tokens):
            return self.read(self.wide(self.table(tokens)))

    model = DecomposedModel(Net().eval(), {"*": 12}, init="datapoints")
    start(model, lambda g: torch.randint(0, 10, (8, 5), generator=g))
    # Ten tokens are all there is to read, so all of the table is made up.
    for name in ("table", "wide"):
        layer = model.layer(name)
        torch.testing.assert_close(layer.subcomponents.weight(), layer.matrix(), atol=1e-3, rtol=1e-3)
    x = torch.arange(10)
    ones = {name: Mask(torch.ones(10, 12)) for name in model.layers}
    torch.testing.assert_close(model.masked(x, ones), model.clean(x).output, atol=1e-3, rtol=1e-3)


def test_training_starts_there_and_resumes_to_the_same_bits(tmp_path):
    config = {"steps": 30, "init": "datapoints", "checkpoint_every": 10, "log_every": 5}
    whole = rankone.decompose(small_mlp(), uniform(rows=200), {"*": 8}, config)
    blind = rankone.decompose(
        small_mlp(), uniform(rows=200), {"*": 8}, config | {"init": "kaiming", "steps": 1}
    )
    first, without_data = (r.history[0]["loss"]["faithfulness"] for r in (whole, blind))
    assert first < without_data / 5
    again = rankone.decompose(small_mlp(), uniform(rows=200), {"*": 8}, config)
    assert whole.history == again.history

    def stop(progress):
        if progress.step > 20:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        rankone.decompose(small_mlp(), uniform(rows=200), {"*": 8}, config, out=tmp_path, observer=stop)
    resumed = rankone.decompose(small_mlp(), uniform(rows=200), {"*": 8}, config, out=tmp_path, resume=True)
    assert resumed.history == whole.history
    other = rankone.decompose(small_mlp(), uniform(rows=200), {"*": 8}, config | {"seed": 1})
    assert other.history != whole.history


def test_inputs_that_are_much_alike_give_no_huge_parts():
    """Least squares writes W as parts that cancel; `mixed` rather leaves out what is hardly reached."""
    torch.manual_seed(0)
    W = torch.randn(4, 6)
    inputs = torch.ones(200, 6) + 0.05 * torch.randn(200, 6)
    inputs = torch.cat([inputs, torch.eye(6)[:1]])
    sizes = []
    for init in (datapoints_init, mixed_init):
        U, V = init(W, inputs, 12, torch.Generator().manual_seed(0))
        sizes.append(float((U.norm(dim=0) * V.norm(dim=1)).max() / W.norm()))
        kept = (U @ V @ torch.ones(6) - W @ torch.ones(6)).norm() / (W @ torch.ones(6)).norm()
        assert kept < 0.1  # the direction that all have in common is there in either
    assert sizes[0] > 2 > 1 > sizes[1]


def added(target, data, C, **options):
    model = DecomposedModel(target.eval().requires_grad_(False), C, init="mixed", **options)
    start(model, data)
    before = {name: layer.subcomponents.weight().detach().clone() for name, layer in model.layers.items()}
    counts = add_neurons(model, batches(data, 0, stream="init"), 0)
    return model, counts, before


def test_neurons_are_parts_where_few_of_them_answer():
    """Six ANDs of twelve bits: many bits are on at a time, few gates are. Parts are then what a gate
    reads, and in the next layer what it writes."""
    read, write = nn.Linear(12, 6), nn.Linear(6, 5, bias=False)
    with torch.no_grad():
        read.weight.copy_(torch.eye(6).repeat_interleave(2, 1))
        read.bias.fill_(-1.5)

    def bits(generator):
        return (torch.rand(512, 12, generator=generator) < 0.3).float()

    model, counts, _ = added(nn.Sequential(read, nn.ReLU(), write), bits, {"0": 20, "2": 20})
    assert counts == {"0": 6, "2": 6}
    parts = model.layer("0").subcomponents
    rows = nn.functional.normalize(parts.V[-6:], dim=1)
    torch.testing.assert_close(rows, nn.functional.normalize(read.weight, dim=1))
    torch.testing.assert_close(parts.U[:, -6:] @ parts.V[-6:], read.weight / 2)
    parts = model.layer("2").subcomponents
    torch.testing.assert_close(parts.V[-6:], torch.eye(6))
    torch.testing.assert_close(parts.U[:, -6:], write.weight / 2)


def test_where_inputs_are_sparser_or_nothing_acts_on_neurons_all_stays_as_it_was():
    torch.manual_seed(0)
    W = torch.randn(6, 12)

    def one_hot(generator):
        return torch.eye(12)[torch.randint(12, (512,), generator=generator)]

    def dense(generator):
        return torch.randn(512, 12, generator=generator)

    for data, acts in ((one_hot, nn.ReLU()), (dense, nn.Identity())):
        first = nn.Linear(12, 6, bias=False)
        with torch.no_grad():
            first.weight.copy_(W)
        model, counts, before = added(nn.Sequential(first, acts, nn.Linear(6, 3)), data, {"0": 20})
        assert counts == {}
        assert torch.equal(model.layer("0").subcomponents.weight(), before["0"])


def test_a_run_from_mixed_parts_is_reproducible():
    torch.manual_seed(0)
    model = small_mlp()
    config = {"steps": 20, "engine": "exact"}
    results = [rankone.decompose(model, uniform(4, 64), {"*": 12}, config, progress=False) for _ in range(2)]
    for a, b in zip(*(r.model.named_tensors().values() for r in results), strict=True):
        assert torch.equal(a, b)
