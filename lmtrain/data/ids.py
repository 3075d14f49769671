"""Arrays in .npy files, and the token ids in several of them, read as one sequence. Shapes: B windows."""

from collections.abc import Sequence
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np

from lmtrain.errors import LmtrainError

_BLOCK = 1 << 22
_HEADER_BYTES = 128


def load_array(path: Path, dtype: np.dtype[Any], length: int | None = None) -> np.ndarray:
    """The one-dimensional array in a .npy file, memory-mapped.

    The header is compared with the expected one instead of parsed: numpy's parser compiles it, and raises more than
    ValueError on damaged ones. Raises LmtrainError where the file has no such array, of `length` elements if given.
    """
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            found = file.read(_HEADER_BYTES)
    except OSError as error:
        raise LmtrainError(f"{path} can't be read: {error.strerror or error}") from error
    count = max(0, size - _HEADER_BYTES) // dtype.itemsize if length is None else length
    header = BytesIO()
    fields = {"descr": dtype.str, "fortran_order": False, "shape": (count,)}
    np.lib.format.write_array_header_1_0(header, fields)
    # The size is compared too, since to map a file that is shorter than its array would end in a bus error.
    if found != header.getvalue() or size != _HEADER_BYTES + count * dtype.itemsize:
        shown = dtype.name if length is None else f"{length:,} {dtype.name}"
        raise LmtrainError(f"{path} isn't an array of {shown}")
    return np.asarray(np.memmap(path, dtype, "r", offset=_HEADER_BYTES, shape=(count,)))


def id_type(vocab_size: int) -> np.dtype[Any]:
    """The smallest type that ids are stored in."""
    return np.dtype("<u2" if vocab_size <= 2**16 else "<u4")


class Ids:
    """The ids of a split: memory-mapped arrays one after the other. What is read does not depend on where one array
    ends and the next begins, so neither the order of samples nor a score depends on how a split is stored."""

    def __init__(self, parts: Sequence[np.ndarray]) -> None:
        # Plain arrays: a slice of a memmap is a memmap, which takes four times as long to make.
        self.parts = [np.asarray(part) for part in parts if len(part)] or [np.empty(0, np.uint16)]
        self.dtype: np.dtype[Any] = self.parts[0].dtype
        self._lengths = np.array([len(part) for part in self.parts])
        self._ends = np.cumsum(self._lengths)

    def __len__(self) -> int:
        return int(self._ends[-1])

    def __getitem__(self, span: slice) -> np.ndarray:
        """The ids of a slice of step 1: a view if it is within one array, else a copy."""
        first, last, _ = span.indices(len(self))
        found = [self.parts[0][:0]]
        while first < last:
            number = int(np.searchsorted(self._ends, first, "right"))
            begin = int(self._ends[number] - self._lengths[number])
            found.append(self.parts[number][first - begin : last - begin])
            first += len(found[-1])
        return found[-1] if len(found) <= 2 else np.concatenate(found)

    def windows(self, starts: np.ndarray, length: int) -> np.ndarray:
        """The windows of `length` ids at `starts` (B,), each within the ids: (B, length)."""
        if len(self.parts) == 1:
            found: np.ndarray = np.lib.stride_tricks.sliding_window_view(self.parts[0], length)[starts]
            return found
        rows = [self[start : start + length] for start in starts.tolist()]
        return np.array(rows, self.dtype).reshape(len(starts), length)

    def counts(self, vocab_size: int) -> np.ndarray:
        """How often each id occurs: (vocab_size,) int64."""
        counts = np.zeros(vocab_size, np.int64)
        for part in self.parts:
            for first in range(0, len(part), _BLOCK):  # bincount makes a copy in int64
                counts += np.bincount(part[first : first + _BLOCK], minlength=vocab_size)
        return counts
