"""Text to ids and back: as tokenizer.json itself encodes, without loss, and never to a special token."""

import io
import os
import subprocess
import sys

import pytest
import tokenizers
from hypothesis import example, given
from hypothesis import strategies as st

from lmtrain.config.schema import TokenizerConfig
from lmtrain.data.tokenizer import Tokenizer
from lmtrain.data.tokenizer_file import Kind
from lmtrain.errors import LmtrainError
from tests.data.helpers import KINDS, TRAINED

REFERENCE = {kind: tokenizers.Tokenizer.from_str(TRAINED[kind]._content.decode()) for kind in KINDS}

TEXT = st.text() | st.lists(
    st.sampled_from(["<eos>", "<unk>", "<|endoftext|>", " ", "\n", "\r", "the", "\x00", "é"])
).map("".join)


def test_word_vocabulary_is_ordered_by_frequency_then_alphabet() -> None:
    trained = Tokenizer.train(["b a b", "c a <unk> <eos> d"], TokenizerConfig(kind="word"))
    assert [trained.token(index) for index in range(trained.vocab_size)] == ["<unk>", "<eos>", "a", "b", "c", "d"]


def test_word_vocabulary_is_cut_to_the_most_frequent() -> None:
    trained = Tokenizer.train(["b a b", "c a b"], TokenizerConfig(kind="word", vocab_size=4))
    assert trained.vocab_size == 4
    assert trained.encode_lines(["a b c\n"]) == [[3, 2, trained.unk_id, trained.eos_id]]


def test_word_ids_of_literal_special_words() -> None:
    trained = Tokenizer.train(["the <unk>"], TokenizerConfig(kind="word"))
    unk, eos = trained.unk_id, trained.eos_id
    assert trained.encode("<unk> <eos> the<eos>\n<eos>") == [unk, unk, unk, eos, unk]


def test_known_words_are_those_of_a_word_vocabulary() -> None:
    trained = Tokenizer.train(["the cat"], TokenizerConfig(kind="word"))
    assert [word for word in ("the", "<unk>", "<eos>", "the cat", "dog", "") if trained.knows(word)] == ["the", "<unk>"]
    assert not Tokenizer.train(["the cat"], TokenizerConfig(kind="byte")).knows("t")


def test_word_lines_end_at_newlines_only() -> None:
    trained = Tokenizer.train(["a b"], TokenizerConfig(kind="word"))
    assert trained.encode("a\x0bb\r\x85\u2028a\n\nb") == [2, 3, 2, 1, 1, 3]
    assert trained.decode([2, 3, 1, 1, 3, 0, 1]) == "a b\n\nb <unk>\n"


def test_word_splits_at_every_character_where_str_split_does() -> None:
    trained = Tokenizer.train(["a b"], TokenizerConfig(kind="word"))
    points = [code for code in range(0x110000) if code < 0x3100 or chr(code).isspace()]
    text = " ".join(f"a{chr(code)}b" for code in points if code != ord("\n"))
    expected = [{"a": 2, "b": 3}.get(word, 0) for word in text.split()]
    assert trained.encode(text) == expected
    assert tokenizers.Tokenizer.from_str(trained._content.decode()).encode(text).ids == expected


@given(TEXT)
@example("a <eos> <eos>\nb x<eos> <eos>y\n\n<eos>\n")
def test_word_encoding_equals_tokenizer_json(text: str) -> None:
    assert TRAINED["word"].encode(text) == REFERENCE["word"].encode(text).ids


@given(TEXT)
def test_bpe_and_byte_encode_each_line_as_tokenizer_json_does(text: str) -> None:
    for kind in ("bpe", "byte"):
        expected = [index for line in io.StringIO(text) for index in REFERENCE[kind].encode(line).ids]
        assert TRAINED[kind].encode(text) == expected


@given(TEXT)
@example("<eos>")
@example("no line end\r\n<|endoftext|>\x00\x7f")
def test_bpe_and_byte_round_trip_any_text_without_the_special_token(text: str) -> None:
    for kind in ("bpe", "byte"):
        ids = TRAINED[kind].encode(text)
        assert TRAINED[kind].decode(ids) == text
        assert TRAINED[kind].eos_id not in ids


def test_bpe_vocabulary_is_all_bytes_eos_and_merges() -> None:
    bpe = TRAINED["bpe"]
    assert bpe.vocab_size == 280
    assert len(Tokenizer.train(["ab"], TokenizerConfig(kind="bpe", vocab_size=300)).encode("ab")) == 2
    assert Tokenizer.train(["ab", "ab"], TokenizerConfig(kind="bpe", vocab_size=300)).vocab_size < 300
    assert len(bpe.encode("the cat sat")) < len("the cat sat")


def test_a_corpus_full_of_the_special_word_never_makes_it_a_merge() -> None:
    bpe = Tokenizer.train(["x<eos> <eos>y <eos>"] * 50, TokenizerConfig(kind="bpe", vocab_size=400))
    ids = bpe.encode("<eos> <eos>")
    assert bpe.eos_id not in ids
    assert bpe.decode(ids) == "<eos> <eos>"


@pytest.mark.parametrize("kind", KINDS)
def test_tokens_are_printable(kind: Kind) -> None:
    trained = TRAINED[kind]
    assert trained.token(trained.eos_id) == "<eos>"
    assert all(trained.token(index).isprintable() for index in range(trained.vocab_size))


def test_byte_tokens_are_escaped() -> None:
    assert [TRAINED["byte"].token(byte + 1) for byte in b"a\n\xff "] == ["a", "\\n", "\\xff", " "]


@pytest.mark.parametrize("kind", KINDS)
def test_lone_surrogates_are_rejected(kind: Kind) -> None:
    with pytest.raises(LmtrainError, match="lone surrogate at character 2"):
        TRAINED[kind].encode("ab\ud800")


def test_training_is_repeatable_at_any_number_of_threads() -> None:
    code = (
        "from lmtrain.data.tokenizer import Tokenizer; from tests.data.helpers import CONFIGS, LINES;"
        "print(Tokenizer.train(LINES, CONFIGS['bpe']).sha256)"
    )
    environment = os.environ | {"RAYON_NUM_THREADS": "1", "PYTHONHASHSEED": "7"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == TRAINED["bpe"].sha256
