"""The residual blocks of the encoder.

Shapes: B rows, T positions, D the model's width, F the hidden width of the feed-forward layer.
"""

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lmtrain.nn.attention import KeyValueCache, MultiHeadAttention
from lmtrain.nn.norms import NormKind, norm
from lmtrain.nn.positions import Rotation

Activation = Literal["relu", "relu2", "gelu", "swiglu"]


class FeedForward(nn.Module):
    """output(activation(hidden x)), position by position.

    `relu2` squares the rectified value (So et al., 2021); `swiglu` multiplies a SiLU gate with a second projection
    (Shazeer, 2020), which makes its hidden matrix twice as tall.
    """

    def __init__(self, dim: int, ff_dim: int, activation: Activation) -> None:
        super().__init__()
        self.activation = activation
        self.hidden = nn.Linear(dim, 2 * ff_dim if activation == "swiglu" else ff_dim, bias=False)
        self.output = nn.Linear(ff_dim, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """(..., D) -> (..., D)."""
        result: Tensor = self.output(self._activate(self.hidden(x)))
        return result

    def _activate(self, x: Tensor) -> Tensor:
        if self.activation == "relu":
            return F.relu(x)
        if self.activation == "relu2":
            return F.relu(x).square()
        if self.activation == "gelu":
            return F.gelu(x)
        gate, content = x.chunk(2, dim=-1)
        return F.silu(gate) * content


class EncoderBlock(nn.Module):
    """Self-attention, then feed-forward, each normalised before and added after (pre-norm, Xiong et al., 2020)."""

    def __init__(
        self,
        dim: int,
        heads: int,
        ff_dim: int,
        *,
        causal: bool = False,
        activation: Activation = "gelu",
        norm_kind: NormKind = "rms",
        qk_norm: bool = False,
        dropout: float = 0.0,
        attention_dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.attention_norm = norm(norm_kind, dim)
        self.attention = MultiHeadAttention(dim, heads, causal=causal, qk_norm=qk_norm, dropout=attention_dropout)
        self.feed_forward_norm = norm(norm_kind, dim)
        self.feed_forward = FeedForward(dim, ff_dim, activation)
        self.dropout = nn.Dropout(dropout)

    def forward(
        self, x: Tensor, rotation: Rotation | None = None, bias: Tensor | None = None, columns: int | None = None
    ) -> tuple[Tensor, KeyValueCache | None]:
        """(B, T, D) -> (B, T, D), and with `columns` a cache of so many columns that holds these tokens."""
        attended, cache = self.attention(self.attention_norm(x), rotation, bias, columns)
        return self._feed(x + self.dropout(attended)), cache

    def step(self, x: Tensor, cache: KeyValueCache, column: Tensor, rotation: Rotation | None, bias: Tensor) -> Tensor:
        """One token per row, (B, 1, D) -> (B, 1, D); see `MultiHeadAttention.step`."""
        return self._feed(x + self.attention.step(self.attention_norm(x), cache, column, rotation, bias))

    def _feed(self, x: Tensor) -> Tensor:
        result: Tensor = x + self.dropout(self.feed_forward(self.feed_forward_norm(x)))
        return result


def locked_dropout(x: Tensor, rate: float, training: bool) -> Tensor:
    """Dropout of (B, T, D) or (B, D) with one mask per row and feature for all positions (Gal & Ghahramani, 2016)."""
    if not training or not rate:
        return x
    return x * F.dropout(torch.ones_like(x[:, :1] if x.dim() == 3 else x), rate)
