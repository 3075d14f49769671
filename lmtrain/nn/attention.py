"""Multi-head self-attention with its key-value cache, and multi-head cross-attention (Vaswani et al., 2017).

Shapes: B rows, H heads, T positions (Tq of queries, Tk of keys), D features per head (Dv of values, those of the widest
head), W the width of an input or output.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lmtrain.nn.dot_product import attend, attention_weights
from lmtrain.nn.dropout import drop
from lmtrain.nn.kv_cache import CachePosition, KeyValueCache
from lmtrain.nn.norms import make_norm
from lmtrain.nn.patterns import FULL, Pattern
from lmtrain.nn.positions import rotate


class ResidualProjection(nn.Linear):
    """The last layer of a sub-layer, whose output is added to the residual stream.

    Its type is a marker: a deep model initializes these layers with smaller weights.
    """


def split_heads(x: Tensor, heads: int) -> Tensor:
    """(B, T, H D) -> (B, H, T, D)."""
    return x.view(*x.shape[:-1], heads, x.shape[-1] // heads).transpose(1, 2)


def join_heads(x: Tensor) -> Tensor:
    """(B, H, T, D) -> (B, T, H D)."""
    return x.transpose(1, 2).flatten(-2)


class MultiHeadAttention(nn.Module):
    """The four linear layers of multi-head attention, and the optional norms of queries and keys.

    | argument         | width of                                        | default      |
    | ---------------- | ----------------------------------------------- | ------------ |
    | `dim`            | the input of the queries                        |              |
    | `key_dim`        | the input of the keys                           | `dim`        |
    | `value_dim`      | the input of the values                         | `key_dim`    |
    | `output_dim`     | the result                                      | `dim`        |
    | `head_dim`       | a head's queries and keys                       | dim / heads  |
    | `value_head_dim` | a head's values; a list has one width per head  | `head_dim`   |

    The language model uses the defaults. `qk_norm` gives queries and keys unit mean square per head, with learned gains
    (Henry et al., 2020). The scores are products of queries and keys times `scale`: by default 1 / sqrt(head_dim), in
    plain dot-product attention 1 (Luong et al., 2015). Raises ValueError if `head_dim` is not given and `dim` can't be
    divided among the heads, and if `value_head_dim` has not one width per head.
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
        head_dim = head_dim or width_per_head(dim, heads)
        value_head_dim = value_head_dim or head_dim
        self.value_widths = [value_head_dim] * heads if isinstance(value_head_dim, int) else [*value_head_dim]
        if len(self.value_widths) != heads:
            raise ValueError(f"value_head_dim={self.value_widths} has not one width for each of {heads} heads")
        self.heads = heads
        self.scale = scale
        self.dropout = dropout
        self.query = nn.Linear(dim, heads * head_dim, bias=False)
        self.key = nn.Linear(key_dim, heads * head_dim, bias=False)
        self.value = nn.Linear(value_dim or key_dim, sum(self.value_widths), bias=False)
        self.output = ResidualProjection(sum(self.value_widths), output_dim or dim, bias=False)
        self.query_norm = make_norm("rms", head_dim) if qk_norm else nn.Identity()
        self.key_norm = make_norm("rms", head_dim) if qk_norm else nn.Identity()

    def join(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None, pattern: Pattern = FULL
    ) -> Tensor:
        """`attend` with dropout and scale of this layer: the joined heads, before the output projection."""
        dropout = self.dropout if self.training else 0.0
        return self._join_heads(attend(query, key, value, mask, pattern=pattern, dropout=dropout, scale=self.scale))

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


def width_per_head(dim: int, heads: int) -> int:
    """Return dim / heads. Raises ValueError if that is not an integer."""
    if dim % heads:
        raise ValueError(f"a width of {dim} can't be divided among {heads} heads")
    return dim // heads


