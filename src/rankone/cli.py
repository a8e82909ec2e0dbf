"""The command line: a table of plain functions.

Settings are put together in runs/, work is done by watch.py and shown by console.py; a command here only says
which. `main` turns every expected failure into one readable message and an exit code; anything else
is a bug and keeps its traceback.
"""

import shlex
import signal
import sys
from collections.abc import Sequence
from json import dumps as to_json
from pathlib import Path
from typing import Annotated, Any

import torch
from cyclopts import App, CycloptsError, Parameter

from rankone import __version__, console, watch
from rankone.collection import bench, split
from rankone.compare import compare as match_subcomponents
from rankone.diagnose import diagnose as find_faults
from rankone.errors import ConfigError
from rankone.evaluate import attack_ladder
from rankone.files import RunDirectory, load_sealed
from rankone.paper.figures import make
from rankone.paper.plan import runs_for
from rankone.report.page import can_report, write_report
from rankone.runs.config import (
    PRESETS,
    RunConfig,
    experiment_config,
    experiment_file,
    experiment_names,
    real_differences,
)
from rankone.runs.kept import kept_runs
from rankone.runs.run import allowed_threads, evaluate_again, evaluate_run, load_run, read_config
from rankone.settings import fields, to_yaml
from rankone.targets import save_target, train_until_good, trainable

app = App(
    name="rankone",
    help="Stochastic Parameter Decomposition: take a trained network's weight matrices apart into "
    "rank-one mechanisms.",
    version=__version__,
)
config_app = App(name="config", help="Look at settings.")
app.command(config_app)


def _path(type_: Any, tokens: Sequence[Any]) -> Path:
    """A path that names something; an empty one would be the current directory."""
    if not tokens[0].value:
        raise ValueError("it is empty; name a file or a directory.")
    return Path(tokens[0].value)


AnyPath = Annotated[Path, Parameter(converter=_path)]
Experiment = Annotated[str, Parameter(help="A name from `rankone list`, or a config.yaml.")]
Directory = Annotated[AnyPath, Parameter(help="A run directory.")]
Preset = Annotated[
    str | None, Parameter(help="`default`, or `paper` for the paper's settings to the letter.")
]
Seed = Annotated[int | None, Parameter(help="Decides initialisation, data and masks.")]
Steps = Annotated[
    int | None,
    Parameter(help="Training steps; fewer than the experiment's own give a quick look, not a result."),
]
Jobs = Annotated[
    int | None, Parameter(help="How many runs at a time; as many as there are cores for if not given.")
]
Override = Annotated[
    str,
    Parameter(
        allow_leading_hyphen=True,
        help="Any setting as key=value, for instance optimizer.lr=1e-3 (--optimizer.lr 1e-3 works too).",
    ),
]


@app.command(name="list")
def list_experiments() -> None:
    """List every experiment: what a correct decomposition finds and how long it takes."""
    experiments = {name: experiment_file(name) for name in experiment_names()}
    console.print_experiments(
        (name, file.recovers, *(file.takes.get(preset, "-") for preset in PRESETS))
        for name, file in experiments.items()
    )


@app.command
def run(
    experiment: str,
    /,
    *settings: Override,
    preset: Preset = None,
    out: AnyPath | None = None,
    seed: Seed = None,
    seeds: int | None = None,
    jobs: Jobs = None,
    steps: Steps = None,
    resume: bool = False,
) -> None:
    """Decompose a network: train, evaluate, draw, report.

    Parameters
    ----------
    experiment
        A name from `rankone list`, a config.yaml, or the directory of an earlier run (with --resume).
    out
        The run directory, which must be new, empty or an earlier run; runs/NAME-PRESET-seedN if not
        given. With --seeds, the directory in which each seed gets its own.
    seeds
        Run this many seeds, from --seed on, several at a time, and summarise them together.
    resume
        Go on from the newest checkpoint in the run directory.
    """
    directory = Path(experiment)
    if directory.is_dir() and experiment not in experiment_names():
        config, out = read_config(RunDirectory.open(directory)), out or directory
        if not resume:
            raise ConfigError(f"{directory} is a run directory. Add --resume to go on with it.")
        if settings or (preset, seed, seeds, steps) != (None, None, None, None):
            raise ConfigError(
                f"{directory} is resumed with its own settings; leave out --preset, --seed, --seeds, "
                "--steps and overrides."
            )
    else:
        config = experiment_config(
            experiment, preset=preset, seed=seed, steps=steps, assignments=assignments(settings)
        )
    if seeds is not None:
        raise SystemExit(not watch.run_seeds(config, out, seeds, jobs, resume))
    if jobs is not None:
        raise ConfigError("--jobs says how many seeds run at a time; it needs --seeds.")
    out = out or Path("runs") / config.run_name
    console.print_summary(watch.run_one(config, out, resume))
    console.say(f"Report: {out / 'report.html'}" if can_report() else f"Numbers: {out / 'summary.json'}")


