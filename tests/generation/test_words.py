"""Words as token ids: known ones, several-token ones, unknown ones."""

import pytest

from lmtrain.config.schema import TokenizerConfig
from lmtrain.data.tokenizer import Tokenizer
from lmtrain.errors import LmtrainError
from lmtrain.generation.words import banned_ids, bias_of_ids, unseen_words

WORD = Tokenizer.train(["a b = c"], TokenizerConfig())
BPE = Tokenizer.train(["the cat the cat the cat"], TokenizerConfig(kind="bpe", vocab_size=270))
BYTE = Tokenizer.train([], TokenizerConfig(kind="byte"))


def test_unseen_words_are_named() -> None:
    assert unseen_words(WORD, "a xyzzy <unk> b <eos> xyzzy") == ["xyzzy", "<eos>"]
    assert unseen_words(BYTE, "anything") == []


def test_unknown_is_banned_unless_allowed() -> None:
    assert banned_ids(WORD, [], False) == {WORD.unk_id}
    assert banned_ids(WORD, ["a"], True) == {WORD.encode("a")[0]}
    assert banned_ids(WORD, ["<unk>", "\n"], True) == {WORD.unk_id, WORD.eos_id}
    assert banned_ids(BYTE, ["x"], False) == set(BYTE.encode("x"))


def test_a_bpe_word_is_its_token_with_and_without_the_space() -> None:
    (spaced,) = BPE.encode(" cat")
    assert len(BPE.encode("cat")) == 1
    assert banned_ids(BPE, ["cat"], False) == {spaced, *BPE.encode("cat")}


def test_of_two_numbers_for_a_word_the_later_counts() -> None:
    assert bias_of_ids(WORD, [("a", 1.0), ("=", -2.0), ("a", 0.5)]) == {
        WORD.encode("a")[0]: 0.5,
        WORD.encode("=")[0]: -2.0,
    }


@pytest.mark.parametrize(
    ("tokenizer", "word", "message"),
    [
        (WORD, "xyzzy", "not in the vocabulary"),
        (WORD, "a b", "is 2 words"),
        (WORD, " ", "is 0 words"),
        (WORD, "", "is empty"),
        (BPE, "", "is empty"),
        (BYTE, "", "is empty"),
        (BPE, "zebra", "tokens of this bpe vocabulary"),
        (BYTE, "xy", "is 2 tokens of this byte vocabulary"),
        (BYTE, "é", "is 2 tokens"),
    ],
)
def test_what_is_no_token_is_refused(tokenizer: Tokenizer, word: str, message: str) -> None:
    with pytest.raises(LmtrainError, match=message):
        banned_ids(tokenizer, [word], False)
    with pytest.raises(LmtrainError, match=message):
        bias_of_ids(tokenizer, [(word, 1.0)])


@pytest.mark.parametrize("number", [float("nan"), float("inf"), float("-inf")])
def test_a_bias_is_a_finite_number(number: float) -> None:
    with pytest.raises(LmtrainError, match="no finite number"):
        bias_of_ids(WORD, [("a", number)])
