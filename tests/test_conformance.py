"""One conformance suite over every kind of layer.

The reference is the target itself: its parameters are replaced, one datapoint at a time, by the
masked matrices U diag(m) V + delta (W - U V), built explicitly, and torch's own modules are run.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call
from transformers.pytorch_utils import Conv1D

import oracle
import rankone
from rankone import DecomposedModel, RankoneError
from rankone.data import call_with
from rankone.fast.step import FastStep
from rankone.files import fingerprint
from rankone.losses import DIVERGENCES
from rankone.masks import Mask
from rankone.naming import Matrices
from rankone.step import Step

pytestmark = pytest.mark.filterwarnings("ignore:LSTM with projections")  # torch has no faster one

ROWS = 3
EXACT = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


@dataclass
class Case:
    """A small target with one kind of layer, and how its matrices stand in its parameters."""

    make: Callable[[], nn.Module]
    inputs: Callable[[], tuple[Tensor, ...]]
    """Positional arguments of the target; the first dimension of each is the rows."""
    place: Callable[[dict[str, Tensor]], dict[str, Tensor]]
    """Matrices by layer -> parameters by name."""
    layers: dict[str, int] = field(default_factory=lambda: {"*": 3})
    matrices: dict[str, Any] = field(default_factory=dict)
    lead: dict[str, tuple[int, ...]] = field(default_factory=dict)
    """The expected shape of datapoints, for layers where it is not obvious."""
    datapoints: Callable[[Tensor], Tensor] | None = None
    """For a target that is one layer: its output as `[*lead, d_out]`."""
    dtypes: tuple[torch.dtype, ...] = EXACT
    reference: Callable[[nn.Module], nn.Module] = lambda target: target
    """What the masked matrices are put into."""

    def model(self, target: nn.Module, **kwargs: Any) -> DecomposedModel:
        return DecomposedModel(target, self.layers, matrices=Matrices(**self.matrices), **kwargs)


def one(module: nn.Module) -> nn.Sequential:
    return nn.Sequential(module)


def channels_last(y: Tensor) -> Tensor:
    return y.movedim(1, -1)


def conv_case(kind: type, shape: tuple[int, ...], lead: tuple[int, ...], **kwargs: Any) -> Case:
    """A convolution from 4 to 6 channels, kernel sizes in `kwargs`."""
    turn = "Transpose" in kind.__name__

    def make() -> nn.Module:
        return one(kind(4, 6, **kwargs))

    def reference(target: nn.Module) -> nn.Module:
        """The same layer without groups, which can hold any matrix over all channels."""
        whole = one(kind(4, 6, **(kwargs | {"groups": 1}))).double()
        whole[0].bias = target[0].bias
        return whole

    def place(W: dict[str, Tensor]) -> dict[str, Tensor]:
        kernel = W["0"].reshape(6, 4, *make()[0].kernel_size)
        return {"0.weight": kernel.transpose(0, 1) if turn else kernel}

    return Case(
        make,
        lambda: (torch.randn(ROWS, 4, *shape),),
        place,
        lead={"0": (ROWS, *lead)},
        datapoints=channels_last,
        reference=reference if kwargs.get("groups", 1) > 1 else lambda target: target,
    )


class Attends(nn.Module):
    def __init__(self, **kwargs: Any) -> None:
        super().__init__()
        self.call = kwargs.pop("call", {})
        self.attn = nn.MultiheadAttention(4, 2, **kwargs)
        if self.attn.in_proj_bias is not None:
            nn.init.normal_(self.attn.in_proj_bias)

    def forward(self, *args: Tensor) -> Tensor:
        args = args if len(args) == 3 else (args[0],) * 3
        first = self.attn.batch_first
        args = args if first else tuple(a.transpose(0, 1) for a in args)
        call = {k: v.to(args[0].dtype) if k == "added" else v for k, v in self.call.items()}
        if "added" in call:
            call["attn_mask"] = call.pop("added")
        y, weights = self.attn(*args, **call)
        y = y if first else y.transpose(0, 1)
        return y if weights is None or weights.dim() == 4 else torch.cat([y, weights], -1)


def packed(W: dict[str, Tensor]) -> dict[str, Tensor]:
    return {
        "attn.in_proj_weight": torch.cat([W["attn.q"], W["attn.k"], W["attn.v"]]),
        "attn.out_proj.weight": W["attn.out_proj"],
    }


def attention_case(**kwargs: Any) -> Case:
    return Case(lambda: Attends(**kwargs), lambda: (torch.randn(ROWS, 5, 4),), packed)


CAUSAL = torch.triu(torch.ones(5, 5, dtype=torch.bool), 1)


class Runs(nn.Module):
    """A recurrent layer, or a cell that is called once for each moment."""

    def __init__(self, rnn: nn.Module) -> None:
        super().__init__()
        self.rnn = rnn

    def forward(self, x: Tensor) -> Tensor:
        if isinstance(self.rnn, nn.RNNBase):
            output, state = self.rnn(x if self.rnn.batch_first else x.transpose(0, 1))
            output = output if self.rnn.batch_first else output.transpose(0, 1)
            last = state[1] if isinstance(state, tuple) else state
            return torch.cat([output.flatten(1), last.transpose(0, 1).flatten(1)], 1)
        state = None
        for t in range(x.shape[1]):
            state = self.rnn(x[:, t], state)
        return state[0] if isinstance(state, tuple) else state


def recurrent_case(make: Callable[[], nn.Module]) -> Case:
    def place(W: dict[str, Tensor]) -> dict[str, Tensor]:
        return {f"rnn.weight_{name.removeprefix('rnn.')}": value for name, value in W.items()}

    return Case(lambda: Runs(make()), lambda: (torch.randn(ROWS, 4, 3),), place)


class Twice(nn.Module):
    """One layer, called twice with inputs of the same shape, or of different shapes."""

    def __init__(self, *, uneven: bool = False) -> None:
        super().__init__()
        self.a, self.uneven = nn.Linear(4, 4), uneven

    def forward(self, x: Tensor) -> Tensor:
        first = torch.tanh(self.a(x))
        return self.a(first[:, :2] if self.uneven else first)


class Matmuls(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.W = nn.Parameter(torch.randn(4, 6))
        self.inner = nn.ParameterList([torch.randn(5, 6), torch.randn(5, 5)])

    def forward(self, x: Tensor) -> Tensor:
        return torch.matmul(F.linear(torch.tanh(x @ self.W), self.inner[0]), self.inner[1].T)


class Bag(nn.Module):
    def __init__(self, mode: str, *, flat: bool = False) -> None:
        super().__init__()
        self.bag, self.flat = nn.EmbeddingBag(7, 4, mode=mode, padding_idx=0), flat

    def forward(self, x: Tensor, weights: Tensor | None = None) -> Tensor:
        if self.flat:
            return self.bag(x.flatten(), torch.arange(0, x.numel(), x.shape[1]))
        return self.bag(x, per_sample_weights=weights)


class Fuses(nn.Module):
    def __init__(self, conv1d: bool) -> None:
        super().__init__()
        self.c_attn = Conv1D(12, 4) if conv1d else nn.Linear(4, 12)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.c_attn(x).chunk(3, -1)
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def three(W: dict[str, Tensor], turn: bool) -> dict[str, Tensor]:
    whole = torch.cat([W[f"c_attn.{n}"] for n in "qkv"])
    return {"c_attn.weight": whole.T if turn else whole}


def with_bias(
    name: str, shape: tuple[int, ...] | None = None
) -> Callable[[dict[str, Tensor]], dict[str, Tensor]]:
    def place(W: dict[str, Tensor]) -> dict[str, Tensor]:
        weight = W[name][:, :-1]
        return {
            f"{name}.weight": weight if shape is None else weight.reshape(shape),
            f"{name}.bias": W[name][:, -1],
        }

    return place


def same_name(W: dict[str, Tensor]) -> dict[str, Tensor]:
    return {f"{name}.weight": value for name, value in W.items()}


def transposed(W: dict[str, Tensor]) -> dict[str, Tensor]:
    return {f"{name}.weight": value.T for name, value in W.items()}


def vectors4() -> tuple[Tensor, ...]:
    return (torch.randn(ROWS, 4),)


def tokens() -> tuple[Tensor, ...]:
    return (torch.randint(0, 7, (ROWS, 3)),)


CASES: dict[str, Case] = {
    "linear": Case(lambda: one(nn.Linear(4, 6)), vectors4, same_name, datapoints=lambda y: y),
    "linear without bias": Case(
        lambda: one(nn.Linear(4, 6, bias=False)),
        lambda: (torch.randn(ROWS, 2, 4),),
        same_name,
        datapoints=lambda y: y,
    ),
    "Conv1D": Case(lambda: one(Conv1D(6, 4)), vectors4, transposed, datapoints=lambda y: y),
    "embedding": Case(lambda: one(nn.Embedding(7, 4)), tokens, transposed, datapoints=lambda y: y),
    "conv1d": conv_case(nn.Conv1d, (9,), (4,), kernel_size=3, stride=2),
    "conv2d": conv_case(nn.Conv2d, (5, 4), (3, 3), kernel_size=(3, 2)),
    "conv2d without bias, padded": conv_case(nn.Conv2d, (3, 3), (3, 3), kernel_size=3, padding=1, bias=False),
    "conv2d same": conv_case(nn.Conv2d, (3, 4), (3, 4), kernel_size=2, padding="same", dilation=2),
    "conv2d groups": conv_case(nn.Conv2d, (4, 3), (2, 2), kernel_size=2, stride=(2, 1), groups=2),
    "conv3d": conv_case(nn.Conv3d, (3, 2, 3), (2, 2, 1), kernel_size=(2, 1, 3)),
    **{
        f"conv1d {mode}": conv_case(
            nn.Conv1d, (6,), (6,), kernel_size=3, padding=2, dilation=2, padding_mode=mode
        )
        for mode in ("reflect", "replicate", "circular")
    },
    "conv1d transposed": conv_case(nn.ConvTranspose1d, (3,), (7,), kernel_size=3, stride=2),
    "conv2d transposed": conv_case(
        nn.ConvTranspose2d, (2, 3), (3, 5), kernel_size=3, stride=2, padding=1, groups=2
    ),
    "conv3d transposed": conv_case(
        nn.ConvTranspose3d, (2, 1, 1), (4, 2, 2), kernel_size=2, stride=2, output_padding=0, dilation=1
    ),
    "attention": attention_case(batch_first=True),
    "attention, sequence first, without bias": attention_case(bias=False),
    "attention without weights": attention_case(batch_first=True, call={"need_weights": False}),
    "attention, all heads": attention_case(batch_first=True, call={"average_attn_weights": False}),
    "attention, causal": attention_case(
        batch_first=True, call={"attn_mask": CAUSAL, "is_causal": True, "need_weights": False}
    ),
    "attention, added mask": attention_case(batch_first=True, call={"added": -2.0 * CAUSAL}),
    "attention, separate projections": Case(
        lambda: Attends(kdim=3, vdim=2, batch_first=True),
        lambda: (torch.randn(ROWS, 5, 4), torch.randn(ROWS, 6, 3), torch.randn(ROWS, 6, 2)),
        lambda W: {
            **{f"attn.{n}_proj_weight": W[f"attn.{n}"] for n in "qkv"},
            "attn.out_proj.weight": W["attn.out_proj"],
        },
        lead={"attn.q": (ROWS, 5), "attn.k": (ROWS, 6)},
    ),
    "encoder layer": Case(
        lambda: nn.TransformerEncoder(
            nn.TransformerEncoderLayer(4, 2, 6, dropout=0.0, batch_first=True), 1, enable_nested_tensor=False
        ),
        lambda: (torch.randn(ROWS, 5, 4),),
        lambda W: {
            "layers.0.self_attn.in_proj_weight": torch.cat([W[f"layers.0.self_attn.{n}"] for n in "qkv"]),
            "layers.0.self_attn.out_proj.weight": W["layers.0.self_attn.out_proj"],
            "layers.0.linear1.weight": W["layers.0.linear1"],
            "layers.0.linear2.weight": W["layers.0.linear2"],
        },
    ),
    "fused": Case(
        lambda: Fuses(False),
        lambda: (torch.randn(ROWS, 5, 4),),
        lambda W: three(W, False),
        layers={"c_attn.*": 3},
        matrices={"fused": {"c_attn": ["q", "k", "v"]}},
    ),
    "fused Conv1D": Case(
        lambda: Fuses(True),
        lambda: (torch.randn(ROWS, 5, 4),),
        lambda W: three(W, True),
        matrices={"fused": {"*attn": ["q", "k", "v"]}},
    ),
    "embedding bag, sum": Case(
        lambda: Bag("sum"), lambda: (*tokens(), torch.rand(ROWS, 3)), transposed, datapoints=lambda y: y
    ),
    "embedding bag, mean, offsets": Case(
        lambda: Bag("mean", flat=True), tokens, transposed, datapoints=lambda y: y
    ),
    "bilinear": Case(
        lambda: one_pair(),
        lambda: (torch.randn(ROWS, 2, 4), torch.randn(ROWS, 2, 3)),
        lambda W: {"pair.weight": W["pair"].reshape(5, 4, 3)},
        datapoints=lambda y: y,
        dtypes=(torch.float64, torch.float32),
    ),
    "parameters": Case(
        Matmuls,
        vectors4,
        lambda W: {"W": W["W"].T, "inner.0": W["inner.0"], "inner.1": W["inner.1"]},
        matrices={"parameters": {"W": "x @ W", "inner.0": "x @ W.T", "inner.1": "x @ W.T"}},
    ),
    **{
        kind.__name__: recurrent_case(lambda kind=kind: kind(3, 4))
        for kind in (nn.RNNCell, nn.GRUCell, nn.LSTMCell)
    },
    "RNN": recurrent_case(lambda: nn.RNN(3, 4, nonlinearity="relu", batch_first=True)),
    "GRU": recurrent_case(lambda: nn.GRU(3, 4, num_layers=2, bidirectional=True)),
    "LSTM": recurrent_case(lambda: nn.LSTM(3, 4, batch_first=True, bias=False)),
    "LSTM projected": recurrent_case(lambda: nn.LSTM(3, 4, proj_size=2, batch_first=True)),
    "called twice": Case(Twice, lambda: (torch.randn(ROWS, 3, 4),), same_name, lead={"a": (ROWS, 2, 3)}),
    "called twice, unevenly": Case(
        lambda: Twice(uneven=True), lambda: (torch.randn(ROWS, 3, 4),), same_name, lead={"a": (ROWS, 5)}
    ),
    "biases": Case(
        lambda: one(nn.Linear(4, 6)),
        vectors4,
        with_bias("0"),
        matrices={"biases": ["*"]},
        datapoints=lambda y: y,
    ),
    "biases of a convolution": Case(
        lambda: one(nn.Conv2d(2, 3, 2)),
        lambda: (torch.randn(ROWS, 2, 3, 3),),
        with_bias("0", (3, 2, 2, 2)),
        matrices={"biases": ["0"]},
        datapoints=channels_last,
    ),
    "parametrised": Case(
        lambda: one(nn.utils.parametrizations.weight_norm(nn.Linear(4, 6))),
        vectors4,
        lambda W: {
            "0.parametrizations.weight.original0": W["0"].norm(dim=1, keepdim=True),
            "0.parametrizations.weight.original1": W["0"],
        },
        datapoints=lambda y: y,
    ),
}


def one_pair() -> nn.Module:
    class Multiplies(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.pair = nn.Bilinear(4, 3, 5)

        def forward(self, a: Tensor, b: Tensor) -> Tensor:
            return self.pair(a, input2=b)

    return Multiplies()


def built(case: Case, dtype: torch.dtype = torch.float64) -> tuple[nn.Module, tuple[Tensor, ...]]:
    torch.manual_seed(0)
    target = case.make().to(dtype).eval()
    inputs = tuple(x.to(dtype) if x.is_floating_point() else x for x in case.inputs())
    return target, inputs


def make_faithful(model: DecomposedModel) -> None:
    with torch.no_grad():
        for layer in model.layers.values():
            left, size, right = torch.linalg.svd(layer.matrix(), full_matrices=False)
            layer.subcomponents.U.copy_(left * size)
            layer.subcomponents.V.copy_(right)


@pytest.mark.parametrize("name", CASES)
def test_faithful_subcomponents_are_the_target(name):
    """In every precision the layer claims."""
    case = CASES[name]
    for dtype in case.dtypes:
        target, inputs = built(case, dtype)
        expected = call_with(target, inputs)
        ranks = {n: min(layer.matrix().shape) for n, layer in case.model(target).layers.items()}
        case_of_rank = Case(case.make, case.inputs, case.place, ranks, case.matrices)
        model = case_of_rank.model(target)
        make_faithful(model)
        clean = model.clean(inputs)
        tolerance = 30 * torch.finfo(dtype).eps * max(1.0, float(expected.detach().abs().max()))
        torch.testing.assert_close(clean.output, expected, rtol=0, atol=tolerance)
        torch.testing.assert_close(model(inputs), expected, rtol=0, atol=tolerance)


def masked_matrices(model: DecomposedModel, masks: dict[str, Mask], index: Any) -> dict[str, Tensor]:
    """Every layer's matrix on one datapoint."""
    matrices = {}
    for name, layer in model.layers.items():
        mask = masks[name]
        of = oracle.Layer(layer.matrix(), layer.subcomponents.U, layer.subcomponents.V, None, None)
        if mask.where is not None and not mask.where[index]:
            matrices[name] = of.W
        elif mask.delta is not None:
            matrices[name] = oracle.masked_with_delta(of, mask.values[index], mask.delta[index])
        else:
            matrices[name] = oracle.masked_matrix(of, mask.values[index])
    return matrices


