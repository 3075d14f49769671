"""Attention patterns: which keys a query may attend to, each a rule of two positions.

Shapes: T positions.
"""

from dataclasses import dataclass
from functools import reduce
from operator import or_

import torch
from torch import Tensor


@dataclass(frozen=True)
class Pattern:
    """The union of its parts, or every key if it has none; with `causal`, no key after the query.

    | part            | query q attends to key k where                                                                 |
    | --------------- | ---------------------------------------------------------------------------------------------- |
    | `window`        | abs(q - k) < window: local or truncated attention (Luong et al., 2015; Beltagy et al., 2020)   |
    | `stride`        | (q - k) is a multiple of stride (Child et al., 2019)                                           |
    | `global_tokens` | either is one of the first `global_tokens` positions (Ainslie et al., 2020; Beltagy et al.)   |

    With `window` or `stride` every query attends to itself; with `global_tokens`, to the first key. All are at least 1.
    """

    causal: bool = False
    window: int | None = None
    stride: int | None = None
    global_tokens: int | None = None

    def __call__(self, query: Tensor, key: Tensor) -> Tensor:
        """Return whether a query may attend to a key: positions of queries and of keys, broadcast -> bool."""
        parts = []
        if self.window is not None:
            parts.append(abs(query - key) < self.window)
        if self.stride is not None:
            parts.append((query - key) % self.stride == 0)
        if self.global_tokens is not None:
            parts.append((query < self.global_tokens) | (key < self.global_tokens))
        if self.causal:
            past = key <= query
            return reduce(or_, parts) & past if parts else past
        return reduce(or_, parts) if parts else (query >= 0) & (key >= 0)

    @property
    def local_window(self) -> int | None:
        """The window if the pattern has no other part, else None."""
        return self.window if self.stride is None and self.global_tokens is None else None

    def mask(self, length: int, device: torch.device | None = None) -> Tensor:
        """Return the mask for queries and keys 0 .. T - 1: (T, T) bool, True = may attend."""
        positions = torch.arange(length, device=device)
        return self(positions.unsqueeze(-1), positions)


FULL = Pattern()
CAUSAL = Pattern(causal=True)
