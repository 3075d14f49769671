"""Which tokenizer a text gets where the configuration leaves it open."""

from pathlib import Path
from typing import Any

import pytest

from lmtrain.config.schema import DataConfig, TokenizerConfig
from lmtrain.data.corpus import make_corpus
from lmtrain.data.tokenizer_choice import beginning, fitting_size, resolve
from lmtrain.data.tokenizing import tokenize
from lmtrain.errors import LmtrainError
from tests.data.helpers import CONFIGS, corpus_of

MARKED = ["The river , wide , was there . "] * 60
"""Lines in which spaces set punctuation apart."""


@pytest.mark.parametrize(
    ("line", "kind"),
    [
        (MARKED[0], "word"),
        ("= Title , one = \nA B.C. , , , , , , , , , , , ,", "word"),
        ("The river, wide, was there.", "bpe"),
        ("The river , wide , was there. Again.", "bpe"),
        ("no marks at all", "bpe"),
        (f"{'word ' * 300}, and", "bpe"),
        ("Текст , в котором , запятые , отдельно .", "word"),
        ("这是一个句子,没有空格.", "bpe"),
    ],
)
def test_the_kind_is_word_where_spaces_set_punctuation_apart(tmp_path: Path, line: str, kind: str) -> None:
    corpus = corpus_of(tmp_path / "tiny", {"train": [[line] * 60], "valid": [["a"]]})
    assert resolve(TokenizerConfig(), corpus).kind == kind


def test_the_built_in_sample_has_words(tmp_path: Path) -> None:
    corpus = make_corpus(DataConfig(dir=tmp_path, sample_tokens=1_000))
    assert resolve(TokenizerConfig(), corpus) == TokenizerConfig(kind="word")


@pytest.mark.parametrize(
    ("text_bytes", "size"),
    [(1, 512), (200_000, 1_024), (700_000, 4_096), (3_400_000, 16_384), (30_000_000, 16_384), (10**10, 16_384)],
)
def test_the_size_of_a_bpe_vocabulary_fits_the_text(text_bytes: int, size: int) -> None:
    assert fitting_size(text_bytes) == size


@pytest.mark.parametrize(
    ("fields", "resolved"),
    [
        ({}, {"kind": "word", "vocab_size": None}),
        ({"vocab_size": 5}, {"kind": "word", "vocab_size": 5}),
        ({"kind": "bpe"}, {"kind": "bpe", "vocab_size": 512}),
        ({"kind": "bpe", "vocab_size": 280}, {"kind": "bpe", "vocab_size": 280}),
        ({"kind": "byte"}, {"kind": "byte", "vocab_size": None}),
    ],
)
def test_a_store_is_made_as_resolved(
    tmp_path: Path, fields: dict[str, Any], resolved: dict[str, Any], notes: list[str]
) -> None:
    corpus = corpus_of(tmp_path / "tiny", {"train": [MARKED], "valid": [["a"]]})
    config, expected = TokenizerConfig(**fields), TokenizerConfig(**resolved)
    assert resolve(config, corpus) == expected
    store = tokenize(corpus, config)
    assert (store.manifest["kind"], store.manifest["vocab_limit"]) == (expected.kind, expected.vocab_size)
    assert resolve(expected, corpus) == expected
    notes.clear()
    assert tokenize(corpus, expected).folder == store.folder
    assert notes == []


def test_a_tokenizer_that_is_given_has_a_kind_of_its_own(tmp_path: Path) -> None:
    corpus = corpus_of(tmp_path / "tiny", {"train": [MARKED], "valid": [["a"]]})
    config = TokenizerConfig(file=tokenize(corpus, CONFIGS["bpe"]).folder / "tokenizer.json")
    assert resolve(config, corpus) == config
    store = tokenize(corpus, config)
    assert store.tokenizer.kind == store.manifest["kind"] == "bpe"


def test_a_size_too_small_for_the_kind_that_was_chosen_is_named(tmp_path: Path) -> None:
    corpus = corpus_of(tmp_path / "tiny", {"train": [["plain text, as it is."] * 60]})
    with pytest.raises(LmtrainError, match=r"vocab_size=100 is too small for the bpe .* or set tokenizer\.kind=word"):
        tokenize(corpus, TokenizerConfig(vocab_size=100))


def test_unknown_words_are_named_for_each_split(tmp_path: Path, notes: list[str]) -> None:
    documents = {"train": [["a a a b <unk> c , ."]], "valid": [["a a new <unk>"]], "test": [["a a"]]}
    tokenize(corpus_of(tmp_path / "tiny", documents), TokenizerConfig(kind="word", vocab_size=4))
    assert notes[-1] == (
        "the tokenizer does not know all words: <unk> replaces 33.3% (train), 20% (valid), 0% (test) of the tokens"
    )


def test_the_beginning_of_a_text_ends_before_a_character_that_is_cut(tmp_path: Path) -> None:
    (tmp_path / "accents.txt").write_text("é" * 10)
    assert beginning(tmp_path / "accents.txt", 5) == "éé"
