"""The collection of networks with known mechanisms: they are what they claim to be, the judge is right
about right and wrong answers, and the benchmark runs, resumes and explains itself."""

import json
import re
import warnings
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from conftest import ROOT, rankone_main
from rankone.collection import ENTRIES, base, bench, judge, network, page, split, true_decomposition
from rankone.collection.base import Dense, Mechanisms
from rankone.collection.judge import count_errors
from rankone.data import batches, inputs_of
from rankone.errors import ConfigError, LayerError, TargetError
from rankone.metrics import identity_check
from rankone.model import DecomposedModel

NAMES = [
    pytest.param(name, marks=[pytest.mark.slow] if entry.trains or name.startswith("resid") else [])
    for name, entry in ENTRIES.items()
]
BUILT = ["blocks_mixed", "attention_embedded", "depth_two_blocks", "xors_built", "tms_5-2"]


@pytest.fixture(scope="module", autouse=True)
def _own_cache(tmp_path_factory):
    """Networks are trained for these tests, whatever the user's cache holds."""
    directory = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(base, "cache_directory", lambda: directory)
        yield


def matrix(known, layer):
    return DecomposedModel(known.model, {layer: 1}, importance="linear").layer(layer).matrix()


@pytest.mark.parametrize("name", NAMES)
def test_a_network_is_what_it_claims_to_be(name):
    random_state = torch.random.get_rng_state()
    known = network(name)
    assert torch.equal(torch.random.get_rng_state(), random_state)
    assert known.good
    assert not known.model.training
    assert set(known.truth) == set(known.layers)
    first, again = (inputs_of(next(batches(known.data, seed=3))) for _ in range(2))
    assert torch.equal(first, again)
    on_data, on_probe = known.needed(first), known.needed(known.probe)
    for layer, truth in known.truth.items():
        W = matrix(known, layer)
        if isinstance(truth, Dense):
            assert int(torch.linalg.matrix_rank(W)) == truth.k
            continue
        assert truth.matrices.shape[1:] == W.shape
        total, of_W = truth.on_support(truth.matrices.sum(0)), truth.on_support(W)
        torch.testing.assert_close(total, of_W, atol=1e-5 * float(of_W.abs().max()), rtol=0)
        ranks = [int(torch.linalg.matrix_rank(m, rtol=1e-4)) for m in truth.matrices]
        assert ranks == list(truth.ranks)
        for needed, x in ((on_data[layer], first), (on_probe[layer], known.probe)):
            assert needed.dtype == torch.bool
            assert needed.shape[0] == x.shape[0]
            assert needed.shape[-1] == len(truth.matrices)
        occurs = on_data[layer].flatten(0, -2).any(0)
        shown = known.needed_on_probe(layer).any(0)
        assert bool((shown | ~occurs).all()), "the probe shows every mechanism that occurs"
    assert known.layers.items() == {n: C for n, C in known.layers.items() if C >= 1}.items()
    assert network(name).digest == known.digest


@pytest.mark.parametrize("name", NAMES)
def test_the_truth_is_judged_right(name):
    known = network(name)
    judgement = judge(known, true_decomposition(known), n_batches=1)
    assert judgement.errors == 0
    assert judgement.recovered
    assert judgement.cosine is None or judgement.cosine == pytest.approx(1)
    assert judgement.l0 == pytest.approx(judgement.true_l0)
    exact = "resid" not in name
    assert judgement.shares["sum"] == pytest.approx(0, abs=1e-6 if exact else 0.1)
    assert judgement.shares["attack_20"] < 0.12


class Changed:
    """A decomposition with something done to its importances and factors."""

    def __init__(self, found, layer, g=lambda g: g, factors=lambda U, V: (U, V)):
        self.found, self.layer, self.g, self.factors = found, layer, g, factors

    def importances(self, batch):
        given = self.found.importances(batch)
        return given | {self.layer: self.g(given[self.layer])}

    def components(self, layer):
        of = self.found.components(layer)
        if layer != self.layer:
            return of
        U, V = self.factors(of.U, of.V)
        return SimpleNamespace(U=U, V=V)


def first_off(g):
    return torch.cat([torch.zeros_like(g[..., :1]), g[..., 1:]], -1)


def first_twice(g):
    return torch.cat([g, g[..., :1]], -1)


def first_two_together(g):
    both = g[..., :2].amax(-1, keepdim=True)
    return torch.cat([both, g[..., 2:]], -1)


def one_always(g):
    return torch.cat([g, torch.ones_like(g[..., :1])], -1)


def half_and_half(U, V):
    return torch.cat([U[:, :1] / 2, U[:, 1:], U[:, :1] / 2], 1), torch.cat([V, V[:1]])


def one_more(U, V):
    return torch.cat([U, U[:, :1] * 0], 1), torch.cat([V, V[:1]])


def dropped(U, V):
    return U[:, 1:], V[1:]


BROKEN = {
    "missing": (first_off, lambda U, V: (U, V)),
    "split": (first_twice, half_and_half),
    "merged": (first_two_together, dropped),
    "stray": (one_always, one_more),
}


@pytest.mark.parametrize("kind", BROKEN)
@pytest.mark.parametrize("name", BUILT)
def test_wrong_answers_are_told_apart(name, kind):
    known = network(name)
    layer = next(
        n
        for n, t in known.truth.items()
        if isinstance(t, Mechanisms) and known.needed_on_probe(n)[:, 0].any()
    )
    g, factors = BROKEN[kind]
    judgement = judge(known, Changed(true_decomposition(known), layer, g, factors), n_batches=1)
    assert judgement.total(kind) > 0
    assert not judgement.recovered
    assert judgement.errors == sum(judgement.total(k) for k in BROKEN)
    others = {k for k in BROKEN if judgement.total(k)} - {kind}
    # With a part less, somebody's part is missing; everything else goes by one name.
    assert others <= ({"missing", "stray"} if kind == "merged" else set())


def test_right_importances_of_wrong_parts_are_not_enough():
    known = network("blocks_mixed")
    shuffled = Changed(true_decomposition(known), "read", factors=lambda U, V: (U.roll(1, 1), V))
    judgement = judge(known, shuffled, n_batches=1)
    assert judgement.errors == 0
    assert judgement.layers["read"].cosine < 0.5
    assert not judgement.recovered


@pytest.mark.parametrize("seed", range(20))
def test_the_judge_agrees_with_the_papers_check(seed):
    known = network("tms_5-2")
    generator = torch.Generator().manual_seed(seed)
    g = torch.rand(5, 9, generator=generator) ** 3
    g[range(5), torch.randperm(9, generator=generator)[:5]] = 1.0
    columns = Changed(
        SimpleNamespace(
            importances=lambda x: dict.fromkeys(known.layers, g if len(x) == 5 else torch.zeros(len(x), 9)),
            components=lambda layer: SimpleNamespace(
                U=torch.randn(matrix(known, layer).shape[0], 9, generator=generator),
                V=torch.randn(9, matrix(known, layer).shape[1], generator=generator),
            ),
        ),
        "embed",
    )
    columns.importances = lambda batch: dict.fromkeys(
        known.layers, g if batch is known.probe else torch.zeros(len(inputs_of(batch)), 9)
    )
    judgement = judge(known, columns, n_batches=1)
    assert judgement.layers["embed"].errors == identity_check(g).errors


@pytest.mark.parametrize(("sign", "right"), [(-1.0, True), (1.0, False)])
def test_two_signs_of_one_channel_may_share_a_part(sign, right):
    """Features that are written in opposite directions: two parts or one, either is right. Features
    that are written in the same direction are two."""
    W = torch.eye(3, 4)[:, [0, 0, 1, 2]]
    W[:, 1] *= sign
    model = torch.nn.Sequential(base.linear(W)).eval().requires_grad_(False)
    known = base.KnownNetwork(
        "own",
        model,
        lambda generator: torch.eye(4)[torch.randint(4, (64,), generator=generator)],
        {"0": 4},
        {"0": Mechanisms(base.columns(W))},
        0.75 * torch.eye(4),
        lambda x: {"0": x != 0},
    )

    class Shared:
        def components(self, layer):
            return SimpleNamespace(U=torch.eye(3), V=W.clone())

        def importances(self, x):
            return {"0": ((x @ W.T) != 0).float()}

    assert judge(known, Shared()).recovered == right
    assert judge(known, true_decomposition(known)).recovered


