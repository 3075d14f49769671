"""The mean of values over every prefix of a sequence, weighted by a softmax of scores that decay with distance.

Shapes: B rows, H heads, T positions, D features per head, K chunks of C positions, G groups of C chunks.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from lmtrain.nn.dot_product import to_blocks
from lmtrain.nn.kv_cache import RecurrentState

CHUNK = 32
MASKED = -1e30
"""A score below all others that, unlike -inf, leaves differences defined."""


def prefix_mean(score: Tensor, value: Tensor, slope: Tensor) -> Tensor:
    """Return for every t the mean of value_i over i <= t under softmax_i(score_i - slope (t - i)).

    score (B, H, T), value (B, H, T, D), slope (H,) >= 0 -> (B, H, T, D), in O(T): each position is merged with the sums
    over all before it (Feng et al., 2024, arXiv 2405.13956, describe the scan). Each exponent is relative to the
    largest of its sum, so that none is above zero, at any slope, length or score.
    """
    slope = slope.view(-1, 1)
    peak, total, summed = _sums_before(score, torch.ones_like(score), value, slope.unsqueeze(-1), 1)
    before = peak - slope
    highest = torch.maximum(score, before).detach()  # it cancels in the mean, so it carries no gradient
    own, past = (score - highest).exp(), (before - highest).exp()
    mean = (own.unsqueeze(-1) * value + past.unsqueeze(-1) * summed) / (own + past * total).unsqueeze(-1)
    return mean.to(value.dtype)


def _sums_before(
    peak: Tensor, total: Tensor, summed: Tensor, slope: Tensor, span: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Return for each chunk the sums over all chunks before it. A chunk has `span` positions.

    Sums over positions i up to the position `end` are three tensors:

        total  (B, H, K)     sum of exp(score_i - slope (end - i) - peak)
        summed (B, H, K, D)  the same sum, with each term times value_i
        peak   (B, H, K)     the largest exponent, so that nothing overflows

    The arguments are the sums of each chunk, with `end` its last position; slope (H, 1, 1). The results have the same
    shapes, with `end` the one before the chunk. The chunks form groups of C:

        0 1 2 3 | 4 5 6 7 | 8 9 ..      before chunk 6: chunks 4 and 5 of its own group, and the groups before it

    and the sums over the groups before a group are what this function returns for the groups as chunks: O(K) in all.
    """
    chunks = peak.shape[-1]
    if chunks == 1:
        return torch.full_like(peak, MASKED), torch.zeros_like(total), torch.zeros_like(summed)
    size = min(CHUNK, chunks)
    peak, total = (to_blocks(x.unsqueeze(-1), size).squeeze(-1) for x in (peak, total))  # (B, H, G, C)
    summed, offset = to_blocks(summed, size), torch.arange(size, device=peak.device)  # (B, H, G, C, D), (C,)

    # Each group by itself, relative to its end; then all groups before each group.
    relative = peak - slope * (span * (size - 1 - offset))
    group_peak = relative.detach().amax(-1)
    weight = (relative - group_peak.unsqueeze(-1)).exp()
    group_total = (weight * total).sum(-1)  # (B, H, G)
    group_sum = (weight.to(summed.dtype).unsqueeze(-2) @ summed).squeeze(-2)  # (B, H, G, D)
    before, before_total, before_sum = _sums_before(group_peak, group_total, group_sum, slope, span * size)

    # Each chunk: those before it in its own group, and the groups before that.
    gap = offset.unsqueeze(-1) - 1 - offset  # (C, C)
    relative = peak.unsqueeze(-2) - slope.unsqueeze(-1) * (span * gap)
    relative = relative.masked_fill(gap < 0, float("-inf"))  # (B, H, G, C, C)
    before = before.unsqueeze(-1) - slope * (span * offset)  # (B, H, G, C)
    highest = torch.maximum(relative.detach().amax(-1), before.detach())
    weight = (relative - highest.unsqueeze(-1)).exp()
    past = (before - highest).exp()
    carried_total = (weight * total.unsqueeze(-2)).sum(-1) + past * before_total.unsqueeze(-1)  # (B, H, G, C)
    inside = weight.to(summed.dtype) @ summed  # (B, H, G, C, D)
    carried_sum = inside + past.unsqueeze(-1) * before_sum.unsqueeze(-2)
    highest, carried_total, carried_sum = (
        x.flatten(2, 3)[:, :, :chunks] for x in (highest, carried_total, carried_sum)
    )
    return highest, carried_total, carried_sum


@dataclass
class RunningMean(RecurrentState):
    """The state of the pool in decoding: the softmax mean over each row's positions.

    mean (B, H, D), and log_total (B, H), the log of the sum of exp(score_i - slope (t - i)), with t the last position.
    """

    mean: Tensor
    log_total: Tensor

    def add(self, score: Tensor, value: Tensor, slope: Tensor) -> None:
        """Advance by one position: score (B, H), value (B, H, D), slope (H,)."""
        before = self.log_total - slope
        # The new position's weight is exp(score) / (exp(score) + exp(before)).
        self.mean.lerp_(value.to(self.mean.dtype), (score - before).sigmoid().unsqueeze(-1))
        self.log_total.copy_(torch.logaddexp(score, before))
