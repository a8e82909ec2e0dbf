"""The paper's runs as YAML files, and how a run's settings are put together.

Each file holds the paper's settings to the letter (`paper`) and a list of changes, each with its reason, that make the
default preset. What a run finally used is one complete `ExperimentConfig`, written to its config.yaml.
"""

from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any, ClassVar, Literal

from pydantic import Field, field_validator

from rankone.config import (
    DecompositionConfig,
    Settings,
    differences,
    fields,
    from_yaml,
    override,
    set_setting,
    validated,
)
from rankone.errors import ConfigError, near_matches
from rankone.targets import TargetSettings

PRESETS = ("default", "paper")


def real_differences(old: "ExperimentConfig", new: "ExperimentConfig", *, besides: Sequence[str] = ()) -> list[str]:
    """In what two runs differ, in words; how they are described does not count, nor what is named in `besides`."""
    unread = {*new.descriptive, *besides}
    before, after = (config.model_dump(mode="json", exclude=unread) for config in (old, new))
    return differences(before, after)


class Difference(Settings):
    """One setting in which the default preset departs from the paper, and why."""

    setting: str
    """Dotted name of the setting."""
    value: Any
    """Its value here."""
    why: str
    """The reason."""


class ExperimentConfig(DecompositionConfig):
    """A whole run: target, data, layers, and how to decompose them."""

    descriptive: ClassVar[tuple[str, ...]] = (
        "experiment",
        "preset",
        "title",
        "recovers",
        "paper_reports",
        "differs_from_paper",
        "overrides",
        "schema_version",
    )

    schema_version: Literal[1] = 1
    """The form of this file; rankone refuses forms it does not know."""
    experiment: str
    """Name of the experiment; names the run directory and stands in the report."""
    preset: str = "custom"
    """Where these settings come from: `paper`, `default`, or `custom`."""
    title: str = ""
    """One line for people."""
    recovers: str = ""
    """What a correct decomposition finds, in words."""
    paper_reports: dict[str, float] = {}
    """The paper's own numbers for this experiment, for comparison."""
    differs_from_paper: list[Difference] = []
    """What the default preset changes, and why."""
    overrides: list[str] = []
    """Settings changed on the command line, besides the seed."""
    target: TargetSettings
    """The network to decompose, and its data."""
    layers: dict[str, int] = Field(min_length=1)
    """Name patterns of the layers to decompose, with the number C of subcomponents of each."""
    batch_size: int = Field(default=4096, ge=1)
    """Datapoints per training step."""
    threads: int = Field(default=1, ge=1)
    """CPU threads. A setting, not a detail: the order of summation, and so the last bit of the result, depends on it."""

    @field_validator("target", mode="before")
    @classmethod
    def _kind(cls, value: Any) -> Any:
        if isinstance(value, dict) and "kind" not in value:
            raise ValueError("kind is missing; it says which family of networks this is, for instance kind: tms")
        return value


class ExperimentFile(Settings):
    """The form of a shipped experiment file."""

    title: str
    """One line for `rankone list` and the report."""
    recovers: str
    """What a correct decomposition finds."""
    takes: dict[str, str]
    """Time of a full run on one CPU core, per preset; with a star if it is an estimate."""
    paper: dict[str, Any]
    """The paper's settings."""
    default: list[Difference]
    """Changes to them in the default preset."""


def read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not a text file in UTF-8 ({error.reason} at byte {error.start}).") from None


def experiment_names() -> list[str]:
    found = [Path(f.name).stem for f in files("rankone.paper").iterdir() if f.name.endswith(".yaml")]
    return sorted(found, key=lambda name: (name.endswith("-id"), len(name), name))


def experiment_file(name: str) -> ExperimentFile:
    if name not in experiment_names():
        hint = near_matches(name, experiment_names())
        raise ConfigError(
            f"There is no experiment {name!r}. {hint} A config file must end in .yaml; `rankone list` shows all."
        )
    text = (files("rankone.paper") / f"{name}.yaml").read_text()
    return validated(ExperimentFile, from_yaml(text, source=f"{name}.yaml"), source=f"{name}.yaml")


def preset_values(name: str, preset: str) -> dict[str, Any]:
    """The plain settings of a shipped experiment under a preset."""
    if preset not in PRESETS:
        raise ConfigError(f"There is no preset {preset!r}. {near_matches(preset, PRESETS)}")
    file = experiment_file(name)
    changes = file.default if preset == "default" else []
    values = {
        "experiment": name,
        "preset": preset,
        "title": file.title,
        "recovers": file.recovers,
        "differs_from_paper": [c.model_dump() for c in changes],
    }
    complete = validated(ExperimentConfig, values | file.paper, source=f"{name}.yaml").model_dump(mode="json")
    for change in changes:
        set_setting(complete, ExperimentConfig, change.setting, change.value)
    return complete


def changed(values: dict[str, Any], assignments: Sequence[str], *, source: str) -> dict[str, Any]:
    """Settings with assignments applied; what they undo is no longer listed as a difference from the paper."""
    config = validated(ExperimentConfig, override(values, ExperimentConfig, assignments), source=source)
    result = config.model_dump(mode="json")
    now = {path: value for path, value, _ in fields(ExperimentConfig, result)}
    kept = [d for d in result["differs_from_paper"] if d["setting"] in now and now[d["setting"]] == d["value"]]
    return result | {"differs_from_paper": kept}


def preset_of(values: dict[str, Any]) -> str:
    """The preset that a config file's settings really are: what it says, or `custom` where it was edited."""
    name, preset = values["experiment"], values["preset"]
    if name not in experiment_names() or preset not in PRESETS:
        return "custom"
    expected = changed(preset_values(name, preset), values["overrides"], source="The overrides of this config")
    free = {"seed", "overrides"}
    differing = {d.split(" was ")[0].split(".")[0] for d in differences(expected, values)} - free
    return "custom" if differing else preset


def experiment_config(
    name_or_path: str,
    *,
    preset: str | None = None,
    seed: int | None = None,
    steps: int | None = None,
    assignments: Sequence[str] = (),
) -> ExperimentConfig:
    """The settings of a run: a shipped experiment or a YAML file, with command-line changes applied."""
    path = Path(name_or_path)
    if path.suffix in (".yaml", ".yml"):
        if preset is not None:
            raise ConfigError(f"--preset chooses among the settings of a shipped experiment; {path} has its own.")
        if not path.is_file():
            raise ConfigError(f"There is no config file {path}.")
        given = from_yaml(read_text(path), source=str(path))
        values = validated(ExperimentConfig, given, source=str(path)).model_dump(mode="json")
        values["preset"] = preset_of(values)
        if values["preset"] == "custom":
            values["differs_from_paper"] = []
    else:
        values = preset_values(name_or_path, preset or "default")
    for assignment in assignments:
        if assignment.partition("=")[0] in ExperimentConfig.descriptive:
            hint = "Use --preset." if assignment.startswith("preset") else "It describes a run and is not set by hand."
            raise ConfigError(f"{assignment!r} cannot be given as an override. {hint}")
    changes = [*assignments, *([f"steps={steps}"] if steps is not None else [])]
    source = f"Settings for {name_or_path}"
    values = changed(values, [*changes, *([f"seed={seed}"] if seed is not None else [])], source=source)
    values["overrides"] = [*values["overrides"], *changes]
    return validated(ExperimentConfig, values, source=source)
