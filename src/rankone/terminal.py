"""How anything is written to a terminal: two streams, safe text, plain tables. It knows no result.

What a command finds out goes to standard output; progress, notes and errors go to standard error.
Names and texts come from files and from users, so nothing is read as markup, and characters that
command a terminal are shown as a replacement character. What an encoding cannot write is replaced,
so that an ASCII locale costs a few letters and not a run. Nothing here imports torch: `rankone
--help` is there at once.
"""

import io
import os
import sys
import unicodedata
from collections.abc import Iterable, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from rankone.errors import RankoneError

READER_GONE = 141
"""The exit code when nobody reads standard output any more, as a shell reports SIGPIPE."""
BIDI_CONTROLS = frozenset("\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069")

Part = str | tuple[str, str]
"""Text, or (text, style)."""


class SafeConsole(Console):
    """A console that reads no markup, and leaves a reader who has gone away to `main`."""

    def __init__(self, **options: Any) -> None:
        super().__init__(highlight=False, markup=False, emoji=False, **options)

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError


output = SafeConsole()
errors = SafeConsole(stderr=True)


def prepare_streams() -> None:
    """Let no character that the locale cannot write stop a command."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")


def silence() -> None:
    """Write no more: the reader has gone, and Python would complain at its end."""
    for console, stream in ((output, sys.stdout), (errors, sys.stderr)):
        try:
            stream.flush()
        except (OSError, ValueError):
            console.quiet = True
            try:
                os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
            except (OSError, ValueError):  # the stream is no file (a notebook, a test)
                continue


def clean(value: object) -> str:
    """Text without characters that command a terminal, change its direction, or cannot be written."""
    return "".join(
        c
        if c in "\n\t" or (unicodedata.category(c) not in ("Cc", "Cs") and c not in BIDI_CONTROLS)
        else "\ufffd"
        for c in str(value)
    )


def text(*parts: Part) -> Text:
    """Text from parts, each with or without a style."""
    return Text.assemble(*(clean(p) if isinstance(p, str) else (clean(p[0]), p[1]) for p in parts))


def say(*parts: Part) -> None:
    """One line of what a command finds out, however long."""
    output.print(text(*parts), soft_wrap=True)


def note(*parts: Part) -> None:
    """One line on standard error."""
    errors.print(text(*parts), soft_wrap=True)


def fail(message: str) -> None:
    note(("error:", "bold red"), f" {message}")


def write_text(content: str) -> None:
    """Text for a file rather than for people: in UTF-8, whatever the locale."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(encoding="utf-8", errors="strict")
    sys.stdout.write(content)
    sys.stdout.flush()


def table(head: Sequence[str], rows: Iterable[Sequence[Part]], *, left: int = 1) -> Table:
    """A table without lines, the first `left` columns to the left and all others to the right."""
    result = Table(box=None, header_style="bold", pad_edge=False, show_header=any(head))
    for i, heading in enumerate(head):
        result.add_column(
            text(heading), justify="left" if i < left else "right", overflow="fold", no_wrap=i == 0
        )
    for row in rows:
        result.add_row(*(text(cell) for cell in row))
    return result


def explanation(error: Exception) -> str | None:
    """What to tell a user about an error; None for one that nobody expects."""
    if isinstance(error, RankoneError) or type(error).__module__.startswith("cyclopts"):
        return str(error)
    if isinstance(error, MemoryError) or any(
        words in str(error) for words in ("not enough memory", "allocate memory")
    ):
        return (
            "There is not enough memory for this. Make `batch_size`, the numbers of subcomponents in "
            "`layers`, or the target smaller."
        )
    if isinstance(error, RecursionError):
        return "Something here is nested too deeply to be read; look at the settings and overrides."
    if isinstance(error, OSError):
        where = f" {error.filename}" if error.filename else ""
        return f"cannot read or write{where}: {error.strerror or error}"
    return None