def assert_same_gradients(ours: Tensor, theirs: Tensor, model: DecomposedModel) -> None:
    torch.testing.assert_close(ours, theirs)
    torch.manual_seed(1)
    direction = torch.randn_like(theirs)
    factors = model.factors()
    a, b = (torch.autograd.grad((y * direction).sum(), factors, allow_unused=True) for y in (ours, theirs))
    for p, q in zip(a, b, strict=True):
        zero = torch.zeros(())
        torch.testing.assert_close(zero if p is None else p, zero if q is None else q)


@pytest.mark.parametrize("engine", [Step, FastStep])
@pytest.mark.parametrize("name", CASES)
def test_masked_by_row_is_the_target_with_masked_matrices(name, engine):
    """One mask for each row of the batch, on all layers at once: values and gradients."""
    case = CASES[name]
    target, inputs = built(case)
    model = case.model(target)
    with engine.ready(model):
        step = engine(model, inputs, {}, DIVERGENCES["mse"])
        masks, by_row = {}, {}
        for layer_name, raw in step.raw.items():
            assert raw.shape[:-1] == case.lead.get(layer_name, raw.shape[:-1])
            rows = step.raw[layer_name].shape[0] == ROWS
            lead = raw.shape[:-1]
            by_row[layer_name] = Mask(
                torch.rand(ROWS, raw.shape[-1]).double(), None, torch.rand(ROWS).double()
            )
            axis = 0 if rows else 1  # a layer may see the sequence first
            shape = [1] * len(lead)
            shape[axis] = ROWS
            values = by_row[layer_name].values.reshape(*shape, -1).expand(*lead, -1)
            masks[layer_name] = Mask(values, None, by_row[layer_name].delta.reshape(shape).expand(lead))
        output = step.output(masks)
    expected = []
    for row in range(ROWS):
        placed = case.place(masked_matrices(model, by_row, row))
        expected.append(
            functional_call(case.reference(target), placed, tuple(x[row : row + 1] for x in inputs))
        )
    assert_same_gradients(output, torch.cat(expected), model)


