"""The command line: a table of plain functions.

Settings are put together in runs/, work is done by watch.py and shown by console.py; a command here only says
which. `main` turns every expected failure into one readable message and an exit code; anything else
is a bug and keeps its traceback. torch is imported by the commands that need it, so that `--help`
and mistakes in typing are answered at once.
"""

import shlex
import signal
import sys
from importlib.metadata import version
from json import dumps as to_json
from pathlib import Path
from typing import Annotated

from cyclopts import App, CycloptsError, Parameter

from rankone import terminal, using_commands
from rankone.config_commands import config_app, plan
from rankone.errors import ConfigError
from rankone.options import (
    Against,
    AnyPath,
    AsJson,
    Directory,
    Experiment,
    Jobs,
    Model,
    Override,
    Preset,
    Quiet,
    Seed,
    Shipped,
    Steps,
    Track,
    assignments,
    given,
)

app = App(
    name="rankone",
    help="Stochastic Parameter Decomposition: take a trained network's weight matrices apart into "
    "rank-one mechanisms.",
    version=lambda: version("rankone"),
)
app.register_install_completion_command()
app.command(config_app)
app.command(plan)
app.command(using_commands.cluster)
app.command(using_commands.view)


@app.command(name="list")
def list_experiments() -> None:
    """List every experiment: what a correct decomposition finds and how long it takes."""
    from rankone import console
    from rankone.runs.config import PRESETS, experiment_file, experiment_names

    experiments = {name: experiment_file(name) for name in experiment_names()}
    console.print_experiments(
        (name, file.recovers, *(file.takes.get(preset, "-") for preset in PRESETS))
        for name, file in experiments.items()
    )


