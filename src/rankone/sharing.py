"""Handing a decomposition on by the conventions of the Hugging Face Hub, with a card that says what it is.

What is shared is the artifact that `save` writes (never the network, never code), and a README.md: what
was decomposed, how good it is, how to load it. A local directory needs nothing installed. The Hub is
reached through huggingface_hub's own mixin (the extra `hub`), imported when it is first asked for.
"""

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from rankone.describe import HEAD, headline, percent, rows
from rankone.errors import CheckpointError, ConfigError, shown
from rankone.files import RunDirectory, fingerprint

if TYPE_CHECKING:
    from rankone.decomposition import Decomposition

CARD = "README.md"
PAPER = "https://arxiv.org/abs/2506.20790"
FILES = ("components.safetensors", "decomposition.json")
"""What is taken from a repository; anything else in it stays where it is."""
LOST = {
    "sum": "all subcomponents together",
    "importance": "masked by their importances",
    "rounded": "the important ones alone",
    "attack_20": "under attack (20 steps)",
    "deletion": "without those that are never important",
}


class Shareable:
    """The sharing of a `Decomposition`: three methods with the names that everybody knows."""

    def save_pretrained(
        self, save_directory: str | Path, *, repo_id: str | None = None, push_to_hub: bool = False, **hub: Any
    ) -> Path:
        """Write the decomposition and a model card into a new directory, or over an earlier one.

        It is measured first if it was not yet and its data is known. With `push_to_hub`, also upload it to
        `repo_id` (the directory's name if not given); `hub` is what huggingface_hub takes.
        """
        path = written(self, save_directory)  # pyright: ignore[reportArgumentType]
        if push_to_hub:
            self.push_to_hub(repo_id or path.name, **hub)
        return path

    def push_to_hub(self, repo_id: str, **hub: Any) -> str:
        """Upload it to a repository of the Hub, with its card; returns the address of the commit."""
        with _speaking_of_the_hub(f"{shown(repo_id)} was not uploaded"):
            carrier = _carrier()()
            carrier.result = self
            return str(carrier.push_to_hub(repo_id, **hub))

    @classmethod
    def from_pretrained(
        cls, name: str | Path, model: nn.Module, *, output: Any = None, divergence: Any = None, **hub: Any
    ) -> "Decomposition":
        """A decomposition from a directory, a run directory, or a repository of the Hub, for the very network
        that it was made from.

        `output` and `divergence` as in `rankone.load`; `hub` (`revision=`, `token=`, `cache_dir=`, ...) is
        what huggingface_hub takes.
        """
        from rankone.decomposition import load

        options = {"output": output, "divergence": divergence}
        path = Path(name)
        if path.is_dir():
            inside = path / "decomposition"
            return load(path if (path / FILES[0]).exists() else inside, model, **options)
        if len(path.parts) > 2 or path.is_absolute() or str(name).startswith("."):
            raise CheckpointError(f"There is no directory {path}.")
        with _speaking_of_the_hub(f"There is no directory {path}, and it was not found on the Hub"):
            return _carrier().from_pretrained(str(name), network=model, options=options, **hub)


def written(result: "Decomposition", path: str | Path) -> Path:
    """Write artifact and card into a directory."""
    result.save(path)
    directory = RunDirectory.open(path)
    directory.write(CARD, model_card(result))
    return directory.path


