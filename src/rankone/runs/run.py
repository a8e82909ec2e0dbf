"""One run from settings to report, in a directory that anyone can read.

config.yaml      complete settings; `rankone run config.yaml` repeats the run
metrics.jsonl    losses and sparsity at every log step
checkpoints/     exact training state, for --resume
decomposition/   the result: components.safetensors, decomposition.json, history.jsonl
figures/         the figures as SVG
report.html      one page that explains all of it
summary.json     the numbers; written last, so its presence means the run is complete
"""

import platform
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from rankone.config import from_yaml, to_yaml, validated
from rankone.decomposition import Decomposition, build, decompose, load
from rankone.errors import CheckpointError
from rankone.evaluate import Evaluation, evaluate
from rankone.files import fingerprint, read_json, write_atomic, write_json
from rankone.metrics_log import Observer, read_metrics
from rankone.report import write_report
from rankone.runs.config import ExperimentConfig, read_text, real_differences
from rankone.targets import load_target
from rankone.train import checkpoints, load_newest, load_parameters, refuse_other_layers

Summary = dict[str, Any]


def can_report() -> bool:
    """Whether the extra `report` is installed."""
    return find_spec("matplotlib") is not None and find_spec("jinja2") is not None


def run(
    config: ExperimentConfig,
    out: Path,
    *,
    resume: bool = False,
    observer: Observer | None = None,
    say: Callable[[str], None] = lambda _: None,
) -> Summary:
    """Do a whole run, or finish one that was interrupted; return its summary."""
    with _locked(out):
        torch.set_num_threads(config.threads)
        target = load_target(config.target)
        build(target, config.layers, config, None)  # settings that cannot work must not leave a config.yaml behind
        done = _prepare(config, out, resume)
        if done is not None:
            say(f"{out} is already complete; nothing to do.")
            return done
        sampler = config.target.sampler(config.batch_size)
        result = decompose(target, sampler, config.layers, config, out=out, resume=resume, observer=observer)
        began = time.perf_counter()
        say("Evaluating.")
        evaluation = evaluate_run(config, result)
        summary = _summary(config, result, evaluation)
        if can_report():
            say("Drawing figures and writing the report.")
            write_report(out, config, result, evaluation, summary)
        summary["wall_seconds"] = round(result.seconds + time.perf_counter() - began, 3)
        write_json(out / "summary.json", summary)
        return summary


def evaluate_run(config: ExperimentConfig, result: Decomposition) -> Evaluation:
    """The evaluation of a run: its own data, and what is known of the layers that were decomposed."""
    truth = {name: pattern for name, pattern in config.target.ground_truth().items() if name in result.layers}
    return evaluate(
        result,
        config.target.sampler(config.batch_size),
        probe=config.target.probe(),
        ground_truth=truth,
        similarity_of=config.target.similarity_of if config.target.similarity_of in result.layers else None,
    )


def measured(config: ExperimentConfig, result: Decomposition, evaluation: Evaluation) -> dict[str, Any]:
    """Everything in a summary that is measured on the finished decomposition and its target."""
    return evaluation.to_dict() | {
        "details": config.target.details(result, evaluation.checks),
        "target_check": config.target.check(result.model.target)[1],
    }


def reopen(out: Path) -> tuple[ExperimentConfig, Decomposition, Summary]:
    """A finished run from its directory."""
    config = read_config(out)
    torch.set_num_threads(config.threads)
    if not (out / "summary.json").is_file():
        raise CheckpointError(f"{out} is not complete yet. Finish it with: rankone run {out} --resume")
    summary = read_json(out / "summary.json")
    if not isinstance(summary, dict) or "recovered" not in summary:
        raise CheckpointError(
            f"{out / 'summary.json'} is not the summary of a run. Delete it and finish the run: rankone run {out} --resume"
        )
    if not (out / "decomposition").is_dir():
        raise CheckpointError(
            f"{out} holds the summary of a run but not its decomposition. "
            + (f"Make the run itself with: {summary['command']}" if "command" in summary else "Make the run again.")
        )
    return config, load(out / "decomposition", load_target(config.target)), summary


