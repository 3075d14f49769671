"""The token store: a corpus as token ids in memory-mapped arrays, with the tokenizer that made them and a manifest.

A store folder holds tokenizer.json and, for each split, shards: `<split>-00000.npy` and so on (1-D token ids, uint16
where they fit, else uint32), each with `<split>-00000.docs.npy` (int64 offsets in it at which documents start). A
shard is written once, by one process, under its own name: nothing is copied together afterwards, a killed process
loses none that is finished, and each is hashed by who wrote it. When a store is opened every file is checked against
its sha256, large ones only if they changed since they were last read (see verified.py).
"""

import json
import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Self

import numpy as np
from pydantic import BaseModel, Field, ValidationError, model_validator

from lmtrain.config.schema import TokenizerConfig
from lmtrain.data.corpus import Corpus
from lmtrain.data.ids import Ids
from lmtrain.data.normal import HEADER_BYTES, OFFSET, Counts, SplitName, npy_header
from lmtrain.data.shards import id_type
from lmtrain.data.tokenizer import DEFAULT_BPE_SIZE, Tokenizer
from lmtrain.data.verified import Hashes
from lmtrain.errors import LmtrainError
from lmtrain.storage.files import MANIFEST, read_manifest, sha256_bytes, verify

FORMAT = "lmtrain-tokens/3"
TOKENIZER = "tokenizer.json"
TEXT_DIGITS = 8
"""Of the hash of its text, at the end of a store's name."""
_OURS = re.compile(r"(train|valid|test)(-\d{5,})?(\.docs)?\.npy")

Tokens = Annotated[int, Field(ge=0, le=2**48)]


class _ShardInfo(BaseModel, strict=True):
    tokens: Tokens
    documents: Tokens


class _SplitInfo(Counts):
    tokens: Tokens
    replaced: Tokens
    shards: list[_ShardInfo] = Field(min_length=1)
    corpora: list[Tokens] = Field(min_length=1)

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.tokens and not (self.words + self.lines and self.bytes):
            raise ValueError("tokens of no text")
        if not self.tokens == sum(self.corpora) == sum(shard.tokens for shard in self.shards):
            raise ValueError("shards or corpora that do not make up the split")
        if self.documents != sum(shard.documents for shard in self.shards):
            raise ValueError("documents in no shard")
        return self


class _Floor(BaseModel, strict=True):
    word_perplexity: float = Field(gt=0, allow_inf_nan=False)


class _StoreInfo(BaseModel, strict=True):
    """What the manifest of a store says beside its files."""

    corpora: list[str]
    corpora_sha256: list[str]
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
    counts the UTF-8 bytes of its text: the denominator of bits per byte. `corpora` has the tokens of each corpus of a
    mixture, which lie one after the other. `replaced` counts the words of the text that `<unk>` stands for, so
    that their bytes can't be told from the ids.
    """

    ids: Ids
    documents: np.ndarray
    tokens: int
    words: int
    bytes: int
    corpora: tuple[int, ...] = ()
    replaced: int = 0


@dataclass(frozen=True, eq=False)
class TokenStore:
    """An opened store; made by `tokenize` or `open_store`. `weights` are the shares of its corpora in training."""

    folder: Path
    manifest: dict[str, Any]
    tokenizer: Tokenizer
    weights: tuple[int, ...]
    _by_name: dict[str, Split]

    @property
    def splits(self) -> tuple[str, ...]:
        """The names of the splits."""
        return tuple(self._by_name)

    @property
    def sha256(self) -> str:
        """The hash of the content of all files, and of the weights of a mixture: which data this is."""
        return _content_sha256(self.manifest, self.weights)

    def split(self, name: str) -> Split:
        """One split. Raises LmtrainError when the corpus has none of this name."""
        if name not in self._by_name:
            raise LmtrainError(f"{self.folder} has no {name} split: it has {', '.join(self.splits)}")
        return self._by_name[name]


def _content_sha256(manifest: dict[str, Any], weights: Sequence[int]) -> str:
    identity: dict[str, Any] = {name: entry["sha256"] for name, entry in manifest["files"].items()}
    if len(weights) > 1:
        identity["weights"] = weights
    return sha256_bytes(json.dumps(identity, sort_keys=True).encode())


def store_folder(
    corpora: Corpus | Sequence[Corpus], config: TokenizerConfig, data_dir: Path, given: Tokenizer | None = None
) -> Path:
    """Where the store of this corpus, or this mixture, lies: beside the corpora in `data_dir`.

    Its tokenizer is trained as `config` says, or is `given`. The name ends in a hash of the text, so that the store of
    another text never takes the place of one that a run was trained on.
    """
    corpora = as_list(corpora)
    name = corpora[0].folder.name if len(corpora) == 1 else "mixture"
    text = sha256_bytes(json.dumps([corpus.sha256 for corpus in corpora]).encode())[:TEXT_DIGITS]
    limit = vocab_limit(config)
    tokenizer = f"{config.kind}-{limit}" if limit else config.kind
    if given is not None:
        tokenizer = f"{given.kind}-{given.sha256[:8]}"
    return data_dir / f"{name}.{tokenizer}-{text}"


def as_list(corpora: Corpus | Sequence[Corpus]) -> list[Corpus]:
    """One corpus, or those of a mixture."""
    return [corpora] if isinstance(corpora, Corpus) else list(corpora)


def vocab_limit(config: TokenizerConfig) -> int | None:
    """The entries that a vocabulary may have; None = any number."""
    return DEFAULT_BPE_SIZE if config.kind == "bpe" and config.vocab_size is None else config.vocab_size


def shard_name(split: str, number: int) -> str:
    """The name of a shard's files, without their endings."""
    return f"{split}-{number:05}"


