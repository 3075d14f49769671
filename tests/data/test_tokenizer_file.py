"""tokenizer.json: what is saved can be loaded, and nothing that is damaged."""

import hashlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers

from lmtrain.data import tokenizer_file
from lmtrain.data.tokenizer import Tokenizer
from lmtrain.data.tokenizer_file import Kind
from lmtrain.errors import LmtrainError
from tests.data.helpers import CONFIGS, KINDS, LINES, TRAINED
from tests.data.published import tokenizer_of


@pytest.mark.parametrize("kind", KINDS)
def test_save_and_load_give_the_same_tokenizer(kind: Kind, tmp_path: Path) -> None:
    TRAINED[kind].save(tmp_path / "tokenizer.json")
    loaded = Tokenizer.load(tmp_path / "tokenizer.json")
    assert (loaded.kind, loaded.sha256, loaded.vocab_size) == (kind, TRAINED[kind].sha256, TRAINED[kind].vocab_size)
    assert loaded.encode_lines(LINES) == TRAINED[kind].encode_lines(LINES)


def test_a_bpe_without_merges_stays_a_bpe(tmp_path: Path) -> None:
    Tokenizer.train(["abc"], CONFIGS["bpe"]).save(tmp_path / "tokenizer.json")
    assert Tokenizer.load(tmp_path / "tokenizer.json").kind == "bpe"


@pytest.mark.parametrize("kind", KINDS)
def test_the_file_is_the_library_s_with_a_field_of_ours(kind: Kind) -> None:
    odd = ['a\x7f\x01"\\', "é😀", "\ud7ff\ufffe"]
    trained = Tokenizer.train([" ".join([*LINES, *odd])], CONFIGS[kind])
    document = json.loads(trained._content)
    field = {"kind": kind, "eos": "<eos>", "unk": "<unk>" if kind == "word" else None}
    assert document["model"].pop("lmtrain") == field
    assert json.loads(tokenizers.Tokenizer.from_str(trained._content.decode()).to_str()) == document
    assert document["added_tokens"] == []


@pytest.mark.parametrize("kind", KINDS)
def test_a_file_from_before_there_was_the_field_is_read(kind: Kind, tmp_path: Path) -> None:
    document = json.loads(TRAINED[kind]._content)
    del document["model"]["lmtrain"]
    content = json.dumps(document)
    loaded = tokenizer_of(tmp_path, content)
    assert (loaded.kind, loaded.sha256) == (kind, hashlib.sha256(content.encode()).hexdigest())
    assert loaded.encode_lines(LINES) == TRAINED[kind].encode_lines(LINES)


@pytest.mark.parametrize("pre_tokenizer", [pre_tokenizers.Whitespace(), pre_tokenizers.WhitespaceSplit()])
def test_words_of_another_program_are_encoded_by_its_own_rules(pre_tokenizer: Any, tmp_path: Path) -> None:
    """Its vocabulary begins as lmtrain's does, and no token is an added one."""
    vocabulary = {"<unk>": 0, "<eos>": 1, "hello": 2, ",": 3, "hello,": 4}
    backend = tokenizers.Tokenizer(models.WordLevel(vocabulary, "<unk>"))
    backend.pre_tokenizer = pre_tokenizer
    backend.normalizer = normalizers.Lowercase()
    backend.save(str(tmp_path / "tokenizer.json"))
    given = Tokenizer.load(tmp_path / "tokenizer.json")
    assert given.kind == "file"
    assert given.encode("Hello, hello") == backend.encode("Hello, hello").ids


@pytest.mark.parametrize("unknown", [None, "</s>"])
def test_a_vocabulary_may_lack_letters_and_an_unknown_token_of_its_own(tmp_path: Path, unknown: str | None) -> None:
    model = models.BPE({"</s>": 0, "b": 1}, [], unk_token=unknown)
    tokenizers.Tokenizer(model).save(str(tmp_path / "tokenizer.json"))
    given = Tokenizer.load(tmp_path / "tokenizer.json")
    assert (given.encode("ab"), given.unk_id, given.adds_space) == ([1], None, False)


def _damaged() -> Iterator[tuple[str, Kind, Any]]:
    """Documents that are JSON but wrong: a name, the kind, and a function that changes a sound document."""
    yield "not an object", "word", lambda d: [d]
    yield "other model", "bpe", lambda d: _model(d, {"type": "Unigram"})
    yield "other kind", "word", lambda d: _field(d, {"kind": "sentence"})
    yield "an end-of-text token that it lacks", "bpe", lambda d: _field(d, {"eos": "</s>"})
    yield "words without an unknown token", "word", lambda d: _field(d, {"unk": None})
    yield "an id that no model can have", "bpe", lambda d: _vocab(d, {"new": 1 << 24})
    yield "bytes swapped", "byte", lambda d: _vocab(d, {"a": d["model"]["vocab"]["b"], "b": d["model"]["vocab"]["a"]})
    yield "a surrogate", "word", lambda d: _vocab(d, {"\ud800": len(d["model"]["vocab"])})
    yield "a merge of unknown tokens", "bpe", lambda d: _model(d, {"merges": [["Q", "Zx"]]})


def _model(document: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    return document | {"model": document["model"] | changes}


def _field(document: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    return _model(document, {"lmtrain": document["model"]["lmtrain"] | changes})


def _vocab(document: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    return _model(document, {"vocab": document["model"]["vocab"] | changes})


@pytest.mark.parametrize(("kind", "spoil"), [pytest.param(k, spoil, id=name) for name, k, spoil in _damaged()])
def test_load_rejects_what_cannot_be_a_tokenizer(kind: Kind, spoil: Any, tmp_path: Path) -> None:
    document = spoil(json.loads(TRAINED[kind]._content))
    with pytest.raises(LmtrainError, match=r"damaged|too large"):
        tokenizer_of(tmp_path, document)


def test_a_decoder_that_fails_is_an_error(tmp_path: Path) -> None:
    backend = tokenizers.Tokenizer(models.BPE({"</s>": 0, "b": 1, "a": 2}, []))
    backend.decoder = decoders.Strip("a", 1, 1)
    backend.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(LmtrainError, match="the tokenizer can't decode its ids"):
        Tokenizer.load(tmp_path / "tokenizer.json").decode([2])


def test_load_rejects_missing_files_folders_and_pipes(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "none.json", tmp_path, tmp_path / "pipe"):
        with pytest.raises(LmtrainError, match=f"tokenizer {path} is not a file: give the path of a tokenizer.json"):
            Tokenizer.load(path)


def test_load_rejects_a_file_above_the_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    TRAINED["word"].save(tmp_path / "tokenizer.json")
    monkeypatch.setattr(tokenizer_file, "MAX_BYTES", len(TRAINED["word"]._content) - 1)
    with pytest.raises(LmtrainError, match="larger than"):
        Tokenizer.load(tmp_path / "tokenizer.json")
    with pytest.raises(LmtrainError, match=r"too large: set tokenizer\.vocab_size"):
        Tokenizer.train(LINES, CONFIGS["word"])
