"""Every piece of the method that the paper does not have, against a literal transcription: values and
gradients, on every kind of layer, by both engines."""

import pytest
import torch
from torch import nn

import oracle
import rankone
from conftest import small_mlp
from rankone import DecomposedModel, WeightedBatch
from rankone.adversary import Attack, PersistentAttack
from rankone.data import seed_for
from rankone.errors import ConfigError, TrainingError
from rankone.fast.step import FastStep
from rankone.importance import straight_through
from rankone.losses import LOSSES, mse
from rankone.masks import ROUTINGS, Draw, Mask, MaskSettings, uniform
from rankone.step import Penalty, Step
from test_fast import KEY, gate, relative
from test_fast import fast as gates
from test_oracle import assert_same, build, literal_layers, literal_network, scatter_gates

KINDS = ["linear", "linear_no_bias", "conv1d", "embedding"]
SEED = 5
both_engines = pytest.mark.parametrize("engine", [Step, FastStep])
every_kind = pytest.mark.parametrize("kind", KINDS)


class Literal:
    """A small network of one kind of layer followed by a linear one, in rankone's words and in the
    oracle's."""

    def __init__(self, kind: str, rows: int = 5) -> None:
        torch.manual_seed(0)
        self.chain, _ = build([kind, "linear"], [3, 4, 2], 5)
        self.model = DecomposedModel(self.chain, {"layers.*": 3}, importance_options={"d_gate": 2}, seed=1)
        scatter_gates(self.model, 2)
        x = torch.randint(0, 5, (rows,)) if kind == "embedding" else torch.randn(rows, 3, dtype=torch.float64)
        self.x, self.X = x, list(x)
        originals = [layer.matrix() for layer in self.model.layers.values()]
        prefixes = [literal_network(self.chain, up_to=i) for i in range(2)]
        activations = [lambda x, f=f: f(x, originals) for f in prefixes]
        self.layers = literal_layers(self.model, "mlp", activations)
        self.f = literal_network(self.chain)

    def draws(self, masks: MaskSettings, name: str = "masks/{}/0") -> list[torch.Tensor]:
        """r of every layer, `[rows, C]`, as the engine draws it."""
        found = []
        for layer in self.model.layers:
            u = uniform(
                seed_for(SEED, name.format(layer), 0), torch.zeros(len(self.x), 3, dtype=torch.float64)
            )
            u = u.apply_(lambda v: oracle.with_ends(v, masks.at_zero, masks.at_one))
            found.append(u)
        return found

    def deltas(self, masks: MaskSettings) -> list[torch.Tensor]:
        one = torch.zeros(len(self.x), 1, dtype=torch.float64)
        return [
            uniform(seed_for(SEED, f"masks/{layer}/delta/0", 0), one)
            .apply_(lambda v: oracle.with_ends(v, masks.at_zero, masks.at_one))
            .flatten()
            for layer in self.model.layers
        ]

    def matrix(self, masks: MaskSettings, r, deltas=None):
        """layer, datapoint -> its masked matrix."""
        sigma = oracle.sigma_lower if masks.sigmoid == "leaky" else oracle.StraightThrough.apply

        def made(i, layer, b):
            m = oracle.mask(oracle.raw_importances(layer, self.X[b]), r[i][b], sigma)
            if deltas is None:
                return oracle.masked_matrix(layer, m)
            return oracle.masked_with_delta(layer, m, deltas[i][b])

        return made

    def step(self, engine, terms, masks=None, **kwargs):
        with engine.ready(self.model):
            step = engine(self.model, self.x, terms, mse, seed=SEED, masks=masks, **kwargs)
            return step, step.total()[1]


