"""Shapes are checked at run time in every test: rankone is imported through jaxtyping's hook, with
beartype."""

from jaxtyping import install_import_hook

with install_import_hook("rankone", "beartype.beartype"):
    import importlib
    import pkgutil

    import rankone

    for _found in pkgutil.walk_packages(rankone.__path__, "rankone."):
        if not _found.name.endswith(("__main__", "fast.kernels")):  # numba compiles these as they are
            importlib.import_module(_found.name)

import os
from pathlib import Path

import pytest
import torch
from torch import nn

ROOT = Path(__file__).resolve().parent.parent

assert rankone.__version__
os.environ.setdefault("RANKONE_PROGRESS", "0")  # tests that want to see it ask for it


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
    "test_cli.py::test_a_config_file_repeats_a_run",
    "test_cli.py::test_a_reader_that_goes_away_costs_no_work",
    "test_cli.py::test_a_refused_run_does_not_stand_in_the_way",
    "test_cli.py::test_a_run_resumes_although_its_description_has_changed",
    "test_cli.py::test_a_run_with_other_settings_is_not_resumed",
    "test_cli.py::test_a_short_command_whose_reader_goes_away_is_quiet",
    "test_cli.py::test_an_ascii_locale_costs_letters_and_not_a_run",
    "test_cli.py::test_config_show_is_complete_and_runs",
    "test_cli.py::test_evaluate_and_report_again",
    "test_cli.py::test_every_shipped_experiment_runs",
    "test_cli.py::test_files_that_are_not_what_they_should_be",
    "test_cli.py::test_interrupted_and_finished_runs",
    "test_cli.py::test_one_layer_may_have_another_number_of_subcomponents",
    "test_cli.py::test_report_is_one_readable_file",
    "test_cli.py::test_some_layers_only",
    "test_cli.py::test_strange_names_are_printed_as_they_are_and_command_no_terminal",
    "test_cli.py::test_the_backend_of_a_notebook_does_not_matter",
    "test_cli.py::test_train_target",
    "test_cli.py::test_two_processes_in_one_directory",
    "test_cli.py::test_what_is_not_ours_is_left_alone",
    "test_clusters.py::test_the_command",
    "test_diagnose.py",
    "test_examples.py::test_an_example",
    "test_extending.py::test_a_target_family_from_the_command_line",
    "test_fast.py::test_losses_and_gradients_of_the_papers_runs",
    "test_files.py::test_a_kill_at_every_system_call",
    "test_fuzz.py",
    "test_kernels.py",
    "test_kill.py",
    "test_language_model.py::test_it_trains",
    "test_locks.py",
    "test_many.py",
    "test_measures.py::test_on_the_command_line",
    "test_model.py::test_other_precisions_train_like_single",
    "test_padding.py::test_measures_do_not_see_padding",
    "test_padding.py::test_the_attention_mask_of_a_dict_says_what_is_data",
    "test_readme.py",
    "test_reproduce.py",
    "test_runs.py",
    "test_start.py::test_training_starts_there_and_resumes_to_the_same_bits",
    "test_targets.py",
    "test_train.py::test_a_crashed_run_resumes_to_the_same_bits",
    "test_train.py::test_signals_save_and_stop",
    "test_train.py::test_training_makes_the_loss_smaller",
    "test_tune.py::test_a_killed_workers_trial_is_taken_up_where_it_was",
    "test_tune.py::test_a_model_of_ones_own",
    "test_tune.py::test_a_signal_saves_and_the_same_command_goes_on",
    "test_tune.py::test_a_trial_is_the_run_with_these_settings",
    "test_tune.py::test_a_worker_elsewhere_is_dead_when_its_beat_stops",
    "test_tune.py::test_on_the_command_line",
    "test_tune.py::test_other_settings_in_the_same_place",
    "test_tune.py::test_trials_are_those_of_the_study_and_more_go_on",
    "test_tune.py::test_two_workers_share_the_work",
    "test_view.py",
    "test_trackers.py::test_from_the_command_line",
    "test_trackers.py::test_wandb_offline_and_trackio",
    "test_processes.py",
)
"""Files, and single tests, that train, compile, kill or fuzz: `-m "not slow"` leaves them out."""


def pytest_collection_modifyitems(items):
    for item in items:
        name = item.nodeid.removeprefix("tests/")
        if name.startswith(SLOW):
            item.add_marker(pytest.mark.slow)
