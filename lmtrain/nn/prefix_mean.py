"""The mean of values over every prefix of a sequence, weighted by a softmax of scores that decay with distance.

Shapes: B rows, H heads, T positions, D features per head, K chunks of C positions.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from lmtrain.nn.dot_product import to_blocks
from lmtrain.nn.kv_cache import RecurrentState

CHUNK = 32
MASKED = -1e30
"""A score below all others that, unlike -inf, leaves differences defined."""


def prefix_mean(score: Tensor, value: Tensor, slope: Tensor, span: int = 1) -> tuple[Tensor, Tensor]:
    """Return for every t the mean of value_i over i <= t under softmax_i(score_i - slope (t - i)), and the log of the
    softmax's denominator.

    score (B, H, T), value (B, H, T, D), slope (H,) >= 0 -> (B, H, T, D) and (B, H, T), in O(T). Neighbors are at
    distance `span`.

    First come the prefixes inside each chunk of C positions. The last of them is the whole chunk, which counts like one
    position: its mean is the value, and the log of its denominator the score. So this function, called for the chunks,
    returns the means over all chunks up to each, and these are mixed in.

        0 1 2 3 | 4 5 6 7 | 8 9 ..      prefix 6: positions 4 to 6 of its own chunk, and all chunks before that

    (Feng et al., 2024, arXiv 2405.13956, describe such a scan.)
    """
    length, decay = value.shape[2], span * slope.view(-1, 1, 1)
    score, value = to_blocks(score.unsqueeze(-1), CHUNK).squeeze(-1), to_blocks(value, CHUNK)
    offset = torch.arange(CHUNK, device=score.device)
    age = offset.unsqueeze(-1) - offset
    own = score.unsqueeze(-2) - decay.unsqueeze(-1) * age  # (B, H, K, C, C)
    own = own.masked_fill(age < 0, float("-inf"))
    mean, log_total = own.softmax(-1).to(value.dtype) @ value, own.logsumexp(-1)
    if length > CHUNK:
        before, log_before = prefix_mean(log_total[..., -1], mean[..., -1, :], slope, span * CHUNK)
        before = F.pad(before[:, :, :-1], (0, 0, 1, 0)).unsqueeze(-2)  # (B, H, K, 1, D)
        log_before = F.pad(log_before[..., :-1], (1, 0), value=MASKED).unsqueeze(-1)
        log_before = log_before - decay * (offset + 1)  # (B, H, K, C)
        share = (log_before - log_total).sigmoid().unsqueeze(-1)
        mean, log_total = mean + share * (before - mean), torch.logaddexp(log_before, log_total)
    return mean.flatten(2, 3)[:, :, :length], log_total.flatten(2, 3)[..., :length]


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
