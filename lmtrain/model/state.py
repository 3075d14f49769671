"""Where a language model stands in the middle of a text, for decoding.

Shapes: B rows, T tokens.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from lmtrain.nn.blocks import Cache
from lmtrain.nn.place import take_rows
from lmtrain.nn.pooling import PoolState

LEAST_ROOM = 256


def room_for(tokens: int, context: int) -> int:
    """The room that a row of so many tokens is given: 256, 1,024, 4,096 and so on, and never more than the context.

    A text that stays short then does not pay for a long context, and few sizes occur.
    """
    room = LEAST_ROOM
    while room < tokens:
        room *= 4
    return min(context, room)


def align_left(tokens: Tensor, valid: Tensor) -> tuple[Tensor, Tensor]:
    """Move padding (B, T) from the left end to the right, where a causal model never sees it; and the lengths (B,)."""
    lengths = valid.sum(1)
    pads = tokens.shape[1] - lengths
    places = torch.arange(tokens.shape[1], device=tokens.device) + pads.unsqueeze(-1)
    return tokens.gather(1, places.clamp_max(tokens.shape[1] - 1)), lengths


@dataclass
class CausalState:
    """Where a causal model stands in B rows of text.

    tokens (B, N) read so far, each row from column 0; lengths (B,) how many are real; `columns` is no less than any
    length, and, where `level`, equal to all of them; copy_keys (B, N, D) are the pointer's, where the model copies.
    There is room for N tokens. All is written in place: a state is used up by what it is given to.
    """

    tokens: Tensor
    lengths: Tensor
    columns: int
    level: bool
    caches: list[Cache]
    pool: PoolState
    copy_keys: Tensor | None = None

    def select(self, index: Tensor) -> "CausalState":
        """The rows `index` (B',), in that order; rows may repeat. In the state's own memory where they are as many."""
        self.tokens = take_rows(self.tokens, index, self.columns)
        self.lengths = take_rows(self.lengths, index)
        self.caches = [cache.select(index) for cache in self.caches]
        self.pool = self.pool.select(index)
        if self.copy_keys is not None:
            self.copy_keys = take_rows(self.copy_keys, index, self.columns)
        return self

    @property
    def room(self) -> int:
        """How many tokens a row can hold."""
        return self.tokens.shape[1]

    def grow(self, room: int) -> None:
        """Make room for so many tokens, in new memory."""
        more = room - self.room
        for cache in [*self.caches, self.pool]:
            cache.grow(-(-room // self.room))
        self.tokens = F.pad(self.tokens, (0, more))
        if self.copy_keys is not None:
            self.copy_keys = F.pad(self.copy_keys, (0, 0, 0, more))

    def replace(self, rows: Tensor, other: "CausalState") -> None:
        """Put the rows of `other` in the place of these rows."""
        self.tokens[rows] = other.tokens
        self.lengths[rows] = other.lengths
        if self.copy_keys is not None and other.copy_keys is not None:
            self.copy_keys[rows] = other.copy_keys
        for mine, new in zip([*self.caches, self.pool], [*other.caches, other.pool], strict=True):
            mine.replace(rows, new)


@dataclass
class WindowedState:
    """The last tokens of B rows, (B, T) and aligned to the right, and which of them are real, (B, T) bool."""

    tokens: Tensor
    valid: Tensor

    def select(self, index: Tensor) -> "WindowedState":
        """The rows `index` (B',), in that order; rows may repeat."""
        return WindowedState(self.tokens[index], self.valid[index])


State = CausalState | WindowedState
