"""Decompose a network of your own: find the part that handles one input, and take it out.

    python examples/own_model.py

A small MLP learns to square each of six sparse inputs. rankone takes both of its matrices apart, we
look up which subcomponents matter for input 2, remove them, and see that the network forgets this
input and no other.
"""

import torch
from torch import nn

import rankone

N = 6


def sparse_inputs(generator: torch.Generator) -> torch.Tensor:
    """512 rows in which each input is on in one case out of ten."""
    on = torch.rand(512, N, generator=generator) < 0.1
    return on * torch.rand(512, N, generator=generator)


def trained_network(steps: int) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(N, 24), nn.ReLU(), nn.Linear(24, N))
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    generator = torch.Generator().manual_seed(0)
    for _ in range(steps):
        x = sparse_inputs(generator)
        loss = (model(x) - x.square()).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(f"target trained to a loss of {loss.item():.1e}")
    return model.eval()


def main(steps: int = 6000) -> rankone.Decomposition:
    model = trained_network(steps=3000)
    # Both linear layers ("0" and "2" of the Sequential), with 12 and 24 subcomponents.
    result = rankone.decompose(model, sparse_inputs, {"0": 12, "2": 24}, {"steps": steps})

    probe = 0.75 * torch.eye(N)
    importances = result.importances(probe)["0"]
    print("importance of each subcomponent of layer 0 (columns) for each input (rows):")
    print(
        "\n".join("  ".join(f"{g:.1f}" if g > 0.05 else " . " for g in row) for row in importances.tolist())
    )

    matter = (importances[2] > 0.5).nonzero().flatten().tolist()
    print(f"subcomponents of layer 0 that matter for input 2: {matter}")
    rest = [c for c in range(12) if c not in matter]
    without = result.ablated(keep={"0": rest})
    for name, network in (("original", model), ("without them", without)):
        outputs = network(probe).diagonal().detach().tolist()
        print(f"{name:>14}: " + "  ".join(f"{y:.2f}" for y in outputs))

    result.save("own_model_decomposition")
    again = rankone.load("own_model_decomposition", model)
    assert torch.equal(again.importances(probe)["0"], importances)
    return result


if __name__ == "__main__":
    main()