@pytest.mark.parametrize("engine", [Step, FastStep])
@pytest.mark.parametrize("name", [n for n, case in CASES.items() if case.datapoints is not None])
def test_masked_by_datapoint_is_the_layer_with_masked_matrices(name, engine):
    """Another mask on every position, which holds on some of them only."""
    case = CASES[name]
    target, inputs = built(case)
    model = case.model(target)
    with engine.ready(model):
        step = engine(model, inputs, {}, DIVERGENCES["mse"])
        ((layer, raw),) = step.raw.items()
        lead = raw.shape[:-1]
        mask = Mask(torch.rand_like(raw), torch.rand(lead) < 0.7, torch.rand(lead).double())
        output = case.datapoints(step.output({layer: mask}))
    expected = torch.zeros_like(output)
    for index in torch.cartesian_prod(*map(torch.arange, lead)).reshape(-1, len(lead)).tolist():
        place = tuple(index)
        placed = case.place(masked_matrices(model, {layer: mask}, place))
        alone = case.datapoints(functional_call(case.reference(target), placed, inputs))
        at = torch.zeros(lead, dtype=torch.bool)
        at[place] = True
        expected = torch.where(at.unsqueeze(-1), alone, expected)
    assert_same_gradients(output, expected, model)


@pytest.mark.parametrize("name", CASES)
def test_vectors_are_what_the_matrix_multiplies(name):
    """Inner activations are V times the vectors, whatever way they are computed."""
    target, inputs = built(CASES[name])
    model = CASES[name].model(target)
    clean = model.clean(inputs)
    for layer_name, layer in model.layers.items():
        a = layer.vectors(clean.inputs[layer_name])
        torch.testing.assert_close(layer.read(clean.inputs[layer_name]), a @ layer.subcomponents.V.T)