@app.command
def reproduce(
    what: str = "all",
    name: str | None = None,
    /,
    *,
    seeds: int | None = None,
    preset: str | None = None,
    out: AnyPath | None = None,
    source: Annotated[AnyPath | None, Parameter(name="--from")] = None,
    jobs: Jobs = None,
) -> None:
    """Reproduce the paper: make the runs that are missing, print its numbers beside ours, draw its
    figures.

    Finished runs are kept and interrupted ones resumed, so the same command goes on where it
    stopped, and a larger --seeds adds to what is there.

    Parameters
    ----------
    what
        `table1` (MMCS and ML2R), `recovery` (which seeds are recovered, all experiments), `subcomponents`
        (how many are alive), `contributions` (of neurons), `splitting` (of features), `figure` with the
        name of one, or `all`.
    name
        The figure: an experiment of superposition, importances-EXPERIMENT, contributions-EXPERIMENT, beta3
        or splitting.
    seeds
        Seeds of every experiment; if not given, 10 of the cheapest down to 1 of the most expensive.
    preset
        Which runs to make: `default`, or `paper` for the paper's settings to the letter. If named, tables
        and figures are of this preset only.
    out
        Where runs, tables and figures go; reproduction/ if not given, redrawn/ with --from.
    source
        Make everything from the runs that this directory keeps (results/ in the repository), without
        training.
    """
    if not can_report():
        raise ConfigError("Figures need matplotlib. Install it with: pip install 'rankone[report]'")
    if source is not None and (seeds, jobs) != (None, None):
        raise ConfigError("--from uses every run that is kept and makes none; leave out --seeds and --jobs.")
    specs = runs_for(what, name, preset or "default", seeds)
    out = out or Path("redrawn" if source else "reproduction")
    if source is not None and not kept_runs(source):
        raise ConfigError(f"{source} keeps no finished runs (runs/NAME with a summary.json).")
    directory = RunDirectory.claim(out)
    complete = source is not None or watch.make_missing(specs, out, jobs)
    made = make(what, name, [preset] if preset else PRESETS, kept_runs(source or out), directory)
    console.print_reproduction(made, out)
    if not (made.figures or made.tables):
        of = f" of the preset {preset}" if preset else ""
        raise ConfigError(f"{source or out} keeps no run{of} that this could be made of.")
    raise SystemExit(not complete)


@app.command
def benchmark(
    *settings: Override,
    only: Annotated[list[str] | None, Parameter(consume_multiple=True)] = None,
    half: str | None = None,
    seeds: int = 1,
    jobs: Jobs = None,
    out: AnyPath | None = None,
) -> None:
    """Decompose networks whose mechanisms are known, and count what is missing, stray, split or merged.

    Results that are there already are kept, so the same command goes on where it stopped.

    Parameters
    ----------
    only
        Names of networks (without a name, all of a half).
    half
        `develop` (the default), `held_out` (for a final table, never to tune with), `paper` (the seven
        networks of the paper) or `all`.
    seeds
        So many seeds of each network, from 0 on.
    out
        Where results, benchmark.json and benchmark.html go; runs/benchmark if not given.
    """
    if only is not None and half is not None:
        raise ConfigError("--only and --half both say which networks to run; leave one of them out.")
    # `--only a b steps=100`: what is a setting and no name.
    changes = (*settings, *(word for word in only or () if "=" in word))
    names = None if only is None else [word for word in only if "=" not in word]
    if names == []:
        raise ConfigError("--only needs the name of a network. " + split.hint())
    method = bench.Rankone(tuple(assignments(changes)))
    method.config()  # a setting that is wrong is wrong for every network: say so now
    watch.run_benchmark(method, split.chosen(names, half or "develop"), seeds, jobs, out)


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
    config = experiment_config(
        experiment, preset=preset, seed=seed, steps=steps, assignments=assignments(settings)
    )
    console.write_text(to_yaml(config))


