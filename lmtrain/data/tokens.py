"""The token store: a corpus as token ids in memory-mapped arrays, with the tokenizer that made them and a manifest.

A store folder holds tokenizer.json and, for each split, `<split>.npy` (1-D token ids, uint16 where they fit, else
uint32) and `<split>.docs.npy` (int64 token offsets at which documents start). Every file is checked against its sha256
when a store is opened, about half a second for each gigabyte, so what is trained on is what was written.
"""

import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Self

import numpy as np
from pydantic import BaseModel, Field, ValidationError, model_validator
from tqdm import tqdm

from lmtrain.data.corpus import Corpus
from lmtrain.data.normal import HEADER_BYTES, OFFSET, Counts, SplitName, npy_header
from lmtrain.data.tokenizer import DEFAULT_BPE_SIZE, Tokenizer, pieces
from lmtrain.errors import LmtrainError
from lmtrain.files import MANIFEST, new_folder, read_manifest, sha256_bytes, verify
from lmtrain.schema import TokenizerConfig

FORMAT = "lmtrain-tokens/1"
TOKENIZER = "tokenizer.json"
_BATCH_LINES = 2_000
_BATCH_CHARACTERS = 1 << 21


class _SplitInfo(Counts):
    tokens: int = Field(ge=0, le=2**48)

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.tokens and not (self.words + self.lines and self.bytes):
            raise ValueError("tokens of no text")
        return self


class _Floor(BaseModel, strict=True):
    word_perplexity: float = Field(gt=0, allow_inf_nan=False)


class _StoreInfo(BaseModel, strict=True):
    """What the manifest of a store says beside its files."""

    corpus: str
    corpus_sha256: str
    tokenizer_sha256: str
    kind: str
    vocab_size: int = Field(ge=1, le=2**32)
    vocab_limit: int | None
    splits: dict[SplitName, _SplitInfo]
    floor: dict[SplitName, _Floor] = {}


@dataclass(frozen=True, eq=False)
class Split:
    """One split: `ids` (tokens,) memory-mapped, `documents` (documents,) the tokens at which documents start.

    `words` counts the corpus's words and line ends: the denominator of word perplexity, whatever the tokenizer. `bytes`
    counts the UTF-8 bytes of its text: the denominator of bits per byte.
    """

    ids: np.ndarray
    documents: np.ndarray
    tokens: int
    words: int
    bytes: int


@dataclass(frozen=True, eq=False)
class TokenStore:
    """An opened store; made by `tokenize` or `open_store`."""

    folder: Path
    manifest: dict[str, Any]
    tokenizer: Tokenizer
    _by_name: dict[str, Split]

    @property
    def splits(self) -> tuple[str, ...]:
        """The names of the splits."""
        return tuple(self._by_name)

    @property
    def sha256(self) -> str:
        """The hash of the content of all files: which data this is."""
        files = {name: entry["sha256"] for name, entry in self.manifest["files"].items()}
        return sha256_bytes(json.dumps(files, sort_keys=True).encode())

    def split(self, name: str) -> Split:
        """One split. Raises LmtrainError when the corpus has none of this name."""
        if name not in self._by_name:
            raise LmtrainError(f"{self.folder} has no {name} split: it has {', '.join(self.splits)}")
        return self._by_name[name]


def store_folder(corpus: Corpus, config: TokenizerConfig, data_dir: Path) -> Path:
    """Where the store of this corpus under this tokenizer lies: beside the corpora in `data_dir`."""
    limit = _vocab_limit(config)
    return data_dir / (f"{corpus.folder.name}.{config.kind}" + (f"-{limit}" if limit else ""))


