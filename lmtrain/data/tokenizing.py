"""From corpora to a token store: train or load the tokenizer, cut the text, encode it on all cores, collect the shards.

Work in progress is kept beside the store, in a folder whose name has the hash of all that the shards depend on: the
shards that a killed process finished are found by the next one, and by no other configuration. Memory does not grow
with the text: a process holds a batch of lines, and the words of a vocabulary are counted within bounds.
"""

import json
import re
import shutil
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from tqdm import tqdm

from lmtrain.config.schema import TokenizerConfig
from lmtrain.data import shards
from lmtrain.data.corpus import Corpus
from lmtrain.data.processes import perform_all
from lmtrain.data.shards import TOKENIZER, Count, Encode, Piece, encoding_tasks, finished
from lmtrain.data.sources import Note
from lmtrain.data.tokenizer import DEFAULT_BPE_SIZE, Tokenizer
from lmtrain.data.tokens import FORMAT, TokenStore, open_store
from lmtrain.data.verified import Hashes
from lmtrain.errors import LmtrainError
from lmtrain.storage.files import MANIFEST, folder_lock, make_folders, new_folder, sha256_bytes, verify, writing
from lmtrain.system import disk

MOST_WORDS = 1_500_000
"""Different words that are counted at once; above that, the rarest half is dropped."""
BPE_BYTES = 256 << 20
"""Text that merges are learned from, taken evenly from a larger corpus: more changes few of them and takes long."""
_TEXT_DIGITS = 8
"""Of the hash of its text, at the end of a store's name."""
_STORE_FILE = re.compile(r"(train|valid|test)(-\d{5,})?(\.docs)?\.npy")


@dataclass(frozen=True)
class StoreSpec:
    """All that a store depends on: corpora, and a tokenizer that is trained on them by `config`, or `given`."""

    corpora: Sequence[Corpus]
    config: TokenizerConfig
    given: Tokenizer | None = None

    @classmethod
    def of(cls, corpora: Sequence[Corpus], config: TokenizerConfig) -> "StoreSpec":
        """With the tokenizer that `config` names, if it names one. Raises LmtrainError where that can't be read."""
        return cls(corpora, config, Tokenizer.load(config.file) if config.file is not None else None)

    @property
    def vocab_limit(self) -> int | None:
        """The number of entries that a trained vocabulary may have; None = any."""
        if self.given is not None:
            return None
        return self.config.vocab_size or (DEFAULT_BPE_SIZE if self.config.kind == "bpe" else None)

    def identity(self) -> dict[str, Any]:
        """The entries by which the manifest of a store shows that it is the specified one."""
        return {
            "corpora_sha256": [corpus.sha256 for corpus in self.corpora],
            "kind": self.config.kind if self.given is None else self.given.kind,
            "vocab_limit": self.vocab_limit,
            **({"tokenizer_sha256": self.given.sha256} if self.given is not None else {}),
        }

    def folder(self, data_dir: Path) -> Path:
        """Where the store is kept. The name ends in a hash of the text, so that the store of another text never
        replaces the one that a run was trained on."""
        name = self.corpora[0].folder.name if len(self.corpora) == 1 else "mixture"
        text = sha256_bytes(json.dumps([corpus.sha256 for corpus in self.corpora]).encode())[:_TEXT_DIGITS]
        tokenizer = f"{self.config.kind}-{self.vocab_limit}" if self.vocab_limit else self.config.kind
        if self.given is not None:
            tokenizer = f"{self.given.kind}-{self.given.sha256[:8]}"
        return data_dir / f"{name}.{tokenizer}-{text}"

    def sources(self, split: str) -> Sequence[Corpus]:
        """The corpora of a split: all for training, the first one for the others."""
        return self.corpora if split == "train" else self.corpora[:1]

    def texts(self, split: str) -> list[Path]:
        """The text files of a split."""
        return [corpus.folder / f"{split}.txt" for corpus in self.sources(split)]

    def names(self) -> str:
        """The names of the corpora, for messages."""
        return " and ".join(corpus.name for corpus in self.corpora)


