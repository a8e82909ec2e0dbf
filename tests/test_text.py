"""Text as data: where it comes from, in which order it comes, and a real (small, untrained) Llama on it."""

import functools
import operator

import pytest
import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from tokenizers.trainers import BpeTrainer
from torch import nn

import rankone
from rankone import heads
from rankone.config import over_recipe
from rankone.data import WeightedBatch, batches
from rankone.decomposition import build
from rankone.errors import BatchError, ConfigError, RankoneError, TargetError
from rankone.fast.step import FastStep
from rankone.files import fingerprint
from rankone.hub import load_model, load_tokenizer
from rankone.losses import kl
from rankone.step import Step

WORDS = "the cat sat on the mat and the dog ran to the old red barn by the river where a small boat lay\n"
LAYERS = {"model.layers.1.mlp.*": 20}
SETTINGS = {"steps": 4, "checkpoint_every": 2, "log_every": 1}


def llama(**changes) -> nn.Module:
    torch.manual_seed(0)
    sizes = {"vocab_size": 120, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**(sizes | heads | changes))).eval()


@pytest.fixture(scope="module")
def tokenizer():
    rules = Tokenizer(models.BPE())
    rules.pre_tokenizer, rules.decoder = (
        pre_tokenizers.ByteLevel(add_prefix_space=False),
        decoders.ByteLevel(),
    )
    alphabet = sorted(set("abcdefghijklmnopqrstuvwxyzĠĊ."))
    trainer = BpeTrainer(
        vocab_size=100, special_tokens=["<end>"], initial_alphabet=alphabet, show_progress=False
    )
    rules.train_from_iterator([WORDS], trainer)
    return transformers.PreTrainedTokenizerFast(tokenizer_object=rules, eos_token="<end>")


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setattr("rankone.tokens.cache_folder", lambda: tmp_path / "cache")


@pytest.fixture
def corpus(tmp_path):
    path = tmp_path / "corpus.txt"
    path.write_text("".join(f"{WORDS[i % 40 :]}" for i in range(60)))
    return path


class TestSources:
    def test_a_file_is_tokenised_once(self, corpus, tokenizer, monkeypatch):
        first = rankone.text(corpus, tokenizer, length=8)
        whole = tokenizer(corpus.read_text())["input_ids"]
        assert first.tokens.tolist() == [*whole, tokenizer.eos_token_id]
        monkeypatch.setattr("rankone.corpus._of_file", lambda *_: 1 / 0)
        assert rankone.text(str(corpus), tokenizer, length=8).tokens.tolist() == first.tokens.tolist()
        corpus.write_text("other words")
        with pytest.raises(ZeroDivisionError):
            rankone.text(corpus, tokenizer, length=2)

    def test_long_files_are_tokenised_in_pieces(self, corpus, tokenizer, monkeypatch):
        whole = rankone.text(corpus, tokenizer).tokens.tolist()
        monkeypatch.setattr("rankone.corpus.PIECE", 100)
        monkeypatch.setattr("rankone.tokens.AT_ONCE", 50)
        assert rankone.text([corpus.read_text()], tokenizer).tokens.tolist() == whole
        corpus.rename(corpus.with_name("again.txt"))
        monkeypatch.setattr("rankone.corpus.kept", lambda key, documents: rankone.corpus.spooled(documents))
        assert rankone.text(corpus.with_name("again.txt"), tokenizer).tokens.tolist() == whole

    def test_folders_rows_texts_and_ids_are_the_same_text(self, tmp_path, tokenizer):
        texts = [WORDS, WORDS[10:], WORDS[20:]]
        (tmp_path / "many" / "below").mkdir(parents=True)
        for i, text in enumerate(texts):
            (tmp_path / "many" / ("below" if i > 1 else "") / f"{i}.txt").write_text(text)
        ids = [[*tokenizer(text)["input_ids"], tokenizer.eos_token_id] for text in texts]
        sources = [
            tmp_path / "many",
            texts,
            iter(texts),
            [{"story": text} for text in texts],
            [{"input_ids": row} for row in ids],
            ids,
            [torch.tensor(row) for row in ids],
            torch.tensor(functools.reduce(operator.iadd, ids, [])),
            functools.reduce(operator.iadd, ids, []),
        ]
        for source in sources:
            given = rankone.text(source, tokenizer, length=4, column="story")
            assert given.tokens.tolist() == functools.reduce(operator.iadd, ids, [])

    def test_what_marks_a_document_is_left_to_the_tokenizer(self, tokenizer):
        class Own:
            bos_token_id = 1

            def encode(self, text):
                return [ord(c) % 50 for c in text]

            def decode(self, ids):
                return "".join(map(chr, ids))

        assert rankone.text(["ab"], Own(), length=1).tokens.tolist() == [1, 47, 48]

    def test_a_model_is_its_own_corpus(self, tokenizer):
        model = llama()
        options = {"passages": 5, "length": 12, "at_once": 3, "held_out": 0.0}
        one, two = (rankone.sampled(model, tokenizer, seed=seed, **options) for seed in (0, 1))
        assert len(one) == 5
        assert one.tokens.tolist() != two.tokens.tolist()
        ids = torch.from_numpy(one.tokens.reshape(5, 12).astype("int64"))
        chances = model(ids).logits.log_softmax(-1)[:, :-1].gather(-1, ids[:, 1:, None])
        assert chances.mean() > -8  # the remembered keys and values were the right ones

        class Plain(nn.Module):
            def __init__(self):
                super().__init__()
                self.model = model

            def forward(self, ids):
                return self.model(ids).logits

        plain = rankone.sampled(Plain(), tokenizer, **options)
        assert plain.tokens.tolist() == one.tokens.tolist()


