"""A result in the hands of a person: ten lines, parts by index, edits, tables."""

import subprocess
import sys

import pytest
import torch
from torch import nn

import rankone
from conftest import small_mlp, uniform
from rankone import RankoneError
from rankone.masks import Mask
from rankone.tables import Table, cell_text

CONFIG = rankone.DecompositionConfig(steps=4, log_every=2, importance={"kind": "layer_mlp"})


@pytest.fixture(scope="module")
def made():
    target = small_mlp()
    return target, rankone.decompose(target, uniform(), {"0": 5, "2": 7}, CONFIG)


def fresh():
    return rankone.decompose(small_mlp(), uniform(), {"0": 5, "2": 7}, CONFIG)


def test_ten_lines_before_and_after_an_evaluation():
    result = fresh()
    text = repr(result)
    assert len(text.splitlines()) <= 10
    assert "Decomposition of Sequential: 2 layers, 12 subcomponents, 4 steps" in text
    assert "6 x 4" in text
    assert "not measured yet: result.evaluate(data)" in text
    html = result._repr_html_()
    assert "<table>" in html
    assert "6 x 4" in html
    found = result.evaluate(n_batches=2)
    assert result.evaluation is found
    text = repr(result)
    assert len(text.splitlines()) <= 10
    assert f"sum {found.relative['sum']:.2%}" in text or f"sum {found.relative['sum']:,.0%}" in text
    assert result.alive == found.alive
    assert result.diagnose(n_batches=1).findings
    assert result.verdict.good is not True
    text = repr(result)
    assert len(text.splitlines()) <= 10
    assert "Verdict: not good: " in text
    assert max(map(len, text.splitlines())) <= 240


def test_many_layers_and_long_names_do_not_flood():
    long = "a" * 60
    model = nn.Sequential()
    for i in range(12):
        model.add_module(f"{long}{i}", nn.Linear(3, 3))
    result = rankone.decompose(model.eval(), uniform(3), {"*": 2}, CONFIG)
    lines = repr(result).splitlines()
    assert len(lines) <= 10
    assert max(map(len, lines)) <= 110
    assert any("8 more" in line for line in lines)


def test_html_of_strange_names_is_escaped():
    model = nn.Sequential()
    model.add_module("<b>x", nn.Linear(3, 3))
    html = rankone.decompose(model.eval(), uniform(3), {"*": 2}, CONFIG)._repr_html_()
    assert "<b>x" not in html
    assert "&lt;b&gt;x" in html


def test_a_view_has_length_iteration_and_index(made):
    view = made[1].components("0")
    assert len(view) == 5
    assert [part.index for part in view] == list(range(5))
    torch.testing.assert_close(view[3].matrix(), view.matrix(3))
    torch.testing.assert_close(view[-1].matrix(), view.matrix(4))
    torch.testing.assert_close(view.sum([1, 2]), view.matrix(1) + view.matrix(2))
    assert view[2].norm == pytest.approx(float(view.norms()[2]), rel=1e-5)
    assert repr(view).startswith("<5 subcomponents of '0', 6 x 4: norms ")
    assert repr(view[2]).startswith("<subcomponent 2 of '0': 6 x 4, norm ")
    with pytest.raises(RankoneError, match=r"has subcomponents 0 to 4, but 5 was asked for"):
        view[5]


def test_alive_is_what_importances_say(made):
    _, result = made
    expected = {name: torch.zeros(len(result.components(name)), dtype=torch.bool) for name in result.layers}
    from rankone.data import batches

    stream = batches(uniform(), 0, stream="evaluation")
    for _ in range(8):
        for name, g in result.importances(next(stream)).items():
            expected[name] |= (g > 0.1).any(0)
    assert result.alive == {name: used.nonzero().flatten().tolist() for name, used in expected.items()}


def test_a_loaded_result_asks_for_data(made, tmp_path):
    target, result = made
    loaded = rankone.load(result.save(tmp_path / "d"), target)
    assert "not measured yet" in repr(loaded)
    with pytest.raises(RankoneError, match=r"a decomposition that was loaded has none. Pass data="):
        _ = loaded.alive
    assert len(loaded.examples("0", 1, uniform())) == 10


