"""One run from settings to summary, in a directory that anyone can read.

config.yaml      complete settings; `rankone run config.yaml` repeats the run
metrics.jsonl    losses and sparsity at every log step
checkpoints/     exact training state, for --resume
decomposition/   the result: components.safetensors and decomposition.json
figures/         the figures as SVG
report.html      one page that explains all of it
summary.json     the numbers; written last, so its presence means the run is complete
manifest.json    which of these files rankone wrote, and their digests

Every file is written and read through `RunDirectory`: one that was changed by hand is refused by name.
"""

import os
import platform
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, get_args

import torch

from rankone.checkpoint import (
    checkpoint_names,
    earlier_parameters,
    load_newest,
    load_parameters,
    refuse_other_layers,
)
from rankone.data import Data, to_device
from rankone.decomposition import COMPONENTS, Decomposition, build, load, train
from rankone.errors import CheckpointError, TargetError, near_matches
from rankone.evaluate import Evaluation, evaluate
from rankone.files import RunDirectory, fingerprint, sha256
from rankone.metrics import Pattern
from rankone.metrics_log import Observer, parse_metrics, read_prefix
from rankone.model import DecomposedModel
from rankone.processes import current
from rankone.runs.config import RunConfig, parse_config, real_differences
from rankone.runs.summary import Summary
from rankone.settings import to_yaml
from rankone.targets.base import Target

CONFIG, METRICS, SUMMARY, DECOMPOSITION = "config.yaml", "metrics.jsonl", "summary.json", "decomposition"

Say = Callable[[str], None]
Report = Callable[[RunDirectory, RunConfig, Decomposition, Evaluation, Summary], Any]
"""Writes a report of a run into its directory."""


def run(
    config: RunConfig,
    out: Path | RunDirectory,
    *,
    resume: bool = False,
    observer: Observer | None = None,
    say: Say = lambda _: None,
    report: Report | None = None,
) -> Summary:
    """Do a whole run, or finish one that was interrupted; return its summary."""
    directory = RunDirectory.claim(out)
    out = directory.path
    with directory.lock():
        if not resume:
            refuse_existing(out)
        if not directory.has(CONFIG) and directory.names():
            raise CheckpointError(
                f"{out} holds something else that rankone made ({directory.names()[0]}). Choose another "
                "directory with --out."
            )
        stored = read_config(directory) if resume and directory.has(CONFIG) else None
        config = with_threads(config, stored, say)
        longer = stored is not None and is_lengthened(directory, stored, config)
        if stored is not None and not longer:
            _refuse_other_settings(out, stored, config)
        if directory.has(SUMMARY) and not longer:
            summary = load_run(directory.path).finished()  # refuses what was changed since
            say(f"{out} is already complete; nothing to do.")
            return summary
        torch.set_num_threads(config.threads)
        model = build(config.target.load(), config.layers, config, config.getter)
        refuse_senseless_truth(config.target, model)
        if stored is None:  # only now: settings that cannot work leave no config.yaml behind
            directory.write(CONFIG, to_yaml(config))
        elif longer:
            config = lengthened(directory, stored, config)
            directory.write(CONFIG, to_yaml(config))
        start = None
        if config.start_from and not checkpoint_names(directory):
            earlier = RunDirectory.open(config.start_from)
            start = earlier_parameters(earlier, f"{DECOMPOSITION}/{COMPONENTS}", fingerprint(model.target))
        data = config.target.data(config.batch_size)
        divergence = config.target.divergence
        current().announce(to_yaml(config))
        result = train(
            model,
            data,
            config,
            divergence=divergence,
            directory=directory,
            resume=resume,
            observer=observer,
            start=start,
        )
        return complete(directory, config, result, say=say, report=report)


def follow(config: RunConfig) -> None:
    """Train along in a run that another process leads, which alone writes it down."""
    torch.set_num_threads(config.threads)
    model = build(config.target.load(), config.layers, config, config.getter)
    train(model, config.target.data(config.batch_size), config, divergence=config.target.divergence)