class SelfAttention(MultiHeadAttention):
    """Multi-head attention of a sequence to itself, for any pattern of positions."""

    def __init__(
        self,
        dim: int,
        heads: int,
        *,
        pattern: Pattern = FULL,
        qk_norm: bool = False,
        scale: float | None = None,
        dropout: float = 0.0,
    ) -> None:
        super().__init__(dim, heads, qk_norm=qk_norm, scale=scale, dropout=dropout)
        self.pattern = pattern

    def forward(self, x: Tensor, *, mask: Tensor | None = None, rotation: Tensor | None = None) -> Tensor:
        """(B, T, W) -> (B, T, W). `mask` is as for `attend`; see `padding_mask` for padded keys."""
        return self.output(self.join(*self.project(x, rotation), mask, self.pattern))

    def prefill(
        self, x: Tensor, lengths: Tensor, *, mask: Tensor | None = None, rotation: Tensor | None = None
    ) -> tuple[Tensor, KeyValueCache]:
        """Do the same as `forward` for x (B, T, W), and also return the cache for `step`.

        Only the first `lengths` (B,) tokens of a row count: `step` overwrites or masks the others.
        """
        query, key, value = self.project(x, rotation)
        joined = self.join(query, key, value, mask, self.pattern)
        return self.output(joined), KeyValueCache(key, value)

    def step(self, x: Tensor, cache: KeyValueCache, at: CachePosition) -> Tensor:
        """One token per row, (B, 1, W) -> (B, 1, W): it is written to the cache, and attends to what is cached."""
        query, key, value = self.project(x, at.rotation)
        cache.write(key, value, at.position)
        keys, values = cache.key[:, :, : at.kv_len], cache.value[:, :, : at.kv_len]
        return self.output(self.join(query, keys, values, at.mask(self.pattern)))

    def project(self, x: Tensor, rotation: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """(B, T, W) -> queries, keys and values, each (B, H, T, D)."""
        # Normalized in the order of memory: after it is transposed, a compiler for a GPU makes two kernels of a norm.
        split = (self.heads, -1)
        projected = (self.query(x), self.key(x), self.value(x))
        query, key, value = (part.unflatten(-1, split) for part in projected)
        query, key, value = (part.transpose(1, 2) for part in (self.query_norm(query), self.key_norm(key), value))
        if rotation is not None:
            query, key = rotate(query, rotation), rotate(key, rotation)
        return query.to(value.dtype), key.to(value.dtype), value


class CrossAttention(MultiHeadAttention):
    """Multi-head attention of queries to other vectors."""

    def forward(self, query: Tensor, key: Tensor, value: Tensor | None = None, *, mask: Tensor | None = None) -> Tensor:
        """(B, Tq, W), (B, Tk, W), (B, Tk, W) -> (B, Tq, W): values default to the keys. `mask` is as for `attend`."""
        return self.recall(query, self.remember(key, value), mask=mask)

    def remember(self, key: Tensor, value: Tensor | None = None) -> KeyValueCache:
        """Return the keys and values of (B, Tk, W), for many calls of `recall`."""
        keys = self.key_norm(split_heads(self.key(key), self.heads))
        values = self._split_values(self.value(key if value is None else value))
        return KeyValueCache(keys.to(values.dtype), values)

    def recall(self, query: Tensor, memory: KeyValueCache, *, mask: Tensor | None = None) -> Tensor:
        """Do the same as `forward` with the keys and values of `remember`: (B, Tq, W) -> (B, Tq, W)."""
        return self.output(self.pooled(query, memory, mask=mask))

    def pooled(self, query: Tensor, memory: KeyValueCache, *, mask: Tensor | None = None) -> Tensor:
        """The joined heads of `recall` before the output projection: (B, Tq, W) -> (B, Tq, sum of their widths)."""
        return self.join(self._queries(query, memory), memory.key, memory.value, mask)

    def with_weights(self, query: Tensor, key: Tensor, *, mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Do the same as `forward`, and also return the attention weights, which no fused kernel does.

        (B, Tq, W), (B, Tk, W) -> (B, Tq, W), (B, H, Tq, Tk). Weights are those before dropout; their rows sum to one,
        or are zero for a query without a key.
        """
        memory = self.remember(key)
        weights = attention_weights(self._queries(query, memory), memory.key, mask, self.scale)
        dropped = drop(weights.to(memory.value.dtype), self.dropout, self.training)
        return self.output(self._join_heads(dropped @ memory.value)), weights

    def _queries(self, query: Tensor, memory: KeyValueCache) -> Tensor:
        """The queries, in the type of the values: norms may compute in another type."""
        return self.query_norm(split_heads(self.query(query), self.heads)).to(memory.value.dtype)


def padding_mask(valid: Tensor) -> Tensor:
    """Which keys are real, (B, Tk) bool, as a mask for every head and query: (B, 1, 1, Tk)."""
    return valid[:, None, None]
