"""What an attack on 0.1.0 broke in the core, row by row: each of these failed before it was mended."""

import multiprocessing
import os
import threading
import time

import pytest
import torch
from torch import nn

import rankone
from conftest import rankone_main, small_mlp, uniform
from rankone import DecompositionConfig, RankoneError
from rankone.files import RunDirectory, fingerprint
from rankone.importance import IMPORTANCES, JointImportance
from rankone.losses import LOSSES, mse
from rankone.step import Penalty
from rankone.train import ENGINES

CONFIG = DecompositionConfig(
    steps=12, log_every=4, checkpoint_every=4, importance={"options": {"d_gate": 4}}, keep_checkpoints=3
)
LAYERS = {"0": 5, "2": 7}


class Crash(Exception):
    pass


def crash(progress):
    if progress.step > 8:
        raise Crash


# Row 1: files that are not ours.


def test_a_directory_in_use_is_refused_by_name_and_left_alone(tmp_path):
    foreign = {"notes.txt": "mine", ".x.tmp": "mine", "figures/mine.svg": "mine", "metrics.jsonl": "mine"}
    for name, text in foreign.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    for resume in (False, True):
        with pytest.raises(RankoneError, match=rf"{tmp_path.name}.*metrics.jsonl|figures|notes"):
            rankone.decompose(small_mlp(), uniform(), LAYERS, CONFIG, out=tmp_path, resume=resume)
    with pytest.raises(RankoneError, match=tmp_path.name):
        rankone.decompose(small_mlp(), uniform(), LAYERS, CONFIG).save(tmp_path)
    assert {name: (tmp_path / name).read_text() for name in foreign} == foreign
    with pytest.raises(RankoneError, match="empty path"):
        rankone.decompose(small_mlp(), uniform(), LAYERS, CONFIG, out="")


def test_foreign_files_and_links_in_a_run_directory_survive_resuming(tmp_path):
    out, outside = tmp_path / "run", tmp_path / "outside"
    outside.mkdir()
    (outside / "precious").write_text("mine")
    with pytest.raises(Crash):
        rankone.decompose(small_mlp(), uniform(), LAYERS, CONFIG, out=out, observer=crash)
    (out / "notes.txt").write_text("mine")
    (out / "checkpoints/.half.tmp").write_text("mine")
    (out / "decomposition").symlink_to(outside, target_is_directory=True)
    with pytest.raises(RankoneError, match=r"run/decomposition .*symbolic link|link.*run/decomposition"):
        rankone.decompose(small_mlp(), uniform(), LAYERS, CONFIG, out=out, resume=True)
    assert sorted(p.name for p in outside.iterdir()) == ["precious"]
    assert (out / "notes.txt").read_text() == (out / "checkpoints/.half.tmp").read_text() == "mine"
    (out / "decomposition").unlink()
    rankone.decompose(small_mlp(), uniform(), LAYERS, CONFIG, out=out, resume=True)
    assert (out / "notes.txt").read_text() == (out / "checkpoints/.half.tmp").read_text() == "mine"


# Row 5: two threads, one model.


def test_threads_that_decompose_one_model_get_the_right_results():
    target = small_mlp()
    before = fingerprint(target)
    data = uniform(rows=200)
    alone = [rankone.decompose(target, data, LAYERS, {"steps": 30, "seed": s}).history for s in range(4)]
    together = [None] * 4

    def work(seed):
        torch.set_num_threads(1)
        together[seed] = rankone.decompose(target, data, LAYERS, {"steps": 30, "seed": seed}).history

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert together == alone
    assert fingerprint(target) == before
    assert all("forward" not in module.__dict__ for module in target.modules())
    assert all(p.requires_grad for p in target.parameters())


# Row 7: two processes, one directory.


def _hold(out, ready):
    def observer(progress):
        ready.set()
        time.sleep(30)

    rankone.decompose(small_mlp(), uniform(), LAYERS, CONFIG, out=out, observer=observer)


