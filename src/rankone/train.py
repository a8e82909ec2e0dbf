"""The training loop: faithfulness warm-up, then Algorithm 1 of the paper, with checkpoints.

Interruptions are the normal case here. Everything random is a function of the step (see data.py), so a checkpoint is the
parameters, the optimiser's moments and a step number, and a resumed run is bit-identical to one that never stopped.
"""

import gc
import signal
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.optim.adam import adam

from rankone.components import FROM_DATA
from rankone.config import DecompositionConfig, differences, learning_rate, validated
from rankone.data import Data, batches, to_device
from rankone.errors import CheckpointError, RankoneError, TrainingError
from rankone.fast.factored import keeping_constants, sharing
from rankone.fast.gates import kernels
from rankone.files import fingerprint, load_sealed, save_sealed
from rankone.importance import clipped
from rankone.losses import Divergence, StepContext, divergence_named, faithfulness
from rankone.metrics import l0
from rankone.metrics_log import MetricsFile, Observer, Progress, Record, read_metrics
from rankone.model import DecomposedModel
from rankone.patching import frozen


class Interrupted(RankoneError):
    """Training stopped on a signal; its state is on disk."""

    def __init__(self, step: int, steps: int, checkpoint: Path, signum: int) -> None:
        super().__init__(
            f"Interrupted at step {step} of {steps}; everything is saved in {checkpoint}. decompose(..., resume=True) goes on from there."
        )
        self.step = step
        self.signum = signum


@dataclass(frozen=True)
class Trained:
    """What training leaves behind besides the model itself."""

    history: list[Record]
    seconds: float


