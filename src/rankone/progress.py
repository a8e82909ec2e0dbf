"""How a run goes, while it goes: a bar in a terminal, a line every few seconds in a script or a file,
one line that changes in a notebook. Always on standard error.

`decompose` and the command line show the same. RANKONE_PROGRESS=0 in the environment switches off
what `decompose` shows by itself.
"""

import os
import signal
import sys
import time
from collections.abc import Callable
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from rankone.errors import RankoneError
from rankone.metrics_log import Observer, Progress
from rankone.model import DecomposedModel
from rankone.naming import Matrices, candidates, undeclared_parameters
from rankone.terminal import clean, errors, note, silence, text

SECONDS_BETWEEN_LINES = 10.0
GETTING_READY = "Getting ready."
SWITCH = "RANKONE_PROGRESS"
MOST_L0 = 4
"""With more layers than this, only the sum of their L0 is shown."""
LOSS_NAMES = {
    "total": ("total", "total"),
    "faithfulness": ("faithfulness", "faith"),
    "stochastic_recon": ("stochastic recon", "recon"),
    "stochastic_recon_layerwise": ("stochastic recon, layerwise", "layer"),
    "importance_recon": ("importances as masks", "masks"),
    "importance_minimality": ("importance minimality", "min"),
}
"""What people call a loss: in a legend, and in a line that must be short."""


def duration(seconds: float) -> str:
    """Seconds as m:ss, or h:mm:ss."""
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def pace(progress: Progress) -> str:
    """How fast it goes and how long it will take.

    The first step says nothing about that: it may have waited for kernels to be compiled.
    """
    if progress.step == 1:
        return "the first step is done"
    return f"{progress.ms_per_step:.1f} ms/step, {duration(progress.seconds_left)} left"


def sparsity(l0: dict[str, float]) -> str:
    """How many subcomponents are important, layer by layer or in all."""
    if len(l0) > MOST_L0:
        return f"L0 {sum(l0.values()):.2f} in {len(l0)} layers"
    return "L0 " + "/".join(f"{value:.2f}" for value in l0.values())


class RunDisplay:
    """Progress of one run, wherever it is looked at."""

    def __init__(self, steps: int, console: Console | None = None, *, greeting: str = GETTING_READY) -> None:
        self._console = console or errors
        self._steps, self._greeting = steps, greeting
        self._done = 0
        self._first, self._second = greeting, ""
        self._live = Live(console=self._console, refresh_per_second=4, get_renderable=self._lines)
        self._notebook = _Notebook() if console is None and in_notebook() else None
        self._last_line = -SECONDS_BETWEEN_LINES
        self.reader_gone = False
        """Whether nobody reads what is shown any more."""

    def __enter__(self) -> "RunDisplay":
        if self._notebook is not None:
            self._notebook.show(self._greeting)
        elif self._console.is_terminal:
            self._live.start()
        else:
            self.say(self._greeting)
        return self

    def __exit__(self, *_: object) -> None:
        if self._console.is_terminal and self._notebook is None:
            self._live.stop()

    def say(self, message: str) -> None:
        if self._notebook is not None:
            self._notebook.show(message)
        else:
            self._console.print(text(message), soft_wrap=True)

    def _lines(self) -> Group:
        """Two lines that are cut where the terminal ends: how far it is, then losses."""
        width = 20 if self._console.width >= 100 else 8
        row = Table.grid(padding=(0, 1))
        row.add_column(width=width)
        row.add_column(no_wrap=True, overflow="ellipsis")
        row.add_row(ProgressBar(total=self._steps, completed=self._done, width=width), Text(self._first))
        return Group(row, Text(self._second, style="dim", no_wrap=True, overflow="ellipsis"))

    def __call__(self, progress: Progress) -> None:
        losses = progress.record["loss"]
        terms = " ".join(f"{LOSS_NAMES.get(n, (n, n))[1]} {value:.1e}" for n, value in losses.items())
        far = f"{progress.step}/{progress.steps}  {pace(progress)}  {sparsity(progress.record['l0'])}"
        self._done, self._first, self._second = progress.step, clean(far), clean(terms)
        if self._notebook is not None:
            self._notebook.show(f"step {far}", share=progress.step / progress.steps)
        elif not self._console.is_terminal and (
            time.monotonic() - self._last_line >= SECONDS_BETWEEN_LINES or progress.step == progress.steps
        ):
            self._last_line = time.monotonic()
            try:
                self.say(f"step {far}  {terms}")
            except BrokenPipeError:  # `rankone run ... 2>&1 | head -1`: save what was trained, then stop
                self.reader_gone = True
                silence()
                signal.raise_signal(signal.SIGTERM)


class _Notebook:
    """One line under a cell that is replaced by the next."""

    WIDTH = 24

    def __init__(self) -> None:
        self._handle: Any = None

    def show(self, line: str, share: float | None = None) -> None:
        from IPython.display import display  # pyright: ignore[reportMissingImports]

        done = round(self.WIDTH * (share or 0.0))
        bar = "" if share is None else "█" * done + "░" * (self.WIDTH - done) + " "
        content = {"text/plain": bar + clean(line)}
        if self._handle is None:
            self._handle = display(content, raw=True, display_id=True)
        else:
            self._handle.update(content, raw=True)


def in_notebook() -> bool:
    """Whether a Jupyter kernel runs this, not a terminal."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    return shell is not None and hasattr(shell, "kernel")


def greeting(model: DecomposedModel, steps: int, declared: Matrices) -> str:
    """What is going to be decomposed, and which matrices nobody asked for."""
    n = len(model.layers)
    begins = f"Decomposing {n} layer{'s' * (n > 1)} of {type(model.target).__name__}, {steps:,} steps."
    alone = undeclared_parameters(model.target, candidates(model.target, declared))
    if not alone:
        return begins
    named = ", ".join(alone[:3]) + (f" and {len(alone) - 3} more" if len(alone) > 3 else "")
    return f"{begins} Plain parameters are left as they are unless declared (docs/layers.md): {named}."


def shown_by_default(progress: bool | None, observer: Observer | None) -> bool:
    """Whether `decompose` shows progress: as it is told, else unless somebody else observes it."""
    if progress is not None:
        return progress
    return observer is None and os.environ.get(SWITCH, "1").lower() not in ("0", "off", "false", "no")


def say_verdict(make: Callable[[], str]) -> None:
    """Show what a result is worth; whatever happens on the way, the result itself is not lost."""
    try:
        note(f"Verdict: {make()}")
    except (RankoneError, KeyboardInterrupt) as error:
        note(f"Verdict: not made. {error or 'Interrupted.'}")