def test_too_few_parts_are_missing_ones():
    needed = torch.eye(3, dtype=torch.bool)
    assert count_errors(torch.eye(3)[:, :2], needed, [[0], [1], []], (1, 1, 1)) == (1, 0, 0, 0)
    assert count_errors(torch.eye(3)[:, :2], needed, [[0], [1], []], (1, 2, 1)) == (2, 0, 0, 0)


class Whole:
    """The truth as whole matrices, one for each mechanism."""

    def __init__(self, known):
        self.known = known

    def components(self, layer):
        return SimpleNamespace(matrices=self.known.truth[layer].matrices)

    def importances(self, batch):
        return {n: g.float() for n, g in self.known.needed(inputs_of(batch)).items()}


@pytest.mark.parametrize("name", ["blocks_mixed", "attention_head", "blocks_rank3"])
def test_whole_matrices_are_judged_alike(name):
    known = network(name)
    judgement = judge(known, Whole(known), n_batches=1)
    assert judgement.recovered
    assert judgement.shares["sum"] == pytest.approx(0, abs=1e-6)
    assert judgement.shares["attack_20"] < 1e-3
    parts = judge(known, true_decomposition(known), n_batches=1)
    assert judgement.shares["deletion"] == pytest.approx(parts.shares["deletion"], abs=1e-6)


def test_a_matrix_that_is_not_there_is_no_error():
    """A component may span layers and leave one alone."""
    known = network("depth_two_blocks")

    class Everywhere(Whole):
        def components(self, layer):
            matrices = self.known.truth[layer].matrices
            return SimpleNamespace(matrices=torch.cat([matrices, torch.zeros_like(matrices[:1])]))

        def importances(self, batch):
            return {n: one_always(g) for n, g in super().importances(batch).items()}

    assert judge(known, Everywhere(known), n_batches=1).recovered


def test_what_a_method_must_give():
    known = network("blocks_mixed")
    truth = true_decomposition(known)
    bare = SimpleNamespace(importances=truth.importances, components=lambda layer: SimpleNamespace(U=None))
    with pytest.raises(LayerError, match="neither factors"):
        judge(known, bare)
    short = Changed(truth, "read", g=lambda g: g[..., 1:])
    with pytest.raises(ConfigError, match=r"gives \(.*\) for layer 'read', which has 8 components"):
        judge(known, short)


# ---- the split


def test_the_split_is_as_it_was_drawn():
    families = {name: entry.family for name, entry in ENTRIES.items()}
    develop, held_out = split.drawn(families)
    assert (develop, held_out) == (split.DEVELOP, split.HELD_OUT)
    assert not develop & held_out
    assert len(split.names_in("paper")) == 7
    assert sorted(split.names_in("all")) == sorted(ENTRIES)
    assert len(ENTRIES) >= 28


# ---- kept weights


def constant(value):
    def fit(seed):
        model = torch.nn.Linear(2, 2)
        with torch.no_grad():
            for p in model.parameters():
                p.fill_(0 if seed < 0 else value + seed)
        return model

    return fit