def complete(
    directory: RunDirectory,
    config: RunConfig,
    result: Decomposition,
    *,
    say: Say = lambda _: None,
    report: Report | None = None,
) -> Summary:
    """Measure a run that was trained to its end, write its report and, last, its summary."""
    began = time.perf_counter()
    say("Evaluating.")
    result.evaluation = evaluation = evaluate_run(config, result)
    summary = summarised(config, result, evaluation, decomposition_sha256(directory))
    if summary.recovered is None:
        summary = summary.model_copy(update={"verdict": result.verdict})
    if report is not None:
        say("Drawing figures and writing the report.")
        report(directory, config, result, evaluation, summary)
    seconds = result.seconds + time.perf_counter() - began
    summary = summary.model_copy(update={"wall_seconds": round(seconds, 3)})
    write_summary(directory, summary)
    return summary


@dataclass(frozen=True)
class LoadedRun:
    """A run from its directory, finished or not."""

    directory: RunDirectory
    config: RunConfig
    result: Decomposition
    steps: int
    """Steps done."""
    summary: Summary | None
    """None if the run is not complete."""

    def finished(self) -> Summary:
        """Its summary; an error if there is none yet."""
        if self.summary is None:
            out = self.directory.path
            raise CheckpointError(f"{out} is not complete yet. Finish it with: rankone run {out} --resume")
        return self.summary


def load_run(path: Path) -> LoadedRun:
    """A run from its directory, as far as it has come."""
    directory = RunDirectory.open(path)
    config = read_config(directory)
    summary = read_summary(directory) if directory.has(SUMMARY) else None
    checkpoints = checkpoint_names(directory)
    if summary is not None and not _components(directory).is_file():
        again = f"Make the run itself with: {summary.command}" if summary.command else "Make the run again."
        raise CheckpointError(f"{path} holds the summary of a run but not its decomposition. {again}")
    if summary is None and not checkpoints:
        raise CheckpointError(
            f"{path} has no checkpoint yet: there is nothing to look at. Go on with: rankone run {path} "
            "--resume"
        )
    directory.read(METRICS)  # verifies it
    torch.set_num_threads(allowed_threads(config.threads))
    target = config.target.load()
    if summary is not None:
        if summary.decomposition_sha256 != decomposition_sha256(directory):
            raise CheckpointError(
                f"{_components(directory)} is not the one that {path / SUMMARY} was measured on: it was "
                "replaced. Put the original back, or make the run again in another directory."
            )
        result = load(path / DECOMPOSITION, target, output=config.getter, divergence=config.target.divergence)
        result.seconds = summary.train_seconds or 0.0
        result.data, result.evaluation = _data(config), summary.evaluation()
        result._verdict = summary.verdict
        return LoadedRun(directory, config, result, config.steps, summary)
    tensors, meta = load_newest(directory)
    model = build(target, config.layers, config, config.getter)
    if meta["target"] != fingerprint(target):
        raise CheckpointError(
            f"{path / checkpoints[-1]} belongs to another target network (its weights differ)."
        )
    refuse_other_layers(model, checkpoints[-1], meta)
    load_parameters(model, tensors)
    metrics = read_prefix(directory, meta["metrics_bytes"], meta["metrics_sha256"])
    history = parse_metrics(metrics, str(path / METRICS))
    result = Decomposition(
        model,
        config,
        history,
        meta["seconds"],
        config.target.divergence,
        _data(config),
        steps_done=meta["step"],
    )
    return LoadedRun(directory, config, result, meta["step"], None)


def stored_numbers(path: Path) -> Summary | None:
    """The summary of a finished run whose network is not at hand; None where it can be measured again."""
    directory = RunDirectory.open(path)
    if read_config(directory).target.at_hand() or not directory.has(SUMMARY):
        return None
    return read_summary(directory)


def refuse_handed_over(out: Path, config: RunConfig) -> None:
    """Raise if a run was begun in Python: only there it can go on as itself."""
    if config.target.begun_in_python:
        raise CheckpointError(
            f"{out} was begun in Python; go on with it there: decompose(..., out={str(out)!r}, resume=True)."
        )


