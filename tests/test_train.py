"""The loop: what it optimises, what it records, and that being interrupted changes nothing."""

import json
import os
import signal
import threading

import pytest
import torch

import rankone
from conftest import small_mlp, uniform
from rankone import DecompositionConfig, RankoneError
from rankone.data import batches
from rankone.decomposition import build
from rankone.files import load_sealed
from rankone.importance import upper_leaky
from rankone.optim import Adam
from rankone.step import faithfulness
from rankone.train import Interrupted, Training

CONFIG = DecompositionConfig(
    steps=23,
    log_every=4,
    checkpoint_every=5,
    importance={"options": {"d_gate": 4}},
    faithfulness_warmup={"steps": 3},
    optimizer={"lr": 1e-2, "schedule": "quarter_cosine", "warmup_steps": 2, "grad_clip": 1.0},
)
LAYERS = {"0": 5, "2": 7}


def checkpoints(out):
    return sorted((out / "checkpoints").glob("step-*"))


def tensors(decomposition):
    return {name: p.detach().clone() for name, p in decomposition.model.named_tensors().items()}


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run that nobody disturbed."""
    out = tmp_path_factory.mktemp("whole")
    torch.set_num_threads(1)
    return out, rankone.decompose(small_mlp(), uniform(), LAYERS, CONFIG, out=out)


class Crash(Exception):
    pass


def crash_at(step):
    def observer(progress):
        if progress.step > step:
            raise Crash

    return observer


@pytest.mark.parametrize("step", [0, 3, 7, 11, 16, 20])
def test_a_crashed_run_resumes_to_the_same_bits(whole, tmp_path, step):
    out, expected = whole
    with pytest.raises(Crash):
        rankone.decompose(small_mlp(), uniform(), LAYERS, CONFIG, out=tmp_path, observer=crash_at(step))
    resumed = rankone.decompose(small_mlp(), uniform(), LAYERS, CONFIG, out=tmp_path, resume=True)
    for name, tensor in tensors(expected).items():
        assert torch.equal(tensors(resumed)[name], tensor), name
    assert (tmp_path / "metrics.jsonl").read_bytes() == (out / "metrics.jsonl").read_bytes()
    assert resumed.history == expected.history
    assert (tmp_path / "decomposition" / "components.safetensors").read_bytes() == (
        out / "decomposition" / "components.safetensors"
    ).read_bytes()
    final = [load_sealed(checkpoints(d)[-1])[0] for d in (out, tmp_path)]
    assert final[0].keys() == final[1].keys()
    assert all(torch.equal(final[0][key], final[1][key]) for key in final[0])


def test_shuffled_data_resumes_to_the_same_bits(tmp_path):
    data = torch.utils.data.TensorDataset(torch.rand(30, 4, generator=torch.Generator().manual_seed(0)))
    loader = torch.utils.data.DataLoader(data, batch_size=8, shuffle=True)
    expected = rankone.decompose(small_mlp(), loader, LAYERS, CONFIG, out=tmp_path / "a")
    with pytest.raises(Crash):
        rankone.decompose(small_mlp(), loader, LAYERS, CONFIG, out=tmp_path / "b", observer=crash_at(12))
    torch.rand(5)
    resumed = rankone.decompose(small_mlp(), loader, LAYERS, CONFIG, out=tmp_path / "b", resume=True)
    assert all(
        torch.equal(a, b) for a, b in zip(tensors(expected).values(), tensors(resumed).values(), strict=True)
    )


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM], ids=["SIGINT", "SIGTERM"])
def test_signals_save_and_stop(whole, tmp_path, signum):
    def send(progress):
        if progress.step > 8:
            os.kill(os.getpid(), signum)

    before = signal.getsignal(signum)
    with pytest.raises(
        Interrupted, match=r"Interrupted at step \d+ of 23; everything is saved in .*step-.*resume=True"
    ):
        rankone.decompose(small_mlp(), uniform(), LAYERS, CONFIG, out=tmp_path, observer=send)
    assert signal.getsignal(signum) is before
    resumed = rankone.decompose(small_mlp(), uniform(), LAYERS, CONFIG, out=tmp_path, resume=True)
    assert all(
        torch.equal(a, b) for a, b in zip(tensors(whole[1]).values(), tensors(resumed).values(), strict=True)
    )


def test_training_works_outside_the_main_thread(tmp_path):
    done = []
    work = threading.Thread(
        target=lambda: done.append(rankone.decompose(small_mlp(), uniform(), LAYERS, CONFIG, out=tmp_path))
    )
    work.start()
    work.join()
    assert done


def test_checkpoints_are_kept_sparingly(whole):
    assert [p.name for p in checkpoints(whole[0])] == [
        "step-000000020.safetensors",
        "step-000000023.safetensors",
    ]


def test_a_damaged_checkpoint_is_refused_with_a_way_out(whole, tmp_path):
    with pytest.raises(Crash):
        rankone.decompose(small_mlp(), uniform(), LAYERS, CONFIG, out=tmp_path, observer=crash_at(20))
    newest = checkpoints(tmp_path)[-1]
    newest.write_bytes(newest.read_bytes()[:-1])
    with pytest.raises(
        RankoneError,
        match=r"step-000000020.safetensors was changed.*Delete that file to go on from checkpoints/step-000000015",
    ):
        rankone.decompose(small_mlp(), uniform(), LAYERS, CONFIG, out=tmp_path, resume=True)
    newest.unlink()
    resumed = rankone.decompose(small_mlp(), uniform(), LAYERS, CONFIG, out=tmp_path, resume=True)
    assert all(
        torch.equal(a, b) for a, b in zip(tensors(whole[1]).values(), tensors(resumed).values(), strict=True)
    )


def test_resuming_something_else_is_refused(tmp_path):
    with pytest.raises(Crash):
        rankone.decompose(small_mlp(), uniform(), LAYERS, CONFIG, out=tmp_path, observer=crash_at(12))
    other = CONFIG.model_copy(update={"seed": 5})
    with pytest.raises(RankoneError, match=r"written with other settings.*seed was 0 and is now 5"):
        rankone.decompose(small_mlp(), uniform(), LAYERS, other, out=tmp_path, resume=True)
    with pytest.raises(RankoneError, match="belongs to another target network"):
        rankone.decompose(small_mlp(seed=9), uniform(), LAYERS, CONFIG, out=tmp_path, resume=True)
    with pytest.raises(RankoneError, match=r"was written for other layers: C of 0 was 5 and is now 6"):
        rankone.decompose(small_mlp(), uniform(), {"0": 6, "2": 7}, CONFIG, out=tmp_path, resume=True)
    with pytest.raises(RankoneError, match=r"divergence was 'mse' and is now '.*<lambda>'"):
        rankone.decompose(
            small_mlp(),
            uniform(),
            LAYERS,
            CONFIG,
            out=tmp_path,
            resume=True,
            divergence=lambda a, b: (a - b).abs().mean(),
        )
    with pytest.raises(RankoneError, match=r"output was None and is now '.*<lambda>'"):
        rankone.decompose(
            small_mlp(), uniform(), LAYERS, CONFIG, out=tmp_path, resume=True, output=lambda y: y
        )
    whole = (tmp_path / "metrics.jsonl").read_text()
    (tmp_path / "metrics.jsonl").write_text(whole.replace("0.", "1.", 1))
    with pytest.raises(RankoneError, match=r"metrics.jsonl was changed after the checkpoint was taken"):
        rankone.decompose(small_mlp(), uniform(), LAYERS, CONFIG, out=tmp_path, resume=True)
    (tmp_path / "metrics.jsonl").write_text("")
    with pytest.raises(
        RankoneError, match=r"metrics.jsonl has 0 bytes, but the checkpoint was taken when it had"
    ):
        rankone.decompose(small_mlp(), uniform(), LAYERS, CONFIG, out=tmp_path, resume=True)


def test_the_warm_up_improves_faithfulness_only():
    model = build(small_mlp(), LAYERS, CONFIG, None)
    gates = {n: p.detach().clone() for n, p in model.named_tensors().items() if "importance" in n}
    before = faithfulness(model)
    Training(
        model,
        uniform(),
        CONFIG.model_copy(
            update={"faithfulness_warmup": CONFIG.faithfulness_warmup.model_copy(update={"steps": 50})}
        ),
    )._warm_up()
    assert faithfulness(model) < 0.5 * before
    assert all(torch.equal(model.named_tensors()[n], p) for n, p in gates.items())


def test_a_run_begins_with_the_warm_up():
    def at_the_start(steps):
        config = CONFIG.model_copy(
            update={"faithfulness_warmup": CONFIG.faithfulness_warmup.model_copy(update={"steps": steps})}
        )
        return rankone.decompose(small_mlp(), uniform(), LAYERS, config).history[0]["loss"]["faithfulness"]

    assert at_the_start(50) < 0.5 * at_the_start(0)


def test_the_schedule_reaches_the_optimizer():
    seen = []
    training = Training(build(small_mlp(), LAYERS, CONFIG, None), uniform(), CONFIG)
    training.observer = lambda progress: seen.append((training.optimizer.lr, progress.record["lr"]))
    training.run()
    assert all(used == recorded for used, recorded in seen)
    assert seen[0][0] == pytest.approx(CONFIG.optimizer.lr / 2)
    assert seen[-1][0] < seen[1][0]


def test_gradients_are_clipped():
    """Adam's first moment after one step is a tenth of the gradient it was given."""

    def first_moment(clip):
        config = DecompositionConfig(steps=1, optimizer={"grad_clip": clip})
        training = Training(build(small_mlp(), LAYERS, config, None), uniform(), config)
        training.run()
        return torch.cat([10 * training.optimizer.state[p]["exp_avg"].flatten() for p in training.parameters])

    free, clipped = first_moment(None), first_moment(1e-3)
    assert free.norm() > 0.05
    torch.testing.assert_close(clipped, free / free.norm() * 1e-3, rtol=1e-3, atol=1e-8)


