"""What people read: safe to show, short enough, and true."""

import io
import sys
import types
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

import rankone
from conftest import small_mlp, uniform
from rankone import console, terminal
from rankone.console import ParallelDisplay
from rankone.metrics_log import Progress
from rankone.paper.tables import Table
from rankone.progress import RunDisplay, duration, pace, sparsity
from rankone.runs.config import experiment_config
from rankone.runs.many import ParallelRun
from rankone.terminal import clean

LOSSES = ("total", "faithfulness", "stochastic_recon", "stochastic_recon_layerwise", "importance_minimality")


def screen_of(width=80):
    return terminal.SafeConsole(file=StringIO(), width=width, force_terminal=True)


def progress(step=12_000, steps=40_000, ms=5.0):
    record = {"loss": dict.fromkeys(LOSSES, 0.001), "l0": {"embed": 0.25, "unembed": 0.5}}
    return Progress(record, step, steps, 60.0, ms)


def test_the_diagnosis_of_a_run_with_the_recipe(capsys):
    """Its loss falls to the end whatever happens, so it is not looked at."""
    config = {"steps": 60, "log_every": 1}
    console.print_diagnosis(rankone.decompose(small_mlp(), uniform(), {"*": 5}, config).diagnose())
    said = capsys.readouterr().out
    assert "late in training" in said
    assert "important subcomponents " in said


def test_a_narrow_terminal_shows_what_matters():
    screen = screen_of()
    with RunDisplay(40_000, screen) as display:
        display(progress())
    for words in ("12000/40000", "5.0 ms/step", "2:20 left", "L0 0.25/0.50"):
        assert words in screen.file.getvalue()


def test_losses_are_named_in_a_line_as_in_a_legend():
    screen = screen_of(200)
    with RunDisplay(40_000, screen) as display:
        display(progress())
    assert "faith 1.0e-03 recon 1.0e-03 layer 1.0e-03 min 1.0e-03" in screen.file.getvalue()


def test_many_layers_have_one_number():
    assert sparsity({"a": 0.5, "b": 1.25}) == "L0 0.50/1.25"
    assert sparsity(dict.fromkeys("abcdefgh", 0.5)) == "L0 4.00 in 8 layers"


@pytest.mark.parametrize("width", [80, 120])
def test_no_value_is_cut_at_usual_widths(width):
    screen = screen_of(width)
    with RunDisplay(40_000, screen) as display:
        display(progress())
    shown = screen.file.getvalue()
    for words in ("12000/40000", "5.0 ms/step, 2:20 left", "L0 0.25/0.50", "total 1.0e-03", "min 1.0e-03"):
        assert words in shown


def test_the_first_step_promises_nothing():
    assert pace(progress(1, 10_000, 21_000.0)) == "the first step is done"
    assert pace(progress(101, 10_000, 5.0)) == "5.0 ms/step, 0:49 left"


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(0.0, "0:00"), (61.0, "1:01"), (3599.9, "59:59"), (3600.0, "1:00:00"), (3.6e5, "100:00:00")],
)
def test_time_left_has_hours(seconds, words):
    assert duration(seconds) == words


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("a\x1b[31mb", "a\ufffd[31mb"),
        ("\x00\x07\x9b\r", "\ufffd" * 4),
        ("half a pair \ud800", "half a pair \ufffd"),
        ("\u202egnp.exe", "\ufffdgnp.exe"),
        ("one\ttwo\nβ × 漢字 [/x] :smile:", "one\ttwo\nβ × 漢字 [/x] :smile:"),
    ],
)
def test_nothing_that_commands_a_terminal_is_shown(text, shown):
    assert clean(text) == shown
    screen = screen_of()
    screen.print(terminal.text(text, (text, "bold")), soft_wrap=True)
    written = screen.file.getvalue()
    written.encode()
    assert "\x1b[31m" not in written
    assert "\x00" not in written


def test_markup_in_names_is_text(monkeypatch, capsys):
    """A title, a layer or a message from a file is never read as markup; `[/x]` used to be an error."""
    config = experiment_config("tms_5-2").model_copy(update={"title": "[/x] [red]title"})
    run = ParallelRun(config, Path("a[/b]"), "[/label]", state="failed", message="[/message]\x1b[2J")
    console.print_table(Table("[/title]", "[/note]", ("[/head]",), [("[/cell]\x1b[2J",)]))
    console.print_settings([("[/path]", "[/value]", "[/doc]")])
    console.print_attempt(0, 1.0, True, {"[/number]": 1.0})
    terminal.fail("[/error]")
    console.print_seeds([run], 1.0)
    for screen in (terminal.SafeConsole(), screen_of()):
        with ParallelDisplay(screen) as display:
            display([run])
        with RunDisplay(10, screen) as display:
            display.say("[/say]")
    shown = capsys.readouterr()
    for words in (
        "title",
        "note",
        "head",
        "cell",
        "path",
        "value",
        "doc",
        "number",
        "label",
        "message",
        "say",
    ):
        assert f"[/{words}]" in shown.out
    assert "[/error]" in shown.err
    assert "\x1b" not in shown.out + shown.err


def test_one_verdict_for_all(capsys):
    assert [words for words, _ in console.VERDICTS.values()] == [
        "recovered",
        "not recovered",
        "no ground truth known",
    ]


def test_letters_that_cannot_be_written_are_replaced(monkeypatch):
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, encoding="ascii", errors="strict"))
    terminal.prepare_streams()
    terminal.say("β3 ± 1")
    assert raw.getvalue() == b"?3 ? 1\n"


def test_a_console_for_people_reads_no_markup():
    for screen in (terminal.output, terminal.errors):
        assert isinstance(screen, Console)
        assert not screen._markup
        assert not screen._emoji


def test_a_notebook_has_one_line_that_changes(monkeypatch):
    shown = []

    class Handle:
        def update(self, content, raw):
            shown.append(content["text/plain"])

    def display(content, raw, display_id):
        shown.append(content["text/plain"])
        return Handle()

    class Shell:
        kernel = object()

    ipython = types.ModuleType("IPython")
    ipython.get_ipython = Shell
    ipython.display = types.ModuleType("IPython.display")
    ipython.display.display = display
    monkeypatch.setitem(sys.modules, "IPython", ipython)
    monkeypatch.setitem(sys.modules, "IPython.display", ipython.display)
    with RunDisplay(40_000, greeting="Decomposing.") as watching:
        watching(progress())
        watching(progress(40_000))
    assert shown[0] == "Decomposing."
    assert shown[1].startswith("███████░")
    assert "step 12000/40000" in shown[1]
    assert "░" not in shown[2]