def test_trained_weights_are_kept_and_damaged_ones_made_again(tmp_path, monkeypatch):
    monkeypatch.setattr(base, "cache_directory", lambda: tmp_path / "new")

    def good(model):
        return float(model.bias[0]) >= 2, {"bias": float(model.bias[0])}

    model, _, numbers = base.trained("x", {"a": 1}, constant(1.0), good)
    assert numbers == {"bias": 2.0}  # the second seed is the first good one
    (file,) = (tmp_path / "new").iterdir()
    kept, _, _ = base.trained("x", {"a": 1}, constant(7.0), good)
    assert torch.equal(kept.bias, model.bias)
    other, _, _ = base.trained("x", {"a": 2}, constant(7.0), good)
    assert float(other.bias[0]) == 7  # another recipe, another network
    content = bytearray(file.read_bytes())
    content[-1] ^= 255
    file.write_bytes(content)
    again, _, _ = base.trained("x", {"a": 1}, constant(7.0), good)
    assert float(again.bias[0]) == 7
    with pytest.raises(TargetError, match="None of 2 networks trained for y"):
        base.trained("y", {}, constant(-5.0), good, tries=2)


def test_without_a_cache_networks_are_trained_every_time(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setattr(base, "cache_directory", lambda: tmp_path / "file" / "below")
    model, good, _ = base.trained("x", {}, constant(1.0), lambda model: (True, {}))
    assert good
    assert float(model.bias[0]) == 1


# ---- the benchmark


def perfect(known, seed):
    return true_decomposition(known)


def blind(known, seed):
    truth = true_decomposition(known)
    return SimpleNamespace(
        components=truth.components,
        importances=lambda batch: {n: 0 * g for n, g in truth.importances(batch).items()},
    )


def test_a_method_is_run_and_resumed(tmp_path):
    calls = []

    def counted(known, seed):
        calls.append((known.name, seed))
        return true_decomposition(known)

    names = ["blocks_mixed", "xors_built"]
    first = bench.run(counted, names, 2, tmp_path)
    assert calls == [(name, seed) for name in names for seed in (0, 1)]
    assert all(result.recovered for result in first)
    lines = []
    assert bench.run(counted, names, 3, tmp_path, say=lines.append)[0] == first[0]
    assert calls[4:] == [(name, 2) for name in names]
    assert lines[0] == "4 of 6 results are there already."
    bench.run(counted, names[:1], 1, tmp_path, settings={"other": 1})
    assert len(calls) == 7
    bench.run(blind, names[:1], 1, tmp_path)
    content = json.loads((tmp_path / "results/blocks_mixed-seed0.json").read_text())
    assert content["result"]["judgement"]["missing"] > 0
    assert content["result"]["truth"]["attack_20"] < 1e-6


def test_a_result_of_another_network_is_made_again(tmp_path, monkeypatch):
    monkeypatch.setattr(bench, "_DIGESTS", {})
    before = bench.run(perfect, ["blocks_mixed"], 1, tmp_path)
    monkeypatch.setattr(bench, "_DIGESTS", {"blocks_mixed": "another"})
    lines = []
    after = bench.run(perfect, ["blocks_mixed"], 1, tmp_path, say=lines.append)
    assert "1 of 1" in lines[0]
    assert before[0].judgement == after[0].judgement


def test_a_result_of_other_code_is_made_again(tmp_path, monkeypatch):
    bench.run(perfect, ["blocks_mixed"], 1, tmp_path)
    monkeypatch.setattr(bench, "_code", lambda: "changed")
    lines = []
    bench.run(perfect, ["blocks_mixed"], 1, tmp_path, say=lines.append)
    assert "already" not in lines[0]


def test_a_method_that_fails_takes_no_other_with_it(tmp_path):
    def sometimes(known, seed):
        if known.name == "xors_built":
            raise ConfigError("not this one")
        return true_decomposition(known)

    results = bench.run(sometimes, ["xors_built", "blocks_mixed"], 1, tmp_path)
    assert [r.recovered for r in results] == [False, True]
    assert results[0].message == "not this one"
    made = page.table(results)
    assert made.rows[0][:5] == ("xors_built", "develop", "0 of 1", "", "failed")
    assert "failed" in page.table(results).markdown()


def test_nothing_to_run(tmp_path):
    for names, seeds in (([], 1), (["blocks_mixed"], [])):
        with pytest.raises(ConfigError, match="nothing to run"):
            bench.run(perfect, names, seeds, tmp_path)
    with pytest.raises(ConfigError, match="seeds is 0"):
        bench.run(perfect, ["blocks_mixed"], 0, tmp_path)
    with pytest.raises(ConfigError, match="Did you mean 'blocks_mixed'"):
        bench.run(perfect, ["block_mixed"], 1, tmp_path)


def test_the_page_stands_alone(tmp_path):
    results = bench.run(blind, ["blocks_mixed"], 1, tmp_path)
    results.append(replace(results[0], judgement=None, message="<b>broken</b>", seed=1))
    about = {"method": "blind", "settings": "", **bench.versions()}
    path = page.write(bench.RunDirectory.open(tmp_path), results, about)
    html = path.read_text()
    assert "blocks_mixed" in html
    assert "&lt;b&gt;broken" in html
    assert not re.search(r'(src|href)="', html)
    assert len(json.loads((tmp_path / "benchmark.json").read_text())["results"]) == 2


@pytest.mark.slow
def test_on_the_command_line(tmp_path, capsys):
    words = [
        "benchmark",
        "--only",
        "blocks_mixed",
        "xors_built",
        "steps=5",
        "--seeds",
        "1",
        "--out",
        str(tmp_path / "b"),
    ]
    rankone_main([*words, "--jobs", "2"])
    out = capsys.readouterr().out
    assert "2 networks, 1 seed each, 2 at a time" in out
    assert "develop 0 of 2 recovered" in out
    assert (tmp_path / "b/benchmark.html").exists()
    rankone_main([*words, "--jobs", "1"])
    assert "2 of 2 results are there already" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--only", "block_mixed"], "Did you mean 'blocks_mixed'"),
        (["--only", "steps=5"], "--only needs the name of a network"),
        (["--half", "held"], "Did you mean 'held_out'"),
        (["--only", "tms_5-2", "--half", "all"], "leave one of them out"),
        (["--seeds", "0"], "--seeds is 0"),
        (["--jobs", "0"], "--jobs is 0"),
        (["seed=5"], "seed cannot be set for a benchmark"),
        (["stepz=5"], "Did you mean 'steps'"),
        (["steps=none"], "steps"),
    ],
)
def test_what_the_command_says_about_mistakes(words, message, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit):
        rankone_main(["benchmark", *words])
    assert message in " ".join(capsys.readouterr().err.split())
    assert not list(tmp_path.iterdir())


