"""Files that may be compressed, by their endings: .gz, .xz, .bz2, and .zst."""

import bz2
import gzip
import lzma
import tempfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from io import BufferedReader, RawIOBase
from pathlib import Path
from typing import IO, Any

from lmtrain.errors import LmtrainError

COMPRESSED = (".gz", ".xz", ".bz2", ".zst")
DAMAGE = (OSError, EOFError, zlib.error, lzma.LZMAError)
"""What reading a damaged file may raise; an OSError without a number is the decompressor's own."""

_BLOCK = 1 << 20
_MOST_TIMES = 1_000
_SMALL = 256 << 20
"""Bytes of text that a file of any size may hold."""


def is_compressed(path: Path) -> bool:
    """Whether the name has the ending of a compression."""
    return path.suffix.lower() in COMPRESSED


def most_text(path: Path) -> int:
    """The bytes of text that a file may hold: 1,000 times its own, or 256 MiB. A parquet file of one long row that is
    referred to again and again would fill the disk, as would a compressed file of zeros."""
    return max(_SMALL, _MOST_TIMES * path.stat().st_size)


def too_much(path: Path) -> LmtrainError:
    """The sentence for a file that holds more than `most_text`."""
    return LmtrainError(
        f"{path} holds over {most_text(path) >> 20:,} MiB of text, more than {_MOST_TIMES:,} times its size (it "
        "repeats itself): if that is intended, give the text uncompressed"
    )


@contextmanager
def open_bytes(path: Path) -> Iterator[IO[bytes]]:
    """Open a file to read its content, uncompressed, from beginning to end."""
    with _opened(path) as raw, BufferedReader(raw, _BLOCK) as file:
        yield file


@contextmanager
def open_seekable(path: Path) -> Iterator[Path | IO[bytes]]:
    """What a reader that jumps about can open: the path, or a temporary file with the uncompressed content."""
    if not is_compressed(path):
        yield path
        return
    with tempfile.TemporaryFile() as whole, open_bytes(path) as file:
        while block := file.read(_BLOCK):
            whole.write(block)
            if whole.tell() > most_text(path):
                raise too_much(path)
        whole.seek(0)
        yield whole


def _opened(path: Path) -> Any:
    ending = path.suffix.lower()
    if ending == ".gz":
        return gzip.open(path)
    if ending == ".xz":
        return _Streams(path, lzma.LZMADecompressor)
    if ending == ".bz2":
        return _Streams(path, bz2.BZ2Decompressor)
    if ending == ".zst":
        import pyarrow  # comes with datasets; Python's own library has zstd from 3.14 on

        return pyarrow.CompressedInputStream(pyarrow.OSFile(str(path)), "zstd")
    return path.open("rb", buffering=0)


class _Streams(RawIOBase):
    """The content of .xz or .bz2 streams, one after the other.

    Python's own readers take a stream whose header is damaged, and all that follows, for padding, and leave it out.
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
