"""Where a language model stands in the middle of a text, for decoding.

Shapes: B rows, T tokens.
"""

from dataclasses import dataclass

from torch import Tensor

from lmtrain.nn.blocks import Cache
from lmtrain.nn.pooling import PoolState


@dataclass
class CausalState:
    """Where a causal model stands in B rows of text.

    tokens (B, context) read so far, each row from column 0; lengths (B,) how many are real; `columns` is no less than
    any length, and, where `level`, equal to all of them; copy_keys (B, context, D) are the pointer's, where the model
    copies. All is written in place: a state is used up by what it is given to.
    """

    tokens: Tensor
    lengths: Tensor
    columns: int
    level: bool
    caches: list[Cache]
    pool: PoolState
    copy_keys: Tensor | None = None

    def select(self, index: Tensor) -> "CausalState":
        """The rows `index` (B',), in that order; rows may repeat. This state is used up."""
        caches = [cache.select(index) for cache in self.caches]
        keys = self.copy_keys[index] if self.copy_keys is not None else None
        pool = self.pool.select(index)
        return CausalState(self.tokens[index], self.lengths[index], self.columns, self.level, caches, pool, keys)

    def replace(self, rows: Tensor, other: "CausalState") -> None:
        """Put the rows of `other` in the place of these rows."""
        self.tokens[rows] = other.tokens
        self.lengths[rows] = other.lengths
        if self.copy_keys is not None and other.copy_keys is not None:
            self.copy_keys[rows] = other.copy_keys
        for mine, new in zip([*self.caches, self.pool], [*other.caches, other.pool], strict=True):
            for name, value in vars(mine).items():
                if isinstance(value, Tensor):
                    value[rows] = vars(new)[name]


@dataclass
class WindowedState:
    """The last tokens of B rows, (B, T) and aligned to the right, and which of them are real, (B, T) bool."""

    tokens: Tensor
    valid: Tensor

    def select(self, index: Tensor) -> "WindowedState":
        """The rows `index` (B',), in that order; rows may repeat."""
        return WindowedState(self.tokens[index], self.valid[index])


State = CausalState | WindowedState
