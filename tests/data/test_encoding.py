"""Encoding in shards and batches: their sizes change no token, and bound the memory."""

import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lmtrain.config.schema import TokenizerConfig
from lmtrain.data import encoding, tokenizer, tokenizing
from lmtrain.data.encoding import blocks, lines_of
from lmtrain.data.tokenizer_file import Kind
from lmtrain.data.tokens import TokenStore
from tests.data.helpers import CONFIGS, KINDS, Documents, make_corpus, make_store, token_starts, tokenized
from tests.stored.make import HERE

LINES = [f"line {number} says {number % 7} times é" for number in range(400)]
DOCUMENTS: Documents = {
    "train": [part.tolist() for part in np.array_split(np.array(LINES), 4)],
    "valid": [["line 3"]],
}


@pytest.fixture
def small_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encoding, "SHARD_BYTES", 2_000)


def ids_of(store: TokenStore, split: str = "train") -> list[int]:
    found: list[int] = store.split(split).ids[:].tolist()
    return found


@settings(max_examples=60, deadline=None)
@given(
    texts=st.lists(st.lists(st.text("ab é\t<eos>"), min_size=1), min_size=1),
    size=st.integers(1, 12),
    lines=st.integers(1, 5),
    kind=st.sampled_from(KINDS),
)
def test_the_sizes_of_shards_and_batches_change_no_token(
    texts: list[list[str]], size: int, lines: int, kind: Kind, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("store")
    whole = make_store(folder / "whole", kind, {"train": texts})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(encoding, "_BATCH", lines)
        assert make_store(folder / "batches", kind, {"train": texts}).sha256 == whole.sha256
        patch.setattr(encoding, "SHARD_BYTES", size)
        parts = make_store(folder / "parts", kind, {"train": texts})
    assert ids_of(parts) == ids_of(whole)
    assert token_starts(parts, "train") == token_starts(whole, "train")
    assert parts.split("train").ids.dtype == whole.split("train").ids.dtype
    assert len(parts.manifest["splits"]["train"]["shards"]) >= min(len("".join(map("".join, texts))) // 99, 2)


def test_blocks_are_whole_lines_and_all_of_the_text(tmp_path: Path, small_shards: None) -> None:
    corpus = make_corpus(tmp_path / "tiny", DOCUMENTS)
    found = list(blocks(corpus.folder / "train.txt"))
    assert len(found) > 4
    assert [line for block in found for line in lines_of(block)] == [f"{line}\n" for line in LINES]
    assert all(len(block) > 2_000 for block in found[:-1])
    assert all(sum(len(line.encode()) for line in lines_of(block, 300)) < 350 for block in found)


def test_the_hash_of_a_store_of_several_shards_is_that_of_earlier_versions(tmp_path: Path, small_shards: None) -> None:
    config = TokenizerConfig(file=HERE / "lmtrain-checkpoint-1/tokenizer.json")  # a part of the store
    store = tokenized(make_corpus(tmp_path / "tiny", DOCUMENTS), config)
    assert len(store.manifest["splits"]["train"]["shards"]) == 5
    assert store.sha256 == "e7d26fe08d758c2276888e037872b22c742eaabf0f8abafde96d811ef9665bb6"


def test_rare_words_are_dropped_where_there_are_too_many(
    tmp_path: Path, small_shards: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokenizer, "MOST_WORDS", 60)
    store = make_store(tmp_path, "word", DOCUMENTS)
    assert store.tokenizer.vocab_size < 150
    assert all(store.tokenizer.knows(word) for word in ("line", "says", "times", "é", "0", "6"))


def test_merges_of_a_large_text_are_learned_from_a_part(
    tmp_path: Path, small_shards: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokenizing, "BPE_BYTES", 1_000)
    notes: list[str] = []
    corpus = make_corpus(tmp_path / "tiny", DOCUMENTS)
    store = tokenized(corpus, CONFIGS["bpe"], notes.append)
    assert any("learned from" in note and "of the text" in note for note in notes)
    text = store.tokenizer.decode([index for index in ids_of(store) if index != store.tokenizer.eos_id])
    assert text == "".join(f"{line}\n" for line in LINES)


GROWTH = """
import sys
from pathlib import Path
from lmtrain.data import encoding, tokenizer, tokenizing
from lmtrain.data.corpus import download
from lmtrain.config.schema import DataConfig, TokenizerConfig

encoding.SHARD_BYTES = 1 << 20
data = DataConfig(source=sys.argv[1] + "/text", dir=Path(sys.argv[1], "data"))
corpus = download(data)
tokenizing.open_store = lambda *_: None
tokenizing.tokenize(corpus, TokenizerConfig(kind="word"), data.dir, note=lambda _: None, progress=False)
print(next(line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM")))
"""


def peak(folder: Path, megabytes: int) -> int:
    """The most memory that a process takes which makes a corpus, cutting a split off, and a store of so much text."""
    (folder / "text").mkdir(parents=True)
    line = "some words of a line that come again and again\n"
    (folder / "text" / "train.txt").write_text(line * ((megabytes << 20) // len(line)))
    command = [sys.executable, "-c", GROWTH, str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    shutil.rmtree(folder)
    return int(done.stdout) << 10


def test_memory_does_not_grow_with_the_text(tmp_path: Path) -> None:
    """The text grows by 10 MiB, its ids by 4."""
    small, large = peak(tmp_path / "small", 2), peak(tmp_path / "large", 12)
    assert large - small < 3 << 20
