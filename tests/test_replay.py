"""What comes before the first masked layer is not run again, and nobody can tell by the result."""

import gc
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rankone import DecomposedModel
from rankone.fast.step import FastStep
from rankone.losses import DIVERGENCES
from rankone.masks import Mask
from rankone.step import Step


class Counted(nn.Module):
    """A module that says how often it computed something."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width))

    def forward(self, x: Tensor) -> Tensor:
        COUNTS[id(self)] = COUNTS.get(id(self), 0) + 1
        return torch.tanh(x * self.weight)


COUNTS: dict[int, int] = {}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.counted, self.linear = Counted(), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.linear(self.counted(x))


class Residual(nn.Module):
    """Adds to its stream in place, between modules and inside them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.relu = nn.Linear(4, 4), nn.ReLU(inplace=True)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.last = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        x += 1
        x = self.relu(x)
        for block in self.blocks:
            y = block(x)
            y.mul_(0.5)
            x = x + y
        x[:, 0] = 0
        return self.last(x)


class Pooled(nn.Module):
    """Returns and takes tuples, dictionaries and keywords; a list that others fill."""

    def __init__(self) -> None:
        super().__init__()
        self.split, self.join, self.note, self.last = Split(), Join(), Note(), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        seen: list[Tensor] = []
        parts = self.split(x)
        parts["b"][0].add_(1)
        self.note(parts["a"], seen)
        return self.last(self.join(a=parts["a"], b=parts["b"]) + seen[0])


class Split(nn.Module):
    def forward(self, x: Tensor) -> dict:
        return {"a": torch.sin(x), "b": (torch.cos(x), 2)}


class Join(nn.Module):
    def forward(self, *, a: Tensor, b: tuple) -> Tensor:
        return a + b[0] * b[1]


class Note(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor, seen: list) -> None:
        seen.append(self.linear(x))


class Remembers(nn.Module):
    """One module leaves something behind for another."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(4, 4), Keeper(), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.c(torch.tanh(self.b(self.a(x))))
        return y + self.b.kept


class Keeper(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.kept = nn.Linear(4, 4), None

    def forward(self, x: Tensor) -> Tensor:
        self.kept = torch.tanh(x)
        return self.linear(x)


class Bumps(nn.Module):
    """A module changes its input in place, and the input is used afterwards."""

    def __init__(self) -> None:
        super().__init__()
        self.bump, self.last = Bump(), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = 2 * x
        return self.last(self.bump(h) + h)


class Bump(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x.add_(1))


class Shared(nn.Module):
    """A module that is called before and after others, and a function in place of a container."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.a, self.b = nn.LayerNorm(4), nn.Linear(4, 4), nn.Linear(4, 4)
        self.pre = nn.ModuleDict({"x": nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=True))})

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.pre["x"](x))
        x = self.norm(x + self.a(x))
        return self.norm(F.gelu(self.b(x), approximate="tanh"))


TARGETS = {
    "residual": (Residual, {"first": 3, "blocks.*.linear": 3, "last": 3}),
    "residual, some": (Residual, {"blocks.1.linear": 3, "last": 3}),
    "containers": (Pooled, {"note.linear": 3, "last": 3}),
    "remembers": (Remembers, {"*": 3}),
    "remembers, last": (Remembers, {"c": 3}),
    "bumps": (Bumps, {"last": 3}),
    "shared": (Shared, {"a": 3, "b": 3}),
    "in place": (lambda: nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=True), nn.Linear(4, 4)), {"*": 3}),
    "convolutions left alone": (
        lambda: nn.Sequential(
            nn.Unflatten(1, (1, 4)), nn.Conv1d(1, 2, 3), nn.ReLU(inplace=True), nn.Flatten(), nn.Linear(4, 4)
        ),
        {"4": 3},
    ),
}


