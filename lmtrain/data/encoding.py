"""A split's text as token ids, in shards of bounded size: memory does not grow with the text."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from io import BytesIO
from itertools import islice
from pathlib import Path

import numpy as np

from lmtrain.data.ids import id_type, load_array
from lmtrain.data.tokenizer import Tokenizer, pieces
from lmtrain.errors import LmtrainError

SHARD_BYTES = 64 << 20
"""Text in a shard, to the end of its last line. The hash of a token store depends on where its shards end."""

_BATCH = 512
"""Lines that are encoded at once, by the tokenizers library on all cores."""

Advance = Callable[[int], object]
"""Is called with the number of lines that were just read."""


@dataclass(frozen=True)
class Shard:
    """The ids of a part of a text, (tokens,), and the tokens at which documents start, (documents,) int64.

    `replaced` counts the words that `<unk>` replaced.
    """

    ids: np.ndarray
    documents: np.ndarray
    replaced: int


def blocks(text: Path) -> Iterator[bytes]:
    """A split's text in blocks of `SHARD_BYTES` and the rest of a line; an empty text is one block."""
    try:
        with text.open("rb") as file:
            block = file.read(SHARD_BYTES) + file.readline()
            yield block
            while block := file.read(SHARD_BYTES) + file.readline():
                yield block
    except OSError as error:
        raise LmtrainError(f"{text} can't be read: {error.strerror or error}") from error


def lines_of(block: bytes, most: int | None = None) -> Iterator[str]:
    """The lines of a block, each with its line end; with `most`, those of about its first `most` bytes."""
    file = BytesIO(block)
    try:
        while (most is None or file.tell() < most) and (line := file.readline()):
            yield line.decode()
    except UnicodeDecodeError as error:
        raise LmtrainError(f"the corpus is not UTF-8 text ({error}): delete its folder and make it again") from error


def encode_text(text: Path, tokenizer: Tokenizer, advance: Advance = lambda _lines: None) -> Iterator[Shard]:
    """The shards of a split's text; the lines at which its documents start are in a file beside it.

    Except with word, where every line has its own, an end-of-text token ends each document, stored where the next one
    starts.
    """
    document_end = [] if tokenizer.kind == "word" else [tokenizer.eos_id]
    starts = map(int, load_array(text.with_suffix(".docs.npy"), np.dtype(np.int64)))
    next_start = next(starts, None)
    dtype = id_type(tokenizer.vocab_size)
    line, bytes_left = 0, text.stat().st_size
    for block in blocks(text):
        batches = [np.empty(0, dtype)]
        documents: list[int] = []
        tokens = replaced = 0
        texts = pieces(lines_of(block), tokenizer.kind)
        while batch := list(islice(texts, _BATCH)):
            ids: list[int] = []
            first_line = line
            for piece, own in zip(batch, tokenizer.encode_pieces(batch), strict=True):
                if line == next_start:
                    ids += document_end if line else []
                    documents.append(tokens + len(ids))
                    next_start = next(starts, None)
                ids += own
                replaced += tokenizer.replaced(piece, own)
                line += piece.endswith("\n")
            batches.append(np.array(ids, dtype))
            tokens += len(ids)
            advance(line - first_line)
        bytes_left -= len(block)
        if line and not bytes_left:
            batches.append(np.array(document_end, dtype))
        yield Shard(np.concatenate(batches), np.array(documents, np.int64), replaced)
