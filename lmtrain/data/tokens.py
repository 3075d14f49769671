"""The token store: a corpus as token ids in memory-mapped arrays, with the tokenizer that made them and a manifest.

A store folder holds tokenizer.json and, for each split, `<split>.bin`: its token ids and nothing else, little-endian
uint16 where they fit, else uint32. When a store is opened every file is checked against its sha256.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
from pydantic import BaseModel, Field, ValidationError, model_validator

from lmtrain.data.splits import Count, Counts, SplitName
from lmtrain.data.tokenizer import Tokenizer
from lmtrain.errors import LmtrainError, UnreadableError
from lmtrain.storage.files import MANIFEST, parse_manifest, read_manifest, sha256_bytes, verify
from lmtrain.system.messages import Note, ignore

FORMAT = "lmtrain-tokens/4"
TOKENIZER = "tokenizer.json"
"""The tokenizer's name in a store."""

_BLOCK = 1 << 22


class _SplitInfo(Counts):
    tokens: Count
    replaced: Count

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.tokens and not (self.words + self.lines and self.bytes):
            raise ValueError("tokens of no text")
        return self


class _Floor(BaseModel, strict=True):
    word_perplexity: float = Field(gt=0, allow_inf_nan=False)


class _StoreInfo(BaseModel, strict=True):
    """What the manifest of a store says apart from its files."""

    corpus: str
    corpus_sha256: str
    kind: str
    vocab_limit: int | None
    tokenizer_sha256: str
    vocab_size: int = Field(ge=1, le=2**32)
    splits: dict[SplitName, _SplitInfo]
    floor: dict[SplitName, _Floor] = {}

    @model_validator(mode="after")
    def _trainable(self) -> Self:
        if "train" not in self.splits:
            raise ValueError("no train split")
        return self


@dataclass(frozen=True, eq=False)
class Split:
    """One split: its `ids` (tokens,), memory-mapped.

    `words` counts the corpus's words and line ends: the denominator of word perplexity, whatever the tokenizer. `bytes`
    counts the UTF-8 bytes of its text: the denominator of bits per byte. `replaced` counts the words of the text that
    `<unk>` replaced; their bytes are not known from the ids. `floor` is the word perplexity of the process that
    generated the text, below which no model can be, where that is known.
    """

    ids: np.ndarray
    words: int
    bytes: int
    replaced: int = 0
    floor: float | None = None

    @property
    def tokens(self) -> int:
        """Their number."""
        return len(self.ids)

    def counts(self, vocab_size: int) -> np.ndarray:
        """How often each id occurs: (vocab_size,) int64."""
        counts = np.zeros(vocab_size, np.int64)
        for first in range(0, self.tokens, _BLOCK):  # bincount makes a copy in int64
            counts += np.bincount(self.ids[first : first + _BLOCK], minlength=vocab_size)
        return counts


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
        """The hash of the content of all files: it identifies the training data."""
        return _content_sha256(self.manifest)

    def split(self, name: str) -> Split:
        """One split. Raises LmtrainError when the corpus has none of this name."""
        if name not in self._by_name:
            raise LmtrainError(f"{self.folder} has no {name} split: it has {', '.join(self.splits)}")
        return self._by_name[name]


def ids_name(split: str) -> str:
    """The name of the file with the ids of a split."""
    return f"{split}.bin"


def open_store(folder: Path) -> TokenStore:
    """Open a store and check its content.

    Raises LmtrainError when the folder is missing, foreign, incomplete, truncated or changed.
    """
    manifest = read_manifest(folder, FORMAT)
    verify(folder, manifest["files"])
    try:
        info = _StoreInfo.model_validate(manifest)
    except ValidationError:
        raise LmtrainError(f"{folder / MANIFEST} is damaged") from None
    tokenizer = Tokenizer.load(folder / TOKENIZER)
    if (tokenizer.sha256, tokenizer.vocab_size) != (info.tokenizer_sha256, info.vocab_size):
        raise LmtrainError(f"{folder / TOKENIZER} isn't the tokenizer of this store")
    splits: dict[str, Split] = {
        name: _open_split(folder / ids_name(name), split, info.floor.get(name), tokenizer)
        for name, split in info.splits.items()
    }
    return TokenStore(folder, manifest, tokenizer, splits)


def find_store(data_dir: Path, sha256: str, note: Note = ignore) -> TokenStore | None:
    """The store in `data_dir` whose `sha256` this is, whatever the name of its folder; None where there is none, or
    only a damaged one, of which `note` says so. Raises UnreadableError where the system denies reading it."""
    for path in sorted(data_dir.glob(f"[!.]*/{MANIFEST}")):  # a hidden one is not finished
        try:
            manifest = parse_manifest(path.parent, FORMAT)
        except LmtrainError:  # such as a corpus
            continue
        if _content_sha256(manifest) == sha256:
            try:
                return open_store(path.parent)
            except UnreadableError:
                raise
            except LmtrainError as error:
                note(str(error))
    return None


def _content_sha256(manifest: dict[str, Any]) -> str:
    identity = {name: entry["sha256"] for name, entry in manifest["files"].items()}
    return sha256_bytes(json.dumps(identity, sort_keys=True).encode())


def _open_split(path: Path, info: _SplitInfo, floor: _Floor | None, tokenizer: Tokenizer) -> Split:
    """Map the ids of a split, which are checked for their range."""
    # To map a file that is shorter than its array would end in a bus error.
    if not path.is_file() or path.stat().st_size != info.tokens * tokenizer.id_type.itemsize:
        raise LmtrainError(f"{path} doesn't hold {info.tokens:,} ids")
    # A map of its own is read and released, so that the pages of a large file do not stay in memory.
    if info.tokens and _map(path, tokenizer).max() >= tokenizer.vocab_size:
        raise LmtrainError(f"{path} has ids out of range")
    # `<unk>` is easier to predict than the words that it replaces: beyond a few, the floor is not that of the ids.
    lowest = floor.word_perplexity if floor is not None and 1000 * info.replaced <= info.tokens else None
    return Split(_map(path, tokenizer), info.words + info.lines, info.bytes, info.replaced, lowest)


def _map(path: Path, tokenizer: Tokenizer) -> np.ndarray:
    """The ids in a file, memory-mapped."""
    if not path.stat().st_size:
        return np.empty(0, tokenizer.id_type)
    # A plain array: a slice of a memmap is a memmap, which takes four times as long to make.
    return np.asarray(np.memmap(path, tokenizer.id_type, "r"))
