"""What layers store of the tokens read so far, and the cache position at which a decoding step writes.

Shapes: B rows, H heads, N cache positions (the capacity), D features per head (Dv of values).
"""

import dataclasses
from dataclasses import dataclass, field
from typing import Self

import torch
import torch.nn.functional as F
from torch import Tensor

from lmtrain.nn.dot_product import restrict
from lmtrain.nn.patterns import Pattern
from lmtrain.nn.positions import Rotation, alibi_bias


@dataclass
class CachePosition:
    """Where one decoding step reads and writes every cache.

    The new token of each row is written at its own `position` (B,), and attends to the first `kv_len` cache positions
    up to there. With `uniform_length` all rows have the same length, every position is kv_len - 1, and no mask is
    needed. `rotation` rotates the new query and key; `slopes` (H,) are ALiBi's.
    """

    position: Tensor
    kv_len: int
    uniform_length: bool = False
    rotation: Rotation | None = None
    slopes: Tensor | None = None
    _masks: dict[Pattern, Tensor | None] = field(default_factory=dict)

    @property
    def index(self) -> Tensor | int:
        """The cache position of each row (B,), or the one that all rows share."""
        return self.kv_len - 1 if self.uniform_length else self.position

    def write(self, buffer: Tensor, new: Tensor) -> None:
        """Write new (B, ...) into buffer (B, N, ...), each row at its cache position."""
        if self.uniform_length:
            buffer[:, self.kv_len - 1 : self.kv_len] = new.unsqueeze(1)
        else:
            buffer[torch.arange(len(new), device=new.device), self.position] = new

    def mask(self, pattern: Pattern) -> Tensor | None:
        """The mask of `attend` for layers with this pattern, with Tk = kv_len: None, or
        (B, 1, 1, Tk) bool, or (B, H, 1, Tk) float. It is computed once for all layers."""
        if pattern not in self._masks:
            self._masks[pattern] = self._mask(pattern)
        return self._masks[pattern]

    def _mask(self, pattern: Pattern) -> Tensor | None:
        query, keys = self.position.unsqueeze(-1), torch.arange(self.kv_len, device=self.position.device)
        allowed = None
        if pattern.sparse or not self.uniform_length:
            allowed = (pattern(query, keys) & (keys <= query))[:, None, None]
        if self.slopes is None:
            return allowed
        bias = alibi_bias(self.slopes, query, keys)
        return bias if allowed is None else restrict(bias, allowed)


class Rows:
    """Which rows of a state of B rows to keep, and in which order: `index` (B',), which may repeat and omit some."""

    def __init__(self, index: Tensor, count: int) -> None:
        self.index = index
        self.moved: Tensor | None = None
        """Of as many rows as there are, those that change; on a GPU, finding them would take longer than copying."""
        if len(index) == count:
            order = torch.arange(count, device=index.device)
            self.moved = (index != order).nonzero().squeeze(-1) if index.is_cpu else order
            self.source = index[self.moved]

    def take(self, x: Tensor, used: slice | None = None, axis: int = 1) -> Tensor:
        """x[index] of x (B, ...); where as many rows stay, in the memory of x.

        Along `axis` only the entries `used` matter; the others are left as they are, or zero.
        """
        if self.moved is not None:
            part = x if used is None else x.narrow(axis, used.start, used.stop - used.start)
            part.index_copy_(0, self.moved, part.index_select(0, self.source))
            return x
        if used is None:
            return x.index_select(0, self.index)
        result = x.new_zeros(len(self.index), *x.shape[1:])  # not left empty: zero weights times NaN would be NaN
        result.narrow(axis, 0, used.stop).copy_(x.narrow(axis, 0, used.stop).index_select(0, self.index))
        return result


@dataclass
class KeyValueCache:
    """Keys and values of the tokens read so far, in memory allocated ahead and written in place; where gradients are
    enabled, in a copy, since earlier steps need what they have read.

    key (B, H, N, D), value (B, H, N, Dv). Rows may hold different numbers of tokens: entries past a row's own length
    are finite and meaningless, and no row has any past the first `kv_len`.
    """

    key: Tensor
    value: Tensor
    kv_len: int

    @classmethod
    def allocate(cls, key: Tensor, value: Tensor, capacity: int) -> Self:
        """A cache for `capacity` tokens whose first T are given: (B, H, T, D), (B, H, T, Dv)."""
        padding = (0, 0, 0, capacity - key.shape[-2])
        return cls(F.pad(key, padding), F.pad(value, padding), key.shape[-2])

    def grow(self, factor: int) -> None:
        """Multiply the capacity by `factor`, in new memory."""
        padding = (0, 0, 0, (factor - 1) * self.key.shape[-2])
        self.key, self.value = F.pad(self.key, padding), F.pad(self.value, padding)

    def write(self, key: Tensor, value: Tensor, index: Tensor | int, kv_len: int) -> None:
        """Write one token's keys (B, H, 1, D) and values (B, H, 1, Dv) at each row's cache position (B,), or at one for
        all rows; every one of them is below `kv_len`."""
        self.kv_len = max(self.kv_len, kv_len)
        if torch.is_grad_enabled():
            self.key, self.value = self.key.clone(), self.value.clone()
        if isinstance(index, int):
            self.key[:, :, index : index + 1] = key
            self.value[:, :, index : index + 1] = value
            return
        rows = torch.arange(len(index), device=index.device)
        self.key[rows, :, index] = key.squeeze(2)
        self.value[rows, :, index] = value.squeeze(2)

    def replace(self, rows: Tensor, other: "KeyValueCache") -> None:
        """Overwrite these rows with all rows of `other`, whose capacity is no larger."""
        capacity = other.key.shape[-2]
        self.key[rows, :, :capacity] = other.key
        self.value[rows, :, :capacity] = other.value

    def select(self, rows: Rows, same: int = 0) -> Self:
        """These rows; each that moves replaces one with the same first `same` entries."""
        key, value = (rows.take(x, slice(same, self.kv_len), axis=2) for x in (self.key, self.value))
        return type(self)(key, value, self.kv_len)


@dataclass
class RecurrentState:
    """The base of states of constant size, whatever the number of tokens: tensors whose first axis is the row.

    A step updates them in place; where gradients are enabled, a copy, since earlier steps need what they have read.
    """

    def copy_for_gradients(self) -> None:
        """Where gradients are enabled, copy all tensors, to be updated in place."""
        if torch.is_grad_enabled():
            for name, tensor in vars(self).items():
                setattr(self, name, tensor.clone())

    def grow(self, factor: int) -> None:
        """The capacity is unlimited."""

    def replace(self, rows: Tensor, other: Self) -> None:
        """Overwrite these rows with all rows of `other`."""
        for name, tensor in vars(other).items():
            getattr(self, name)[rows] = tensor

    def select(self, rows: Rows, _same: int = 0) -> Self:
        """These rows."""
        return dataclasses.replace(self, **{name: rows.take(tensor) for name, tensor in vars(self).items()})