def model_card(result: "Decomposition") -> str:
    """What was decomposed, how good it is and how to load it, as the Hub shows it."""
    if result.evaluation is None and result.data is not None:
        result.evaluate()
    facts = result.facts
    head = ["---", "library_name: rankone", "tags:", "- interpretability", "- parameter-decomposition", "---"]
    table = [f"| {' | '.join(HEAD)} |", "|---|---|---:|---:|---:|"]
    table += [f"| {' | '.join(_in_a_cell(cell) for cell in row)} |" for row in rows(facts)]
    lines = [
        *head,
        "",
        f"# {headline(facts)}",
        "",
        f"The weight matrices of a `{facts.target}`, split into rank-one subcomponents so that as few of them "
        f"as possible are needed on any one input ([Stochastic Parameter Decomposition]({PAPER})). The network "
        "itself is not part of this.",
        "",
        *table,
        "",
        "`C` subcomponents were there to begin with, the alive ones are important on some datapoint, and L0 "
        "is how many are on one datapoint, on average.",
        "",
        "## How good it is",
        "",
        *_quality(result),
        "",
        "## How to load it",
        "",
        "```python",
        "import rankone",
        "",
        "model = ...  # the very network: its weights are checked",
        'result = rankone.Decomposition.from_pretrained("this repository or directory", model)',
        "result.importances(batch)",
        "```",
        "",
        *_needed(result),
        f"- the network: `{facts.target}`, weights with SHA-256 `{fingerprint(result.model.target)}`",
        f"- {facts.steps:,} training steps, seed {result.config.seed}; every setting is in `decomposition.json`",
        f"- rankone {version('rankone')}",
    ]
    return "\n".join(lines) + "\n"


def _quality(result: "Decomposition") -> list[str]:
    lines: list[str] = []
    if result._verdict is not None:
        lines += [f"Verdict, without knowing the truth: {result._verdict}.", ""]
    if getattr(result.evaluation, "recovered", None) is not None:
        found = "were all found" if result.evaluation.recovered else "were not all found"
        lines += [f"The network's mechanisms are known, and {found}.", ""]
    relative = result.facts.relative
    if not relative:
        return [*lines, "It was not measured (`result.evaluate(data)` does it)."]
    lines += ["| the network with | loses, of what removing everything costs |", "|---|---:|"]
    lines += [f"| {words} | {percent(relative[key])} |" for key, words in LOST.items() if key in relative]
    return lines


def _needed(result: "Decomposition") -> list[str]:
    """What has to be handed over again, because no code is part of the artifact."""
    functions = {"output": result.model.output, "divergence": result.divergence}
    return [
        f"- it was made with the function `{function.__name__}` as `{name}=`; pass that to `from_pretrained`"
        for name, function in functions.items()
        if callable(function) and hasattr(function, "__name__")
    ]


def _in_a_cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def _carrier() -> Any:
    """A class that huggingface_hub's mixin makes of a decomposition."""
    try:
        from huggingface_hub import ModelHubMixin, snapshot_download
    except ImportError:
        raise ConfigError(
            "The Hub is reached with huggingface_hub, which is not installed. Install it with: "
            "pip install 'rankone[hub]'. A local directory needs nothing: save_pretrained(DIRECTORY)."
        ) from None

    class Carrier(ModelHubMixin, library_name="rankone", paper_url=PAPER):
        result: Any = None  # no argument: the mixin would write its arguments into a config.json

        def _save_pretrained(self, save_directory: Path) -> None:
            written(self.result, save_directory)

        @classmethod
        def _from_pretrained(cls, *, model_id: str, network: Any, options: Any, **hub: Any) -> Any:
            from rankone.decomposition import load

            cached = Path(snapshot_download(model_id, allow_patterns=list(FILES), **hub))
            missing = [name for name in FILES if not (cached / name).is_file()]
            if missing:
                raise CheckpointError(f"{model_id} is no decomposition: it has no {missing[0]}.")
            with tempfile.TemporaryDirectory() as folder:  # the cache is made of links, which nothing follows
                for name in FILES:
                    shutil.copyfile(cached / name, Path(folder) / name)
                return load(folder, network, **options)

    return Carrier


@contextmanager
def _speaking_of_the_hub(what: str) -> Iterator[None]:
    """Say in words what goes wrong on the way to the Hub and back."""
    try:
        yield
    except Exception as error:
        home = type(error).__module__.split(".")[0]
        if not isinstance(error, OSError) and not home.startswith(("huggingface_hub", "httpx")):
            raise
        first = str(error).strip().partition("\n")[0] or type(error).__name__
        raise CheckpointError(
            f"{what}: {first[:300]} Check the name, the network and `hf auth login`, and try again; "
            "save_pretrained(DIRECTORY) keeps it on this machine meanwhile."
        ) from error
