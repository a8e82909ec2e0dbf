"""Where batches come from: samplers, iterables, and the seeds of a step."""

from itertools import islice

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import rankone
from rankone import RankoneError
from rankone.data import WeightedBatch, batches, generator_for, seed_for, to_device


def take(data, n, **options):
    return list(islice(batches(data, 0, **options), n))


def test_a_stream_can_begin_anywhere():
    def sampler(generator):
        return torch.rand(2, generator=generator)

    whole = take(sampler, 6)
    assert all(torch.equal(a, b) for a, b in zip(whole[4:], take(sampler, 2, start=4), strict=True))
    assert not torch.equal(whole[0], whole[1])


def test_a_shuffling_dataloader_is_reproducible_and_leaves_the_global_generator_alone():
    loader = DataLoader(TensorDataset(torch.arange(12.0)), batch_size=5, shuffle=True)
    torch.manual_seed(123)
    before = torch.get_rng_state()
    whole = take(loader, 7)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(456)
    again = take(loader, 3, start=4)
    assert [b[0].tolist() for b in whole[4:]] == [b[0].tolist() for b in again]
    assert sorted(torch.cat([b[0] for b in whole[:3]]).tolist()) == list(range(12))
    assert whole[0][0].tolist() != whole[3][0].tolist()


def test_data_that_ends():
    with pytest.raises(RankoneError, match=r"data gave 2 batches and then no more.*not a generator"):
        take((torch.zeros(1) for _ in range(2)), 3)
    with pytest.raises(RankoneError, match="data is empty"):
        take([], 1)
    with pytest.raises(RankoneError, match=r"data is a int; expected a tensor of datapoints"):
        take(3, 1)


def test_seeds_differ_by_everything_and_are_stable():
    seeds = {seed_for(s, stream, step) for s in (0, 1) for stream in ("data", "masks") for step in (0, 1)}
    assert len(seeds) == 8
    assert seed_for(0, "data", 0) == 7541626262678432639
    assert torch.equal(
        torch.rand(3, generator=generator_for(1, "a", 2)), torch.rand(3, generator=generator_for(1, "a", 2))
    )


def test_merging_rows_of_zeros():
    x = torch.tensor([[0.0, 0], [1, 0], [0, 0], [0, -1]])
    merged = WeightedBatch.merging_zero_rows(x)
    assert merged.inputs.tolist() == [[1, 0], [0, -1], [0, 0]]
    assert merged.weights.tolist() == [1, 1, 2]
    assert WeightedBatch.merging_zero_rows(x[1:2]).weights.tolist() == [1]
    assert WeightedBatch.merging_zero_rows(0 * x).weights.tolist() == [4]


def test_moving_keeps_the_form():
    cpu = torch.device("cpu")
    moved = to_device(WeightedBatch({"x": torch.ones(1), "n": 3}, torch.ones(1)), cpu)
    assert isinstance(moved, WeightedBatch)
    assert moved.inputs["n"] == 3
    assert to_device((torch.ones(1), None), cpu)[1] is None


def test_lists_of_a_tokenizer_and_single_logits_get_words():
    model = torch.nn.Sequential(torch.nn.Linear(4, 1)).eval()
    with pytest.raises(
        RankoneError, match=r"entry 'input' is a list; expected a tensor.*return_tensors='pt'"
    ):
        rankone.decompose(model, [{"input": [[1, 2, 3, 4]]}], {"0": 2}, {"steps": 1})
    with pytest.raises(RankoneError, match=r"KL divergence of a single logit is 0 whatever happens"):
        rankone.decompose(model, [torch.rand(3, 4)], {"0": 2}, {"steps": 1, "divergence": "kl"})


def test_double_precision_batches_get_words():
    model = torch.nn.Sequential(torch.nn.Linear(4, 2)).eval()
    with pytest.raises(RankoneError, match=r"cannot be run on a batch of \(3, 4\) torch.float64.*types"):
        rankone.decompose(model, [torch.rand(3, 4).double()], {"0": 2}, {"steps": 1})
