"""Hashes of large files, remembered: to read a hundred gigabytes at every start would take a minute.

A file of `LARGE` bytes or more whose hash was taken is not read again while its size, its inode and the times at which
its content and its inode were last changed are the same. Whatever is written through the file system changes the last
of these, which no program can set; damage beneath it, on the disk itself, is found by `lmtrain tokenize --verify`,
which reads everything. Smaller files are always read.
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

    With `anew`, every file is read once more. `read` has the files that were.
    """

    def __init__(self, folder: Path, *, anew: bool = False) -> None:
        self._memory = folder / REMEMBERED
        self._known = _load(self._memory)
        self._anew = anew
        self.read: set[Path] = set()

    def sha256(self, path: Path) -> str:
        """SHA-256 of the file's content, in hexadecimal. Raises OSError as `sha256_file` does."""
        begun, status = time.time(), path.stat()
        if status.st_size < LARGE:
            self.read.add(path)
            return sha256_file(path)
        key = str(path.resolve())
        state = [status.st_size, status.st_ino, status.st_mtime_ns, status.st_ctime_ns]
        known = self._known.get(key)
        if not self._anew and isinstance(known, list) and known[:-1] == state and isinstance(known[-1], str):
            return known[-1]
        self.read.add(path)
        digest = sha256_file(path)
        if begun - status.st_ctime_ns / 1e9 > _SETTLED:
            self._remember(key, [*state, digest])
        return digest

    def _remember(self, key: str, entry: list[int | str]) -> None:
        """Add to what is remembered, by this process or others meanwhile, of files that are still there."""
        self._known = {path: old for path, old in _load(self._memory).items() if Path(path).exists()} | {key: entry}
        with suppress(LmtrainError):  # a folder that can only be read is read each time
            write_file(self._memory, json.dumps(self._known))


def _load(memory: Path) -> dict[str, object]:
    try:
        known = json.loads(memory.read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    return known if isinstance(known, dict) else {}
