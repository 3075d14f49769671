"""From corpora to a token store: train or take the tokenizer, cut the text, encode it on all cores, collect the shards.

Work in progress lies beside the store in a folder whose name has the hash of all that the shards depend on, so that
what a killed process finished is found and used by the next one, and by no other configuration. Memory does not grow
with the text: a process holds a batch of lines, and the words of a vocabulary are counted within bounds.
"""

import json
import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from tqdm import tqdm

from lmtrain.config.schema import TokenizerConfig
from lmtrain.data import shards
from lmtrain.data.corpus import Corpus
from lmtrain.data.processes import perform_all
from lmtrain.data.shards import Count, Encode, Piece, finished
from lmtrain.data.tokenizer import Tokenizer
from lmtrain.data.tokens import (
    FORMAT,
    TEXT_DIGITS,
    TOKENIZER,
    TokenStore,
    as_list,
    open_store,
    refuse_foreign,
    shard_name,
    store_folder,
    vocab_limit,
)
from lmtrain.data.verified import Hashes
from lmtrain.errors import LmtrainError
from lmtrain.storage.files import alone_in, make_folders, new_folder, sha256_bytes, verify, writing
from lmtrain.system import disk

MOST_WORDS = 1_500_000
"""Different words that are counted at once; beyond these, the rarest half is forgotten."""
BPE_BYTES = 256 << 20
"""Text that merges are learned from, taken evenly from a larger corpus: more changes few of them and takes long."""

Note = Callable[[str], None]


def tokenize(
    corpora: Corpus | Sequence[Corpus],
    config: TokenizerConfig,
    data_dir: Path,
    *,
    weights: Sequence[int] | None = None,
    force: bool = False,
    anew: bool = False,
    note: Note,
    progress: bool,
) -> TokenStore:
    """The store of a corpus, or of a mixture with `weights`: opened if it is there and made from the same text and
    configuration, else made.

    The tokenizer is trained on the train splits, or is that of `config.file`. Of a mixture, the first corpus gives the
    other splits. `note` receives one-line messages, such as why a store is made again. `anew` reads every file to check
    it, even those that did not change since they were last checked.
    Raises LmtrainError when a corpus is damaged or has no train split, when `config.file` is no tokenizer, when the
    store's place holds other files, or when the disk is full.
    """
    corpora = as_list(corpora)
    given = Tokenizer.load(config.file) if config.file is not None else None
    folder, wanted = store_folder(corpora, config, data_dir, given), identity(corpora, config, given)
    hashes = Hashes(data_dir, anew=anew)
    if folder.exists():
        refuse_foreign(folder)
        found = _current_store(folder, wanted, weights, hashes) if not force else "asked to"
        if isinstance(found, TokenStore):
            return found
        note(f"tokenizing {_names(corpora)} again: {found}")
    for corpus in corpora:
        if "train" not in corpus.splits:
            raise LmtrainError(f"corpus {corpus.name} has no train split, on which the tokenizer is trained: add one")
        verify(corpus.folder, corpus.manifest, hashes.sha256)
    key = sha256_bytes(json.dumps([FORMAT, shards.SHARD_BYTES, wanted]).encode())
    parts = data_dir / f".parts-{folder.name}-{key[:16]}"
    for other in data_dir.glob(f".parts-{folder.name[:-TEXT_DIGITS]}{'?' * TEXT_DIGITS}-{'?' * 16}"):
        if other != parts:
            disk.remove(other)
    make_folders(parts)
    with alone_in(parts):
        if not parts.exists():  # another process has finished, and deleted it, while this one waited
            found = _current_store(folder, wanted, weights, hashes)
            if isinstance(found, TokenStore):
                return found
        make_folders(parts)
        try:
            tokenizer = given or _tokenizer(parts, corpora, config, note, progress)
            write_store(folder, corpora, tokenizer, wanted, parts, progress=progress)
        except BaseException:
            if not any(parts.glob("*-*.json")):  # no shard is finished: nothing to go on from
                disk.remove(parts)
            raise
        disk.remove(parts)
    store = open_store(folder, weights, Hashes(data_dir))
    if given is not None:
        _note_unknown(store, note)
    return store


