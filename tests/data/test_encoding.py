"""Encoding in batches: their size changes no token, and bounds the memory."""

import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lmtrain.data import tokenizing
from lmtrain.data.tokenizer import Tokenizer
from lmtrain.data.tokenizer_file import Kind
from lmtrain.data.tokenizing import tokenize
from tests.data.helpers import CONFIGS, KINDS, Documents, corpus_of, make_store

LINES = [f"line {number} says {number % 7} times é" for number in range(400)]
DOCUMENTS: Documents = {"train": [part.tolist() for part in np.array_split(np.array(LINES), 4)], "valid": [["line 3"]]}


@settings(max_examples=60)
@given(
    texts=st.lists(st.lists(st.text("ab é\t<eos>"), min_size=1), min_size=1),
    lines=st.integers(1, 5),
    kind=st.sampled_from(KINDS),
)
def test_the_size_of_batches_changes_no_token(
    texts: list[list[str]], lines: int, kind: Kind, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("store")
    whole = make_store(folder / "whole", kind, {"train": texts})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tokenizing, "_BATCH", lines)
        assert make_store(folder / "batches", kind, {"train": texts}).sha256 == whole.sha256


def test_merges_of_a_large_text_are_learned_from_a_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, notes: list[str]
) -> None:
    monkeypatch.setattr(tokenizing, "BPE_BYTES", 1_000)
    corpus = corpus_of(tmp_path / "tiny", DOCUMENTS)
    store = tokenize(corpus, CONFIGS["bpe"])
    assert notes == ["training a bpe tokenizer of up to 280 entries on one line in 10 of tiny"]
    assert store.tokenizer.sha256 == Tokenizer.train(LINES[::10], CONFIGS["bpe"]).sha256
    assert tokenize(corpus, CONFIGS["word"]).split("train").replaced == 0, "words are counted in all of it"
    ids = store.split("train").ids
    text = store.tokenizer.decode(ids[ids != store.tokenizer.eos_id].tolist())
    assert text == "".join(f"{line}\n" for line in LINES)


GROWTH = """
import sys
from pathlib import Path
from lmtrain.data import tokenizing
from lmtrain.data.corpus import make_corpus
from lmtrain.config.schema import DataConfig, TokenizerConfig

data = DataConfig(source=sys.argv[1] + "/text", dir=Path(sys.argv[1], "data"))
corpus = make_corpus(data)
tokenizing.existing = tokenizing.open_store = lambda *_: None
tokenizing.tokenize(corpus, TokenizerConfig(kind="word"))
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
