"""The tokenizer that suits a text, where the configuration leaves its kind or its size open."""

import math
from pathlib import Path

from lmtrain.config.schema import MIN_BPE_SIZE, TokenizerConfig
from lmtrain.data.corpus import Corpus
from lmtrain.errors import LmtrainError

READ_BYTES = 4 << 20
"""The start of the training split, by which the kind is chosen."""
MARKS = (",", ".")
SET_APART = 0.9
"""Share of the words ending in one of these marks that are the mark alone: 98% in WikiText, 0% in plain text."""
FREQUENT = 0.005
"""Share of all words that are such a mark alone: 8.5% in WikiText."""

BYTES_PER_ENTRY = 200
"""Text for each entry of a bpe vocabulary, so that most entries occur often enough to be learned."""
BPE_SIZES = (512, 16_384)
"""The smallest and the largest bpe vocabulary that is chosen."""


def resolve(config: TokenizerConfig, corpus: Corpus) -> TokenizerConfig:
    """Return `config` with a kind in place of `auto` and a size for bpe; unchanged if it names a file.

    Raises LmtrainError if the size is too small for the kind that was chosen.
    """
    if config.file is not None:
        return config
    kind, size = config.kind, config.vocab_size
    if kind == "auto":
        kind = "word" if has_spaced_punctuation(beginning(corpus.folder / "train.txt", READ_BYTES)) else "bpe"
    if kind == "bpe":
        size = fitting_size(corpus.splits["train"]["bytes"]) if size is None else size
        if size < MIN_BPE_SIZE:
            raise LmtrainError(
                f"tokenizer.vocab_size={size} is too small for the bpe tokenizer that suits {corpus.folder.name}: set "
                f"it to {MIN_BPE_SIZE} or more, or set tokenizer.kind=word"
            )
    return config.model_copy(update={"kind": kind, "vocab_size": size})


def has_spaced_punctuation(text: str) -> bool:
    """Whether spaces set commas and periods apart, as in WikiText."""
    words = text.split()
    ends = sum(word.endswith(MARKS) for word in words)
    alone = sum(word in MARKS for word in words)
    return alone > 0 and alone >= SET_APART * ends and alone >= FREQUENT * len(words)


def fitting_size(text_bytes: int) -> int:
    """The size of a bpe vocabulary for a training text: the power of two nearest, by ratio, to an entry for
    `BYTES_PER_ENTRY`."""
    smallest, largest = BPE_SIZES
    nearest = 2 ** round(math.log2(text_bytes / BYTES_PER_ENTRY))
    return min(max(smallest, int(nearest)), largest)


def beginning(text: Path, size: int) -> str:
    """The first `size` bytes of a text."""
    with text.open("rb") as file:
        return file.read(size).decode(errors="ignore")