def test_dropping_takes_parts_out_of_the_original(made):
    target, result = made
    x = torch.rand(6, 4)
    view = result.components("0")
    W = target[0].weight.detach() - view.matrix(1) - view.matrix(3)
    expected = target[2](torch.relu(x @ W.T + target[0].bias))
    torch.testing.assert_close(result.ablated(drop={"0": [1, 3]})(x), expected)
    torch.testing.assert_close(result.ablated(drop={"0": []})(x), target(x))
    torch.testing.assert_close(result.edited_model(drop={"0": [1, 3]})(x), expected)


def test_scaling_and_masks_per_datapoint(made):
    target, result = made
    x = torch.rand(6, 4)
    view = result.components("2")
    W = target[2].weight.detach() + 2 * view.matrix(4) - 0.5 * view.matrix(0)
    hidden = torch.relu(target[0](x))
    expected = hidden @ W.T + target[2].bias
    scale = {"2": {4: 3.0, 0: 0.5}}
    torch.testing.assert_close(result.ablated(scale=scale)(x), expected)
    torch.testing.assert_close(result.edited_model(scale=scale)(x), expected)
    per_row = torch.rand(6, 7)
    torch.testing.assert_close(
        result.ablated(scale={"2": per_row})(x),
        result.model.masked(x, {"2": Mask(per_row, delta=torch.ones(()))}),
    )
    with pytest.raises(RankoneError, match=r"differs from datapoint to datapoint, and weights do not"):
        result.edited_model(scale={"2": per_row})
    both = result.ablated(drop={"2": [1]}, scale={"2": {4: 3.0}})(x)
    W = target[2].weight.detach() + 2 * view.matrix(4) - view.matrix(1)
    torch.testing.assert_close(both, hidden @ W.T + target[2].bias)


def test_an_edited_model_is_an_ordinary_module_and_the_target_stays(made):
    target, result = made
    before = {name: t.clone() for name, t in target.state_dict().items()}
    edited = result.edited_model(keep={"0": [1, 3]}, drop={"2": [0]})
    assert isinstance(edited, nn.Sequential)
    assert {n: p.shape for n, p in edited.named_parameters()} == {
        n: p.shape for n, p in target.named_parameters()
    }
    x = torch.rand(6, 4)
    torch.testing.assert_close(edited(x), result.ablated(keep={"0": [1, 3]}, drop={"2": [0]})(x))
    edited(x).sum().backward()
    assert all(p.grad is not None for p in edited.parameters())
    assert all(p.grad is None for p in target.parameters())
    assert all(torch.equal(t, before[name]) for name, t in target.state_dict().items())
    torch.optim.SGD(edited.parameters(), 0.1).step()
    assert torch.equal(target[0].weight, before["0.weight"])


def test_a_shared_weight_is_edited_in_one_layer_only():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
            self.b.weight = self.a.weight

        def forward(self, x):
            return self.b(torch.relu(self.a(x)))

        def generate(self, x):
            return self(x).argmax(-1)

    torch.manual_seed(0)
    target = Tied().eval()
    result = rankone.decompose(target, uniform(), {"a": 3}, CONFIG)
    edited = result.edited_model(drop={"a": [0]})
    assert torch.equal(edited.b.weight, target.a.weight)
    assert not torch.equal(edited.a.weight, target.a.weight)
    assert edited.generate(torch.rand(2, 4)).shape == (2,)


def test_a_weight_that_is_computed_is_refused_in_words():
    torch.manual_seed(0)
    target = nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(4, 4))).eval()
    result = rankone.decompose(target, uniform(), {"0": 3}, CONFIG)
    with pytest.raises(RankoneError, match=r"'0'.*is computed from others.*Use ablated\(\)"):
        result.edited_model(drop={"0": [0]})
    assert result.ablated(drop={"0": [0]})(torch.rand(2, 4)).shape == (2, 4)


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        ({"keep": {"0": [1]}, "drop": {"0": [2]}}, r"keep names '0', and so does drop or scale"),
        ({"drop": {"0": [9]}}, r"drop\['0'\] names subcomponent 9"),
        ({"drop": {"9": [0]}}, r"No decomposed layer is called '9'"),
        ({"scale": {"0": torch.ones(3)}}, r"scale\['0'\] has shape \(3,\); its last dimension needs C = 5"),
    ],
)
def test_edits_that_make_no_sense(made, edit, message):
    with pytest.raises(RankoneError, match=message):
        made[1].ablated(**edit)
    with pytest.raises(RankoneError, match=message):
        made[1].edited_model(**edit)