def tokenize(
    corpora: Sequence[Corpus],
    config: TokenizerConfig,
    data_dir: Path,
    *,
    weights: Sequence[int] | None = None,
    force: bool = False,
    reread: bool = False,
    note: Note,
    progress: bool,
) -> TokenStore:
    """The store of a corpus, or of a mixture with `weights`: an existing one that was made from the same text and
    configuration, else a new one.

    The tokenizer is trained on the train splits, or is that of `config.file`. Of a mixture, the first corpus gives the
    other splits. `note` receives one-line messages, such as why a store is made again. `reread` checks the content of
    every file, even of those that did not change since they were last checked. Raises LmtrainError when a corpus is
    damaged or has no train split, when `config.file` is no tokenizer, when the folder holds other files, or when the
    disk is full.
    """
    spec = StoreSpec.of(corpora, config)
    folder, hashes = spec.folder(data_dir), Hashes(data_dir, reread=reread)
    if folder.exists():
        _reject_foreign(folder)
        found = "asked to" if force else _current_store(folder, spec, weights, hashes)
        if isinstance(found, TokenStore):
            return found
        note(f"tokenizing {spec.names()} again: {found}")
    for corpus in corpora:
        if "train" not in corpus.splits:
            raise LmtrainError(f"corpus {corpus.name} has no train split, on which the tokenizer is trained: add one")
        verify(corpus.folder, corpus.manifest, hashes.sha256)
    parts = _parts_folder(folder, spec)
    make_folders(parts)
    with folder_lock(parts):
        if not parts.exists():  # another process has finished, and deleted it, while this one waited
            found = _current_store(folder, spec, weights, hashes)
            if isinstance(found, TokenStore):
                return found
        make_folders(parts)
        try:
            tokenizer = spec.given or _trained(parts, spec, note, progress)
            _write_store(folder, spec, tokenizer, parts, progress)
        except BaseException:
            if not any(parts.glob("*-*.json")):  # no shard is finished
                disk.remove(parts)
            raise
        disk.remove(parts)
    store = open_store(folder, weights, Hashes(data_dir))
    if spec.given is not None:
        _note_unknown(store, note)
    return store


def _reject_foreign(folder: Path) -> None:
    """Raise LmtrainError where making `folder` again would delete files that no store has."""
    if not folder.is_dir() or any(
        file.name not in (MANIFEST, TOKENIZER) and not _STORE_FILE.fullmatch(file.name) for file in folder.iterdir()
    ):
        raise LmtrainError(f"{folder} is where the tokens would go, and holds something else: move it away")


def _current_store(folder: Path, spec: StoreSpec, weights: Sequence[int] | None, hashes: Hashes) -> TokenStore | str:
    """The store in `folder` if it is the specified one, else the reason why it isn't."""
    try:
        store = open_store(folder, weights, hashes)
    except LmtrainError as error:
        return str(error)
    if all(store.manifest[key] == value for key, value in spec.identity().items()):
        return store
    return "the text or the tokenizer's configuration has changed"


def _parts_folder(folder: Path, spec: StoreSpec) -> Path:
    """Where shards are made until all are finished; those of other texts under the same name are deleted."""
    key = sha256_bytes(json.dumps([FORMAT, shards.SHARD_BYTES, spec.identity()]).encode())[:16]
    parts = folder.with_name(f".parts-{folder.name}-{key}")
    for other in folder.parent.glob(f".parts-{folder.name[:-_TEXT_DIGITS]}{'?' * _TEXT_DIGITS}-{'?' * 16}"):
        if other != parts:
            disk.remove(other)
    return parts


def _trained(parts: Path, spec: StoreSpec, note: Note, progress: bool) -> Tokenizer:
    """The tokenizer of the corpora: the one that a killed process left in `parts`, else one that is trained and
    saved."""
    if (parts / TOKENIZER).exists():
        note(f"resuming the tokenizing of {spec.names()}")
        return Tokenizer.load(parts / TOKENIZER)
    note(f"training a {spec.config.kind} tokenizer on {spec.names()}")
    pieces = [piece for text in spec.texts("train") for piece in shards.cut(text)]
    total = sum(piece.lines for piece in pieces)
    with tqdm(total=total, desc="tokenizer", unit=" lines", disable=None if progress else True) as bar:
        if spec.config.kind == "word":
            tokenizer = Tokenizer.of_words(_count(pieces, bar.update), spec.config)
        else:
            tokenizer = Tokenizer.train(_sample(pieces, spec.config, note, bar.update), spec.config)
    tokenizer.save(parts / TOKENIZER)
    return tokenizer


