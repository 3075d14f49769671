"""A file of text as a split: the same as in a corpus with that file."""

import gzip
import json
from pathlib import Path

import pytest

from lmtrain.config.schema import DataConfig, TokenizerConfig
from lmtrain.data import shards
from lmtrain.data.corpus import download
from lmtrain.data.prepare import text_split
from lmtrain.data.tokenizing import tokenize
from lmtrain.data.tokens import Split, TokenStore
from lmtrain.errors import LmtrainError
from tests.data.helpers import KINDS

TRAIN = [f"line {number} says {number % 7} times é" for number in range(60)]
VALID = ["\ufeff of  a line 3\r", "", "\u2028 é never seen <eos> <unk>", *TRAIN[::3], "the last, without an end"]


def write(path: Path, lines: list[str], *, last_end: bool = False) -> Path:
    """Lines in the form that the name asks for; the last one without its line end."""
    text = "\n".join(lines) + "\n" * last_end
    if path.suffix == ".jsonl":
        text = "".join(json.dumps({"body": f"{line}\nmore"}) + "\n" for line in lines)
    path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())
    return path


def make(folder: Path, kind: str) -> TokenStore:
    data = DataConfig(source=str(folder), dir=folder.parent / "data", text_column="body")
    corpus = download(data, note=lambda message: None, progress=False)
    config = TokenizerConfig.model_validate({"kind": kind, "vocab_size": 280 if kind == "bpe" else None})
    return tokenize([corpus], config, data.dir, note=lambda message: None, progress=False)


def content(split: Split) -> tuple[list[int], int, int, int, int]:
    return split.ids[:].tolist(), split.tokens, split.words, split.bytes, split.replaced


@pytest.mark.parametrize("small", [False, True], ids=["one shard", "several shards"])
@pytest.mark.parametrize("name", ["valid.txt", "valid.txt.gz", "valid.jsonl"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_file_is_the_split_that_a_corpus_makes_of_it(
    kind: str, name: str, small: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "corpus").mkdir()
    write(tmp_path / "corpus/train.txt", TRAIN, last_end=True)
    path = write(tmp_path / "corpus" / name, VALID)
    if small:
        monkeypatch.setattr(shards, "SHARD_BYTES", 100)
    store = make(tmp_path / "corpus", kind)
    split = text_split(path, store.tokenizer, "body", progress=False)
    assert content(split) == content(store.split("valid"))
    known = {word for line in TRAIN for word in f"{line} more".split()} | {"<unk>"}
    unknown = sum(word not in known for line in VALID for word in line.removeprefix("\ufeff").split())
    if kind != "word" or name == "valid.txt":
        assert split.replaced == (unknown if kind == "word" else 0)
    assert len(split.ids.parts) == (len(store.split("valid").ids.parts) if small else 1)
    assert (len(split.ids.parts) > 3) == small


REJECTED = {
    "nothing.txt": (None, "nothing.txt is no file of text: name an existing one that ends in one of .txt, "),
    "folder": (None, "folder is no file of text"),
    "picture.png": (b"\x89PNG", "picture.png is no file of text"),
    "empty.txt": (b"", "empty.txt has no words: give it some text"),
    "blank.txt": (b" \n\t\n", "blank.txt has no words: give it some text"),
    "latin.txt": (b"caf\xe9\n", "latin.txt is not UTF-8 text .byte 3."),
    "broken.txt.gz": (b"\x1f\x8b\x08\x00", "broken.txt.gz is damaged"),
    "other.jsonl": (b'{"text": "a"}\n', "has no column 'body'"),
    "lines.jsonl": (b"a\n", "is not JSON"),
}


@pytest.mark.parametrize("name", REJECTED)
def test_other_files_are_rejected_by_name(name: str, tmp_path: Path, store: TokenStore) -> None:
    (tmp_path / "folder").mkdir()
    written, message = REJECTED[name]
    if written is not None:
        (tmp_path / name).write_bytes(written)
    with pytest.raises(LmtrainError, match=message):
        text_split(tmp_path / name, store.tokenizer, "body", progress=False)