def tokenize(
    corpus: Corpus,
    config: TokenizerConfig,
    data_dir: Path,
    *,
    force: bool = False,
    note: Callable[[str], None],
    progress: bool,
) -> TokenStore:
    """The store of `corpus`: opened if it is there and made from the same corpus and configuration, else made.

    The tokenizer is trained on the train split. `note` receives one-line messages, such as why a store is made again.
    Raises LmtrainError when the corpus is damaged or has no train split, when the store's place holds other files, or
    when the disk is full.
    """
    folder = store_folder(corpus, config, data_dir)
    if folder.exists():
        _refuse_foreign(folder)
        found = _current_store(folder, corpus, config) if not force else "asked to"
        if isinstance(found, TokenStore):
            return found
        note(f"tokenizing {corpus.name} again: {found}")
    if "train" not in corpus.splits:
        raise LmtrainError(f"corpus {corpus.name} has no train split, on which the tokenizer is trained: add one")
    verify(corpus.folder, corpus.manifest)
    note(f"training a {config.kind} tokenizer on {corpus.name}")
    total = corpus.manifest["splits"]["train"]["lines"]
    lines = tqdm(corpus.lines("train"), "tokenizer", total, unit=" lines", disable=None if progress else True)
    tokenizer = Tokenizer.train(lines, config)
    write_store(folder, corpus, tokenizer, config, progress)
    return open_store(folder)


def open_store(folder: Path) -> TokenStore:
    """Open a store, its content checked.

    Raises LmtrainError when the folder is missing, foreign, incomplete, truncated or changed.
    """
    manifest = read_manifest(folder, FORMAT)
    verify(folder, manifest)
    try:
        info = _StoreInfo.model_validate(manifest)
    except ValidationError:
        raise LmtrainError(f"{folder / MANIFEST} is damaged: delete {folder} and make it again") from None
    tokenizer = Tokenizer.load(folder / TOKENIZER)
    if (tokenizer.sha256, tokenizer.vocab_size) != (info.tokenizer_sha256, info.vocab_size):
        raise LmtrainError(f"{folder / TOKENIZER} isn't the tokenizer of this store: delete {folder} and make it again")
    splits: dict[str, Split] = {
        name: _open_split(folder, name, split, tokenizer.vocab_size) for name, split in info.splits.items()
    }
    return TokenStore(folder, manifest, tokenizer, splits)


def _open_split(folder: Path, name: str, info: _SplitInfo, vocab_size: int) -> Split:
    ids = _map(folder / f"{name}.npy", _id_type(vocab_size), info.tokens)
    documents = np.array(_map(folder / f"{name}.docs.npy", OFFSET, info.documents))
    offsets_rise = bool(np.all(np.diff(documents, prepend=-1, append=max(info.tokens, 1)) > 0))
    if (info.tokens and ids.max() >= vocab_size) or not offsets_rise:
        raise LmtrainError(f"{folder / name}.npy has ids or documents out of range: delete {folder} and make it again")
    return Split(ids, documents, info.tokens, info.words + info.lines, info.bytes)


def _map(path: Path, dtype: np.dtype[Any], length: int) -> np.ndarray:
    """The array of a .npy file whose type and length are known; its header is compared, not parsed.

    The size is compared too: mapping a file that is shorter than its array would end in a bus error.
    """
    header = npy_header(dtype, length)
    try:
        with path.open("rb") as file:
            sound = file.read(HEADER_BYTES) == header
        sound = sound and path.stat().st_size == HEADER_BYTES + length * dtype.itemsize
    except OSError:
        sound = False
    if not sound:
        raise LmtrainError(f"{path} isn't an array of {length:,} {dtype.name}: delete {path.parent} and make it again")
    return np.memmap(path, dtype, "r", offset=HEADER_BYTES, shape=(length,))


def _id_type(vocab_size: int) -> np.dtype[Any]:
    return np.dtype("<u2" if vocab_size <= 2**16 else "<u4")


def _vocab_limit(config: TokenizerConfig) -> int | None:
    return DEFAULT_BPE_SIZE if config.kind == "bpe" and config.vocab_size is None else config.vocab_size