def test_one_step_is_adam_on_the_total_loss():
    """The first Adam step moves every parameter by the learning rate against the sign of its gradient."""
    config = DecompositionConfig(steps=1, optimizer={"lr": 1e-3})
    model = build(small_mlp(), LAYERS, config, None)
    training = Training(model, uniform(), config)
    before = {n: p.detach().clone() for n, p in model.named_tensors().items()}
    from rankone.data import batches

    total, _ = training.make_step(0, next(batches(uniform(), 0))).total()
    gradients = dict(zip(before, torch.autograd.grad(total, training.parameters), strict=True))
    training.run()
    for name, p in model.named_tensors().items():
        clear = gradients[name].abs() > 1e-5
        torch.testing.assert_close(
            (p - before[name])[clear], -1e-3 * gradients[name].sign()[clear], rtol=2e-3, atol=1e-7
        )


def test_training_makes_the_loss_smaller():
    config = DecompositionConfig(steps=300, optimizer={"lr": 1e-2})
    history = rankone.decompose(small_mlp(), uniform(), {"*": 8}, config).history
    assert history[-1]["loss"]["total"] < 0.2 * history[0]["loss"]["total"]


def test_a_loss_that_is_not_a_number_stops_training():
    with pytest.raises(
        RankoneError, match=r"The loss is nan at step 0 \(it never was finite\). Lower optimizer.lr"
    ):
        rankone.decompose(
            small_mlp(),
            uniform(),
            {"0": 3},
            CONFIG,
            divergence=lambda output, target: output.sum() * float("nan"),
        )


