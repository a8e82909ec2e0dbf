"""Shapes are checked at run time in every test: rankone is imported through jaxtyping's hook, with
beartype."""

from jaxtyping import install_import_hook

with install_import_hook("rankone", "beartype.beartype"):
    import rankone
    import rankone.cli

from pathlib import Path

import pytest
import torch
from torch import nn

ROOT = Path(__file__).resolve().parent.parent

assert rankone.__version__


@pytest.fixture(autouse=True)
def _one_thread():
    """Small tensors: more threads only make the tests slower."""
    torch.set_num_threads(1)


def small_mlp(seed: int = 0, d: int = 4, width: int = 6) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(d, width), nn.ReLU(), nn.Linear(width, d)).eval()


def uniform(d: int = 4, rows: int = 16):
    return lambda generator: torch.rand(rows, d, generator=generator)


def rankone_main(words):
    """The command line in this process; a command that succeeds ends quietly."""
    try:
        rankone.cli.main(words)
    except SystemExit as stop:
        if stop.code:
            raise


SLOW = (
    "test_diagnose.py",
    "test_fuzz.py",
    "test_kernels.py",
    "test_kill.py",
    "test_many.py",
    "test_readme.py",
    "test_reproduce.py",
    "test_targets.py",
    "test_cli.py::test_every_shipped_experiment_runs",
    "test_cli.py::test_an_ascii_locale_costs_letters_and_not_a_run",
    "test_cli.py::test_a_reader_that_goes_away_costs_no_work",
    "test_fast.py::test_losses_and_gradients_of_the_papers_runs",
    "test_files.py::test_a_kill_at_every_system_call",
    "test_locks.py::test_saving_over_an_old_artifact_is_all_or_nothing",
    "test_train.py::test_training_makes_the_loss_smaller",
)
"""Files, and single tests, that train, compile, kill or fuzz: `-m "not slow"` leaves them out."""


def pytest_collection_modifyitems(items):
    for item in items:
        name = item.nodeid.removeprefix("tests/")
        if name.startswith(SLOW):
            item.add_marker(pytest.mark.slow)