class TestOrder:
    def test_every_passage_comes_once_before_any_comes_again(self, corpus, tokenizer):
        data = rankone.text(corpus, tokenizer, length=8, batch_size=4)
        held = len(data) - len(data._among("data"))
        assert 0 < held <= 0.1 * len(data)
        rows = [
            tuple(row)
            for _, batch in zip(range(len(data) // 4), batches(data, 3), strict=False)
            for row in data.ids_of(batch).tolist()
        ]
        epoch = len(data) - held
        places = data.tokens[: len(data) * 8].reshape(-1, 8).tolist()
        assert sorted(rows[:epoch]) == sorted(map(tuple, places[:epoch]))
        assert rows[:epoch] != sorted(rows[:epoch])

    def test_it_begins_in_the_middle_as_if_it_had_begun_at_the_beginning(self, corpus, tokenizer):
        data = rankone.text(corpus, tokenizer, length=8, batch_size=4)
        stream = batches(data, 3)
        drawn = [next(stream)["input_ids"] for _ in range(60)]
        for start in (1, 17, 59):
            assert torch.equal(next(batches(data, 3, start=start))["input_ids"], drawn[start])
        assert not torch.equal(next(batches(data, 4))["input_ids"], drawn[0])

    def test_what_is_measured_was_never_trained_on(self, corpus, tokenizer):
        data = rankone.text(corpus, tokenizer, length=8, batch_size=4)
        trained, measured = (set(data._among(stream)) for stream in ("data", "evaluation"))
        assert not trained & measured
        assert len(trained | measured) == len(data)

    def test_short_documents_are_padded_where_they_are_not_packed(self, tokenizer):
        texts = [WORDS[:n] for n in (8, 30, 90)]
        data = rankone.text(texts, tokenizer, length=12, batch_size=3, pack=False, held_out=0.0)
        sizes = [len(tokenizer(text)["input_ids"]) + 1 for text in texts]
        assert len(data) == sum(-(-size // 12) for size in sizes)
        batch = data.batch([0, 1])
        assert batch["attention_mask"].sum(1).tolist() == [sizes[0], min(12, sizes[1])]
        plain = rankone.text(texts, tokenizer, length=12, pack=False, keyword=None).batch([0, 1])
        assert isinstance(plain, WeightedBatch)
        assert torch.equal(plain.weights, batch["attention_mask"].bool())

    def test_chosen_positions(self, corpus, tokenizer):
        last = rankone.text(
            corpus, tokenizer, length=8, where=lambda ids: torch.arange(8).expand(ids.shape) == 7
        )
        assert last.batch([0, 1]).weights.sum(1).tolist() == [1, 1]


class TestHead:
    def test_kl_through_a_head_is_kl_of_logits(self, monkeypatch):
        torch.manual_seed(0)
        for bias in (True, False):
            head = nn.Linear(6, 50, bias=bias).double()
            clean, masked = torch.randn(2, 3, 5, 6, dtype=torch.float64)
            weights = torch.rand(3, 5, dtype=torch.float64)
            expected = kl(head(masked.requires_grad_()), head(clean))
            (slope,) = torch.autograd.grad((expected * weights).sum(), masked)
            largest = []

            def linear(x, W, b, real=torch.nn.functional.linear, largest=largest):
                largest.append(x.shape[0] * len(W))
                return real(x, W, b)

            monkeypatch.setattr(heads, "SLICE", 200)
            monkeypatch.setattr(heads.F, "linear", linear)
            actual = heads.kl_through_head(head, masked, clean)
            (own,) = torch.autograd.grad((actual * weights).sum(), masked)
            monkeypatch.undo()
            torch.testing.assert_close(actual, expected)
            torch.testing.assert_close(own, slope)
            assert max(largest) <= 200

    def test_a_step_never_makes_all_logits(self, corpus, tokenizer, monkeypatch):
        model = llama()
        data = rankone.text(corpus, tokenizer, length=16, batch_size=4)
        totals = {}
        for size in (2**23, 1000):
            monkeypatch.setattr(heads, "SLICE", size)
            config = over_recipe({"engine": "exact"}, data)
            decomposed = build(model, {"model.layers.1.mlp.up_proj": 9, "model.layers.0.self_attn.o_proj": 9},
                               config, "logits")  # fmt: skip
            step = Step(decomposed, next(batches(data, 0)), config.losses, kl, masks=config.masks)
            assert step.clean.output.shape[-1] == (120 if size > 2000 else 16)
            total, _ = step.total()
            totals[size] = total, *torch.autograd.grad(total, decomposed.factors())
        for a, b in zip(*totals.values(), strict=True):
            torch.testing.assert_close(a, b)

    def test_logits_that_are_worked_on_are_compared_in_full(self, monkeypatch):
        class Capped(nn.Module):
            def __init__(self):
                super().__init__()
                self.inner, self.last = nn.Linear(4, 4), nn.Linear(4, 30)

            def forward(self, x):
                return self.last(self.inner(x)).tanh()

        monkeypatch.setattr(heads, "SLICE", 10)
        config = over_recipe({"divergence": "kl"})
        decomposed = build(Capped().eval(), {"inner": 5}, config, None)
        assert Step(decomposed, torch.randn(8, 4), config.losses, kl).clean.output.shape == (8, 30)


class TestLlama:
    def test_as_written(self, corpus, tokenizer):
        model = llama()
        before = fingerprint(model), {n: set(m.__dict__) for n, m in model.named_modules()}
        data = rankone.text(str(corpus), tokenizer, length=16, batch_size=4)
        result = rankone.decompose(model, data, LAYERS, SETTINGS, progress=False)
        assert result.config.divergence == "kl"
        assert result.model.output == "logits"
        assert (fingerprint(model), {n: set(m.__dict__) for n, m in model.named_modules()}) == before
        found = result.examples("model.layers.1.mlp.up_proj", 17)
        text = repr(found)
        assert text.startswith("subcomponent 17 of model.layers.1.mlp.up_proj: on at ")
        g = result.importances(next(batches(data, 0, stream="evaluation")))["model.layers.1.mlp.up_proj"]
        if bool((g[..., 17] > 0.1).any()):
            assert "«" in text
            assert "<mark" in found._repr_html_()
        for row in found:
            words = "".join(row["passage"].pieces)
            assert words in corpus.read_text() or "<end>" in words

    def test_it_is_resumed_to_the_bit(self, corpus, tokenizer, tmp_path):
        data = rankone.text(corpus, tokenizer, length=16, batch_size=4)
        whole = rankone.decompose(llama(), data, LAYERS, SETTINGS, progress=False)

        def stop(progress):
            if progress.step == 3:
                raise RuntimeError("killed")

        with pytest.raises(RuntimeError, match="killed"):
            rankone.decompose(llama(), data, LAYERS, SETTINGS, out=tmp_path / "r", observer=stop)
        again = rankone.text(corpus, tokenizer, length=16, batch_size=4)
        resumed = rankone.decompose(
            llama(), again, LAYERS, SETTINGS, out=tmp_path / "r", resume=True, progress=False
        )
        for name, tensor in whole.model.named_tensors().items():
            assert torch.equal(tensor, resumed.model.named_tensors()[name]), name

    def test_by_directory(self, corpus, tokenizer, tmp_path):
        model = llama()
        model.save_pretrained(tmp_path / "model")
        tokenizer.save_pretrained(tmp_path / "model")
        here = str(tmp_path / "model")
        assert fingerprint(load_model(here)) == fingerprint(model)
        result = rankone.decompose(
            here, rankone.text(corpus, here, length=8, batch_size=2), LAYERS, {"steps": 1}, progress=False
        )
        assert result.layers == [f"model.layers.1.mlp.{name}_proj" for name in ("gate", "up", "down")]
        assert load_tokenizer(here).decode(tokenizer("the cat")["input_ids"]) == "the cat"


class TestBadInput:
    @pytest.mark.parametrize(
        ("source", "message"),
        [
            ([], "The corpus is empty"),
            ([""], "The corpus has 1 tokens, fewer than one passage of length=16"),
            (["the cat"], r"fewer than one passage of length=16. Give more text or a smaller length"),
            ("nowhere.txt", r"There is no file or folder 'nowhere.txt'. To give text itself, pass a list"),
            ([{"body": "x"}], r"A row has body and no 'text'. Name its text with column="),
            ([3.5], "A document is 3.5; expected a text or token ids"),
            ([[-1, 3]], "-1 is no token id"),
            (torch.rand(3), "token ids are whole numbers"),
            (7, "source is 7; expected a text file"),
        ],
    )
    def test_no_corpus(self, source, message, tokenizer):
        with pytest.raises(BatchError, match=message):
            rankone.text(source, tokenizer, length=16)

    def test_no_folder_of_texts_and_no_utf8(self, tmp_path, tokenizer):
        with pytest.raises(BatchError, match=r"has no file \*.txt. Name them with files="):
            rankone.text(tmp_path, tokenizer)
        (tmp_path / "latin.txt").write_bytes(b"caf\xe9 noir")
        with pytest.raises(BatchError, match=r"latin.txt is no UTF-8 text"):
            rankone.text(tmp_path, tokenizer)

    def test_senseless_settings(self, corpus, tokenizer):
        with pytest.raises(ConfigError, match="length is 0; expected a whole number from 1"):
            rankone.text(corpus, tokenizer, length=0)
        with pytest.raises(ConfigError, match=r"held_out is 1.0; expected a share"):
            rankone.text(corpus, tokenizer, held_out=1.0)
        with pytest.raises(ConfigError, match="Text needs a tokenizer"):
            rankone.text(["words"])
        with pytest.raises(ConfigError, match=r"tokenizer is 3; expected a transformers tokenizer"):
            rankone.text(["words"], 3)
        with pytest.raises(BatchError, match="where= gave None; expected a tensor of shape"):
            rankone.text(corpus, tokenizer, length=8, where=lambda ids: None).batch([0])

    def test_a_damaged_cache_is_noticed(self, corpus, tokenizer, tmp_path):
        rankone.text(corpus, tokenizer)
        (path,) = (tmp_path / "cache").glob("*.tokens")
        path.write_bytes(path.read_bytes()[:-1])
        with pytest.raises(BatchError, match=r"is damaged. Delete it"):
            rankone.text(corpus, tokenizer)

    def test_a_tokenizer_that_does_not_fit_and_a_sequence_that_is_too_long(self, corpus, tokenizer):
        data = rankone.text(corpus, tokenizer, length=8, batch_size=2)
        with pytest.raises(
            BatchError, match=r"The tokenizer does not fit the model: .* embedding has 20 rows"
        ):
            rankone.decompose(llama(vocab_size=20), data, LAYERS)
        with pytest.raises(
            BatchError, match=r"Passages have length=80, but the model's context is 64 tokens"
        ):
            rankone.decompose(llama(), rankone.text(corpus, tokenizer, length=80), LAYERS)

    def test_models_that_cannot_be_loaded(self, tmp_path, monkeypatch):
        with pytest.raises(TargetError, match="There is no directory"):
            load_model(tmp_path / "nothing")
        with pytest.raises(TargetError, match=r"There is no file .*x.gguf"):
            load_model(tmp_path / "x.gguf")
        (tmp_path / "file.txt").write_text("no model")
        with pytest.raises(TargetError, match="is a file; expected a directory"):
            load_model(tmp_path / "file.txt")
        (tmp_path / "odd").mkdir()
        (tmp_path / "odd" / "config.json").write_text('{"model_type": "unheard_of"}')
        with pytest.raises(
            TargetError, match=r"cannot be loaded: .*(?s:.*)it needs config.json with a known model_type"
        ):
            load_model(tmp_path / "odd")

    def test_a_hub_name_without_network(self, monkeypatch):
        def no_network(*_, **__):
            raise OSError("We couldn't connect to 'https://huggingface.co' to load the files")

        monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", no_network)
        with pytest.raises(
            TargetError, match=r"'some/model' cannot be loaded: We couldn't connect .* Check the name"
        ):
            rankone.decompose("some/model", [torch.zeros(1, 2)], LAYERS)

    def test_no_checkpoint_of_llama2c(self, tmp_path):
        (tmp_path / "x.bin").write_bytes(b"no checkpoint at all, but long enough")
        with pytest.raises(RankoneError, match=r"is no checkpoint of llama2.c: its first numbers are"):
            load_model(tmp_path / "x.bin")


@pytest.fixture(scope="module")
def result(tokenizer):
    data = rankone.text([WORDS[i % 40 :] for i in range(60)], tokenizer, length=16, batch_size=4)
    layers = {"model.layers.1.mlp.up_proj": 20, "model.layers.0.self_attn.o_proj": 20}
    return rankone.decompose(llama(), data, layers, {"steps": 2}, progress=False)


class TestInText:
    """What is said of a decomposition in the terms of a language model."""

    def test_cross_entropy_and_kl_are_those_of_logits(self, result, monkeypatch):
        found = {}
        for size in (2**23, 500):  # in full, and by slices through the head
            monkeypatch.setattr(heads, "SLICE", size)
            found[size] = result.in_text(n_batches=1)
        for a, b in zip(*(measures.table.rows for measures in found.values()), strict=True):
            assert a[1:] == pytest.approx(b[1:], abs=1e-5)
        rows = {row["masks"]: row for row in found[500].table}
        assert list(rows) == [
            "target", "unmasked", "stochastic", "importances", "rounded", "attacked", "all zero"
        ]  # fmt: skip
        batch = next(batches(result.data, 0, stream="evaluation"))
        ids, model = batch["input_ids"], result.model.target
        logits = model(ids).logits[:, :-1].flatten(0, 1)
        loss = nn.functional.cross_entropy(logits, ids[:, 1:].flatten()).detach()
        assert rows["target"]["cross-entropy"] == pytest.approx(float(loss), rel=1e-5)
        nothing = result.ablated(keep={name: [] for name in result.layers})(ids).logits
        assert rows["all zero"]["KL from the target"] == pytest.approx(
            float(kl(nothing, model(ids).logits.detach()).mean()), rel=1e-4
        )
        assert rows["target"]["share recovered"] == 1
        assert rows["all zero"]["share recovered"] == 0
        assert "L0 per position" in repr(found[500])
        assert len(found[500].spectrum["model.layers.1.mlp.up_proj"]) == 20

    def test_a_card_says_what_a_part_does(self, result, monkeypatch):
        layer = "model.layers.1.mlp.up_proj"
        batch = next(batches(result.data, 0, stream="evaluation"))
        g = result.importances(batch)[layer]
        c = int((g > 0.1).float().mean((0, 1)).argmax())
        on = g[..., c] > 0.1
        assert bool(on.any())
        monkeypatch.setattr(heads, "SLICE", 500)
        found = result.card(layer, c, n_batches=1)
        ids = batch["input_ids"]
        clean = result.model.target(ids).logits.detach().log_softmax(-1)
        without = result.ablated(drop={layer: [c]})(ids).logits.log_softmax(-1)
        assert found.rate == pytest.approx(float(on.float().mean()))
        assert found.cost_on == pytest.approx(float(kl(without, clean)[on].mean()), rel=1e-2, abs=1e-8)
        change = (clean - without)[on].mean(0)
        assert found.raises[0][1] == pytest.approx(float(change.max()), abs=1e-5)
        assert found.lowers[0][1] == pytest.approx(float(change.min()), abs=1e-5)
        assert found.raises[0][0] == result.data.pieces([int(change.argmax())])[0]
        assert "without it alone: KL" in repr(found)

    def test_an_edited_model_writes_and_says_what_else_changed(self, result, tokenizer):
        layer = "model.layers.1.mlp.up_proj"
        other = rankone.text([WORDS * 20], tokenizer, length=16, batch_size=2)
        edited = result.edited_text(drop={layer: list(range(20))}, other=other)
        assert [row["text"] for row in edited.side_effects] == ["its own text", "other text"]
        assert all(row["KL"] > 0 for row in edited.side_effects)
        assert all(row["KL"] == 0 for row in result.edited_text(drop={layer: []}, n_batches=1).side_effects)
        written = edited.generate("the cat", 5)
        assert written.startswith("the cat")
        assert len(written) > len("the cat")
        ids = torch.tensor([tokenizer("the cat")["input_ids"]])
        expected = edited.model.generate(
            ids, max_new_tokens=5, do_sample=False, pad_token_id=0, eos_token_id=[]
        )
        assert written == tokenizer.decode(expected[0].tolist())
        assert "What changed:" in repr(edited)

    def test_it_needs_text(self, result):
        with pytest.raises(
            BatchError, match=r"This looks at text, and the data is a Tensor. Pass data=rankone"
        ):
            result.in_text(torch.zeros(2, 3))
        with pytest.raises(BatchError, match="the data is a list"):
            result.edited_text(drop={}, other=[torch.zeros(1, 2)])


class TestTargeted:
    """Few parts explain the target text; everywhere else the delta component stays on."""

    @pytest.fixture
    def both(self, tokenizer):
        prompts = rankone.text(["the cat sat", "the dog ran"], tokenizer, length=16, batch_size=2, pack=False,
                               held_out=0.0)  # fmt: skip
        return rankone.targeted(
            target_data=prompts, other_data=rankone.text([WORDS * 20], tokenizer, length=16, batch_size=3)
        )

    def test_delta_stays_on_elsewhere(self, both):
        config = over_recipe({}, both)
        assert config.masks.delta
        model = build(llama(), LAYERS, config, "logits")
        batch = next(batches(both, 0))
        assert len(batch.weights) == 5
        exact = Step(model, batch, config.losses, kl, masks=config.masks)
        ones = exact.output(exact.masks("ones", 0))
        torch.testing.assert_close(ones[2:], exact.clean.output[2:])
        assert not torch.allclose(ones[:2], exact.clean.output[:2], atol=1e-4)
        alone = model.masked(batch, exact.masks("ones", 0))
        torch.testing.assert_close(ones[:2], alone[:2])
        fast = FastStep(model, batch, config.losses, kl, masks=config.masks)
        torch.testing.assert_close(fast.total()[0], exact.total()[0], rtol=1e-3, atol=1e-5)

    def test_it_trains_and_shows_the_target_text(self, both):
        result = rankone.decompose(llama(), both, LAYERS, {"steps": 2}, progress=False)
        found = result.examples("model.layers.1.mlp.up_proj", 3)
        assert all("the" in "".join(row["passage"].pieces) for row in found)
        edited = result.edited_text(
            drop={"model.layers.1.mlp.up_proj": [3]}, data=both.target, other=both.other
        )
        assert len(edited.side_effects) == 2

    def test_positions_that_do_not_count_are_still_read(self, tokenizer):
        """Only the last position of a prompt is explained, and the model sees all of it."""

        def last(ids):
            return torch.arange(ids.shape[1]).expand(ids.shape) == ids.shape[1] - 1

        prompts = rankone.text([WORDS * 4], tokenizer, length=8, batch_size=2, where=last)
        data = rankone.targeted(prompts, rankone.text([WORDS * 20], tokenizer, length=16, batch_size=3))
        batch = next(batches(data, 0))
        assert batch.weights[:2].sum(1).tolist() == [1, 1]
        attended = batch.inputs["attention_mask"]
        assert attended[:2].sum(1).tolist() == [8, 8]
        assert attended[2:].all()
        model = llama()
        whole = model(batch.inputs["input_ids"][:2, :8]).logits
        torch.testing.assert_close(model(**batch.inputs).logits[:2, :8], whole)
        result = rankone.decompose(model, prompts, LAYERS, {"steps": 2}, progress=False)
        found = result.examples("model.layers.1.mlp.up_proj", 3)
        assert all(len(row["passage"].pieces) > 1 for row in found)
        assert len(result.edited_text(drop={}, data=prompts).side_effects) == 1

    def test_it_needs_two_texts(self, both):
        with pytest.raises(
            ConfigError, match=r"other_data is \[1\]; expected text, as rankone.text gives it"
        ):
            rankone.targeted(both.target, [1])
