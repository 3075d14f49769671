"""Files that may be compressed, by their endings."""

import bz2
import gzip
import lzma
import os
import zlib
from collections.abc import Callable
from io import BufferedReader, RawIOBase
from pathlib import Path
from typing import IO, Any

DAMAGE = (OSError, EOFError, zlib.error, lzma.LZMAError)
"""What reading a damaged file may raise."""

_BLOCK = 1 << 20


class _Streams(RawIOBase):
    """The content of .xz or .bz2 streams, one after the other.

    The readers of the standard library take a stream with a damaged header, and all that follows, for padding, and
    ignore it.
    """

    def __init__(self, path: Path, decompressor: Callable[[], Any]) -> None:
        self._file = path.open("rb")
        self._new = decompressor
        self._stream = decompressor()

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        data = b""
        while not data:
            if self._stream.eof:
                rest = self._stream.unused_data
                while not (rest := rest.lstrip(b"\0")):  # padding
                    if not (rest := self._file.read(_BLOCK)):
                        return 0
                self._stream = self._new()
            else:
                rest = self._file.read(_BLOCK) if self._stream.needs_input else b""
                if self._stream.needs_input and not rest:
                    raise EOFError("it ends before its end-of-stream marker")
            data = self._stream.decompress(rest, len(buffer))
        buffer[: len(data)] = data
        return len(data)

    def close(self) -> None:
        self._file.close()
        super().close()


def _zstd(path: Path) -> Any:
    import pyarrow  # comes with datasets; the standard library has zstd from Python 3.14 on

    return pyarrow.CompressedInputStream(pyarrow.OSFile(os.fsencode(path)), "zstd")


COMPRESSED: dict[str, Callable[[Path], Any]] = {
    ".gz": gzip.open,
    ".xz": lambda path: _Streams(path, lzma.LZMADecompressor),
    ".bz2": lambda path: _Streams(path, bz2.BZ2Decompressor),
    ".zst": _zstd,
}
"""How a file with this ending is opened: a raw stream of its uncompressed content."""


def open_bytes(path: Path) -> IO[bytes]:
    """Open a file to read its uncompressed content from beginning to end."""
    uncompressed = COMPRESSED.get(path.suffix.lower())
    return path.open("rb", buffering=_BLOCK) if uncompressed is None else BufferedReader(uncompressed(path), _BLOCK)