def test_top_examples_are_the_top(made):
    _, result = made
    table = result.examples("2", 3, count=4, n_batches=2)
    from itertools import islice

    from rankone.data import batches

    drawn = list(islice(batches(uniform(), 0, stream="evaluation"), 2))
    everything = torch.cat([result.importances(x)["2"][:, 3] for x in drawn])
    torch.testing.assert_close(torch.tensor(table.column("importance")), everything.topk(4).values)
    first = table[0]
    assert torch.equal(first["input"], drawn[first["batch"]][first["row"]])
    assert "subcomponent 3 of 2" in repr(table)
    once = result.examples("2", 3, [drawn[0]], count=100)
    assert len(once) == len(drawn[0]), "a list that comes round again gives no datapoint twice"
    assert "<table>" in table._repr_html_()


def test_examples_have_positions_where_there_are_some():
    torch.manual_seed(0)
    target = nn.Sequential(nn.Embedding(11, 6), nn.Linear(6, 11)).eval()
    result = rankone.decompose(target, lambda g: torch.randint(0, 11, (2, 5), generator=g), {"*": 8}, CONFIG)
    row = result.examples("1", 0, count=1)[0]
    assert len(row["position"]) == 1
    assert row["input"].shape == (5,)
    assert len(result.importances_by("position", "1").head) == 6


def test_the_effect_of_an_edit_is_a_table(made):
    target, result = made
    table = result.effect(drop={"2": [0]}, n_batches=1)
    from rankone.data import batches

    x = next(batches(uniform(), 0, stream="evaluation"))
    before, after = target(x).detach(), result.ablated(drop={"2": [0]})(x)
    by_output = {row["output"]: row for row in table}
    for i in range(4):
        assert by_output[i]["mean before"] == pytest.approx(float(before[:, i].mean()), rel=1e-5)
        assert by_output[i]["mean absolute change"] == pytest.approx(
            float((after - before)[:, i].abs().mean()), rel=1e-4
        )
    changes = table.column("mean absolute change")
    assert changes == sorted(changes, reverse=True)
    assert "The largest entry is another one on" in table.note


def test_importances_by_class(made):
    target, result = made
    table = result.importances_by("output", "0", n_batches=1)
    from rankone.data import batches

    x = next(batches(uniform(), 0, stream="evaluation"))
    labels, g = target(x).argmax(-1), result.importances(x)["0"]
    for row in table:
        for label in labels.unique().tolist():
            expected = float(g[labels == label][:, row["subcomponent"]].mean())
            assert row[f"output {label}"] == pytest.approx(expected, rel=1e-5)
    named = result.importances_by(lambda x: (x[:, 0] > 0.5).long(), "0")
    assert list(named.head)[1:] == ["group 0", "group 1"]
    with pytest.raises(RankoneError, match=r"by='class'; expected 'output', 'position' or a function"):
        result.importances_by("class", "0")
    with pytest.raises(RankoneError, match=r"one importance per row, without positions"):
        result.importances_by("position", "0")
    with pytest.raises(RankoneError, match=r"The groups have shape \(16, 4\)"):
        result.importances_by(lambda x: x, "0")


def test_long_tables_are_cut_and_say_so():
    table = Table(("n",), [(i,) for i in range(100)])
    assert len(table) == 100
    assert "... and 70 more rows" in repr(table)
    assert len(repr(table).splitlines()) == 32
    assert cell_text(torch.arange(20)) == "[0, 1, 2, 3, 4, 5, 6, 7, ...]"


def test_what_is_named_in_the_readme_is_there_after_import_rankone():
    code = "import rankone; rankone.evaluate.evaluate, rankone.diagnose.diagnose, rankone.compare.compare"
    subprocess.run([sys.executable, "-c", code], check=True)
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        _ = rankone.nothing


def test_a_report_about_any_network(tmp_path):
    result = fresh()
    path = result.report(tmp_path / "net.html")
    page = path.read_text()
    assert [p.name for p in tmp_path.iterdir()] == ["net.html"]
    for words in (
        "A network of the class <code>Sequential</code>",
        "<strong>Not good</strong>",
        "<code>result.diagnose()</code> says what to do",
        "Which subcomponents are alive",
        "Importances on a sample of the data",
        "Training",
        "prefers-color-scheme: dark",
        "subcomponents by their index",
    ):
        assert words in page, words
    assert "How recovery is judged" not in page
    assert "datapoints per step" not in page
    assert page.count("<svg role=") == page.count("<title>") - 1 >= 4
    for index in result.alive["0"]:
        assert f'<tr><td class="n">{index}</td>' in page
    links = [part.split('"')[0] for mark in ('src="', 'href="') for part in page.split(mark)[1:]]
    assert all(link.startswith(("#", "data:image/png;base64,")) for link in links), "the page loads nothing"
    with pytest.raises(RankoneError, match=r"does not end in .html: a report is one page"):
        result.report(tmp_path / "net")


