"""The front door: `decompose` a model, look at the result, keep it, load it again.

An artifact is a directory with `components.safetensors` (factors, importance functions and the
history of training, with what they belong to: settings, library version, the target's fingerprint)
and `decomposition.json`, which says the latter to people. It never holds the target's weights.
"""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from rankone import looking
from rankone.checkpoint import checkpoint_names, described, earlier_parameters
from rankone.config import DecompositionConfig, over_recipe
from rankone.data import Batch, Data, output_for, to_device
from rankone.describe import Facts, as_html, as_text, brief
from rankone.errors import BatchError, CheckpointError, ConfigError
from rankone.files import RunDirectory, fingerprint, load_sealed, sealed_bytes
from rankone.hub import load_model
from rankone.looking import LOOK_AT
from rankone.metrics_log import Observer, Progress, Record, parse_metrics
from rankone.model import DecomposedModel
from rankone.patching import OutputGetter, refuse_unusable
from rankone.progress import RunDisplay, greeting, say_verdict, shown_by_default
from rankone.room import LayerChoice, chosen_layers
from rankone.settings import validated
from rankone.sharing import Shareable
from rankone.step import Divergence
from rankone.train import Interrupted, Training
from rankone.using import Usable
from rankone.views import LayerView

if TYPE_CHECKING:
    from rankone.diagnose import Diagnosis
    from rankone.evaluate import Evaluation
    from rankone.verdict import Verdict

FORMAT = 2
COMPONENTS = "components.safetensors"
DESCRIPTION = "decomposition.json"
HISTORY = "history"
"""The entry of the sealed file that holds the metrics log, as bytes: one file changes as a whole."""


