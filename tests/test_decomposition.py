"""The Python front door: decompose, look, ablate, save, load."""

import json

import pytest
import torch
from torch import nn

import rankone
from conftest import small_mlp, uniform
from rankone import DecompositionConfig, RankoneError
from rankone.data import batches
from rankone.evaluate import evaluate
from rankone.files import load_sealed, save_sealed
from rankone.masks import Mask

CONFIG = DecompositionConfig(steps=4, log_every=2, importance={"kind": "mlp", "options": {"d_gate": 4}})


@pytest.fixture(scope="module")
def made():
    target = small_mlp()
    return target, rankone.decompose(target, uniform(), {"0": 5, "2": 7}, CONFIG)


def test_history_and_views(made):
    target, decomposition = made
    assert decomposition.layers == ["0", "2"]
    assert [r["step"] for r in decomposition.history] == [0, 2, 3]
    assert set(decomposition.history[0]["loss"]) == {"total", *CONFIG.losses}
    view = decomposition.components("0")
    assert view.C == 5
    assert torch.equal(view.target, target[0].weight)
    torch.testing.assert_close(sum(view.matrix(c) for c in range(5)), view.sum())
    torch.testing.assert_close(view.norms(), torch.stack([view.matrix(c).norm() for c in range(5)]))
    with pytest.raises(RankoneError, match=r"No decomposed layer is called '1'. There are: '0', '2'"):
        decomposition.components("1")


def test_total_is_the_weighted_sum(made):
    loss = made[1].history[-1]["loss"]
    expected = sum(CONFIG.losses[name].coefficient * value for name, value in loss.items() if name != "total")
    assert loss["total"] == pytest.approx(expected, rel=1e-5)


def test_ablation(made):
    target, decomposition = made
    x = torch.rand(6, 4)
    view = decomposition.components("0")
    kept = view.U[:, [1, 3]] @ view.V[[1, 3]]
    expected = target[2](torch.relu(x @ kept.T + target[0].bias))
    torch.testing.assert_close(decomposition.ablated({"0": [1, 3]})(x), expected)
    chosen = torch.tensor([False, True, False, True, False])
    torch.testing.assert_close(decomposition.ablated({"0": chosen})(x), expected)
    torch.testing.assert_close(decomposition.ablated({})(x), target(x))
    nothing = decomposition.ablated({"0": []})(x)
    torch.testing.assert_close(nothing, target[2](torch.relu(target[0].bias)).expand(6, 4))
    assert list(decomposition.ablated({"0": [1]}).parameters()) == []
    with pytest.raises(
        RankoneError, match=r"holds numbers of type torch.float32; expected indices or a boolean choice"
    ):
        decomposition.ablated({"0": decomposition.importances(x)["0"][0]})
    with pytest.raises(
        RankoneError, match=r"keep\['0'\] names subcomponent 5, but the layer has subcomponents 0 to 4"
    ):
        decomposition.ablated({"0": [5]})
    with pytest.raises(RankoneError, match=r"a boolean choice needs C = 5 entries"):
        decomposition.ablated({"0": torch.tensor([True])})


def test_save_and_load(made, tmp_path):
    target, decomposition = made
    decomposition.save(tmp_path / "d")
    loaded = rankone.load(tmp_path / "d", target)
    x = torch.rand(3, 4)
    for name, g in decomposition.importances(x).items():
        assert torch.equal(loaded.importances(x)[name], g)
    assert loaded.history == decomposition.history
    assert loaded.config == decomposition.config
    info = json.loads((tmp_path / "d" / "decomposition.json").read_text())
    assert info["rankone"] == rankone.__version__
    assert len(info["target"]["sha256"]) == 64
    stored = (tmp_path / "d" / "components.safetensors").read_bytes()
    assert target[0].weight.detach().numpy().tobytes() not in stored


def test_loading_for_another_network_is_refused(made, tmp_path):
    _, decomposition = made
    decomposition.save(tmp_path / "d")
    with pytest.raises(RankoneError, match=r"made from another network.*Load the exact weights"):
        rankone.load(tmp_path / "d", small_mlp(seed=1))
    with pytest.raises(RankoneError, match="There is no file"):
        rankone.load(tmp_path / "nothing", small_mlp())


