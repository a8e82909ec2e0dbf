"""The viewer, in a real browser: it opens, sorts, filters, follows links, and asks nobody for anything."""

import json
import re
import time
from dataclasses import replace

import pytest
import torch
from torch import nn

import rankone
from browser import Looking, browser
from conftest import rankone_main
from rankone.errors import ConfigError
from rankone.verdict import Verdict
from rankone.view import encode
from rankone.view.gather import gather, gather_artifact
from rankone.view.write import page, view_of

EVIL = "<img src=x onerror=alert(1)>"


@pytest.fixture(scope="module")
def chromium():
    with browser() as found:
        yield found


class Marked(nn.Module):
    """A network whose layer names are markup."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.parts = nn.ModuleDict({EVIL: nn.Linear(4, 6), "plain": nn.Linear(6, 4)})

    def forward(self, x):
        return self.parts["plain"](torch.relu(self.parts[EVIL](x)))


@pytest.fixture(scope="module")
def marked():
    data = [torch.rand(40, 4) for _ in range(3)]
    config = {"steps": 30, "log_every": 5}
    return rankone.decompose(Marked().eval(), data, {"*": 6}, config, progress=False)


@pytest.fixture(scope="module")
def viewed(marked, tmp_path_factory):
    return marked.view(tmp_path_factory.mktemp("view") / "view.html")


def shown_rows(looking, column):
    return looking.page.eval_on_selector_all(
        ".grid .rows .row", f"rows => rows.map(row => row.children[{column}].textContent)"
    )


def test_it_opens_and_says_what_it_is(chromium, viewed):
    looking = Looking(chromium, viewed)
    assert looking.heading == "Marked"
    assert looking.page.title() == "Marked – Marked – rankone"
    text = looking.page.inner_text("main")
    assert "Verdict" in text
    assert f"parts.{EVIL}" in text, "a name is text, whatever is in it"
    assert looking.page.query_selector("main img") is None
    assert looking.page.query_selector_all("[role=grid]") == []
    looking.fine()


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("width", [1100, 390])
def test_every_page_fits_and_is_quiet(chromium, viewed, marked, width, dark):
    looking = Looking(chromium, viewed, width=width, dark=dark)
    layer = marked.layers[1]
    index = marked.alive[layer][0]
    for where in ["overview", "components", "subcomponents", "importances", "training", "component:0",
                  f"{layer}/{index}", "nonsense", "a/b/c", "%E0%A4%A"]:  # fmt: skip
        looking.go(where)
        assert looking.heading, where
        assert len(looking.page.inner_text("main")) > 60, f"{where} is blank"
        assert looking.fits(), f"{where} is wider than {width} pixels"
    background = looking.page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (background == "rgb(20, 25, 30)") == dark
    looking.fine()


def test_the_table_sorts_filters_and_opens(chromium, viewed, marked):
    looking = Looking(chromium, viewed).go("subcomponents")
    count = sum(len(of) for of in marked.alive.values())
    assert looking.page.get_attribute("[role=grid]", "aria-rowcount") == str(count + 1)
    head = looking.page.query_selector_all("[role=columnheader]")
    titles = [node.inner_text() for node in head]
    assert titles[:5] == ["layer", "index", "norm", "on", "importance"]
    head[2].query_selector("button").click()
    norms = [float(x) for x in shown_rows(looking, 2)]
    assert norms == sorted(norms, reverse=True)
    assert head[2].get_attribute("aria-sort") == "descending"
    head[2].query_selector("button").click()
    assert [float(x) for x in shown_rows(looking, 2)] == sorted(norms)
    assert head[2].get_attribute("aria-sort") == "ascending"
    looking.page.keyboard.press("/")
    looking.page.keyboard.type("plain")
    assert set(shown_rows(looking, 0)) == {"parts.plain"}
    looking.page.fill("#search", f"norm>{norms[1]}")
    assert len(shown_rows(looking, 0)) <= 2
    looking.page.fill("#search", "nothing-is-called-this")
    assert "Nothing fits this search" in looking.page.inner_text(".grid")
    looking.page.fill("#search", "")
    looking.page.select_option("#layer", f"parts.{EVIL}")
    assert set(shown_rows(looking, 0)) == {f"parts.{EVIL}"}
    looking.page.click(".grid .rows .row >> nth=0")
    looking.page.wait_for_timeout(60)
    assert looking.heading.startswith(f"parts.{EVIL} · ")
    looking.fine()


def test_a_subcomponent_has_an_address_and_neighbours(chromium, viewed, marked):
    layer = "parts.plain"
    index = marked.alive[layer][-1]
    looking = Looking(chromium, viewed).go(f"{layer}/{index}")
    assert looking.heading == f"{layer} · {index}"
    for heading in ("It reads", "It writes", "When it is important", "Where it matters most"):
        assert heading in looking.page.inner_text("main")
    part = marked.components(layer)[index]
    largest = int(part.v.abs().argmax())
    said = looking.page.get_attribute("canvas >> nth=0", "aria-label")
    assert f"read vector, 6 entries; the largest are {largest}: " in said
    value = float(re.search(rf"are {largest}: (-?[\d.e-]+)", said).group(1))
    assert value == pytest.approx(float(part.v[largest]), rel=0.02)
    looking.page.keyboard.press("k")
    looking.page.wait_for_timeout(60)
    assert looking.heading != f"{layer} · {index}"
    looking.page.keyboard.press("j")
    looking.page.wait_for_timeout(60)
    assert looking.heading == f"{layer} · {index}"
    looking.page.keyboard.press("Escape")
    looking.page.wait_for_timeout(60)
    assert looking.heading == "Alive subcomponents"
    looking.fine()


def test_the_heat_map_tells_index_and_value(chromium, viewed, marked):
    looking = Looking(chromium, viewed).go("importances")
    box = looking.page.query_selector("main canvas").bounding_box()
    looking.page.mouse.move(box["x"] + 4, box["y"] + 3)
    told = looking.page.inner_text("#tip")
    index = marked.alive[marked.layers[0]][0]
    assert re.fullmatch(rf"subcomponent {index}, datapoint \d+:\d+: [\d.]+", told)
    looking.page.mouse.click(box["x"] + 4, box["y"] + 3)
    looking.page.wait_for_timeout(60)
    assert looking.heading == f"parts.{EVIL} · {index}"
    looking.fine()


def test_colours_can_be_chosen_and_keys_move_in_the_table(chromium, viewed):
    looking = Looking(chromium, viewed).go("subcomponents")
    looking.page.click("#theme")
    assert looking.page.evaluate("document.documentElement.dataset.theme") == "light"
    looking.page.click("#theme")
    assert looking.page.evaluate("document.documentElement.dataset.theme") == "dark"
    looking.page.focus(".grid")
    looking.page.keyboard.press("ArrowDown")
    active = looking.page.get_attribute(".row.active", "aria-rowindex")
    assert active == "3"
    looking.page.keyboard.press("Enter")
    looking.page.wait_for_timeout(60)
    assert "·" in looking.heading
    looking.fine()


def test_two_side_by_side(chromium, marked, tmp_path):
    other = rankone.decompose(
        marked.model.target, marked.data, {"*": 6}, {"steps": 10, "seed": 1}, progress=False
    )
    looking = Looking(chromium, marked.view(tmp_path / "two.html", other=other)).go("compare")
    assert "are the same (cosine 0.9 and up)" in looking.page.inner_text("main")
    looking.page.click("main table >> nth=1 >> a >> nth=1")
    looking.page.wait_for_timeout(60)
    assert looking.page.evaluate("location.hash").startswith("#~2/")
    assert looking.page.inner_text("#run-name") == "Marked (second)"
    looking.fine()


def test_ten_thousand_rows_scroll_and_two_thousand_are_quick(chromium, tmp_path):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(96, 64), nn.ReLU(), nn.Linear(64, 96)).eval()
    data = [torch.randn(64, 96)]
    result = rankone.decompose(model, data, {"*": 1000}, {"steps": 1}, progress=False)
    with torch.no_grad():  # all of them on, everywhere
        result.model.importance.functions["0"].forward = lambda h: 0.5 + h
        result.model.importance.functions["2"].forward = lambda h: 0.5 + h
    result._verdict = Verdict(None, ("nobody asked",))
    path = view_of(result, tmp_path / "large.html", attack=1)
    assert path.stat().st_size < 10e6
    began = time.perf_counter()
    looking = Looking(chromium, path).go("subcomponents")
    assert looking.page.inner_text("[role=status]") == "2,000 rows"
    assert time.perf_counter() - began < 6, "2 seconds on a quiet machine"
    run = json.loads(json.dumps(gather(replace(result, data=None), "many")))
    for key in ("part_layers", "part_indices", "norms", "write", "read"):
        run[key] = run[key] * 5
    path = tmp_path / "ten.html"
    path.write_text(page([run]))
    looking = Looking(chromium, path).go("subcomponents")
    assert looking.page.inner_text("[role=status]") == "10,000 rows"
    assert len(looking.page.query_selector_all(".grid .rows .row")) < 60, "only what is in sight exists"
    slowest = looking.page.evaluate(
        """async () => {
          const grid = document.querySelector(".grid"); let slowest = 0;
          for (let i = 0; i < 40; i++) {
            grid.scrollTop = i * 7000;
            const began = performance.now(); grid.onscroll(); slowest = Math.max(slowest, performance.now() - began);
          }
          return slowest;
        }"""
    )
    assert slowest < 100, "16 ms, a frame, on a quiet machine"
    looking.fine()


def test_without_data(chromium, marked, tmp_path):
    looking = Looking(chromium, replace(marked, data=None).view(tmp_path / "view.html"))
    assert "There is no data at hand" in looking.page.inner_text("main")
    looking.go("subcomponents")
    assert "12 rows" in looking.page.inner_text("main")
    looking.go("parts.plain/0")
    assert "It reads" in looking.page.inner_text("main")
    looking.fine()


def test_nothing_alive(chromium, marked, tmp_path):
    data = [torch.zeros(4, 4)]
    saved = {n: f.forward for n, f in marked.model.importance.functions.items()}
    try:
        for function in marked.model.importance.functions.values():
            function.forward = torch.zeros_like
        looking = Looking(chromium, view_of(marked, tmp_path / "view.html", data, attack=1))
    finally:
        for name, function in marked.model.importance.functions.items():
            function.forward = saved[name]
    assert "No subcomponent is important on any of 4 datapoints" in looking.page.inner_text("main")
    looking.go("subcomponents")
    assert "12 rows" in looking.page.inner_text("main")
    looking.fine()


def test_one_datapoint(chromium, marked, tmp_path):
    looking = Looking(chromium, view_of(marked, tmp_path / "view.html", [torch.rand(1, 4)], attack=1))
    assert looking.go("subcomponents").heading
    assert looking.go("importances").heading
    looking.fine()


def test_a_run_without_its_network_and_one_of_another_version(chromium, marked, tmp_path):
    marked.save(tmp_path / "kept")
    shown = gather_artifact(tmp_path / "kept", "kept", "The network is not at hand.")
    shown["version"] = "0.0.1"
    path = tmp_path / "view.html"
    path.write_text(page([shown]))
    looking = Looking(chromium, path)
    assert "The network is not at hand." in looking.page.inner_text("main")
    assert looking.go("subcomponents").heading == "Subcomponents"
    assert looking.go("training").heading == "Training"
    looking.fine()
    nothing = gather_artifact(tmp_path, "empty", "Nothing could be read.")
    path.write_text(page([nothing]))
    looking = Looking(chromium, path)
    assert "There is no decomposition in this directory" in looking.page.inner_text("main")
    looking.fine()


def test_the_command(chromium, tmp_path, capsys):
    run = tmp_path / "run"
    rankone_main(["run", "tms_5-2", "--steps", "3", "batch_size=64", "--out", str(run), "--quiet"])
    rankone_main(["view", str(run), "--no-open", "--attack", "1"])
    assert f"Page: {run / 'view.html'}" in capsys.readouterr().out
    looking = Looking(chromium, run / "view.html")
    assert looking.heading == "Toy Model of Superposition, 5 features in 2 dimensions"
    looking.go("embed/0")
    looking.fine()
    own = tmp_path / "own"
    model = nn.Sequential(nn.Linear(4, 4)).eval()
    rankone.decompose(model, [torch.rand(8, 4)], {"0": 3}, {"steps": 2}, out=own, progress=False)
    rankone_main(["view", str(own), "--no-open"])
    looking = Looking(chromium, own / "view.html")
    assert "a network of your own" in looking.page.inner_text("main")
    assert looking.go("0/1").heading == "0 · 1"
    looking.fine()
    for words, message in [
        ([str(tmp_path / "nowhere")], "There is no directory"),
        ([str(tmp_path)], "manifest"),
        ([str(run), "--out", "x.txt"], "does not end in .html"),
    ]:
        with pytest.raises(SystemExit):
            rankone_main(["view", *words, "--no-open"])
        assert message in capsys.readouterr().err


def test_the_page_must_be_html(marked, tmp_path):
    with pytest.raises(ConfigError, match=r"does not end in \.html"):
        marked.view(tmp_path / "view.pdf")


def test_nothing_in_the_data_can_end_the_script():
    text = encode.as_json({"name": "</script><!-- <script> \u2028"})
    assert not set("<>&\u2028") & set(text)
    assert json.loads(text) == {"name": "</script><!-- <script> \u2028"}
    html = page([gather_artifact_of_nothing()])
    assert html.count("</script>") == 4


def gather_artifact_of_nothing():
    from pathlib import Path

    return gather_artifact(Path("nowhere"), "</script>", "</script>")


def test_vectors_survive_the_way_to_the_page():
    values = torch.tensor([0.5, -2.0, 0.0, 1e-9])
    kept = encode.quantised(values)
    assert (kept["n"], kept["max"]) == (4, 2.0)
    long = encode.sparse(torch.arange(100.0), 5)
    assert long["at"] == [95, 96, 97, 98, 99]
    assert long["n"] == 100
    assert encode.quantised(torch.zeros(0))["n"] == 0
    tokens = encode.datapoint(torch.arange(500), (300,))
    assert tokens["kind"] == "tokens"
    assert tokens["tokens"][300 - tokens["start"]] == 300
    assert encode.datapoint(torch.rand(1, 8, 8), ())["kind"] == "image"
    assert encode.datapoint("text", ()) == {"kind": "other"}
