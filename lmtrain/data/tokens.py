"""The token store: a corpus as token ids in memory-mapped arrays, with the tokenizer that made them and a manifest.

A store folder holds tokenizer.json and, for each split, shards: `<split>-00000.npy` and so on (1-D token ids, uint16
where they fit, else uint32), each with `<split>-00000.docs.npy` (int64 offsets in it at which documents start). When a
store is opened every file is checked against its sha256. Entries of the manifest that are lists of one, `corpora` and
others, could have more in earlier versions.
"""

import json
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Self

import numpy as np
from pydantic import BaseModel, Field, ValidationError, model_validator

from lmtrain.data.ids import Ids, id_type, load_array
from lmtrain.data.splits import Counts, SplitName
from lmtrain.data.tokenizer import Tokenizer
from lmtrain.errors import LmtrainError
from lmtrain.storage.files import MANIFEST, read_manifest, sha256_bytes, verify

FORMAT = "lmtrain-tokens/3"
TOKENIZER = "tokenizer.json"
"""The tokenizer's name in a store."""

Tokens = Annotated[int, Field(ge=0, le=2**48)]


class _ShardInfo(BaseModel, strict=True):
    tokens: Tokens


class _SplitInfo(Counts):
    tokens: Tokens
    replaced: Tokens
    shards: list[_ShardInfo] = Field(min_length=1)

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.tokens and not (self.words + self.lines and self.bytes):
            raise ValueError("tokens of no text")
        if self.tokens != sum(shard.tokens for shard in self.shards):
            raise ValueError("shards that do not make up the split")
        return self


class _Floor(BaseModel, strict=True):
    word_perplexity: float = Field(gt=0, allow_inf_nan=False)


class _StoreInfo(BaseModel, strict=True):
    """What the manifest of a store says apart from its files."""

    corpora: list[str]
    corpora_sha256: list[str]
    kind: str
    vocab_limit: int | None
    tokenizer_sha256: str
    vocab_size: int = Field(ge=1, le=2**32)
    splits: dict[SplitName, _SplitInfo]
    floor: dict[SplitName, _Floor] = {}


@dataclass(frozen=True, eq=False)
class Split:
    """One split: its `ids` (tokens,), memory-mapped.

    `words` counts the corpus's words and line ends: the denominator of word perplexity, whatever the tokenizer. `bytes`
    counts the UTF-8 bytes of its text: the denominator of bits per byte. `replaced` counts the words of the text that
    `<unk>` replaced; their bytes are not known from the ids. `floor` is the word perplexity of the process that
    generated the text, below which no model can be, where that is known.
    """

    ids: Ids
    words: int
    bytes: int
    replaced: int = 0
    floor: float | None = None

    @property
    def tokens(self) -> int:
        """Their number."""
        return len(self.ids)


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


def shard_name(split: str, number: int) -> str:
    """The name of a shard's files, without their endings."""
    return f"{split}-{number:05}"


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
        name: _open_split(folder, name, split, info.floor.get(name), tokenizer.vocab_size)
        for name, split in info.splits.items()
    }
    return TokenStore(folder, manifest, tokenizer, splits)


def find_store(data_dir: Path, sha256: str) -> TokenStore | None:
    """The store in `data_dir` whose `sha256` this is, whatever the name of its folder; None where there is none, or
    only a damaged one."""
    for path in sorted(data_dir.glob(f"[!.]*/{MANIFEST}")):  # a hidden one is not finished
        with suppress(LmtrainError):
            if _content_sha256(read_manifest(path.parent, FORMAT)) == sha256:
                return open_store(path.parent)
    return None


def _content_sha256(manifest: dict[str, Any]) -> str:
    identity = {name: entry["sha256"] for name, entry in manifest["files"].items()}
    return sha256_bytes(json.dumps(identity, sort_keys=True).encode())


def _open_split(folder: Path, split: str, info: _SplitInfo, floor: _Floor | None, vocab_size: int) -> Split:
    """Map the shards of a split; their ids are checked for their range."""
    parts: list[np.ndarray] = []
    for number, shard in enumerate(info.shards):
        path = folder / f"{shard_name(split, number)}.npy"
        map_ids = partial(load_array, path, id_type(vocab_size), shard.tokens)
        # A map of its own is read and released, so that the pages of a large file do not stay in memory.
        if shard.tokens and map_ids().max() >= vocab_size:
            raise LmtrainError(f"{path} has ids out of range")
        parts.append(map_ids())
    # `<unk>` is easier to predict than the words that it replaces: beyond a few, the floor is not that of the ids.
    lowest = floor.word_perplexity if floor is not None and 1000 * info.replaced <= info.tokens else None
    return Split(Ids(parts), info.words + info.lines, info.bytes, info.replaced, lowest)
