"""A file of text as a split: the same as in a corpus with that file."""

import gzip
import json
import tempfile
from pathlib import Path

import pytest

from lmtrain.config.schema import DataConfig
from lmtrain.data import tokenizing
from lmtrain.data.corpus import make_corpus
from lmtrain.data.local import read_lines, text_lines
from lmtrain.data.tokenizing import text_split, tokenize
from lmtrain.data.tokens import Split, TokenStore
from lmtrain.errors import LmtrainError
from tests.data.helpers import CONFIGS, KINDS, write

TRAIN = [f"line {number} says {number % 7} times é" for number in range(60)]
VALID = ["\ufeff of  a line 3\r", "", "\u2028 é never seen <eos> <unk>", *TRAIN[::3], "the last, without an end"]


def content(split: Split) -> tuple[list[int], int, int, int, int]:
    return split.ids.tolist(), split.tokens, split.words, split.bytes, split.replaced


@pytest.mark.parametrize("name", ["valid.txt.gz", "valid.jsonl"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_file_is_the_split_that_a_corpus_makes_of_it(
    kind: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokenizing, "_BATCH", 10)
    source = tmp_path / "corpus"
    source.mkdir()
    write(source / "train.txt", "".join(f"{line}\n" for line in TRAIN))
    if name == "valid.jsonl":
        path = write(source / name, "".join(json.dumps({"body": f"{line}\nmore"}) + "\n" for line in VALID))
    else:
        path = write(source / name, gzip.compress("\n".join(VALID).encode()))
    store = tokenize(make_corpus(DataConfig(source=str(source), dir=tmp_path, text_column="body")), CONFIGS[kind])
    split = text_split(read_lines([path], "body"), store.tokenizer, label=str(path))
    assert content(split) == content(store.split("valid"))
    if (kind, name) == ("word", "valid.txt.gz"):
        known = {word for line in TRAIN for word in line.split()} | {"<unk>"}
        words = [word for line in VALID for word in line.removeprefix("\ufeff").split()]
        assert split.replaced == sum(word not in known for word in words)


def test_an_unusable_temporary_folder_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, store: TokenStore
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "gone"))
    with pytest.raises(LmtrainError, match=f"can't write {tmp_path}/gone: No such file or directory"):
        text_split(text_lines("a"), store.tokenizer, label="text")