def test_the_table_of_the_alive_is_right(made):
    from rankone.looking import usage
    from rankone.report.alive import alive_layers

    _, result = made
    used = usage(result.model, uniform(), 2)
    from itertools import islice

    from rankone.data import batches

    drawn = list(islice(batches(uniform(), 0, stream="evaluation"), 2))
    g = torch.cat([result.importances(x)["2"] for x in drawn])
    torch.testing.assert_close(used["2"].rate, (g > 0.1).float().mean(0))
    for layer in alive_layers(result, used, {}):
        assert [row[0] for row in layer.rows] != [] or layer.alive == 0
        for index, norm, rate, mean, serves in layer.rows:
            assert norm == pytest.approx(result.components(layer.name)[index].norm, rel=1e-5)
            assert rate == pytest.approx(float(used[layer.name].rate[index]))
            assert 0.1 < mean <= 1
            assert serves is None


@pytest.mark.parametrize(
    ("good", "alive", "kind", "headline"),
    [
        (True, [0, 1, 2, 3], "yes", "Good"),
        (False, [0, 1, 2, 3], "no", "Not good"),
        (None, [0, 1, 2, 3], "open", "Could not be judged"),
        (True, [], "no", "Not good"),
    ],
)
def test_how_good_it_is_in_words(good, alive, kind, headline):
    """The report says what the verdict says, and no other limits."""
    from rankone.evaluate import Evaluation
    from rankone.report.page import quality
    from rankone.verdict import Verdict

    evaluation = Evaluation({}, {}, None, 0.0, {"a": 1.0}, {"a": alive}, {}, None, {})
    said, words, sentences = quality(Verdict(good, ("unfaithful: too far",)), evaluation)
    assert (said, words) == (kind, headline)
    assert sentences[0] == ("Unfaithful: too far." if alive else sentences[0])
    assert all(sentence.endswith(".") for sentence in sentences)


def test_a_verdict_and_a_diagnosis_are_short_and_readable(made):
    _, result = made
    text, html = repr(result.diagnose()), result.diagnose()._repr_html_()
    assert "Numbers(" not in text
    assert "  It means: " in text or text == "Nothing wrong was found."
    assert html.startswith(("<ol><li><b>", "<p>"))
    assert max(map(len, repr(result).splitlines())) < 400


@pytest.mark.parametrize("kind", ["conv", "groups", "attention", "gru"])
def test_an_edited_copy_of_other_layers(kind):
    class Attention(nn.Module):
        def __init__(self):
            super().__init__()
            self.attn = nn.MultiheadAttention(4, 2, batch_first=True)

        def forward(self, x):
            return self.attn(x, x, x, need_weights=False)[0]

    class Recurrent(nn.Module):
        def __init__(self):
            super().__init__()
            self.gru = nn.GRU(4, 3, batch_first=True)

        def forward(self, x):
            return self.gru(x)[0]

    torch.manual_seed(0)
    target, layer, shape = {
        "conv": lambda: (nn.Sequential(nn.Conv2d(1, 3, 2), nn.ReLU()), "0", (4, 1, 5, 5)),
        "groups": lambda: (nn.Sequential(nn.Conv1d(4, 4, 2, groups=2)), "0", (4, 4, 6)),
        "attention": lambda: (Attention(), "attn.q", (4, 5, 4)),
        "gru": lambda: (Recurrent(), "gru.hh_l0", (4, 5, 4)),
    }[kind]()
    target.eval()
    before = {name: t.clone() for name, t in target.state_dict().items()}
    result = rankone.decompose(target, lambda g: torch.rand(*shape, generator=g), {layer: 3}, CONFIG)
    x = torch.rand(*shape)
    expected = result.ablated(drop={layer: [1]})(x)
    assert not torch.allclose(expected, target(x))
    if kind == "groups":  # what reads across groups has no place in the weight
        with pytest.raises(RankoneError, match="is computed from others"):
            result.edited_model(drop={layer: [1]})
    else:
        torch.testing.assert_close(result.edited_model(drop={layer: [1]})(x), expected)
    assert all(torch.equal(t, before[name]) for name, t in target.state_dict().items())
