"""From a corpus to a token store: train or load the tokenizer, encode the text, write the shards.

The store is written in one go, as a folder that appears complete or not at all. Memory does not grow with the text: a
shard is held at a time, and the words of a vocabulary are counted within bounds.
"""

import json
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from lmtrain.config.schema import TokenizerConfig
from lmtrain.data.corpus import Corpus
from lmtrain.data.encoding import Advance, blocks, encode_text, lines_of
from lmtrain.data.sources import Note
from lmtrain.data.tokenizer import DEFAULT_BPE_SIZE, Tokenizer, pieces
from lmtrain.data.tokens import FORMAT, TOKENIZER, TokenStore, open_store, shard_name
from lmtrain.errors import LmtrainError
from lmtrain.storage.files import MANIFEST, new_folder, sha256_bytes, verify

MOST_WORDS = 1_500_000
"""Different words that are counted at once; above that, the rarest half is dropped."""
BPE_BYTES = 256 << 20
"""Text that merges are learned from, taken evenly from a larger corpus: more changes few of them and takes long."""
_STORE_FILE = re.compile(r"(train|valid|test)(-\d{5,})?(\.docs)?\.npy")


@dataclass(frozen=True)
class StoreSpec:
    """All that a store depends on: a corpus, and a tokenizer that is trained on it by `config`, or `given`."""

    corpus: Corpus
    config: TokenizerConfig
    given: Tokenizer | None = None

    @classmethod
    def of(cls, corpus: Corpus, config: TokenizerConfig) -> "StoreSpec":
        """With the tokenizer that `config` names, if it names one. Raises LmtrainError where that can't be read."""
        return cls(corpus, config, Tokenizer.load(config.file) if config.file is not None else None)

    @property
    def vocab_limit(self) -> int | None:
        """The number of entries that a trained vocabulary may have; None = any."""
        if self.given is not None:
            return None
        return self.config.vocab_size or (DEFAULT_BPE_SIZE if self.config.kind == "bpe" else None)

    def identity(self) -> dict[str, Any]:
        """The entries by which the manifest of a store shows that it is the specified one."""
        return {
            "corpora_sha256": [self.corpus.sha256],
            "kind": self.config.kind if self.given is None else self.given.kind,
            "vocab_limit": self.vocab_limit,
            **({"tokenizer_sha256": self.given.sha256} if self.given is not None else {}),
        }

    def folder(self, data_dir: Path) -> Path:
        """Where the store is kept. The name ends in a hash of the text, so that the store of another text never
        replaces the one that a run was trained on."""
        text = sha256_bytes(json.dumps([self.corpus.sha256]).encode())[:8]
        tokenizer = f"{self.config.kind}-{self.vocab_limit}" if self.vocab_limit else self.config.kind
        if self.given is not None:
            tokenizer = f"{self.given.kind}-{self.given.sha256[:8]}"
        return data_dir / f"{self.corpus.folder.name}.{tokenizer}-{text}"


def tokenize(
    corpus: Corpus, config: TokenizerConfig, data_dir: Path, *, force: bool = False, note: Note, progress: bool
) -> TokenStore:
    """The store of a corpus: an existing one that was made from the same text and configuration, else a new one.

    The tokenizer is trained on the train split, or is that of `config.file`. `note` receives one-line messages, such as
    why a store is made again. Raises LmtrainError when the corpus is damaged or has no train split, when `config.file`
    is no tokenizer, when the folder holds other files, or when the disk is full.
    """
    spec = StoreSpec.of(corpus, config)
    folder = spec.folder(data_dir)
    if folder.exists():
        _reject_foreign(folder)
        found = "asked to" if force else _current_store(folder, spec)
        if isinstance(found, TokenStore):
            return found
        note(f"tokenizing {corpus.name} again: {found}")
    if "train" not in corpus.splits:
        raise LmtrainError(f"corpus {corpus.name} has no train split, on which the tokenizer is trained: add one")
    verify(corpus.folder, corpus.manifest)
    tokenizer = spec.given or _trained(corpus, config, note, progress)
    _write_store(folder, spec, tokenizer, progress)
    store = open_store(folder)
    if spec.given is not None:
        _note_unknown(store, note)
    return store


def _reject_foreign(folder: Path) -> None:
    """Raise LmtrainError where making `folder` again would delete files that no store has."""
    if not folder.is_dir() or any(
        file.name not in (MANIFEST, TOKENIZER) and not _STORE_FILE.fullmatch(file.name) for file in folder.iterdir()
    ):
        raise LmtrainError(f"{folder} is where the tokens would go, and holds something else: move it away")


def _current_store(folder: Path, spec: StoreSpec) -> TokenStore | str:
    """The store in `folder` if it is the specified one, else the reason why it isn't."""
    try:
        store = open_store(folder)
    except LmtrainError as error:
        return str(error)
    if all(store.manifest[key] == value for key, value in spec.identity().items()):
        return store
    return "the text or the tokenizer's configuration has changed"