def test_a_second_process_is_refused(tmp_path):
    spawn = multiprocessing.get_context("spawn")
    ready = spawn.Event()
    process = spawn.Process(target=_hold, args=(tmp_path / "run", ready))
    process.start()
    try:
        assert ready.wait(60)
        with pytest.raises(RankoneError, match=r"Another rankone process is running in .*run"):
            rankone.decompose(small_mlp(), uniform(), LAYERS, CONFIG, out=tmp_path / "run", resume=True)
    finally:
        process.kill()
        process.join()
    rankone.decompose(small_mlp(), uniform(), LAYERS, CONFIG, out=tmp_path / "run", resume=True)


# Row 8: what belongs together.


def test_resuming_with_other_data_or_kernels_is_refused(tmp_path, monkeypatch):
    with pytest.raises(Crash):
        rankone.decompose(small_mlp(), uniform(), LAYERS, CONFIG, out=tmp_path, observer=crash)

    def shifted(generator):
        return 1 + uniform()(generator)

    with pytest.raises(RankoneError, match=r"step-000000008.* on other data: its batches are not the same"):
        rankone.decompose(small_mlp(), shifted, LAYERS, CONFIG, out=tmp_path, resume=True)
    with monkeypatch.context() as patch:
        patch.setattr("rankone.train.kernels_digest", lambda: "f" * 64)
        with pytest.raises(
            RankoneError, match=r"kernels that compute \w+, and this process runs with kernels"
        ):
            rankone.decompose(small_mlp(), uniform(), LAYERS, CONFIG, out=tmp_path, resume=True)
    rankone.decompose(small_mlp(), uniform(), LAYERS, CONFIG, out=tmp_path, resume=True)


def test_data_that_cannot_repeat_itself_still_resumes(tmp_path):
    def different_every_time(generator):
        return torch.rand(16, 4)

    with pytest.raises(Crash):
        rankone.decompose(small_mlp(), different_every_time, LAYERS, CONFIG, out=tmp_path, observer=crash)
    rankone.decompose(small_mlp(), different_every_time, LAYERS, CONFIG, out=tmp_path, resume=True)


@pytest.mark.parametrize(
    "damage",
    [lambda b: b[:-3], lambda b: b.replace(b'"loss"', b'"lost"', 1), lambda b: b.replace(b"0.", b"NaN,", 1)],
    ids=["cut", "key", "value"],
)
def test_a_damaged_metrics_log_is_noticed_by_name(tmp_path, damage):
    with pytest.raises(Crash):
        rankone.decompose(small_mlp(), uniform(), LAYERS, CONFIG, out=tmp_path, observer=crash)
    log = tmp_path / "metrics.jsonl"
    log.write_bytes(damage(log.read_bytes()[: log.read_bytes().index(b"\n", 200) + 1]))
    with pytest.raises(RankoneError, match=r"metrics.jsonl"):
        rankone.decompose(small_mlp(), uniform(), LAYERS, CONFIG, out=tmp_path, resume=True)


# Row 10: the Python interface.


