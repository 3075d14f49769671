"""A split's text as token ids, a batch of lines at a time: memory does not grow with the text."""

import tempfile
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path

import numpy as np

from lmtrain.data.splits import Lines, document_starts, write_split
from lmtrain.data.tokenizer import Tokenizer, pieces
from lmtrain.data.tokens import Split, words_and_line_ends
from lmtrain.storage.files import read_errors, write_errors
from lmtrain.system.messages import Note

_BATCH = 512
"""Lines that are encoded at once, by the tokenizers library on all cores."""


def lines_of(text: Path) -> Iterator[str]:
    """Yield the lines of a split's text, each with its line end."""
    with read_errors(text), text.open(encoding="utf-8", newline="\n") as file:
        yield from file


def encode_text(lines: Iterable[str], starts: np.ndarray, tokenizer: Tokenizer) -> Iterator[tuple[np.ndarray, int]]:
    """Yield the ids of a split's text, part by part: (tokens,), and how many tokens of the part are unknown words.

    An end-of-text token ends each document; with a word tokenizer it ends each line instead. The documents begin at the
    lines `starts` (documents,), the first of them at line 0.
    """
    document_end = [] if tokenizer.kind == "word" else [tokenizer.eos_id]
    later_starts = iter(starts[1:].tolist())
    next_start = next(later_starts, None)
    line = 0
    texts = pieces(lines, tokenizer.kind)
    while batch := list(islice(texts, _BATCH)):
        ids: list[int] = []
        replaced = 0
        for piece, piece_ids in zip(batch, tokenizer.encode_pieces(batch), strict=True):
            if line == next_start:
                ids += document_end
                next_start = next(later_starts, None)
            ids += piece_ids
            replaced += tokenizer.replaced(piece, piece_ids)
            line += piece.endswith("\n")
        yield np.array(ids, tokenizer.id_type), replaced
    if line:
        yield np.array(document_end, tokenizer.id_type), 0


def text_split(lines: Lines, tokenizer: Tokenizer, *, label: str, note: Note) -> Split:
    """Return these lines as a split, with the ids and counts that it would have in a corpus and a store.

    The lines are written to a temporary folder; the ids are held in memory. Raises LmtrainError if there are no words,
    with `label` as the name of the text, and if `lines` does.
    """
    temporary = Path(tempfile.gettempdir())
    with write_errors(temporary), tempfile.TemporaryDirectory(dir=temporary) as name:
        folder = Path(name)
        counts = write_split(folder, "text", lines, note, label)
        text = folder / "text.txt"
        parts, replaced = zip(*encode_text(lines_of(text), document_starts(text), tokenizer), strict=True)
    return Split(np.concatenate(parts), words_and_line_ends(counts), counts["bytes"], sum(replaced))
