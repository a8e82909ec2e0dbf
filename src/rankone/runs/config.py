"""The settings of a run, and how they are put together from an experiment file and a command line.

An experiment file holds a title and its settings: either `recipe`, what is laid over the one recipe
for all networks, or the settings of a paper to the letter (`paper`) and as `tuned` a list of changes
to them that were found by hand, each with its reason. The preset `recipe` then takes from the paper
only what is decomposed and on which data. Files are found in registered packages
(`register_experiments`). What a run finally used is one complete `RunConfig`, written to its
config.yaml.
"""

import json
import re
from collections.abc import Mapping, Sequence
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, Field, model_validator

from rankone.config import DecompositionConfig, Layers, laid_over_recipe
from rankone.errors import ConfigError, near_matches
from rankone.files import read_text, sha256
from rankone.patching import OutputGetter
from rankone.settings import (
    ByKind,
    Settings,
    differences,
    fields,
    from_yaml,
    override,
    set_setting,
    validated,
)
from rankone.targets import TARGETS, Target

PRESETS = ("recipe", "tuned", "paper")
USUAL_PRESET = "recipe"
"""The preset where none is named. The settings of a network of the user's own are laid over it too."""
WHAT_IS_DECOMPOSED = (
    "target",
    "layers",
    "tied",
    "matrices",
    "output",
    "divergence",
    "batch_size",
    "threads",
    "paper_reports",
)
"""What the preset `recipe` takes from an experiment's paper: the network and its data, not the method."""
ONE_RECIPE = "One recipe for all networks (docs/recipe.md)."
"""Why the preset `recipe` differs from the paper, wherever it does."""
LARGEST_FILE = 1_000_000


def _one_line(text: str) -> str:
    if len(text) > 2000 or not text.isprintable():
        raise ValueError("expected one line of at most 2000 characters, without control characters")
    return text


def _safe_in_paths(name: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._+-]{0,99}", name):
        raise ValueError(
            f"{name[:100]!r} is not a name: expected at most 100 letters, digits, '.', '_', '+' and "
            "'-', beginning with a letter or digit"
        )
    return name


Line = Annotated[str, AfterValidator(_one_line)]
"""Text that a terminal and a page can show as it is."""
Name = Annotated[str, AfterValidator(_safe_in_paths)]
"""A name that cannot lead out of a directory."""


class Difference(Settings):
    """One setting in which a preset departs from the paper, and why."""

    setting: Line
    """Dotted name of the setting."""
    value: Any
    """Its value here."""
    why: Line
    """The reason."""


class RunConfig(DecompositionConfig):
    """A whole run: target, data, layers, and how to decompose them."""

    descriptive: ClassVar[tuple[str, ...]] = (
        "experiment",
        "preset",
        "title",
        "recovers",
        "paper_reports",
        "differs_from_paper",
        "overrides",
        "lengthened",
        "schema_version",
    )

    schema_version: Literal[1] = 1
    """The form of this file; rankone refuses forms it does not know."""
    experiment: Name
    """Name of the experiment; part of the run directory's name and of the report."""
    preset: Name = "custom"
    """Where these settings come from: `recipe`, `tuned`, `paper`, or `custom`."""
    title: Line = ""
    """One line for people."""
    recovers: Line = ""
    """What a correct decomposition finds, in words."""
    paper_reports: dict[Line, float] = {}
    """The paper's own numbers for this experiment, for comparison."""
    differs_from_paper: list[Difference] = []
    """What the preset changes in the paper's settings, and why."""
    overrides: list[Line] = []
    """Settings changed on the command line, besides the seed."""
    lengthened: list[int] = []
    """The numbers of steps at which the run had been complete before it was lengthened."""
    target: Annotated[Target, ByKind(TARGETS)]
    """The network to decompose, and its data."""
    layers: Layers
    """Name patterns of the layers to decompose, with the number C of subcomponents of each."""
    output: Line | int | None = None
    """How to get the tensor to compare from what the network returns: a name or an index; null for
    what its family says, which is mostly the returned tensor itself."""
    batch_size: int = Field(default=4096, ge=1, le=10**7)
    """Datapoints per training step."""
    start_from: Line = ""
    """The directory of an earlier run on the same network, whose subcomponents and importance functions
    this one starts from; empty for a fresh start."""
    threads: int = Field(default=1, ge=1, le=1024)
    """CPU threads. A setting, not a detail: the order of summation, and so the last bit of the result,
    depends on it."""

    @property
    def run_name(self) -> str:
        """The name of the run's directory, unless another is asked for: a run with other settings does
        not take the place of the real one."""
        return f"{self.label}-seed{self.seed}"

    @property
    def label(self) -> str:
        """What the run is called, whatever its seed: experiment, preset, and what was changed (but for
        threads, which a machine may decide)."""
        changes = [o for o in self.overrides if not o.startswith("threads=")]
        return "-".join([self.experiment, self.preset, *filter(None, [_in_a_name(changes)])])

    @property
    def getter(self) -> OutputGetter:
        """How to get the tensor to compare from what the network returns."""
        return self.target.output if self.output is None else self.output