def _data(config: RunConfig) -> Data | None:
    return config.target.data(config.batch_size) if config.target.has_data() else None


def evaluate_again(path: Path) -> Summary:
    """Measure a finished run again; its summary.json is brought up to date."""
    loaded = load_run(path)
    before = loaded.finished()
    with loaded.directory.lock():
        evaluation = evaluate_run(loaded.config, loaded.result)
        summary = before.updated(measured(loaded.config, loaded.result, evaluation))
        write_summary(loaded.directory, summary)
    return summary


def evaluate_run(config: RunConfig, result: Decomposition) -> Evaluation:
    """The evaluation of a run: its own data, and what is known of the layers that were decomposed."""
    target = config.target
    return evaluate(
        result,
        target.data(config.batch_size),
        probe=target.probe(),
        ground_truth={name: pattern for name, pattern in target.truth().items() if name in result.layers},
        similarity_of=target.similarity_of if target.similarity_of in result.layers else None,
    )


def refuse_senseless_truth(target: Target, model: DecomposedModel) -> None:
    """Raise before training, not after it, if recovery could not be judged."""
    probe, truth = target.probe(), target.truth()
    modules = dict(model.target.named_modules())
    if probe is not None:
        model.importances(to_device(probe, model.device))
    for name, (pattern, k) in truth.items():
        if name not in modules:
            raise TargetError(f"truth() names the layer {name!r}. {near_matches(name, modules)}")
        if pattern not in get_args(Pattern):
            raise TargetError(
                f"truth() says {pattern!r} of {name!r}. {near_matches(str(pattern), get_args(Pattern))}"
            )
        if probe is None:
            raise TargetError("truth() is a pattern of importances on the probe, but probe() gives none.")
        if pattern == "identity" and k != len(probe):
            raise TargetError(
                f"truth() says ('identity', {k}) of {name!r}, but the probe has {len(probe)} rows: "
                "there must be as many."
            )


def measured(config: RunConfig, result: Decomposition, evaluation: Evaluation) -> dict[str, Any]:
    """Everything in a summary that is measured on the finished decomposition and its target."""
    return evaluation.to_dict() | {
        "details": config.target.details(result, evaluation.checks),
        "target_check": config.target.check(result.model.target)[1],
    }


def decomposition_sha256(directory: RunDirectory) -> str:
    """The digest that ties a run's decomposition to its summary."""
    return sha256(_components(directory).read_bytes())


def _components(directory: RunDirectory) -> Path:
    return directory.sub(f"{DECOMPOSITION}/{COMPONENTS}")


def read_config(directory: RunDirectory) -> RunConfig:
    return parse_config(directory.read_text(CONFIG), source=str(directory.path / CONFIG))


def read_summary(directory: RunDirectory) -> Summary:
    return Summary.from_json(directory.read_json(SUMMARY), source=str(directory.path / SUMMARY))


def write_summary(directory: RunDirectory, summary: Summary) -> None:
    directory.write_json(SUMMARY, summary.to_json())


def refuse_existing(out: Path) -> None:
    """Raise if a directory holds a run that has at least one checkpoint."""
    if not (out / "manifest.json").exists():
        return
    directory = RunDirectory.open(out)
    if directory.has(SUMMARY):
        state, verb = "is complete", "keep"
    elif checkpoints := checkpoint_names(directory):
        state, verb = f"has reached {Path(checkpoints[-1]).stem}", "finish"
    else:
        return
    raise CheckpointError(
        f"{out} already holds a run, which {state}. Add --resume to {verb} it, or choose another "
        "directory with --out."
    )


def is_lengthened(directory: RunDirectory, stored: RunConfig, config: RunConfig) -> bool:
    """Whether a run that is complete is asked to go on: the same settings, and more steps."""
    same = not real_differences(stored, config, besides=("steps", "threads"))
    return same and directory.has(SUMMARY) and config.steps > stored.steps


