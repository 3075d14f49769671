"""The store that a configuration gives: the size of its vocabulary, and what is said of unknown words."""

from pathlib import Path
from typing import Any

import pytest

from lmtrain.config.schema import TokenizerConfig
from lmtrain.data.corpus import Corpus
from lmtrain.data.tokenizing import tokenize, with_vocab_size
from tests.data.helpers import CONFIGS, corpus_of

DOCUMENTS = {"train": [["The river, wide, was there."] * 60], "valid": [["a"]]}


@pytest.mark.parametrize(
    ("text_bytes", "size"),
    [(1, 512), (200_000, 1_024), (700_000, 4_096), (3_400_000, 16_384), (30_000_000, 16_384), (10**10, 16_384)],
)
def test_the_size_of_a_bpe_vocabulary_fits_the_text(text_bytes: int, size: int) -> None:
    corpus = Corpus(Path(), {"splits": {"train": {"bytes": text_bytes}}})
    assert with_vocab_size(TokenizerConfig(), corpus).vocab_size == size


@pytest.mark.parametrize(
    ("fields", "size"),
    [({}, 512), ({"vocab_size": 280}, 280), ({"kind": "word"}, None), ({"kind": "byte"}, None)],
)
def test_a_store_is_found_by_the_configuration_and_by_the_complete_one(
    tmp_path: Path, fields: dict[str, Any], size: int | None, notes: list[str]
) -> None:
    corpus = corpus_of(tmp_path / "tiny", DOCUMENTS)
    config = TokenizerConfig(**fields)
    complete = with_vocab_size(config, corpus)
    store = tokenize(corpus, config)
    assert (store.manifest["kind"], store.manifest["vocab_limit"]) == (complete.kind, complete.vocab_size)
    assert complete.vocab_size == size
    notes.clear()
    assert tokenize(corpus, complete).folder == store.folder
    assert notes == []


def test_a_tokenizer_that_is_given_has_a_kind_of_its_own(tmp_path: Path) -> None:
    corpus = corpus_of(tmp_path / "tiny", DOCUMENTS)
    config = TokenizerConfig(file=tokenize(corpus, CONFIGS["byte"]).folder / "tokenizer.json")
    assert with_vocab_size(config, corpus) == config
    store = tokenize(corpus, config)
    assert store.tokenizer.kind == store.manifest["kind"] == "byte"


def test_unknown_words_are_named_for_each_split(tmp_path: Path, notes: list[str]) -> None:
    documents = {"train": [["a a a b <unk> c , ."]], "valid": [["a a new <unk>"]], "test": [["a a"]]}
    tokenize(corpus_of(tmp_path / "tiny", documents), TokenizerConfig(kind="word", vocab_size=4))
    assert notes[-1] == (
        "the tokenizer does not know all words: <unk> replaces 33.3% (train), 20% (valid), 0% (test) of the tokens"
    )
