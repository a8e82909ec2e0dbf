"""What a newcomer is told when the first try does not fit: the very thing that was seen, and what to do."""

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset
from transformers import BertConfig, BertModel

import rankone
from conftest import small_mlp
from rankone import RankoneError
from rankone.data import batches, call_with

ONE = {"steps": 1}


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mha = nn.MultiheadAttention(4, 2, batch_first=True)

    def forward(self, x):
        return self.mha(x, x, x)[0]


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.W, self.fc = nn.Parameter(torch.eye(4)), nn.Linear(4, 4)

    def forward(self, x):
        return self.fc(x @ self.W)


def bert() -> nn.Module:
    small = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
    return BertModel(BertConfig(vocab_size=9, max_position_embeddings=8, **small)).eval()


TOKENS = {"input_ids": torch.randint(0, 9, (4, 5))}


def test_an_index_into_a_hugging_face_output():
    result = rankone.decompose(bert(), TOKENS, {"*.query": 3}, ONE, output=0)
    assert result.model.clean(TOKENS).output.shape == (4, 5, 8)
    with pytest.raises(RankoneError, match=r"WithPooling\w* of 2, which has no element 3"):
        rankone.decompose(bert(), TOKENS, {"*.query": 3}, ONE, output=3)


@pytest.mark.parametrize(
    ("model", "data", "layers", "message"),
    [
        (bert, TOKENS, {"*.query": 3}, r"It holds last_hidden_state \(4, 5, 8\), pooler_output \(4, 8\)"),
        (
            Attention,
            torch.rand(2, 3, 4),
            {"mha.in_proj_weight": 3},
            r"several matrices. .*mha.q, mha.k, mha.v",
        ),
        (
            small_mlp,
            torch.rand(5, 4).double(),
            None,
            r"data is torch.float64, the network torch.float32: pass",
        ),
        (
            small_mlp,
            torch.rand(5, 4).double(),
            {"0": 3},
            r"the network torch.float32: pass data.to\(torch.float32",
        ),
    ],
)
def test_what_does_not_fit_is_named(model, data, layers, message):
    target = model().eval()
    with pytest.raises(RankoneError, match=message):
        rankone.decompose(target, data, layers, ONE)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (np.zeros((5, 4)), r"data is a ndarray; .*torch.as_tensor\(array\).float\(\)"),
        (TensorDataset(torch.rand(5, 4)), r"data is a TensorDataset; .*needs a DataLoader"),
    ],
)
def test_data_of_other_libraries(data, message):
    with pytest.raises(RankoneError, match=message):
        next(batches(data, 0))


def test_an_array_as_a_batch():
    with pytest.raises(RankoneError, match=r"A batch is a ndarray; .*torch.as_tensor\(batch\).float\(\)"):
        call_with(small_mlp(), np.zeros((5, 4)))


@pytest.mark.filterwarnings("ignore:.*torch.jit")
def test_a_scripted_network():
    with pytest.raises(RankoneError, match=r"is a ScriptModule: .*made from"):
        rankone.decompose(torch.jit.script(small_mlp()), torch.rand(5, 4), config=ONE)


def test_plain_parameters_that_a_star_does_not_match_are_named(capsys):
    rankone.decompose(Plain().eval(), torch.rand(5, 4), {"*": 3}, ONE, progress=True)
    assert "left as they are unless declared (docs/layers.md): W." in capsys.readouterr().err
    declared = {**ONE, "matrices": {"parameters": {"W": "x @ W"}}}
    rankone.decompose(Plain().eval(), torch.rand(5, 4), {"*": 3}, declared, progress=True)
    assert "Plain parameters" not in capsys.readouterr().err