def open_as_it_is(out: Path) -> tuple[ExperimentConfig, Decomposition, int]:
    """A run from its directory, finished or not, and how many steps it has done."""
    config = read_config(out)
    if (out / "summary.json").is_file():
        config, result, _ = reopen(out)
        return config, result, config.steps
    torch.set_num_threads(config.threads)
    found = checkpoints(out)
    if not found:
        raise CheckpointError(
            f"{out} has no checkpoint yet: there is nothing to look at. Go on with: rankone run {out} --resume"
        )
    tensors, meta = load_newest(found)
    model = build(load_target(config.target), config.layers, config, None)
    refuse_other_layers(model, found[-1], meta)
    load_parameters(model, tensors)
    history = read_metrics(out / "metrics.jsonl", meta["metrics_bytes"])
    return config, Decomposition(model, config, history, meta["seconds"]), meta["step"]


def read_config(out: Path) -> ExperimentConfig:
    path = out / "config.yaml"
    if not path.is_file():
        raise CheckpointError(f"{out} is not a run directory: it has no config.yaml. `rankone run` makes one.")
    return validated(ExperimentConfig, from_yaml(read_text(path), source=str(path)), source=str(path))


def _prepare(config: ExperimentConfig, out: Path, resume: bool) -> Summary | None:
    """Write or check config.yaml; return the summary if there is nothing left to do."""
    empty = not checkpoints(out) and not (out / "summary.json").exists()
    if not (out / "config.yaml").exists() or (empty and not resume):
        write_atomic(out / "config.yaml", to_yaml(config))
        return None
    if not resume:
        refuse_existing(out)
    differing = real_differences(read_config(out), config)
    if differing:
        raise CheckpointError(
            f"{out} holds a run with other settings: {'; '.join(differing)}. "
            f"Finish it with its own settings (rankone run {out} --resume), or choose another directory with --out."
        )
    return read_json(out / "summary.json") if (out / "summary.json").exists() else None


def refuse_existing(out: Path) -> None:
    """Raise if a directory holds a run that has come anywhere."""
    if not checkpoints(out) and not (out / "summary.json").exists():
        return
    complete = (out / "summary.json").exists()
    state = "is complete" if complete else f"has reached {checkpoints(out)[-1].stem}"
    raise CheckpointError(
        f"{out} already holds a run, which {state}. Add --resume to {'keep' if complete else 'finish'} it, or choose another directory with --out."
    )


def _summary(config: ExperimentConfig, result: Decomposition, evaluation: Evaluation) -> Summary:
    found = measured(config, result, evaluation)
    return {
        "experiment": config.experiment,
        "preset": config.preset,
        "overrides": config.overrides,
        "seed": config.seed,
        "steps": config.steps,
        "wall_seconds": None,
        "ms_per_step": round(1000 * result.seconds / config.steps, 4),
        "peak_rss_mb": peak_rss_mb(),
        "recovered": found.pop("recovered"),
        **found,
        "losses": result.history[-1]["loss"],
        "target_sha256": fingerprint(result.model.target),
        "threads": config.threads,
        "versions": {
            "rankone": version("rankone"),
            "torch": torch.__version__,
            "numpy": version("numpy"),
            "python": platform.python_version(),
        },
    }


def peak_rss_mb() -> float | None:
    """The most memory this process has held, in MB; None where the system does not tell."""
    try:
        import resource
    except ImportError:  # Windows
        return None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return round(peak / (1024**2 if sys.platform == "darwin" else 1024), 1)


@contextmanager
def _locked(out: Path) -> Iterator[None]:
    """Keep two processes from writing into one run directory."""
    out.mkdir(parents=True, exist_ok=True)
    try:
        import fcntl
    except ImportError:  # Windows has no flock; two runs in one directory are then the user's care
        yield
        return
    with open(out / ".lock", "w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise CheckpointError(
                f"Another rankone process is running in {out}. Wait for it, or choose another --out."
            ) from None
        yield