@both_engines
@every_kind
@pytest.mark.parametrize("sigmoid", ["leaky", "straight_through"])
@pytest.mark.parametrize("ends", [(0.0, 0.0), (0.3, 0.2)])
@pytest.mark.parametrize("delta", [False, True])
def test_rules_of_masks(engine, kind, sigmoid, ends, delta):
    """Sigmoid, ends and delta, in every combination."""
    case = Literal(kind)
    masks = MaskSettings(sigmoid=sigmoid, at_zero=ends[0], at_one=ends[1], delta=delta)
    _, ours = case.step(engine, {"recon": LOSSES["stochastic_recon"]()}, masks)
    matrix = case.matrix(masks, case.draws(masks), case.deltas(masks) if delta else None)
    literal = {"recon": oracle.recon(case.f, case.layers, case.X, matrix, oracle.mse)}
    assert_same(ours, literal, case.model.named_tensors())


@both_engines
@every_kind
@pytest.mark.parametrize("delta", [False, True])
def test_subset_routing(engine, kind, delta):
    """On every datapoint the layers that were not chosen are the original."""
    case = Literal(kind, rows=12)
    masks = MaskSettings(delta=delta)
    step, ours = case.step(engine, {"recon": LOSSES["stochastic_recon_subset"]()}, masks)
    (routed,) = step.routed(step.masks("stochastic", 0), "subset", 0)
    chosen = torch.stack([mask.where for mask in routed.values()])
    assert chosen.any(0).all(), "on every datapoint at least one layer is masked"
    assert not chosen.all(), "and not always all of them"
    masked = case.matrix(masks, case.draws(masks), case.deltas(masks) if delta else None)
    literal = oracle.recon(
        case.f,
        case.layers,
        case.X,
        lambda i, layer, b: masked(i, layer, b) if chosen[i, b] else layer.W,
        oracle.mse,
    )
    assert_same(ours, {"recon": literal}, case.model.named_tensors())


def test_subset_routing_draws_every_number_of_layers_alike():
    masks = {name: Mask(torch.zeros(30_000, 2)) for name in "abc"}
    (routed,) = ROUTINGS["subset"](masks, KEY)
    chosen = torch.stack([mask.where for mask in routed.values()])
    shares = torch.bincount(chosen.sum(0), minlength=4) / 30_000
    assert shares.tolist() == pytest.approx([0, 1 / 3, 1 / 3, 1 / 3], abs=0.01)
    assert chosen.double().mean(1).tolist() == pytest.approx([2 / 3] * 3, abs=0.01)
    assert torch.equal(*([m.where for m in next(ROUTINGS["subset"](masks, KEY)).values()][:1] * 2))


def test_subset_routing_of_one_layer_masks_it_everywhere():
    (routed,) = ROUTINGS["subset"]({"only": Mask(torch.zeros(50, 4))}, KEY)
    assert routed["only"].where.all()


def test_subset_routing_where_layers_have_positions_and_others_not():
    masks = {"convolution": Mask(torch.zeros(40, 3, 3, 2)), "linear": Mask(torch.zeros(40, 2))}
    (routed,) = ROUTINGS["subset"](masks, KEY)
    assert routed["convolution"].where.shape == (40, 1, 1)
    assert routed["linear"].where.shape == (40,)
    assert (routed["convolution"].where.flatten() | routed["linear"].where).all()


@both_engines
@every_kind
@pytest.mark.parametrize("scope", ["batch", "datapoint"])
@pytest.mark.parametrize("delta", [False, True])
def test_an_adversary_climbs_the_literal_gradient(engine, kind, scope, delta):
    """Three sign steps of 0.1, and the loss and its gradients under what they found."""
    case = Literal(kind)
    masks = MaskSettings(delta=delta)
    term = LOSSES["adversarial_recon"](steps=3, scope=scope)
    _, ours = case.step(engine, {"recon": term}, masks)
    rows = len(case.X) if scope == "datapoint" else 1
    r = [
        uniform(
            seed_for(SEED, f"masks/{layer}/adversary/0", 0),
            torch.zeros(*[rows] * (scope == "datapoint"), 3 + delta, dtype=torch.float64),
        ).reshape(rows, 3 + delta)
        for layer in case.model.layers
    ]

    def loss(r):
        spread = [t.expand(len(case.X), -1) for t in r]
        deltas = [t[:, 3] for t in spread] if delta else None
        matrix = case.matrix(masks, [t[:, :3] for t in spread], deltas)
        return oracle.recon(case.f, case.layers, case.X, matrix, oracle.mse)

    for _ in range(3):
        r = [t.requires_grad_() for t in r]
        slopes = torch.autograd.grad(loss(r), r)
        r = [(t + 0.1 * slope.sign()).clamp(0, 1).detach() for t, slope in zip(r, slopes, strict=True)]
    assert_same(ours, {"recon": loss(r)}, case.model.named_tensors())


