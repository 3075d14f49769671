"""From a corpus to a token store, or from a text to a split: train or load the tokenizer, encode the text.

A store is written in one go, as a folder that appears complete or not at all. A batch of lines is held in memory at a
time, and the different words of the text while they are counted.
"""

import math
import tempfile
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from lmtrain.config.schema import Config, DataConfig, TokenizerConfig
from lmtrain.data.corpus import Corpus, existing, make_corpus
from lmtrain.data.splits import Lines, document_starts, lines_of, write_split
from lmtrain.data.tokenizer import Tokenizer
from lmtrain.data.tokens import FORMAT, Split, TokenStore, open_store, words_and_line_ends
from lmtrain.storage.files import new_folder, write_errors
from lmtrain.storage.run_folder import TOKENIZER
from lmtrain.system.messages import log, shows_bars

_BATCH = 512
"""Lines that are encoded at once, by the tokenizers library on all cores."""
BPE_BYTES = 256 << 20
"""Text that merges are learned from, at most about: more changes few of them and takes long."""
BYTES_PER_ENTRY = 200
"""Text for each entry of a bpe vocabulary, so that most entries occur often enough to be learned."""
BPE_SIZES = (512, 16_384)
"""The smallest and the largest bpe vocabulary if the configuration has no size."""
CHECKED_BYTES = 16 << 10
"""The start of the text, which shows whether a tokenizer that lmtrain did not train restores the text."""


def prepare_store(config: Config) -> TokenStore:
    """Return the token store of a configuration; a missing corpus is downloaded first.

    Raises LmtrainError as `make_corpus` and `tokenize` do.
    """
    return tokenize(make_corpus(config.data), config.tokenizer)


def prepare_run_store(data: DataConfig, run_dir: Path, found: TokenStore | None) -> TokenStore:
    """Return the token store of the text of `data` for a run: `found`, which the run was trained on, if it holds this
    text, or else the one with the run's tokenizer.

    Another version may train another tokenizer on the same text, and `tokenizer.file` may be gone. Raises LmtrainError
    as `make_corpus` and `tokenize` do.
    """
    corpus = make_corpus(data)
    if found is not None and corpus.sha256 == found.manifest["corpus_sha256"]:
        return found
    return tokenize(corpus, TokenizerConfig(file=run_dir / TOKENIZER))


def tokenize(corpus: Corpus, config: TokenizerConfig) -> TokenStore:
    """Return the store of a corpus, beside it: an existing one of the same text and configuration, else a new one.

    The tokenizer is that of `config.file`, or is trained on the train split. Raises LmtrainError if `config.file` is
    not a tokenizer, if the folder holds other files, or if the disk is full.
    """
    external = Tokenizer.load(config.file, config.eos_token) if config.file is not None else None
    config = with_vocab_size(config, corpus)
    name, identity = _identify(corpus, config, external)
    folder = corpus.folder.with_name(name)
    store: TokenStore | None = existing(folder, open_store, identity)
    if store is not None:
        return store
    tokenizer = external or _trained(corpus, config)
    info = identity | {
        "corpus": corpus.folder.name,
        "tokenizer_sha256": tokenizer.sha256,
        "vocab_size": tokenizer.vocab_size,
        "splits": {},  # its place in the manifest; its content follows
    }
    if _keeps_all(tokenizer, corpus.folder / "train.txt") and "floor" in corpus.manifest:
        info["floor"] = corpus.manifest["floor"]
    with new_folder(folder, FORMAT, info) as temporary:
        tokenizer.save(temporary / TOKENIZER)
        info["splits"] = {split: _write_split(temporary, corpus, split, tokenizer) for split in corpus.splits}
    store = open_store(folder)
    if tokenizer.unk_id is not None and any(counts["replaced"] for counts in info["splits"].values()):
        fractions = {split: counts["replaced"] / counts["tokens"] for split, counts in info["splits"].items()}
        listed = ", ".join(f"{100 * fraction:.3g}% ({split})" for split, fraction in fractions.items())
        unknown = tokenizer.token(tokenizer.unk_id)
        log.info(f"the tokenizer does not know all words: {unknown} replaces {listed} of the tokens")
    return store


def with_vocab_size(config: TokenizerConfig, corpus: Corpus) -> TokenizerConfig:
    """Return `config`, for bpe with a size: if it has none, the power of two nearest, by ratio, to an entry for each
    `BYTES_PER_ENTRY` of the training text."""
    if config.file is not None or config.kind != "bpe" or config.vocab_size is not None:
        return config
    smallest, largest = BPE_SIZES
    nearest = 2 ** round(math.log2(corpus.splits["train"]["bytes"] / BYTES_PER_ENTRY))
    return config.model_copy(update={"vocab_size": min(max(smallest, int(nearest)), largest)})