@pytest.mark.parametrize("engine", ["exact", "fast"])
@pytest.mark.parametrize("name", CASES)
def test_it_trains_and_the_target_is_left_as_it_was(name, engine):
    case = CASES[name]
    target, inputs = built(case, torch.float32)
    before = fingerprint(target), {n: set(vars(m)) for n, m in target.named_modules()}
    expected = call_with(target, inputs)
    settings = rankone.DecompositionConfig(
        steps=1, engine=engine, matrices=case.matrices, masks={"delta": True}
    )
    result = rankone.decompose(target, [inputs], case.layers, settings)
    assert all(torch.isfinite(torch.tensor(v)) for v in result.history[-1]["loss"].values())
    assert (fingerprint(target), {n: set(vars(m)) for n, m in target.named_modules()}) == before
    assert torch.equal(call_with(target, inputs), expected)
    assert all(p.grad is None and p.requires_grad for p in target.parameters())


@pytest.mark.parametrize("name", CASES)
def test_nothing_changes_when_what_comes_before_is_not_run_again(name):
    """Replayed passes are the passes themselves, to the bit, for every first masked layer."""
    target, inputs = built(CASES[name], torch.float32)
    model = CASES[name].model(target)
    clean = model.clean(inputs)
    for layer_name, layer in model.layers.items():
        masks = {layer_name: Mask(torch.rand(layer.C))}
        assert torch.equal(model.masked(inputs, masks, clean), model.masked(inputs, masks))