@both_engines
@pytest.mark.parametrize("scope", ["batch", "datapoint"])
def test_a_persistent_adversary_is_adam_on_the_loss(engine, scope):
    """Two training steps with two ascents each, the last of each on the gradient of the loss itself."""
    case = Literal("linear")
    term = LOSSES["adversarial_recon"](persistent=True, steps=2, scope=scope)
    memory = {}
    rows = len(case.X) if scope == "datapoint" else 1
    r = {
        layer: nn.Parameter(
            uniform(
                seed_for(SEED, f"masks/{layer}/adversary/0", 0),
                torch.zeros(*[rows] * (scope == "datapoint"), 3, dtype=torch.float64),
            ).reshape(rows, 3)
        )
        for layer in case.model.layers
    }
    adam = torch.optim.Adam(r.values(), lr=0.01, betas=(0.5, 0.99), eps=1e-20, maximize=True)

    def loss():
        spread = [t.expand(len(case.X), -1) for t in r.values()]
        matrix = case.matrix(MaskSettings(), spread)
        return oracle.recon(case.f, case.layers, case.X, matrix, oracle.mse)

    def ascend():
        for t, slope in zip(r.values(), torch.autograd.grad(loss(), list(r.values())), strict=True):
            t.grad = slope
        adam.step()
        with torch.no_grad():
            for t in r.values():
                t.clamp_(0, 1)

    for _ in range(2):
        with engine.ready(case.model):
            step = engine(case.model, case.x, {"recon": term}, mse, seed=SEED, memory=memory)
            total, values = step.total()
            ascend()
            assert_same(values, {"recon": loss()}, case.model.named_tensors())
            (follower,) = step.followers
            follower.then(list(torch.autograd.grad(total, follower.leaves)))
            ascend()
        for layer, expected in r.items():
            known = memory[f"adversarial_recon/r/{layer}"]
            torch.testing.assert_close(known, expected.detach(), rtol=1e-6, atol=1e-9)


def test_a_persistent_adversary_of_each_datapoint_bears_batches_of_different_size():
    raw = {"layer": torch.randn(6, 2)}
    memory = {}
    attack = PersistentAttack("it", ascents=2, scope="datapoint")

    def draw(rows):
        few = {"layer": raw["layer"][:rows]}
        return Draw(few, lambda name: 3, harm=lambda m: m["layer"].values.sum(), memory=memory)

    attack(draw(4))
    kept = memory["it/r/layer"].clone()
    attack(draw(2))
    assert memory["it/r/layer"].shape == (4, 2)
    assert torch.equal(memory["it/r/layer"][2:], kept[2:])
    attack(draw(6))
    assert memory["it/r/layer"].shape == (6, 2)


@both_engines
@every_kind
def test_smooth_l0_and_frequency(engine, kind):
    case = Literal(kind)
    terms = {
        "smooth_l0": LOSSES["smooth_l0"](gamma_start=0.5, gamma=0.1),
        "frequency": LOSSES["frequency"](),
    }
    _, ours = case.step(engine, terms)
    literal = {
        "smooth_l0": oracle.smooth_l0(case.layers, case.X, 0.5),
        "frequency": oracle.frequency(case.layers, case.X),
    }
    assert_same(ours, literal, case.model.named_tensors())


@both_engines
@every_kind
def test_importances_as_masks(engine, kind):
    case = Literal(kind)
    _, ours = case.step(engine, {"recon": LOSSES["importance_recon"]()})

    def matrix(i, layer, b):
        raw = oracle.raw_importances(layer, case.X[b])
        return oracle.masked_matrix(layer, torch.stack([x.clamp(0, 1) for x in raw]))

    literal = {"recon": oracle.recon(case.f, case.layers, case.X, matrix, oracle.mse)}
    assert_same(ours, literal, case.model.named_tensors())


