"""How fast text becomes ids, and ids become batches."""

import tempfile
import time
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as RawTokenizer

from lmtrain.config import load
from lmtrain.data.corpus import download
from lmtrain.data.ids import Ids
from lmtrain.data.order import SampleOrder, batch
from lmtrain.data.tokenizer import Tokenizer
from lmtrain.data.tokenizing import tokenize, write_store
from lmtrain.data.tokens import TOKENIZER

REPEATS, LINES = 5, 1000
LARGE = 100_000_000
"""Bytes: of a larger corpus one pass is timed, and the raw library reads a part of it."""
WINDOWS, CONTEXTS, BATCHES = 32, (128, 1024), 500


def data(overrides: list[str]) -> dict[str, Any]:
    """Bytes a second of tokenizing a corpus, and seconds of making a batch.

    Tokenizing goes from the corpus on the disk to the store on the disk, the vocabulary being there; beside it
    `encode_batch_fast` of the tokenizers library with the same tokenizer.json over the same lines in memory (of a large
    corpus, its first ones), which uses all cores. They take turns, and the best times count.
    """
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as name:
        for kind in ("word", "bpe"):
            config = load(None, [*overrides, f"tokenizer.kind={kind}"])
            corpus = download(config.data, note=print, progress=False)
            store = tokenize(corpus, config.tokenizer, Path(name), note=print, progress=False)
            raw = RawTokenizer.from_file(str(store.folder / TOKENIZER))
            size = sum(corpus.manifest["splits"][split]["bytes"] for split in corpus.splits)
            average = corpus.manifest["splits"]["train"]["bytes"] / corpus.manifest["splits"]["train"]["lines"]
            lines = [f"{line}\n" for line in islice(corpus.lines("train"), int(LARGE / 2 / average))]
            chunks = [lines[start : start + LINES] for start in range(0, len(lines), LINES)]
            times: dict[str, list[float]] = {"store": [], "tokenizers": []}
            for number in range(REPEATS if size < LARGE else 1):
                folder, parts = Path(name) / f"{kind}{number}", Path(name) / f"{kind}{number}.parts"
                tokenizer = Tokenizer.load(store.folder / TOKENIZER)
                parts.mkdir()
                times["store"].append(
                    seconds(lambda: write_store(folder, corpus, tokenizer, config.tokenizer, parts, progress=False))  # noqa: B023
                )
                times["tokenizers"].append(
                    seconds(lambda: [raw.encode_batch_fast(chunk, add_special_tokens=False) for chunk in chunks])  # noqa: B023
                )
            part = sum(len(line.encode()) for line in lines)
            found[kind] = {"store": size / min(times["store"]), "tokenizers": part / min(times["tokenizers"])}
            found[kind]["seconds"] = times
        ids = store.split("train").ids
        found["batch_seconds"] = {str(context): batch_seconds(ids, context) for context in CONTEXTS}
    kinds = [
        f"{kind} {found[kind]['store'] / 1e6:.1f} MB/s, {found[kind]['store'] / found[kind]['tokenizers']:.0%} of "
        f"the tokenizers library's {found[kind]['tokenizers'] / 1e6:.1f}"
        for kind in ("word", "bpe")
    ]
    return {
        "title": f"text to ids, {size / 1e6:.1f} MB of {corpus.name}, and ids to batches of {WINDOWS} windows",
        "result": "; ".join(kinds)
        + "; a batch takes "
        + ", ".join(f"{1e6 * taken:.0f} us at {context} tokens" for context, taken in found["batch_seconds"].items()),
        "seed": 0,
        **found,
    }


def batch_seconds(ids: Ids, context: int) -> float:
    """Of one batch of random windows, where the sample order is drawn too."""
    order = SampleOrder(len(ids), context, "causal", 0)

    def run() -> None:
        for number in range(BATCHES):
            batch(ids, order.starts(number * WINDOWS, WINDOWS), context, "causal")

    return min(seconds(run) for _ in range(REPEATS)) / BATCHES


def seconds(run: Callable[[], object]) -> float:
    begun = time.perf_counter()
    run()
    return time.perf_counter() - begun
