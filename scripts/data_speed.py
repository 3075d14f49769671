"""How fast text becomes ids, and ids become batches."""

import tempfile
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

from record import seconds
from tokenizers import Tokenizer as RawTokenizer

from lmtrain.config.loader import load
from lmtrain.data.corpus import Corpus, download
from lmtrain.data.ids import Ids
from lmtrain.data.order import SampleOrder, batch
from lmtrain.data.tokenizer import Tokenizer
from lmtrain.data.tokenizing import identity, tokenize, write_store
from lmtrain.data.tokens import TOKENIZER, open_store

REPEATS, LINES = 5, 1000
LARGE = 100_000_000
"""Bytes: of a larger corpus one pass is timed, and the raw library reads a part of it."""
WINDOWS, CONTEXTS, BATCHES = 32, (128, 1024), 500


def data(overrides: list[str]) -> dict[str, Any]:
    """Bytes a second of tokenizing a corpus by words and in BPE, and seconds of making a batch."""
    corpus = download(load(None, overrides).data, note=print, progress=False)
    with tempfile.TemporaryDirectory() as name:
        found = {kind: tokenizing(corpus, overrides, kind, Path(name)) for kind in ("word", "bpe")}
        ids = open_store(next(Path(name).glob("*.bpe*"))).split("train").ids
        batches = {str(context): batch_seconds(ids, context) for context in CONTEXTS}
    kinds = [
        f"{kind} {rates['store'] / 1e6:.1f} MB/s, {rates['store'] / rates['tokenizers']:.0%} of "
        f"the tokenizers library's {rates['tokenizers'] / 1e6:.1f}"
        for kind, rates in found.items()
    ]
    return {
        "title": f"text to ids, {corpus_bytes(corpus) / 1e6:.1f} MB of {corpus.name}, and ids to batches of {WINDOWS} "
        "windows",
        "result": "; ".join(kinds)
        + "; a batch takes "
        + ", ".join(f"{1e6 * taken:.0f} us at {context} tokens" for context, taken in batches.items()),
        "seed": 0,
        **found,
        "batch_seconds": batches,
    }


def tokenizing(corpus: Corpus, overrides: list[str], kind: str, folder: Path) -> dict[str, Any]:
    """Bytes a second from the corpus on the disk to the store on the disk, the vocabulary being there; beside it
    `encode_batch_fast` of the tokenizers library with the same tokenizer.json over the same lines in memory (of a large
    corpus, its first ones), which uses all cores. They take turns, and the best times count.
    """
    config = load(None, [*overrides, f"tokenizer.kind={kind}"]).tokenizer
    store = tokenize(corpus, config, folder, note=print, progress=False)
    raw = RawTokenizer.from_file(str(store.folder / TOKENIZER))
    size, train = corpus_bytes(corpus), corpus.manifest["splits"]["train"]
    lines = [f"{line}\n" for line in islice(corpus.lines("train"), int(LARGE / 2 * train["lines"] / train["bytes"]))]
    times: dict[str, list[float]] = {"store": [], "tokenizers": []}
    for number in range(REPEATS if size < LARGE else 1):
        parts = folder / f"{kind}{number}.parts"
        parts.mkdir()
        tokenizer, wanted = Tokenizer.load(store.folder / TOKENIZER), identity(corpus, config)
        write = partial(write_store, folder / f"{kind}{number}", corpus, tokenizer, wanted, parts, progress=False)
        times["store"].append(seconds(write))
        times["tokenizers"].append(seconds(encode_raw, raw, lines))
    part = sum(len(line.encode()) for line in lines)
    return {"store": size / min(times["store"]), "tokenizers": part / min(times["tokenizers"]), "seconds": times}


def corpus_bytes(corpus: Corpus) -> int:
    """Of all its splits."""
    return sum(corpus.manifest["splits"][split]["bytes"] for split in corpus.splits)


def encode_raw(raw: RawTokenizer, lines: list[str]) -> None:
    """Encode lines by the tokenizers library alone, on all cores."""
    for start in range(0, len(lines), LINES):
        raw.encode_batch_fast(lines[start : start + LINES], add_special_tokens=False)


def batch_seconds(ids: Ids, context: int) -> float:
    """Of one batch of random windows, where the sample order is drawn too."""
    order = SampleOrder(len(ids), context, "causal", 0)

    def run() -> None:
        for number in range(BATCHES):
            batch(ids, order.starts(number * WINDOWS, WINDOWS), context, "causal")

    return min(seconds(run) for _ in range(REPEATS)) / BATCHES
