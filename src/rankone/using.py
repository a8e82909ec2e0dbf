"""What can be done with a result: look at its subcomponents at work, edit the network by them, group them.

These are methods of a `Decomposition`, gathered here because they are about using one, not about making
or keeping it. Each returns something that prints well and can be used further.
"""

from abc import abstractmethod
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from rankone import clusters, looking
from rankone.attribution import attributions
from rankone.clusters import Components
from rankone.config import DecompositionConfig
from rankone.data import Batch, Data
from rankone.edited import Edited, Part, by_layer, members_of
from rankone.editing import AblatedModel, Choice, Factors, edited_copy, edits
from rankone.looking import LOOK_AT, Grouping
from rankone.metrics import IMPORTANT
from rankone.model import DecomposedModel
from rankone.tables import Table
from rankone.text_measures import Card, EditedText, TextMeasures, card, measure, refuse_other_data

if TYPE_CHECKING:
    from rankone.compare import Comparison


class Usable:
    """What a `Decomposition` can be used for."""

    model: DecomposedModel
    config: DecompositionConfig

    @abstractmethod
    def data_or(self, data: Data | None) -> Data:
        """What was given, else the data that is at hand."""

    def ablated(
        self, keep: Choice | None = None, *, drop: Choice | None = None, scale: Factors | None = None
    ) -> AblatedModel:
        """A runnable model with edited layers: `ablated(drop={"fc1": [3]})(x)`.

        keep   layer -> subcomponents it then consists of, and of nothing else
        drop   layer -> subcomponents that are taken out of the original matrix
        scale  layer -> {index: factor}, or a tensor of factors `[C]` or, per datapoint, `[*lead, C]`

        Layers that are not named keep their original matrix. Biases stay.
        """
        return AblatedModel(self.model, edits(self.model, keep, drop, scale))

    def edited_model(
        self, keep: Choice | None = None, *, drop: Choice | None = None, scale: Factors | None = None
    ) -> nn.Module:
        """A copy of the network with edited weights (see `ablated`): an ordinary module, with
        parameters, gradients and every method of its class."""
        return edited_copy(self.model, edits(self.model, keep, drop, scale), self.config.matrices)

    def edited(self, factors: Mapping[Part, float], *, where: Callable[..., Tensor] | None = None) -> Edited:
        """The network with some subcomponents or components multiplied: `edited({("0", 3): 0.0})(x)`.

        factors  (layer, index), or a component of `clusters()`, -> factor: 0 takes it out, 1 leaves it
        where    a condition: a function of the network's inputs that says of each row whether the edit
                 applies to it; the others go through the original
        """
        return Edited(self.model, edits(self.model, None, None, by_layer(self.model, factors)), where)

    def attributions(self, batch: Batch, *, count: int = 30, checked: int = 10) -> Table:
        """Which earlier subcomponents drive which later ones on these datapoints: the `count` strongest
        edges, the first `checked` of them also by ablation."""
        return attributions(self.model, batch, count=count, checked=checked)

    def compare(self, other: "Usable", data: Data | None = None, *, n_batches: int = 4) -> "Comparison":
        """Match its subcomponents with those of another decomposition of the same network."""
        from rankone.compare import compare

        return compare(self, other, self.data_or(data), n_batches=n_batches)  # pyright: ignore[reportArgumentType]

    def examples(
        self,
        layer: str | Part,
        c: int | Data | None = None,
        data: Data | None = None,
        *,
        count: int = 10,
        n_batches: int = LOOK_AT,
    ) -> Table:
        """The datapoints on which a subcomponent is most important: `examples("0", 3)`,
        `examples(("0", 3))`, or on which a component of `clusters()` is."""
        known: Any = (layer, c) if isinstance(layer, str) else layer
        given: Any = data if isinstance(layer, str) or c is None else c
        tables = [
            looking.examples(self.model, name, index, self.data_or(given), count, n_batches)
            for name, index in members_of(self.model, known)
        ]
        return tables[0] if len(tables) == 1 else looking.joined(tables, count)

    def effect(
        self,
        keep: Choice | None = None,
        *,
        drop: Choice | None = None,
        scale: Factors | None = None,
        data: Data | None = None,
        n_batches: int = LOOK_AT,
    ) -> Table:
        """What an edit (see `ablated`) changes in the output, entry by entry."""
        return looking.effect(self.model, edits(self.model, keep, drop, scale), self.data_or(data), n_batches)

    def importances_by(
        self, by: Grouping, layer: str, data: Data | None = None, *, n_batches: int = LOOK_AT
    ) -> Table:
        """Mean importances of a layer's alive subcomponents by class (`"output"`: the largest entry of
        the output), by `"position"`, or by a function of the model's inputs that gives whole numbers."""
        return looking.by_group(self.model, layer, by, self.data_or(data), n_batches)

    def card(self, layer: str, c: int, data: Data | None = None, *, n_batches: int = LOOK_AT) -> Card:
        """What subcomponent `c` of a layer does in text: how often it is on and where, which tokens it
        makes likelier, and what is lost without it."""
        return card(self.model, self.config, layer, c, refuse_other_data(self.data_or(data)), n_batches)

    def in_text(self, data: Data | None = None, *, n_batches: int = 4) -> TextMeasures:
        """How good it is in the terms of a language model: cross-entropy and KL under every kind of mask."""
        return measure(self.model, self.config, refuse_other_data(self.data_or(data)), n_batches)

    def edited_text(
        self,
        keep: Choice | None = None,
        *,
        drop: Choice | None = None,
        scale: Factors | None = None,
        data: Data | None = None,
        other: Data | None = None,
        n_batches: int = 2,
    ) -> EditedText:
        """A copy of a language model with an edit (see `ablated`) that writes text, with what the edit
        changes on its own text and on `other` text."""
        text = refuse_other_data(self.data_or(data))
        others = {} if other is None else {"other text": refuse_other_data(other)}
        copy = self.edited_model(keep, drop=drop, scale=scale)
        return EditedText(self.model.target, copy, text, others, n_batches)

    def clusters(
        self,
        data: Data | None = None,
        *,
        alpha: float = clusters.ALPHA,
        threshold: float = IMPORTANT,
        n_batches: int = LOOK_AT,
    ) -> Components:
        """Components: groups of subcomponents, of one layer or several, that are important together.

        alpha      what a rank costs, in units of what naming a component costs: the higher, the fewer are
                   joined; at 1, two that are on together more often than apart, at 0.25 a quarter as often
        threshold  the importance above which a subcomponent is on
        """
        given = self.data_or(data)
        return clusters.clusters(self.model, given, n_batches, alpha=alpha, threshold=threshold)
