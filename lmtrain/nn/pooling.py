"""Attention pooling: the Set Transformer's PMA with one seed (Lee et al., 2019), over a window or over every prefix.

The pool of position t over the positions i <= t, per head h, with keys k and values v from norm(x):

    score   a_i = seed.k_i / sqrt(D) - m_h (t - i)      m = 0 if `query` is "seed"; m_h >= 0 is learned if "recency"
    pooled  O_h = sum_i softmax(a)_i v_i
    output  y = r + W_O [O_1 .. O_H],  out = y + FF(norm(y))        r = the seed if `residual` is "seed"; x_t if "state"

With "seed" for both, this is `sets.PMA` with one seed in its residual form, except that the seed is the query itself:
`PMA` normalizes it and projects it by a W_Q first, which one learned vector does not need.

The query does not depend on t, so neither does seed.k_i, and the part -m_h t cancels in the softmax: the pools of all
prefixes are a running softmax mean, in O(T), and decoding needs O(1) state.

Shapes: B rows, H heads, T positions, D features per head, H * D the model's width, K chunks of C positions, G groups
of C chunks.
"""

import math
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lmtrain.nn.attention import ResidualProjection, join_heads, split_heads
from lmtrain.nn.blocks import FeedForward
from lmtrain.nn.dot_product import to_blocks
from lmtrain.nn.dropout import drop
from lmtrain.nn.kv_cache import RecurrentState
from lmtrain.nn.norms import NormKind, make_norm

