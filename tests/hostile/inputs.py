"""Hostile input: made from valid input by edits, and fed to a parser within a memory limit."""

import json
import resource
import struct
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lmtrain.errors import LmtrainError

FRAGMENTS = [
    *(b"0", b"-1", b"1e400", b"NaN", b"null", b"true", b"[", b"]", b"{", b"}", b'"', b":", b",", b"\n", b"\r\n", b"\0"),
    *(b"\xff", b"\xed\xa0\x80", b"\xef\xbb\xbf", b"\\ud800", b"\\u0000", b"../", b"/", b"&a ", b"*a", b"<<: ", b"? "),
    *(b"!!int ", b"!!float ", b"!!timestamp ", b"!!bool ", b"!!python/name:os.system ", b"1e-3", b"0x" + b"f" * 5000),
    *(b"1:" * 200 + b"0.5", b"[" * 2000, b'{"a":' * 2000, b"9" * 30, b"9" * 5000, b"I64", b"F64", b"C64", b"F4"),
    *(struct.pack("<Q", value) for value in (0, 2**31, 2**63 - 1, 2**63, 2**64 - 1, 100_000_000)),
    *(struct.pack("<I", value) for value in (2**16, 2**31, 2**32 - 1)),
]
"""What edits insert besides arbitrary bytes."""


@dataclass(frozen=True)
class Parser:
    """An entry into lmtrain: valid inputs, and a function that returns, or raises LmtrainError, on any input."""

    seeds: list[bytes]
    feed: Callable[[bytes], None]


def attempt(feed: Callable[[bytes], None], data: bytes) -> tuple[str, str]:
    """Feed `data`: `accepted`, `rejected` with the message, or `crashed` with the exception."""
    try:
        feed(data)
    except LmtrainError as error:
        return "rejected", str(error)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # noqa: BLE001 -- a panic in Rust derives from BaseException
        return "crashed", f"{type(error).__name__}: {error}"
    return "accepted", ""


@contextmanager
def limited_memory(more: int) -> Iterator[None]:
    """Inside, the process can map at most `more` further bytes of memory."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + more, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def edited(seed: bytes, edits: Sequence[tuple[int, int, bytes]]) -> bytes:
    """`seed` after edits (position, bytes removed there, bytes inserted there); positions wrap around."""
    data = bytearray(seed)
    for position, removed, inserted in edits:
        start = position % (len(data) + 1)
        data[start : start + removed] = inserted
    return bytes(data)


ODD_VALUES: list[Any] = [
    *(None, True, -1, 0, 2**31, 2**63, 10**400, 0.5, float("nan"), float("inf")),
    *("", "x", "../x", "\ud800", "a\0b", "x" * 300, [], {}, [[]], {"x": {}}),
]


def variants(document: Any) -> Iterator[bytes]:
    """A JSON document with one value at a time replaced by an odd one, removed, or doubled under another key."""
    for path in list(_paths(document)):
        for value in ODD_VALUES:
            parent, key, copy = _copied(document, path)
            parent[key] = value
            yield _dumps(copy)
        parent, key, copy = _copied(document, path)
        value = parent.pop(key)
        yield _dumps(copy)
        if isinstance(key, str):
            parent |= {key: value, f"{key}x": value}
            yield _dumps(copy)


def _paths(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield (*path, key)
        yield from _paths(inner, (*path, key))


def _copied(document: Any, path: tuple[Any, ...]) -> tuple[Any, Any, Any]:
    """The container of the value at `path`, its key there, and the copy of the document that both are in."""
    copy = json.loads(json.dumps(document))
    parent = copy
    for key in path[:-1]:
        parent = parent[key]
    return parent, path[-1], copy


def _dumps(document: Any) -> bytes:
    return json.dumps(document).encode()