class Training:
    """One training run of one model. `run()` does it; everything else is its parts."""

    def __init__(
        self,
        model: DecomposedModel,
        data: Data,
        config: DecompositionConfig,
        *,
        divergence: Divergence | None = None,
        directory: Path | None = None,
        observer: Observer | None = None,
    ) -> None:
        self.model = model
        self.data = data
        self.config = config
        self.divergence = divergence or divergence_named(config.divergence)
        self.directory = directory
        self.observer = observer
        self.trained = model.trained()
        self.parameters = list(self.trained.values())
        self.divergence_name = described(divergence) if divergence is not None else config.divergence
        self.losses = {name: loss for name, loss in config.losses.items() if loss.coefficient > 0}
        self.optimizer = Adam(self.parameters)
        self.step = 0
        self.seconds = 0.0
        self.history: list[Record] = []
        self.target_fingerprint = fingerprint(model.target)

    def run(self, *, resume: bool = False) -> Trained:
        """Train to the end, from the newest checkpoint if `resume`."""
        keep_bytes, keep_sha256 = self._restore() if resume else (0, None)
        metrics = None
        if self.directory is not None:
            metrics = MetricsFile(self.directory / "metrics.jsonl", keep_bytes, keep_sha256)
            self.history = read_metrics(self.directory / "metrics.jsonl")
        try:
            with self.ready(), _stop_on_signal(self.directory is not None) as stop:
                if self.step == 0:
                    if self.config.init == FROM_DATA:
                        first = batches(self.data, self.config.seed, stream="init")
                        self.model.start_from_data(first, self.config.seed)
                    self._warm_up()
                self._loop(metrics, stop)
        finally:
            if metrics is not None:
                metrics.close()
        return Trained(self.history, self.seconds)

    @property
    def uses_kernels(self) -> bool:
        """Whether steps may use the compiled kernels of fast.py."""
        return self.config.engine == "fast" and kernels() is not None

    @contextmanager
    def ready(self) -> Iterator[None]:
        """What should hold while steps are taken, for speed alone.

        No gradients for the target, and no garbage collection of what was there before: a step leaves no cycles, and a
        collection that walks through all of torch's objects takes longer than many steps.
        """
        with frozen(self.model.target), keeping_constants():
            gc.collect()
            gc.freeze()
            try:
                yield
            finally:
                gc.unfreeze()

    def loss_terms(self, step: int, batch: Any) -> tuple[Tensor, dict[str, Tensor], StepContext]:
        """The total loss of one step, its terms, and what they were computed from."""
        progress = step / self.config.steps
        with sharing():
            context = StepContext.of(
                self.model,
                batch,
                self.divergence,
                seed=self.config.seed,
                step=step,
                progress=progress,
                exact=self.config.engine == "exact",
                penalty=next((p for loss in self.losses.values() if (p := loss.penalty(progress)) is not None), None),
            )
            terms = {name: loss.value(context) for name, loss in self.losses.items()}
        stacked = torch.stack(list(terms.values()))
        coefficients = [loss.coefficient_at(progress) for loss in self.losses.values()]
        total = stacked @ torch.tensor(coefficients, dtype=stacked.dtype, device=stacked.device)
        return total, terms, context

    def take_step(self, step: int, batch: Any) -> tuple[Tensor, dict[str, Tensor], StepContext]:
        """One update of all trained parameters; returns what `loss_terms` does."""
        config = self.config.optimizer
        total, terms, context = self.loss_terms(step, batch)
        _set_gradients(self.parameters, total)
        if config.grad_clip is not None:
            torch.nn.utils.clip_grad_norm_(self.parameters, config.grad_clip)
        self.optimizer.update(learning_rate(config, step, self.config.steps))
        return total, terms, context

    def _warm_up(self) -> None:
        settings = self.config.faithfulness_warmup
        factors = self.model.factors()
        optimizer = Adam(factors)
        for _ in range(settings.steps):
            _set_gradients(factors, faithfulness(self.model))
            optimizer.update(settings.lr)
        _clear_gradients(factors)

    def _loop(self, metrics: MetricsFile | None, stop: "_Stop") -> None:
        config = self.config
        stream = batches(self.data, config.seed, start=self.step)
        began = time.perf_counter() - self.seconds
        last_time, last_step = time.perf_counter(), self.step
        while self.step < config.steps:
            step = self.step
            batch = to_device(next(stream), self.model.device)
            total, terms, context = self.take_step(step, batch)
            self.step = step + 1
            if step % config.log_every == 0 or self.step == config.steps:
                record = self._record(step, total, terms, context)
                self.history.append(record)
                if metrics is not None:
                    metrics.write(record)
                now = time.perf_counter()
                if self.observer is not None:
                    pace = 1000 * (now - last_time) / (self.step - last_step)
                    self.observer(Progress(record, self.step, config.steps, now - began, pace))
                last_time, last_step = now, self.step
            due = self.step % config.checkpoint_every == 0 or self.step == config.steps
            if metrics is not None and (due or stop.signum):
                self.seconds = time.perf_counter() - began
                path = self._save(metrics, total)
                if stop.signum and self.step < config.steps:
                    raise Interrupted(self.step, config.steps, path, stop.signum)
        self.seconds = time.perf_counter() - began
        _clear_gradients(self.parameters)

    def _record(self, step: int, total: Tensor, terms: dict[str, Tensor], context: StepContext) -> Record:
        self._refuse_non_finite(step, total)
        with torch.no_grad():
            sparsity = {name: l0(clipped(raw), context.shares) for name, raw in context.raw.items()}
        return {
            "step": step,
            "lr": learning_rate(self.config.optimizer, step, self.config.steps),
            "loss": {"total": total.item(), **{name: term.item() for name, term in terms.items()}},
            "l0": sparsity,
        }

    def _refuse_non_finite(self, step: int, total: Tensor) -> None:
        if bool(torch.isfinite(total)):
            return
        finite = (
            f"the last finite record is of step {self.history[-1]['step']}" if self.history else "it never was finite"
        )
        raise TrainingError(
            f"The loss is {total.item()} at step {step} ({finite}). Lower optimizer.lr, set optimizer.grad_clip, "
            "or raise the eps of importance_minimality if its p is below 1."
        )

    def _save(self, metrics: MetricsFile, total: Tensor) -> Path:
        assert self.directory is not None
        self._refuse_non_finite(self.step - 1, total)
        for name, p in self.trained.items():
            if not bool(torch.isfinite(p).all()):
                raise TrainingError(
                    f"{name} holds values that are not finite after step {self.step - 1}; this state is not saved. Lower optimizer.lr."
                )
        tensors = {f"parameter/{name}": p for name, p in self.model.named_tensors().items()}
        for name, p in self.trained.items():
            tensors |= {f"adam/{name}/{key}": value for key, value in self.optimizer.state.get(p, {}).items()}
        metrics_bytes, metrics_sha256 = metrics.sync()
        meta = {
            "step": self.step,
            "seconds": self.seconds,
            "metrics_bytes": metrics_bytes,
            "metrics_sha256": metrics_sha256,
            "divergence": self.divergence_name,
            "output": described(self.model.output),
            "threads": torch.get_num_threads(),
            "kernels": self.uses_kernels,
            "target": self.target_fingerprint,
            "C": {name: layer.C for name, layer in self.model.layers.items()},
            "config": self.config.model_dump(mode="json"),
        }
        path = _checkpoint_path(self.directory, self.step)
        save_sealed(path, tensors, meta)
        for old in checkpoints(self.directory)[: -self.config.keep_checkpoints]:
            old.unlink()
        return path

    def _restore(self) -> tuple[int, str | None]:
        """Load the newest checkpoint; return how much of metrics.jsonl belongs to it, and its digest."""
        found = checkpoints(self.directory) if self.directory is not None else []
        if not found:
            return 0, None
        tensors, meta = load_newest(found)
        self._check_same(found[-1], meta)
        if meta["kernels"] != self.uses_kernels:
            had, has = ("with", "without") if meta["kernels"] else ("without", "with")
            raise CheckpointError(
                f"{found[-1]} was written {had} numba's compiled kernels, and this process is {has} them: the result would be of "
                "neither. Resume in an environment like the first, or start again in another directory."
            )
        if meta["threads"] != torch.get_num_threads():
            # The order of summation, and with it the last bit, depends on the number of threads.
            torch.set_num_threads(meta["threads"])
        load_parameters(self.model, tensors)
        with torch.no_grad():
            for name, p in self.trained.items():
                prefix = f"adam/{name}/"
                state = {key.removeprefix(prefix): t for key, t in tensors.items() if key.startswith(prefix)}
                if state:
                    # Adam counts its steps on the CPU, unless it is fused.
                    here = self.optimizer.fused
                    self.optimizer.state[p] = {
                        k: t.to(p.device) if here or k != "step" else t for k, t in state.items()
                    }
        self.step, self.seconds = meta["step"], meta["seconds"]
        return meta["metrics_bytes"], meta["metrics_sha256"]

    def _check_same(self, path: Path, meta: dict[str, Any]) -> None:
        if meta["target"] != self.target_fingerprint:
            raise CheckpointError(f"{path} belongs to another target network (its weights differ); nothing was loaded.")
        refuse_other_layers(self.model, path, meta)
        # What older versions did not know has its default now; how a run is described does not matter to it.
        earlier = validated(type(self.config), meta["config"], source=str(path))
        before, now = (c.model_dump(mode="json", exclude=set(c.descriptive)) for c in (earlier, self.config))
        before |= {key: meta[key] for key in ("divergence", "output")}
        now |= {"divergence": self.divergence_name, "output": described(self.model.output)}
        differing = differences(before, now)
        if differing:
            raise CheckpointError(
                f"{path} was written with other settings, so it cannot be resumed with these: {'; '.join(differing)}. "
                "Resume with the run's own settings, or start a new run in another directory."
            )