class Overflow(torch.autograd.Function):
    """Finite on the way forward, infinite on the way back."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient * float("inf")


def test_a_result_that_is_not_finite_is_never_returned():
    with pytest.raises(RankoneError, match=r"not finite after step 0"):
        rankone.decompose(
            small_mlp(),
            uniform(),
            LAYERS,
            {"steps": 1},
            divergence=lambda output, target: (Overflow.apply(output) - target).square().mean(-1),
        )


def test_learning_rates_that_overflow_are_refused():
    with pytest.raises(RankoneError, match=r"optimizer.lr: Input should be less than or equal to 1000000"):
        rankone.decompose(small_mlp(), uniform(), LAYERS, {"steps": 1, "optimizer": {"lr": 1e38}})


def test_a_module_that_counts_its_calls_is_refused_and_left_as_it_was():
    class Counts(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = nn.Linear(4, 4)
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, x):
            self.calls += 1
            return self.a(x)

    target = Counts().eval()
    before = fingerprint(target)
    with pytest.raises(RankoneError, match=r"changes its own state when it is run \(calls\)"):
        rankone.decompose(target, uniform(), {"a": 3}, CONFIG)
    assert fingerprint(target) == before


@pytest.mark.parametrize(
    ("model", "data", "layers", "options", "message"),
    [
        (
            small_mlp(),
            uniform(d=5),
            LAYERS,
            {},
            r"cannot be run on a batch of \(16, 5\) torch.float32: .*shapes",
        ),
        (
            small_mlp(),
            [torch.zeros(2, 4).long()],
            LAYERS,
            {},
            r"cannot be run on a batch of \(2, 4\) torch.int64",
        ),
        (small_mlp().to("meta"), uniform(), LAYERS, {}, r"meta device.*Load its weights first"),
        (small_mlp(), uniform(), {"": 3}, {}, r"'' is no name pattern"),
        (
            small_mlp(),
            uniform(),
            LAYERS,
            {"divergence": lambda a, b: None},
            r"divergence returned a NoneType; expected",
        ),
    ],
    ids=["width", "type", "meta", "pattern", "divergence"],
)
def test_mistakes_are_named(model, data, layers, options, message):
    with pytest.raises(RankoneError, match=message):
        rankone.decompose(model, data, layers, CONFIG, **options)


def test_saving_over_an_old_artifact_is_all_or_nothing(tmp_path):
    """Killed at any moment of the second save, the artifact is the old one or the new one, whole."""
    target = small_mlp()
    results = [
        rankone.decompose(target, uniform(), LAYERS, CONFIG.model_copy(update={"seed": s})) for s in (0, 1)
    ]
    histories = [result.history for result in results]
    seen = set()
    for moment in range(60):
        path = tmp_path / str(moment)
        results[0].save(path)
        pid = os.fork()
        if pid == 0:
            calls = 0

            def counted(function, moment=moment):
                def call(*args, **kwargs):
                    nonlocal calls
                    calls += 1
                    if calls > moment:
                        os._exit(0)
                    return function(*args, **kwargs)

                return call

            for name in ("open", "fsync", "replace", "unlink", "rename"):
                setattr(os, name, counted(getattr(os, name)))
            results[1].save(path)
            os._exit(1)
        finished = os.waitpid(pid, 0)[1] != 0
        loaded = rankone.load(path, target)
        assert loaded.history in histories
        seen.add(histories.index(loaded.history))
        if finished:
            break
    assert seen == {0, 1}


# What a review of the mended version found.


@pytest.mark.parametrize("engine", ["exact", "fast"])
def test_a_loss_that_looks_without_gradients_takes_none_from_the_others(engine):
    class Peeking(rankone.Loss):
        coefficient: float = 1e-30

        def value(self, step):
            with torch.no_grad():
                step.distance(step.output(step.masks("stochastic", 0)))
            return step.penalty(Penalty(1.0))

    others = {name: LOSSES[name]() for name in ("stochastic_recon", "stochastic_recon_layerwise")}
    gradients = []
    for terms in (others, {"peeking": Peeking(), **others}):
        model = rankone.DecomposedModel(small_mlp(), LAYERS)
        total, _ = ENGINES[engine](
            model, torch.rand(200, 4, generator=torch.Generator().manual_seed(0)), terms, mse
        ).total()
        gradients.append(torch.autograd.grad(total, list(model.trained().values())))
    for a, b in zip(*gradients, strict=True):
        torch.testing.assert_close(a, b)


def test_a_buffer_that_is_not_a_number_is_left_alone_and_a_failed_pass_changes_nothing():
    target = small_mlp()
    target.register_buffer("unused", torch.tensor(float("nan")))
    rankone.decompose(target, uniform(), LAYERS, {"steps": 1})

    class Fails(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = nn.Linear(4, 4)
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, x):
            self.calls += 1
            raise RuntimeError("as planned")

    fails = Fails().eval()
    with pytest.raises(RankoneError, match="as planned"):
        rankone.decompose(fails, uniform(), {"a": 3}, CONFIG)
    assert fails.calls == 0


@pytest.mark.parametrize("engine", ["exact", "fast"])
def test_one_number_per_datapoint_with_row_weights(engine):
    target = nn.Sequential(nn.Linear(4, 1), nn.Flatten(0)).eval()
    batch = rankone.WeightedBatch(torch.rand(100, 4), torch.rand(100))
    distance = {"divergence": lambda a, b: (a - b).square()}
    result = rankone.decompose(target, [batch], {"0": 3}, {"steps": 2, "engine": engine}, **distance)
    assert len(result.history) == 2


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (1.5, r"The loss 'odd' is 1.5; `value` must return a tensor"),
        (torch.ones(3), r"The loss 'odd' is tensor"),
    ],
)
def test_a_loss_that_returns_something_else_is_named(value, message):
    class Odd(rankone.Loss):
        coefficient: float = 1.0

        def value(self, step):
            return value

    with pytest.raises(RankoneError, match=message):
        ENGINES["exact"](
            rankone.DecomposedModel(small_mlp(), LAYERS), torch.rand(5, 4), {"odd": Odd()}, mse
        ).total()


def test_a_joint_importance_function_must_answer_for_every_layer():
    class Forgetful(JointImportance):
        def __init__(self, shapes, generator):
            super().__init__()
            self.w = nn.Parameter(torch.zeros(()))

        def forward(self, layers):
            return {"0": layers["0"].inner * self.w}

    rankone.register_importance("forgetful")(Forgetful)
    try:
        with pytest.raises(RankoneError, match=r"Forgetful returned .*expected one raw importance for each"):
            rankone.decompose(
                small_mlp(), uniform(), LAYERS, {"steps": 1, "importance": {"kind": "forgetful"}}
            )
    finally:
        del IMPORTANCES["forgetful"]


def test_train_target_replaces_no_file_of_the_users(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "thesis.txt").write_text("mine")
    with pytest.raises(SystemExit):
        rankone_main(["train-target", "tms_5-2", "--out", "thesis.txt"])
    assert "thesis.txt exists already" in capsys.readouterr().err
    assert (tmp_path / "thesis.txt").read_text() == "mine"


def test_a_directory_that_holds_something_else_of_ours_is_refused(tmp_path, capsys):
    RunDirectory.claim(tmp_path / "redrawn").write("figures/a.svg", "<svg/>")
    with pytest.raises(SystemExit):
        rankone_main(["run", "tms_5-2", "--steps", "2", "--out", str(tmp_path / "redrawn")])
    assert "holds something else that rankone made" in " ".join(capsys.readouterr().err.split())
    assert (tmp_path / "redrawn/figures/a.svg").read_text() == "<svg/>"


# What a second attack found.


def test_data_that_differs_only_later_is_noticed(tmp_path):
    torch.manual_seed(0)
    data = [torch.rand(16, 4) for _ in range(30)]
    with pytest.raises(Crash):
        rankone.decompose(small_mlp(), data, LAYERS, CONFIG, out=tmp_path, observer=crash)
    with pytest.raises(RankoneError, match="other data: its batches are not the same"):
        rankone.decompose(
            small_mlp(), [data[0], *(3 * x for x in data[1:])], LAYERS, CONFIG, out=tmp_path, resume=True
        )
    rankone.decompose(small_mlp(), data, LAYERS, CONFIG, out=tmp_path, resume=True)


def test_the_users_own_calls_meanwhile_are_calls_of_the_original():
    target = small_mlp()
    x = torch.rand(50, 4)
    expected = target(x)
    stop, outputs = threading.Event(), []

    def call():
        with torch.no_grad():
            while not stop.is_set():
                outputs.append(target(x))

    thread = threading.Thread(target=call)
    thread.start()
    rankone.decompose(target, uniform(rows=200), LAYERS, {"steps": 60})
    stop.set()
    thread.join()
    assert len(outputs) > 20
    assert all(torch.equal(y, expected) for y in outputs)


def test_a_finished_run_whose_files_were_changed_is_not_called_complete(tmp_path, capsys):
    words = ["run", "tms_5-2", "--steps", "12", "batch_size=64", "log_every=3", "--out", str(tmp_path / "r")]
    rankone_main(words)
    for name in ("metrics.jsonl", "decomposition/components.safetensors", "decomposition/decomposition.json"):
        path = tmp_path / "r" / name
        content = path.read_bytes()
        path.write_bytes(content[:-2] + b"x\n")
        with pytest.raises(SystemExit):
            rankone_main(["run", str(tmp_path / "r"), "--resume"])
        assert path.name in capsys.readouterr().err
        path.write_bytes(content)
    rankone_main(["run", str(tmp_path / "r"), "--resume"])
    assert "already complete" in capsys.readouterr().err
