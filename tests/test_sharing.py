"""Sharing: a directory that others can load, a card that says what it is, and the Hub."""

import hashlib
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
import torch

import rankone
from conftest import small_mlp, uniform
from rankone import DecompositionConfig, RankoneError
from rankone.describe import percent

CONFIG = DecompositionConfig(steps=4, log_every=2, importance={"kind": "mlp", "options": {"d_gate": 4}})


def own_divergence(output, target):
    return (output - target).abs().mean(-1)


@pytest.fixture(scope="module")
def made():
    target = small_mlp()
    return target, rankone.decompose(target, uniform(rows=64), {"0": 5, "2": 7}, CONFIG)


def test_a_directory_and_back(made, tmp_path):
    target, result = made
    path = result.save_pretrained(tmp_path / "shared")
    back = rankone.Decomposition.from_pretrained(path, target)
    x = torch.rand(6, 4)
    for name, importances in result.importances(x).items():
        assert torch.equal(back.importances(x)[name], importances)
    assert sorted(p.name for p in path.iterdir() if not p.name.startswith(".")) == [
        "README.md", "components.safetensors", "decomposition.json", "manifest.json",
    ]  # fmt: skip
    result.save_pretrained(path)  # an earlier one is replaced
    with pytest.raises(RankoneError, match="was made from another network"):
        rankone.Decomposition.from_pretrained(path, small_mlp(seed=1))


def test_the_card_says_what_it_is_how_good_and_how_to_load_it(made, tmp_path):
    target, result = made
    card = (result.save_pretrained(tmp_path / "shared") / "README.md").read_text()
    assert card.startswith("---\nlibrary_name: rankone\n")
    assert "# Decomposition of Sequential: 2 layers, 12 subcomponents, 4 steps" in card
    alive = len(result.evaluation.alive["0"])
    assert f"| 0 | 6 x 4 | 5 | {alive} | {result.evaluation.l0['0']:.2f} |" in card
    assert f"| under attack (20 steps) | {percent(result.evaluation.relative['attack_20'])} |" in card
    assert rankone.files.fingerprint(target) in card
    code = card.partition("```python\n")[2].partition("```")[0]
    code = code.replace("model = ...", "pass").replace(
        "this repository or directory", str(tmp_path / "shared")
    )
    exec(code, {"model": target, "batch": torch.rand(3, 4)})


def test_what_was_not_measured_and_what_has_to_be_passed_again(tmp_path):
    target = small_mlp()
    result = rankone.decompose(target, uniform(), {"0": 5}, CONFIG, divergence=own_divergence)
    result.data = None
    path = result.save_pretrained(tmp_path / "shared")
    card = (path / "README.md").read_text()
    assert "It was not measured" in card
    assert "function `own_divergence` as `divergence=`" in card
    with pytest.raises(RankoneError, match="as divergence=; pass it to load"):
        rankone.Decomposition.from_pretrained(path, target)
    rankone.Decomposition.from_pretrained(path, target, divergence=own_divergence)


def test_a_run_directory_is_one_too(made, tmp_path):
    target, result = made
    result.save(tmp_path / "run" / "decomposition")
    assert rankone.Decomposition.from_pretrained(tmp_path / "run", target).layers == ["0", "2"]


def test_a_name_that_leads_nowhere():
    with pytest.raises(RankoneError, match="There is no directory /nowhere/at/all"):
        rankone.Decomposition.from_pretrained("/nowhere/at/all", small_mlp())


@pytest.fixture
def hub(monkeypatch):
    """What the Hub answers to an upload, on this machine: every call is the real one, over HTTP."""
    pytest.importorskip("huggingface_hub")
    seen = {}

    class Answers(BaseHTTPRequestHandler):
        def do_POST(self):
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            here = f"http://127.0.0.1:{self.server.server_address[1]}"
            if self.path.endswith("/repos/create"):
                seen["created"] = json.loads(body)
                answer = {"url": f"{here}/me/mine", "name": "me/mine", "id": "me/mine"}
            elif "/preupload/" in self.path:
                wanted = json.loads(body)["files"]
                answer = {
                    "files": [
                        {"path": f["path"], "uploadMode": "regular", "shouldIgnore": False} for f in wanted
                    ]
                }
            else:
                seen["commit"] = [json.loads(line) for line in body.decode().splitlines()]
                oid = hashlib.sha1(body).hexdigest()
                answer = {"commitUrl": f"{here}/me/mine/commit/{oid}", "commitOid": oid, "success": True}
            self._say(answer)

        def do_GET(self):
            self._say({"id": "me/mine", "modelId": "me/mine", "sha": "0" * 40, "siblings": [], "tags": []})

        def _say(self, answer):
            content = json.dumps(answer).encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *args):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Answers)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    _endpoint(monkeypatch, f"http://127.0.0.1:{server.server_address[1]}")
    yield seen
    server.shutdown()
    server.server_close()


def _endpoint(monkeypatch, address):
    import huggingface_hub.constants
    import huggingface_hub.hf_api

    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", address)
    monkeypatch.setattr(huggingface_hub.hf_api.api, "endpoint", address)


@pytest.mark.filterwarnings("ignore")
def test_the_upload_is_the_hubs_own(made, hub):
    assert "commit" in made[1].push_to_hub("me/mine", token="hf_" + "x" * 34, private=True)
    assert hub["created"]["name"] == "mine"
    files = {line["value"]["path"] for line in hub["commit"] if line["key"] == "file"}
    assert {"README.md", "components.safetensors", "decomposition.json"} <= files


def test_no_network(made, monkeypatch, tmp_path):
    pytest.importorskip("huggingface_hub")
    _endpoint(monkeypatch, "http://127.0.0.1:9")
    monkeypatch.setattr("time.sleep", lambda seconds: None)  # it is tried again and again
    target, result = made
    with pytest.raises(RankoneError, match=r"'me/mine' was not uploaded: .*save_pretrained\(DIRECTORY\)"):
        result.push_to_hub("me/mine", token="hf_" + "x" * 34)
    with pytest.raises(
        RankoneError, match="There is no directory me/mine, and it was not found on the Hub: "
    ):
        rankone.Decomposition.from_pretrained("me/mine", target, cache_dir=tmp_path)
    with pytest.raises(RankoneError, match="was not uploaded"):
        result.push_to_hub("no such//name")


def test_without_huggingface_hub(made, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "huggingface_hub", None)
    with pytest.raises(RankoneError, match=r"pip install 'rankone\[hub\]'"):
        made[1].push_to_hub("me/mine")