def open_store(folder: Path, weights: Sequence[int] | None = None, hashes: Hashes | None = None) -> TokenStore:
    """Open a store, its content checked. `weights` are those of a mixture (None = one each).

    Raises LmtrainError when the folder is missing, foreign, incomplete, truncated or changed.
    """
    manifest = read_manifest(folder, FORMAT)
    hashes = hashes or Hashes(folder.parent)
    verify(folder, manifest, hashes.sha256)
    try:
        info = _StoreInfo.model_validate(manifest)
    except ValidationError:
        raise LmtrainError(f"{folder / MANIFEST} is damaged: delete {folder} and make it again") from None
    tokenizer = Tokenizer.load(folder / TOKENIZER)
    if (tokenizer.sha256, tokenizer.vocab_size) != (info.tokenizer_sha256, info.vocab_size):
        raise LmtrainError(f"{folder / TOKENIZER} isn't the tokenizer of this store: delete {folder} and make it again")
    splits: dict[str, Split] = {
        name: _open_split(folder, name, split, tokenizer.vocab_size, hashes) for name, split in info.splits.items()
    }
    return TokenStore(folder, manifest, tokenizer, tuple(weights or [1] * len(info.corpora)), splits)


def find_store(data_dir: Path, sha256: str, weights: Sequence[int] | None = None) -> TokenStore | None:
    """The store in `data_dir` whose `sha256` this is, whatever its folder is called; None where there is none, or only
    a damaged one."""
    for path in sorted(data_dir.glob(f"*/{MANIFEST}")):
        with suppress(LmtrainError):
            manifest = read_manifest(path.parent, FORMAT)
            if _content_sha256(manifest, weights or ()) == sha256:
                return open_store(path.parent, weights)
    return None


def _open_split(folder: Path, name: str, info: _SplitInfo, vocab_size: int, hashes: Hashes) -> Split:
    shards = [folder / shard_name(name, number) for number in range(len(info.shards))]
    parts, documents, offset = [], [np.empty(0, np.int64)], 0
    for path, shard in zip(shards, info.shards, strict=True):
        file = path.with_name(f"{path.name}.npy")
        # To look at all of a file through a map of its own gives its pages back when that is gone.
        if shard.tokens and file in hashes.read and _map(file, id_type(vocab_size), shard.tokens).max() >= vocab_size:
            raise _out_of_range(file)
        parts.append(_map(file, id_type(vocab_size), shard.tokens))
        documents.append(offset + _map(path.with_name(f"{path.name}.docs.npy"), OFFSET, shard.documents))
        offset += shard.tokens
        inside = np.all((offset - shard.tokens <= documents[-1]) & (documents[-1] < max(offset, 1)))
        if not inside:
            raise _out_of_range(file)
    starts = np.concatenate(documents)
    if np.any(np.diff(starts, prepend=-1) <= 0):
        raise _out_of_range(folder / name)
    words = info.words + info.lines
    return Split(Ids(parts), starts, info.tokens, words, info.bytes, tuple(info.corpora), info.replaced)


def _out_of_range(path: Path) -> LmtrainError:
    return LmtrainError(f"{path} has ids or documents out of range: delete {path.parent} and make it again")


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


def refuse_foreign(folder: Path) -> None:
    """Raise LmtrainError where making `folder` again would delete files that no store has."""
    if not folder.is_dir() or any(
        file.name not in (MANIFEST, TOKENIZER) and not _OURS.fullmatch(file.name) for file in folder.iterdir()
    ):
        raise LmtrainError(f"{folder} is where the tokens would go, and holds something else: move it away")
