"""The state of a language model in the middle of a text, for decoding.

Shapes: B rows, T tokens, N tokens of capacity, D the model's width.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from lmtrain.nn.blocks import Cache
from lmtrain.nn.kv_cache import KeyValueCache, Rows
from lmtrain.nn.pooling import RunningMean

SMALLEST_CAPACITY = 256


def capacity_for(tokens: int, context: int) -> int:
    """The capacity to allocate for `tokens` tokens: 256, 1,024, 4,096 and so on, and never more than the context.

    A short text then does not pay for a long context, and few sizes occur.
    """
    capacity = SMALLEST_CAPACITY
    while capacity < tokens:
        capacity *= 4
    return min(context, capacity)


def align_left(tokens: Tensor, valid: Tensor) -> tuple[Tensor, Tensor]:
    """Move padding (B, T) from the left end to the right, where a causal model ignores it; and the lengths (B,)."""
    lengths = valid.sum(1)
    pads = tokens.shape[1] - lengths
    index = torch.arange(tokens.shape[1], device=tokens.device) + pads.unsqueeze(-1)
    return tokens.gather(1, index.clamp_max(tokens.shape[1] - 1)), lengths


@dataclass
class DecodingState:
    """A causal model's caches after reading B rows of text. Everything is written in place.

    tokens (B, N) read so far, each row from cache position 0; lengths (B,) how many of them are valid; `kv_len` at
    least the largest length; `caches` those of the layers. The `pointer` of a model that copies has keys, and as values
    the encoder's states, each (B, 1, N, D).
    """

    tokens: Tensor
    lengths: Tensor
    kv_len: int
    caches: list[Cache]
    pool: RunningMean
    pointer: KeyValueCache | None = None

    @property
    def capacity(self) -> int:
        """How many tokens a row can hold."""
        return self.tokens.shape[1]

    def select(self, index: Tensor) -> "DecodingState":
        """The rows `index` (B',), in that order; rows may repeat. This state must not be used again."""
        rows = Rows(index, len(self.lengths))
        same = self._same_tokens(rows)
        self.tokens = rows.take(self.tokens, slice(same, self.kv_len))
        self.lengths = rows.take(self.lengths)
        for part in self._parts:
            part.select(rows, same)
        return self

    def _same_tokens(self, rows: Rows) -> int:
        """How many tokens, at least, every row that moves shares with the row that it replaces.

        What the caches hold for these tokens is the same, so it need not be copied: the texts of a beam differ mostly
        in their last tokens. On a GPU, finding out would take longer than copying.
        """
        if rows.moves is None or not rows.index.is_cpu:
            return 0
        shortest = int(self.lengths.min())
        old, new = (self.tokens[part, :shortest] for part in rows.moves)
        different = (old != new).any(0).nonzero()
        return int(different[0]) if len(different) else shortest

    def grow(self, capacity: int) -> None:
        """Increase the capacity, in new memory."""
        for part in self._parts:
            part.grow(-(-capacity // self.capacity))
        self.tokens = F.pad(self.tokens, (0, capacity - self.capacity))

    def replace(self, rows: Tensor, other: "DecodingState") -> None:
        """Overwrite these rows with all rows of `other`."""
        self.tokens[rows] = other.tokens
        self.lengths[rows] = other.lengths
        for mine, new in zip(self._parts, other._parts, strict=True):
            mine.replace(rows, new)

    @property
    def _parts(self) -> list[Cache]:
        return [*self.caches, self.pool, *([] if self.pointer is None else [self.pointer])]


@dataclass
class WindowState:
    """The last tokens of B rows, (B, T) and aligned to the right, and which of them are valid, (B, T) bool."""

    tokens: Tensor
    valid: Tensor

    def select(self, index: Tensor) -> "WindowState":
        """The rows `index` (B',), in that order; rows may repeat."""
        return WindowState(self.tokens[index], self.valid[index])


@dataclass
class EnsembleState:
    """The states of an ensemble's members, which have read the same rows."""

    members: tuple["State", ...]

    def select(self, index: Tensor) -> "EnsembleState":
        """The rows `index` (B',), in that order; rows may repeat. This state must not be used again."""
        return EnsembleState(tuple(state.select(index) for state in self.members))


State = DecodingState | WindowState | EnsembleState
