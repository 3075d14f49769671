"""What layers store of the tokens read so far, and the cache position at which a decoding step writes.

Shapes: B rows, H heads, N cache positions (the capacity), D features per head (Dv of values).
"""

from dataclasses import dataclass, field, replace
from typing import Self

import torch
import torch.nn.functional as F
from torch import Tensor

from lmtrain.nn.dot_product import restrict
from lmtrain.nn.patterns import Pattern
from lmtrain.nn.positions import alibi_bias


@dataclass
class CachePosition:
    """Where one decoding step reads and writes every cache.

    The new token of each row is written at the row's `position` (B,), and attends to the cache positions up to there,
    of which the first `kv_len` are read. `rotation` rotates the new query and key; `slopes` (H,) are ALiBi's.
    """

    position: Tensor
    kv_len: int
    rotation: Tensor | None = None
    slopes: Tensor | None = None
    _masks: dict[Pattern, Tensor] = field(default_factory=dict)

    def mask(self, pattern: Pattern) -> Tensor:
        """Return the mask of `attend` for layers with this pattern: (B, 1, 1, Tk) bool, or with slopes (B, H, 1, Tk)
        float, where Tk = kv_len. It is computed once for all layers."""
        if pattern not in self._masks:
            query, keys = self.position.unsqueeze(-1), torch.arange(self.kv_len, device=self.position.device)
            mask = replace(pattern, causal=True)(query, keys)[:, None, None]
            self._masks[pattern] = mask if self.slopes is None else restrict(alibi_bias(self.slopes, query, keys), mask)
        return self._masks[pattern]


def write(buffer: Tensor, new: Tensor, index: Tensor) -> None:
    """Write new (B, ...) into buffer (B, N, ...), at the cache position of each row (B,)."""
    buffer[torch.arange(len(new), device=new.device), index] = new


class Rows:
    """Which rows of a state of B rows to keep, and in which order: `index` (B',), which may repeat and omit some."""

    def __init__(self, index: Tensor, count: int) -> None:
        self.index = index
        self.moves: tuple[Tensor, Tensor] | None = None
        """The rows to overwrite, and the rows to copy into them; None if the number of rows grows. On a GPU all rows
        are listed, since comparing would take longer than copying."""
        if len(index) <= count:
            every_row = torch.arange(len(index), device=index.device)
            changed = (index != every_row).nonzero().squeeze(-1) if index.is_cpu else every_row
            self.moves = changed, index[changed]

    def take(self, x: Tensor, same: int = 0, unused: int = 0, axis: int = 1) -> Tensor:
        """Return x[index] for x (B, ...).

        Unless the number of rows grows, the result is in the memory of x. The first `same` and the last `unused`
        entries along `axis` are then not copied: the caller knows that they are equal, or meaningless.
        """
        if self.moves is None:
            return x.index_select(0, self.index)
        changed, source = self.moves
        part = x.narrow(axis, same, x.shape[axis] - same - unused) if same or unused else x
        part.index_copy_(0, changed, part.index_select(0, source))
        return x if len(x) == len(self.index) else x[: len(self.index)]


@dataclass
class KeyValueCache:
    """Keys and values of the tokens read so far, in memory allocated ahead and written in place, without gradients.

    key (B, H, N, D), value (B, H, N, Dv). Rows may hold different numbers of tokens: entries past a row's own length
    are finite and meaningless. A new cache is full.
    """

    key: Tensor
    value: Tensor

    def extend(self, tokens: int) -> None:
        """Add capacity for this many tokens, in new memory."""
        self.key, self.value = (F.pad(x, (0, 0, 0, tokens)) for x in (self.key, self.value))

    def write(self, key: Tensor, value: Tensor, index: Tensor) -> None:
        """Write one token's keys (B, H, 1, D) and values (B, H, 1, Dv) at each row's `index` (B,)."""
        write(self.key.transpose(1, 2), key.squeeze(2), index)
        write(self.value.transpose(1, 2), value.squeeze(2), index)

    def replace(self, rows: Tensor, other: "KeyValueCache") -> None:
        """Overwrite these rows with all rows of `other`, whose capacity must not be larger."""
        capacity = other.key.shape[-2]
        self.key[rows, :, :capacity] = other.key
        self.value[rows, :, :capacity] = other.value

    def select(self, rows: Rows, same: int = 0, unused: int = 0) -> None:
        """Keep these rows. A row that moves has the same first `same` entries as the row it replaces; the last `unused`
        are meaningless in every row."""
        self.key, self.value = (rows.take(x, same, unused, axis=2) for x in (self.key, self.value))


@dataclass
class RecurrentState:
    """The base of states whose size does not depend on the number of tokens: tensors with one entry per row on the
    first axis, which a step updates in place, since a CUDA graph may replay it."""

    def extend(self, _tokens: int) -> None:
        """The capacity is unlimited."""

    def replace(self, rows: Tensor, other: Self) -> None:
        """Overwrite these rows with all rows of `other`."""
        for name, tensor in vars(other).items():
            getattr(self, name)[rows] = tensor

    def select(self, rows: Rows, _same: int = 0, _unused: int = 0) -> None:
        """Keep these rows."""
        for name, tensor in vars(self).items():
            setattr(self, name, rows.take(tensor))
