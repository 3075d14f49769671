"""Attention pooling: the Set Transformer's PMA with one seed (Lee et al., 2019), over a window or over every prefix.

The pool of position t over the positions i <= t, per head h, with keys k and values v from norm(x):

    score   a_i = seed.k_i / sqrt(D) - m_h (t - i)      m = 0 if `query` is "seed"; m_h >= 0 is learned if "recency"
    pooled  O_h = sum_i softmax(a)_i v_i
    output  y = r + W_O [O_1 .. O_H],  out = y + FF(norm(y))        r = the seed if `residual` is "seed"; x_t if "state"

With "seed" for both, this is `sets.PMA` of one seed and a `CrossAttentionBlock`, except that the seed is the query
itself: `PMA` normalizes it and projects it by a W_Q first, which one learned vector does not need.

The query does not depend on t, so neither does seed.k_i, and the part -m_h t cancels in the softmax: the pools of all
prefixes are a running softmax mean, in O(T), and decoding needs O(1) state.

Shapes: B rows, H heads, T positions, D features per head, W = H D the width (in `blocks` and `model`: D).
"""

import math
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lmtrain.nn.attention import ResidualProjection, join_heads, split_heads
from lmtrain.nn.blocks import FeedForward
from lmtrain.nn.dropout import drop
from lmtrain.nn.norms import NORMS, NormKind
from lmtrain.nn.precision import at_least_float32
from lmtrain.nn.prefix_mean import MASKED, RunningMean, prefix_mean

PoolQuery = Literal["seed", "recency"]
PoolResidual = Literal["seed", "state"]


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
        self.norm = NORMS[norm_kind](dim)
        self.seed = nn.Parameter(torch.zeros(dim))
        self.slope = nn.Parameter(slope_parameters(heads)) if query == "recency" else None
        self.key = nn.Linear(dim, dim, bias=False)
        self.value = nn.Linear(dim, dim, bias=False)
        self.output = ResidualProjection(dim, dim, bias=False)
        self.feed_forward_norm = NORMS[norm_kind](dim)
        self.feed_forward = feed_forward

    def forward(self, x: Tensor, first: int = 0) -> Tensor:
        """The pool of every prefix that ends at position `first` or later: (B, T, W) -> (B, T - first, W)."""
        score, value = self._project(x)
        if self.training and self.attention_dropout:
            value = value * drop(torch.ones_like(value[..., :1]), self.attention_dropout)
        pooled, _ = prefix_mean(score, value, self._slope())
        return self._finish(x[:, first:], pooled[:, :, first:].to(value.dtype))

    def window(self, x: Tensor) -> Tensor:
        """The pool of the whole window, for its last position: (B, T, W) -> (B, 1, W); see `weights`."""
        score, value = self._project(x)
        weights = self._weights(score).to(value.dtype).unsqueeze(-2)  # (B, H, 1, T)
        pooled = drop(weights, self.attention_dropout, self.training) @ value
        return self._finish(x[:, -1:], pooled)

    def weights(self, x: Tensor) -> Tensor:
        """The attention weights of the last position's pool: (B, T, W) -> (B, H, T)."""
        return self._weights(self._project(x)[0])

    def prefill(self, x: Tensor, lengths: Tensor) -> RunningMean:
        """Return the state for `step` after the first `lengths` (B,) positions of x (B, T, W)."""
        mean, log_total = prefix_mean(*self._project(x), self._slope())
        mean, log_total = F.pad(mean, (0, 0, 1, 0)), F.pad(log_total, (1, 0), value=MASKED)  # of no position
        rows = torch.arange(len(x), device=x.device)
        return RunningMean(at_least_float32(mean[rows, :, lengths]), log_total[rows, :, lengths])

    def step(self, x: Tensor, state: RunningMean) -> Tensor:
        """Pool one more position per row: x (B, 1, W) -> (B, 1, W). Updates `state`."""
        score, value = self._project(x)
        state.add(score.squeeze(-1), value.squeeze(-2), self._slope())
        return self._finish(x, state.mean.unsqueeze(-2).to(value.dtype))

    def _project(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The scores seed.k_i / sqrt(D) (B, H, T), float32 under autocast, and values (B, H, T, D) of x (B, T, W).

        seed.(W_K x) is computed as (W_K^T seed).x, so that no keys are needed.
        """
        normed = self.norm(x)
        value = split_heads(self.value(normed), self.heads)
        seed, key = self.seed.view(self.heads, -1), self.key.weight.view(self.heads, -1, len(self.seed))
        with torch.autocast(normed.device.type, enabled=False):
            weight = (seed.unsqueeze(1) @ key).squeeze(1) * seed.shape[-1] ** -0.5  # (H, W)
            score = F.linear(normed.to(weight.dtype), weight).transpose(1, 2)
        return score, value

    def _slope(self) -> Tensor:
        """(H,) slopes in nats per position, not negative."""
        return self.seed.new_zeros(self.heads) if self.slope is None else F.softplus(self.slope)

    def _weights(self, score: Tensor) -> Tensor:
        age = score.shape[-1] - 1 - torch.arange(score.shape[-1], device=score.device)
        return (score - self._slope().unsqueeze(-1) * age).softmax(-1)

    def _finish(self, x: Tensor, pooled: Tensor) -> Tensor:
        """Output projection, residuals and feed-forward: x (B, T, W), pooled (B, H, T, D) -> (B, T, W)."""
        residual = x if self.residual == "state" else self.seed
        y = residual + drop(self.output(join_heads(pooled)), self.dropout, self.training)
        return y + drop(self.feed_forward(self.feed_forward_norm(y)), self.dropout, self.training)


def slope_parameters(heads: int) -> Tensor:
    """Return initial values of `slope` (H,), for slopes spread log-evenly from 4 to 0.02 nats per position.

    A slope of 4 leaves little but the last token; 0.02 has a half-life of 35. A single head starts at their geometric
    mean.
    """
    log_slopes = (
        torch.linspace(math.log(4.0), math.log(0.02), heads) if heads > 1 else torch.tensor([math.log(0.08) / 2])
    )
    return log_slopes.exp().expm1().log()  # the inverse of softplus
