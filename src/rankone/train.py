"""The training loop: faithfulness warm-up, then one `Step` after another, with checkpoints.

Interruptions are the normal case here. Everything random is a function of the step (see data.py),
so a resumed run is bit-identical to one that never stopped.
"""

import gc
import signal
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import islice
from types import FrameType
from typing import Any

import torch
from torch import Tensor

from rankone.balance import MEASURED_BATCHES, Balance, in_units_of_data
from rankone.checkpoint import (
    checkpoint_names,
    described,
    load_earlier,
    load_newest,
    load_parameters,
    refuse_other_layers,
    refuse_other_run,
    save_checkpoint,
)
from rankone.components import DATA_INITS
from rankone.config import DecompositionConfig
from rankone.consolidate import consolidate
from rankone.data import Data, batch_digest, batches, first_batch_digest, generator_for, to_device
from rankone.errors import BatchError, RankoneError, TrainingError
from rankone.fast.compiled import kernels_digest
from rankone.fast.step import FastStep
from rankone.files import RunDirectory, fingerprint
from rankone.importance import clipped
from rankone.losses import DIVERGENCES
from rankone.metrics import l0
from rankone.metrics_log import MetricsLog, Observer, Progress, Record
from rankone.model import DecomposedModel
from rankone.neurons import add_neurons
from rankone.optim import Adam, learning_rate
from rankone.patching import frozen
from rankone.processes import current, refuse_coupled_rows
from rankone.share import WHOLE, Share
from rankone.step import Divergence, Step, faithfulness, set_gradients

ENGINES: dict[str, type[Step]] = {"exact": Step, "fast": FastStep}


class Interrupted(RankoneError):
    """Training stopped on a signal; what was trained is on disk, or in this exception."""

    decomposition: Any = None
    """The `Decomposition` as far as it came, where `decompose` was interrupted."""

    def __init__(self, step: int, steps: int, checkpoint: str | None, signum: int) -> None:
        where = (
            f"everything is saved in {checkpoint}. decompose(..., resume=True) goes on from there."
            if checkpoint
            else "what was trained is the `decomposition` of this exception: `except "
            "rankone.train.Interrupted as stop: result = stop.decomposition`, or afterwards, in a notebook, "
            "`import sys; result = sys.last_value.decomposition`. decompose(..., start_from=result) goes "
            "on with it; with out= a run can be resumed exactly."
        )
        super().__init__(f"Interrupted at step {step} of {steps}; {where}")
        self.step = step
        self.signum = signum


