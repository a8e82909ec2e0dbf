"""The commands that look at settings: `rankone config show`, `rankone config explain`, `rankone plan`."""

from json import dumps as to_json

from cyclopts import App

from rankone import terminal
from rankone.errors import ConfigError
from rankone.options import AsJson, Experiment, Model, Override, Preset, Seed, Steps, assignments, given

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


def plan(
    experiment: Experiment,
    /,
    *settings: Override,
    preset: Preset = None,
    seed: Seed = None,
    steps: Steps = None,
    processes: int = 1,
    device_peak: float | None = None,
    bandwidth: float | None = None,
    link: float | None = None,
    memory: float | None = None,
    model: Model = None,
    json: AsJson = False,
) -> None:
    """Say what a run will decompose and what it will cost: memory by part, time per step and in total.

    Here a few real steps are timed. For another machine, products and bytes are counted.

    Parameters
    ----------
    processes
        Processes that share every batch.
    device_peak
        TFLOP/s of another machine, for each process; needs --bandwidth.
    bandwidth
        GB/s between its processor and its memory.
    link
        GB/s between its processes.
    memory
        GB that each process may use; what is free here if not given.
    """
    from rankone import console
    from rankone.plan import Machine, make_plan
    from rankone.runs.choose import chosen_run
    from rankone.runs.run import load_warning
    from rankone.targets.own import named_by

    machine = None
    if device_peak is not None or bandwidth is not None:
        if device_peak is None or bandwidth is None:
            raise ConfigError("Another machine needs both --device-peak TFLOP/s and --bandwidth GB/s.")
        machine = Machine(device_peak, bandwidth, link)
    for name, value in (
        ("device-peak", device_peak),
        ("bandwidth", bandwidth),
        ("link", link),
        ("memory", memory),
    ):
        if value is not None and not 0 < value < 1e9:
            raise ConfigError(f"--{name} is {value:g}; expected a number above 0.")
    with given(experiment if named_by(experiment) else model):
        config, _ = chosen_run(
            experiment, None, resume=False, seeds=None, preset=preset, seed=seed, steps=steps,
            assignments=assignments(settings),
        )  # fmt: skip
        found = make_plan(config, processes=processes, machine=machine, memory=memory)
    if json:
        terminal.write_text(to_json(found.to_json(), indent=2) + "\n")
        return
    console.print_plan(found)
    warning = load_warning(config.threads) if machine is None else None
    if warning is not None:
        terminal.note(f"{warning} So were the steps that were timed.")
