"""What are the mechanisms of W_in in the second block? An answer made by hand from the weights.

    python benchmarks/two_layers_by_hand.py

The paper expects one subcomponent per feature. The second block reads a stream that the first has
written to, so a part of W_in that belongs to feature i should give what W_in gives for the stream of
feature i alone: u_i = W s_i, and read nothing of the others': V = the pseudoinverse of all s_i. What
these 100 leave out of W is its action on what the first block writes when several features are on (a
ReLU does not add up). The script adds the strongest directions of that remainder, one after the other,
as parts that are always on, or never, and measures: the parts of active features and the always-on ones kept,
nothing else (`rounded`); all kept (`sum`); and an adversary who may keep any share of everything that
is not important (`attack`), all relative to removing everything.
"""

import torch
import torch.nn.functional as F

from rankone.data import generator_for
from rankone.masks import Mask
from rankone.model import DecomposedModel
from rankone.runs.config import experiment_config


def streams(target, x):
    """What enters the second block."""
    stream = target.embed(x)
    return (stream + target.blocks[0](stream)).dense()


@torch.no_grad()
def main() -> None:
    settings = experiment_config("resid_mlp2", preset="tuned").target
    target = settings.load().requires_grad_(False).eval()
    first, second = (block.mlp_in.weight for block in target.blocks)
    x = settings.data(4096).dense(generator_for(0, "by hand"))
    clean = target(x)
    probes = torch.eye(settings.n_features)
    S, embedding = streams(target, probes).T, target.embed.weight
    parts = {"blocks.0.mlp_in": (first @ embedding, torch.linalg.pinv(embedding))}
    U, V = second @ S, torch.linalg.pinv(S)
    rest = second - U @ V
    data = streams(target, x)
    # The directions of the remainder that carry most of what it does to the data.
    left, sizes, _ = torch.linalg.svd(rest @ data.T, full_matrices=False)
    print("| parts of the remainder | important | sum | rounded | attack, 40 steps |\n|---|---|---|---|---|")
    on = (x != 0).float()
    for extra, always in ((0, 1.0), *((n, always) for n in (1, 5, 25) for always in (1.0, 0.0))):
        write = left[:, :extra]
        layers = parts | {"blocks.1.mlp_in": (torch.cat([U, write], 1), torch.cat([V, write.T @ rest]))}
        model = DecomposedModel(target, {n: u.shape[1] for n, (u, _) in layers.items()})
        for name, (u, v) in layers.items():
            model.layers[name].subcomponents.U.copy_(u)
            model.layers[name].subcomponents.V.copy_(v)
        important = {
            n: torch.cat([on, torch.full((len(x), u.shape[1] - on.shape[1]), always)], 1)
            for n, (u, _) in layers.items()
        }

        def divergence(masks, model=model):
            return F.mse_loss(model.masked(x, {n: Mask(m) for n, m in masks.items()}), clean)

        def attack(important=important, divergence=divergence):
            r = {n: torch.rand(g.shape[1], generator=generator_for(0, n)) for n, g in important.items()}
            for _ in range(40):
                leaves = {n: t.clone().requires_grad_() for n, t in r.items()}
                with torch.enable_grad():
                    harm = divergence({n: g + (1 - g) * leaves[n] for n, g in important.items()})
                    slopes = torch.autograd.grad(harm, list(leaves.values()))
                r = {n: (r[n] + 0.1 * s.sign()).clamp(0, 1) for n, s in zip(r, slopes, strict=True)}
            return divergence({n: g + (1 - g) * r[n] for n, g in important.items()})

        everything = divergence({n: torch.zeros_like(g) for n, g in important.items()})
        found = (
            divergence({n: torch.ones_like(g) for n, g in important.items()}),
            divergence(important),
            attack(),
        )
        print(
            f"| {extra} | {'always' if always else 'never'} | "
            + " | ".join(f"{100 * float(d / everything):.2f} %" for d in found)
            + " |"
        )
    print("\nOne part per feature, or two? What the second W_in makes of a feature at 0.75 and at -0.75:")
    both = torch.stack([streams(target, sign * 0.75 * probes) @ second.T for sign in (1, -1)], 1)
    ratios = torch.linalg.svdvals(both)[:, 1] / torch.linalg.svdvals(both)[:, 0]
    order = ratios.argsort(descending=True).tolist()
    print(f"second singular value as a share of the first: median {float(ratios.median()):.0%};",
          ", ".join(f"feature {i} {float(ratios[i]):.0%}" for i in order[:8]))  # fmt: skip
    shares = (sizes.square() / sizes.square().sum())[:5].tolist()
    print("\nShare of the remainder's action in its strongest directions:", [f"{s:.1%}" for s in shares])


if __name__ == "__main__":
    main()
