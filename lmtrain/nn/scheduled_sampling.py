"""Scheduled sampling in parallel: training on inputs some of which the model made itself.

A first pass reads the true inputs x_0 .. x_{T-1} and draws a token from every prediction. What is drawn at position
t - 1, having read x_0 .. x_{t-1}, stands for input t in the second pass, the one that is learned from. The targets stay
true (Bengio et al., 2015; in parallel: Mihaylova & Martins, 2019; Duckworth et al., 2019).

Shapes: B rows, T positions, V words.
"""

import torch
from torch import Tensor


def mix(gold: Tensor, sampled: Tensor, probability: float) -> Tensor:
    """The inputs of the second pass: `gold` (B, T), each replaced by `sampled` (B, T) with this probability.

    The draws are independent. sampled[:, t] is for the place of gold[:, t], so it must come from the prediction at
    t - 1. Column 0, the BEGIN or first token, which nothing predicts, is never replaced. Raises ValueError unless
    0 <= probability <= 1.
    """
    if not 0 <= probability <= 1:
        raise ValueError(f"probability={probability} must lie between 0 and 1")
    replaced = torch.rand(gold.shape, device=gold.device) < probability  # rand < 1: at 1 all, at 0 none
    replaced[:, :1] = False
    return torch.where(replaced, sampled, gold)


def sample(logits: Tensor) -> Tensor:
    """A token from each distribution softmax(logits): (..., V) -> (...) int64, from torch's default generator.

    The Gumbel-max trick: the place of the maximum of logits + noise, with noise -log(e), e exponential (Gumbel, 1954).
    Nothing needs to be normalised; the noise, made in place, is all the memory that it takes. -inf is never drawn.
    """
    noise = torch.empty_like(logits, dtype=torch.float32).exponential_().log_().neg_()
    return noise.add_(logits.detach()).argmax(-1)
