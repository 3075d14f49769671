"""The order of training samples: a pure function of the seed and the sample's number, with no state and no table.

Sample g of a run is the same window whatever the number of processes, the micro-batch size, or the step at which a run
was resumed. A window is a training sequence. Shapes: B samples in a batch, T tokens in a window (`context`), S targets.
"""

import hashlib
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from lmtrain.errors import LmtrainError

_ROUNDS = 8
_MIN_BITS = 6
"""The fewest bits that are mixed, however small an epoch is; another number would change the order of tiny epochs."""


def permute(index: np.ndarray, size: int, key: int) -> np.ndarray:
    """The images of `index` (1-D) under a permutation of range(`size`) that `key` selects: int64 of the same shape.

    Nothing of length `size` is built. Each round multiplies by an odd number, adds, and folds the upper half of the
    bits onto the lower: a bijection of the b-bit numbers. Results outside range(size) are mixed again until they are
    inside (cycle walking: Black and Rogaway, 2002), which keeps it a bijection.
    """
    bits = max((size - 1).bit_length(), _MIN_BITS)
    keys = np.frombuffer(hashlib.shake_128(f"{key}".encode()).digest(16 * _ROUNDS), "<u8").reshape(_ROUNDS, 2)
    result = _mix(index.astype(np.uint64), bits, keys)
    while (outside := np.flatnonzero(result >= size)).size:
        result[outside] = _mix(result[outside], bits, keys)
    return result.astype(np.int64)


def _mix(x: np.ndarray, bits: int, keys: np.ndarray) -> np.ndarray:
    """A bijection of the `bits`-bit numbers; `keys` (rounds, 2)."""
    mask, half = np.uint64(2**bits - 1), np.uint64((bits + 1) // 2)
    for factor, summand in keys | np.array([1, 0], np.uint64):
        x = (x * factor + summand) & mask
        x ^= x >> half
    return x


def _key(*parts: int | str) -> int:
    """64 bits that depend on every part."""
    return int.from_bytes(hashlib.shake_128(repr(parts).encode()).digest(8), "little")


@dataclass(frozen=True)
class SampleOrder:
    """Which window of a split is sample number 0, 1, 2 and so on, epoch after epoch.

    A window of `context` tokens predicts the tokens after its last `targets` positions, and the next window in the text
    begins `targets` tokens later: with `targets` = `context` windows don't overlap, and with 1 each token has a window
    of its own. An epoch takes each window from a random offset on once, in random order. It has as many as fit at every
    offset, and at least one.

    Raises LmtrainError when there are fewer tokens than one window and its last target.
    """

    tokens: int
    context: int
    targets: int
    seed: int

    def __post_init__(self) -> None:
        if self.tokens <= self.context:
            raise LmtrainError(
                f"the split has {self.tokens:,} tokens where model.context={self.context} needs at least "
                f"{self.context + 1:,}: choose a smaller model.context or more text"
            )

    def per_epoch(self) -> int:
        """Samples in an epoch."""
        return max(1, (self.tokens - self.context) // self.targets)

    def starts(self, first: int, count: int) -> np.ndarray:
        """First tokens of the windows of samples `first` .. `first + count - 1`: (count,) int64."""
        size = self.per_epoch()
        parts = [np.empty(0, np.int64)]
        while count > 0:
            epoch, within = divmod(first, size)
            index = np.arange(within, min(within + count, size))
            windows = permute(index, size, _key(self.seed, epoch, "order"))
            # Unless the split is short, any offset below `targets` leaves room for all windows.
            offset = _key(self.seed, epoch, "phase") % min(self.targets, self.tokens - self.context)
            parts.append(offset + windows * self.targets)
            first, count = first + len(index), count - len(index)
        return np.concatenate(parts)

    def batch(self, ids: np.ndarray, first: int, count: int) -> tuple[Tensor, Tensor]:
        """Return samples `first` .. `first + count - 1` of the split `ids` (tokens,): inputs (B, T) and targets (B, S),
        the tokens after the last S positions, int64.
        """
        windows = np.lib.stride_tricks.sliding_window_view(ids, self.context + 1)[self.starts(first, count)]
        inputs, targets = windows[:, :-1], windows[:, -self.targets :]
        # NumPy copies: torch's `contiguous` would keep the stride of a single row, for which a step is compiled again.
        return torch.from_numpy(inputs.astype(np.int64)), torch.from_numpy(targets.astype(np.int64))
