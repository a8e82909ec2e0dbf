"""A network of the user's own as the target of a run: `my_model.py:make`, or handed over in Python.

A run directory says which network it is of, by its fingerprint and the name of what made it, and
never how to get it: nothing that a directory says is ever executed. Whoever opens it hands the
network over again, from Python (`rankone.open(path, model=..., data=...)`) or by naming the file on
the command line (`--model my_model.py:make`); it must be the very network.
"""

import importlib.util
import inspect
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import nn

from rankone.data import Data, output_for
from rankone.errors import ConfigError, TargetError, near_matches, shown
from rankone.files import fingerprint
from rankone.patching import OutputGetter, refuse_unusable
from rankone.step import Divergence
from rankone.targets.base import Target, register_target

RETURNS = ("model", "data", "layers", "output", "divergence", "config")
"""What a `make` may return, as the keys of a mapping."""


@dataclass(frozen=True)
class Own:
    """A network of the user's, with all that a run needs to know about it."""

    model: nn.Module
    data: Data | None
    layers: Mapping[str, int | None] | Sequence[str] | None = None
    """Name patterns -> C; without C, or without layers, what is missing is found (room.py)."""
    output: OutputGetter = None
    divergence: Divergence | None = None
    config: Mapping[str, Any] = field(default_factory=dict)
    """Settings that are laid over the recipe."""
    made_by: str = ""
    """FILE:FUNCTION, without its folder; empty if it was handed over in Python."""
    typed: str = ""
    """The same as the user typed it."""
    title: str = ""


_handed_over: list[Own] = []
"""What the user gave to this process, newest last."""


@contextmanager
def handing_over(own: Own) -> Iterator[None]:
    """Meanwhile, runs of a network of the user's own are runs of this one."""
    _handed_over.append(own)
    try:
        yield
    finally:
        _handed_over.remove(own)


def handed_over() -> Own:
    """The network that the user gave to this process."""
    if not _handed_over:
        raise TargetError("No network of your own was named: FILE.py:FUNCTION, or --model with it.")
    return _handed_over[-1]


def typed() -> str:
    """What the user typed to name the network of this process, for another process to name it too."""
    return _handed_over[-1].typed if _handed_over else ""


def named_by(user: str) -> bool:
    """Whether a word of the command line names a file with a network: FILE.py or FILE.py:FUNCTION."""
    return user.partition(":")[0].endswith(".py")


def made_by(file_and_function: str) -> Own:
    """Run the file that the user named, call its function, and take what that returns.

    Only ever called with what a user typed, never with what a file says.
    """
    name, _, function = file_and_function.partition(":")
    function = function or "make"
    path = Path(name)
    if not named_by(file_and_function) or not path.is_file():
        raise ConfigError(f"There is no file {name!r}; name a network as FILE.py:FUNCTION.")
    made = _function(path, function)()
    values = _as_mapping(file_and_function, made)
    values["output"] = output_for(values["data"], values["model"], values.get("output"))
    own = Own(
        **values, made_by=f"{path.name}:{function}", typed=file_and_function, title=_title(path, function)
    )
    refuse_unusable(own.model)
    return own


def _function(path: Path, name: str) -> Any:
    """A function of a file, which is run for it, with its folder to import from."""
    path = path.resolve()
    module_name = path.stem
    loaded = sys.modules.get(module_name)
    if loaded is None or getattr(loaded, "__file__", None) != str(path):
        if loaded is not None:  # `json.py` of the user's must not take the place of Python's
            module_name = f"rankone_own_{path.stem}"
        spec = importlib.util.spec_from_file_location(module_name, path)
        assert spec is not None
        assert spec.loader is not None
        loaded = importlib.util.module_from_spec(spec)
        sys.modules[module_name] = loaded
        if str(path.parent) not in sys.path:
            sys.path.insert(0, str(path.parent))
        try:
            spec.loader.exec_module(loaded)
        except BaseException:
            del sys.modules[module_name]
            raise
    function = getattr(loaded, name, None)
    if not inspect.isroutine(function):
        functions = [n for n, f in vars(loaded).items() if inspect.isfunction(f)]
        raise ConfigError(f"{path.name} has no function {name!r}. {near_matches(name, functions)}")
    needed = [
        p.name
        for p in inspect.signature(function).parameters.values()
        if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
    ]
    if needed:
        raise ConfigError(
            f"{path.name}:{name} needs {', '.join(needed)}; it is called without arguments. Give them "
            "defaults."
        )
    return function


