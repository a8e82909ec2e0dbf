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
