"""The words of the command line: what each option is, how people may write it, what a shell completes.

Nothing here imports torch.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import Parameter

from rankone.errors import ConfigError

SHIPPED = tuple(sorted(f.name.removesuffix(".yaml") for f in files("rankone.paper").iterdir() if
                       f.name.endswith(".yaml")))  # fmt: skip
"""The shipped experiments, for tab completion."""


def _path(type_: Any, tokens: Sequence[Any]) -> Path:
    """A path that names something; an empty one would be the current directory."""
    if not tokens[0].value:
        raise ValueError("it is empty; name a file or a directory.")
    return Path(tokens[0].value)


def _count(type_: Any, tokens: Sequence[Any]) -> int:
    """A whole number as people write it: 10000, 10_000, 1e4."""
    try:
        number = float(tokens[0].value.replace(",", ""))
        if number.is_integer():
            return int(number)
    except (ValueError, OverflowError):
        pass
    raise ValueError(f"{tokens[0].value!r} is no whole number; write 10000 or 1e4.")


AnyPath = Annotated[Path, Parameter(converter=_path)]
if TYPE_CHECKING:
    Shipped = str
else:
    Shipped = Literal[SHIPPED] | str
"""Any text, but a shell can complete the names of what is shipped."""
Experiment = Annotated[
    Shipped, Parameter(help="A name from `rankone list`, or a config.yaml.", show_choices=False)
]
Directory = Annotated[AnyPath, Parameter(help="A run directory.")]
Against = Annotated[
    AnyPath | None, Parameter(help="A run of the same network with another seed, which should agree.")
]
Preset = Annotated[
    Literal["recipe", "tuned", "paper"] | str | None,
    Parameter(
        help="`recipe`, one for all networks; `tuned`, settings found by hand for this one; or `paper`, the "
        "paper's settings to the letter.",
        show_choices=False,
    ),
]
Seed = Annotated[int | None, Parameter(help="Decides initialisation, data and masks.")]
Steps = Annotated[
    int | None,
    Parameter(
        converter=_count,
        help="Training steps; fewer than the experiment's own give a quick look, not a result. With "
        "--resume, more than a complete run had lengthen it.",
    ),
]
Jobs = Annotated[
    int | None, Parameter(help="How many runs at a time; as many as there are cores for if not given.")
]
Track = Annotated[
    list[Literal["tensorboard", "wandb", "wandb-offline", "trackio"] | str] | None,
    Parameter(
        help="Send the numbers of training to a tracker as well, `tensorboard`, `wandb`, `wandb-offline` or "
        "`trackio`; may be given several times. metrics.jsonl is written in any case.",
        show_choices=False,
        negative=(),
    ),
]
Model = Annotated[
    str | None,
    Parameter(
        help="FILE.py:FUNCTION that makes the network, for a run of a network of your own. The file is run; "
        "nothing is run because a run directory names it."
    ),
]
Override = Annotated[
    str,
    Parameter(
        allow_leading_hyphen=True,
        help="Any setting as key=value, for instance optimizer.lr=1e-3 (--optimizer.lr 1e-3 works too).",
    ),
]
AsJson = Annotated[bool, Parameter(name="--json", negative=(), help="Print the result as JSON.")]
Quiet = Annotated[
    bool, Parameter(name=("--quiet", "-q"), negative=(), help="Show no progress; errors are still told.")
]


def assignments(tokens: Sequence[str]) -> list[str]:
    """Overrides in any of the forms people type (`a.b=1`, `--a.b=1`, `--a.b 1`), as `a.b=1`."""
    result: list[str] = []
    rest = iter(tokens)
    for token in rest:
        key = token.removeprefix("--")
        if "=" not in key and token.startswith("--"):
            value = next(rest, None)
            if value is None:
                raise ConfigError(
                    f"{token} has no value, or is no option of this command. "
                    "Write key=value, for instance seed=1."
                )
            key = f"{key}={value}"
        result.append(key)
    return result


@contextmanager
def given(model: str | None) -> Iterator[None]:
    """Meanwhile, the network that the user named with --model is at hand."""
    if model is None:
        yield
        return
    from rankone.targets.own import handing_over, made_by

    with handing_over(made_by(model)):
        yield
