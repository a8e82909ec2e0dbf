"""What a run will cost, before anybody pays for it: `rankone plan tms_5-2`.

Two answers, and the plan says which it gives. On this machine a few real steps are timed, and the
process's own memory is read. For another machine (`--device-peak`, `--bandwidth`, `--link`) the products,
the bytes moved and the bytes sent in a step are counted: the step is run in plain torch on 32 and on 64
rows, and what grows with rows is extended to the batch. Counted times are a floor: a machine at its peak.
"""

import os
import statistics
import time
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from rankone.data import Batch, batches, to_device
from rankone.decomposition import build
from rankone.errors import ConfigError
from rankone.processes import place_in, rows_of
from rankone.runs.config import RunConfig
from rankone.runs.run import allowed_threads, peak_rss_mb
from rankone.share import Place
from rankone.train import Training

PROBE_SECONDS = 3.0
PROBE_STEPS = 30
WARM = 3
"""Steps before the clock starts: kernels are loaded, buffers made."""
COUNTED_ROWS = (32, 64)
STATE = 7
"""How often Adam reads or writes something of the size of a parameter in a step."""


class Machine(NamedTuple):
    """Another machine, by its data sheet."""

    peak: float
    """TFLOP/s."""
    bandwidth: float
    """GB/s between a processor and its memory."""
    link: float | None = None
    """GB/s between processes on other machines."""


class Count(NamedTuple):
    """What one step of one process needs."""

    products: float
    """Floating-point operations in matrix products and convolutions."""
    moved: float
    """Bytes that operations read and write."""
    kept: float
    """Bytes that are kept between a forward and a backward pass."""

    def extended(self, other: "Count", rows: tuple[int, int], to: int) -> "Count":
        """From counts at two numbers of rows to a third."""
        share = (to - rows[0]) / (rows[1] - rows[0])
        return Count(*(max(a + (b - a) * share, 0.0) for a, b in zip(self, other, strict=True)))


@dataclass(frozen=True)
class Plan:
    """What a run decomposes, and what it takes."""

    experiment: str
    preset: str
    how: str
    """`measured here`, or `counted for` a machine."""
    layers: dict[str, dict[str, Any]]
    """Layer -> shape, C, and the parameters of its subcomponents and importance function."""
    target_parameters: int
    trained_parameters: int
    steps: int
    rows: int
    """In the batch, as it is computed: rows that are equal may be one."""
    processes: int
    memory: dict[str, int]
    """Part -> bytes, in one process."""
    available: int | None
    """Bytes that there are for it."""
    per_step: dict[str, float]
    """Of one process: products (FLOP), bytes moved, bytes sent, ms."""
    seconds: float
    """Of training, without evaluation and report."""
    advice: str

    @property
    def total_memory(self) -> int:
        return self.memory.get("process as a whole", sum(self.memory.values()))

    @property
    def fits(self) -> bool | None:
        return None if self.available is None else self.total_memory <= self.available

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"total_memory": self.total_memory, "fits": self.fits}


def make_plan(
    config: RunConfig, *, processes: int = 1, machine: Machine | None = None, memory: float | None = None
) -> Plan:
    """The plan of a run; `memory` is what there is of it, in GB."""
    if not 1 <= processes <= 100_000:
        raise ConfigError(f"--processes is {processes}; it must be at least 1 and at most 100,000.")
    torch.set_num_threads(allowed_threads(config.threads))
    model = build(config.target.load(), config.layers, config, config.getter)
    batch = to_device(next(batches(config.target.data(config.batch_size), config.seed)), model.device)
    place = place_in(batch, 0, processes)
    share = rows_of(batch, place) if processes > 1 else batch
    training = _training(config, model)
    trained = sum(p.numel() for p in training.parameters)
    size = sum(p.numel() * p.element_size() for p in training.parameters)
    counted = count_step(config, model, batch, place.here)
    target = sum(t.numel() * t.element_size() for t in model.target.state_dict().values())
    parts = {
        "the network": target,
        "subcomponents and importance functions": size,
        "their gradients": size,
        "the optimiser's moments": 2 * size,
        "what is kept for the way back": round(counted.kept),
    }
    sent = 0.0 if processes == 1 else 2 * (processes - 1) / processes * (size + 4)
    if machine is None:
        ms = _probe(config, model, share)
        parts["process as a whole"] = round((peak_rss_mb() or 0.0) * 2**20) or sum(parts.values())
        how = "measured here" + (", without what processes send each other" if processes > 1 else "")
    else:
        ms = _on(machine, counted, size, sent)
        how = f"counted for {machine.peak:g} TFLOP/s and {machine.bandwidth:g} GB/s, at its peak"
    available = available_memory() if memory is None and machine is None else None
    available = None if available is None else available // processes  # they share this machine
    available = round(memory * 1e9) if memory is not None else available
    named = {
        name: {
            "shape": list(layer.matrix().shape),
            "C": layer.C,
            "parameters": sum(p.numel() for p in layer.subcomponents.parameters()),
        }
        for name, layer in model.layers.items()
    }
    plan = Plan(
        experiment=config.experiment, preset=config.preset, how=how, layers=named,
        target_parameters=sum(p.numel() for p in model.target.parameters()), trained_parameters=trained,
        steps=config.steps, rows=place.total, processes=processes, memory=parts, available=available,
        per_step={"products": counted.products, "moved": counted.moved, "sent": sent, "ms": ms},
        seconds=ms * config.steps / 1000, advice="",
    )  # fmt: skip
    return plan if plan.fits is not False else replace(plan, advice=_advice(plan))