def test_a_state_that_is_not_finite_is_not_saved(tmp_path):
    class Bad(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            return gradient * float("nan")

    with pytest.raises(
        RankoneError, match=r"0.U holds values that are not finite after step 0; this state is not saved"
    ):
        rankone.decompose(
            small_mlp(), uniform(), LAYERS, CONFIG.model_copy(update={"checkpoint_every": 1}), out=tmp_path,
            divergence=lambda output, target: (Bad.apply(output) - target).square().mean(),
        )  # fmt: skip
    assert not checkpoints(tmp_path)


def test_metrics_hold_no_times(whole):
    lines = (whole[0] / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [0, 4, 8, 12, 16, 20, 22]
    assert set(json.loads(lines[0])) == {"step", "lr", "loss", "l0"}


def test_the_total_has_the_coefficient_of_its_step():
    moving = {"coefficient": 1.0, "coefficient_start": 5.0, "hold": 0.0, "anneal": 1.0}
    config = DecompositionConfig(steps=4, log_every=1, losses={"importance_minimality": moving})
    history = rankone.decompose(small_mlp(), uniform(), LAYERS, config).history
    found = [record["loss"]["total"] / record["loss"]["importance_minimality"] for record in history]
    assert found == pytest.approx([5.0, 4.0, 3.0, 2.0])


@pytest.mark.parametrize("engine", ["exact", "fast"])
def test_a_saturated_penalty_is_the_formula(engine):
    """It is not there at the first step, and all there at the second, when `anneal` is over."""
    data, paid = uniform(rows=100), {}
    for saturation in (0.0, 9.0):
        loss = {"p": 1.0, "saturation": saturation, "anneal": 1e-9}
        config = DecompositionConfig(
            steps=2,
            log_every=1,
            engine=engine,
            optimizer={"lr": 1e-12},
            losses={"importance_minimality": loss},
        )
        result = rankone.decompose(small_mlp(), data, LAYERS, config)
        paid[saturation] = [record["loss"]["importance_minimality"] for record in result.history]
    batch = next(batches(data, config.seed, start=1))
    model = result.model
    clean = model.clean(batch)
    g = [upper_leaky(raw).detach() for raw in model.raw_importances(clean, model.inner(clean)).values()]
    assert paid[0.0][0] == paid[9.0][0]
    assert paid[0.0][1] == pytest.approx(float(sum(x.sum(-1).mean() for x in g)), rel=1e-4)
    assert paid[9.0][1] == pytest.approx(
        float(sum((10 * x / (1 + 9 * x)).sum(-1).mean() for x in g)), rel=1e-4
    )


def test_exponent_and_coefficient_move_from_their_starts():
    from rankone.losses import ImportanceMinimality

    moving = ImportanceMinimality(p=1.0, p_start=2.0, anneal=0.5)
    assert [moving.exponent(t) for t in (0.0, 0.25, 0.5, 1.0)] == [2.0, 1.5, 1.0, 1.0]
    late = ImportanceMinimality(p=1.0, p_start=2.0, hold=0.5, anneal=0.25)
    assert [late.exponent(t) for t in (0.0, 0.5, 0.625, 0.75, 1.0)] == [2.0, 2.0, 1.5, 1.0, 1.0]
    with pytest.raises(ValueError, match=r"hold \+ anneal is 1.2, so what moves would never arrive"):
        ImportanceMinimality(p_start=2.0, hold=0.7, anneal=0.5)
    assert ImportanceMinimality(p=0.9).exponent(0.0) == 0.9
    assert ImportanceMinimality(coefficient=2.0).coefficient_at(0.0) == 2.0
    with pytest.raises(ValueError, match=r"a coefficient of 0 switches the loss off"):
        ImportanceMinimality(coefficient=0.0, coefficient_start=5.0)
    both = ImportanceMinimality(
        coefficient=1.0, coefficient_start=5.0, p=1.0, p_start=2.0, hold=0.5, anneal=0.25
    )
    assert [both.coefficient_at(t) for t in (0.0, 0.5, 0.625, 0.75, 1.0)] == [5.0, 5.0, 3.0, 1.0, 1.0]
    assert both.settled == 0.75
    flat = ImportanceMinimality(saturation=9.0, hold=0.5, anneal=0.25)
    assert [flat.penalty(t).saturation for t in (0.0, 0.5, 0.625, 0.75, 1.0)] == [0.0, 0.0, 4.5, 9.0, 9.0]
    assert flat.settled == 0.75
    assert ImportanceMinimality().settled == 0.0
    recorded = {}
    for start in (None, 4.0):
        config = DecompositionConfig(
            steps=3, log_every=1, losses={"importance_minimality": {"p": 1.0, "p_start": start}}
        )
        recorded[start] = rankone.decompose(small_mlp(), uniform(), LAYERS, config).history[0]["loss"][
            "importance_minimality"
        ]
    assert recorded[None] != recorded[4.0]


def test_the_optimizer_is_torchs_adam_to_the_bit():
    torch.manual_seed(0)
    ours, theirs = (
        [torch.nn.Parameter(torch.ones(3, 4)), torch.nn.Parameter(torch.ones(5))] for _ in range(2)
    )
    mine = Adam({str(i): p for i, p in enumerate(ours)})
    reference = torch.optim.Adam(theirs, fused=True)
    for step in range(7):
        for a, b in zip(ours, theirs, strict=True):
            a.grad = torch.randn(a.shape)
            b.grad = a.grad.clone()
        reference.param_groups[0]["lr"] = 0.1 / (step + 1)
        mine.update(0.1 / (step + 1))
        reference.step()
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
