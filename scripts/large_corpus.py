"""A synthetic corpus of gigabytes: made into a store by a command that is killed on the way, and read in training."""

import math
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from data_speed import WINDOWS, batch_seconds, encode_raw
from record import ROOT, lmtrain, seconds
from tokenizers import Tokenizer as RawTokenizer

from lmtrain.data.ids import Ids
from lmtrain.data.order import SampleOrder, batch
from lmtrain.data.shards import SHARD_BYTES
from lmtrain.data.tokens import TOKENIZER, open_store

FILE_BYTES = 500_000_000
WORDS, WORDS_IN_LINE, DRAWN_AT_ONCE = 500_000, 60, 600_000
RAW_BYTES = 60_000_000
"""Of the text, for the raw library, before and after the command and in the same minutes."""
KILLED_AT = 0.4
"""The share of the shards that are finished when the command is killed."""
VOCABULARY = 8192
POLL_SECONDS = 0.5
CONFIG = ROOT / "configs" / "wikitext2-bpe.yaml"
"""Its vocabulary has `VOCABULARY` entries, so that it trains on the store that is there."""
LMTRAIN = ("-m", "lmtrain")
CONTEXT, WARM_UP, READ_BATCHES = 256, 100, 20_000


def large_corpus(gigabytes: float) -> dict[str, Any]:
    """Bytes a second and peak memory of text to ids, killed and gone on with; the loader's share of a training step."""
    with tempfile.TemporaryDirectory(dir=".") as name:
        folder = Path(name)
        texts, data = folder / "texts", folder / "data"
        size = write_corpus(texts, gigabytes)
        shards = -(-size // SHARD_BYTES)
        print(f"{size / 1e9:.2f} GB of text", file=sys.stderr)
        brought = watched(["download", str(texts), "--data-dir", str(data)], None)
        options = ["tokenize", str(texts), "--data-dir", str(data), "--kind", "bpe", "--vocab-size", str(VOCABULARY)]
        killed = watched(options, lambda: len(finished(data)) >= KILLED_AT * shards)
        kept = finished(data)
        if not kept:
            raise SystemExit(f"{size / 1e9:.2f} GB were ids before the command could be killed: give more gigabytes")
        print(f"killed with {len(kept)} of about {shards} shards finished", file=sys.stderr)
        raw_before = raw_rate(next(data.glob(f".parts-*/{TOKENIZER}")), texts)
        went_on = watched(options, None)
        store = open_store(next(data.glob("*.bpe*")))
        if any(stamp(store.folder / name) != before for name, before in kept.items()):
            raise SystemExit("a finished shard was made again")
        raw_after = raw_rate(store.folder / TOKENIZER, texts)
        ids = store.split("train").ids
        left = size * (1 - len(kept) / len(ids.parts))
        rate, raw = left / went_on["seconds"], (raw_before + raw_after) / 2
        grown = grown_by_reading(ids)
        places = [f"data.source={texts}", f"data.dir={data}", f"run.dir={folder / 'runs'}"]
        profiled = lmtrain("train", "--config", str(CONFIG), *places, "train.batch_size=8", "--profile")
        share = profiled["parts"]["data"] / sum(profiled["parts"].values())
        peak = max(part["peak_bytes"] for part in (brought, killed, went_on))
        return {
            "title": f"{size / 1e9:.1f} GB of text to {len(ids):,} ids of a byte-level BPE in {len(ids.parts)} shards, "
            f"killed after {len(kept)} and gone on with; training on it",
            "result": f"{rate / 1e6:.1f} MB/s, {rate / raw:.0%} of the tokenizers library's, which is "
            f"{raw_before / 1e6:.1f} before and {raw_after / 1e6:.1f} after, in {peak / 1e6:,.0f} MB of memory at "
            f"most, no finished shard made again; a batch of {WINDOWS} windows of {CONTEXT} takes "
            f"{1e6 * batch_seconds(ids, CONTEXT):.0f} us, {READ_BATCHES:,} of them take "
            f"{max(grown, 0) / 1e6:.1f} MB of memory; the loader has {share:.2%} of a training step",
            "seed": 0,
            "bytes": size,
            "tokens": len(ids),
            "bytes_per_second": rate,
            "raw_bytes_per_second": [raw_before, raw_after],
            "commands": {"download": brought, "tokenize, killed": killed, "tokenize": went_on},
            "shards_kept": len(kept),
            "profile": {key: profiled[key] for key in ("seconds", "tokens_per_step", "parts")},
        }


def grown_by_reading(ids: Ids) -> int:
    """Bytes by which this process grows, files aside, as it reads `READ_BATCHES` batches after the first few."""
    order = SampleOrder(len(ids), CONTEXT, "causal", 0)
    before = 0
    for number in range(READ_BATCHES):
        if number == WARM_UP:
            before = anonymous_bytes()
        batch(ids, order.starts(number * WINDOWS, WINDOWS), CONTEXT, "causal")
    return anonymous_bytes() - before


def write_corpus(folder: Path, gigabytes: float) -> int:
    """Training files of at most about `FILE_BYTES`, and a small validation file; their bytes together."""
    (folder / "train").mkdir(parents=True)
    files = max(1, math.ceil(gigabytes * 1e9 / FILE_BYTES))
    size = round(gigabytes * 1e9 / files)
    with ProcessPoolExecutor() as pool:
        paths = [folder / "train" / f"{number:03}.txt" for number in range(files)]
        sizes = list(pool.map(write_text, paths, range(files), [size] * files))
    return sum(sizes) + write_text(folder / "valid.txt", files, FILE_BYTES // 500)


def write_text(path: Path, seed: int, size: int) -> int:
    """Lines of words whose frequencies follow Zipf's law, the commonest the shortest, from letters drawn at random."""
    letters = np.random.default_rng(0)
    words = np.array([draw_word(letters, number) for number in range(WORDS)], dtype=object)
    shares = np.cumsum(1.0 / (np.arange(WORDS) + 2.7))
    draws = np.random.default_rng([1, seed])
    written = 0
    with path.open("wb") as file:
        while written < size:
            places = np.searchsorted(shares, draws.random(DRAWN_AT_ONCE) * shares[-1])
            lines = words[places].reshape(-1, WORDS_IN_LINE)
            written += file.write(b"\n".join(b" ".join(line) for line in lines.tolist()) + b"\n")
    return written


def draw_word(letters: np.random.Generator, rank: int) -> bytes:
    """Two letters at least, and one more for each time that the rank is four times as large."""
    length = 2 + (rank.bit_length() + 1) // 2
    return bytes(letters.choice(list(b"etaoinshrdlucmfwypvbgk"), length).tolist())


def watched(options: list[str], enough: Callable[[], bool] | None) -> dict[str, Any]:
    """Seconds and peak memory of a command and its processes; where `enough()` is true all are killed."""
    begun = time.perf_counter()
    command = [sys.executable, *LMTRAIN, *options]
    running = subprocess.Popen(command, stdout=subprocess.DEVNULL, start_new_session=True)
    peak = 0
    while running.poll() is None:
        peak = max(peak, session_bytes(running.pid))
        if enough is not None and enough():
            os.killpg(running.pid, signal.SIGKILL)
            running.wait()
            return {"seconds": time.perf_counter() - begun, "peak_bytes": peak}
        time.sleep(POLL_SECONDS)
    if running.returncode:
        raise SystemExit(f"lmtrain {options[0]} failed")
    return {"seconds": time.perf_counter() - begun, "peak_bytes": peak}


def session_bytes(session: int) -> int:
    """Resident memory of all processes of a session; what two of them share counts twice."""
    total = 0
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue  # it has ended
        if int(fields[3]) == session:
            total += int(fields[21]) * os.sysconf("SC_PAGE_SIZE")
    return total


def finished(data: Path) -> dict[str, tuple[int, int]]:
    """The files of ids that a killed command left whole, by name."""
    return {f"{path.stem}.npy": stamp(path.with_suffix(".npy")) for path in data.glob(".parts-*/train-*.json")}


def stamp(path: Path) -> tuple[int, int]:
    """Which file this is, and when it was last written."""
    return path.stat().st_ino, path.stat().st_mtime_ns


def raw_rate(tokenizer: Path, texts: Path) -> float:
    """Bytes a second of the tokenizers library alone, on all cores, over lines in memory."""
    raw = RawTokenizer.from_file(str(tokenizer))
    lines = list(first_lines(texts / "train" / "000.txt"))
    return sum(len(line.encode()) for line in lines) / seconds(encode_raw, raw, lines)


def first_lines(path: Path) -> Iterator[str]:
    read = 0
    with path.open() as file:
        for line in file:
            read += len(line)
            if read > RAW_BYTES:
                return
            yield line


def anonymous_bytes() -> int:
    """Memory of this process that is no part of a file."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("RssAnon"))
