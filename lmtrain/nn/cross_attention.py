"""Attention to a memory (Vaswani et al., 2017), and the blocks that have it: of encoders, decoders and sets.

Shapes: B rows, H heads, T positions (Tq of queries, Tk of keys, Tm of a memory), D the width of a block or the features
per head (Dv of values, those of the widest head), W the width of an input or output.
"""

from collections.abc import Sequence
from typing import Unpack

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lmtrain.nn.attention import ResidualProjection, SelfAttention, join_heads, split_heads
from lmtrain.nn.blocks import FeedForward, Residual, ResidualOptions
from lmtrain.nn.dot_product import attention_weights
from lmtrain.nn.dropout import drop
from lmtrain.nn.norms import NORMS, RMSNorm


class CrossAttention(nn.Module):
    """Multi-head attention of queries to other vectors.

    | argument         | width of                                        | default      |
    | ---------------- | ----------------------------------------------- | ------------ |
    | `dim`            | the input of the queries                        |              |
    | `key_dim`        | the input of the keys                           | `dim`        |
    | `value_dim`      | the input of the values                         | `key_dim`    |
    | `output_dim`     | the result                                      | `dim`        |
    | `head_dim`       | a head's queries and keys                       | dim / heads  |
    | `value_head_dim` | a head's values; a list has one width per head  | `head_dim`   |

    `qk_norm` and `scale` are those of `SelfAttention`.
    """

    def __init__(
        self,
        dim: int,
        heads: int,
        *,
        key_dim: int | None = None,
        value_dim: int | None = None,
        output_dim: int | None = None,
        head_dim: int | None = None,
        value_head_dim: int | Sequence[int] | None = None,
        qk_norm: bool = False,
        scale: float | None = None,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        key_dim = key_dim or dim
        head_dim = head_dim or dim // heads
        value_head_dim = value_head_dim or head_dim
        self.value_widths = [value_head_dim] * heads if isinstance(value_head_dim, int) else [*value_head_dim]
        self.heads = heads
        self.scale = scale
        self.dropout = dropout
        self.query = nn.Linear(dim, heads * head_dim, bias=False)
        self.key = nn.Linear(key_dim, heads * head_dim, bias=False)
        self.value = nn.Linear(value_dim or key_dim, sum(self.value_widths), bias=False)
        self.output = ResidualProjection(sum(self.value_widths), output_dim or dim, bias=False)
        self.query_norm = RMSNorm(head_dim) if qk_norm else nn.Identity()
        self.key_norm = RMSNorm(head_dim) if qk_norm else nn.Identity()

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor | None = None, *, mask: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """(B, Tq, W), (B, Tk, W), (B, Tk, W) -> (B, Tq, W), and the weights (B, H, Tq, Tk). Values default to the keys.

        `mask` is as for `attend`. Weights are those before dropout.
        """
        pooled, weights = self.pooled(query, key, value, mask=mask)
        return self.output(pooled), weights

    def pooled(
        self, query: Tensor, key: Tensor, value: Tensor | None = None, *, mask: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """The joined heads, not yet projected (B, Tq, sum of their widths), and the weights of `forward`."""
        values = self._split_values(self.value(key if value is None else value))
        queries = self.query_norm(split_heads(self.query(query), self.heads))
        keys = self.key_norm(split_heads(self.key(key), self.heads))
        weights = self.weights(queries, keys, mask)
        return self._join_heads(drop(weights.to(values.dtype), self.dropout, self.training) @ values), weights

    def weights(self, query: Tensor, key: Tensor, mask: Tensor | None) -> Tensor:
        """Queries (B, H, Tq, D), keys (B, H, Tk, D) -> (B, H, Tq, Tk)."""
        return attention_weights(query, key, mask, self.scale)

    def _join_heads(self, pooled: Tensor) -> Tensor:
        """(B, H, T, Dv) -> (B, T, sum of the widths)."""
        if len(set(self.value_widths)) == 1:
            return join_heads(pooled)
        return torch.cat([pooled[:, head, :, :width] for head, width in enumerate(self.value_widths)], dim=-1)

    def _split_values(self, value: Tensor) -> Tensor:
        """(B, T, sum of the widths) -> (B, H, T, Dv): where widths differ, each is padded with zeros to the widest."""
        if len(set(self.value_widths)) == 1:
            return split_heads(value, self.heads)
        widest, parts = max(self.value_widths), torch.split(value, self.value_widths, dim=-1)
        return torch.stack([F.pad(part, (0, widest - part.shape[-1])) for part in parts], dim=1)


class CrossAttentionBlock(nn.Module):
    """Attention from x to a memory, then feed-forward, each in a residual: the cross-attention block of Perceiver IO
    (Jaegle et al., 2022).

    With `norm_position="pre"` the memory has a norm of its own.
    """

    def __init__(
        self, dim: int, attention: CrossAttention, feed_forward: FeedForward, **options: Unpack[ResidualOptions]
    ) -> None:
        super().__init__()
        self.attention = attention
        self.attention_residual = Residual(dim, **options)
        pre = self.attention_residual.pre
        self.memory_norm = NORMS[options.get("norm_kind", "rms")](dim) if pre else nn.Identity()
        self.feed_forward = feed_forward
        self.feed_forward_residual = Residual(dim, **options)

    def forward(self, x: Tensor, memory: Tensor, *, mask: Tensor | None = None) -> Tensor:
        """x (B, T, D), memory (B, Tm, D) -> (B, T, D). `mask` is as for `attend`."""
        memory = self.memory_norm(memory)
        x = self.attention_residual(x, lambda y: self.attention(y, memory, mask=mask)[0])
        return self.feed_forward_residual(x, self.feed_forward)


class DecoderBlock(nn.Module):
    """Masked self-attention, attention to a memory, then feed-forward, each in a residual (Vaswani et al., 2017).

    The memory is not normalized here, since an encoder ends with a norm. `options` are those of `Residual`.
    """

    def __init__(
        self,
        dim: int,
        self_attention: SelfAttention,
        cross_attention: CrossAttention,
        feed_forward: FeedForward,
        **options: Unpack[ResidualOptions],
    ) -> None:
        super().__init__()
        self.self_attention = self_attention
        self.self_residual = Residual(dim, **options)
        self.cross_attention = cross_attention
        self.cross_residual = Residual(dim, **options)
        self.feed_forward = feed_forward
        self.feed_forward_residual = Residual(dim, **options)

    def forward(
        self, x: Tensor, memory: Tensor, *, mask: Tensor | None = None, memory_mask: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """x (B, T, D), memory (B, Tm, its width) -> (B, T, D), and the weights of the attention to the memory
        (B, H, T, Tm). The masks of x and of the memory are as for `attend`."""
        x = self.self_residual(x, lambda y: self.self_attention(y, mask=mask))
        attended, weights = self.cross_attention(self.cross_residual.enter(x), memory, mask=memory_mask)
        x = self.cross_residual.leave(x, attended)
        return self.feed_forward_residual(x, self.feed_forward), weights