def test_the_documented_method_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    text = (ROOT / "docs/benchmark.md").read_text()
    code, printed = re.search(r"```python\n(.*?)```\n\n```\n(.*?)```", text, re.DOTALL).groups()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        exec(code, {"__name__": "documented"})
    assert capsys.readouterr().out == printed


def test_every_network_is_documented():
    text = (ROOT / "docs/benchmark.md").read_text()
    for name, entry in ENTRIES.items():
        assert f"| `{name}` | {split.half_of(name)} | {entry.about} |" in text


def test_a_methods_own_verdict_is_shown_beside_the_truth(tmp_path):
    def sure(known, seed):
        found = true_decomposition(known) if seed == 0 else blind(known, seed)
        return SimpleNamespace(
            importances=found.importances,
            components=found.components,
            verdict=SimpleNamespace(good=seed != 1, reasons=("looks odd",)),
        )

    results = bench.run(sure, ["blocks_mixed"], 3, tmp_path)
    assert [(r.recovered, r.called_good, r.reasons) for r in results] == [
        (True, True, ()),
        (False, False, ("looks odd",)),
        (False, True, ()),
    ]
    words = page.calibration(results)
    assert "of 2 results called good 1 are recovered; of 2 that are not recovered 1 are not called" in words
    assert page.calibration(bench.run(perfect, ["blocks_mixed"], 1, tmp_path / "silent")) == ""
    assert bench.run(sure, ["blocks_mixed"], 3, tmp_path) == results  # read again from files