def lengthened(directory: RunDirectory, stored: RunConfig, config: RunConfig) -> RunConfig:
    """The settings of a run that goes on, which is then no longer complete."""
    directory.remove(SUMMARY)
    changes = [o for o in stored.overrides if not o.startswith("steps=")]
    return stored.model_copy(
        update={
            "steps": config.steps,
            "overrides": [*changes, f"steps={config.steps}"],
            "lengthened": [*stored.lengthened, stored.steps],
        }
    )


def _refuse_other_settings(out: Path, stored: RunConfig, config: RunConfig) -> None:
    differing = real_differences(stored, config)
    if differing:
        raise CheckpointError(
            f"{out} holds a run with other settings: {'; '.join(differing)}. Finish it with its own "
            f"settings (rankone run {out} --resume), or choose another directory with --out."
        )


def program() -> str:
    """The command that is running, as advice can repeat it: a script of the user's may register a family."""
    script = sys.argv[0]
    return f"python {script}" if script.endswith(".py") and not script.endswith("__main__.py") else "rankone"


def cores() -> int:
    """The cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def allowed_threads(threads: int) -> int:
    """A number of threads, or OMP_NUM_THREADS where that is smaller."""
    limit = os.environ.get("OMP_NUM_THREADS", "").split(",")[0].strip()
    return min(threads, int(limit)) if limit.isdecimal() and int(limit) > 0 else threads


def with_threads(config: RunConfig, stored: RunConfig | None, say: Say) -> RunConfig:
    """The settings with the number of threads that the run will really use.

    A run that was begun keeps its own number, because the last bits of its result depend on it.
    """
    allowed = allowed_threads(config.threads)
    threads, expected = (allowed, config.threads) if stored is None else (stored.threads, allowed)
    if threads != expected:
        why = f"OMP_NUM_THREADS is {allowed}" if stored is None else "it was begun with that number"
        say(f"This run uses {threads} thread{'s' * (threads > 1)} instead of {expected}: {why}.")
    warning = load_warning(threads)
    if warning is not None:
        say(warning)
    if threads == config.threads:
        return config
    overrides = [o for o in config.overrides if not o.startswith("threads=")]
    return config.model_copy(update={"threads": threads, "overrides": [*overrides, f"threads={threads}"]})


def load_warning(threads: int) -> str | None:
    """A sentence to say if other work keeps so many cores busy that these threads must share."""
    if not hasattr(os, "getloadavg"):  # Windows
        return None
    load = os.getloadavg()[0]
    if load + threads <= cores() + 0.5:  # a load of a few tenths is an idle machine
        return None
    return (
        f"Other work is using the cores (load {load:.1f}, {cores()} cores, {threads} threads asked "
        "for): this run will be slower."
    )


def summarised(
    config: RunConfig, result: Decomposition, evaluation: Evaluation, digest: str | None = None
) -> Summary:
    """The summary of a run, without the time it took as a whole."""
    values = {
        "experiment": config.experiment,
        "preset": config.preset,
        "overrides": config.overrides,
        "seed": config.seed,
        "steps": config.steps,
        "train_seconds": round(result.seconds, 3),
        "ms_per_step": round(1000 * result.seconds / config.steps, 4),
        "peak_rss_mb": peak_rss_mb(),
        **measured(config, result, evaluation),
        "losses": result.history[-1]["loss"],
        "target_sha256": fingerprint(result.model.target),
        "decomposition_sha256": digest,
        "threads": config.threads,
        "versions": {
            "rankone": version("rankone"),
            "torch": torch.__version__,
            "numpy": version("numpy"),
            "python": platform.python_version(),
        },
    }
    return Summary.from_json(values, source="This run")


def peak_rss_mb() -> float | None:
    """The most memory this process has held, in MB; None where the system does not tell."""
    try:
        import resource
    except ImportError:  # Windows
        return None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return round(peak / (1024**2 if sys.platform == "darwin" else 1024), 1)