def _as_mapping(source: str, made: Any) -> dict[str, Any]:
    if isinstance(made, tuple | list) and 2 <= len(made) <= 3:
        made = dict(zip(RETURNS, made, strict=False))
    if not isinstance(made, Mapping):
        raise ConfigError(
            f"{source} returned {_kind(made)}; expected (model, data) or (model, data, layers), or a "
            f"mapping with these keys: {', '.join(RETURNS)}."
        )
    for key in made:
        if key not in RETURNS:
            raise ConfigError(f"{source} returned {shown(key)}. {near_matches(str(key), RETURNS)}")
    for key in ("model", "data"):
        if made.get(key) is None:
            raise ConfigError(f"{source} returned no {key}; a run needs both model and data.")
    kinds = {"layers": (Mapping, tuple, list), "config": (Mapping,)}
    for key, expected in kinds.items():
        if made.get(key) is not None and not isinstance(made[key], expected):
            raise ConfigError(f"{source} returned {_kind(made[key])} as {key}; expected a mapping.")
    return {key: value for key, value in made.items() if value is not None}


def _kind(value: Any) -> str:
    if isinstance(value, tuple | list):
        return f"a {type(value).__name__} of {len(value)}"
    return f"a {type(value).__name__}"


def _title(path: Path, function: str) -> str:
    """The first line of what is written under the function, if it can be shown."""
    line = (inspect.getdoc(_function(path, function)) or "").partition("\n")[0].strip()
    return line if line.isprintable() and len(line) <= 200 else ""


@register_target("own")
class OwnTarget(Target):
    """A network that the user hands over: rankone keeps its fingerprint and not its weights."""

    kind: str = "own"
    made_by: str = ""
    """FILE:FUNCTION that made it, for people: it is not run unless you name it again. Empty for a
    network that was handed over in Python."""
    network: str = ""
    """Its class."""
    sha256: str = ""
    """The fingerprint of its weights."""

    @property
    def own(self) -> Own:
        """The network itself, from whoever opened the run."""
        if not _handed_over:
            again = (
                f"name it again: --model {self.made_by}"
                if self.made_by
                else "open the run in Python: rankone.open(DIRECTORY, model=..., data=...)"
            )
            raise TargetError(
                f"This run is of a network of your own ({self.network}), which a run directory does not "
                f"hold, and no code is run because a file says so. To go on, {again}."
            )
        own = _handed_over[-1]
        found = fingerprint(own.model)
        if found != self.sha256:
            raise TargetError(
                f"This run is of a {self.network} whose weights have SHA-256 {self.sha256[:12]}..., but "
                f"{own.made_by or 'the model given'} is a {type(own.model).__name__} with {found[:12]}... "
                "It must be the very network: load its weights from a file, or fix the seed it is made with."
            )
        return own

    @property
    def output(self) -> OutputGetter:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.own.output

    @property
    def divergence(self) -> Divergence | None:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.own.divergence

    def load(self) -> nn.Module:
        return self.own.model

    @property
    def again(self) -> str:
        name = typed() or self.made_by
        return f" --model {shlex.quote(name)}" if name else ""

    def at_hand(self) -> bool:
        return bool(_handed_over)

    @property
    def begun_in_python(self) -> bool:
        return not self.made_by

    def has_data(self) -> bool:
        return self.own.data is not None

    def data(self, batch_size: int) -> Data:
        """The batches as they are: their size is the user's affair."""
        data = self.own.data
        if data is None:
            raise TargetError("This looks at data, and none was given. Pass data= beside model=.")
        return data


def own_target(own: Own) -> OwnTarget:
    """How a run directory names this network."""
    return OwnTarget(made_by=own.made_by, network=type(own.model).__name__, sha256=fingerprint(own.model))
