"""Text as data: `rankone.text("corpus.txt", tokenizer, length=128, batch_size=16)`.

A text file, a folder of them, an iterable of texts, token ids, or a `datasets` object; tokenised once,
packed into passages of one length, kept on disk and read through a memory map. Which passages make a
batch is a function of (seed, stream, step): every passage comes once before any comes again, in
another order each time, and a resumed run draws exactly what it would have drawn. The last passages
are held out: training never sees them, and everything that is measured is measured on them.
"""

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from rankone.data import ATTENTION_MASK, Batch, WeightedBatch, generator_for
from rankone.errors import BatchError, ConfigError, shown
from rankone.files import fingerprint, sha256
from rankone.tokens import kept, spooled

if TYPE_CHECKING:
    from rankone.passages import Passages

PIECE = 2**18
"""Characters of a file that are tokenised at a time, up to the end of a line."""
EVALUATION = "evaluation"
"""The stream that held-out passages belong to."""


class Text:
    """Passages of token ids, drawn in batches: data for `rankone.decompose`."""

    settings: Mapping[str, Any] = {"divergence": "kl"}
    """What suits a network that says how likely every next token is."""

    def __init__(
        self,
        tokens: Any,
        ends: Any,
        tokenizer: Any = None,
        *,
        length: int = 128,
        batch_size: int = 16,
        pack: bool = True,
        held_out: float = 0.05,
        keyword: str | None = "input_ids",
        where: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        for name, number in (("length", length), ("batch_size", batch_size)):
            if not isinstance(number, int) or isinstance(number, bool) or number < 1:
                raise ConfigError(f"{name} is {shown(number)}; expected a whole number from 1.")
        if not 0 <= held_out < 1:
            raise ConfigError(f"held_out is {shown(held_out)}; expected a share of the passages, below 1.")
        self.tokens, self.tokenizer = tokens, tokenizer
        self.length, self.batch_size, self.keyword, self.where = length, batch_size, keyword, where
        self.starts, self.stops = _packed(len(tokens), length) if pack else _apart(ends, length)
        if not len(tokens):
            raise BatchError("The corpus is empty: it has no token at all.")
        if not len(self.starts):
            raise BatchError(
                f"The corpus has {len(tokens)} tokens, fewer than one passage of length={length}. Give more "
                "text or a smaller length, or pass pack=False, which pads."
            )
        self._held_out = min(max(1, round(held_out * len(self))), len(self) - 1) if held_out else 0

    def __len__(self) -> int:
        """How many passages there are."""
        return len(self.starts)

    def __repr__(self) -> str:
        return (
            f"<Text: {len(self.tokens):,} tokens, {len(self):,} passages of at most {self.length}, "
            f"{self.batch_size} at a time, {self._held_out} held out>"
        )

    def stream(self, seed: int, start: int, stream: str) -> Iterator[Batch]:
        """Endless batches from step `start` on; those of the stream `evaluation` are held out."""
        among = self._among(stream)
        step = start
        while True:
            first = step * self.batch_size
            places = [
                among[int(self._order(seed, stream, place // len(among), len(among))[place % len(among)])]
                for place in range(first, first + self.batch_size)
            ]
            yield self.batch(places)
            step += 1

    def _among(self, stream: str) -> range:
        """The passages of a stream."""
        trained = len(self) - self._held_out
        return range(trained, len(self)) if stream == EVALUATION and self._held_out else range(trained)

    def _order(self, seed: int, stream: str, time: int, count: int) -> Tensor:
        """In which order all passages of a stream come for the n-th time."""
        key = seed, stream, time, count
        if getattr(self, "_known", (None, None))[0] != key:
            self._known = key, torch.randperm(count, generator=generator_for(seed, f"{stream}/order", time))
        return self._known[1]

    def batch(self, passages: Sequence[int]) -> Batch:
        """These passages as the model takes them."""
        sizes = [int(self.stops[i] - self.starts[i]) for i in passages]
        ids = torch.full((len(passages), max(sizes)), self._padding, dtype=torch.long)
        for row, i in enumerate(passages):
            ids[row, : sizes[row]] = torch.from_numpy(
                self.tokens[self.starts[i] : self.stops[i]].astype(np.int64)
            )
        there = torch.arange(ids.shape[1]) < torch.tensor(sizes).unsqueeze(1)
        padded = not bool(there.all())
        inputs: Any = ids
        if self.keyword is not None:
            # A language model that remembers keys and values for a next call would hand them back.
            inputs = {self.keyword: ids, "use_cache": False}
            inputs |= {ATTENTION_MASK: there.long()} if padded else {}
        if self.where is not None:
            chosen = self.where(ids)
            if not isinstance(chosen, Tensor) or chosen.shape != ids.shape:
                raise BatchError(
                    f"where= gave {shown(chosen)}; expected a tensor of shape {tuple(ids.shape)}, True at the "
                    "positions that count."
                )
            return WeightedBatch(inputs, there & chosen.bool())
        return WeightedBatch(inputs, there) if padded and self.keyword is None else inputs

    @property
    def _padding(self) -> int:
        known = getattr(self.tokenizer, "pad_token_id", None)
        return known if isinstance(known, int) else 0

    def ids_of(self, batch: Batch) -> Tensor:
        """The token ids of one of its batches."""
        inputs = batch.inputs if isinstance(batch, WeightedBatch) else batch
        ids = inputs[self.keyword] if isinstance(inputs, Mapping) and self.keyword else inputs
        assert isinstance(ids, Tensor)
        return ids

    def pieces(self, ids: Sequence[int]) -> list[str]:
        """The text of every token in its place; without a tokenizer, its number."""
        return text_of_tokens(self.tokenizer, ids)

    def examples(self, model: Any, layer: str, c: int, count: int, n_batches: int) -> "Passages":
        """The passages in which one subcomponent is most important."""
        from rankone.passages import passages

        return passages(model, layer, c, self, count, n_batches)

    def output_of(self, model: nn.Module) -> str | None:
        """How logits are got from what a model returns."""
        return "logits" if callable(getattr(model, "get_output_embeddings", None)) else None

    def refuse_misfit(self, model: nn.Module) -> None:
        """Raise if this text is none for a model: other tokens, or passages longer than its context."""
        embedding = getattr(model, "get_input_embeddings", lambda: None)()
        size = getattr(embedding, "num_embeddings", None)
        largest = int(self.tokens.max())
        if isinstance(size, int) and largest >= size:
            raise BatchError(
                f"The tokenizer does not fit the model: the text has token ids up to {largest}, but the "
                f"model's embedding has {size} rows. Use the tokenizer that the model was trained with."
            )
        context = getattr(getattr(model, "config", None), "max_position_embeddings", None)
        if isinstance(context, int) and self.length > context:
            raise BatchError(
                f"Passages have length={self.length}, but the model's context is {context} tokens. Pass "
                f"length={context} or less to rankone.text."
            )


def text(
    source: Any,
    tokenizer: Any = None,
    *,
    length: int = 128,
    batch_size: int = 16,
    column: str = "text",
    files: str = "*.txt",
    pack: bool = True,
    held_out: float = 0.05,
    keyword: str | None = "input_ids",
    where: Callable[[Tensor], Tensor] | None = None,
) -> Text:
    """Text as data for `rankone.decompose`.

    source      a text file; a folder, of which all `files` are taken; an iterable of texts, of token ids
                or of rows with a `column` (a `datasets` object); a tensor of token ids
    tokenizer   what the model was trained with: a `transformers` tokenizer, its name or directory, or
                any object with `encode` and `decode`; not needed for token ids
    length      tokens in a passage
    batch_size  passages in a batch
    pack        documents end to end, cut into passages of one length; False: every document begins a
                passage, and what is too short is padded
    held_out    the share of passages that training does not see
    keyword     the model's argument for token ids; None for a model that takes them as they are
    where       a function of the token ids of a batch that says which positions count
    """
    tokenizer = _loaded(tokenizer)
    if isinstance(source, str | Path):
        paths = _paths(Path(source), files)
        parts = [sha256(path.read_bytes()) for path in paths]
        key = sha256("/".join(["text", tokenizer_digest(tokenizer), *parts]).encode())[:32]
        numbers = kept(key, (_of_file(path, tokenizer) for path in paths))
    else:
        numbers = spooled([ids] for ids in _documents(source, tokenizer, column))
    options = {"pack": pack, "held_out": held_out, "keyword": keyword, "where": where}
    return Text(*numbers, tokenizer, length=length, batch_size=batch_size, **options)


def _loaded(tokenizer: Any) -> Any:
    if isinstance(tokenizer, str | Path):
        from rankone.hub import load_tokenizer

        return load_tokenizer(tokenizer)
    if tokenizer is not None and not (hasattr(tokenizer, "encode") and hasattr(tokenizer, "decode")):
        raise ConfigError(
            f"tokenizer is {shown(tokenizer)}; expected a transformers tokenizer, its name or directory, or an "
            "object with encode(text) and decode(ids)."
        )
    return tokenizer


def _paths(path: Path, files: str) -> list[Path]:
    if os.path.isdir(path):  # not path.is_dir(), which raises where a text is given, too long a name
        found = sorted(p for p in path.rglob(files) if p.is_file())
        if not found:
            raise BatchError(f"The folder {path} has no file {files}. Name them with files='*.md'.")
        return found
    if not os.path.isfile(path):
        raise BatchError(
            f"There is no file or folder {shown(str(path))}. To give text itself, pass a list: [text]."
        )
    return [path]


def _of_file(path: Path, tokenizer: Any) -> Iterator[list[int]]:
    """The ids of one file, tokenised in pieces of whole lines."""
    before, after = _frame(tokenizer)
    something = False
    try:
        with open(path, encoding="utf-8") as file:
            for lines in iter(lambda: file.readlines(PIECE), []):
                yield [*([] if something else before), *encoded(tokenizer, "".join(lines))]
                something = True
    except UnicodeDecodeError as error:
        raise BatchError(f"{path} is no UTF-8 text ({error.reason} at byte {error.start}).") from None
    yield after if something else []


def _documents(source: Any, tokenizer: Any, column: str) -> Iterator[list[int]]:
    """The token ids of every document of whatever a user gave."""
    if isinstance(source, Tensor):
        if source.is_floating_point() or source.dim() not in (1, 2):
            raise BatchError(
                f"The tensor has shape {tuple(source.shape)} and type {source.dtype}; token ids are whole "
                "numbers, in one row or in several."
            )
        yield from (row.tolist() for row in (source if source.dim() == 2 else source.unsqueeze(0)))
        return
    if not isinstance(source, Iterable) or isinstance(source, Mapping):
        raise BatchError(
            f"source is {shown(source)}; expected a text file, a folder, texts, token ids or a datasets object."
        )
    given = iter(source)
    first = next(given, None)
    if isinstance(first, int) and not isinstance(first, bool):
        yield [int(i) for i in chain([first], given)]
        return
    for row in chain([] if first is None else [first], given):
        yield _document(row, tokenizer, column)


def _document(row: Any, tokenizer: Any, column: str) -> list[int]:
    if isinstance(row, Mapping):
        if column not in row and "input_ids" not in row:
            raise BatchError(
                f"A row has {', '.join(map(str, row))} and no {column!r}. Name its text with column=."
            )
        row = row[column] if column in row else row["input_ids"]
    if isinstance(row, str):
        return framed(tokenizer, encoded(tokenizer, row))
    if isinstance(row, Tensor) or hasattr(row, "__array__"):
        row = row.tolist()
    if isinstance(row, Sequence) and all(isinstance(i, int) for i in row):
        return list(row)
    raise BatchError(f"A document is {shown(row)}; expected a text or token ids.")


def encoded(tokenizer: Any, document: str) -> list[int]:
    """The ids of a text, without the marks of a document."""
    if tokenizer is None:
        raise ConfigError("Text needs a tokenizer: pass the one that the model was trained with.")
    if callable(tokenizer):  # transformers
        found: Any = tokenizer(document, add_special_tokens=False, verbose=False)
        return list(found["input_ids"])
    return list(tokenizer.encode(document))


def framed(tokenizer: Any, ids: list[int], *, whole: bool = True) -> list[int]:
    """A document with the marks that its tokenizer puts around one; one at its end, if there are none.
    What is not whole goes on, and has no mark at its end."""
    before, after = _frame(tokenizer)
    return [*before, *ids, *(after if whole else [])]


def _frame(tokenizer: Any) -> tuple[list[int], list[int]]:
    end = getattr(tokenizer, "eos_token_id", None)
    otherwise = [], [end] if isinstance(end, int) else []
    if not callable(tokenizer):
        begin = getattr(tokenizer, "bos_token_id", None)
        return ([begin], []) if isinstance(begin, int) else otherwise
    framed: Any = tokenizer("a")
    plain, whole = encoded(tokenizer, "a"), list(framed["input_ids"])
    extra = len(whole) - len(plain)
    if extra <= 0:
        return otherwise
    before = next((n for n in range(extra + 1) if whole[n : n + len(plain)] == plain), 0)
    return whole[:before], whole[before + len(plain) :]


def text_of_tokens(tokenizer: Any, ids: Sequence[int]) -> list[str]:
    """The text of every token in its place: what it adds to the text of those before it."""
    if tokenizer is None:
        return [f" {i}" for i in ids]
    pieces, before = [], ""
    for n in range(1, len(ids) + 1):
        known = str(tokenizer.decode(list(ids[:n])))
        pieces.append(known[len(before) :] if known.startswith(before) else known[-1:])
        before = known
    return pieces


def tokenizer_digest(tokenizer: Any) -> str:
    """What a tokenizer does, as a digest: of its rules, where they can be had, else of its vocabulary."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    rules = backend.to_str() if backend is not None else repr(getattr(tokenizer, "vocabulary", None))
    probe = [] if tokenizer is None else encoded(tokenizer, "The 3 quick brown foxes, naïve & \n\n ünïcode!")
    named = [type(tokenizer).__name__, rules, repr(probe), repr(_frame(tokenizer))]
    return sha256("/".join(named).encode())


@torch.no_grad()
def sampled(
    model: nn.Module,
    tokenizer: Any = None,
    *,
    passages: int = 1000,
    length: int = 128,
    batch_size: int = 16,
    prompt: Sequence[int] | None = None,
    temperature: float = 1.0,
    seed: int = 0,
    at_once: int = 64,
    **options: Any,
) -> Text:
    """A model as its own corpus: passages that it writes itself, from its first token (or `prompt`) on.

    They are kept on disk, under the digest of the model and these settings.
    """
    tokenizer = _loaded(tokenizer)
    begin = list(prompt) if prompt is not None else _frame(tokenizer)[0] or _frame(tokenizer)[1]
    if not begin:
        raise ConfigError(
            "The tokenizer knows no first token. Pass prompt=, the ids that passages begin with."
        )

    def written() -> Iterator[list[int]]:
        for first in range(0, passages, at_once):
            rows = min(at_once, passages - first)
            start = torch.tensor([begin] * rows)
            generator = generator_for(seed, "sampled", first)
            yield from continued(model, start, length, temperature, generator).tolist()

    settings = repr((passages, length, begin, temperature, seed, at_once))
    key = sha256(f"sampled/{fingerprint(model)}/{settings}".encode())[:32]
    documents = ([ids] for ids in written())
    return Text(*kept(key, documents), tokenizer, length=length, batch_size=batch_size, **options)


def continued(
    model: nn.Module, ids: Tensor, length: int, temperature: float, generator: torch.Generator
) -> Tensor:
    """Rows of tokens, continued up to a length at random, as the model finds likely; with a temperature
    of 0, by the likeliest."""
    remembered: Any = None
    device = next(model.parameters()).device
    while ids.shape[1] < length:
        if hasattr(model, "generate"):  # it can be told what it has seen already
            new = ids if remembered is None else ids[:, -1:]
            result = model(new.to(device), past_key_values=remembered, use_cache=True)
            logits, remembered = result.logits, result.past_key_values
        else:
            logits = model(ids.to(device))
        if temperature == 0:
            ids = torch.cat([ids, logits[:, -1:].argmax(-1).cpu()], 1)
            continue
        chances = (logits[:, -1].float() / temperature).softmax(-1).cpu()
        ids = torch.cat([ids, torch.multinomial(chances, 1, generator=generator)], 1)
    return ids


def _packed(count: int, length: int) -> tuple[Any, Any]:
    starts = np.arange(count // length, dtype=np.int64) * length
    return starts, starts + length


def _apart(ends: Any, length: int) -> tuple[Any, Any]:
    """Passages that begin with documents; long ones are several."""
    starts, stops, begin = [], [], 0
    for end in map(int, ends):
        for start in range(begin, end, length):
            starts.append(start)
            stops.append(min(start + length, end))
        begin = end
    return np.asarray(starts, np.int64), np.asarray(stops, np.int64)