def _in_a_name(overrides: Sequence[str]) -> str:
    """Overrides as a part of a file name: in full if they are short, else the first and a digest."""
    if not overrides:
        return ""
    parts = [re.sub(r"[^A-Za-z0-9.+-]+", "", o.replace("=", "")) for o in overrides]
    name = "-".join(parts)
    if len(name) <= 50 and all(parts):
        return name
    return f"{name[:32].rstrip('-.')}-{sha256(json.dumps(list(overrides)).encode())[:8]}"


def real_differences(old: RunConfig, new: RunConfig, *, besides: Sequence[str] = ()) -> list[str]:
    """The settings in which two runs differ, in words, without those that only describe them."""
    ignored = {*new.descriptive, *besides}
    before, after = (config.model_dump(mode="json", exclude=ignored) for config in (old, new))
    return differences(before, after)


class ExperimentFile(Settings):
    """The form of an experiment file."""

    title: Line
    """One line for `rankone list` and the report."""
    recovers: Line = ""
    """What a correct decomposition finds."""
    takes: dict[Line, Line] = {}
    """Time of a full run on one CPU core, per preset; with a star if it is an estimate."""
    paper: dict[str, Any] | None = None
    """The settings of a paper, to the letter."""
    tuned: list[Difference] | None = None
    """Changes to them that were found by hand."""
    recipe: dict[str, Any] | None = None
    """Without `paper`: settings that are laid over the recipe, among them the target and its layers."""

    @model_validator(mode="after")
    def _fitting(self) -> "ExperimentFile":
        if (self.recipe is None) == (self.paper is None):
            raise ValueError(
                "expected either `recipe`, a mapping of settings that are laid over the recipe, or `paper`, "
                f"the settings of a paper; got {'both' if self.paper is not None else 'neither'}"
            )
        if self.tuned is not None and self.paper is None:
            raise ValueError("`tuned` is a list of changes to `paper`, which is not there")
        return self

    @property
    def presets(self) -> tuple[str, ...]:
        if self.paper is None:
            return (USUAL_PRESET,)
        return tuple(preset for preset in PRESETS if preset != "tuned" or self.tuned is not None)


_PACKAGES: list[str] = []


def register_experiments(package: str) -> None:
    """Make the experiment files (*.yaml) of a package known by name."""
    known = _experiments()
    for name in _experiments_in(package):
        if name in known:
            raise ConfigError(
                f"{package} holds an experiment {name!r}, and there is one of this name already."
            )
    _PACKAGES.append(package)


def _experiments_in(package: str) -> dict[str, Traversable]:
    return {Path(f.name).stem: f for f in files(package).iterdir() if f.name.endswith(".yaml")}


def _experiments() -> dict[str, Traversable]:
    return {name: file for package in _PACKAGES for name, file in _experiments_in(package).items()}


register_experiments("rankone.paper")
register_experiments("rankone.languages")


def experiment_names() -> list[str]:
    return sorted(_experiments(), key=lambda name: (name.endswith("-id"), len(name), name))


def experiment_file(name: str) -> ExperimentFile:
    experiments = _experiments()
    if name not in experiments:
        raise ConfigError(
            f"There is no experiment {name!r}. {near_matches(name, experiments)} "
            "A config file must end in .yaml; `rankone list` shows all."
        )
    source = f"{name}.yaml"
    return validated(
        ExperimentFile, from_yaml(experiments[name].read_text("utf-8"), source=source), source=source
    )


