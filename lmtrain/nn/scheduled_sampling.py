"""Parallel scheduled sampling: training on inputs some of which are the model's own predictions.

A first pass reads the true inputs x_0 .. x_{T-1} and samples a token from every prediction. The sample at position
t - 1, which has read x_0 .. x_{t-1}, replaces input t in the second pass, whose loss is minimized. The targets stay the
same (Bengio et al., 2015; in parallel: Mihaylova & Martins, 2019; Duckworth et al., 2019).

Shapes: B rows, T positions, V words.
"""

import torch
from torch import Tensor


def mix(gold: Tensor, sampled: Tensor, probability: float) -> Tensor:
    """Return the inputs of the second pass: `gold` (B, T), each replaced by `sampled` (B, T) with this probability.

    Position 0, BEGIN or the first token, has no prediction and is never replaced.

    sampled[:, t] replaces gold[:, t], so it must come from the prediction at t - 1. Raises ValueError unless
    `probability` lies between 0 and 1.
    """
    if not 0 <= probability <= 1:
        raise ValueError(f"probability={probability} must lie between 0 and 1")
    chosen = torch.rand(gold.shape, device=gold.device) < probability  # rand < 1: at 1 all, at 0 none
    chosen[:, :1] = False
    return torch.where(chosen, sampled, gold)


def sample(logits: Tensor) -> Tensor:
    """Sample a token from each distribution softmax(logits): (..., V) -> (...) int64, by torch's default generator.

    One uniform number per distribution is searched in its cumulative sum, in float64; noise for every word (the
    Gumbel-max trick) would cost many times the softmax on a CPU. A token of probability zero is never sampled.
    """
    cumulative = logits.softmax(-1, dtype=torch.float32).cumsum(-1, dtype=torch.float64)
    total = cumulative[..., -1:]
    uniform = torch.rand(total.shape, dtype=torch.float64, device=logits.device) * total
    uniform = torch.minimum(uniform, total.nextafter(torch.zeros_like(total)))
    return torch.searchsorted(cumulative, uniform, right=True).squeeze(-1)
