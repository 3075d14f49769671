"""Files that may be compressed, by their endings: .gz, .xz, .bz2, and .zst."""

import bz2
import gzip
import lzma
import shutil
import tempfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from io import BufferedReader
from pathlib import Path
from typing import IO, Any

COMPRESSED = (".gz", ".xz", ".bz2", ".zst")
DAMAGE = (OSError, EOFError, zlib.error, lzma.LZMAError)
"""What reading a damaged file may raise; an OSError without a number is the decompressor's own."""

_BLOCK = 1 << 20


@contextmanager
def open_bytes(path: Path) -> Iterator[IO[bytes]]:
    """Open a file to read its content, uncompressed, from beginning to end."""
    with _opened(path) as raw, BufferedReader(raw, _BLOCK) as file:
        yield file


@contextmanager
def open_seekable(path: Path) -> Iterator[Path | IO[bytes]]:
    """What a reader that jumps about can open: the path, or a temporary file with the uncompressed content."""
    if path.suffix not in COMPRESSED:
        yield path
        return
    with tempfile.TemporaryFile() as whole, open_bytes(path) as file:
        shutil.copyfileobj(file, whole, _BLOCK)
        whole.seek(0)
        yield whole


def _opened(path: Path) -> Any:
    if path.suffix == ".gz":
        return gzip.open(path)
    if path.suffix == ".xz":
        return lzma.open(path)
    if path.suffix == ".bz2":
        return bz2.open(path)
    if path.suffix == ".zst":
        import pyarrow  # comes with datasets; Python's own library has zstd from 3.14 on

        return pyarrow.CompressedInputStream(pyarrow.OSFile(str(path)), "zstd")
    return path.open("rb", buffering=0)
