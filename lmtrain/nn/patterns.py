"""Attention patterns: which keys a query may look at, each one rule of two positions.

The rule is all there is: the dense mask, the blocks of keys that a CPU skips and the block mask of FlexAttention are
made from it.

Shapes: Tq positions of queries, Tk of keys, C positions in a block.
"""

from dataclasses import dataclass
from functools import lru_cache, reduce
from operator import or_
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

Positions = TypeVar("Positions", Tensor, np.ndarray)


@dataclass(frozen=True)
class Pattern:
    """The union of the parts that are given, or every key where none is; with `causal`, none after the query.

    | part            | query q sees key k where                                                                       |
    | --------------- | ---------------------------------------------------------------------------------------------- |
    | `window`        | abs(q - k) < window: local or truncated attention (Luong et al., 2015; Beltagy et al., 2020)   |
    | `stride`        | (q - k) is a multiple of stride (Child et al., 2019)                                           |
    | `global_tokens` | either is one of the first positions, so many of them (Ainslie et al., 2020; Beltagy et al.)   |

    With `window` or `stride` every query sees itself; with `global_tokens`, the first key.
    """

    causal: bool = False
    window: int | None = None
    stride: int | None = None
    global_tokens: int | None = None

    def __post_init__(self) -> None:
        for name in ("window", "stride", "global_tokens"):
            size = getattr(self, name)
            if size is not None and size < 1:
                raise ValueError(f"{name}={size} must be at least 1")

    def __call__(self, query: Positions, key: Positions) -> Positions:
        """Whether the query at one position may look at the key at another: two integer arrays, broadcast, -> bool."""
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
    def sparse(self) -> bool:
        """Whether there is more to it than `causal`."""
        return self.window is not None or self.stride is not None or self.global_tokens is not None

    def mask(self, queries: int, keys: int, device: torch.device) -> Tensor:
        """The rule for positions 0 .. Tq - 1 and 0 .. Tk - 1: (Tq, Tk) bool, True = may look."""
        return self(torch.arange(queries, device=device).unsqueeze(-1), torch.arange(keys, device=device))


FULL = Pattern()
CAUSAL = Pattern(causal=True)


def key_blocks(pattern: Pattern, length: int, block: int) -> tuple[tuple[int, ...], ...]:
    """For every block of C queries, the blocks of C keys that hold a key which one of them may look at."""
    # In numbers: torch before 2.12 can't hand a pattern to a function that it does not trace.
    return _key_blocks(length, block, pattern.causal, pattern.window, pattern.stride, pattern.global_tokens)


def _key_blocks(*numbers: int | None) -> tuple[tuple[int, ...], ...]:
    # A function of its own, as a compiler looks into one that has a cache.
    return _found_blocks(*numbers)


# What torch.compiler.assume_constant_result does, without its import of the compiler, which takes over a second.
_key_blocks._dynamo_marked_constant = True  # type: ignore[attr-defined]


@lru_cache(maxsize=64)
def _found_blocks(
    length: int, block: int, causal: bool, window: int | None, stride: int | None, global_tokens: int | None
) -> tuple[tuple[int, ...], ...]:
    # In numpy, so that tensors without data (an estimate of memory, a traced graph) can't get in here.
    pattern, keys, found = Pattern(causal, window, stride, global_tokens), np.arange(length), []
    for start in range(0, length, block):
        queries = np.arange(start, min(start + block, length))
        seen = pattern(queries[:, None], keys).any(axis=0)
        found.append(tuple(np.unique(keys[seen] // block).tolist()))
    return tuple(found)
