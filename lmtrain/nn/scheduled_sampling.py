"""Scheduled sampling in parallel: training on inputs some of which the model made itself.

A first pass reads the true inputs x_0 .. x_{T-1} and draws a token from every prediction. What is drawn at position
t - 1, having read x_0 .. x_{t-1}, stands for input t in the second pass, the one that is learned from. The targets stay
true (Bengio et al., 2015; in parallel: Mihaylova & Martins, 2019; Duckworth et al., 2019).

Shapes: B rows, T positions, V words.
"""

import torch
from torch import Tensor


def choose(gold: Tensor, probability: float) -> Tensor:
    """Which inputs (B, T) are to be replaced, each independently so probably: (B, T) bool.

    Column 0, the BEGIN or first token, which nothing predicts, never is. Raises ValueError unless it is a probability.
    """
    if not 0 <= probability <= 1:
        raise ValueError(f"probability={probability} must lie between 0 and 1")
    chosen = torch.rand(gold.shape, device=gold.device) < probability  # rand < 1: at 1 all, at 0 none
    chosen[:, :1] = False
    return chosen


def mix(gold: Tensor, sampled: Tensor, probability: float) -> Tensor:
    """The inputs of the second pass: `gold` (B, T), those that `choose` picks replaced by `sampled` (B, T).

    sampled[:, t] is for the place of gold[:, t], so it must come from the prediction at t - 1.
    """
    return torch.where(choose(gold, probability), sampled, gold)


def sample(logits: Tensor) -> Tensor:
    """A token from each distribution softmax(logits): (..., V) -> (...) int64, from torch's default generator.

    One uniform number per distribution is looked up in its cumulative sum, taken in float64; noise for every word (the
    Gumbel-max trick) would cost many times the softmax on a CPU. What has probability zero is never drawn.
    """
    reached = logits.softmax(-1, dtype=torch.float32).cumsum(-1, dtype=torch.float64)
    total = reached[..., -1:]
    drawn = torch.rand(total.shape, dtype=torch.float64, device=logits.device) * total
    drawn = torch.minimum(drawn, total.nextafter(torch.zeros_like(total)))
    return torch.searchsorted(reached, drawn, right=True).squeeze(-1)
