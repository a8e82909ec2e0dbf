"""APD, the predecessor, on five networks of the collection, at several top-k.

    python benchmarks/apd.py [--only NAME ...] [--times X ...] [--seeds N] [--out DIR]

Settings start from those in public copies of the authors' repository, with less training (`SETTINGS`;
results/apd.md says what is whose, and which trials came before). Every network is decomposed with that
top-k, half of it and twice of it; what is there already in DIR is not made again. Prints the tables of
results/apd.md, which also have rankone's kept runs of the same networks.

The residual stream of the one- and two-layer networks is 1000 wide, but embedding and weights span 200
of its directions. APD runs in an orthonormal basis of these: the network and all losses are the same,
for far less work. Not the same are the random start, which lies within them, and the steps of Adam,
which depend on the basis.
"""

import argparse
import json
from dataclasses import asdict, dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rankone.collection import Dense, KnownNetwork, Mechanisms, bench
from rankone.collection.apd import APD, AttributionDecomposition, WholeMatrices, keep
from rankone.collection.base import linear
from rankone.collection.judge import Parts, assign, count_errors, importances_of, with_support
from rankone.data import batches
from rankone.metrics import mmcs_ml2r

ROOT = Path(__file__).parent.parent
TMS_5_2 = APD(
    C=5, top_k=0.211, steps=6000, batch_size=2048, lr=3e-2, schedule="constant", simplicity=0.7, p=1.0
)
TMS_40_10 = APD(C=50, top_k=2.0, steps=5000, batch_size=1024, lr=2e-3, minimality=10.0, simplicity=15.0)
ONE_LAYER = APD(
    C=130,
    top_k=1.28,
    steps=3000,
    batch_size=128,
    lr=2e-3,
    warmup=0.01,
    simplicity=10.0,
    activations=1.0,
    activations_of="*mlp_in",
    unit_reads=True,
    rank=10,
    scale=2.0,
)
SETTINGS = {
    "tms_5-2": TMS_5_2,
    "tms_5-2-id": TMS_5_2,
    "tms_40-10": TMS_40_10,
    "resid_mlp1": ONE_LAYER,
    "resid_mlp2": replace(ONE_LAYER, C=200, steps=2000, minimality=2.0, simplicity=7.0, unit_reads=False),
}
"""Ours, to save time: steps (there: 20,000 for superposition, 10,000 for residual MLPs), batches (2048 and
256), the learning rate of all but TMS 5-2 (1e-3), terms per component in residual MLPs (as many as ranks).
C of TMS 40-10 is a third party's. Of TMS 5-2+ID none are known."""
DENSE = {
    "tms_5-2": (),
    "tms_5-2-id": ("hidden.0",),
    "tms_40-10": (),
    "resid_mlp1": ("blocks.0.mlp_out",),
    "resid_mlp2": ("blocks.0.mlp_out", "blocks.1.mlp_out"),
}
"""The matrices of which no mechanisms are known."""
PIECE = 0.1
"""A component is a piece of a layer if it has this share of the size of the largest one there."""