def write_store(
    folder: Path,
    corpora: Corpus | Sequence[Corpus],
    tokenizer: Tokenizer,
    wanted: dict[str, Any],
    parts: Path,
    *,
    processes: int | None = None,
    progress: bool,
) -> None:
    """Write the store of corpora to `folder` with a tokenizer that is there already; see `tokenize`.

    `wanted` is its `identity`. Shards are made in the folder `parts` by so many processes (None = one to a core), and
    left as they are if they are finished there.
    """
    corpora = as_list(corpora)
    tokenizer.save(parts / TOKENIZER)
    tasks = {split: list(encoding_tasks(split, own, tokenizer, parts)) for split, own in _texts(corpora).items()}
    records = {task.stem: record for own in tasks.values() for task in own if (record := finished(task)) is not None}
    missing = [task for own in tasks.values() for task in own if task.stem not in records]
    done = sum(task.piece.lines for own in tasks.values() for task in own if task.stem in records)
    total = done + sum(task.piece.lines for task in missing)
    with tqdm(total=total, initial=done, desc="tokenize", unit=" lines", disable=None if progress else True) as bar:
        for task, record in zip(missing, perform_all(missing, bar.update, processes), strict=True):
            records[task.stem] = record
    floor = corpora[0].manifest.get("floor", {}) if _knows_all(tokenizer, wanted) else {}
    floor = {split: own for split, own in floor.items() if split != "train" or len(corpora) == 1}
    info = wanted | {
        "corpora": [corpus.name for corpus in corpora],
        "tokenizer_sha256": tokenizer.sha256,
        "vocab_size": tokenizer.vocab_size,
        "splits": {split: _split_info(split, corpora, own, records) for split, own in tasks.items()},
        **({"floor": floor} if floor else {}),
    }
    hashes = {
        f"{Path(task.stem).name}{end}": digest
        for own in tasks.values()
        for task in own
        for end, digest in records[task.stem]["sha256"].items()
    }
    with new_folder(folder, FORMAT, info, hashes) as temporary:
        tokenizer.save(temporary / TOKENIZER)
        for name in hashes:
            _link(parts / name, temporary / name)


def encoding_tasks(split: str, texts: Sequence[Path], tokenizer: Tokenizer, parts: Path) -> Iterator[Encode]:
    """One task for each shard of a split, made in the folder `parts`, where the tokenizer has been saved."""
    number = 0
    for text in texts:
        pieces = shards.cut(text)
        for piece in pieces:
            stem = str(parts / shard_name(split, number))
            documents = str(text.with_name(f"{split}.docs.npy"))
            yield Encode(piece, documents, piece is pieces[-1], stem, str(parts / TOKENIZER), tokenizer.sha256)
            number += 1


def _names(corpora: Sequence[Corpus]) -> str:
    return " and ".join(corpus.name for corpus in corpora)


def identity(
    corpora: Corpus | Sequence[Corpus], config: TokenizerConfig, given: Tokenizer | None = None
) -> dict[str, Any]:
    """What a manifest must say for a store to be the one that is asked for, its tokenizer trained or `given`."""
    return {
        "corpora_sha256": [corpus.sha256 for corpus in as_list(corpora)],
        "kind": config.kind if given is None else given.kind,
        "vocab_limit": vocab_limit(config) if given is None else None,
        **({"tokenizer_sha256": given.sha256} if given is not None else {}),
    }


def _knows_all(tokenizer: Tokenizer, wanted: dict[str, Any]) -> bool:
    """Whether every word of the training text has an id of its own, without which the text's floor is not that of the
    ids: to predict `<unk>` is easier."""
    if tokenizer.kind != "word":
        return True
    limit = wanted["vocab_limit"]
    return "tokenizer_sha256" not in wanted and (limit is None or tokenizer.vocab_size < limit)


def _current_store(
    folder: Path, wanted: dict[str, Any], weights: Sequence[int] | None, hashes: Hashes
) -> TokenStore | str:
    """The store in `folder` if it is what is wanted, else the reason why it isn't."""
    try:
        store = open_store(folder, weights, hashes)
    except LmtrainError as error:
        return str(error)
    if all(store.manifest[key] == value for key, value in wanted.items()):
        return store
    return "the text or the tokenizer's configuration has changed"


