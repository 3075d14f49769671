"""Token ids that lie in several arrays, read as one sequence."""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

_BLOCK = 1 << 22


class Ids:
    """The ids of a split: memory-mapped arrays one after the other. Where one ends and the next begins can't be told
    from what is read, so neither the order of samples nor a score depends on how a split is stored."""

    def __init__(self, parts: Sequence[np.ndarray]) -> None:
        # As plain arrays, which they are: of a memmap every slice is a memmap, and takes four times as long to make.
        self.parts = [np.asarray(part) for part in parts if len(part)] or [np.empty(0, np.uint16)]
        self.dtype: np.dtype[Any] = self.parts[0].dtype
        self._lengths = np.array([len(part) for part in self.parts])
        self._ends = np.cumsum(self._lengths)

    def __len__(self) -> int:
        return int(self._ends[-1])

    def __getitem__(self, stretch: slice) -> np.ndarray:
        """The ids of a stretch (step 1): a view where it lies in one array, else a copy."""
        first, last, step = stretch.indices(len(self))
        if step != 1:
            raise ValueError(f"ids are read in steps of 1, and not of {step}")
        number = min(int(np.searchsorted(self._ends, first, "right")), len(self.parts) - 1)
        found: list[np.ndarray] = []
        while not found or (first < last and number < len(self.parts)):
            end = int(self._ends[number])
            begin = end - len(self.parts[number])
            found.append(self.parts[number][first - begin : max(first, min(last, end)) - begin])
            first, number = min(last, end), number + 1
        return found[0] if len(found) == 1 else np.concatenate(found)

    def windows(self, starts: np.ndarray, length: int) -> np.ndarray:
        """The windows of `length` ids at `starts` (B,), each within the ids: (B, length)."""
        if len(self.parts) == 1:
            found: np.ndarray = np.lib.stride_tricks.sliding_window_view(self.parts[0], length)[starts]
            return found
        result = np.empty((len(starts), length), self.dtype)
        numbers = np.searchsorted(self._ends, starts, "right")
        begins = starts - (self._ends[numbers] - self._lengths[numbers])
        for row, (number, begin) in enumerate(zip(numbers.tolist(), begins.tolist(), strict=True)):
            found = self.parts[number][begin : begin + length]
            result[row] = found if len(found) == length else self[int(starts[row]) : int(starts[row]) + length]
        return result

    def blocks(self) -> Iterator[np.ndarray]:
        """All ids in order, some millions at a time."""
        for part in self.parts:
            for first in range(0, len(part), _BLOCK):
                yield part[first : first + _BLOCK]

    def counts(self, vocab_size: int) -> np.ndarray:
        """How often each id occurs: (vocab_size,) int64."""
        counts = np.zeros(vocab_size, np.int64)
        for block in self.blocks():
            counts += np.bincount(block, minlength=vocab_size)
        return counts