class Narrow(nn.Module):
    """A residual MLP in a basis of the directions that it uses, with its layers under the same names."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        W_E = model.embed.weight
        used = [W_E, *(W for block in model.blocks for W in (block.mlp_in.weight.T, block.mlp_out.weight))]
        self.basis = torch.linalg.qr(torch.cat(used, 1).detach().double()).Q.float()
        self.W_E = self.basis.T @ W_E.detach()
        self.blocks = nn.ModuleList()
        for block in model.blocks:
            layers = {
                "mlp_in": block.mlp_in.weight @ self.basis,
                "mlp_out": self.basis.T @ block.mlp_out.weight,
            }
            self.blocks.append(nn.ModuleDict({name: linear(W) for name, W in layers.items()}))
        self.eval().requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        stream = F.linear(x, self.W_E)
        for block in self.blocks:
            assert isinstance(block, nn.ModuleDict)
            stream = stream + block["mlp_out"](F.relu(block["mlp_in"](stream)))
        return F.linear(stream, self.W_E.T)

    def widened(self, layer: str, matrices: Tensor) -> Tensor:
        """Matrices of a layer, in the directions of the original."""
        return matrices @ self.basis.T if layer.endswith("mlp_in") else self.basis @ matrices


class Widened(AttributionDecomposition):
    """What was found in a narrow network, as matrices of the original."""

    def components(self, layer: str) -> WholeMatrices:
        assert isinstance(self.network.model, Narrow)
        return WholeMatrices(self.network.model.widened(layer, self.matrices[layer]))


def found_by(settings: APD, network: KnownNetwork, seed: int) -> AttributionDecomposition:
    """APD on a network, in a narrow stream where it has a wide one."""
    if not network.name.startswith("resid"):
        return settings(network, seed)
    narrow = replace(network, model=Narrow(network.model))
    # Faithfulness and simplicity are shares of the parameters, of which there are fewer now.
    share = parameters(narrow) / parameters(network)
    fewer = replace(
        settings, faithfulness=share * settings.faithfulness, simplicity=share * settings.simplicity
    )
    found = fewer(narrow, seed)
    return Widened(found.network, found.matrices, found.threshold)


def parameters(network: KnownNetwork) -> int:
    return sum(network.model.get_submodule(name).weight.numel() for name in network.layers)  # pyright: ignore


@dataclass(frozen=True)
class Measured:
    """APD as a method of the benchmark that also writes down what the judge does not ask."""

    settings: APD
    directory: Path

    def __call__(self, network: KnownNetwork, seed: int) -> AttributionDecomposition:
        found = found_by(self.settings, network, seed)
        file = self.directory / f"{network.name}-seed{seed}.measures.json"
        file.write_text(json.dumps(measures(network, found)))
        return found


@torch.no_grad()
def measures(network: KnownNetwork, found: AttributionDecomposition) -> dict[str, Any]:
    """MMCS and ML2R over the components that are alive, errors with the best threshold, and in how many
    pieces each dense matrix is."""
    on_probe = keep(found.attributions(network.probe), found.threshold)
    alive = on_probe.any(0)
    for batch in islice(batches(network.data, 0, stream="evaluation"), 4):
        alive |= keep(found.attributions(batch), found.threshold).any(0)
    layer, truth = next((n, t) for n, t in network.truth.items() if isinstance(t, Mechanisms))
    # What one feature brings into a layer is a column, or where the stream is wide its image.
    W, P = (truth.on_support(m) for m in (truth.matrices.sum(0), found.components(layer).matrices))
    each = [mmcs_ml2r(W[:, [j]], P[:, :, j].T, torch.ones(len(P), 1), alive) for j in range(W.shape[1])]
    mmcs, ml2r = (sum(values) / len(values) for values in zip(*each, strict=True))
    pieces = {}
    for name, about in network.truth.items():
        if isinstance(about, Dense):
            sizes = found.components(name).matrices.flatten(1).norm(dim=1)
            pieces[name] = int((sizes > PIECE * sizes.max()).sum())
    return {
        "alive": int(alive.sum()),
        "mmcs": mmcs,
        "ml2r": ml2r,
        "best_errors": best_errors(network, found),
        "pieces": pieces,
    }


def best_errors(network: KnownNetwork, found: AttributionDecomposition) -> int:
    """The fewest errors that any threshold gives: what is left of them is wrong with the components or
    their attributions, and not with top-k."""
    known = {n: t for n, t in with_support(network).truth.items() if isinstance(t, Mechanisms)}
    parts = {name: Parts.of(found.components(name), name) for name in known}
    attribution = found.attributions(network.probe)
    fewest = None
    for threshold in attribution.flatten().quantile(torch.linspace(0.5, 1, 101)).tolist():
        errors = 0
        given = replace(found, threshold=threshold)
        g = importances_of(given, network.probe, parts)
        for name, truth in known.items():
            needed = network.needed_on_probe(name)
            own = assign(g[name], needed, truth, parts[name])
            errors += sum(count_errors(g[name], needed, own, (1,) * len(own)))
        fewest = errors if fewest is None else min(fewest, errors)
    assert fewest is not None
    return fewest


HEAD = (
    "method",
    "top-k",
    "recovered",
    "errors of each seed",
    "errors, best threshold",
    "MMCS",
    "ML2R",
    "pieces of dense matrices",
    "sum",
    "kept only",
    "time",
    "command",
)


def apd_row(name: str, times: float, results: list[bench.Result], extras: list[dict[str, Any]]) -> list[str]:
    judged = [result.judgement for result in results if result.judgement is not None]
    kinds = ("missing", "stray", "split", "merged")
    pieces = [", ".join(str(n) for n in extra["pieces"].values()) for extra in extras]
    options = f"--only {name} --times {times:g}" + (f" --seeds {len(results)}" if len(results) > 1 else "")
    return [
        "APD",
        f"{times * SETTINGS[name].top_k:g}",
        f"{sum(j['recovered'] for j in judged)} of {len(judged)}",
        "; ".join(", ".join(f"{j[kind]} {kind}" for kind in kinds if j[kind]) or "0" for j in judged),
        "; ".join(str(extra["best_errors"]) for extra in extras),
        "; ".join(f"{extra['mmcs']:.2f}" for extra in extras),
        "; ".join(f"{extra['ml2r']:.2f}" for extra in extras),
        "; ".join(pieces) if any(pieces) else "",
        _share([j["shares"]["sum"] for j in judged]),
        _share([j["shares"]["rounded"] for j in judged]),
        f"{sum(result.seconds for result in results) / len(results):.0f} s",
        f"`python benchmarks/apd.py {options}`",
    ]


def rankone_row(name: str) -> list[str]:
    """The runs that are kept of the tuned preset: its settings, too, were found for each network."""
    kept = sorted((ROOT / "results/runs").glob(f"{name}-tuned-seed[0-9]/summary.json"))
    runs = [json.loads(file.read_text()) for file in kept]
    dense = [", ".join(str(run["n_alive"][n]) for n in DENSE[name]) for run in runs[:1]]
    similar = [run["mmcs"] for run in runs] != [None] * len(runs)
    return [
        "rankone",
        "none",
        f"{sum(run['recovered'] for run in runs)} of {len(runs)}",
        str(sum(check["errors"] for run in runs for check in run["checks"].values())),
        "",
        _range([run["mmcs"] for run in runs]) if similar else "",
        _range([run["ml2r"] for run in runs]) if similar else "",
        f"{dense[0]} (rank one)" if dense[0] else "",
        *(
            _share([run["reconstruction"][kind] / run["reconstruction"]["zero"] for run in runs])
            for kind in ("ones", "rounded")
        ),
        f"{sum(run['wall_seconds'] for run in runs) / len(runs):.0f} s",
        f"`rankone run {name} --preset tuned --seeds {len(runs)} threads=1`",
    ]


def _range(values: list[float]) -> str:
    least, most = f"{min(values):.2f}", f"{max(values):.2f}"
    return least if least == most else f"{least} to {most}"


def _share(values: list[float]) -> str:
    return f"{100 * sum(values) / len(values):.1f} %"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=list(SETTINGS), default=list(SETTINGS))
    parser.add_argument("--times", nargs="+", type=float, default=[0.5, 1.0, 2.0], help="of the top-k above")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--out", type=Path, default=Path("runs/apd"))
    chosen = parser.parse_args()
    for name in chosen.only:
        print(f"\n**{name}**\n\n| {' | '.join(HEAD)} |\n|{'---|' * len(HEAD)}", flush=True)
        for times in chosen.times:
            settings = replace(SETTINGS[name], top_k=times * SETTINGS[name].top_k)
            out, extra = chosen.out / f"times{times:g}", chosen.out / f"times{times:g}-measures"
            extra.mkdir(parents=True, exist_ok=True)
            method = Measured(settings, extra)
            results = bench.run(method, [name], chosen.seeds, out, settings=asdict(settings))
            files = [extra / f"{name}-seed{seed}.measures.json" for seed in range(chosen.seeds)]
            extras = [json.loads(file.read_text()) for file in files]
            print(f"| {' | '.join(apd_row(name, times, results, extras))} |", flush=True)
        print(f"| {' | '.join(rankone_row(name))} |", flush=True)


if __name__ == "__main__":
    main()
