"""Where one step of decoding stands: the columns of the caches that it writes and reads, for every layer alike.

Shapes: B rows, H heads, N columns that are looked at, D features of a head.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from lmtrain.nn.dot_product import restrict
from lmtrain.nn.patterns import Pattern
from lmtrain.nn.positions import Rotation, alibi_bias


@dataclass
class Place:
    """The next token of each row goes to its `column` (B,), and looks at the first `seen` columns up to there.

    Where `level`, all rows stand at column `seen` - 1: nothing lies behind it, and no mask is needed. `rotation` turns
    the new token's query and key; `slopes` (H,) are ALiBi's.
    """

    column: Tensor
    seen: int
    level: bool = False
    rotation: Rotation | None = None
    slopes: Tensor | None = None
    _masks: dict[Pattern, Tensor | None] = field(default_factory=dict)

    @property
    def at(self) -> Tensor | int:
        """The column of each row, or of all."""
        return self.seen - 1 if self.level else self.column

    def write(self, x: Tensor, new: Tensor) -> None:
        """Put new (B, ...) into x (B, N, ...), each row's at its column."""
        if self.level:
            x[:, self.seen - 1 : self.seen] = new.unsqueeze(1)
        else:
            x[torch.arange(len(new), device=new.device), self.column] = new

    def mask(self, pattern: Pattern) -> Tensor | None:
        """What `attend` is to be given for layers with this pattern: None, (B, 1, 1, N) bool or (B, H, 1, N) added."""
        if pattern not in self._masks:
            self._masks[pattern] = self._mask(pattern)
        return self._masks[pattern]

    def _mask(self, pattern: Pattern) -> Tensor | None:
        query, columns = self.column.unsqueeze(-1), torch.arange(self.seen, device=self.column.device)
        allowed = None
        if pattern.sparse or not self.level:
            allowed = (pattern(query, columns) & (columns <= query))[:, None, None]
        if self.slopes is None:
            return allowed
        bias = alibi_bias(self.slopes, query, columns)
        return bias if allowed is None else restrict(bias, allowed)


def take_rows(x: Tensor, rows: Tensor, used: int | None = None, axis: int = 1) -> Tensor:
    """The rows x[rows] of x (B, ...), in x's own memory where they are as many: `rows` (B',) may repeat and drop some.

    With `used` only so many entries along `axis` are of interest; those after them are left as they are, or zero.
    """
    part = x if used is None else x.narrow(axis, 0, used)
    if len(rows) == len(x):
        # On a GPU, to look which rows move would take longer than to copy all.
        order = torch.arange(len(x), device=x.device)
        moved = (rows != order).nonzero().squeeze(-1) if x.is_cpu else order
        part.index_copy_(0, moved, part.index_select(0, rows[moved]))
        return x
    chosen = part.index_select(0, rows)
    if used is None:
        return chosen
    result = x.new_zeros(len(rows), *x.shape[1:])  # not left empty: zero weights times NaN would be NaN
    result.narrow(axis, 0, used).copy_(chosen)
    return result