def test_frequency_counts_rows_by_their_weight_and_remembers():
    model = DecomposedModel(small_mlp(), {"*": 3})
    x = torch.rand(4, 4)
    twice = torch.cat([x, x[:1]])
    merged = WeightedBatch(x, torch.tensor([2.0, 1, 1, 1]))
    loss = LOSSES["frequency"]()
    values = [loss.value(Step(model, batch, {}, mse)) for batch in (twice, merged)]
    torch.testing.assert_close(*values)
    memory = {}
    slow = LOSSES["frequency"](remember=0.9)
    first = slow.value(Step(model, x, {}, mse, memory=memory))
    torch.testing.assert_close(first, loss.value(Step(model, x, {}, mse)))
    other = torch.rand(1, 4)  # one datapoint is enough where earlier ones are remembered
    second = slow.value(Step(model, other, {}, mse, memory=memory))
    assert abs(second - first) < abs(
        LOSSES["frequency"](remember=1e-9).value(Step(model, other, {}, mse)) - first
    )


def test_frequency_without_data_to_count_says_what_to_change():
    model = DecomposedModel(small_mlp(), {"*": 3})
    with pytest.raises(
        TrainingError, match=r"only one datapoint\. Use larger batches, or set .*remember=0\.99"
    ):
        LOSSES["frequency"]().value(Step(model, torch.rand(1, 4), {}, mse))


@pytest.mark.parametrize("penalty", [Penalty(0.0, gamma=0.5), Penalty(0.0, gamma=0.05), Penalty(1.0)])
@pytest.mark.parametrize(
    "masks",
    [
        MaskSettings(sigmoid="straight_through"),
        MaskSettings(at_zero=0.4, at_one=0.1),
        MaskSettings(sigmoid="straight_through", at_zero=0.2, at_one=0.2),
    ],
)
def test_kernels_follow_the_rules(penalty, masks):
    """Values and gradients of compiled gates beside torch in double precision."""
    torch.manual_seed(0)
    quick, exact = gate(6, 16), gate(6, 16).double()
    h = (torch.randn(300, 6) * (torch.rand(300, 6) < 0.6)).requires_grad_()
    H = h.detach().double().requires_grad_()
    made, paid = gates.gated({"layer": gates.Gate(quick, h, KEY)}, penalty, masks)
    raw = exact(H)
    g = masks.importance(raw)
    mask = g + (1 - g) * masks.random(KEY, raw)
    literal = (raw, mask, mask * H)
    cost = penalty.of(raw).mean()
    for ours, theirs in zip((*made["layer"], paid), (*literal, cost), strict=True):
        assert relative(ours, theirs) < 1e-4
    smooth = ((raw.abs() > 1e-3) & ((raw - 1).abs() > 1e-3)).detach()
    by = [torch.randn(300, 6) * smooth for _ in range(3)]
    total = sum((t * w).sum() for t, w in zip(made["layer"], by, strict=True)) + 10 * paid
    expected = sum((t * w.double()).sum() for t, w in zip(literal, by, strict=True)) + 10 * cost
    ours = torch.autograd.grad(total, [h, *quick.parameters()])
    theirs = torch.autograd.grad(expected, [H, *exact.parameters()])
    for a, b in zip(ours, theirs, strict=True):
        assert relative(a, b) < 1e-3


def test_straight_through_leaks_upwards_only():
    raw = torch.tensor([-2.0, -2.0, 0.5, 3.0], requires_grad=True)
    straight_through(raw).backward(torch.tensor([-1.0, 1.0, 1.0, -1.0]))
    assert raw.grad.tolist() == pytest.approx([-0.01, 0, 1, 0])


def test_ends_have_their_weight():
    r = MaskSettings(at_zero=0.3, at_one=0.2).random(KEY, torch.zeros(50_000, 1))
    assert float((r == 0).double().mean()) == pytest.approx(0.3, abs=0.01)
    assert float((r == 1).double().mean()) == pytest.approx(0.2, abs=0.01)
    only = MaskSettings(at_zero=0.5, at_one=0.5).random(KEY, torch.zeros(50_000, 1))
    assert set(only.flatten().tolist()) <= {0.0, 1.0}
    assert float(only.mean()) == pytest.approx(0.5, abs=0.01)


