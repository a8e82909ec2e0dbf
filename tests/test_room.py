"""Layers and C that nobody said: enough room for every mechanism, and a word where there is none."""

import pytest
import torch
from torch import nn

from rankone.collection.base import network
from rankone.errors import ConfigError, LayerError
from rankone.room import ROOM, chosen_layers, coming_back, room_for


def test_superposition_gets_room_for_its_features():
    known = network("tms_5-2")
    assert chosen_layers(known.model, known.data, None) == {"embed": ROOM * 5, "unembed": ROOM * 5}


def test_dense_data_gets_room_for_the_rank():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 20), nn.ReLU(), nn.Linear(20, 4)).eval()
    data = [torch.randn(200, 6) for _ in range(3)]
    assert chosen_layers(net, data, None) == {"0": ROOM * 6, "2": ROOM * 4}
    assert chosen_layers(net, data, ["2"]) == {"2": ROOM * 4}
    assert chosen_layers(net, data, {"0": 7, "2": None}) == {"0": 7, "2": ROOM * 4}
    assert chosen_layers(net, data, {"0": 7}) == {"0": 7}


def test_a_short_list_that_comes_again_is_not_taken_for_features():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(30, 4)).eval()
    assert chosen_layers(net, [torch.randn(16, 30)], None) == {"0": ROOM * 4}


def test_directions_that_come_back():
    torch.manual_seed(0)
    alone = torch.eye(6)[torch.randint(6, (300,))] * (0.1 + torch.rand(300, 1))
    assert coming_back(alone) == 6
    assert coming_back(torch.cat([alone, torch.randn(300, 6), torch.zeros(5, 6)])) == 6
    assert coming_back(torch.randn(300, 6)) == 0
    assert coming_back(torch.zeros(3, 6)) == 0


def test_a_matrix_of_zeros_still_gets_a_subcomponent():
    assert room_for(torch.zeros(3, 4), torch.randn(10, 4)) == ROOM


def test_a_network_without_matrices_is_refused():
    with pytest.raises(LayerError, match="no layer to decompose"):
        chosen_layers(nn.ReLU(), [torch.randn(4, 3)], None)


@pytest.mark.parametrize("layers", ["0", "mlp.*"])
def test_layers_that_are_neither_mapping_nor_list(layers):
    with pytest.raises(ConfigError, match="a list of patterns"):
        chosen_layers(nn.Linear(3, 3), [torch.randn(4, 3)], layers)