def _on(machine: Machine, counted: Count, parameters: int, sent: float) -> float:
    """Milliseconds of a step at the peak of a machine."""
    if sent and machine.link is None:
        raise ConfigError("Several processes send each other gradients: say how fast with --link GB/s.")
    computing = counted.products / (machine.peak * 1e12)
    moving = (counted.moved + STATE * parameters) / (machine.bandwidth * 1e9)
    return 1000 * (max(computing, moving) + (sent / (machine.link * 1e9) if sent and machine.link else 0.0))


def _advice(plan: Plan) -> str:
    """Which setting to change so that a run fits."""
    assert plan.available is not None
    kept = plan.memory["what is kept for the way back"]
    parts = sum(size for name, size in plan.memory.items() if name != "process as a whole")
    if plan.total_memory - parts > plan.available:
        return "Python and torch alone take more than that: no setting of the run helps."
    rest = plan.total_memory - kept
    if rest < plan.available and plan.rows > 1:
        share = (plan.available - rest) / kept
        rows = max(1, int(plan.rows * share * 0.9))
        return (
            f"Make batches smaller: about {share * 0.9:.0%} of this batch_size ({rows} rows instead of "
            f"{plan.rows}) fits, or share them between {int(1 / max(share * 0.9, 1e-9)) + 1} processes on other "
            "machines."
        )
    largest = max(plan.layers, key=lambda name: plan.layers[name]["parameters"])
    return (
        "Parameters alone do not fit, whatever the batch: decompose fewer layers, or give them fewer "
        f"subcomponents (layers.{largest} has C = {plan.layers[largest]['C']})."
    )


def _training(config: RunConfig, model: Any, **changes: Any) -> Training:
    data = config.target.data(config.batch_size)
    return Training(model, data, config.model_copy(update=changes), divergence=config.target.divergence)


def _probe(config: RunConfig, model: Any, batch: Batch) -> float:
    """Milliseconds of a step here: the median of some, after a few that are not counted."""
    training = _training(config, model)
    times: list[float] = []
    with training.ready():
        if config.relative:
            training._measure()
            training._use_measured()
        for index in range(WARM + PROBE_STEPS):
            began = time.perf_counter()
            training.take_step(min(index, config.steps - 1), batch)
            if index >= WARM:
                times.append(time.perf_counter() - began)
            if sum(times) > PROBE_SECONDS:
                break
    return 1000 * statistics.median(times)


def count_step(config: RunConfig, model: Any, batch: Batch, rows: int) -> Count:
    """What a step in plain torch needs on so many rows of a batch."""
    total = place_in(batch, 0, 1).total
    few, more = (min(n, total) for n in COUNTED_ROWS)
    _counted(config, model, rows_of(batch, Place(1, 0, total)))  # the first pass of a network looks around
    if few == more or rows <= few:
        return _counted(config, model, rows_of(batch, Place(rows, 0, total)))
    first, second = (_counted(config, model, rows_of(batch, Place(n, 0, total))) for n in (few, more))
    return first.extended(second, (few, more), rows)


def _counted(config: RunConfig, model: Any, batch: Batch) -> Count:
    training = _training(config, model, engine="exact", relative=False)
    kept: dict[int, int] = {}
    held = [*training.parameters, *model.target.state_dict().values()]
    own = {t.untyped_storage().data_ptr() for t in held}

    def keep(t: Tensor) -> Tensor:
        place = t.untyped_storage().data_ptr()
        if place not in own:
            kept[place] = max(kept.get(place, 0), t.untyped_storage().nbytes())
        return t

    flops = FlopCounterMode(display=False)
    with training.ready(), _Moved() as moved, flops:
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
            step = training.make_step(0, batch)
            total, _ = step.total()
        torch.autograd.grad(total, training.parameters, allow_unused=True)
    return Count(float(flops.get_total_flops()), float(moved.bytes), float(sum(kept.values())))


def available_memory() -> int | None:
    """The memory of this machine that nobody uses, in bytes; None where the system does not tell."""
    with suppress(OSError, StopIteration, ValueError):  # what files hold in memory can be had back
        lines = Path("/proc/meminfo").read_text(encoding="utf-8").splitlines()
        return 1024 * int(next(line for line in lines if line.startswith("MemAvailable")).split()[1])
    try:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):  # Windows, macOS
        return None


class _Moved(TorchDispatchMode):
    """Counts the bytes that operations read and write; what only looks at memory otherwise moves none."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if not func.is_view:
            tensors = [t for t in tree_leaves((args, kwargs, result)) if isinstance(t, Tensor)]
            self.bytes += sum(t.numel() * t.element_size() for t in tensors)
        return result
