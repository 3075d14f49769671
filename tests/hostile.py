"""Hostile input: parts and values that a file must not hold, in valid input; and a limit on memory."""

import json
import random
import resource
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from lmtrain.config import loader
from lmtrain.config.schema import Config
from lmtrain.data.corpus import Corpus, make_corpus
from lmtrain.data.tokenizing import tokenize
from lmtrain.data.tokens import TokenStore
from lmtrain.storage.files import MANIFEST, sha256_bytes
from lmtrain.training.loop import fit
from tests.helpers import TINY

FRAGMENTS = [
    *(b"0", b"-1", b"1e400", b"NaN", b"null", b"true", b"[", b"]", b"{", b"}", b'"', b":", b",", b"\n", b"\r\n", b"\0"),
    *(b"\xff", b"\xed\xa0\x80", b"\xef\xbb\xbf", b"\\ud800", b"\\u0000", b"../", b"/", b"&a ", b"*a", b"<<: ", b"? "),
    *(b"!!int ", b"!!float ", b"!!timestamp ", b"!!bool ", b"!!python/name:os.system ", b"1e-3", b"0x" + b"f" * 5000),
    *(b"1:" * 200 + b"0.5", b"[" * 2000, b'{"a":' * 2000, b"9" * 30, b"9" * 5000, b"I64", b"F64", b"C64", b"F4"),
    *(struct.pack("<Q", value) for value in (0, 2**31, 2**63 - 1, 2**63, 2**64 - 1, 100_000_000)),
    *(struct.pack("<I", value) for value in (2**16, 2**31, 2**32 - 1)),
]
"""What edits insert besides arbitrary bytes."""

ODD_VALUES: list[Any] = [
    *(None, True, -1, 0, 2**31, 2**63, 10**400, 0.5, float("nan"), float("inf")),
    *("", "x", "../x", "\ud800", "a\0b", "x" * 300, [], {}, [[]], {"x": {}}),
]

SMALL = [
    *TINY,
    "data.sample_tokens=1000",
    "tokenizer.kind=byte",
    "model.context=8",
    "model.dim=4",
    "model.heads=1",
    "train.batch_size=2",
    "train.steps=2",
    "train.eval_steps=1",
    "train.eval_tokens=20",
    "train.sample_tokens=1",
    "eval.stride=8",
]
"""Overrides for the smallest run that has every file of a run."""


class Run(NamedTuple):
    """A run folder and what it was trained with."""

    folder: Path
    config: Config
    corpus: Corpus
    store: TokenStore


def trained_run(folder: Path) -> Run:
    """A finished run in `folder`, with its data."""
    config = loader.load(None, [*SMALL, f"data.dir={folder / 'data'}"], {})
    corpus = make_corpus(config.data)
    store = tokenize(corpus, config.tokenizer)
    fit(config, store, folder / "runs/sample")
    return Run(folder / "runs/sample", config, corpus, store)


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


def edited(seed: bytes, choice: random.Random) -> bytes:
    """`seed` after some edits: bytes at random places are replaced by others, or by a fragment."""
    data = bytearray(seed)
    for _ in range(choice.randint(1, 6)):
        start, removed = choice.randrange(len(data) + 1), choice.choice([0, 1, 4, 40])
        data[start : start + removed] = choice.choice([*FRAGMENTS, choice.randbytes(removed or 4)])
    return bytes(data)


def variants(document: Any) -> Iterator[Any]:
    """A JSON document with one value at a time replaced by an odd one, removed, or under another key."""
    if isinstance(document, dict):
        for key, value in document.items():
            yield from ({**document, key: odd} for odd in [*ODD_VALUES, *variants(value)])
            rest = {other: document[other] for other in document if other != key}
            yield from (rest, {**rest, f"{key}x": value})
    elif isinstance(document, list):
        for number, value in enumerate(document):
            before, after = document[:number], document[number + 1 :]
            yield from ([*before, odd, *after] for odd in [*ODD_VALUES, *variants(value)])
            yield before + after


def unsealed(folder: Path) -> dict[str, Any]:
    """The manifest of `folder` without its own hash, so that it can be changed."""
    manifest: dict[str, Any] = json.loads((folder / MANIFEST).read_bytes())
    manifest.pop("sha256", None)
    return manifest


def sign(file: Path) -> None:
    """Update the entry of a file in the manifest of its folder, so that its hash is right."""
    content, manifest = file.read_bytes(), unsealed(file.parent)
    manifest["files"][file.name] = {"bytes": len(content), "sha256": sha256_bytes(content)}
    (file.parent / MANIFEST).write_bytes(sealed(json.dumps(manifest).encode()))


def sealed(manifest: bytes) -> bytes:
    """A manifest with its own hash, or what is not one, unchanged."""
    try:
        entries = json.loads(manifest)
        entries.pop("sha256", None)
        return json.dumps(entries | {"sha256": sha256_bytes(json.dumps(entries).encode())}).encode()
    except (ValueError, TypeError, AttributeError, RecursionError):
        return manifest


def tensor_file(header: Any, data: bytes) -> bytes:
    """A safetensors file with this header."""
    content = json.dumps(header).encode()
    return struct.pack("<Q", len(content)) + content + data