@app.command
def run(
    experiment: Annotated[Shipped, Parameter(show_choices=False)],
    /,
    *settings: Override,
    preset: Preset = None,
    out: AnyPath | None = None,
    seed: Seed = None,
    seeds: int | None = None,
    jobs: Jobs = None,
    steps: Steps = None,
    resume: bool = False,
    start_from: AnyPath | None = None,
    track: Track = None,
    model: Model = None,
    quiet: Quiet = False,
    json: AsJson = False,
) -> None:
    """Decompose a network: train, evaluate, draw, report.

    Parameters
    ----------
    experiment
        A name from `rankone list`; FILE.py:FUNCTION, a function of yours that returns a network, its data and
        the layers to decompose; a config.yaml; or the directory of an earlier run (with --resume).
    out
        The run directory, which must be new, empty or an earlier run; runs/NAME-PRESET-seedN if not
        given, with what was changed in its name. With --seeds, the directory in which each seed gets its
        own.
    seeds
        Run this many seeds, from --seed on, several at a time, and summarise them together.
    resume
        Go on from the newest checkpoint in the run directory.
    start_from
        The directory of an earlier run on the same network: start from what it found, with the settings
        of this one.
    """
    from rankone import console, processes, watch
    from rankone.report.page import can_report
    from rankone.runs.choose import chosen_run
    from rankone.targets.own import named_by

    if named_by(experiment):
        if model is not None:
            raise ConfigError(f"{experiment} names a network already; leave out --model.")
        model = experiment
    with given(model), processes.joined() as world:
        world.refuse_different({"words on their command lines": sys.argv[1:]})
        if seeds is not None and world.size > 1:
            raise ConfigError("torchrun shares one run between processes; --seeds runs several by itself.")
        if isinstance(world, processes.Together) and not world.leads:
            watch.follow_leader(world)
            return
        changes = assignments(settings)
        if start_from is not None:
            changes.append(f"start_from={to_json(str(start_from))}")
        config, out = chosen_run(
            experiment,
            out,
            resume=resume,
            seeds=seeds,
            preset=preset,
            seed=seed,
            steps=steps,
            assignments=changes,
        )
        if seeds is not None:
            runs, numbers, complete = watch.run_seeds(
                config, out, seeds, jobs, resume, quiet=quiet, track=track or ()
            )
            if json:
                terminal.write_text(numbers.read_text(encoding="utf-8"))
            else:
                console.print_seeds(runs)
                terminal.say(f"Numbers: {numbers}; each seed's report is in its directory.")
            raise SystemExit(not complete)
        if jobs is not None:
            raise ConfigError("--jobs says how many seeds run at a time; it needs --seeds.")
        out = out or Path("runs") / config.run_name
        summary = watch.run_one(config, out, resume, quiet=quiet, track=track or ())
        if json:
            terminal.write_text(to_json(summary.to_json(), indent=2) + "\n")
            return
        console.print_summary(summary)
        terminal.say(f"Report: {out / 'report.html'}" if can_report() else f"Numbers: {out / 'summary.json'}")
        if summary.recovered is False or (summary.verdict is not None and not summary.verdict.good):
            which = f" --model {shlex.quote(model)}" if model is not None else ""
            terminal.say(f"What is wrong, and what to do: rankone diagnose {shlex.quote(str(out))}{which}")


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
        Which runs to make: `tuned` (if none is named), `paper` for the paper's settings to the letter, or
        `recipe`. If named, tables and figures are of this preset only.
    out
        Where runs, tables and figures go; reproduction/ if not given, redrawn/ with --from.
    source
        Make everything from the runs that this directory keeps (results/ in the repository), without
        training.
    """
    from rankone import console, watch
    from rankone.files import RunDirectory
    from rankone.paper.figures import make
    from rankone.paper.plan import PRESET, runs_for
    from rankone.report.page import can_report
    from rankone.runs.config import PRESETS
    from rankone.runs.kept import kept_runs

    if not can_report():
        raise ConfigError("Figures need matplotlib. Install it with: pip install 'rankone[report]'")
    if source is not None and (seeds, jobs) != (None, None):
        raise ConfigError("--from uses every run that is kept and makes none; leave out --seeds and --jobs.")
    specs = runs_for(what, name, preset or PRESET, seeds)
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
    from rankone import watch
    from rankone.collection import bench, split

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


@app.command
def tune(
    experiment: Experiment,
    /,
    *settings: Override,
    trials: int = 8,
    preset: Preset = None,
    seed: Seed = None,
    steps: Steps = None,
    storage: str | None = None,
    study: str | None = None,
    out: AnyPath | None = None,
    json: AsJson = False,
) -> None:
    """Find the trade-off between how few subcomponents are needed and what an attack can break.

    The pressure on importances is varied, and one point of the curve recommended. The same command goes
    on where it stopped; started several times at once, it shares the work.

    Parameters
    ----------
    trials
        Finished trials that the study should have, those of earlier commands and other workers included.
    storage
        URL of a database for workers on several machines (sqlite:///FILE, postgresql://..., mysql://...); a
        journal in the output directory if not given.
    study
        Name of the study in the storage; NAME-PRESET-seedN if not given.
    out
        Where the curve, its figure and the trials go; runs/NAME-PRESET-seedN-tune if not given.
    """
    from rankone import watch
    from rankone.runs.config import experiment_config

    changes = assignments(settings)
    config = experiment_config(experiment, preset=preset, seed=seed, steps=steps, assignments=changes)
    words = [experiment, *(["--preset", preset] if preset else []), *changes]
    words += [f"{key}={value}" for key, value in (("seed", seed), ("steps", steps)) if value is not None]
    watch.run_tune(config, trials, out, storage, study, json, shlex.join(words))


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
    import torch

    from rankone import console
    from rankone.files import load_sealed
    from rankone.runs.config import experiment_config
    from rankone.runs.run import allowed_threads
    from rankone.targets import save_target, train_until_good, trainable

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
            terminal.say(
                f"Wrote {path}\nSHA-256 {sha}{', the same as the pinned target' * (sha == target.sha256)}"
            )
            if sha != target.sha256:
                words = ["rankone", "run", experiment, f"target.weights={path}", f"target.sha256={sha}"]
                terminal.say(f"Decompose it with: {shlex.join(words)}")


@app.command
def evaluate(
    directory: Directory, /, *, attack: int | None = None, model: Model = None, json: AsJson = False
) -> None:
    """Evaluate a finished run again and print its numbers; summary.json is brought up to date.

    A run of a network of your own is measured again if the network is named with --model; if not, the
    numbers it has are printed.

    Parameters
    ----------
    attack
        Attack the decomposition with up to this many steps, and print how it degrades on the way.
    """
    from rankone import console
    from rankone.evaluate import attack_ladder
    from rankone.runs.run import evaluate_again, load_run, stored_numbers

    with given(model):
        if attack is not None:
            result = load_run(directory).result
            ladders = attack_ladder(result, result.data_or(None), attack)
            if json:
                terminal.write_text(to_json(ladders, indent=2) + "\n")
            else:
                console.print_ladder(ladders)
            return
        summary = stored_numbers(directory) if model is None else None
        if summary is not None:
            terminal.note("Not measured again: that needs the network. These are the numbers that it has.")
        else:
            summary = evaluate_again(directory)
        if json:
            terminal.write_text(to_json(summary.to_json(), indent=2) + "\n")
        else:
            console.print_summary(summary)


@app.command
def compare(a: Directory, b: Directory, /, *, model: Model = None, json: AsJson = False) -> None:
    """Compare two runs on one network: which subcomponents are the same, and do importances agree?

    Parameters
    ----------
    a, b
        Two run directories, finished or not: other seeds, other presets, other versions.
    json
        Print everything, each matched pair of subcomponents included, as JSON.
    """
    from rankone import console
    from rankone.compare import compare as match_subcomponents
    from rankone.runs.config import real_differences
    from rankone.runs.run import load_run

    with given(model):
        runs = [load_run(directory) for directory in (a, b)]
        comparison = match_subcomponents(runs[0].result, runs[1].result, runs[0].result.data_or(None))
    differing = real_differences(*(run.config for run in runs))
    versions = [run.summary.versions.get("rankone") if run.summary else None for run in runs]
    if json:
        found = {"a": str(a), "b": str(b), "differing": differing, "versions": versions}
        terminal.write_text(to_json(found | comparison.to_dict(), indent=2) + "\n")
    else:
        console.print_comparison(comparison, differing, versions)


@app.command
def diagnose(
    directory: Directory, /, *, against: Against = None, model: Model = None, json: AsJson = False
) -> None:
    """Look for what is wrong with a run, finished or not, and say which setting to move and how."""
    from dataclasses import asdict

    from rankone import console
    from rankone.runs.run import load_run

    with given(model):
        other = None if against is None else load_run(against).result
        found = load_run(directory).result.diagnose(against=other)
    if json:
        terminal.write_text(to_json(asdict(found), indent=2) + "\n")
    else:
        console.print_diagnosis(found)


@app.command
def report(directory: Directory, /, *, model: Model = None) -> None:
    """Draw the figures and write report.html of a finished run again."""
    from rankone.report.page import can_report, write_report
    from rankone.runs.run import evaluate_run, load_run

    if not can_report():
        raise ConfigError(
            "A report needs matplotlib and jinja2. Install them with: pip install 'rankone[report]'"
        )
    with given(model):
        loaded = load_run(directory)
        summary = loaded.finished()
        with loaded.directory.lock():
            evaluation = evaluate_run(loaded.config, loaded.result)
            path = write_report(loaded.directory, loaded.config, loaded.result, evaluation, summary)
    terminal.say(f"Report: {path}")


def main(words: list[str] | None = None) -> None:
    """Run the command line; every expected failure becomes one message and an exit code."""
    terminal.prepare_streams()
    try:
        app(sys.argv[1:] if words is None else words, exit_on_error=False, print_error=False)
    except BrokenPipeError:  # the reader of standard output has gone, as in `| head -1`
        terminal.silence()
        code = terminal.READER_GONE
    except KeyboardInterrupt:
        terminal.note("Interrupted.")
        code = 128 + signal.SIGINT
    except Exception as error:
        message = terminal.explanation(error)
        if message is None:
            raise
        terminal.fail(message)
        code = 2 if isinstance(error, CycloptsError) else 1
    else:
        return
    raise SystemExit(code)
