"""tokenizer.json: what is saved can be loaded, and nothing else."""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tokenizers

from lmtrain.data import tokenizer_file
from lmtrain.data.tokenizer import Tokenizer
from lmtrain.data.tokenizer_file import Kind
from lmtrain.errors import LmtrainError
from tests.data.trained import CONFIGS, KINDS, LINES, TRAINED


@pytest.mark.parametrize("kind", KINDS)
def test_save_and_load_give_the_same_tokenizer(kind: Kind, tmp_path: Path) -> None:
    TRAINED[kind].save(tmp_path / "tokenizer.json")
    loaded = Tokenizer.load(tmp_path / "tokenizer.json")
    assert (loaded.kind, loaded.sha256, loaded.vocab_size) == (kind, TRAINED[kind].sha256, TRAINED[kind].vocab_size)
    assert loaded.encode_pieces(LINES) == TRAINED[kind].encode_pieces(LINES)


def test_a_bpe_without_merges_stays_a_bpe(tmp_path: Path) -> None:
    Tokenizer.train(["abc"], CONFIGS["bpe"]).save(tmp_path / "tokenizer.json")
    assert Tokenizer.load(tmp_path / "tokenizer.json").kind == "bpe"


@pytest.mark.parametrize("kind", KINDS)
def test_the_file_is_what_the_library_writes(kind: Kind) -> None:
    odd = ['a\x7f\x01"\\', "é😀", "\ud7ff\ufffe"]
    trained = Tokenizer.train([" ".join([*LINES, *odd])], CONFIGS[kind])
    assert tokenizers.Tokenizer.from_str(trained._content.decode()).to_str() == trained._content.decode()


@pytest.mark.parametrize("kind", KINDS)
def test_a_file_with_what_a_later_library_adds_is_read(kind: Kind, tmp_path: Path) -> None:
    def add(value: Any) -> Any:
        if isinstance(value, list):
            return [add(item) for item in value]
        return {**{key: add(item) for key, item in value.items()}, "new": None} if isinstance(value, dict) else value

    document = json.loads(TRAINED[kind]._content)
    vocabulary = document["model"]["vocab"]
    document = add(document)
    document["model"]["vocab"] = vocabulary
    (tmp_path / "tokenizer.json").write_text(json.dumps(document))
    loaded = Tokenizer.load(tmp_path / "tokenizer.json")
    assert loaded.kind == kind
    assert loaded.encode_pieces(LINES) == TRAINED[kind].encode_pieces(LINES)


def _damaged() -> Iterator[tuple[str, Kind, Any]]:
    """Documents that are JSON but wrong: a name, the kind, and a function that changes a sound document."""
    yield "not an object", "word", lambda d: [d]
    yield "no model", "word", lambda d: d | {"model": None}
    yield "other model", "bpe", lambda d: d | {"model": d["model"] | {"type": "Unigram"}}
    yield "other pre-tokenizer", "bpe", lambda d: d | {"pre_tokenizer": {"type": "Whitespace"}}
    yield (
        "stalling expression",
        "word",
        lambda d: d | {"normalizer": {"type": "Replace", "pattern": {"Regex": "(a+)+$"}}},
    )
    yield "another option", "bpe", lambda d: d | {"pre_tokenizer": d["pre_tokenizer"] | {"add_prefix_space": True}}
    yield "added tokens", "byte", lambda d: d | {"added_tokens": [{"id": 0, "content": "a"}]}
    yield "a word twice", "word", lambda d: _vocab(d, {"new": 2})
    yield "a gap in the ids", "word", lambda d: _vocab(d, {"new": 10**6})
    yield "a negative id", "word", lambda d: _vocab(d, {"new": -1})
    yield "an id that is no integer", "word", lambda d: _vocab(d, {"the": 2.0})
    yield "specials swapped", "word", lambda d: _vocab(d, {"<unk>": 1, "<eos>": 0})
    yield "a word with a space", "word", lambda d: _vocab(d, {"two words": len(d["model"]["vocab"])})
    yield "a surrogate", "word", lambda d: _vocab(d, {"\ud800": len(d["model"]["vocab"])})
    yield "a symbol of no byte", "bpe", lambda d: _vocab(d, {"東": len(d["model"]["vocab"])})
    yield "an empty token", "bpe", lambda d: _vocab(d, {"": len(d["model"]["vocab"])})
    yield "bytes swapped", "byte", lambda d: _vocab(d, {"a": d["model"]["vocab"]["b"], "b": d["model"]["vocab"]["a"]})
    yield "no vocabulary", "byte", lambda d: d | {"model": {k: v for k, v in d["model"].items() if k != "vocab"}}
    yield "a byte with merges", "byte", lambda d: _merges(d, [["a", "b"]])
    yield "a merge of unknown tokens", "bpe", lambda d: _merges(d, [["Q", "Zx"]])
    yield "a merge into nothing", "bpe", lambda d: _merges(d, [["Q", "Z"]])
    size = TRAINED["bpe"].vocab_size
    yield "a merge into <eos>", "bpe", lambda d: _merges(_vocab(d, {"<e": size, "os>": size + 1}), [["<e", "os>"]])
    yield "a merge of three", "bpe", lambda d: _merges(d, [["t", "h", "e"]])
    yield "a merge of numbers", "bpe", lambda d: _merges(d, [[1, 2]])
    yield "merges of lists", "bpe", lambda d: _merges(d, [[["t"], "h"]])
    yield "merges that are a word", "bpe", lambda d: d | {"model": d["model"] | {"merges": "th"}}


def _vocab(document: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    return document | {"model": document["model"] | {"vocab": document["model"]["vocab"] | changes}}


def _merges(document: dict[str, Any], more: list[Any]) -> dict[str, Any]:
    return document | {"model": document["model"] | {"merges": document["model"]["merges"] + more}}


@pytest.mark.parametrize(("kind", "spoil"), [pytest.param(k, spoil, id=name) for name, k, spoil in _damaged()])
def test_load_rejects_what_train_never_writes(kind: Kind, spoil: Any, tmp_path: Path) -> None:
    document = spoil(json.loads(TRAINED[kind]._content))
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(document))
    with pytest.raises(LmtrainError, match=r"not one that lmtrain wrote|damaged"):
        Tokenizer.load(path)


@pytest.mark.parametrize("content", [b"", b"\xff", b"null", b"[" * 100_000, b'{"model": {}}', b"1" * 5_000])
def test_load_rejects_other_files(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_bytes(content)
    with pytest.raises(LmtrainError, match=r"not one that lmtrain wrote|damaged"):
        Tokenizer.load(tmp_path / "tokenizer.json")


def test_load_rejects_missing_files_folders_and_pipes(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "none.json", tmp_path, tmp_path / "pipe"):
        with pytest.raises(LmtrainError, match="does not exist"):
            Tokenizer.load(path)


def test_load_rejects_a_file_above_the_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    TRAINED["word"].save(tmp_path / "tokenizer.json")
    monkeypatch.setattr(tokenizer_file, "MOST_BYTES", len(TRAINED["word"]._content) - 1)
    with pytest.raises(LmtrainError, match="larger than"):
        Tokenizer.load(tmp_path / "tokenizer.json")
    with pytest.raises(LmtrainError, match=r"too large: set tokenizer\.vocab_size"):
        Tokenizer.train(LINES, CONFIGS["word"])