def _note_unknown(store: TokenStore, note: Note) -> None:
    """Say how much of the training text a vocabulary that is not made from it does not know."""
    unk, train = store.tokenizer.unk_id, store.split("train")
    if unk is not None and (unknown := int(train.ids.counts(store.tokenizer.vocab_size)[unk])):
        note(f"{unknown / train.tokens:.1%} of the training tokens are <unk>, as is every word that isn't known")


def _texts(corpora: Sequence[Corpus]) -> dict[str, list[Path]]:
    """The text files of each split of the store: of all corpora for training, of the first one for the others."""
    return {
        split: [corpus.folder / f"{split}.txt" for corpus in (corpora if split == "train" else corpora[:1])]
        for split in corpora[0].splits
    }


def _tokenizer(
    parts: Path, corpora: Sequence[Corpus], config: TokenizerConfig, note: Note, progress: bool
) -> Tokenizer:
    """The tokenizer of these corpora: the one that a killed process left in `parts`, else trained and left there."""
    if (parts / TOKENIZER).exists():
        note(f"going on with tokenizing {_names(corpora)} where it was left")
        return Tokenizer.load(parts / TOKENIZER)
    note(f"training a {config.kind} tokenizer on {_names(corpora)}")
    texts = [piece for text in _texts(corpora)["train"] for piece in shards.cut(text)]
    total = sum(piece.lines for piece in texts)
    with tqdm(total=total, desc="tokenizer", unit=" lines", disable=None if progress else True) as bar:
        if config.kind == "word":
            tokenizer = Tokenizer.of_words(_count(texts, bar.update), config)
        else:
            tokenizer = Tokenizer.train(_sample(texts, config, note, bar.update), config)
    tokenizer.save(parts / TOKENIZER)
    return tokenizer


def _count(texts: Sequence[Piece], advance: shards.Advance) -> Counter[str]:
    """How often each word occurs; beyond `MOST_WORDS` different ones, the counts of rare words are too low."""
    counts: Counter[str] = Counter()
    for own in perform_all([Count(piece) for piece in texts], advance):
        counts.update(own)
        if len(counts) > MOST_WORDS:
            ordered = sorted(counts.items(), key=lambda entry: (-entry[1], entry[0]))
            counts = Counter(dict(islice(ordered, MOST_WORDS // 2)))
    return counts


def _sample(texts: Sequence[Piece], config: TokenizerConfig, note: Note, advance: shards.Advance) -> Iterator[str]:
    """The lines that merges are learned from: all, or of each piece of a large corpus the first part. A byte tokenizer
    learns nothing."""
    if config.kind == "byte":
        return
    share = min(1.0, BPE_BYTES / max(1, sum(piece.end - piece.begin for piece in texts)))
    if share < 1:
        note(f"the merges are learned from {share:.1%} of the text, {BPE_BYTES >> 20} MiB taken evenly from all of it")
    for piece in texts:
        for line in shards.lines_of(piece, None if share == 1 else int(share * (piece.end - piece.begin))):
            advance(1)
            yield line.removesuffix("\n")


def _split_info(
    split: str, corpora: Sequence[Corpus], tasks: Sequence[Encode], records: dict[str, dict[str, Any]]
) -> dict[str, Any]:
    """What the manifest says of a split: the counts of its texts, its shards, and the tokens of each corpus."""
    own = [corpus.manifest["splits"][split] for corpus in (corpora if split == "train" else corpora[:1])]
    made = [records[task.stem] for task in tasks]
    tokens: list[int] = [0]
    for task, record in zip(tasks, made, strict=True):
        tokens[-1] += record["tokens"]
        tokens += [0] * task.ends
    return {
        "tokens": sum(tokens),
        **{unit: sum(counts[unit] for counts in own) for unit in ("words", "lines", "bytes")},
        "documents": sum(record["documents"] for record in made),
        "replaced": sum(record["replaced"] for record in made),
        "shards": [{unit: record[unit] for unit in ("tokens", "documents")} for record in made],
        "corpora": tokens[:-1],
    }


def _link(source: Path, target: Path) -> None:
    """Give a finished file a second name, so that it stays where a killed process is gone on from until all is done."""
    try:
        target.hardlink_to(source)
    except OSError:  # a file system without hard links
        with writing(target):
            shutil.copyfile(source, target)