def _count(pieces: Sequence[Piece], advance: shards.Advance) -> Counter[str]:
    """How often each word occurs; where there are more than `MOST_WORDS`, the counts of rare words are too low."""
    counts: Counter[str] = Counter()
    for own in perform_all([Count(piece) for piece in pieces], advance):
        counts.update(own)
        if len(counts) > MOST_WORDS:
            ordered = sorted(counts.items(), key=lambda entry: (-entry[1], entry[0]))
            counts = Counter(dict(islice(ordered, MOST_WORDS // 2)))
    return counts


def _sample(pieces: Sequence[Piece], config: TokenizerConfig, note: Note, advance: shards.Advance) -> Iterator[str]:
    """The lines that merges are learned from: all, or the beginning of each piece of a large corpus. A byte tokenizer
    learns nothing."""
    if config.kind == "byte":
        return
    share = min(1.0, BPE_BYTES / max(1, sum(piece.end - piece.begin for piece in pieces)))
    if share < 1:
        note(f"the merges are learned from {share:.1%} of the text, {BPE_BYTES >> 20} MiB taken evenly from all of it")
    for piece in pieces:
        for line in shards.lines_of(piece, None if share == 1 else int(share * (piece.end - piece.begin))):
            advance(1)
            yield line.removesuffix("\n")


def _write_store(folder: Path, spec: StoreSpec, tokenizer: Tokenizer, parts: Path, progress: bool) -> None:
    """Make the shards that are not finished in `parts`, and write the store of all of them."""
    tokenizer.save(parts / TOKENIZER)
    tasks = {split: encoding_tasks(split, spec.texts(split), tokenizer, parts) for split in spec.corpora[0].splits}
    every = [task for own in tasks.values() for task in own]
    records = {task.stem: record for task in every if (record := finished(task)) is not None}
    missing = [task for task in every if task.stem not in records]
    total = sum(task.piece.lines for task in every)
    done = total - sum(task.piece.lines for task in missing)
    with tqdm(total=total, initial=done, desc="tokenize", unit=" lines", disable=None if progress else True) as bar:
        for task, record in zip(missing, perform_all(missing, bar.update), strict=True):
            records[task.stem] = record
    floor = _floor(spec, tokenizer)
    info = spec.identity() | {
        "corpora": [corpus.name for corpus in spec.corpora],
        "tokenizer_sha256": tokenizer.sha256,
        "vocab_size": tokenizer.vocab_size,
        "splits": {split: _split_info(spec.sources(split), split, own, records) for split, own in tasks.items()},
        **({"floor": floor} if floor else {}),
    }
    hashes = {
        Path(stem).name + end: digest for stem, record in records.items() for end, digest in record["sha256"].items()
    }
    with new_folder(folder, FORMAT, info, hashes) as temporary:
        tokenizer.save(temporary / TOKENIZER)
        for name in hashes:
            _link(parts / name, temporary / name)


def _floor(spec: StoreSpec, tokenizer: Tokenizer) -> dict[str, Any]:
    """The lowest possible perplexity of each split, where it is known of the text and every word of it has an id of its
    own: `<unk>` is easier to predict than the words that it replaces."""
    if tokenizer.kind == "word" and (spec.given is not None or tokenizer.vocab_size == spec.vocab_limit):
        return {}
    floor: dict[str, Any] = spec.corpora[0].manifest.get("floor", {})
    return {split: own for split, own in floor.items() if len(spec.sources(split)) == 1}


def _split_info(
    corpora: Sequence[Corpus], split: str, tasks: Sequence[Encode], records: dict[str, dict[str, Any]]
) -> dict[str, Any]:
    """What the manifest says of a split: the counts of its texts, its shards, and the tokens of each corpus."""
    counts = [corpus.manifest["splits"][split] for corpus in corpora]
    made = [records[task.stem] for task in tasks]
    tokens = [0]
    for task, record in zip(tasks, made, strict=True):
        tokens[-1] += record["tokens"]
        tokens += [0] * task.piece.ends
    return {
        "tokens": sum(record["tokens"] for record in made),
        **{unit: sum(own[unit] for own in counts) for unit in ("words", "lines", "bytes")},
        "documents": sum(record["documents"] for record in made),
        "replaced": sum(record["replaced"] for record in made),
        "shards": [{unit: record[unit] for unit in ("tokens", "documents")} for record in made],
        "corpora": tokens[:-1],
    }


def _link(source: Path, target: Path) -> None:
    """Give a finished file a second name, so that a killed process leaves it in its first place until all is done."""
    try:
        target.hardlink_to(source)
    except OSError:  # a file system without hard links
        with writing(target):
            shutil.copyfile(source, target)


def _note_unknown(store: TokenStore, note: Note) -> None:
    """Say how much of the training text is unknown to a vocabulary that was not made from it."""
    unk, train = store.tokenizer.unk_id, store.split("train")
    if unk is not None and (unknown := int(train.ids.counts(store.tokenizer.vocab_size)[unk])):
        note(f"{unknown / train.tokens:.1%} of the training tokens are <unk>, as is every word that isn't known")
