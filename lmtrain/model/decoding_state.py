"""What a language model stores of the tokens read so far, for decoding.

A batch of two prompts, `a b c d` and `e f`, in memory for N = 8 tokens per row:

    prompts, padded on the left     a b c d     valid   1 1 1 1
                                    - - e f             0 0 1 1
    DecodingState.tokens            a b c d . . . .     lengths 4     the next token goes to cache position 4
                                    e f . . . . . .     lengths 2     and here to 2
                                    |-kv_len|           a step reads these and the next one, under a mask of lengths
                                    |-- capacity --|

Shapes: B rows, T tokens, N tokens of capacity, D the model's width.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from lmtrain.nn.blocks import Cache
from lmtrain.nn.kv_cache import KeyValueCache, Rows
from lmtrain.nn.prefix_mean import RunningMean


def align_left(tokens: Tensor, valid: Tensor) -> tuple[Tensor, Tensor]:
    """Move padding from the left end to the right, where a causal model ignores it.

    tokens and valid (B, T) -> tokens (B, T) and lengths (B,).
    """
    lengths = valid.sum(1)
    pads = tokens.shape[1] - lengths
    index = torch.arange(tokens.shape[1], device=tokens.device) + pads.unsqueeze(-1)
    return tokens.gather(1, index.clamp_max(tokens.shape[1] - 1)), lengths


@dataclass
class DecodingState:
    """A causal model's caches after reading B rows of text. Methods change it, in its memory unless shapes change."""

    tokens: Tensor
    """(B, N), each row from cache position 0."""
    lengths: Tensor
    """(B,), how many tokens of a row are valid."""
    kv_len: int
    """At least the largest of `lengths`."""
    caches: list[Cache]
    """One for each layer."""
    pool: RunningMean
    pointer_cache: KeyValueCache | None
    """With `model.copy`: the pointer's keys, and as values the encoder's output, each (B, 1, N, D)."""

    @property
    def capacity(self) -> int:
        """N, how many tokens a row can hold."""
        return self.tokens.shape[1]

    def select(self, index: Tensor) -> "DecodingState":
        """Return the rows `index` (B',), in that order; rows may repeat. This state must not be used again."""
        rows = Rows(index, len(self.lengths))
        same, unused = self._same_tokens(rows), self.capacity - self.kv_len
        self.tokens = rows.take(self.tokens, same, unused)
        self.lengths = rows.take(self.lengths)
        for part in self._parts:
            part.select(rows, same, unused)
        return self

    def _same_tokens(self, rows: Rows) -> int:
        """Return how many first tokens, at least, every row that moves shares with the row that it replaces.

        The caches hold the same for these tokens, so it need not be copied: the texts of a beam differ mostly in their
        last tokens. On a GPU the answer is 0, since comparing would take longer than copying.
        """
        if rows.moves is None or not rows.index.is_cpu:
            return 0
        shortest = int(self.lengths.min())
        old, new = (self.tokens[part, :shortest] for part in rows.moves)
        different = (old != new).any(0).nonzero()
        return int(different[0]) if len(different) else shortest

    def grow(self, capacity: int) -> None:
        """Increase the capacity, in new memory."""
        more = capacity - self.capacity
        for part in self._parts:
            part.extend(more)
        self.tokens = F.pad(self.tokens, (0, more))

    def replace(self, rows: Tensor, other: "DecodingState") -> None:
        """Overwrite these rows with all rows of `other`, whose capacity must not be larger."""
        self.tokens[rows] = F.pad(other.tokens, (0, self.capacity - other.capacity))
        self.lengths[rows] = other.lengths
        for mine, new in zip(self._parts, other._parts, strict=True):
            mine.replace(rows, new)

    @property
    def _parts(self) -> list[Cache]:
        return [*self.caches, self.pool, *([] if self.pointer_cache is None else [self.pointer_cache])]


@dataclass
class WindowState:
    """The last tokens of B rows, (B, T) and aligned to the right, and which of them are valid, (B, T) bool."""

    tokens: Tensor
    valid: Tensor

    def select(self, index: Tensor) -> "WindowState":
        """Return the rows `index` (B',), in that order; rows may repeat."""
        return WindowState(self.tokens[index], self.valid[index])


@dataclass
class EnsembleState:
    """The states of an ensemble's members, which have read the same rows."""

    members: tuple["State", ...]

    def select(self, index: Tensor) -> "EnsembleState":
        """Return the rows `index` (B',), in that order; rows may repeat. This state must not be used again."""
        return EnsembleState(tuple(state.select(index) for state in self.members))


State = DecodingState | WindowState | EnsembleState
