"""Which run a command line means: a shipped experiment, a network of the user's, a config file, or a run
directory to go on with."""

from pathlib import Path
from typing import Any

from rankone.errors import ConfigError
from rankone.files import RunDirectory
from rankone.runs.config import RunConfig, experiment_config, experiment_names
from rankone.runs.own import own_config
from rankone.runs.run import read_config, refuse_handed_over
from rankone.targets.own import handed_over, named_by


def chosen_run(
    named: str, out: Path | None, *, resume: bool, seeds: int | None, **changes: Any
) -> tuple[RunConfig, Path | None]:
    """The settings of a run, and where it goes (None: where its name says).

    `changes` are `preset`, `seed`, `steps` and `assignments`, as `experiment_config` takes them.
    """
    path = Path(named)
    if path.is_dir() and named not in experiment_names():
        return _earlier_run(path, resume, seeds, **changes), out or path
    if named_by(named):
        return own_config(handed_over(), **changes), out
    config = experiment_config(named, **changes)
    if path.suffix in (".yaml", ".yml") and out is None and seeds is None and config.preset == "custom":
        out = Path("runs") / f"{path.stem}-{config.run_name}"
    return config, out


def _earlier_run(directory: Path, resume: bool, seeds: int | None, **changes: Any) -> RunConfig:
    config = read_config(RunDirectory.open(directory))
    if not resume:
        raise ConfigError(f"{directory} is a run directory. Add --resume to go on with it.")
    steps = changes.pop("steps")
    if seeds is not None or any(change not in (None, []) for change in changes.values()):
        raise ConfigError(
            f"{directory} is resumed with its own settings; leave out --preset, --seed, --seeds, "
            "--start-from and overrides. (--steps lengthens a run that is complete.)"
        )
    refuse_handed_over(directory, config)
    if steps is None:
        return config
    return type(config).model_validate(config.model_dump(mode="json") | {"steps": steps})
