"""Hashes of large files, remembered, so that a start on a large corpus does not read all of it again.

A file of `LARGE` bytes or more is not read again while its size, its inode and the times at which its content and its
inode were last changed are the same. Every write through the file system changes the last of these, which no program
can set. Damage on the disk itself is found by `lmtrain tokenize --verify`, which reads everything. Smaller files are
always read.
"""

import json
import time
from contextlib import suppress
from pathlib import Path

from lmtrain.errors import LmtrainError
from lmtrain.storage.files import sha256_file, write_file

LARGE = 16 << 20
"""Bytes: less than a shard of a large corpus has."""

REMEMBERED = ".hashes.json"
_SETTLED = 2.0
"""Seconds: the clock of some file systems is so coarse that a younger file could change and show the same time."""


class Hashes:
    """The sha256 of files; those of large ones are remembered in `folder`, if it can be written to.

    With `reread`, every file is read. `read` holds the files that were.
    """

    def __init__(self, folder: Path, *, reread: bool = False) -> None:
        self._memory = folder / REMEMBERED
        self._known = {} if reread else _load(self._memory)
        self.read: set[Path] = set()

    def sha256(self, path: Path) -> str:
        """SHA-256 of the file's content, in hexadecimal. Raises OSError as `sha256_file` does."""
        begun, status = time.time(), path.stat()
        key = str(path.resolve())
        state = [status.st_size, status.st_ino, status.st_mtime_ns, status.st_ctime_ns]
        match self._known.get(key):
            case [*known_state, str(digest)] if known_state == state:
                return digest
        self.read.add(path)
        digest = sha256_file(path)
        if status.st_size >= LARGE and begun - status.st_ctime_ns / 1e9 > _SETTLED:
            self._known[key] = [*state, digest]
            others = {path: entry for path, entry in _load(self._memory).items() if Path(path).exists()}
            with suppress(LmtrainError):  # a folder that can't be written to is read each time
                write_file(self._memory, json.dumps({**others, key: self._known[key]}))
        return digest


def _load(memory: Path) -> dict[str, object]:
    try:
        known = json.loads(memory.read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    return known if isinstance(known, dict) else {}
