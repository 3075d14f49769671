"""The work of tokenizing in pieces: a text is cut between lines, and each piece becomes one shard of a token store.

What a shard holds depends only on its piece, and the shards of a split joined hold what one pass would have written.
A task is plain data, so that it can be done in this process or in another (see processes.py).
"""

import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from io import BytesIO
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from lmtrain.data.ids import load_array, write_header
from lmtrain.data.tokenizer import Tokenizer, pieces
from lmtrain.errors import LmtrainError
from lmtrain.storage.files import sha256_file, write_file, writing
from lmtrain.system import disk

SHARD_BYTES = 64 << 20
"""Text in a shard, to the end of its last line: some 15 million tokens, seconds of work to lose when killed."""
TOKENIZER = "tokenizer.json"
"""The tokenizer's name in a folder of shards."""

_BATCH_LINES = 2_000
_BATCH_CHARACTERS = 1 << 21

Advance = Callable[[int], object]


@dataclass(frozen=True)
class Piece:
    """Whole lines of a split's text file, from byte `begin` to `end`; the last piece `ends` the text."""

    text: str
    begin: int
    end: int
    first_line: int
    lines: int
    ends: bool


@dataclass(frozen=True)
class Count:
    """A task: how often each word of a piece occurs."""

    piece: Piece


@dataclass(frozen=True)
class Encode:
    """A task: write the shard `<stem>.npy`, `<stem>.docs.npy`, and then `<stem>.json`, which marks it as finished.

    The tokenizer, which has this hash, is beside the shard; the lines at which documents start are beside the text.
    """

    piece: Piece
    stem: str
    tokenizer_sha256: str


Task = Count | Encode


def cut(text: Path) -> list[Piece]:
    """A split's text in pieces of `SHARD_BYTES` and the rest of a line; an empty one is one piece."""
    found: list[Piece] = []
    begin = line = 0
    try:
        size = text.stat().st_size
        with text.open("rb") as file:
            while (block := file.read(SHARD_BYTES) + file.readline()) or not found:
                end, lines = begin + len(block), block.count(b"\n")
                found.append(Piece(str(text), begin, end, line, lines, ends=end >= size))
                begin, line = end, line + lines
    except OSError as error:
        raise LmtrainError(f"{text} can't be read: {error.strerror or error}") from error
    return found


def encoding_tasks(split: str, texts: Sequence[Path], tokenizer: Tokenizer, folder: Path) -> list[Encode]:
    """One task for each shard of a split, to be written to `folder`, where the tokenizer is saved."""
    texts_pieces = (piece for text in texts for piece in cut(text))
    return [
        Encode(piece, str(folder / shard_name(split, number)), tokenizer.sha256)
        for number, piece in enumerate(texts_pieces)
    ]


def shard_name(split: str, number: int) -> str:
    """The name of a shard's files, without their endings."""
    return f"{split}-{number:05}"


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
    """Do a task; `advance` is called with the number of lines of each batch.

    Returns the counts of words, or what is known of the shard: `tokens`, `documents`, `replaced` and `sha256` by
    ending.
    """
    if isinstance(task, Encode):
        with writing(Path(task.stem)):
            return _encode(task, advance)
    counts: Counter[str] = Counter()
    for text in pieces(lines_of(task.piece), "word"):
        counts.update(text.split())
    advance(task.piece.lines)
    return dict(counts)


def to_json(task: Task) -> str:
    """A task as one line of JSON."""
    return json.dumps(asdict(task))


def from_json(line: str) -> Task:
    """The task of such a line."""
    fields = json.loads(line)
    piece = Piece(**fields.pop("piece"))
    return Encode(piece, **fields) if fields else Count(piece)


def finished(task: Encode) -> dict[str, Any] | None:
    """What is known of a finished shard; None where it is missing, damaged or made by another tokenizer."""
    try:
        record: dict[str, Any] = json.loads(Path(f"{task.stem}.json").read_bytes())
        sound = record["tokenizer"] == task.tokenizer_sha256 and all(
            sha256_file(Path(task.stem + end)) == digest for end, digest in record["sha256"].items()
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    return record if sound else None


@lru_cache(1)
def _tokenizer(path: Path, sha256: str) -> Tokenizer:
    """The tokenizer of these tasks, read once."""
    tokenizer = Tokenizer.load(path)
    if tokenizer.sha256 != sha256:
        raise LmtrainError(f"{path} was changed while lmtrain read it: start again")
    return tokenizer


def _encode(task: Encode, advance: Advance) -> dict[str, Any]:
    """Write a shard, its record last."""
    tokenizer = _tokenizer(Path(task.stem).with_name(TOKENIZER), task.tokenizer_sha256)
    unfinished = Path(f"{task.stem}.half")
    with unfinished.open("wb") as file:
        tokens, documents, replaced = _write_ids(file, task.piece, tokenizer, advance)
    disk.sync(unfinished)
    disk.rename(unfinished, Path(f"{task.stem}.npy"))
    starts = BytesIO()
    np.save(starts, np.array(documents, np.int64))
    write_file(Path(f"{task.stem}.docs.npy"), starts.getvalue())
    record = {
        "tokens": tokens,
        "documents": len(documents),
        "replaced": replaced,
        "tokenizer": tokenizer.sha256,
        "sha256": {end: sha256_file(Path(task.stem + end)) for end in (".npy", ".docs.npy")},
    }
    write_file(Path(f"{task.stem}.json"), json.dumps(record))
    return record


def _write_ids(file: BinaryIO, piece: Piece, tokenizer: Tokenizer, advance: Advance) -> tuple[int, list[int], int]:
    """Write the ids of a piece batch by batch, as a .npy file: the number of tokens, the tokens at which documents
    start, and the number of words that `<unk>` replaced.

    With bpe and byte an `<eos>` ends each document, written where the next one starts; with word every line has its
    own.
    """
    document_end = [] if tokenizer.kind == "word" else [tokenizer.eos_id]
    lines = load_array(Path(piece.text).with_suffix(".docs.npy"), np.dtype(np.int64))
    first, last = np.searchsorted(lines, [piece.first_line, piece.first_line + piece.lines])
    starts = iter(lines[first:last].tolist())
    next_start = next(starts, None)
    dtype = id_type(tokenizer.vocab_size)
    documents: list[int] = []
    line, tokens, replaced = piece.first_line, 0, 0
    write_header(file, dtype, 0)
    for texts in _batches(pieces(lines_of(piece), tokenizer.kind)):
        ids: list[int] = []
        first_line = line
        for text, own in zip(texts, tokenizer.encode_pieces(texts), strict=True):
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
    last_end = document_end if piece.ends and line else []
    file.write(np.array(last_end, dtype).tobytes())
    tokens += len(last_end)
    file.seek(0)
    write_header(file, dtype, tokens)
    return tokens, documents, replaced


def id_type(vocab_size: int) -> np.dtype[Any]:
    """The smallest type that ids are stored in."""
    return np.dtype("<u2" if vocab_size <= 2**16 else "<u4")


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