@dataclass(repr=False)
class Decomposition(Usable, Shareable):
    """A decomposed model and the story of its training.

    What looks at data takes `data=`; without it, the data of training is used where it is known.
    """

    model: DecomposedModel
    config: DecompositionConfig
    history: list[Record] = field(default_factory=list)
    seconds: float = 0.0
    divergence: Divergence | None = None
    """The function that outputs were compared with, where it was not one named in the config."""
    data: Data | None = None
    """What it was trained on, in the session that trained it."""
    evaluation: Any = None
    """The newest `Evaluation`; None before `evaluate` was called."""
    steps_done: int | None = None
    """How far training came, where it did not come to its end."""
    _alive: dict[str, list[int]] | None = None
    _verdict: "Verdict | None" = None
    _numbers: Any = None
    """What the newest diagnosis measured."""

    @property
    def layers(self) -> list[str]:
        """Names of the decomposed layers, in the target's order."""
        return list(self.model.layers)

    def importances(self, batch: Batch) -> dict[str, Tensor]:
        """Causal importances in [0, 1] per datapoint: layer name -> `[*lead, C]`."""
        return self.model.importances(to_device(batch, self.model.device))

    def components(self, layer: str) -> LayerView:
        """The subcomponents of one layer, next to its original matrix."""
        decomposed = self.model.layer(layer)
        parts = decomposed.subcomponents
        return LayerView(
            layer, decomposed.matrix().clone(), parts.U.detach().clone(), parts.V.detach().clone()
        )

    @property
    def alive(self) -> dict[str, list[int]]:
        """Layer -> the true indices of subcomponents that are important on some datapoint.

        From the newest evaluation; before any, measured on the data of training, once.
        """
        if self.evaluation is not None:
            return {name: list(found) for name, found in self.evaluation.alive.items()}
        if self._alive is None:
            self._alive = looking.alive(self.model, self.data_or(None), LOOK_AT)
        return {name: list(found) for name, found in self._alive.items()}

    def evaluate(self, data: Data | None = None, **options: Any) -> "Evaluation":
        """Measure how good it is (see `rankone.evaluate`); kept as `evaluation`."""
        from rankone.evaluate import evaluate

        self.evaluation = evaluate(self, self.data_or(data), **options)
        return self.evaluation

    def diagnose(self, data: Data | None = None, **options: Any) -> "Diagnosis":
        """What is wrong with it, and which setting to move (see `rankone.diagnose`)."""
        from rankone.diagnose import diagnose
        from rankone.verdict import verdict

        found = diagnose(self, self.data_or(data), steps_done=self.steps_done, **options)
        self._verdict, self._numbers = verdict(found), found.numbers
        return found

    @property
    def verdict(self) -> "Verdict":
        """Whether it is good, and why, without knowing the truth; made when it is first asked for."""
        if self._verdict is None:
            self.diagnose()
        assert self._verdict is not None
        return self._verdict

    def report(self, path: str | Path = "report.html", data: Data | None = None) -> Path:
        """Write one page about it that opens offline: what is alive, when it matters, how good it is.

        Measures it first if that was not done yet, or if other data is given.
        """
        from rankone.report.page import report_on

        return report_on(self, path, data)

    def view(
        self,
        path: str | Path = "view.html",
        data: Data | None = None,
        *,
        other: "Decomposition | None" = None,
    ) -> Path:
        """Write one page to click through: every component and subcomponent, when it matters, what it does.

        It opens offline. With `other`, a decomposition of the same network, it shows both side by side.
        """
        from rankone.view.write import view_of

        return view_of(self, path, data, other)

    def data_or(self, data: Data | None) -> Data:
        """What was given, else the data of training; an error in words if there is neither."""
        given = self.data if data is None else data
        if given is None:
            raise BatchError(
                "This looks at data, and a decomposition that was loaded has none. Pass data=, what it was "
                "trained on: batches, or a function that draws one."
            )
        return given

    @property
    def facts(self) -> Facts:
        """What is known about it."""
        known = self.evaluation or self._numbers  # both have `relative`, `l0` and `alive`
        l0 = known.l0 if known is not None else self.history[-1]["l0"] if self.history else {}
        counted = known.alive if known is not None else self._alive
        return Facts(
            target=type(self.model.target).__name__,
            shapes={name: tuple(layer.matrix().shape) for name, layer in self.model.layers.items()},
            C={name: layer.C for name, layer in self.model.layers.items()},
            tied=self.model.tied,
            alive=None
            if counted is None
            else {name: n if isinstance(n, int) else len(n) for name, n in counted.items()},
            l0=l0,
            relative=known.relative if known is not None else {},
            steps=self.config.steps,
            steps_done=self.config.steps if self.steps_done is None else self.steps_done,
            seconds=self.seconds,
            judgement="" if self._verdict is None else f"Verdict: {self._in_a_line(self._verdict)}.",
        )

    @staticmethod
    def _in_a_line(verdict: "Verdict") -> str:
        line = brief(verdict.word, verdict.reasons, good=verdict.good)
        return line if verdict.good else f"{line} (result.diagnose() says what to do)"

    def __repr__(self) -> str:
        return as_text(self.facts)

    def _repr_html_(self) -> str:
        return as_html(self.facts)

    def save(self, path: str | Path) -> Path:
        """Write the artifact into a new directory, or over an earlier artifact."""
        directory = RunDirectory.claim(path)
        known = DecompositionConfig.model_fields
        info = {
            "format": FORMAT,
            "rankone": version("rankone"),
            "torch": torch.__version__,
            "target": {"class": type(self.model.target).__name__, "sha256": fingerprint(self.model.target)},
            "output": _named(self.model.output, self.model.output),
            "divergence": _named(self.divergence, self.config.divergence),
            "layers": {
                name: {
                    "C": layer.C,
                    "shape": list(layer.matrix().shape),
                    "module": type(layer.adapter.module).__name__,
                    "tied_to": self.model.tied.get(name),
                }
                for name, layer in self.model.layers.items()
            },
            "config": {k: v for k, v in self.config.model_dump(mode="json").items() if k in known},
        }
        history = "".join(json.dumps(record) + "\n" for record in self.history).encode()
        as_tensor = (
            torch.frombuffer(bytearray(history), dtype=torch.uint8) if history else torch.zeros(0).byte()
        )
        directory.write(COMPONENTS, sealed_bytes({**self.model.named_tensors(), HISTORY: as_tensor}, info))
        directory.write(DESCRIPTION, json.dumps(info, indent=2) + "\n")
        return directory.path


def decompose(
    model: nn.Module | str | Path,
    data: Data,
    layers: LayerChoice = None,
    config: DecompositionConfig | Mapping[str, Any] | None = None,
    *,
    output: OutputGetter = None,
    divergence: Divergence | None = None,
    out: str | Path | None = None,
    resume: bool = False,
    start_from: Decomposition | str | Path | None = None,
    progress: bool | None = None,
    observer: Observer | None = None,
) -> Decomposition:
    """Decompose the weight matrices of a trained model into rank-one subcomponents.

    model       any nn.Module, in eval mode; it is not altered. Or a language model by its name (hub.py)
    data        a tensor of datapoints, an iterable of batches (a DataLoader), a function that draws a
                batch from a torch.Generator, or text (rankone.text)
    layers      name patterns of the layers to decompose -> number of subcomponents C; patterns alone, or
                None in place of a C, to have it found; without any, every layer that can be
    config      what should differ from the recipe (config.RECIPE), as a mapping; or a whole
                DecompositionConfig, which is taken as it is
    output      how to get the tensor to compare from what the model returns: name, index, function
    divergence  a function (masked output, target output) -> number per datapoint, instead of
                config.divergence
    out         a run directory for metrics, checkpoints, the decomposition and its numbers, as
                `rankone run` makes one; without it nothing is written
    resume      go on from the newest checkpoint in `out`; with more `steps` than a complete run had,
                it is lengthened
    start_from  an earlier result on the same network, or the directory of its run: this one starts from
                its subcomponents and importance functions, with settings of its own
    progress    whether to show how it goes on standard error; None: unless there is an observer
    observer    called with a Progress at every log step

    Ctrl-C never loses what was trained: with `out` it is saved there; without, the exception
    (`rankone.train.Interrupted`) has it as its `decomposition`.
    """
    model = load_model(model) if isinstance(model, str | Path) else model
    output = output_for(data, model, output)
    if not isinstance(config, DecompositionConfig):
        config = over_recipe(config or {}, data)
    if divergence is not None and not callable(divergence):
        raise ConfigError(f"divergence is {divergence!r}; pass a function, or name one in the config.")
    if resume and out is None:
        raise ConfigError("resume=True needs out=, the directory of the run to resume.")
    as_told = {"output": output, "tied": config.tied, "matrices": config.matrices}
    decomposed = build(model, chosen_layers(model, data, layers, **as_told), config, output)
    start = _start(decomposed, start_from)
    with _watched(decomposed, config, progress, observer) as watching:
        if out is None:
            result = train(decomposed, data, config, divergence=divergence, observer=watching, start=start)
        else:
            directory = RunDirectory.claim(out)
            result = _in_directory(directory, decomposed, data, config, divergence, resume, watching, start)
    if shown_by_default(progress, observer):
        say_verdict(lambda: result._in_a_line(result.verdict))
    return result


@contextmanager
def _watched(
    decomposed: DecomposedModel,
    config: DecompositionConfig,
    progress: bool | None,
    observer: Observer | None,
) -> Iterator[Observer | None]:
    """The observer, and beside it a display of progress where one is wanted."""
    if not shown_by_default(progress, observer):
        yield observer
        return
    with RunDisplay(config.steps, greeting=greeting(decomposed, config.steps, config.matrices)) as display:

        def both(progress: Progress) -> None:
            display(progress)
            if observer is not None:
                observer(progress)

        yield both


def _start(
    decomposed: DecomposedModel, start_from: "Decomposition | str | Path | None"
) -> dict[str, Tensor] | None:
    """The parameters to start from."""
    if start_from is None:
        return None
    target = fingerprint(decomposed.target)
    if isinstance(start_from, Decomposition):
        if fingerprint(start_from.model.target) != target:
            raise CheckpointError("start_from is a decomposition of another network: its weights differ.")
        return {name: t.detach().clone() for name, t in start_from.model.named_tensors().items()}
    path = Path(start_from)
    artifact = COMPONENTS if (path / COMPONENTS).is_file() else f"decomposition/{COMPONENTS}"
    return earlier_parameters(RunDirectory.open(path), artifact, target)


def _in_directory(
    directory: RunDirectory,
    decomposed: DecomposedModel,
    data: Data,
    config: DecompositionConfig,
    divergence: Divergence | None,
    resume: bool,
    observer: Observer | None,
    start: Mapping[str, Tensor] | None,
) -> Decomposition:
    """Train and keep all of it in a run directory that every command can read."""
    from rankone.runs import own

    given = own.Own(decomposed.target, data, None, decomposed.output, divergence)
    settings = own.python_config(given, {n: layer.C for n, layer in decomposed.layers.items()}, config)
    with directory.lock():
        if not resume and (directory.sub("decomposition").exists() or checkpoint_names(directory)):
            raise CheckpointError(
                f"{directory.path} already holds a run. Pass resume=True to go on with it, or "
                "choose another out=."
            )
        own.begin(directory, settings, resumes=bool(resume and checkpoint_names(directory)))
        result = train(
            decomposed,
            data,
            config,
            divergence=divergence,
            directory=directory,
            resume=resume,
            observer=observer,
            start=start,
        )
        own.finish(directory, given, settings, result)
        return result