@pytest.mark.parametrize("engine", [Step, FastStep])
@pytest.mark.parametrize("name", TARGETS)
def test_the_same_to_the_bit(name, engine):
    """Every choice of masked layers, in an order that would show what one pass leaves for the next."""
    torch.manual_seed(0)
    make, layers = TARGETS[name]
    target = make().eval()
    model = DecomposedModel(target, layers)
    for batch in (torch.randn(5, 4), torch.randn(3, 4)):
        step = Step(model, batch, {}, DIVERGENCES["mse"])
        again = engine(model, batch, {}, DIVERGENCES["mse"])
        torch.testing.assert_close(again.clean.output, target(batch), rtol=0, atol=1e-6)
        names = list(model.layers)
        choices = [*([n] for n in names), names, names[:1], names[-1:], names[1:] or names]
        passes = [{n: Mask(torch.rand(len(batch), model.layers[n].C)) for n in chosen} for chosen in choices]
        # All of them one after the other, before anything is run in full.
        plain, ours = [step.output(masks) for masks in passes], [again.output(masks) for masks in passes]
        for masks, a, b in zip(passes, plain, ours, strict=True):
            expected = model.masked(batch, masks)
            assert torch.equal(a, expected)
            torch.testing.assert_close(b, expected)


def test_it_is_not_run_again():
    torch.manual_seed(0)
    target = Residual().eval()
    model = DecomposedModel(target, {"blocks.2.linear": 3, "last": 3})
    x = torch.randn(5, 4)
    step = Step(model, x, {}, DIVERGENCES["mse"])
    counters = [block.counted for block in target.blocks]
    COUNTS.clear()
    step.output({"last": Mask(torch.ones(3))})
    assert COUNTS == {}
    step.output({"blocks.2.linear": Mask(torch.ones(3))})
    assert COUNTS == {}  # what that block computes before the masked layer is known too
    model.clean(x)
    assert {id(c): 1 for c in counters} == COUNTS


@pytest.mark.parametrize("engine", [Step, FastStep])
def test_a_batch_that_comes_again_is_not_begun_again(engine):
    torch.manual_seed(0)
    target = nn.Sequential(nn.Flatten(), Counted(), nn.Linear(4, 4), Counted(), nn.Linear(4, 4)).eval()
    model = DecomposedModel(target, {"2": 3, "4": 3})
    x, other = torch.randn(5, 4), torch.randn(5, 4)
    model.clean(x)
    before, between = target[1], target[3]
    expected = model.clean(x)
    with engine.ready(model):
        COUNTS.clear()
        steps = [engine(model, batch, {}, DIVERGENCES["mse"]) for batch in (x, other, x, other, (x,))]
        assert {id(before): 2, id(between): 5} == COUNTS
        for step in steps[::2]:
            assert torch.equal(step.clean.output, expected.output)
            assert torch.equal(step.clean.inputs["2"], expected.inputs["2"])
            masks = {"4": Mask(torch.rand(5, 3))}
            torch.testing.assert_close(step.output(masks), model.masked(x, masks))
        x += 1  # another batch in the same memory
        assert not torch.equal(engine(model, x, {}, DIVERGENCES["mse"]).clean.output, expected.output)
        assert COUNTS[id(before)] > 2
        passing = weakref.ref(batch := torch.randn(5, 4))
        engine(model, batch, {}, DIVERGENCES["mse"])
        del batch
        gc.collect()
        assert passing() is None
    with torch.no_grad():
        before.weight.add_(1)
    assert not torch.equal(model.clean(other).output, steps[1].clean.output)


def test_hooks_of_the_user_go_on_working():
    torch.manual_seed(0)
    target = nn.Sequential(nn.Sequential(nn.Linear(4, 4), nn.Tanh()), nn.Linear(4, 4)).eval()
    model = DecomposedModel(target, {"1": 3})
    x = torch.randn(2, 4)
    model.clean(x)
    seen = []
    handle = target[0][1].register_forward_hook(lambda module, args, output: seen.append(output))
    step = Step(model, x, {}, DIVERGENCES["mse"])
    step.output({"1": Mask(torch.ones(3))})
    assert len(seen) == 2
    handle.remove()
    step = Step(model, x, {}, DIVERGENCES["mse"])
    step.output({"1": Mask(torch.ones(3))})
    assert len(seen) == 2


def test_little_is_kept():
    """One result of a part of the network that holds no decomposed layer, not all that is inside."""
    prefix = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(5)))
    target = nn.Sequential(prefix, nn.Linear(4, 4), nn.Tanh()).eval()
    model = DecomposedModel(target, {"1": 3})
    model.clean(torch.randn(2, 4))
    log = model.clean(torch.randn(2, 4)).recording.log
    assert [call.module for call in log] == [prefix, target[1]]