def _trained(corpus: Corpus, config: TokenizerConfig, note: Note, progress: bool) -> Tokenizer:
    """A tokenizer that is trained on a corpus."""
    note(f"training a {config.kind} tokenizer on {corpus.name}")
    text, lines = corpus.folder / "train.txt", corpus.manifest["splits"]["train"]["lines"]
    with tqdm(total=lines, desc="tokenizer", unit=" lines", disable=None if progress else True) as bar:
        if config.kind == "word":
            return Tokenizer.of_words(_count(text, bar.update), config)
        return Tokenizer.train(_sample(text, note, bar.update) if config.kind == "bpe" else [], config)


def _count(text: Path, advance: Advance) -> Counter[str]:
    """How often each word occurs; where there are more than `MOST_WORDS`, the counts of rare words are too low."""
    counts: Counter[str] = Counter()
    for block in blocks(text):
        for piece in pieces(lines_of(block), "word"):
            counts.update(piece.split())
        if len(counts) > MOST_WORDS:
            ordered = sorted(counts.items(), key=lambda entry: (-entry[1], entry[0]))
            counts = Counter(dict(islice(ordered, MOST_WORDS // 2)))
        advance(block.count(b"\n"))
    return counts


def _sample(text: Path, note: Note, advance: Advance) -> Iterator[str]:
    """The lines that merges are learned from: all, or the beginning of each block of a large text."""
    share = min(1.0, BPE_BYTES / max(1, text.stat().st_size))
    if share < 1:
        note(f"the merges are learned from {share:.1%} of the text, {BPE_BYTES >> 20} MiB taken evenly from all of it")
    for block in blocks(text):
        for line in lines_of(block, None if share == 1 else int(share * len(block))):
            advance(1)
            yield line.removesuffix("\n")


def _write_store(folder: Path, spec: StoreSpec, tokenizer: Tokenizer, progress: bool) -> None:
    """Encode every split and write the store."""
    corpus, splits = spec.corpus, dict[str, Any]()
    floor = _floor(spec, tokenizer)
    info = spec.identity() | {
        "corpora": [corpus.name],
        "tokenizer_sha256": tokenizer.sha256,
        "vocab_size": tokenizer.vocab_size,
        "splits": splits,
        **({"floor": floor} if floor else {}),
    }
    total = sum(counts["lines"] for counts in corpus.manifest["splits"].values())
    with (
        new_folder(folder, FORMAT, info) as temporary,
        tqdm(total=total, desc="tokenize", unit=" lines", disable=None if progress else True) as bar,
    ):
        tokenizer.save(temporary / TOKENIZER)
        for split in corpus.splits:
            splits[split] = _write_split(temporary, corpus, split, tokenizer, bar.update)


def _write_split(folder: Path, corpus: Corpus, split: str, tokenizer: Tokenizer, advance: Advance) -> dict[str, Any]:
    """Write the shards of a split; what the manifest says of it: the counts of its text, and its shards."""
    shards: list[dict[str, int]] = []
    replaced = 0
    for shard in encode_text(corpus.folder / f"{split}.txt", tokenizer, advance):
        name = shard_name(split, len(shards))
        np.save(folder / f"{name}.npy", shard.ids)
        np.save(folder / f"{name}.docs.npy", shard.documents)
        shards.append({"tokens": len(shard.ids), "documents": len(shard.documents)})
        replaced += shard.replaced
    counts, tokens = corpus.manifest["splits"][split], sum(shard["tokens"] for shard in shards)
    return {
        "tokens": tokens,
        **{unit: counts[unit] for unit in ("words", "lines", "bytes")},
        "documents": sum(shard["documents"] for shard in shards),
        "replaced": replaced,
        "shards": shards,
        "corpora": [tokens],
    }


def _floor(spec: StoreSpec, tokenizer: Tokenizer) -> dict[str, Any]:
    """The lowest possible perplexity of each split, where it is known of the text and every word of it has an id of its
    own: `<unk>` is easier to predict than the words that it replaces."""
    if tokenizer.kind == "word" and (spec.given is not None or tokenizer.vocab_size == spec.vocab_limit):
        return {}
    floor: dict[str, Any] = spec.corpus.manifest.get("floor", {})
    return floor


def _note_unknown(store: TokenStore, note: Note) -> None:
    """Say how much of the training text is unknown to a vocabulary that was not made from it."""
    unk, train = store.tokenizer.unk_id, store.split("train")
    if unk is not None and (unknown := int(train.ids.counts(store.tokenizer.vocab_size)[unk])):
        note(f"{unknown / train.tokens:.1%} of the training tokens are <unk>, as is every word that isn't known")
