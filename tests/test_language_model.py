"""A real GPT-2 (small, random weights): dict batches, logits by name, KL, Conv1D layers, tied
embedding and unembedding."""

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

import rankone
from rankone.files import fingerprint

CONFIG = {
    "steps": 40,
    "divergence": "kl",
    "tied": {"lm_head": "transformer.wte"},
    "optimizer": {"lr": 1e-2},
    "losses": {
        "faithfulness": {},
        "stochastic_recon": {},
        "stochastic_recon_layerwise": {},
        "importance_minimality": {"coefficient": 1e-5},
    },
}


@pytest.fixture(scope="module")
def decomposed():
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=23, n_positions=8, n_embd=12, n_layer=2, n_head=2)).eval()
    before = fingerprint(model), {name: set(m.__dict__) for name, m in model.named_modules()}

    def data(generator):
        return {"input_ids": torch.randint(0, 23, (4, 8), generator=generator)}

    layers = {
        "transformer.wte": 30,
        "lm_head": 30,
        "transformer.h.*.attn.c_attn": 20,
        "transformer.h.*.mlp.*": 16,
    }
    result = rankone.decompose(model, data, layers, CONFIG, output="logits")
    assert (fingerprint(model), {name: set(m.__dict__) for name, m in model.named_modules()}) == before
    return model, result


def test_it_trains(decomposed):
    _, result = decomposed
    assert len(result.layers) == 2 + 2 * 3
    assert result.history[-1]["loss"]["total"] < result.history[0]["loss"]["total"]
    assert "lm_head.U" not in result.model.trained()


def test_importances_have_positions(decomposed):
    _, result = decomposed
    importances = result.importances({"input_ids": torch.zeros(2, 5, dtype=torch.long)})
    assert importances["transformer.wte"].shape == (2, 5, 30)
    assert importances["transformer.h.1.attn.c_attn"].shape == (2, 5, 20)


def test_ablated_models_are_called_like_the_original(decomposed):
    model, result = decomposed
    ids = torch.randint(0, 23, (2, 5))
    everything = result.ablated({})(input_ids=ids).logits
    torch.testing.assert_close(everything, model(input_ids=ids).logits)
    nothing = result.ablated({"lm_head": []})(input_ids=ids).logits
    assert nothing.abs().max() == 0


def test_it_loads_again(decomposed, tmp_path):
    model, result = decomposed
    loaded = rankone.load(result.save(tmp_path / "d"), model)
    batch = {"input_ids": torch.arange(6).view(1, 6)}
    assert torch.equal(loaded.importances(batch)["lm_head"], result.importances(batch)["lm_head"])