def _refuse_foreign(folder: Path) -> None:
    """Raise LmtrainError where making `folder` again would delete files that no store has."""
    ours = {
        MANIFEST,
        TOKENIZER,
        *(f"{split}{end}" for split in ("train", "valid", "test") for end in (".npy", ".docs.npy")),
    }
    if not folder.is_dir() or {file.name for file in folder.iterdir()} - ours:
        raise LmtrainError(f"{folder} is where the tokens would go, and holds something else: move it away")


def _current_store(folder: Path, corpus: Corpus, config: TokenizerConfig) -> TokenStore | str:
    """The store in `folder` if it is what is wanted, else the reason why it isn't."""
    try:
        store = open_store(folder)
    except LmtrainError as error:
        return str(error)
    if store.manifest["corpus_sha256"] != corpus.sha256:
        return "the corpus has changed"
    if (store.tokenizer.kind, store.manifest["vocab_limit"]) != (config.kind, _vocab_limit(config)):
        return "the tokenizer's configuration has changed"
    return store


def write_store(folder: Path, corpus: Corpus, tokenizer: Tokenizer, config: TokenizerConfig, progress: bool) -> None:
    """Write the store of a corpus to `folder`, with a tokenizer that is there already; see `tokenize`."""
    counts = corpus.manifest["splits"]
    splits: dict[str, dict[str, int]] = {}
    info: dict[str, Any] = {
        "corpus": corpus.name,
        "corpus_sha256": corpus.sha256,
        "tokenizer_sha256": tokenizer.sha256,
        "kind": tokenizer.kind,
        "vocab_size": tokenizer.vocab_size,
        "vocab_limit": _vocab_limit(config),
        "splits": splits,
    } | {key: corpus.manifest[key] for key in ("floor",) if key in corpus.manifest}
    total = sum(counts[split]["lines"] for split in corpus.splits)
    with (
        new_folder(folder, FORMAT, info) as temporary,
        tqdm(total=total, desc="tokenize", unit=" lines", disable=None if progress else True) as bar,
    ):
        tokenizer.save(temporary / TOKENIZER)
        for split in corpus.splits:
            with (temporary / f"{split}.npy").open("wb") as file:
                tokens, documents = _write_ids(file, corpus, split, tokenizer, bar)
            (temporary / f"{split}.docs.npy").write_bytes(npy_header(OFFSET, len(documents)) + documents.tobytes())
            own = {key: counts[split][key] for key in ("words", "lines", "bytes")}
            splits[split] = {"tokens": tokens, **own, "documents": len(documents)}


def _write_ids(
    file: BinaryIO, corpus: Corpus, split: str, tokenizer: Tokenizer, bar: "tqdm[Any]"
) -> tuple[int, np.ndarray]:
    """Write the ids of a split batch by batch; returns their number and the offsets of documents.

    With bpe and byte an `<eos>` ends each document; with word, lines have theirs.
    """
    document_end = [] if tokenizer.kind == "word" else [tokenizer.eos_id]
    starts = iter(corpus.document_starts(split).tolist())
    next_start = next(starts, None)
    dtype = _id_type(tokenizer.vocab_size)
    documents: list[int] = []
    line = tokens = 0
    file.write(npy_header(dtype, 0))
    batches = _batches(pieces((f"{line}\n" for line in corpus.lines(split)), tokenizer.kind))
    for texts, encoded in tokenizer.encode_batches(batches):
        ids: list[int] = []
        first_line = line
        for text, own in zip(texts, encoded, strict=True):
            if line == next_start:
                ids += document_end if documents else []
                documents.append(tokens + len(ids))
                next_start = next(starts, None)
            ids += own
            line += text.endswith("\n")
        file.write(np.array(ids, dtype).tobytes())
        tokens += len(ids)
        bar.update(line - first_line)
    last = document_end if documents else []
    file.write(np.array(last, dtype).tobytes())
    tokens += len(last)
    file.seek(0)
    file.write(npy_header(dtype, tokens))
    return tokens, np.array(documents, OFFSET)


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