REFUSED = {
    "bias_k": (lambda: Attends(add_bias_kv=True), {"*": 2}, r"'attn.q' \(MultiheadAttention\).*add_bias_kv"),
    "zero": (lambda: Attends(add_zero_attn=True), {"*": 2}, r"add_zero_attn=True gives it a key"),
    "the attention itself": (
        Attends,
        {"attn": 2},
        r"'attn' is a MultiheadAttention.*attn.q, attn.k, .*'attn.\*'",
    ),
    "in_proj_weight": (
        Attends,
        {"attn.in_proj_weight": 2},
        r"parameter of a MultiheadAttention, .*Name them: attn.q, attn.k",
    ),
    "a parameter": (Matmuls, {"W": 2}, r'matrices": {"parameters": {\'W\': "x @ W"}}'),
    "max": (lambda: Bag("max"), {"*": 2}, r"mode='max' is no product with a matrix"),
    "a container": (
        lambda: one(one(nn.Linear(2, 2))),
        {"0": 2},
        r"Its layers are: 0.0; '0.\*' names them all",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused_says_why(name):
    make, layers, message = REFUSED[name]
    with pytest.raises(RankoneError, match=message):
        DecomposedModel(make().eval(), layers)


@pytest.mark.parametrize(
    ("declared", "layers", "message"),
    [
        ({"parameters": {"V": "x @ W"}}, {"*": 2}, r"matrices.parameters names 'V'"),
        ({"fused": {"nothing": ["q"]}}, {"*": 2}, r"matrices.fused names 'nothing', which matches no layer"),
        ({"biases": ["inner*"]}, {"*": 2}, r"matrices.biases names 'inner\*', but no layer"),
    ],
)
def test_declarations_that_cannot_be(declared, layers, message):
    with pytest.raises(RankoneError, match=message):
        DecomposedModel(nn.Sequential(nn.Linear(3, 4)), layers, matrices=Matrices(**declared))


def test_a_fused_layer_of_the_wrong_size():
    with pytest.raises(RankoneError, match=r"its 4 outputs cannot be cut into 3 equal parts"):
        DecomposedModel(one(nn.Linear(3, 4)), {"*": 2}, matrices=Matrices(fused={"0": ["q", "k", "v"]}))


@pytest.mark.parametrize(
    ("use", "message"),
    [
        (lambda W, x: torch.einsum("bi,ij->bj", x, W), "used in einsum"),
        (lambda W, x: x @ W.T, "multiplied with the other way round"),
        (lambda W, x: x * W[0], "used in|used for"),
        (lambda W, x: (W @ x.T).T, r"multiplied from the left with a matrix \(W @ X\)"),
    ],
)
def test_a_parameter_that_is_used_otherwise(use, message):
    class Uses(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.W = nn.Parameter(torch.randn(4, 4))

        def forward(self, x: Tensor) -> Tensor:
            return use(self.W, x)

    model = DecomposedModel(Uses(), {"W": 2}, matrices=Matrices(parameters={"W": "x @ W"}))
    with pytest.raises(RankoneError, match=message):
        model.clean(torch.randn(3, 4))


def test_packed_sequences_are_refused():
    class Packs(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rnn = nn.GRU(3, 4, batch_first=True)

        def forward(self, x: Tensor) -> Tensor:
            lengths = torch.full((x.shape[0],), x.shape[1])
            return self.rnn(nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True))[1]

    with pytest.raises(RankoneError, match=r"called with a PackedSequence.*Pad the sequences"):
        DecomposedModel(Packs(), {"*": 2}).clean(torch.randn(2, 3, 3))
