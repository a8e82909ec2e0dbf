"""One conformance suite over every adapter, and the errors of choosing one."""

import pytest
import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from rankone import Adapter, FactoredLinear, RankoneError, register_adapter
from rankone.adapters import LinearAdapter, adapter_for, dense
from rankone.components import make_subcomponents
from rankone.fast.step import OrderedLinear
from rankone.targets.tms import TMS

CASES = {
    "linear": (lambda: nn.Linear(3, 4), lambda lead: torch.randn(*lead, 3)),
    "linear without bias": (lambda: nn.Linear(3, 4, bias=False), lambda lead: torch.randn(*lead, 3)),
    "conv1d": (lambda: Conv1D(4, 3), lambda lead: torch.randn(*lead, 3)),
    "embedding": (lambda: nn.Embedding(7, 4), lambda lead: torch.randint(0, 7, lead)),
    "embedding with padding": (
        lambda: nn.Embedding(7, 4, padding_idx=0),
        lambda lead: torch.randint(0, 7, lead),
    ),
    "factored linear": (lambda: FactoredLinear(3, 4), lambda lead: torch.randn(*lead, 3)),
    "transposed linear": (lambda: TMS(4, 3).double().unembed, lambda lead: torch.randn(*lead, 3)),
}


@pytest.mark.parametrize("lead", [(5,), (2, 3), (2, 3, 2)], ids=str)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("ordered", [False, True], ids=["plain", "fast"])
def test_exact_factors_give_the_module_back(case, lead, ordered):
    """read, then write, with factors whose product is the matrix, is the module itself; a zero mask
    leaves its bias."""
    torch.manual_seed(0)
    make, inputs = CASES[case]
    module, x = make().double(), inputs(lead)
    x = x.double() if x.is_floating_point() else x
    adapter = adapter_for(module, "layer")
    if ordered and isinstance(adapter, LinearAdapter):
        adapter = OrderedLinear(adapter)
    W = adapter.matrix()
    C = min(W.shape)
    left, size, right = torch.linalg.svd(W.detach(), full_matrices=False)
    U, V = left * size, right
    h = adapter.read(x, V)
    assert h.shape == (*lead, C)
    torch.testing.assert_close(dense(adapter.write(h, U)), dense(module(x)))
    bias = getattr(module, "bias", None)
    nothing = torch.zeros(*lead, W.shape[0], dtype=torch.float64) + (bias if bias is not None else 0)
    torch.testing.assert_close(dense(adapter.write(0 * h, U)), nothing)


def test_subclasses_use_the_adapter_of_their_parent():
    class Mine(nn.Linear):
        pass

    assert type(adapter_for(Mine(2, 2), "m")) is type(adapter_for(nn.Linear(2, 2), "l"))


def test_unsupported_type_is_named():
    with pytest.raises(
        RankoneError, match=r"Layer 'norm' is a LayerNorm.*It knows: .*Linear.*register_adapter"
    ):
        adapter_for(nn.LayerNorm(3), "norm")


def test_embedding_that_rewrites_its_weight_is_refused():
    with pytest.raises(RankoneError, match=r"Layer 'e' \(Embedding\).*max_norm"):
        adapter_for(nn.Embedding(3, 2, max_norm=1.0), "e")


def test_a_user_can_register_an_adapter():
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.kernel = nn.Parameter(torch.randn(2, 3))

        def forward(self, x):
            return 2 * x @ self.kernel.T

    @register_adapter(Scaled)
    class ScaledAdapter(Adapter):
        def matrix(self):
            return 2 * self.module.kernel

        def read(self, x, V):
            return x @ V.T

        def write(self, z, U):
            return z @ U.T

    module = Scaled()
    adapter = adapter_for(module, "s")
    parts = make_subcomponents(adapter.matrix(), 3, "kaiming", torch.Generator().manual_seed(0))
    x = torch.randn(4, 3)
    torch.testing.assert_close(adapter.write(adapter.read(x, parts.V), parts.U), x @ parts.weight().T)
    torch.testing.assert_close(adapter.vectors(x), x)  # three methods are enough
