"""The multi-head attention layer, and its cache for decoding.

Shapes: B rows, H heads, T positions (Tq of queries, Tk of keys), D features per head (Dv of values), N columns of a
cache, W the width of an input or output.
"""

from dataclasses import dataclass
from typing import Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lmtrain.nn.dot_product import attend, attention_weights
from lmtrain.nn.norms import norm
from lmtrain.nn.patterns import FULL, Pattern
from lmtrain.nn.place import Place, take_rows
from lmtrain.nn.positions import Rotation, rotate


def split_heads(x: Tensor, heads: int) -> Tensor:
    """(B, T, H D) -> (B, H, T, D)."""
    return x.view(*x.shape[:-1], heads, x.shape[-1] // heads).transpose(1, 2)


def join_heads(x: Tensor) -> Tensor:
    """(B, H, T, D) -> (B, T, H D)."""
    return x.transpose(1, 2).flatten(-2)


@dataclass
class KeyValueCache:
    """Keys and values of the tokens read so far, in columns allocated ahead and written in place.

    key (B, H, N, D), value (B, H, N, Dv). Rows may hold different numbers of tokens; what lies after a row's own is
    meaningless (but finite), and after the first `used` columns no row has anything.
    """

    key: Tensor
    value: Tensor
    used: int

    @classmethod
    def filled(cls, key: Tensor, value: Tensor, columns: int) -> Self:
        """Room for `columns` tokens, the first T of which are these: (B, H, T, D), (B, H, T, Dv)."""
        room = columns - key.shape[-2]
        return cls(F.pad(key, (0, 0, 0, room)), F.pad(value, (0, 0, 0, room)), key.shape[-2])

    def grow(self, factor: int) -> None:
        """Room for so many times as many tokens."""
        more = (0, 0, 0, (factor - 1) * self.key.shape[-2])
        self.key, self.value = F.pad(self.key, more), F.pad(self.value, more)

    def write(self, key: Tensor, value: Tensor, column: Tensor | int, seen: int) -> None:
        """Write one token's (B, H, 1, D) keys and (B, H, 1, Dv) values into each row's own `column` (B,), or into one
        for all; every one of them lies in the first `seen`."""
        self.used = max(self.used, seen)
        if isinstance(column, int):
            self.key[:, :, column : column + 1] = key
            self.value[:, :, column : column + 1] = value
            return
        rows = torch.arange(len(column), device=column.device)
        self.key[rows, :, column] = key.squeeze(2)
        self.value[rows, :, column] = value.squeeze(2)

    def replace(self, rows: Tensor, other: "KeyValueCache") -> None:
        """Put all of the other, which has no more columns, in the place of these rows."""
        columns = other.key.shape[-2]
        self.key[rows, :, :columns] = other.key
        self.value[rows, :, :columns] = other.value

    def select(self, rows: Tensor) -> "KeyValueCache":
        """These rows, in this order; in this cache's own memory where they are as many."""
        key, value = (take_rows(x, rows, self.used, axis=2) for x in (self.key, self.value))
        return KeyValueCache(key, value, self.used)


class MultiHeadAttention(nn.Module):
    """Attention in `heads` subspaces side by side, joined by an output projection (Vaswani et al., 2017).

    Queries have width `dim`, keys `key_dim`, values `value_dim`, the result `output_dim`; inside, a head has `head_dim`
    features of queries and keys and `value_head_dim` of values. What is not given is `dim`, or its share of it; widths
    of values default to those of keys. `bias` gives all four projections one. `qk_norm` gives queries and keys unit
    mean square per head, with learned gains (Henry et al., 2020). Raises ValueError when `dim` must be divided among
    the heads and can't.
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
        value_head_dim: int | None = None,
        pattern: Pattern = FULL,
        bias: bool = False,
        qk_norm: bool = False,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        if head_dim is None and dim % heads:
            raise ValueError(f"a width of {dim} can't be divided among {heads} heads")
        key_dim, head_dim = key_dim or dim, head_dim or dim // heads
        value_dim, value_head_dim = value_dim or key_dim, value_head_dim or head_dim
        self.heads = heads
        self.pattern = pattern
        self.dropout = dropout
        self.query = nn.Linear(dim, heads * head_dim, bias=bias)
        self.key = nn.Linear(key_dim, heads * head_dim, bias=bias)
        self.value = nn.Linear(value_dim, heads * value_head_dim, bias=bias)
        self.output = nn.Linear(heads * value_head_dim, output_dim or dim, bias=bias)
        self.widths = (heads * head_dim, heads * head_dim, heads * value_head_dim)
        self.joined: nn.Module | None = None  # see `pack`
        self.query_norm = norm("rms", head_dim) if qk_norm else nn.Identity()
        self.key_norm = norm("rms", head_dim) if qk_norm else nn.Identity()

    def forward(
        self,
        query: Tensor,
        key: Tensor | None = None,
        value: Tensor | None = None,
        *,
        mask: Tensor | None = None,
        rotation: Rotation | None = None,
    ) -> Tensor:
        """(B, Tq, W), (B, Tk, W), (B, Tk, W) -> (B, Tq, W): keys default to the queries, values to the keys.

        `mask` is as for `attend`; see `padding_mask` for padded keys. `rotation` turns queries and keys (Tq = Tk).
        """
        key = query if key is None else key
        return self._pool(*self.project(query, key, key if value is None else value, rotation), mask)

    def prefill(
        self, x: Tensor, lengths: Tensor, columns: int, *, mask: Tensor | None = None, rotation: Rotation | None = None
    ) -> tuple[Tensor, KeyValueCache]:
        """Self-attention over x (B, T, W), and the cache of its rows' first `lengths` (B,) tokens, for `step`."""
        query, key, value = self.project(x, x, x, rotation)
        return self._pool(query, key, value, mask), KeyValueCache.filled(key, value, columns)

    def step(self, x: Tensor, cache: KeyValueCache, place: Place) -> Tensor:
        """One token per row, (B, 1, W) -> (B, 1, W), over the cache, into which it goes at its `place`."""
        query, key, value = self.project(x, x, x, place.rotation)
        cache.write(key, value, place.at, place.seen)
        keys, values = cache.key[:, :, : place.seen], cache.value[:, :, : place.seen]
        pooled = attend(query, keys, values, place.mask(self.pattern))
        result: Tensor = self.output(join_heads(pooled))
        return result

    def remember(self, key: Tensor, value: Tensor | None = None) -> KeyValueCache:
        """Keys and values of (B, Tk, W), to be looked at many times with `recall`; values default to the keys."""
        keys = self.key_norm(split_heads(self.key(key), self.heads))
        return KeyValueCache(keys, split_heads(self.value(key if value is None else value), self.heads), keys.shape[-2])

    def recall(self, query: Tensor, memory: KeyValueCache, *, mask: Tensor | None = None) -> Tensor:
        """`forward` over what `remember` gave: (B, Tq, W) -> (B, Tq, W)."""
        queries = self.query_norm(split_heads(self.query(query), self.heads))
        return self._pool(queries.to(memory.value.dtype), memory.key.to(memory.value.dtype), memory.value, mask)

    def weights(self, query: Tensor, key: Tensor, *, mask: Tensor | None = None) -> Tensor:
        """What each query looks at: (B, Tq, W), (B, Tk, W) -> (B, H, Tq, Tk), rows sum to one; without dropout."""
        queries = self.query_norm(split_heads(self.query(query), self.heads))
        keys = self.key_norm(split_heads(self.key(key), self.heads))
        return attention_weights(queries, keys, mask, pattern=self.pattern)

    def project(
        self, query: Tensor, key: Tensor, value: Tensor, rotation: Rotation | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Inputs (B, T, W) to queries and keys (B, H, T, D) and values (B, H, T, Dv); where `joined`, one input."""
        if self.joined is not None:
            projected = self.joined(query).split(self.widths, dim=-1)
        elif torch.compiler.is_compiling() and self.training and query is key and key is value:
            projected = torch.split(self._project_together(query), list(self.widths), dim=-1)
        else:
            projected = self.query(query), self.key(key), self.value(value)
        # Normalised in the order of memory: after it is transposed, a compiler for a GPU makes two kernels of a norm.
        queries, keys, values = (x.unflatten(-1, (self.heads, -1)) for x in projected)  # (B, T, H, D)
        queries, keys, values = (x.transpose(1, 2) for x in (self.query_norm(queries), self.key_norm(keys), values))
        if rotation is not None:
            queries, keys = rotate(queries, rotation), rotate(keys, rotation)
        return queries.to(values.dtype), keys.to(values.dtype), values

    def _project_together(self, x: Tensor) -> Tensor:
        """All three projections of (B, T, W) by one product: three small ones would leave a GPU idle for longer.

        For compiled training alone, since weights that several processes share are whole in their own layers only.
        """
        weight = torch.cat([self.query.weight, self.key.weight, self.value.weight])
        biased = self.query.bias is not None
        return F.linear(x, weight, torch.cat([self.query.bias, self.key.bias, self.value.bias]) if biased else None)

    def _pool(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        dropout = self.dropout if self.training else 0.0
        result: Tensor = self.output(join_heads(attend(query, key, value, mask, pattern=self.pattern, dropout=dropout)))
        return result


def padding_mask(valid: Tensor) -> Tensor:
    """Which keys are real, (B, Tk) bool, as a mask for every head and query: (B, 1, 1, Tk)."""
    return valid[:, None, None]
