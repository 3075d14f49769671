"""Sets of 2-D vectors: which element has the largest norm, and where is it?

    python scripts/examples/largest.py

A set is 8 to 32 Gaussian vectors, padded to 32. Two blocks of set attention (ISAB; Lee et al., 2019) compare each
element with the others through 8 inducing points. PMA with two seeds pools the set into two vectors: from one a linear
layer regresses the largest element itself, the other is the query of a pointer (Vinyals et al., 2015), which says which
element it is. The order of the elements has no influence.

Three models learn it: `residual`; `plain`, in which every block is O + ReLU(O W_O), without residuals from the queries
and without norms; and `queries`, which pools by attention with two learned queries (Ji, Gao & Xie, 2019).

The results are for 4,096 unseen sets. Where two norms are almost equal, the regression answers with a point between the
two elements, while the pointer takes one of them: `pointed_mse` is the error of answering with the element that is
pointed at, to compare with `regression_mse`. `mean_mse` is the error of always answering the mean.

Writes largest.png: for the first model six sets, the element that is largest, what is regressed and where the pointer
points.

Shapes: B sets, T = 32 elements, D the model's width.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from example import SEED, Results, parse, report, train
from matplotlib.figure import Figure
from torch import Tensor, nn

from lmtrain.nn.blocks import FeedForward
from lmtrain.nn.cross_attention import CrossAttention, CrossAttentionBlock
from lmtrain.nn.pointer import PointerAttention
from lmtrain.nn.sets import ISAB, PMA, LearnedQueryAttention, PlainBlock

SMALLEST, LARGEST = 8, 32
INDUCING = 8
UNSEEN = 4096
MODELS = "residual", "plain", "queries"


class Sets(NamedTuple):
    """x (B, T, 2), zeros where padded; valid (B, T) bool; target (B,), the index of the element of largest norm."""

    x: Tensor
    valid: Tensor
    target: Tensor

    def largest(self) -> Tensor:
        """(B, 2)."""
        return self.x[torch.arange(len(self.x)), self.target]


def draw(count: int) -> Sets:
    """Random sets."""
    valid = torch.arange(LARGEST) < torch.randint(SMALLEST, LARGEST + 1, (count, 1))
    x = torch.randn(count, LARGEST, 2) * valid.unsqueeze(-1)
    return Sets(x, valid, x.norm(dim=-1).argmax(-1))


class Model(nn.Module):
    """Two blocks of set attention, then a pool with a seed or learned query for each question."""

    def __init__(self, name: str) -> None:
        super().__init__()
        dim, heads = 32, 4

        def block() -> nn.Module:
            attention = CrossAttention(dim, heads)
            if name == "plain":
                return PlainBlock(attention)
            return CrossAttentionBlock(dim, attention, FeedForward(dim, 64))

        self.embed = nn.Linear(2, dim)
        self.blocks = nn.ModuleList(ISAB(dim, INDUCING, block(), block()) for _ in range(2))
        self.pool = LearnedQueryAttention(2, dim, heads) if name == "queries" else PMA(dim, 2, block())
        self.regress = nn.Linear(dim, 2)
        self.pointer = PointerAttention(dim, dim, dim)

    def forward(self, x: Tensor, valid: Tensor) -> tuple[Tensor, Tensor]:
        """(B, T, 2) -> the largest element (B, 2), and the log-probability that each is it (B, T)."""
        states = self.embed(x)
        for block in self.blocks:
            states = block(states, valid=valid)
        pooled = self.pool(states, valid=valid)  # (B, 2, D)
        pointed = self.pointer(pooled[:, 1:], states, mask=valid.unsqueeze(1))
        return self.regress(pooled[:, 0]), pointed.squeeze(1)


def learn(model: Model, steps: int) -> Results:
    """Train on random sets."""

    def loss() -> Tensor:
        sets = draw(64)
        regressed, pointed = model(sets.x, sets.valid)
        return F.mse_loss(regressed, sets.largest()) + F.nll_loss(pointed, sets.target)

    return train(loss, model.parameters(), steps, 3e-3)


def main() -> None:
    """Train each model, evaluate it on unseen sets, draw."""
    options = parse(__doc__, steps=2000)
    models, rows = [Model(name) for name in MODELS], []
    for name, model in zip(MODELS, models, strict=True):
        torch.manual_seed(SEED)
        trained = learn(model, options.steps)
        rows.append({"model": name, **judge(model, draw(UNSEEN)), **trained})
    report("largest", {"rows": rows}, show(models[0], draw(6)), options)


@torch.no_grad()
def judge(model: Model, sets: Sets) -> Results:
    """Accuracy of the pointer and error of the regression, each beside that of an answer that ignores the set."""
    regressed, pointed = model(sets.x, sets.valid)
    chosen, best = pointed.argmax(-1), sets.largest()
    return {
        "pointing_accuracy": (chosen == sets.target).float().mean().item(),
        "chance_accuracy": (1 / sets.valid.sum(-1)).mean().item(),
        "regression_mse": F.mse_loss(regressed, best).item(),
        "pointed_mse": F.mse_loss(sets._replace(target=chosen).largest(), best).item(),
        "mean_mse": best.var(0, correction=0).mean().item(),
    }


@torch.no_grad()
def show(model: Model, sets: Sets) -> Figure:
    """Draw each set's elements in the color of their probability, a ring around the largest, and what is regressed."""
    regressed, pointed = model(sets.x, sets.valid)
    figure = Figure(figsize=(12, 8), layout="constrained")
    grid = figure.subplots(2, 3, sharex=True, sharey=True)
    for axes, x, valid, best, guess, log_probability in zip(
        grid.flat, sets.x, sets.valid, sets.largest(), regressed, pointed, strict=True
    ):
        across, up = x[valid].T.tolist()
        shares = log_probability[valid].exp().tolist()
        points = axes.scatter(across, up, 40, shares, cmap="viridis_r", vmin=0, vmax=1, label="element")
        axes.scatter(*best.tolist(), 200, facecolors="none", edgecolors="tab:red", linewidths=2, label="largest")
        axes.scatter(*guess.tolist(), 90, "tab:red", marker="x", linewidths=2, label="regressed")
        axes.scatter(0, 0, 40, "grey", marker="+", label="origin")
        axes.set_aspect("equal")
        axes.set_title(f"{len(across)} elements, {max(shares):.0%} on one")
    figure.colorbar(points, ax=grid, label="probability of being pointed at")
    figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=4)
    return figure


if __name__ == "__main__":
    main()