def test_delta_makes_the_sum_exact_in_every_orientation_of_a_tied_layer():
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.down, self.up = nn.Linear(5, 2, bias=False), nn.Linear(2, 5)
            self.up.weight = nn.Parameter(self.down.weight.detach().T.clone())

        def forward(self, x):
            return torch.relu(self.up(self.down(x)))

    torch.manual_seed(0)
    target = Tied().eval()
    model = DecomposedModel(target, {"*": 4}, tied={"up": "down"})
    x = torch.rand(7, 5)
    masks = {n: Mask(torch.ones(7, 4), delta=torch.ones(7)) for n in model.layers}
    torch.testing.assert_close(model.masked(x, masks), target(x))
    config = {"steps": 3, "tied": {"up": "down"}, "masks": {"delta": True}}
    rankone.decompose(target, [x], {"*": 4}, config)


def test_minimality_ramps_in():
    loss = LOSSES["importance_minimality"](coefficient=1.0, ramp=0.2)
    assert [loss.coefficient_at(t) for t in (0.0, 0.1, 0.2, 0.9)] == pytest.approx([0, 0.5, 1, 1])
    assert loss.settled == 0.2
    smooth = LOSSES["smooth_l0"](coefficient=2.0, ramp=0.5, gamma_start=1.0, gamma=0.01, hold=0.2, anneal=0.6)
    assert smooth.coefficient_at(0.25) == pytest.approx(1.0)
    found = [smooth.penalty(t).gamma for t in (0.0, 0.2, 0.5, 0.8, 1.0)]
    assert found == pytest.approx([1, 1, 0.1, 0.01, 0.01])


def test_an_adversary_that_starts_late_costs_nothing_before():
    model = DecomposedModel(small_mlp(), {"*": 3})
    loss = LOSSES["adversarial_recon"](start=0.5)
    early, late = (Step(model, torch.rand(8, 4), {}, mse, progress=t) for t in (0.4, 0.5))
    assert loss.value(early) == 0
    assert loss.value(late) > 0


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"adversarial_recon": {"steps": 0}}, r"steps.*greater than or equal to 1"),
        ({"adversarial_recon": {"step_size": 0}}, r"step_size.*greater than 0"),
        ({"adversarial_recon": {"routing": "subsets"}}, r"subset"),
        ({"smooth_l0": {"gamma": 0}}, r"gamma.*greater than 0"),
        ({"smooth_l0": {"hold": 0.7, "anneal": 0.7}}, r"hold \+ anneal is 1\.4"),
        ({"frequency": {"remember": 1}}, r"remember.*less than 1"),
    ],
)
def test_settings_that_make_no_sense(settings, message):
    with pytest.raises(ConfigError, match=message):
        rankone.decompose(small_mlp(), [torch.rand(4, 4)], {"*": 3}, {"losses": settings})


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Attack(0), r"steps=0 never moves; give 1 or more"),
        (lambda: Attack(2, 0.0), r"step_size=0 goes nowhere"),
        (lambda: Attack(2, -0.1), r"step_size=-0\.1 goes nowhere, or down; give a positive number"),
        (lambda: Attack(2, float("nan")), r"step_size=nan"),
        (lambda: PersistentAttack("it", ascents=0), r"ascents=0 never moves"),
        (lambda: PersistentAttack("it", lr=0.0), r"lr=0 goes nowhere"),
    ],
)
def test_an_adversary_that_stands_still_is_refused(make, message):
    with pytest.raises(ConfigError, match=message):
        make()