def described(thing: Any) -> Any:
    """A function by its name, anything else as it is: enough to notice when a run is resumed with another one."""
    if not callable(thing):
        return thing
    return f"{getattr(thing, '__module__', '')}.{getattr(thing, '__qualname__', type(thing).__qualname__)}"


def checkpoints(directory: Path) -> list[Path]:
    """The checkpoints of a run, oldest first."""
    return sorted((directory / "checkpoints").glob("step-*.safetensors"))


def load_newest(found: Sequence[Path]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The content of the newest of these checkpoints."""
    try:
        return load_sealed(found[-1])
    except CheckpointError as error:
        earlier = f"go on from {found[-2].name}" if len(found) > 1 else "start again from step 0"
        raise CheckpointError(f"{error} Delete that file to {earlier}.") from None


def refuse_other_layers(model: DecomposedModel, path: Path, meta: Mapping[str, Any]) -> None:
    """Raise an error if a checkpoint was written for other layers than this model's, or another C."""
    layers = {name: layer.C for name, layer in model.layers.items()}
    if meta["C"] != layers:
        changed = [
            f"{name} had C = {meta['C'].get(name)} and has {layers.get(name)}"
            for name in sorted(set(meta["C"]) | set(layers))
            if meta["C"].get(name) != layers.get(name)
        ]
        raise CheckpointError(
            f"{path} was written for other layers: {'; '.join(changed)}. Choose the same layers again."
        )


def load_parameters(model: DecomposedModel, tensors: Mapping[str, Tensor]) -> None:
    """Set a model's parameters to those of a checkpoint."""
    with torch.no_grad():
        for name, tensor in model.named_tensors().items():
            tensor.copy_(tensors[f"parameter/{name}"])


def _checkpoint_path(directory: Path, step: int) -> Path:
    return directory / "checkpoints" / f"step-{step:09d}.safetensors"


class Adam:
    """torch's Adam without the housekeeping of torch.optim, which costs more than the update itself in a small model.

    The state of a parameter appears with its first gradient, as in torch.optim.
    """

    def __init__(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        self.parameters = parameters
        self.state: dict[torch.nn.Parameter, dict[str, Tensor]] = {}
        self.fused = all(p.device.type in ("cpu", "cuda") for p in parameters)

    def update(self, lr: float) -> None:
        """One step along the gradients that the parameters hold."""
        self.lr = lr
        moved = [p for p in self.parameters if p.grad is not None]
        for p in moved:
            if p not in self.state:
                step = torch.zeros((), device=p.device if self.fused else None)
                self.state[p] = {"step": step, "exp_avg": torch.zeros_like(p), "exp_avg_sq": torch.zeros_like(p)}
        states = [self.state[p] for p in moved]
        steps = [s["step"] for s in states]
        given: list[Any] = [
            moved,
            [p.grad for p in moved],
            [s["exp_avg"] for s in states],
            [s["exp_avg_sq"] for s in states],
            [],
            steps,
        ]
        settings: dict[str, Any] = {"lr": lr, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.0}
        with torch.no_grad():
            if self.fused and len({(p.device, p.dtype) for p in moved}) == 1:
                # What torch's function comes down to, after much sorting.
                torch._foreach_add_(steps, 1)  # pyright: ignore[reportPrivateImportUsage]
                torch._fused_adam_(*given, amsgrad=False, maximize=False, **settings)  # pyright: ignore[reportPrivateImportUsage]
            else:
                adam(*given, fused=self.fused, amsgrad=False, maximize=False, **settings)


def _set_gradients(parameters: list[torch.nn.Parameter], loss: Tensor) -> None:
    """Gradients for our parameters only: `backward()` would also fill the target's `.grad`."""
    for p, gradient in zip(parameters, torch.autograd.grad(loss, parameters, allow_unused=True), strict=True):
        if gradient is not None and gradient.stride() != p.stride():  # the fused optimiser walks through memory
            gradient = torch.empty_like(p).copy_(gradient)
        p.grad = gradient


def _clear_gradients(parameters: list[torch.nn.Parameter]) -> None:
    for p in parameters:
        p.grad = None


class _Stop:
    signum: int = 0


@contextmanager
def _stop_on_signal(enabled: bool) -> Iterator[_Stop]:
    """Turn the first SIGINT or SIGTERM into a request to save and stop; a second one acts as usual."""
    stop = _Stop()
    if not enabled or threading.current_thread() is not threading.main_thread():
        yield stop
        return
    before = {s: signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)}

    def handle(signum: int, frame: FrameType | None) -> None:
        stop.signum = signum
        for s, handler in before.items():
            signal.signal(s, handler)

    for s in before:
        signal.signal(s, handle)
    try:
        yield stop
    finally:
        for s, handler in before.items():
            signal.signal(s, handler)