def train(
    decomposed: DecomposedModel,
    data: Data,
    config: DecompositionConfig,
    *,
    divergence: Divergence | None = None,
    directory: RunDirectory | None = None,
    resume: bool = False,
    observer: Observer | None = None,
    start: Mapping[str, Tensor] | None = None,
) -> Decomposition:
    """Train a freshly built model, from `start` if there is one; in a run directory, which must be locked,
    also keep all of it."""

    def made(steps_done: int | None = None) -> Decomposition:
        known = (decomposed, config, training.history, training.seconds, divergence, data)
        return Decomposition(*known, steps_done=steps_done)

    with torch.inference_mode(False), torch.enable_grad():
        training = Training(
            decomposed,
            data,
            config,
            divergence=divergence,
            directory=directory,
            observer=observer,
            start=start,
        )
        try:
            training.run(resume=resume)
        except Interrupted as stop:
            stop.decomposition = made(stop.step)
            raise
    result = made()
    if directory is not None:
        result.save(directory.sub("decomposition"))
    return result


def load(
    path: str | Path, model: nn.Module, *, output: OutputGetter = None, divergence: Divergence | None = None
) -> Decomposition:
    """Load a saved decomposition for the very network it was made from.

    If it was made with functions of your own as `output=` or `divergence=`, pass them again.
    """
    path = Path(path)
    refuse_unusable(model)
    if (path / "manifest.json").exists():  # it is not needed, but where it is, it knows of changes
        directory = RunDirectory.open(path)
        directory.read(DESCRIPTION)
        tensors, info = directory.read_sealed(COMPONENTS)
    else:
        tensors, info = load_sealed(path / COMPONENTS)
    if info.get("format") != FORMAT:
        raise CheckpointError(
            f"{path} has format {info.get('format')!r}; this version of rankone ({version('rankone')}) "
            f"reads format {FORMAT}."
        )
    if fingerprint(model) != info["target"]["sha256"]:
        raise CheckpointError(
            f"{path} was made from another network: a {info['target']['class']} whose weights have "
            f"SHA-256 {info['target']['sha256'][:12]}..., but this {type(model).__name__} has "
            f"{fingerprint(model)[:12]}... Load the exact weights that were decomposed."
        )
    for name, given in (("output", output), ("divergence", divergence)):
        if given is None and isinstance(info[name], dict):
            raise ConfigError(
                f"{path} was made with the function {info[name]['function']} as {name}=; pass it to load()."
            )
    config = validated(DecompositionConfig, info["config"], source=str(path))
    getter = output if output is not None else info["output"]
    decomposed = build(model, {name: layer["C"] for name, layer in info["layers"].items()}, config, getter)
    with torch.no_grad():
        for name, tensor in decomposed.named_tensors().items():
            if name not in tensors or tensors[name].shape != tensor.shape:
                raise CheckpointError(
                    f"{path} has no {name} of shape {tuple(tensor.shape)}: a class that it was "
                    "made with has changed."
                )
            tensor.copy_(tensors[name])
    history = parse_metrics(tensors[HISTORY].numpy().tobytes(), str(path))
    return Decomposition(decomposed, config, history, divergence=divergence)


def build(
    model: nn.Module, layers: Mapping[str, int], config: DecompositionConfig, output: OutputGetter
) -> DecomposedModel:
    """A fresh DecomposedModel as the settings say."""
    with torch.inference_mode(False):
        return DecomposedModel(
            model,
            layers,
            importance=config.importance.kind,
            importance_options=config.importance.options,
            init=config.init,
            tied=config.tied,
            matrices=config.matrices,
            output=output,
            seed=config.seed,
        )


def _named(function: Any, otherwise: Any) -> Any:
    """A function as JSON can hold it, by its name; anything else as it is."""
    return {"function": described(function)} if callable(function) else otherwise