def test_frequency_counts_what_one_row_stands_for():
    """A sparse batch may be all zeros, merged into one row: that is no batch of one datapoint."""
    model = DecomposedModel(small_mlp(), {"*": 3})
    zeros = torch.zeros(50, 4)
    loss = LOSSES["frequency"]()
    merged = loss.value(Step(model, WeightedBatch.merging_zero_rows(zeros), {}, mse))
    torch.testing.assert_close(merged, loss.value(Step(model, zeros, {}, mse)))
    with pytest.raises(TrainingError, match="only one datapoint"):
        loss.value(Step(model, WeightedBatch.merging_zero_rows(zeros[:1]), {}, mse))


@pytest.mark.parametrize("engine", ["fast", "exact"])
@pytest.mark.parametrize(
    "losses", [{"stochastic_recon_subset": {}}, {"adversarial_recon": {"routing": "subset"}}]
)
def test_subset_routing_trains_a_single_layer(engine, losses):
    config = {"steps": 2, "engine": engine, "losses": losses}
    result = rankone.decompose(small_mlp(), [torch.rand(80, 4)], {"0": 3}, config)
    assert result.history[-1]["loss"]["total"] > 0


@pytest.mark.parametrize("engine", ["fast", "exact"])
def test_delta_with_an_embedding_tied_to_the_unembedding(engine):
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.unembed = nn.Embedding(7, 3), nn.Linear(3, 7, bias=False)
            self.unembed.weight = self.embed.weight

        def forward(self, x):
            return self.unembed(self.embed(x))

    config = {
        "steps": 3,
        "engine": engine,
        "tied": {"unembed": "embed"},
        "masks": {"delta": True},
        "losses": {"stochastic_recon": {}, "adversarial_recon": {}},
    }
    torch.manual_seed(0)
    target, x = Tied().eval(), torch.randint(0, 7, (80,))
    model = rankone.decompose(target, [x], {"*": 4}, config).model
    ones = {n: Mask(torch.ones(80, 4), delta=torch.ones(80)) for n in model.layers}
    torch.testing.assert_close(model.masked(x, ones), target(x))


def test_shares_of_random_numbers_that_are_no_shares():
    with pytest.raises(ConfigError, match=r"at_zero \+ at_one is 1\.2"):
        MaskSettings(at_zero=0.6, at_one=0.6)


def test_an_adversary_that_can_change_nothing_says_so():
    draw = Draw({"layer": torch.zeros(3, 2)}, lambda name: 1, harm=lambda masks: torch.zeros(()))
    with pytest.raises(TrainingError, match="nothing to attack"):
        Attack(2)(draw)


EVERYTHING = {
    "steps": 12,
    "checkpoint_every": 3,
    "log_every": 1,
    "masks": {"sigmoid": "straight_through", "at_zero": 0.1, "at_one": 0.1, "delta": True},
    "losses": {
        "stochastic_recon_subset": {},
        "adversarial_recon": {"persistent": True, "steps": 2, "routing": "subset"},
        "smooth_l0": {"ramp": 0.2},
        "frequency": {"remember": 0.5},
    },
}


@pytest.mark.parametrize("scope", ["batch", "datapoint"])
def test_resuming_with_a_persistent_adversary_is_bit_identical(tmp_path, scope):
    config = {**EVERYTHING, "losses": {**EVERYTHING["losses"]}}
    config["losses"]["adversarial_recon"] = {**config["losses"]["adversarial_recon"], "scope": scope}

    def data(generator):
        rows = int(torch.randint(70, 90, (), generator=generator))
        return torch.rand(rows, 4, generator=generator)

    whole = rankone.decompose(small_mlp(), data, {"*": 5}, config, out=tmp_path / "whole")
    stopped = tmp_path / "stopped"

    class Stop(Exception):
        pass

    def observer(progress):
        if progress.step == 8:
            raise Stop

    with pytest.raises(Stop):
        rankone.decompose(small_mlp(), data, {"*": 5}, config, out=stopped, observer=observer)
    resumed = rankone.decompose(small_mlp(), data, {"*": 5}, config, out=stopped, resume=True)
    for name, tensor in whole.model.named_tensors().items():
        assert torch.equal(tensor, resumed.model.named_tensors()[name]), name
    logs = [(tmp_path / of / "metrics.jsonl").read_bytes() for of in ("whole", "stopped")]
    assert logs[0] == logs[1]
