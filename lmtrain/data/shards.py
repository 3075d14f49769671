"""The work of tokenizing in pieces: a text is cut between lines, and each piece becomes one shard of a token store.

What a shard holds depends on its piece alone, and the shards of a split joined hold what one pass would have written.
A task is plain data, so that it can be done here or in another process (see processes.py).
"""

import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from lmtrain.data.normal import OFFSET, load_starts, npy_header
from lmtrain.data.tokenizer import Tokenizer, pieces
from lmtrain.errors import LmtrainError
from lmtrain.storage.files import sha256_file, write_file, writing
from lmtrain.system import disk

SHARD_BYTES = 64 << 20
"""Text in a shard, to the end of its last line: some 15 million tokens, seconds of work to lose when killed."""

_BATCH_LINES = 2_000
_BATCH_CHARACTERS = 1 << 21

Advance = Callable[[int], object]


@dataclass(frozen=True)
class Piece:
    """Whole lines of a split's text, from byte `begin` to `end`."""

    text: str
    begin: int
    end: int
    first_line: int
    lines: int


@dataclass(frozen=True)
class Count:
    """A task: how often each word of a piece occurs."""

    piece: Piece


@dataclass(frozen=True)
class Encode:
    """A task: write the shard `<stem>.npy`, `<stem>.docs.npy`, and then `<stem>.json`, which says that it is done.

    `documents` is the file of the lines at which documents start; `ends` whether the split ends with this piece.
    """

    piece: Piece
    documents: str
    ends: bool
    stem: str
    tokenizer: str
    tokenizer_sha256: str


Task = Count | Encode


def cut(text: Path) -> list[Piece]:
    """A split's text in pieces of `SHARD_BYTES` and the rest of a line; an empty one is one piece."""
    found: list[Piece] = []
    begin = line = 0
    try:
        with text.open("rb") as file:
            while (block := file.read(SHARD_BYTES) + file.readline()) or not found:
                found.append(Piece(str(text), begin, begin + len(block), line, block.count(b"\n")))
                begin, line = found[-1].end, line + found[-1].lines
    except OSError as error:
        raise LmtrainError(f"{text} can't be read: {error.strerror or error}") from error
    return found


def lines_of(piece: Piece, most: int | None = None) -> Iterator[str]:
    """The lines of a piece, each with its line end; with `most`, those of about its first `most` bytes."""
    left = piece.end - piece.begin if most is None else min(most, piece.end - piece.begin)
    try:
        with Path(piece.text).open("rb", buffering=1 << 20) as file:
            file.seek(piece.begin)
            while left > 0 and (line := file.readline()):
                left -= len(line)
                yield line.decode()
    except (OSError, UnicodeDecodeError) as error:
        raise LmtrainError(f"{piece.text} can't be read ({error}): delete its folder and make it again") from error


def perform(task: Task, advance: Advance) -> dict[str, Any]:
    """Do a task; `advance` hears of each batch's lines."""
    if isinstance(task, Count):
        counts: Counter[str] = Counter()
        for text in pieces(lines_of(task.piece), "word"):
            counts.update(text.split())
        advance(task.piece.lines)
        return dict(counts)
    with writing(Path(task.stem)):
        return _encode(task, advance)


def dump(task: Task) -> str:
    """A task as one line of JSON."""
    return json.dumps(asdict(task))


def load(line: str) -> Task:
    """The task of such a line."""
    fields = json.loads(line)
    piece = Piece(**fields.pop("piece"))
    return Encode(piece, **fields) if fields else Count(piece)


def finished(task: Encode) -> dict[str, Any] | None:
    """What a finished shard says of itself; None where it isn't there, was made otherwise, or is damaged."""
    try:
        record: dict[str, Any] = json.loads(Path(f"{task.stem}.json").read_bytes())
        sound = record["tokenizer"] == task.tokenizer_sha256 and all(
            sha256_file(Path(task.stem + end)) == digest for end, digest in record["sha256"].items()
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    return record if sound else None


@lru_cache(1)
def _tokenizer(path: str, sha256: str) -> Tokenizer:
    """The tokenizer of these tasks, read once."""
    tokenizer = Tokenizer.load(Path(path))
    if tokenizer.sha256 != sha256:
        raise LmtrainError(f"{path} was changed while lmtrain read it: start again")
    return tokenizer


def _encode(task: Encode, advance: Advance) -> dict[str, Any]:
    """Write a shard batch by batch.

    With bpe and byte an `<eos>` ends each document, put down where the next one starts; with word, lines have theirs.
    """
    tokenizer = _tokenizer(task.tokenizer, task.tokenizer_sha256)
    document_end = [] if tokenizer.kind == "word" else [tokenizer.eos_id]
    starts = iter(_starts(task))
    next_start = next(starts, None)
    dtype = id_type(tokenizer.vocab_size)
    documents: list[int] = []
    line, tokens, replaced = task.piece.first_line, 0, 0
    half_written = Path(f"{task.stem}.half")
    with half_written.open("wb") as file:
        file.write(npy_header(dtype, 0))
        for texts, encoded in tokenizer.encode_batches(_batches(pieces(lines_of(task.piece), tokenizer.kind))):
            ids: list[int] = []
            first_line = line
            for text, own in zip(texts, encoded, strict=True):
                if line == next_start:
                    ids += document_end if line else []
                    documents.append(tokens + len(ids))
                    next_start = next(starts, None)
                ids += own
                replaced += tokenizer.replaced(text, own)
                line += text.endswith("\n")
            file.write(np.array(ids, dtype).tobytes())
            tokens += len(ids)
            advance(line - first_line)
        last = document_end if task.ends and line else []
        file.write(np.array(last, dtype).tobytes())
        tokens += len(last)
        file.seek(0)
        file.write(npy_header(dtype, tokens))
    disk.sync(half_written)
    disk.rename(half_written, Path(f"{task.stem}.npy"))
    found = np.array(documents, OFFSET)
    write_file(Path(f"{task.stem}.docs.npy"), npy_header(OFFSET, len(found)) + found.tobytes())
    hashes = {end: sha256_file(Path(task.stem + end)) for end in (".npy", ".docs.npy")}
    counts = {"tokens": tokens, "documents": len(found), "replaced": replaced}
    record = {**counts, "tokenizer": tokenizer.sha256, "sha256": hashes}
    write_file(Path(f"{task.stem}.json"), json.dumps(record))
    return record


def id_type(vocab_size: int) -> np.dtype[Any]:
    """The smallest type that ids are stored in."""
    return np.dtype("<u2" if vocab_size <= 2**16 else "<u4")


def _starts(task: Encode) -> list[int]:
    """The lines of the piece at which documents start."""
    lines = load_starts(Path(task.documents))
    first, last = np.searchsorted(lines, [task.piece.first_line, task.piece.first_line + task.piece.lines])
    found: list[int] = lines[first:last].tolist()
    return found


def _batches(texts: Iterable[str]) -> Iterator[list[str]]:
    """Lists of texts, each of a bounded number of lines and characters."""
    batch: list[str] = []
    characters = 0
    for text in texts:
        batch.append(text)
        characters += len(text)
        if len(batch) == _BATCH_LINES or characters >= _BATCH_CHARACTERS:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch
