"""Scaled dot-product attention, the multi-head layer around it, and its cache for decoding.

Shapes: B rows, H heads, T positions (Tq of queries, Tk of keys), D features per head, H * D the model's width,
N columns of a cache.
"""

from dataclasses import dataclass
from typing import Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lmtrain.nn.positions import Rotation, rotate


def attend(
    query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None = None, *, causal: bool = False, dropout: float = 0.0
) -> Tensor:
    """softmax(query key^T / sqrt(D) + bias) value (Vaswani et al., 2017): (B, H, Tq, D), (B, H, Tk, D) x2 -> query's.

    `bias` is added to the scores and broadcasts to (B, H, Tq, Tk); -inf forbids a key, and every query needs at least
    one key. `causal` forbids the keys after the query (Tq = Tk). `dropout` is the rate on the weights.

    A GPU takes torch's fused kernels, except for a bias that is being learned, for which they have no gradient. A CPU
    takes the plain form: compiled, it is three times as fast as the fused CPU kernel in bf16.
    """
    if query.is_cuda and not (bias is not None and bias.requires_grad):
        if causal and bias is not None:
            bias, causal = bias.masked_fill(_future(query, key), float("-inf")), False
        bias = bias.to(query.dtype) if bias is not None else None
        return F.scaled_dot_product_attention(query, key, value, bias, dropout, is_causal=causal)
    scores = (query * query.shape[-1] ** -0.5) @ key.transpose(-2, -1)  # (B, H, Tq, Tk)
    # No cast to float32: softmax sums in float32 whatever its input, and bf16 halves what is kept for the gradient.
    # A float32 bias makes the sum float32, as it must: bf16 can't tell position 257 from 256.
    if bias is not None:
        scores = scores + bias
    if causal:
        scores = scores.masked_fill(_future(query, key), float("-inf"))
    weights = F.dropout(scores.softmax(-1).to(value.dtype), dropout, training=dropout > 0)
    return weights @ value


def _future(query: Tensor, key: Tensor) -> Tensor:
    """(Tq, Tk) bool: which keys lie after the query."""
    queries = torch.arange(query.shape[-2], device=query.device)
    keys = torch.arange(key.shape[-2], device=query.device)
    return keys > queries.unsqueeze(-1)


def split_heads(x: Tensor, heads: int) -> Tensor:
    """(B, T, H D) -> (B, H, T, D)."""
    return x.view(*x.shape[:-1], heads, x.shape[-1] // heads).transpose(1, 2)


def join_heads(x: Tensor) -> Tensor:
    """(B, H, T, D) -> (B, T, H D)."""
    return x.transpose(1, 2).flatten(-2)


@dataclass
class KeyValueCache:
    """Keys and values of the tokens read so far, in columns allocated ahead and written in place.

    key, value (B, H, N, D). Rows may hold different numbers of tokens; what lies after a row's own is meaningless.
    """

    key: Tensor
    value: Tensor

    @classmethod
    def empty(cls, like: Tensor, columns: int) -> Self:
        """Room for `columns` tokens, with the batch, heads, width, device and type of `like` (B, H, T, D)."""
        shape = (*like.shape[:2], columns, like.shape[-1])
        return cls(like.new_zeros(shape), like.new_zeros(shape))

    def fill(self, key: Tensor, value: Tensor) -> None:
        """Write (B, H, T, D) keys and values into the first T columns."""
        self.key[:, :, : key.shape[2]] = key
        self.value[:, :, : value.shape[2]] = value

    def write(self, key: Tensor, value: Tensor, column: Tensor) -> None:
        """Write one token's (B, H, 1, D) keys and values into each row's own `column` (B,)."""
        rows = torch.arange(len(column), device=column.device)
        self.key[rows, :, column] = key.squeeze(2)
        self.value[rows, :, column] = value.squeeze(2)

    def select(self, rows: Tensor) -> "KeyValueCache":
        """A copy with these rows, in this order."""
        return KeyValueCache(self.key[rows], self.value[rows])


class MultiHeadAttention(nn.Module):
    """Self-attention in `heads` subspaces side by side, joined by an output projection (Vaswani et al., 2017).

    `qk_norm` gives queries and keys unit mean square per head, with learned gains (Henry et al., 2020).
    """

    def __init__(
        self, dim: int, heads: int, *, causal: bool = False, qk_norm: bool = False, dropout: float = 0.0
    ) -> None:
        super().__init__()
        self.heads = heads
        self.causal = causal
        self.dropout = dropout
        self.query_key_value = nn.Linear(dim, 3 * dim, bias=False)
        self.query_norm = nn.RMSNorm(dim // heads, eps=1e-6) if qk_norm else nn.Identity()
        self.key_norm = nn.RMSNorm(dim // heads, eps=1e-6) if qk_norm else nn.Identity()
        self.output = nn.Linear(dim, dim, bias=False)

    def forward(
        self, x: Tensor, rotation: Rotation | None = None, bias: Tensor | None = None, columns: int | None = None
    ) -> tuple[Tensor, KeyValueCache | None]:
        """(B, T, H D) -> (B, T, H D), and with `columns` a cache of so many columns that holds these tokens.

        `rotation` turns queries and keys; `bias` is as for `attend`.
        """
        query, key, value = self._project(x, rotation)
        cache = None
        if columns is not None:
            cache = KeyValueCache.empty(key, columns)
            cache.fill(key, value)
        dropout = self.dropout if self.training else 0.0
        pooled = attend(query, key, value, bias, causal=self.causal, dropout=dropout)
        return self.output(join_heads(pooled)), cache

    def step(self, x: Tensor, cache: KeyValueCache, column: Tensor, rotation: Rotation | None, bias: Tensor) -> Tensor:
        """One token per row, (B, 1, H D) -> (B, 1, H D), over the cache's first Tk columns.

        The token goes to its row's `column` (B,); `bias`, (B, 1 or H, 1, Tk), must forbid the columns after it.
        """
        query, key, value = self._project(x, rotation)
        cache.write(key, value, column)
        seen = bias.shape[-1]
        pooled = attend(query, cache.key[:, :, :seen], cache.value[:, :, :seen], bias)
        result: Tensor = self.output(join_heads(pooled))
        return result

    def _project(self, x: Tensor, rotation: Rotation | None) -> tuple[Tensor, Tensor, Tensor]:
        query, key, value = (split_heads(part, self.heads) for part in self.query_key_value(x).chunk(3, dim=-1))
        query, key = self.query_norm(query), self.key_norm(key)
        if rotation is not None:
            query, key = rotate(query, rotation), rotate(key, rotation)
        return query.to(value.dtype), key.to(value.dtype), value