def text_split(lines: Lines, tokenizer: Tokenizer, *, label: str) -> Split:
    """Return these lines as a split, with the ids and counts that it would have in a corpus and a store.

    The lines are written to a temporary folder; the ids are held in memory. Raises LmtrainError if there are no words,
    with `label` as the name of the text, and if `lines` does.
    """
    temporary = Path(tempfile.gettempdir())
    with write_errors(temporary), tempfile.TemporaryDirectory(dir=temporary) as name:
        folder = Path(name)
        counts = write_split(folder, "text", lines, label)
        text = folder / "text.txt"
        _keeps_all(tokenizer, text)
        parts, replaced = zip(*_encode_text(lines_of(text), document_starts(text), tokenizer), strict=True)
    return Split(np.concatenate(parts), words_and_line_ends(counts), counts["bytes"], sum(replaced))


def _keeps_all(tokenizer: Tokenizer, text: Path) -> bool:
    """Whether the tokenizer restores the start of a text; if not, a message says what the figures are of."""
    with text.open("rb") as file:
        start = file.read(CHECKED_BYTES).decode(errors="ignore")
    if tokenizer.kind != "file" or tokenizer.decode(tokenizer.encode(start)) == start:
        return True
    log.info("the tokenizer does not restore the text exactly: bits per byte and word perplexity are of what it keeps")
    return False


def _identify(corpus: Corpus, config: TokenizerConfig, external: Tokenizer | None) -> tuple[str, dict[str, Any]]:
    """The name of a store, and the entries by which its manifest shows that it is the right one.

    The name ends in a hash of the text, so that the store of another text never replaces the one that a run was trained
    on. `vocab_limit` is the number of entries that a trained vocabulary may have; None = any.
    """
    own: dict[str, Any]
    if external is None:
        own = {"kind": config.kind, "vocab_limit": config.vocab_size}
        tokenizer = config.kind if config.vocab_size is None else f"{config.kind}-{config.vocab_size}"
    else:
        own = {"kind": external.kind, "vocab_limit": None, "tokenizer_sha256": external.sha256}
        tokenizer = f"{external.kind}-{external.sha256[:8]}"
    return f"{corpus.folder.name}.{tokenizer}-{corpus.sha256[:8]}", {"corpus_sha256": corpus.sha256, **own}


def _trained(corpus: Corpus, config: TokenizerConfig) -> Tokenizer:
    """Train a tokenizer on a corpus."""
    size = f" of up to {config.vocab_size:,} entries" if config.vocab_size is not None else ""
    every = -(-corpus.splits["train"]["bytes"] // BPE_BYTES) if config.kind == "bpe" else 1
    part = f"one line in {every} of " if every > 1 else ""
    log.info(f"training a {config.kind} tokenizer{size} on {part}{corpus.folder.name}")
    lines = islice(_lines(corpus, "train", "tokenizer"), None, None, every)
    return Tokenizer.train((line.removesuffix("\n") for line in lines), config)


def _lines(corpus: Corpus, split: str, purpose: str) -> Iterable[str]:
    """The lines of a split, each with its line end; with a progress bar of this name."""
    total = corpus.splits[split]["lines"]
    lines = lines_of(corpus.folder / f"{split}.txt")
    return tqdm(lines, desc=purpose, total=total, unit=" lines", disable=not shows_bars())


def _write_split(folder: Path, corpus: Corpus, split: str, tokenizer: Tokenizer) -> dict[str, Any]:
    """Write the ids of a split and return its counts for the manifest."""
    lines = _lines(corpus, split, f"tokenize {split}")
    starts = document_starts(corpus.folder / f"{split}.txt")
    tokens = replaced = 0
    with (folder / f"{split}.bin").open("wb") as file:
        for ids, unknown in _encode_text(lines, starts, tokenizer):
            file.write(ids.tobytes())
            tokens += len(ids)
            replaced += unknown
    return {"tokens": tokens, **corpus.splits[split], "replaced": replaced}


def _encode_text(lines: Iterable[str], starts: np.ndarray, tokenizer: Tokenizer) -> Iterator[tuple[np.ndarray, int]]:
    """Yield the ids of a split's text, part by part: (tokens,), and how many tokens of the part are unknown words.

    An end-of-text token ends each document; with a word tokenizer it ends each line instead. The documents begin at the
    lines `starts` (documents,), the first of them at line 0.
    """
    document_end = [] if tokenizer.kind == "word" else [tokenizer.eos_id]
    later_starts = set(starts[1:].tolist())
    numbered = enumerate(lines)
    while batch := list(islice(numbered, _BATCH)):
        ids: list[int] = []
        replaced = 0
        encoded = tokenizer.encode_lines([line for _, line in batch])
        for (number, line), line_ids in zip(batch, encoded, strict=True):
            if number in later_starts:
                ids += document_end
            ids += line_ids
            replaced += tokenizer.count_unknown(line, line_ids)
        yield np.array(ids, tokenizer.id_type), replaced
    yield np.array(document_end, tokenizer.id_type), 0