def test_a_damaged_artifact_is_refused(made, tmp_path):
    target, decomposition = made
    path = decomposition.save(tmp_path / "d") / "components.safetensors"
    path.write_bytes(path.read_bytes()[:-4])
    with pytest.raises(RankoneError, match=r"components.safetensors was changed after rankone wrote it"):
        rankone.load(tmp_path / "d", target)


def test_files_of_two_artifacts_cannot_be_mixed(made, tmp_path):
    target, decomposition = made
    other = rankone.decompose(target, uniform(), {"0": 5, "2": 7}, CONFIG.model_copy(update={"seed": 1}))
    decomposition.save(tmp_path / "a")
    other.save(tmp_path / "b")
    (tmp_path / "a/components.safetensors").write_bytes((tmp_path / "b/components.safetensors").read_bytes())
    with pytest.raises(RankoneError, match=r"a/components.safetensors was changed after rankone wrote it"):
        rankone.load(tmp_path / "a", target)
    description = tmp_path / "b/decomposition.json"
    description.write_text(description.read_text().replace('"seed": 1', '"seed": 2'))
    with pytest.raises(RankoneError, match=r"b/decomposition.json was changed after rankone wrote it"):
        rankone.load(tmp_path / "b", target)
    (tmp_path / "b/manifest.json").unlink()  # as somebody may send it: the one sealed file says all
    assert rankone.load(tmp_path / "b", target).history == other.history


def test_buffers_of_importance_functions_are_part_of_it(tmp_path):
    @rankone.register_importance("counting")
    class Counting(rankone.ImportanceFunction):
        def __init__(self, C, generator):
            super().__init__()
            self.scale = nn.Parameter(torch.ones(C))
            self.register_buffer("seen", torch.zeros(()))

        def forward(self, h):
            if torch.is_grad_enabled():
                self.seen += 1
            return h * self.scale + self.seen

    try:
        config = CONFIG.model_copy(
            update={"importance": CONFIG.importance.model_copy(update={"kind": "counting", "options": {}})}
        )
        target = small_mlp()
        decomposition = rankone.decompose(target, uniform(), {"0": 3}, config)
        assert decomposition.model.importance.functions["0"].seen == config.steps
        loaded = rankone.load(decomposition.save(tmp_path / "d"), target)
        assert loaded.model.importance.functions["0"].seen == config.steps
        assert "0.importance.seen" not in decomposition.model.trained()
    finally:
        del rankone.importance.IMPORTANCES["counting"]


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode], ids=["no_grad", "inference_mode"])
def test_decomposing_inside_other_grad_modes(made, context):
    target = small_mlp()
    with context():
        decomposition = rankone.decompose(target, uniform(), {"0": 5, "2": 7}, CONFIG)
    assert decomposition.history == made[1].history


def test_a_target_made_in_inference_mode_is_refused():
    with torch.inference_mode():
        target = small_mlp()
    with pytest.raises(RankoneError, match=r"Layer '0' was created under torch.inference_mode"):
        rankone.decompose(target, uniform(), {"0": 5}, CONFIG)


def test_an_artifact_of_another_format_is_refused(made, tmp_path):
    target, decomposition = made
    tensors, info = load_sealed(decomposition.save(tmp_path / "d") / "components.safetensors")
    (tmp_path / "e").mkdir()
    save_sealed(tmp_path / "e/components.safetensors", tensors, info | {"format": 99})
    with pytest.raises(RankoneError, match="has format 99; this version of rankone"):
        rankone.load(tmp_path / "e", target)


