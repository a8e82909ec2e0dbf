"""Settings in general: typed, frozen, checked; their YAML, and what is said about mistakes in them.

Nothing here knows a loss or a target. What a config can name (losses, targets, initialisations) is
in a `Registry`; a setting that is chosen from one says so in its annotation (`ByName`, `ByKind`).
Text from outside is bounded in size, depth and count, so that no file and no override can make
rankone hang: it gives plain values or a ConfigError.
"""

import copy
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, TypeVar

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator
from pydantic_core import core_schema

from rankone.errors import ConfigError, near_matches, shown

T = TypeVar("T")
Entry = TypeVar("Entry")
S = TypeVar("S", bound=BaseModel)

Count = Annotated[int, Field(ge=1, le=10**9)]
CountOrZero = Annotated[int, Field(ge=0, le=10**9)]
Seed = Annotated[int, Field(ge=0, lt=2**63)]
Coefficient = Annotated[float, Field(ge=0, le=1e12)]
Positive = Annotated[float, Field(gt=0, le=1e6)]


class Settings(BaseModel):
    """Base of all settings: immutable, strict about keys, documented by field docstrings."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False, str_max_length=10_000
    )

    def __init__(self, **values: Any) -> None:
        try:
            super().__init__(**values)
        except ValidationError as error:
            raise ConfigError(_in_words(type(self), values, error)) from None

    # pydantic then builds groups inside groups without this __init__, and keeps the places of errors.
    __init__.__pydantic_base_init__ = True  # pyright: ignore[reportFunctionMemberAccess]

    @field_validator("*", mode="before")
    @classmethod
    def _no_control_characters(cls, value: Any) -> Any:
        """What is accepted here must be readable in the config.yaml that is written of it."""
        texts = value if isinstance(value, list) else [value]
        for text in [*value, *value.values()] if isinstance(value, dict) else texts:
            if isinstance(text, str) and (character := _CONTROL.search(text)):
                raise ValueError(f"there is a control character, {character[0]!r}; remove it")
        return value


_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]")


def _place(entry: Any) -> tuple[Any, Any]:
    """Where a class or function was defined."""
    return getattr(entry, "__module__", None), getattr(entry, "__qualname__", entry)


class Registry(Mapping[str, T]):
    """What a config can name, by name.

    LOSSES: Registry[type[Loss]] = Registry("loss")

    @LOSSES.register("mine")
    class Mine(Loss): ...
    """

    def __init__(self, what: str) -> None:
        self.what = what
        self._entries: dict[str, T] = {}

    def register(self, name: str) -> Callable[[Entry], Entry]:
        """Decorator: make a class or function available to configs under `name`."""

        def add(entry: Any) -> Any:
            if not re.fullmatch(r"\w[\w-]{0,99}", name):
                raise ConfigError(
                    f"{shown(name)} cannot name a {self.what}: use letters, digits, _ and -, at most 100."
                )
            old = self._entries.get(name)
            if old is not None and _place(old) != _place(entry):  # a cell that is run again is no mistake
                raise ConfigError(
                    f"There is already a {self.what} {name!r} ({shown(old)}). Choose "
                    "another name, or delete that one from its registry first."
                )
            self._entries[name] = entry
            return entry

        return add

    def __getitem__(self, name: str) -> T:
        """What is registered under `name`; a ConfigError with near matches if nothing is."""
        if name not in self:
            raise ConfigError(f"Unknown {self.what} {shown(name)}. {near_matches(str(name), self)}")
        return self._entries[name]

    def get(self, name: str) -> T:  # pyright: ignore[reportIncompatibleMethodOverride]
        return self[name]

    def known(self, name: str) -> str:
        """The name itself, if something is registered under it: a validator for pydantic."""
        self.get(name)
        return name

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and name in self._entries

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def __delitem__(self, name: str) -> None:
        self.get(name)
        del self._entries[name]


@dataclass(frozen=True)
class ByName:
    """A mapping of registered names to their settings: `Annotated[dict[str, Loss], ByName(LOSSES)]`."""

    registry: Registry[Any]

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> core_schema.CoreSchema:
        one = core_schema.no_info_plain_validator_function(self._one)
        mapping = core_schema.dict_schema(core_schema.str_schema(), one)
        return core_schema.no_info_before_validator_function(self._with_names, mapping)

    def _with_names(self, value: Any) -> dict[Any, Any]:
        if not isinstance(value, Mapping):
            what = self.registry.what
            raise ValueError(f"expected a mapping of {what} names to their settings, got {shown(value)}")
        return {name: (name, settings) for name, settings in value.items()}

    def _one(self, named: tuple[str, Any]) -> BaseModel:
        name, settings = named
        return self.registry.get(name).model_validate(settings)


@dataclass(frozen=True)
class ByKind:
    """Settings whose class is registered under their `kind`: `Annotated[Target, ByKind(TARGETS)]`."""

    registry: Registry[Any]

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> core_schema.CoreSchema:
        return core_schema.no_info_plain_validator_function(self._one)

    def _one(self, value: Any) -> BaseModel:
        kind = _kind(value)
        if not isinstance(kind, str):
            what, names = self.registry.what, ", ".join(sorted(self.registry))
            raise ValueError(f"its kind must be the name of a {what} ({names}), got {shown(kind)}")
        return self.registry.get(kind).model_validate(value)


def _kind(value: Any) -> Any:
    return value.get("kind") if isinstance(value, Mapping) else getattr(value, "kind", None)


Group = type[BaseModel] | Registry[Any]
"""What holds settings by name: a class of settings, or the registry behind a `ByName` mapping."""


def _inside(group: Group | None, name: Any, value: Any) -> Group | None:
    """The group that is called `name` in another, given its value; None where that is a plain setting."""
    if isinstance(group, Registry):
        return group.get(name) if name in group else None
    if group is None or name not in group.model_fields:
        return None
    info = group.model_fields[name]
    for marker in info.metadata:
        if isinstance(marker, ByName):
            return marker.registry
        if isinstance(marker, ByKind):
            kind = _kind(value)
            return marker.registry.get(kind) if kind in marker.registry else None
    cls = info.annotation
    return cls if isinstance(cls, type) and issubclass(cls, BaseModel) else None


def fields(group: Group, values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any, str]]:
    """Every setting as (dotted path, value, documentation), depth first; a free-form mapping is one.

    Values need not be valid: what is no group although it should be counts as an empty one.
    """
    names = [n for n in values if n in group] if isinstance(group, Registry) else list(group.model_fields)
    for name in names:
        value = values.get(name)
        inner = _inside(group, name, value)
        if inner is not None:
            yield from fields(inner, value if isinstance(value, Mapping) else {}, f"{prefix}{name}.")
        elif not isinstance(group, Registry):
            yield f"{prefix}{name}", value, " ".join((group.model_fields[name].description or "").split())


def validated(cls: type[S], values: Any, *, source: str) -> S:
    """Settings from plain values; every mistake in one ConfigError, with its place and a hint."""
    if not isinstance(values, Mapping):
        raise ConfigError(f"{source}: expected a mapping of settings, got {type(values).__name__}.")
    try:
        return cls.model_validate(values)
    except ValidationError as error:
        raise ConfigError(f"{source}:\n{_in_words(cls, values, error)}") from None


def _in_words(cls: type[BaseModel], values: Mapping[str, Any], error: ValidationError, most: int = 12) -> str:
    problems = error.errors(include_url=False)
    lines = [_problem(cls, values, problem) for problem in problems[:most]]
    return "\n".join([*lines, *([f"  ... and {len(problems) - most} more"] if len(problems) > most else [])])


def _problem(cls: type[BaseModel], values: Any, problem: Any) -> str:
    group: Group | None = cls
    *parents, name = problem["loc"] or [""]
    for part in parents:
        values = values.get(part) if isinstance(values, Mapping) else None
        group = _inside(group, part, values)
    path = ".".join(str(part)[:100] for part in problem["loc"])
    if problem["type"] == "extra_forbidden":
        siblings = group.model_fields if isinstance(group, type) else ()
        elsewhere = [known for known, _, _ in fields(cls, {})]
        return (
            f"  {path}: unknown setting. {meant(str(name), siblings, elsewhere) if siblings else ''}".rstrip()
        )
    message = str(problem["msg"]).removeprefix("Value error, ")
    got = "" if problem["type"] == "value_error" else f" (got {shown(problem['input'])})"
    return f"  {path or 'settings'}: {message}{got}"


NO_SETTING = {
    "device": "A decomposition is made where the network is: move that, model.to('cuda').",
    "learning_rate": "Did you mean 'optimizer.lr'?",
    "epochs": "Training is counted in `steps`.",
    "batch_size": "Batches are as large as your data makes them.",
    "C": "The number of subcomponents is given with the layers: {'fc1': 20}.",
}
"""What people look for among the settings and is called otherwise, or is no setting."""


def meant(name: str, siblings: Iterable[str], everything: Iterable[str] = ()) -> str:
    """A sentence about a name that is no setting here: what it may be meant to be."""
    if name in NO_SETTING:
        return NO_SETTING[name]
    same_leaf = [path for path in everything if path.rpartition(".")[2] == name]
    if same_leaf:
        return "Did you mean " + " or ".join(shown(path) for path in same_leaf[:3]) + "?"
    return near_matches(name, siblings)


def differences(old: Any, new: Any, path: str = "") -> list[str]:
    """The settings in which two sets of plain values differ, in words."""
    if isinstance(old, dict) and isinstance(new, dict):
        keys = sorted(set(old) | set(new))
        return [d for k in keys for d in differences(old.get(k), new.get(k), f"{path}.{k}" if path else k)]
    return [] if old == new else [f"{path} was {shown(old)} and is now {shown(new)}"]


def override(values: dict[str, Any], settings: type[BaseModel], assignments: Sequence[str]) -> dict[str, Any]:
    """`values` with dotted assignments (`optimizer.lr=1e-3`); each key must exist, each value is YAML."""
    if len(assignments) > MOST_OVERRIDES:
        raise ConfigError(
            f"There are {len(assignments)} overrides, but at most {MOST_OVERRIDES} are read; "
            "write a config file."
        )
    result = copy.deepcopy(values)
    for assignment in assignments:
        key, separator, text = assignment.partition("=")
        if not separator:
            raise ConfigError(
                f"Override {shown(assignment)} has no value; write key=value, for instance optimizer.lr=1e-3."
            )
        set_setting(result, settings, key, from_yaml(text, source=f"Override {shown(assignment)}"))
    return result


def set_setting(values: dict[str, Any], settings: type[BaseModel], key: str, value: Any) -> None:
    """Set one dotted setting in plain values. Keys of a free-form mapping may be new and hold dots."""
    known = {path: current for path, current, _ in fields(settings, values)}
    for path, current in known.items():
        if key.startswith(f"{path}.") and isinstance(current, dict):
            current[key.removeprefix(f"{path}.")] = value
            return
    *parents, leaf = key.split(".")
    inside: Any = values
    group: Group | None = settings
    for part in parents:
        if isinstance(inside, dict) and isinstance(group, Registry) and part in group:
            inside.setdefault(part, {})  # what is registered may be added by its first setting
        inside = inside.get(part) if isinstance(inside, dict) else None
        group = _inside(group, part, inside)
    known |= {
        f"{'.'.join(parents)}.{name}": None
        for name in (group.model_fields if isinstance(group, type) else ())
    }
    if not isinstance(inside, dict) and key in known:
        raise ConfigError(f"{key} cannot be set, because {'.'.join(parents)} was set to a plain value.")
    if not isinstance(inside, dict) or (key not in known and leaf not in inside):
        raise ConfigError(
            f"There is no setting {shown(key)}. {meant(key, known, known)} See `rankone config explain`."
        )
    inner = _inside(group, leaf, value)
    if isinstance(inner, Registry) and isinstance(value, dict) and isinstance(inside.get(leaf), dict):
        # What is not named stays, as in Python: one loss that is changed must not drop the others.
        before = inside[leaf]
        value = before | {
            k: before[k] | v if isinstance(v, dict) and isinstance(before.get(k), dict) else v
            for k, v in value.items()
        }
    inside[leaf] = value


MOST_TEXT = 200_000
"""Characters of YAML that are read. The parser takes up to 2.5 microseconds for each."""
MOST_NODES = 10_000
MOST_DEPTH = 20
MOST_OVERRIDES = 1000

_INT = re.compile(r"[-+]?(0|[1-9][0-9_]{0,30})")
_FLOAT = re.compile(r"[-+]?([0-9][0-9_]*\.[0-9_]*|\.[0-9][0-9_]*|[0-9][0-9_]*(?=[eE]))([eE][-+]?[0-9]+)?")
_WORDS: dict[str, Any] = {"": None, "~": None}
for _word, _value in {
    "null": None, "true": True, "false": False, ".nan": math.nan, ".inf": math.inf, "-.inf": -math.inf
}.items():  # fmt: skip
    _WORDS |= dict.fromkeys((_word, _word.capitalize(), _word.upper()), _value)


def _scalar(text: str) -> Any:
    """What an unquoted word of YAML means: null, true, a number, or itself.

    Unlike YAML 1.1, 1e-3 is a number, and 2024-01-31, 1:30, 010 and `no` are not what they are not.
    """
    if text in _WORDS:
        return _WORDS[text]
    if _INT.fullmatch(text):
        return int(text.replace("_", ""))
    if _FLOAT.fullmatch(text):
        return float(text.replace("_", ""))
    return text


def from_yaml(text: str, *, source: str) -> Any:
    """Plain values from YAML text: mappings with text as keys, lists, and what `_scalar` reads."""
    if len(text) > MOST_TEXT:
        raise ConfigError(f"{source} has {len(text):,} characters; settings have at most {MOST_TEXT:,}.")
    try:
        return _YAML(text).document()
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = f" (line {mark.line + 1}, column {mark.column + 1})" if mark else ""
        raise ConfigError(f"{source} is not valid YAML: {error.problem or error.context}{place}.") from None
    except (yaml.YAMLError, ValueError, OverflowError) as error:  # also odd escapes and version numbers
        raise ConfigError(f"{source} is not valid YAML: {error}") from None


class _YAML:
    """Values from the events of a YAML parser: they are counted, and what could grow is refused."""

    def __init__(self, text: str) -> None:
        self.events = yaml.parse(text, yaml.SafeLoader)
        self.nodes = 0

    def document(self) -> Any:
        value, documents = None, 0
        for event in self.events:
            if isinstance(event, yaml.DocumentStartEvent):
                documents += 1
                if documents > 1:
                    raise self.problem("a second document starts here; keep one per file", event)
                value = self.value(next(self.events), 1)
        return value

    def value(self, event: Any, depth: int) -> Any:
        self.check(event, depth)
        if isinstance(event, yaml.SequenceStartEvent):
            items = []
            while not isinstance(event := next(self.events), yaml.SequenceEndEvent):
                items.append(self.value(event, depth + 1))
            return items
        if isinstance(event, yaml.MappingStartEvent):
            mapping: dict[str, Any] = {}
            while not isinstance(event := next(self.events), yaml.MappingEndEvent):
                key = self.key(event, mapping)
                mapping[key] = self.value(next(self.events), depth + 1)
            return mapping
        return _scalar(event.value) if event.implicit[0] else event.value

    def key(self, event: Any, mapping: Mapping[str, Any]) -> str:
        """Keys are text as it is written, so that a layer can be called 0."""
        self.check(event, 0)
        if not isinstance(event, yaml.ScalarEvent):
            raise self.problem("a key must be plain text", event)
        if event.value == "<<" and event.implicit[0]:
            raise self.problem("merge keys (<<) are not read; write the values out", event)
        if event.value in mapping:
            raise self.problem(f"the key {shown(event.value)} appears twice", event)
        return event.value

    def check(self, event: Any, depth: int) -> None:
        self.nodes += 1
        if self.nodes > MOST_NODES:
            raise self.problem(f"there are more than {MOST_NODES:,} values", event)
        if depth > MOST_DEPTH:
            raise self.problem(f"values are nested more than {MOST_DEPTH} deep", event)
        if event.anchor is not None:
            raise self.problem(
                "anchors (&) and aliases (*) are not read; write values out, quote text", event
            )
        if event.tag is not None:
            raise self.problem(
                f"the tag {shown(event.tag)} is not read; leave it out, or quote the text", event
            )
        if isinstance(event, yaml.ScalarEvent) and (character := _CONTROL.search(event.value)):
            raise self.problem(f"there is a control character, {character[0]!r}; remove it", event)

    def problem(self, problem: str, event: Any) -> yaml.MarkedYAMLError:
        return yaml.MarkedYAMLError(problem=problem, problem_mark=event.start_mark)


class _Dumper(yaml.SafeDumper):
    """YAML that `from_yaml` reads back: no aliases, quotes around text that would not stay text."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


_Dumper.add_representer(
    str,
    lambda dumper, text: dumper.represent_scalar(
        "tag:yaml.org,2002:str", text, style=None if _scalar(text) is text else "'"
    ),
)


def to_yaml(settings: BaseModel) -> str:
    """Settings as YAML that reads back to the same settings."""
    values = settings.model_dump(mode="json")
    return yaml.dump(values, Dumper=_Dumper, sort_keys=False, width=100, allow_unicode=True)