@config_app.command
def explain(experiment: Experiment = "tms_5-2", /) -> None:
    """Explain every setting: its dotted name, its value in an experiment, and what it does."""
    values = experiment_config(experiment).model_dump(mode="json")
    console.print_settings(fields(RunConfig, values))


@app.command
def train_target(experiment: Experiment, /, *, seed: int | None = None, out: AnyPath | None = None) -> None:
    """Train the target network of an experiment, until one passes the check of a good target.

    Parameters
    ----------
    seed
        The first seed to try; the pinned target's if not given.
    out
        Where to write it; targets/NAME-seedN.safetensors if not given.
    """
    config = experiment_config(experiment)
    target = trainable(config.target)
    torch.set_num_threads(allowed_threads(config.threads))
    if out is not None and out.exists():
        raise ConfigError(f"{out} exists already; choose a new file.")
    for attempt, model, loss, good, numbers in train_until_good(
        target, target.first_seed if seed is None else seed
    ):
        console.print_attempt(attempt, loss, good, numbers)
        if good:
            path = out or Path("targets") / f"{config.experiment}-seed{attempt}.safetensors"
            if path.exists():
                load_sealed(path)  # only what is a file of ours is replaced
            sha = save_target(path, model, target, attempt)
            console.say(
                f"Wrote {path}\nSHA-256 {sha}{', the same as the pinned target' * (sha == target.sha256)}"
            )
            if sha != target.sha256:
                words = ["rankone", "run", experiment, f"target.weights={path}", f"target.sha256={sha}"]
                console.say(f"Decompose it with: {shlex.join(words)}")


@app.command
def evaluate(directory: Directory, /, *, attack: int | None = None) -> None:
    """Evaluate a finished run again and print its numbers; summary.json is brought up to date.

    Parameters
    ----------
    attack
        Attack the decomposition with up to this many steps, and print how it degrades on the way.
    """
    if attack is None:
        console.print_summary(evaluate_again(directory))
        return
    loaded = load_run(directory)
    data = loaded.config.target.data(loaded.config.batch_size)
    console.print_ladder(attack_ladder(loaded.result, data, attack))


@app.command
def compare(a: Directory, b: Directory, /, *, json: bool = False) -> None:
    """Compare two runs on one network: which subcomponents are the same, and do importances agree?

    Parameters
    ----------
    a, b
        Two run directories, finished or not: other seeds, other presets, other versions.
    json
        Print everything, each matched pair of subcomponents included, as JSON.
    """
    runs = [load_run(directory) for directory in (a, b)]
    data = runs[0].config.target.data(runs[0].config.batch_size)
    comparison = match_subcomponents(runs[0].result, runs[1].result, data)
    differing = real_differences(*(run.config for run in runs))
    versions = [run.summary.versions.get("rankone") if run.summary else None for run in runs]
    if json:
        found = {"a": str(a), "b": str(b), "differing": differing, "versions": versions}
        console.write_text(to_json(found | comparison.to_dict(), indent=2) + "\n")
    else:
        console.print_comparison(comparison, differing, versions)


@app.command
def diagnose(directory: Directory, /) -> None:
    """Look for what is wrong with a run, finished or not, and say which setting to move and how."""
    loaded = load_run(directory)
    data = loaded.config.target.data(loaded.config.batch_size)
    console.print_diagnosis(find_faults(loaded.result, data, steps_done=loaded.steps))


@app.command
def report(directory: Directory, /) -> None:
    """Draw the figures and write report.html of a finished run again."""
    if not can_report():
        raise ConfigError(
            "A report needs matplotlib and jinja2. Install them with: pip install 'rankone[report]'"
        )
    loaded = load_run(directory)
    summary = loaded.finished()
    with loaded.directory.lock():
        evaluation = evaluate_run(loaded.config, loaded.result)
        path = write_report(loaded.directory, loaded.config, loaded.result, evaluation, summary)
    console.say(f"Report: {path}")


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


def main(words: list[str] | None = None) -> None:
    """Run the command line; every expected failure becomes one message and an exit code."""
    console.prepare_streams()
    try:
        app(sys.argv[1:] if words is None else words, exit_on_error=False, print_error=False)
    except BrokenPipeError:  # the reader of standard output has gone, as in `| head -1`
        console.silence()
        code = console.READER_GONE
    except KeyboardInterrupt:
        console.note("Interrupted.")
        code = 128 + signal.SIGINT
    except Exception as error:
        message = console.explanation(error)
        if message is None:
            raise
        console.fail(message)
        code = 2 if isinstance(error, CycloptsError) else 1
    else:
        return
    raise SystemExit(code)
