"""Corpora, token stores and tokenizers of a few lines, shared by the tests of the data package."""

import io
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from lmtrain.config.schema import TokenizerConfig
from lmtrain.data.corpus import FORMAT, Corpus, open_corpus
from lmtrain.data.tokenizer import Tokenizer
from lmtrain.data.tokenizer_file import Kind
from lmtrain.data.tokenizing import tokenize
from lmtrain.data.tokens import TokenStore
from lmtrain.storage.files import new_folder

KINDS: tuple[Kind, ...] = ("word", "bpe", "byte")
CONFIGS = {
    "word": TokenizerConfig(kind="word"),
    "bpe": TokenizerConfig(kind="bpe", vocab_size=280),
    "byte": TokenizerConfig(kind="byte"),
}
LINES = [
    " = Valkyria Chronicles = ",
    "",
    "the cat sat on the mat , and the cat 's <unk> <eos> sat",
    "naïve façade — 東京 the the\ttab\x1cseparated\r",
    "x<eos>y <eos> <eos> <|endoftext|> the cat sat on the mat",
    "the cat sat on the mat and the dog sat on the log",
] * 3
TRAINED = {kind: Tokenizer.train(LINES, CONFIGS[kind]) for kind in KINDS}
"""A tokenizer of each kind, trained on these lines."""

Documents = dict[str, list[list[str]]]
"""The lines of each document of each split."""

DOCUMENTS: Documents = {
    "train": [["= One =", "", "the cat sat on the mat"], ["the <eos> é\r"], ["", ""]],
    "valid": [["the dog\tsat", "on the mat"]],
}


def write(path: Path, content: str | bytes) -> Path:
    """Write a file; the path again."""
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def parquet(rows: Any, column: str = "text", **options: Any) -> bytes:
    """The content of a parquet file with these rows in a column, beside their numbers."""
    file = io.BytesIO()
    pq.write_table(pa.table({"id": range(len(rows)), column: rows}), file, **options)
    return file.getvalue()


def corpus_of(folder: Path, documents: Documents, **info: Any) -> Corpus:
    """A corpus folder with these documents."""
    splits: dict[str, dict[str, int]] = {}
    with new_folder(folder, FORMAT, {"splits": splits, **info}) as temporary:
        for split, texts in documents.items():
            lines = [line for text in texts for line in text]
            content = "".join(f"{line}\n" for line in lines).encode()
            (temporary / f"{split}.txt").write_bytes(content)
            starts = np.cumsum([0, *map(len, texts)])[: len(texts)]
            np.save(temporary / f"{split}.docs.npy", starts.astype(np.int64))
            words = sum(len(line.split()) for line in lines)
            splits[split] = {"lines": len(lines), "words": words, "bytes": len(content), "documents": len(texts)}
    return open_corpus(folder)


def make_store(data: Path, kind: Kind = "word", documents: Documents | None = None) -> TokenStore:
    """A corpus `tiny` in the folder `data`, and its store."""
    return tokenize(corpus_of(data / "tiny", documents or DOCUMENTS), CONFIGS[kind])


def lines(corpus: Corpus, split: str) -> list[str]:
    """The lines of a split of a corpus."""
    return (corpus.folder / f"{split}.txt").read_bytes().decode().removesuffix("\n").split("\n")


def starts(corpus: Corpus, split: str) -> list[int]:
    """The lines at which the documents of a split start."""
    found: list[int] = np.load(corpus.folder / f"{split}.docs.npy").tolist()
    return found
