"""The token store: a corpus as token ids in memory-mapped arrays, with the tokenizer that made them and a manifest.

A store folder holds tokenizer.json and, for each split, `<split>.bin`: its token ids and nothing else, little-endian
uint16 where they fit, else uint32. When a store is opened every file is checked against its sha256.
"""

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from pydantic import BaseModel, Field, NonNegativeInt, PositiveFloat, PositiveInt

from lmtrain.data.splits import Counts, SplitName, SplitsManifest, read_splits_manifest
from lmtrain.data.tokenizer import Tokenizer
from lmtrain.errors import LmtrainError
from lmtrain.storage.files import MANIFEST, read_errors, read_manifest, sha256_bytes
from lmtrain.storage.run_folder import TOKENIZER
from lmtrain.system.messages import log

FORMAT = "lmtrain-tokens/4"
_BLOCK = 1 << 22


class TokenCounts(Counts):
    """The counts of a split, and of its tokens, of which some replace unknown words."""

    tokens: PositiveInt
    replaced: NonNegativeInt


class Floor(BaseModel, strict=True):
    """The score of the process that generated a split."""

    word_perplexity: PositiveFloat


class StoreManifest(SplitsManifest, regex_engine="python-re"):
    """What is read in the manifest of a store."""

    splits: Mapping[SplitName, TokenCounts]
    floor: dict[str, Floor] = Field(default_factory=dict)
    corpus: Annotated[str, Field(pattern=r"\A[\w-][\w.-]*\Z")]
    corpus_sha256: str


@dataclass(frozen=True, eq=False)
class Split:
    """One split: its `ids` (tokens,), at least one, which are memory-mapped in a store.

    `words` is its `words_and_line_ends`, the denominator of word perplexity whatever the tokenizer. `bytes` counts the
    UTF-8 bytes of its text: the denominator of bits per byte. `replaced` counts the tokens that stand for unknown
    words; the bytes of those are not known from the ids. `floor` is the word perplexity of the process that generated
    the text, if that is known: no model can be below it.
    """

    ids: np.ndarray
    words: int
    bytes: int
    replaced: int = 0
    floor: float | None = None

    @property
    def tokens(self) -> int:
        """The number of tokens."""
        return len(self.ids)

    def counts(self, vocab_size: int) -> np.ndarray:
        """Count how often each id occurs: (vocab_size,) int64."""
        counts = np.zeros(vocab_size, np.int64)
        for first in range(0, self.tokens, _BLOCK):  # bincount makes a copy in int64
            counts += np.bincount(self.ids[first : first + _BLOCK], minlength=vocab_size)
        return counts


def words_and_line_ends(counts: Mapping[str, int]) -> int:
    """Return what word perplexity divides by, from the counts of a split in the manifest of a corpus or a store.

    The literature counts one `<eos>` per line of WikiText. `words` in a manifest, and in what `lmtrain download` and
    `lmtrain tokenize` print, has no line ends in it.
    """
    return counts["words"] + counts["lines"]


@dataclass(frozen=True, eq=False)
class TokenStore:
    """An opened store; made by `tokenize` or `open_store`."""

    folder: Path
    manifest: dict[str, Any]
    tokenizer: Tokenizer
    splits: dict[str, Split]

    @property
    def sha256(self) -> str:
        """The hash of the content of all files: it identifies the training data."""
        return _content_sha256(self.manifest)

    def split(self, name: str) -> Split:
        """Return a split. Raises LmtrainError if the corpus has none of this name."""
        if name not in self.splits:
            raise LmtrainError(f"{self.folder} has no {name} split: it has {', '.join(self.splits)}")
        return self.splits[name]


def open_store(folder: Path) -> TokenStore:
    """Open a store and check its content.

    Raises LmtrainError when the folder is missing, foreign, incomplete, truncated or changed.
    """
    manifest = read_splits_manifest(folder, FORMAT, (".bin",), StoreManifest)
    tokenizer = Tokenizer.load(folder / TOKENIZER)
    floors, splits = manifest.get("floor", {}), dict[str, Split]()
    for name, counts in manifest["splits"].items():
        path = folder / f"{name}.bin"
        with read_errors(path):
            # A plain array: a slice of a memmap is a memmap, which takes four times as long to make.
            ids = np.asarray(np.memmap(path, tokenizer.id_type, "r"))
            if ids.max() >= tokenizer.vocab_size:
                raise ValueError("an id is not in the vocabulary")
        # `<unk>` is easier to predict than the words that it replaces: beyond a few, the floor is not that of the ids.
        has_floor = name in floors and 1000 * counts["replaced"] <= len(ids)
        floor = floors[name]["word_perplexity"] if has_floor else None
        splits[name] = Split(ids, words_and_line_ends(counts), counts["bytes"], counts["replaced"], floor)
    return TokenStore(folder, manifest, tokenizer, splits)


def find_store(data_dir: Path, sha256: str | None) -> TokenStore | None:
    """Return the store in `data_dir` with this `sha256`, whatever its folder is called; None if there is none.

    None matches no store: a run of an earlier version has no hash. A folder whose manifest can't be read does not
    count, nor does a damaged store, and a warning says what is wrong with it.
    """
    if not os.path.isdir(data_dir):  # noqa: PTH112 -- Path raises PermissionError below another user's home
        return None
    for path in sorted(data_dir.glob(f"[!.]*/{MANIFEST}")):  # a hidden one is not finished
        try:
            manifest = read_manifest(path.parent, FORMAT)
        except LmtrainError:  # such as a corpus
            continue
        if _content_sha256(manifest) == sha256:
            try:
                return open_store(path.parent)
            except LmtrainError as error:
                log.warning(f"{error}: it is not used")
    return None


def _content_sha256(manifest: dict[str, Any]) -> str:
    identity = {name: entry["sha256"] for name, entry in manifest["files"].items()}
    return sha256_bytes(json.dumps(identity, sort_keys=True).encode())
