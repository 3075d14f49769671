"""Each document once: what has been seen is known by a hash, in 11 to 16 bytes a document (27 while a table grows)."""

import hashlib
from array import array
from itertools import chain
from tempfile import SpooledTemporaryFile

from lmtrain.data.local import Lines

_FIRST = 1 << 10
_FULL = 0.75
_IN_MEMORY = 32 << 20
"""Bytes of a document that are held in memory until its end is reached; a longer one waits on the disk."""


class Seen:
    """A set of 64-bit hashes in one open-addressed table, probed linearly.

    Among a hundred million different documents the chance that any two have one hash is 3 in 10,000.
    """

    def __init__(self) -> None:
        self.count = 0
        self._table = array("Q", bytes(8 * _FIRST))

    def add(self, content: bytes) -> bool:
        """Add a document by its SHA-256; whether it was new."""
        value = int.from_bytes(content[:8], "little") or 1  # 0 marks a free place
        place = self._place(value)
        if self._table[place]:
            return False
        self._table[place] = value
        self.count += 1
        if self.count > _FULL * len(self._table):
            self._grow()
        return True

    def _place(self, value: int) -> int:
        table, size = self._table, len(self._table)
        place = value % size
        while table[place] not in (0, value):
            place = (place + 1) % size
        return place

    def _grow(self) -> None:
        old, self._table = self._table, array("Q", bytes(8 * (len(self._table) * 3 // 2)))
        for value in old:
            if value:
                self._table[self._place(value)] = value


def unseen(lines: Lines, seen: Seen, *, keep_all: bool = False) -> Lines:
    """The lines of the documents that `seen` has not seen, which it has then; the first of equal ones is kept.

    With `keep_all`, all documents pass, and `seen` has seen them.
    A document goes from one certain start to the next. Lines before the first start pass: text without marks of
    documents has nothing to compare.
    """
    started = False
    content = hashlib.sha256()
    with SpooledTemporaryFile(_IN_MEMORY) as document:
        for text, starts_document in chain(lines, [("", True)]):
            if starts_document and started:
                if seen.add(content.digest()) or keep_all:
                    document.seek(0)
                    for number, line in enumerate(document):
                        yield line[:-1].decode(), number == 0
                content = hashlib.sha256()
                document.seek(0)
                document.truncate()
            started = started or starts_document
            if started:
                line = text.encode() + b"\n"
                content.update(line)
                document.write(line)
            else:
                yield text, False