def test_output_getters_survive(tmp_path):
    class Tuple(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = nn.Linear(4, 4)

        def forward(self, x):
            return (self.a(x),)

    target = Tuple().eval()
    rankone.decompose(target, uniform(), {"a": 3}, CONFIG, output=0).save(tmp_path / "index")
    assert rankone.load(tmp_path / "index", target).importances(torch.rand(2, 4))["a"].shape == (2, 3)
    rankone.decompose(target, uniform(), {"a": 3}, CONFIG, output=lambda r: r[0]).save(tmp_path / "function")
    with pytest.raises(
        RankoneError, match=r"was made with the function .*<lambda> as output=; pass it to load"
    ):
        rankone.load(tmp_path / "function", target)
    assert rankone.load(tmp_path / "function", target, output=lambda r: r[0]).layers == ["a"]


def test_any_callable_is_a_divergence():
    seen = []

    def absolute(output, target):
        seen.append(output.shape)
        return (output - target).abs().mean()

    decomposition = rankone.decompose(small_mlp(), uniform(), {"0": 3}, CONFIG, divergence=absolute)
    assert seen
    assert decomposition.history[-1]["loss"]["stochastic_recon"] > 0
    with pytest.raises(RankoneError, match=r"must return one number per datapoint"):
        rankone.decompose(
            small_mlp(),
            lambda g: rankone.WeightedBatch(torch.rand(3, 4, generator=g), torch.ones(3)),
            {"0": 3},
            CONFIG,
            divergence=absolute,
        )


def test_kl_on_a_language_shaped_model():
    torch.manual_seed(0)
    target = nn.Sequential(nn.Embedding(11, 6), nn.Linear(6, 11)).eval()
    config = DecompositionConfig(steps=3, divergence="kl")
    decomposition = rankone.decompose(
        target, lambda g: torch.randint(0, 11, (2, 5), generator=g), {"*": 8}, config
    )
    assert decomposition.importances(torch.zeros(2, 5, dtype=torch.long))["0"].shape == (2, 5, 8)


def test_same_seed_same_result_and_other_seed_other_result():
    def weights(seed):
        config = CONFIG.model_copy(update={"seed": seed})
        return rankone.decompose(small_mlp(), uniform(), {"*": 5}, config).components("0").U

    assert torch.equal(weights(0), weights(0))
    assert not torch.equal(weights(0), weights(1))


def test_resume_needs_a_directory_and_a_directory_is_not_overwritten(tmp_path):
    with pytest.raises(RankoneError, match="resume=True needs out="):
        rankone.decompose(small_mlp(), uniform(), {"0": 3}, CONFIG, resume=True)
    rankone.decompose(small_mlp(), uniform(), {"0": 3}, CONFIG, out=tmp_path)
    with pytest.raises(RankoneError, match=r"already holds a run. Pass resume=True"):
        rankone.decompose(small_mlp(), uniform(), {"0": 3}, CONFIG, out=tmp_path)
    for path in (tmp_path / "checkpoints").iterdir():
        path.unlink()
    with pytest.raises(RankoneError, match=r"already holds a run"):
        rankone.decompose(small_mlp(), uniform(), {"0": 3}, CONFIG, out=tmp_path)


def test_a_config_may_be_a_plain_mapping():
    decomposition = rankone.decompose(
        small_mlp(), uniform(), {"0": 3}, {"steps": 2, "optimizer": {"lr": 0.1}}
    )
    assert decomposition.config.optimizer.lr == 0.1
    with pytest.raises(RankoneError, match=r"stepz: unknown setting. Did you mean 'steps'"):
        rankone.decompose(small_mlp(), uniform(), {"0": 3}, {"stepz": 2})
    with pytest.raises(RankoneError, match=r"stepz: unknown setting. Did you mean 'steps'"):
        DecompositionConfig(stepz=2)


def test_evaluation_uses_the_divergence_of_training(tmp_path):
    def absolute(output, target):
        return (output - target).abs().mean(-1)

    target = small_mlp()
    decomposition = rankone.decompose(target, uniform(), {"0": 3}, CONFIG, divergence=absolute)
    x = next(batches(uniform(), 0, stream="evaluation"))
    model = decomposition.model
    expected = absolute(model.masked(x, {"0": Mask(torch.ones(3))}), target(x)).mean().item()
    measured = evaluate(decomposition, uniform(), n_batches=1).reconstruction["ones"]
    assert measured == pytest.approx(expected)
    path = decomposition.save(tmp_path / "d")
    with pytest.raises(
        RankoneError, match=r"made with the function .*absolute as divergence=; pass it to load"
    ):
        rankone.load(path, target)
    assert rankone.load(path, target, divergence=absolute).divergence is absolute


def test_evaluation_without_ground_truth():
    decomposition = rankone.decompose(small_mlp(), uniform(), {"*": 5}, CONFIG)
    found = evaluate(decomposition, [torch.rand(9, 4)])
    assert found.recovered is None
    assert found.to_dict()["mmcs"] is None
    assert set(found.reconstruction) == {"ones", "stochastic", "importance", "rounded", "zero"}
    assert set(found.l0) == {"0", "2"}


def test_about_a_dozen_public_names():
    assert 10 <= len(rankone.__all__) <= 20
    assert all(hasattr(rankone, name) for name in rankone.__all__)