class Training:
    """One training run of one model. `run()` does it; everything else is its parts."""

    def __init__(
        self,
        model: DecomposedModel,
        data: Data,
        config: DecompositionConfig,
        *,
        divergence: Divergence | None = None,
        directory: RunDirectory | None = None,
        observer: Observer | None = None,
        start: Mapping[str, Tensor] | None = None,
    ) -> None:
        self.model, self.data, self.config = model, data, config
        self.start = start
        self.directory, self.observer = directory, observer
        self.divergence = divergence or DIVERGENCES.get(config.divergence)
        self.engine = ENGINES[config.engine]
        self.losses = {name: loss for name, loss in config.losses.items() if loss.coefficient > 0}
        self.trained = model.trained()
        self.parameters = list(self.trained.values())
        self.optimizer = Adam(self.trained)
        self.memory: dict[str, Tensor] = {}
        self.balance: Balance | None = None
        self.step = 0
        self.seconds = 0.0
        self.history: list[Record] = []
        self.world = current()
        self._stop = _Stop()
        self._divergence_name = described(divergence) if divergence is not None else config.divergence

    def run(self, *, resume: bool = False) -> None:
        """Train to the end, from the newest checkpoint if `resume`."""
        metrics = None
        if self.directory is not None:
            self.identity = self._identity()
            keep_bytes, keep_sha256 = self._restore(self.directory) if resume else (0, None)
            metrics = MetricsLog(self.directory, keep_bytes, keep_sha256)
            self.history = metrics.records
        finished = False
        try:
            together = self.world.size > 1
            saves = self.directory is not None or together
            signals = (signal.SIGINT, signal.SIGTERM) if saves else (signal.SIGINT,)
            with self.ready(), _stop_on_signal(self._stop, signals, once=not together):
                if together:
                    self._join()
                if self.step == 0:
                    if self.config.init in DATA_INITS:
                        first = batches(self.data, self.config.seed, stream="init")
                        self.model.start_from_data(first, self.config.seed)
                    if self.config.init == "mixed":
                        again = batches(self.data, self.config.seed, stream="init")
                        add_neurons(self.model, again, self.config.seed)
                        self.model.importance.open_above_zero()
                    if self.start is None:
                        self._warm_up()
                    if self.config.relative:
                        self._measure()
                    if self.start is not None:  # last: what was learned has its units already
                        load_earlier(self.model, self.start)
                self._take_over_from_leader()
                if self.config.relative:
                    self._use_measured()
                self._loop(metrics)
            finished = True
        finally:
            if metrics is not None:
                metrics.close(finished=finished)

    @contextmanager
    def ready(self) -> Iterator[None]:
        """What should hold while steps are taken, for speed alone.

        No gradients for the target, and no garbage collection of what was there before: a step
        leaves no cycles, and a collection that walks through all of torch's objects takes longer
        than many steps.
        """
        with frozen(self.model.target), self.engine.ready(self.model):
            gc.collect()
            gc.freeze()
            try:
                yield
            finally:
                gc.unfreeze()

    def take_step(self, index: int, batch: Any) -> tuple[Step, Tensor, dict[str, Tensor]]:
        """One update of all trained parameters; returns the step, its total loss and the terms of that."""
        config = self.config.optimizer
        part, share = self.world.share(batch)
        step = self.make_step(index, part, share)
        total, terms = step.total()
        set_gradients(total, self.parameters, step.followers)
        self._stop.agreed = self.world.average(self.parameters, self._stop.signum)
        if config.grad_clip is not None:
            torch.nn.utils.clip_grad_norm_(self.parameters, config.grad_clip)
        self.optimizer.update(learning_rate(config, index, self.config.steps))
        return step, total, terms

    def make_step(self, index: int, batch: Any, share: Share = WHOLE) -> Step:
        progress = index / self.config.steps
        seed = self.config.seed
        return self.engine(
            self.model, batch, self.losses, self.divergence, seed=seed, index=index, progress=progress,
            masks=self.config.masks, memory=self.memory, balance=self.balance, share=share,
        )  # fmt: skip

    def _warm_up(self) -> None:
        settings = self.config.faithfulness_warmup
        factors = self.model.factors()
        optimizer = Adam({str(i): p for i, p in enumerate(factors)})
        for _ in range(settings.steps):
            set_gradients(faithfulness(self.model), factors)
            optimizer.update(settings.lr)
        optimizer.zero_grad()

    def _measure(self) -> None:
        """What removing everything costs, and the units of the factors; kept for when it is resumed."""
        first = [
            to_device(batch, self.model.device)
            for batch in islice(batches(self.data, self.config.seed, stream="init"), MEASURED_BATCHES)
        ]
        units = in_units_of_data(self.model, first)
        self.memory |= {
            f"unit/{name}": torch.tensor(unit, dtype=torch.float64) for name, unit in units.items()
        }
        costs, alone = [], []
        with torch.no_grad():
            for i, batch in enumerate(first):
                step = Step(self.model, batch, {}, self.divergence, seed=self.config.seed, index=i)
                nothing = step.masks("zero", 0)
                costs.append(float(step.distance(step.output(nothing))))
                each = step.routed(nothing, "layerwise", 0)
                alone.append(sum(float(step.distance(step.output(masks))) for masks in each))
        Balance(self.memory).set_everything(costs, alone)

    def _use_measured(self) -> None:
        self.balance = Balance(self.memory)
        self.optimizer.units = {
            name.removeprefix("unit/"): float(t)
            for name, t in self.memory.items()
            if name.startswith("unit/")
        }

    def _loop(self, metrics: MetricsLog | None) -> None:
        config = self.config
        stream = batches(self.data, config.seed, start=self.step)
        began = time.perf_counter() - self.seconds
        last_time, last_step = time.perf_counter(), self.step
        sharpened = round(config.sharpen_at * config.steps)
        moments = {round(share * config.steps) for share in config.consolidate_at}
        while self.step < config.steps:
            index = self.step
            if index in moments:
                self._consolidate(index)
            if index == sharpened and config.sharpen_by > 1:
                self.model.importance.stretch(config.sharpen_by)
            batch = next(stream)
            step, total, terms = self.take_step(index, to_device(batch, self.model.device))
            self.step = index + 1
            if index % config.log_every == 0 or self.step == config.steps:
                record = self._record(step, total, terms)
                if metrics is not None:
                    metrics.write(record)
                else:
                    self.history.append(record)
                now = time.perf_counter()
                if self.observer is not None:
                    pace = 1000 * (now - last_time) / (self.step - last_step)
                    self.observer(Progress(record, self.step, config.steps, now - began, pace))
                last_time, last_step = now, self.step
            due = self.step % config.checkpoint_every == 0 or self.step == config.steps
            signum = self._stop.agreed if self.world.size > 1 else self._stop.signum
            if metrics is not None and (due or signum):
                self.seconds = time.perf_counter() - began
                path = self._save(metrics, total, batch)
                if signum and self.step < config.steps:
                    raise Interrupted(self.step, config.steps, path, signum)
            elif signum and self.step < config.steps:
                self.seconds = time.perf_counter() - began
                self.optimizer.zero_grad()
                raise Interrupted(self.step, config.steps, None, signum)
        self.seconds = time.perf_counter() - began
        self._refuse_non_finite_state()
        self.optimizer.zero_grad()

    def _consolidate(self, index: int) -> None:
        stream = batches(self.data, self.config.seed, stream="consolidate")
        drawn = [to_device(batch, self.model.device) for batch in islice(stream, MEASURED_BATCHES)]
        generator = generator_for(self.config.seed, "consolidate", index)
        consolidate(self.model, drawn, self.optimizer, generator)
        self._take_over_from_leader()

    def _record(self, step: Step, total: Tensor, terms: dict[str, Tensor]) -> Record:
        self._refuse_non_finite(step.index, total)
        with torch.no_grad():
            sparsity = {
                name: l0(clipped(raw), step.weights_of(name), step.share) for name, raw in step.raw.items()
            }
        return {
            "step": step.index,
            "lr": learning_rate(self.config.optimizer, step.index, self.config.steps),
            "loss": {"total": total.item(), **{name: term.item() for name, term in terms.items()}},
            "l0": sparsity,
        }

    def _refuse_non_finite(self, index: int, total: Tensor) -> None:
        if bool(torch.isfinite(total)):
            return
        last = (
            f"the last finite record is of step {self.history[-1]['step']}"
            if self.history
            else "it never was finite"
        )
        raise TrainingError(
            f"The loss is {total.item()} at step {index} ({last}). Lower optimizer.lr, set "
            "optimizer.grad_clip, or raise the eps of importance_minimality if its p is below 1."
        )

    def _refuse_non_finite_state(self) -> None:
        for name, p in self.trained.items():
            if not bool(torch.isfinite(p).all()):
                raise TrainingError(
                    f"{name} holds values that are not finite after step {self.step - 1}; this state is "
                    "not saved. Lower optimizer.lr."
                )

    def _identity(self) -> dict[str, Any]:
        """What a checkpoint must agree with, besides the settings, to belong to this run."""
        return {
            "divergence": self._divergence_name,
            "output": described(self.model.output),
            "kernels": kernels_digest() if self.config.engine == "fast" else None,
            "target": fingerprint(self.model.target),
            "first_batch": first_batch_digest(self.data, self.config.seed),
        }

    def _save(self, metrics: MetricsLog, total: Tensor, batch: Any) -> str:
        assert self.directory is not None
        self._refuse_non_finite(self.step - 1, total)
        self._refuse_non_finite_state()
        metrics_bytes, metrics_sha256 = metrics.sync()
        meta = self.identity | {
            "step": self.step,
            "seconds": self.seconds,
            "last_batch": batch_digest(batch),
            "metrics_bytes": metrics_bytes,
            "metrics_sha256": metrics_sha256,
            "threads": torch.get_num_threads(),
            "processes": self.world.size,
            "C": {name: layer.C for name, layer in self.model.layers.items()},
            "config": self.config.model_dump(mode="json"),
        }
        name = save_checkpoint(self.directory, self._state(), meta, self.config.keep_checkpoints)
        return str(self.directory.path / name)

    def _state(self) -> dict[str, Tensor]:
        """Everything that training changes, but for the number of the step."""
        parameters = {f"parameter/{name}": p for name, p in self.model.named_tensors().items()}
        memory = {f"memory/{name}": t for name, t in self.memory.items()}
        return parameters | self.optimizer.tensors() | memory

    def _take_over(self, tensors: Mapping[str, Tensor], step: int, seconds: float) -> None:
        load_parameters(self.model, tensors)
        self.optimizer.load(tensors)
        self.memory = {
            k.removeprefix("memory/"): t.to(self.model.device)
            for k, t in tensors.items()
            if k.startswith("memory/")
        }
        self.step, self.seconds = step, seconds

    def _take_over_from_leader(self) -> None:
        """Go on from the state of the process that leads, where there are several."""
        if self.world.size == 1:
            return
        known = {"step": self.step, "seconds": self.seconds}
        tensors, numbers = self.world.from_leader(self._state(), known)
        if not self.world.leads:
            self._take_over(tensors, int(numbers["step"]), numbers["seconds"])

    def _join(self) -> None:
        """Refuse what processes cannot do together, and begin where the leader does."""
        known = self._identity()
        if known["first_batch"] is None:
            raise BatchError(
                "The data gives other batches every time it is asked, and several processes must draw the "
                "same. Make it a function of its generator, or a list; or use one process."
            )
        settings = self.config.model_dump(mode="json", exclude=set(self.config.descriptive))
        known = {"settings": settings, "weights of the network": known["target"], "batches": known["first_batch"],
                 "kernels": known["kernels"], "versions of torch": torch.__version__}  # fmt: skip
        self.world.refuse_different(known)
        first = to_device(next(batches(self.data, self.config.seed)), self.model.device)
        refuse_coupled_rows(self.model, first)
        self._take_over_from_leader()

    def _restore(self, directory: RunDirectory) -> tuple[int, str | None]:
        """Load the newest checkpoint; return how much of the metrics log belongs to it, and its digest."""
        names = checkpoint_names(directory)
        if not names:
            return 0, None
        tensors, meta = load_newest(directory)
        name = str(directory.path / names[-1])
        refuse_other_layers(self.model, name, meta)
        last = None
        if self.identity["first_batch"] is not None:
            last = batch_digest(next(batches(self.data, self.config.seed, start=meta["step"] - 1)))
        refuse_other_run(name, meta, self.identity | {"last_batch": last}, self.config)
        # The order of summation, and with it the last bit, depends on the number of threads.
        torch.set_num_threads(meta["threads"])
        self._take_over(tensors, meta["step"], meta["seconds"])
        return meta["metrics_bytes"], meta["metrics_sha256"]


class _Stop:
    signum: int = 0
    agreed: int = 0
    """What all processes that train together know of."""


@contextmanager
def _stop_on_signal(stop: _Stop, signals: tuple[signal.Signals, ...], *, once: bool) -> Iterator[None]:
    """Turn the first of these signals into a request to save and stop; a second one acts as usual, unless
    it comes from torchrun, which passes on what the terminal has told everybody already."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {s: signal.getsignal(s) for s in signals}

    def handle(signum: int, frame: FrameType | None) -> None:
        stop.signum = signum
        for s, handler in before.items() if once else ():
            signal.signal(s, handler)

    for s in before:
        signal.signal(s, handle)
    try:
        yield
    finally:
        for s, handler in before.items():
            signal.signal(s, handler)