PoolQuery = Literal["seed", "recency"]
PoolResidual = Literal["seed", "state"]

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

    The arguments are the sums of each chunk, `end` being its last position; slope (H, 1, 1). The results have the same
    shapes, `end` being the last position before the chunk. The chunks form groups of C:

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

    mean (B, H, D), and log_total (B, H), the log of the sum of exp(score_i - slope (t - i)), t being the last position.
    """

    mean: Tensor
    log_total: Tensor

    def add(self, score: Tensor, value: Tensor, slope: Tensor) -> None:
        """Advance by one position: score (B, H), value (B, H, D), slope (H,)."""
        before = self.log_total - slope
        # The new position's weight is exp(score) / (exp(score) + exp(before)).
        self.mean.lerp_(value.to(self.mean.dtype), (score - before).sigmoid().unsqueeze(-1))
        self.log_total.copy_(torch.logaddexp(score, before))


class AttentionPooling(nn.Module):
    """The pooling block described at the top of this file.

    Dropout on the attention weights is one mask per key and head, shared by all prefixes.
    """

    def __init__(
        self,
        dim: int,
        heads: int,
        feed_forward: FeedForward,
        *,
        query: PoolQuery = "recency",
        residual: PoolResidual = "state",
        norm_kind: NormKind = "rms",
        dropout: float = 0.0,
        attention_dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.heads = heads
        self.residual = residual
        self.dropout = dropout
        self.attention_dropout = attention_dropout
        self.norm = make_norm(norm_kind, dim)
        self.seed = nn.Parameter(torch.zeros(dim))
        self.slope = nn.Parameter(torch.zeros(heads)) if query == "recency" else None
        self.key = nn.Linear(dim, dim, bias=False)
        self.value = nn.Linear(dim, dim, bias=False)
        self.output = ResidualProjection(dim, dim, bias=False)
        self.feed_forward_norm = make_norm(norm_kind, dim)
        self.feed_forward = feed_forward

    def forward(self, x: Tensor) -> Tensor:
        """The pool of every prefix: (B, T, H D) -> (B, T, H D)."""
        score, value = self._project(x)
        if self.training and self.attention_dropout:
            value = value * drop(torch.ones_like(value[..., :1]), self.attention_dropout)
        return self._finish(x, prefix_mean(score, value, self._slope()))

    def window(self, x: Tensor) -> Tensor:
        """The pool of the whole window, for its last position: (B, T, H D) -> (B, H D); see `weights`."""
        score, value = self._project(x)
        weights = self._weights(score).to(value.dtype).unsqueeze(-2)  # (B, H, 1, T)
        pooled = drop(weights, self.attention_dropout, self.training) @ value
        return self._finish(x[:, -1:], pooled).squeeze(1)

    def weights(self, x: Tensor) -> Tensor:
        """The attention weights of the last position's pool: (B, T, H D) -> (B, H, T)."""
        return self._weights(self._project(x)[0])

    def prefill(self, x: Tensor, lengths: Tensor) -> RunningMean:
        """Return the state for `step` after the first `lengths` (B,) positions of x (B, T, H D)."""
        score, value = self._project(x)
        age = lengths.unsqueeze(-1) - 1 - torch.arange(x.shape[1], device=x.device)  # (B, T), negative = padding
        score = score - self._slope().unsqueeze(-1) * age.unsqueeze(1)
        score = score.masked_fill(age.unsqueeze(1) < 0, float("-inf"))  # (B, H, T)
        score = F.pad(score, (0, 1), value=MASKED)  # an empty row's only key
        log_total = score.logsumexp(-1)
        weight = (score - log_total.unsqueeze(-1)).exp()[..., :-1]
        mean = (weight.unsqueeze(-1) * value).sum(-2)  # no product of matrices: autocast would make it bf16
        return RunningMean(mean, log_total)

    def step(self, x: Tensor, state: RunningMean) -> Tensor:
        """Pool one more position per row: x (B, 1, H D) -> (B, H D). Updates `state`."""
        score, value = self._project(x)
        state.add(score.squeeze(-1), value.squeeze(-2), self._slope())
        return self._finish(x, state.mean.unsqueeze(-2).to(value.dtype)).squeeze(1)

    def score_weight(self) -> Tensor:
        """W_K^T seed / sqrt(D), whose product with norm(x_i) is the scores of i: (H, H D)."""
        seed, key = self.seed.view(self.heads, -1), self.key.weight.view(self.heads, -1, len(self.seed))
        return (seed.unsqueeze(1) @ key).squeeze(1) * seed.shape[-1] ** -0.5

    def _project(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The scores seed.k_i / sqrt(D) (B, H, T), float32 under autocast, and values (B, H, T, D) of x (B, T, H D).

        seed.(W_K x) is computed as (W_K^T seed).x, so that no keys are needed.
        """
        normed = self.norm(x)
        value = split_heads(self.value(normed), self.heads)
        with torch.autocast(normed.device.type, enabled=False):
            weight = self.score_weight()
            score = F.linear(normed.to(weight.dtype), weight).transpose(1, 2)
        return score, value

    def _slope(self) -> Tensor:
        """(H,) slopes in nats per position, not negative."""
        return self.seed.new_zeros(self.heads) if self.slope is None else F.softplus(self.slope)

    def _weights(self, score: Tensor) -> Tensor:
        age = score.shape[-1] - 1 - torch.arange(score.shape[-1], device=score.device)
        return (score - self._slope().unsqueeze(-1) * age).softmax(-1)

    def _finish(self, x: Tensor, pooled: Tensor) -> Tensor:
        """Output projection, residuals and feed-forward: x (B, T, H D), pooled (B, H, T, D) -> (B, T, H D)."""
        residual = x if self.residual == "state" else self.seed
        y = residual + drop(self.output(join_heads(pooled)), self.dropout, self.training)
        return y + drop(self.feed_forward(self.feed_forward_norm(y)), self.dropout, self.training)


def slope_parameters(heads: int) -> Tensor:
    """Return initial values of `slope` (H,), for slopes spread log-evenly from 4 to 0.02 nats per position.

    A slope of 4 leaves little but the last token; 0.02 has a half-life of 35. A single head starts at their geometric
    mean.
    """
    exponents = (
        torch.linspace(math.log(4.0), math.log(0.02), heads) if heads > 1 else torch.tensor([math.log(0.08) / 2])
    )
    return exponents.exp().expm1().log()
