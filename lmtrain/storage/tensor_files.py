"""Safetensors files: written by one process, or by several that each have some rows; read by rows.

Rows 64 to 128 of the 256 of a tensor `weight` are stored as a tensor of the name `weight[64:128/256]`.
"""

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate, pairwise
from pathlib import Path
from types import EllipsisType
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from lmtrain.errors import LmtrainError
from lmtrain.storage.files import read_errors
from lmtrain.system import disk

_DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
"""The names that safetensors has for dtypes."""
_TYPES = {name: dtype for dtype, name in _DTYPES.items()}
_ROWS = re.compile(r"(.+)\[([0-9]{1,15}):([0-9]{1,15})/([0-9]{1,15})\]")


@dataclass(frozen=True)
class _Piece:
    """Rows `first` to `end` of the `total` of a tensor, in an open file."""

    file: Path
    view: Any
    """The library's slice, which reads rows when it is indexed."""
    shape: tuple[int, ...]
    dtype: torch.dtype
    first: int
    end: int
    total: int

    def read(self, rows: slice | EllipsisType) -> Tensor:
        """Read some of these rows, counted from `first`."""
        with _reading(self.file):
            tensor: Tensor = self.view[rows]
        return tensor


@dataclass(frozen=True)
class LazyTensor:
    """A tensor on disk: `stored[...]` reads all of it, `stored[first:end]` only these rows."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    pieces: tuple[_Piece, ...]
    """In the order of their rows."""

    def __getitem__(self, rows: slice | EllipsisType) -> Tensor:
        """Return a copy in memory. Raises LmtrainError if a file can't be read."""
        if not self.pieces[0].shape:  # a scalar, which may be given out as a vector of one element
            return self.pieces[0].read(...).reshape(self.shape)[rows].clone()
        first, end, _ = (slice(None) if isinstance(rows, EllipsisType) else rows).indices(self.shape[0])
        result = torch.empty(max(0, end - first), *self.shape[1:], dtype=self.dtype)
        for piece in self.pieces:
            begin, stop = max(first, piece.first), min(end, piece.end)
            if begin < stop:
                result[begin - first : stop - first] = piece.read(slice(begin - piece.first, stop - piece.first))
        return result


def rows_name(name: str, first: int, end: int, total: int) -> str:
    """Return the name under which rows `first` to `end` of a tensor with `total` rows are stored."""
    return f"{name}[{first}:{end}/{total}]"


def serialize(named: Mapping[str, Tensor]) -> list[memoryview]:
    """Return the content of a safetensors file: a header, and the bytes of the tensors.

    Tensors on the CPU are not copied; the library's own function makes three copies of each. The header is its length,
    then JSON. Tensors of the widest dtypes come first, so that each tensor is aligned to the size of its dtype.
    """
    names = sorted(named, key=lambda name: (-named[name].itemsize, name))
    ends = accumulate((named[name].nbytes for name in names), initial=0)
    entries = {
        name: {"dtype": _DTYPES[named[name].dtype], "shape": list(named[name].shape), "data_offsets": offsets}
        for name, offsets in zip(names, pairwise(ends), strict=True)
    }
    header = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    header += b" " * (-len(header) % 8)
    tensors = [named[name].detach().cpu().contiguous().flatten().view(torch.uint8) for name in names]
    return [memoryview(len(header).to_bytes(8, "little") + header), *(tensor.numpy().data for tensor in tensors)]


def open_files(files: Iterable[Path]) -> dict[str, LazyTensor]:
    """Return the tensors in files that belong together. Only the headers are read, and the files stay open.

    Raises LmtrainError if one is missing, has another size than its header says or is not a safetensors file, or if
    rows of a tensor are missing or stored twice.
    """
    pieces: dict[str, list[_Piece]] = {}
    for file in files:
        with _reading(file):
            disk.check_regular(file)
            opened: Any = safe_open(file, "pt")
            for name in opened.keys():  # noqa: SIM118 -- it is not a mapping
                view = opened.get_slice(name)
                shape, dtype = tuple(view.get_shape()), _TYPES[view.get_dtype()]
                match = _ROWS.fullmatch(name)
                count = shape[0] if shape else 1
                first, end, total = map(int, match.groups()[1:]) if match else (0, count, count)
                piece = _Piece(file, view, shape, dtype, first, end, total)
                pieces.setdefault(match[1] if match else name, []).append(piece)
    return {name: _joined(name, parts) for name, parts in pieces.items()}


def _joined(name: str, pieces: list[_Piece]) -> LazyTensor:
    """Return the tensor that consists of these pieces."""
    pieces = sorted(pieces, key=lambda piece: (piece.first, piece.end))
    one, last = pieces[0], pieces[-1]
    if len(pieces) == 1 and not one.shape:
        return LazyTensor((), one.dtype, (one,))
    if (
        one.first != 0
        or last.end != last.total
        or any(before.end != after.first for before, after in pairwise(pieces))
        or any(piece.shape[:1] != (piece.end - piece.first,) for piece in pieces)
        or len({(piece.shape[1:], piece.dtype, piece.total) for piece in pieces}) > 1
    ):
        raise LmtrainError(f"{one.file.parent} is damaged: rows of {name[:99]!r} are missing or stored twice")
    return LazyTensor((one.total, *one.shape[1:]), one.dtype, tuple(pieces))


@contextmanager
def _reading(file: Path) -> Iterator[None]:
    """Turn the library's errors of reading `file` into LmtrainError."""
    try:
        with read_errors(file):
            yield
    except (SafetensorError, ArithmeticError, LookupError, RuntimeError, TypeError) as error:
        raise LmtrainError(f"{file} is not a safetensors file ({error})") from error