def preset_values(name: str, preset: str) -> dict[str, Any]:
    """The plain settings of an experiment under a preset."""
    if preset not in PRESETS:
        raise ConfigError(f"There is no preset {preset!r}. {near_matches(preset, PRESETS)}")
    file = experiment_file(name)
    if preset not in file.presets:
        others = ", ".join(repr(known) for known in file.presets)
        raise ConfigError(
            f"{name} has no preset {preset!r}: {'its only one is' if len(file.presets) == 1 else 'it has'} "
            f"{others}."
        )
    described = {"experiment": name, "preset": preset, "title": file.title, "recovers": file.recovers}

    def complete(settings: dict[str, Any]) -> dict[str, Any]:
        return validated(RunConfig, described | settings, source=f"{name}.yaml").model_dump(mode="json")

    if file.paper is None:
        return complete(laid_over_recipe(file.recipe or {}))
    paper = complete(file.paper)
    if preset == "recipe":
        same = {key: value for key, value in file.paper.items() if key in WHAT_IS_DECOMPOSED}
        values = complete(laid_over_recipe(same))
        changes = _all_differences(paper, values)
    else:
        values = paper
        changes = file.tuned or [] if preset == "tuned" else []
        for change in changes:
            set_setting(values, RunConfig, change.setting, change.value)
    return values | {"differs_from_paper": [change.model_dump() for change in changes]}


def _all_differences(paper: Mapping[str, Any], values: Mapping[str, Any]) -> list[Difference]:
    before = {path: value for path, value, _ in fields(RunConfig, paper)}
    return [
        Difference(setting=path, value=value, why=ONE_RECIPE)
        for path, value, _ in fields(RunConfig, values)
        if path not in RunConfig.descriptive and (path not in before or before[path] != value)
    ]


def changed(values: dict[str, Any], assignments: Sequence[str], *, source: str) -> dict[str, Any]:
    """Settings with assignments applied; what they undo is no longer a difference from the paper."""
    config = validated(RunConfig, override(values, RunConfig, assignments), source=source)
    result = config.model_dump(mode="json")
    now = {path: value for path, value, _ in fields(RunConfig, result)}
    still = [
        d for d in result["differs_from_paper"] if d["setting"] in now and now[d["setting"]] == d["value"]
    ]
    return result | {"differs_from_paper": still}


def preset_of(values: dict[str, Any]) -> str:
    """The preset that a config file's settings really are: what it says, or `custom` if it was edited."""
    name, preset = values["experiment"], values["preset"]
    if name not in experiment_names() or preset not in experiment_file(name).presets:
        return "custom"
    expected = changed(
        preset_values(name, preset), values["overrides"], source="The overrides of this config"
    )
    differing = {d.split(" was ")[0].split(".")[0] for d in differences(expected, values)}
    return "custom" if differing - {"seed", "overrides"} else preset


def experiment_config(
    name_or_path: str,
    *,
    preset: str | None = None,
    seed: int | None = None,
    steps: int | None = None,
    assignments: Sequence[str] = (),
) -> RunConfig:
    """The settings of a run: an experiment or a YAML file, with command-line changes applied."""
    path = Path(name_or_path)
    if path.suffix in (".yaml", ".yml"):
        if preset is not None:
            raise ConfigError(f"--preset chooses among the settings of an experiment; {path} has its own.")
        if not path.is_file():
            raise ConfigError(f"There is no config file {path}.")
        if path.stat().st_size > LARGEST_FILE:
            raise ConfigError(
                f"{path} has {path.stat().st_size:,} bytes; a config file has at most {LARGEST_FILE:,}."
            )
        values = parse_config(read_text(path), source=str(path)).model_dump(mode="json")
        values["preset"] = preset_of(values)
        if values["preset"] == "custom":
            values["differs_from_paper"] = []
    else:
        values = preset_values(name_or_path, preset or USUAL_PRESET)
    refuse_descriptive(assignments)
    changes = [*assignments, *([f"steps={steps}"] if steps is not None else [])]
    source = f"Settings for {name_or_path}"
    values = changed(values, [*changes, *([f"seed={seed}"] if seed is not None else [])], source=source)
    values["overrides"] = [*values["overrides"], *changes]
    return validated(RunConfig, values, source=source)


def refuse_descriptive(assignments: Sequence[str]) -> None:
    """Raise if an override would change what a run is called, not what it does."""
    for assignment in assignments:
        if assignment.partition("=")[0].split(".")[0] in RunConfig.descriptive:
            hint = (
                "Use --preset."
                if assignment.startswith("preset")
                else "It describes a run and is not set by hand."
            )
            raise ConfigError(f"{assignment!r} cannot be given as an override. {hint}")


def parse_config(text: str, *, source: str) -> RunConfig:
    """The settings that a config.yaml holds."""
    return validated(RunConfig, from_yaml(text, source=source), source=source)
