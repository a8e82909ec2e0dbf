"""Several processes compute what one computes alone; one that is lost is named, and nothing is lost with it."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from torch import nn

import rankone
from conftest import small_mlp
from rankone import RankoneError, WeightedBatch
from rankone.data import OtherRows
from rankone.files import load_sealed
from rankone.processes import place_in, refuse_coupled_rows, rows_of
from rankone.share import Place

WORKER = Path(__file__).with_name("processes_worker.py")
CASES = ("tms", "tms_exact", "residual", "own", "attacked", "persistent", "convolution", "language")


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def start(words, size, **environment):
    """The processes of one job, as torchrun would start them."""
    known = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(size)}
    known |= {"OMP_NUM_THREADS": "1", "RANKONE_PATIENCE": "120"} | environment
    if size == 1:
        known = {"OMP_NUM_THREADS": "1"}
    return [
        subprocess.Popen(
            [sys.executable, *words],
            env=os.environ | known | ({"RANK": str(rank)} if size > 1 else {}),
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for rank in range(size)
    ]  # fmt: skip


def finish(processes, timeout=300):
    """(exit code, what it printed, what it complained about) of each."""
    ended = []
    for process in processes:
        out, err = process.communicate(timeout=timeout)
        ended.append((process.returncode, out, err))
    return ended


@pytest.fixture(scope="module")
def computed(tmp_path_factory):
    """Number of processes -> the directory with what they computed."""
    directories = {}
    for size in (1, 2, 3):
        directories[size] = tmp_path_factory.mktemp(f"processes{size}")
        for code, _, err in finish(start([str(WORKER), str(directories[size])], size)):
            assert code == 0, err
    return directories


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("case", CASES)
def test_the_same_step(computed, size, case):
    alone, _ = load_sealed(computed[1] / f"{case}-0.safetensors")
    shared = [load_sealed(computed[size] / f"{case}-{rank}.safetensors") for rank in range(size)]
    assert sum(meta["place"][0] for _, meta in shared) == shared[0][1]["place"][2]
    for name, whole in alone.items():
        kind = name.partition("/")[0]
        if kind in ("random", "mask"):
            together = torch.cat([tensors[name] for tensors, _ in shared])
            if kind == "random":
                assert torch.equal(together, whole), name
            else:
                torch.testing.assert_close(together, whole, rtol=0, atol=1e-6, msg=name)
        elif kind in ("gradient", "loss", "l0"):
            for tensors, _ in shared:
                limit = 1e-6 * max(float(whole.abs().max()), 1e-12)
                torch.testing.assert_close(tensors[name], whole, rtol=1e-6, atol=10 * limit, msg=name)
    assert {name for name in alone if name.startswith("gradient/")}


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("case", CASES)
def test_after_some_steps_all_hold_the_same_bits(computed, size, case):
    digests = {
        load_sealed(computed[size] / f"{case}-{rank}.safetensors")[1]["parameters"] for rank in range(size)
    }
    assert len(digests) == 1


@pytest.mark.parametrize("size", [2, 3])
def test_processes_that_differ_are_named(computed, size):
    said = [json.loads((computed[size] / f"said-{rank}.json").read_text()) for rank in range(size)]
    named, what = (2, "batches") if size == 3 else (1, "settings")
    for one in said:
        assert f"Process {named} of {size} has {what} that differ from those of process 0" in one["different"]


def test_rows_are_shared_out():
    x = torch.arange(20.0).reshape(10, 2)
    places = [place_in(x, rank, 3) for rank in range(3)]
    assert places == [(3, 0, 10), (3, 3, 10), (4, 6, 10)]
    parts = [rows_of(x, place, even=False) for place in places]
    assert torch.equal(torch.cat([part.inputs for part in parts]), x)
    even = rows_of((x, "kept", torch.ones(1, 2)), Place(5, 5, 10))
    assert torch.equal(even[0], x[5:])
    assert even[1] == "kept"
    assert even[2].shape == (1, 2)
    weights = torch.arange(10.0)
    part = rows_of(WeightedBatch({"x": x}, weights), Place(2, 4, 10))
    assert torch.equal(part.weights, weights[4:6])
    with pytest.raises(RankoneError, match="A batch has 2 rows, and 3 processes cannot share it"):
        place_in(x[:2], 0, 3)
    with pytest.raises(RankoneError, match=r"one of its tensors is \(4, 2\)"):
        rows_of((x, torch.ones(4, 2)), Place(5, 0, 10))


class Coupled(nn.Module):
    def __init__(self, first: bool) -> None:
        super().__init__()
        self.fc, self.first = nn.Linear(4, 4), first

    def forward(self, x):
        return self.fc(x.T).T if self.first else self.fc(x - x.mean(0))


def test_networks_whose_rows_cannot_be_shared_are_refused():
    x = torch.rand(4, 4)
    fine = rankone.DecomposedModel(small_mlp(), {"0": 3, "2": 3})
    refuse_coupled_rows(fine, x)
    coupled = rankone.DecomposedModel(Coupled(False).eval(), {"fc": 3})
    with pytest.raises(RankoneError, match="depends on the other rows"):
        refuse_coupled_rows(coupled, x)
    embedding = nn.Sequential(nn.Embedding(4, 3), nn.Flatten(0, 1)).eval()
    turned = rankone.DecomposedModel(embedding, {"0": 3})
    with pytest.raises(RankoneError, match="The output has datapoints of shape"):
        refuse_coupled_rows(turned, torch.randint(0, 4, (4, 5)))


SMALL = ["batch_size=64", "log_every=5", "checkpoint_every=10"]


def run_words(out, *more):
    return ["-m", "rankone", "run", "tms_5-2", "--out", str(out), "-q", *SMALL, *more]


def test_torchrun_then_one_process(tmp_path):
    """What the issue writes: torchrun, and then the same run resumed by one process."""
    words = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", str(free_port())]
    made = subprocess.run(
        [sys.executable, *words, *run_words(tmp_path / "two", "--steps", "20")],
        env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert made.returncode == 0, made.stderr
    assert made.stdout.count("tms_5-2, seed 0") == 1, "one process speaks"
    ((code, _, err),) = finish(start(run_words(tmp_path / "one", "--steps", "20"), 1))
    assert code == 0, err
    last = [(tmp_path / d / "metrics.jsonl").read_text().splitlines()[-1] for d in ("one", "two")]
    one, two = (json.loads(line)["loss"] for line in last)
    assert one == pytest.approx(two, rel=1e-4)
    ((code, _, err),) = finish(start(["-m", "rankone", "run", str(tmp_path / "two"), "--resume", "-q"], 1))
    assert code == 0, err
    words = ["-m", "rankone", "run", str(tmp_path / "two"), "--resume", "-q", "--steps", "30"]
    ((code, _, err),) = finish(start(words, 1))  # lengthened, by one process
    assert code == 0, err
    _, meta = load_sealed(tmp_path / "two/checkpoints/step-000000030.safetensors")
    assert meta["processes"] == 1


@pytest.mark.parametrize("killed", [0, 1])
def test_a_process_that_is_killed(tmp_path, killed):
    """Its number is told by one of the others, within seconds; the run goes on with another number of them."""
    processes = start(run_words(tmp_path / "run", "--steps", "100000"), 2)
    checkpoints = tmp_path / "run/checkpoints"
    deadline = time.monotonic() + 120
    while not (checkpoints.is_dir() and any(checkpoints.glob("step-*.safetensors"))):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    processes[killed].send_signal(signal.SIGKILL)
    began = time.monotonic()
    ended = finish(processes, timeout=60)
    assert time.monotonic() - began < 30
    survivor = 1 - killed
    code, _, err = ended[survivor]
    assert code == 1, err
    said = " ".join(err.split())
    assert f"Process {killed} of 2 no longer answers" in said
    assert "start the same command again with --resume" in said
    steps = sorted(int(p.stem.removeprefix("step-")) for p in checkpoints.glob("step-*.safetensors"))
    assert steps
    words = run_words(tmp_path / "run", "--resume", "--steps", "100000")
    interrupted = start(words, 1)
    while max(int(p.stem[5:]) for p in checkpoints.glob("step-*.safetensors")) <= steps[-1]:
        assert interrupted[0].poll() is None, interrupted[0].communicate()
        time.sleep(0.05)
    interrupted[0].send_signal(signal.SIGTERM)
    assert finish(interrupted)[0][0] == 128 + signal.SIGTERM


def test_a_signal_stops_all_of_them_at_the_same_step(tmp_path):
    processes = start(run_words(tmp_path / "run", "--steps", "100000"), 3)
    checkpoints = tmp_path / "run/checkpoints"
    while not (checkpoints.is_dir() and any(checkpoints.glob("step-*.safetensors"))):
        assert all(p.poll() is None for p in processes)
        time.sleep(0.05)
    processes[2].send_signal(signal.SIGTERM)
    ended = finish(processes, timeout=60)
    assert [code for code, _, _ in ended] == [143, 143, 143]
    assert "Interrupted at step" in ended[0][2]
    assert "Interrupted" not in ended[1][2] + ended[2][2]
    newest = max(checkpoints.glob("step-*.safetensors"))
    assert load_sealed(newest)[1]["processes"] == 3


@pytest.mark.parametrize(
    ("words", "environment", "message"),
    [
        (["--seeds", "2"], {}, "torchrun shares one run between processes"),
        (["batch_size=1"], {}, "processes cannot share it: each needs at least one"),
        ([], {"RANKONE_PATIENCE": "soon"}, "RANKONE_PATIENCE is 'soon'; expected a number of seconds"),
    ],
)
def test_what_cannot_be_shared_is_told_once(tmp_path, words, environment, message):
    given = ["-m", "rankone", "run", "tms_5-2", "--preset", "paper", "--steps", "5", "-q", *words]
    ended = finish(start([*given, "--out", str(tmp_path / "run")], 2, **environment))
    assert all(code == 1 for code, _, _ in ended)
    said = [" ".join(err.split()) for _, _, err in ended]
    told = [message in text for text in said]
    assert sum(told) == (2 if environment else 1), said


def test_one_that_never_arrives_is_named(tmp_path):
    alone = start(run_words(tmp_path / "run", "--steps", "5"), 2, RANKONE_PATIENCE="3")
    alone[1].kill()
    ended = finish(alone, timeout=60)
    assert ended[0][0] == 1
    assert "Process 1 of 2 did not arrive within 3 s" in " ".join(ended[0][2].split())


@pytest.mark.parametrize("size", [2, 3])
def test_rows_that_are_not_to_be_explained_stay_so_in_every_process(size):
    whole = OtherRows(torch.arange(10.0).reshape(5, 2), torch.ones(5), 3)
    parts = [rows_of(whole, place_in(whole, rank, size), even=False) for rank in range(size)]
    assert torch.equal(torch.cat([part.explained() for part in parts]), whole.explained())
    assert torch.equal(torch.cat([part.inputs for part in parts]), whole.inputs)
