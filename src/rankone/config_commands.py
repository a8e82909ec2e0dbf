"""The commands that look at settings: `rankone config show` and `rankone config explain`."""

from cyclopts import App

from rankone import terminal
from rankone.errors import ConfigError
from rankone.options import Experiment, Override, Preset, Seed, Steps, assignments

config_app = App(name="config", help="Look at settings.")


@config_app.command
def show(
    experiment: Experiment,
    /,
    *settings: Override,
    preset: Preset = None,
    seed: Seed = None,
    steps: Steps = None,
) -> None:
    """Print the complete settings of an experiment as YAML, for a file to change and to run."""
    from rankone.runs.config import experiment_config
    from rankone.settings import to_yaml

    config = experiment_config(
        experiment, preset=preset, seed=seed, steps=steps, assignments=assignments(settings)
    )
    terminal.write_text(to_yaml(config))


@config_app.command
def explain(*what: str) -> None:
    """Explain settings: their dotted names, their values in an experiment, and what they do.

    Parameters
    ----------
    what
        An experiment (tms_5-2 if none is named), a setting or the beginning of one (optimizer.lr,
        optimizer), or both.
    """
    from rankone import console
    from rankone.errors import near_matches
    from rankone.runs.config import RunConfig, experiment_config, experiment_names
    from rankone.settings import fields

    names = [word for word in what if word in experiment_names() or word.endswith((".yaml", ".yml"))]
    if len(names) > 1:
        raise ConfigError(f"{names[0]} and {names[1]} are two experiments; name one.")
    values = experiment_config(names[0] if names else "tms_5-2").model_dump(mode="json")
    known = list(fields(RunConfig, values))
    wanted = [word for word in what if word not in names]
    for word in wanted:
        if not any(path == word or path.startswith(f"{word}.") for path, _, _ in known):
            close = [path for path, _, _ in known if path.rpartition(".")[2] == word] or [
                p for p, _, _ in known
            ]
            raise ConfigError(
                f"There is no setting and no experiment {word!r}. {near_matches(word, [*close, *experiment_names()])}"
                if len(close) == len(known)
                else f"There is no setting {word!r} by itself: it is {' or '.join(close)}."
            )
    console.print_settings(
        one
        for one in known
        if not wanted or any(one[0] == word or one[0].startswith(f"{word}.") for word in wanted)
    )
