"""Arguments of the wrong type, in a process of their own: in the other tests beartype would
complain before rankone can."""

import json
import subprocess
import sys

SCRIPT = """
import json, torch, rankone
model = torch.nn.Sequential(torch.nn.Linear(4, 4)).eval()
good = {"steps": 1}
data = [torch.rand(3, 4)]
result = rankone.decompose(model, data, {"0": 2}, good)
attempts = {
    "layers": lambda: rankone.decompose(model, data, 3, good),
    "model": lambda: rankone.decompose(None, data, {"0": 2}, good),
    "config": lambda: rankone.decompose(model, data, {"0": 2}, [1]),
    "data": lambda: rankone.decompose(model, 3, {"0": 2}, good),
    "none": lambda: rankone.decompose(model, [torch.rand(3, 4), None], {"0": 2}, {"steps": 3}),
    "batch": lambda: rankone.decompose(model, ["text"], {"0": 2}, good),
    "keep": lambda: result.ablated({"0": 3}),
    "keeps": lambda: result.ablated([1, 2]),
    "drop": lambda: result.edited_model(drop={"0": ["a"]}),
    "scale": lambda: result.ablated(scale={"0": [0.5]}),
    "factor": lambda: result.ablated(scale={"0": {1: "x"}}),
    "matrix": lambda: result.components("0").matrix([0, 1]),
    "index": lambda: result.components("0")[1.0],
    "alpha": lambda: result.clusters(data, alpha="much"),
    "C": lambda: rankone.decompose(model, data, {"0": "many"}, good),
}
said = {}
for name, attempt in attempts.items():
    try:
        attempt()
    except rankone.RankoneError as error:
        said[name] = str(error)
print(json.dumps(said))
"""


def test_each_is_explained():
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True)
    said = json.loads(done.stdout)
    assert "layers is 3; expected a mapping from layer name patterns to C" in said["layers"]
    assert "The target is a NoneType; expected a trained torch.nn.Module" in said["model"]
    assert "config: expected a mapping of settings, got list" in said["config"]
    assert "data is a int; expected a tensor of datapoints, an iterable of batches" in said["data"]
    assert "A batch is a str" in said["batch"]
    assert "A batch is a NoneType" in said["none"]
    assert "keep['0'] is 3; expected the indices of subcomponents, such as [3]" in said["keep"]
    assert "keep is [1, 2]; expected a mapping from layers" in said["keeps"]
    assert "drop['0'] is ['a']; expected the indices" in said["drop"]
    assert "scale['0'] is [0.5]; expected factors by index" in said["scale"]
    assert "scale['0'][1] is 'x'; expected a number" in said["factor"]
    assert "[0, 1] does not name a subcomponent of '0'; expected one whole number" in said["matrix"]
    assert "1.0 does not name a subcomponent" in said["index"]
    assert "asks for C = 'many' subcomponents" in said["C"]
    assert "alpha is 'much'; expected a number above 0" in said["alpha"]
