"""Plans: what is counted is what there is, and what does not fit is told with a way out."""

import json

import pytest

from conftest import rankone_main
from rankone import RankoneError
from rankone.data import batches
from rankone.decomposition import build
from rankone.plan import Count, Machine, _counted, count_step, make_plan
from rankone.processes import rows_of
from rankone.runs.config import experiment_config
from rankone.share import Place

CONFIG = experiment_config("tms_5-2", preset="paper", assignments=["batch_size=512", "steps=50"])


@pytest.fixture(scope="module")
def made():
    model = build(CONFIG.target.load(), CONFIG.layers, CONFIG, CONFIG.getter)
    return model, next(batches(CONFIG.target.data(512), 0))


def test_what_is_extended_to_a_batch_is_what_the_batch_has(made):
    model, batch = made
    total = len(batch.inputs)
    extended = count_step(CONFIG, model, batch, 90)
    counted = _counted(CONFIG, model, rows_of(batch, Place(90, 0, total)))
    assert extended.products == pytest.approx(counted.products, rel=1e-3)
    assert extended.moved == pytest.approx(counted.moved, rel=0.02)
    assert extended.kept == pytest.approx(counted.kept, rel=0.02)
    assert extended.products > 0


def test_a_machine_at_its_peak():
    plan = make_plan(CONFIG, machine=Machine(1.0, 1000.0))
    step = plan.per_step
    floor = max(step["products"] / 1e12, (step["moved"] + 7 * 4 * plan.trained_parameters) / 1e12)
    assert step["ms"] == pytest.approx(1000 * floor)
    assert plan.seconds == pytest.approx(step["ms"] * 50 / 1000)
    assert plan.fits is None
    assert "counted" in plan.how
    two = make_plan(CONFIG, processes=2, machine=Machine(1.0, 1000.0, 1.0))
    assert two.per_step["sent"] == 4 * plan.trained_parameters + 4
    assert two.memory["what is kept for the way back"] < plan.memory["what is kept for the way back"]
    with pytest.raises(RankoneError, match="say how fast with --link"):
        make_plan(CONFIG, processes=2, machine=Machine(1.0, 1000.0))


def test_what_does_not_fit_says_what_to_change():
    machine = Machine(1.0, 1.0)
    all_of_it = make_plan(CONFIG, machine=machine).total_memory
    plan = make_plan(CONFIG, machine=machine, memory=all_of_it / 2e9)
    assert plan.fits is False
    assert "Make batches smaller: about 4" in plan.advice
    assert make_plan(CONFIG, machine=machine, memory=all_of_it / 0.9e9).fits
    tiny = make_plan(CONFIG, machine=machine, memory=1e-6)
    assert "give them fewer subcomponents (layers.embed has C = 20)" in tiny.advice


def test_from_the_command_line(capsys):
    rankone_main(["plan", "tms_5-2", "--steps", "100", "batch_size=64", "--json"])
    plan = json.loads(capsys.readouterr().out)
    assert plan["how"] == "measured here"
    assert plan["layers"]["embed"] == {"shape": [2, 5], "C": 20, "parameters": 140}
    assert plan["seconds"] == pytest.approx(plan["per_step"]["ms"] / 10)
    rankone_main(["plan", "tms_5-2", "batch_size=64", "--device-peak", "1", "--bandwidth", "10"])
    said = capsys.readouterr().out
    assert "embed    2 x 5  20         140" in said
    assert "what is kept for the way back" in said
    with pytest.raises(SystemExit):
        rankone_main(["plan", "tms_5-2", "--device-peak", "1"])
    assert "needs both --device-peak TFLOP/s and --bandwidth GB/s" in " ".join(
        capsys.readouterr().err.split()
    )
    with pytest.raises(RankoneError, match="--processes is 0"):
        make_plan(CONFIG, processes=0)


def test_extension_is_linear():
    assert Count(1, 2, 3).extended(Count(2, 2, 5), (32, 64), 128) == Count(4, 2, 9)
