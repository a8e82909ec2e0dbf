"""Diagnosis of runs that are made wrong on purpose: each fault is found, and the advice points the
right way."""

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import rankone
from conftest import rankone_main, small_mlp, uniform
from rankone import RankoneError
from rankone.data import WeightedBatch
from rankone.diagnose import _falling, diagnose
from rankone.findings import Identity, Numbers, findings
from rankone.patching import insert_identity
from rankone.runs.config import experiment_config
from rankone.runs.run import load_run, run

BETA3 = "losses.importance_minimality.coefficient"


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Runs by name of what is wrong with them."""
    changes = {
        "right": ["tms_5-2", "steps=5000"],
        "too high": ["tms_5-2", "steps=2000", f"{BETA3}={30 * 3e-3}"],
        "too low": ["tms_5-2", "steps=5000", f"{BETA3}={3e-3 / 30}"],
        "C too small": ["tms_5-2", "steps=3000", "layers.embed=4", "layers.unembed=4"],
        "stopped early": ["tms_5-2", "steps=1000"],
        "identity, right": ["tms_5-2-id", "steps=5000"],
        "identity, too high": ["tms_5-2-id", "steps=2000", f"{BETA3}={30 * 3e-3}"],
    }
    folder = tmp_path_factory.mktemp("wrong")
    for (
        name,
        assignments,
    ) in changes.items():  # in processes of their own, where shapes are not checked at every call
        words = [*assignments, "--preset", "tuned", "--out", str(folder / name)]
        subprocess.run([sys.executable, "-m", "rankone", "run", *words], check=True, capture_output=True)
    return folder


def faults(folder):
    opened = load_run(folder)
    data = opened.config.target.data(opened.config.batch_size)
    found = diagnose(opened.result, data, steps_done=opened.steps)
    return {finding.name: finding for finding in found.findings}, found.numbers


def test_nothing_is_wrong_with_a_good_run(made, capsys):
    found, numbers = faults(made / "right")
    assert not found
    assert numbers.alive == {"embed": 5, "unembed": 5}
    assert numbers.divergence["stochastic"] < 3 * numbers.superposition_noise
    rankone_main(["diagnose", str(made / "right")])
    said = capsys.readouterr().out
    assert "Nothing wrong was found." in said
    assert "embed 5 of 20, unembed 5 of 20" in said


def test_coefficient_thirty_times_too_high(made):
    found, numbers = faults(made / "too high")
    assert found["importance coefficient too high"].do.startswith(
        "lower `losses.importance_minimality.coefficient`"
    )
    assert "masked model too far from the target" in found
    assert max(numbers.near_one.values()) < 0.1
    assert not any("raise `losses.importance_minimality" in finding.do for finding in found.values())


def test_coefficient_thirty_times_too_low(made):
    found, numbers = faults(made / "too low")
    assert found["importance coefficient too low"].do.startswith(
        "raise `losses.importance_minimality.coefficient`"
    )
    assert not any("lower `losses" in finding.do for finding in found.values())
    assert numbers.alive["embed"] > 5


def test_fewer_subcomponents_than_mechanisms(made):
    found, _ = faults(made / "C too small")
    # They share their parameters, so that neither can have more than the other.
    assert found["C perhaps too small"].do.startswith("raise C for embed, unembed to twice as many")


def test_stopped_at_a_tenth_of_the_steps(made, capsys):
    found, _ = faults(made / "stopped early")
    assert found["unconverged"].do == "raise `steps`"
    rankone_main(["diagnose", str(made / "stopped early")])
    assert "Do: raise `steps`" in capsys.readouterr().out


HIGH, LOW = "importance coefficient too high", "importance coefficient too low"


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("resid_mlp1-tuned-seed0-beta3-1e-07", {LOW, "unconverged"}),
        ("resid_mlp1-tuned-seed0-beta3-1e-06", {LOW, "unconverged"}),
        ("resid_mlp1-tuned-seed0", set()),
        ("resid_mlp1-tuned-seed0-beta3-0.0001", {HIGH, "unfaithful"}),
        (
            "resid_mlp1-tuned-seed0-beta3-0.001",
            {HIGH, "unfaithful", "masked model too far from the target"},
        ),
        ("resid_mlp2-tuned-seed0", {"unfaithful"}),
        ("tms_40-10-tuned-seed1", set()),
        ("tms_40-10-id-tuned-seed1", set()),
        ("tms_40-10-id-tuned-seed0-C-4x", set()),
    ],
)
def test_large_runs_are_judged_rightly(name, expected):
    """The numbers of full runs of `rankone reproduce`, which take too long for a test, as
    measure_diagnosed.py found them."""
    stored = json.loads((Path(__file__).parent / "diagnosed.json").read_text())[name]
    identities = {layer: Identity(**values) for layer, values in stored.pop("identities").items()}
    found = {finding.name: finding for finding in findings(Numbers(**stored, identities=identities))}
    assert set(found) == expected
    if name == "resid_mlp2-tuned-seed0":  # it starts from datapoints, which a warm-up would scramble
        assert "warmup" not in found["unfaithful"].do


def test_a_penalty_that_moves_is_not_taken_for_a_falling_loss():
    moving = {"coefficient": 1.0, "coefficient_start": 5.0, "hold": 0.2, "anneal": 0.5}
    config = rankone.DecompositionConfig(steps=100, log_every=5, losses={"importance_minimality": moving})
    history = [
        {"step": s, "loss": {"total": 5.0 if s < 70 else 1.0}, "l0": {"0": 3.0}} for s in range(0, 100, 5)
    ]
    result = rankone.decompose(small_mlp(), uniform(), {"0": 12}, {"steps": 1})
    later = dataclasses.replace(result, config=config, history=history)
    assert _falling(later) == {"loss": 0.0, "l0": 0.0}
    at_once = dataclasses.replace(later, config=config.model_copy(update={"losses": {}}))
    assert _falling(at_once) == {"loss": 0.8, "l0": 0.0}


def test_an_unfinished_run_is_said_to_be_one(tmp_path, capsys):
    assignments = ["steps=400", "checkpoint_every=100", "log_every=10"]
    config = experiment_config("tms_5-2", preset="tuned", assignments=assignments)
    with pytest.raises(KeyboardInterrupt):
        run(config, tmp_path, observer=_stop_after(250))
    rankone_main(["diagnose", str(tmp_path)])
    said = " ".join(capsys.readouterr().out.split())
    assert "unfinished: training has reached step 200 of 400" in said
    assert "Do: finish the run, with --resume" in said
    assert "unconverged: late in training the loss fell by" in said


def _stop_after(step):
    def observer(progress):
        if progress.step > step:
            raise KeyboardInterrupt

    return observer


def test_a_run_that_is_being_written_a_changed_config_and_a_damaged_checkpoint(tmp_path, capsys):
    assignments = ["steps=200", "checkpoint_every=100", "log_every=10"]
    config = experiment_config("tms_5-2", preset="tuned", assignments=assignments)
    with pytest.raises(KeyboardInterrupt):
        run(config, tmp_path, observer=_stop_after(150))
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write('{"step": 16')
    rankone_main(["diagnose", str(tmp_path)])
    assert "training has reached step 100 of 200" in " ".join(capsys.readouterr().out.split())
    settings = (tmp_path / "config.yaml").read_text()
    (tmp_path / "config.yaml").write_text(settings.replace("embed: 20", "embed: 10"))
    with pytest.raises(SystemExit):
        rankone_main(["diagnose", str(tmp_path)])
    assert "config.yaml was changed after rankone wrote it" in " ".join(capsys.readouterr().err.split())
    (tmp_path / "config.yaml").write_text(settings)
    (tmp_path / "checkpoints" / "step-000000100.safetensors").write_bytes(b"cut")
    with pytest.raises(SystemExit):
        rankone_main(["diagnose", str(tmp_path)])
    assert "Delete that file to start again from step 0." in capsys.readouterr().err


def test_a_kept_run_is_told_from_a_whole_one(capsys):
    kept = Path(__file__).parent.parent / "results" / "runs" / "tms_5-2-tuned-seed0"
    with pytest.raises(SystemExit):
        rankone_main(["diagnose", str(kept)])
    said = " ".join(capsys.readouterr().err.split())
    assert "holds the summary of a run but not its decomposition" in said
    assert "Make the run itself with: rankone run tms_5-2 --preset tuned --seed 0" in said


def test_no_run_and_no_checkpoint_are_explained(tmp_path, capsys):
    with pytest.raises(SystemExit):
        rankone_main(["diagnose", str(tmp_path)])
    assert "is not a run directory: it has no manifest.json" in " ".join(capsys.readouterr().err.split())
    config = experiment_config("tms_5-2", assignments=["steps=20", "batch_size=64"])
    with pytest.raises(KeyboardInterrupt):
        run(config, tmp_path, observer=_stop_after(0))
    with pytest.raises(SystemExit):
        rankone_main(["diagnose", str(tmp_path)])
    assert "has no checkpoint yet" in capsys.readouterr().err


def test_an_identity_in_a_model_of_ones_own():
    model = small_mlp()
    changed = insert_identity(model, "0")
    x = torch.rand(10, 4)
    assert torch.equal(changed(x), model(x))
    assert [name for name, _ in model.named_modules()] == ["", "0", "1", "2"]
    result = rankone.decompose(changed, uniform(rows=200), {"*": 12}, {"steps": 5})
    assert result.layers == ["0.module", "0.identity", "2"]
    found = diagnose(result, uniform(rows=200))
    assert found.numbers.identities["0.identity"].rank == 6
    # After five steps it is not found again, and this is said.
    assert "known mechanism not recovered" in {finding.name for finding in found.findings}


def test_an_identity_comes_back_when_settings_are_right_and_only_then(made):
    found, numbers = faults(made / "identity, right")
    assert not found
    known = numbers.identities["hidden.0"]
    assert (known.rank, known.alive) == (2, 2)
    assert known.missing < 0.1
    found, numbers = faults(made / "identity, too high")
    assert found["known mechanism not recovered"].do.startswith(
        "lower `losses.importance_minimality.coefficient`"
    )


def identity_by_hand():
    """A decomposition of an identity as its own six unit matrices, all important on every input;
    six more have no size."""
    changed = insert_identity(small_mlp(), "0")
    result = rankone.decompose(
        changed, uniform(rows=200), {"0.identity": 12}, {"steps": 1, "optimizer": {"lr": 1e-12}}
    )
    layer = result.model.layer("0.identity")
    with torch.no_grad():
        layer.subcomponents.U.zero_()
        layer.subcomponents.U[:, :6] = torch.eye(6)
        layer.subcomponents.V[:6] = torch.eye(6)
        gates = result.model.importance.functions["0.identity"]
        for p in gates.parameters():
            p.zero_()
        gates.b_out[:6] = 1
    return result, layer


def test_an_identity_that_comes_back_whole():
    """There is nothing to say about it."""
    result, _ = identity_by_hand()
    found = diagnose(result, uniform(rows=200))
    whole = {"rank": 6, "alive": 6, "act_together": 1.0, "missing": 0.0}
    assert dataclasses.asdict(found.numbers.identities["0.identity"]) == pytest.approx(whole)
    assert "known mechanism not recovered" not in {finding.name for finding in found.findings}


def test_a_subcomponent_that_is_almost_never_used_does_not_make_an_identity_two_mechanisms():
    result, layer = identity_by_hand()
    gates = result.model.importance.functions["0.identity"]
    with torch.no_grad():
        layer.subcomponents.V[6] = torch.eye(6)[0]
        x = torch.cat([torch.rand(600, 4) for _ in range(2)])
        reading = result.model.inner(result.model.clean(x))["0.identity"][:, 6]
        # One neuron that is on for the largest inputs only: for one datapoint of 1,200, then for
        # every tenth.
        gates.w_in[6, 0] = 1e4
        gates.w_out[6, 0] = 1.0
        for rank, alive in ((1, 6), (120, 7)):
            gates.b_in[6, 0] = -1e4 * reading.sort(descending=True).values[rank : rank + 2].mean()
            assert diagnose(result, [x], n_batches=1).numbers.identities["0.identity"].alive == alive


def test_rows_count_with_their_weights():
    """Weights of 3 are as good as three copies of a row."""
    result = rankone.decompose(small_mlp(), uniform(rows=200), {"*": 12}, {"steps": 1})
    torch.manual_seed(0)
    with torch.no_grad():
        x = torch.rand(200, 4)
        for name, h in result.model.inner(result.model.clean(x)).items():
            gates = result.model.importance.functions[name]
            for p in gates.parameters():
                p.zero_()
            # One neuron, which makes one subcomponent certain on half of the datapoints.
            gates.w_in[0, 0], gates.w_out[0, 0], gates.b_in[0, 0] = 1e4, 1.0, -1e4 * h[:, 0].median()
    weights = torch.where(torch.arange(200) < 50, 3.0, 1.0)
    copies = diagnose(result, [torch.cat([x, x[:50], x[:50]])], n_batches=1).numbers
    weighted = diagnose(result, [WeightedBatch(x, weights)], n_batches=1).numbers
    plain = diagnose(result, [x], n_batches=1).numbers
    assert weighted.near_one == pytest.approx(copies.near_one, rel=1e-5)
    assert weighted.near_one != pytest.approx(plain.near_one, rel=1e-3)
    assert weighted.split_pairs == copies.split_pairs


@pytest.mark.parametrize(
    ("layer", "width", "message"),
    [
        ("3", None, "There is no layer '3'. There are: '0', '1', '2'"),
        ("1", None, r"The output of '1' \(ReLU\) may have any width; pass width="),
        ("", None, "Name the layer after which"),
    ],
)
def test_wrong_places_for_an_identity(layer, width, message):
    with pytest.raises(RankoneError, match=message):
        insert_identity(small_mlp(), layer, width)


def test_an_identity_after_a_module_of_given_width():
    changed = insert_identity(small_mlp(), "1", width=6)
    assert isinstance(changed[1].identity, nn.Linear)
    assert torch.equal(changed(x := torch.rand(3, 4)), small_mlp()(x))


@pytest.mark.parametrize("form", ["sequence", "single output", "mixed"])
def test_outputs_of_any_form(form):
    """Positions of a sequence are datapoints; a network may return one number per datapoint, or
    fewer dimensions than its layers see."""

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(4, 6), nn.Linear(6, 1 if form == "single output" else 4)

        def forward(self, x):
            out = self.second(torch.relu(self.first(x)))
            return out.squeeze(-1) if form == "single output" else out.mean(1) if form == "mixed" else out

    shape = (100, 4) if form == "single output" else (20, 5, 4)
    data = [torch.rand(shape)]
    mse = None if form != "single output" else (lambda output, target: (output - target).square())
    result = rankone.decompose(Net().eval(), data, {"*": 8}, {"steps": 3}, divergence=mse)
    with torch.no_grad():
        for name, everywhere in (("first", 1.0), ("second", 0.5)):
            for p in result.model.importance.functions[name].parameters():
                p.zero_()
            result.model.importance.functions[name].b_out.fill_(everywhere)
    found = diagnose(result, data)
    assert found.numbers.near_one == {"first": 1.0, "second": 0.0}
    assert found.numbers.alive == {"first": 8, "second": 8}


def test_an_identity_does_not_change_the_precision_of_its_neighbours():
    model = nn.Sequential(nn.Linear(4, 6).double(), nn.Linear(6, 4)).eval()
    changed = insert_identity(model, "1")
    assert changed[1].module.weight.dtype == changed[1].identity.weight.dtype == torch.float32
