"""Plain text to spaced-out words: the corpus's own spacing where the vocabulary knows it, and nothing lost."""

import time
import unicodedata

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from lmtrain.data.detokenizer import detokenize
from lmtrain.data.respacing import LONGEST, respace

VOCABULARY = {
    *["<unk>", "@-@", "@,@", "@.@", *",.:;?!()[]\"'$%/=-£°", *"\u2013\u2014\u2026\u2019\u201c\u201d", "..."],
    *["'s", "'t", "n't", "'re", "'ll", "'Brien", "'n'roll", "U.S.", "Mr.", "J.", "R.", "e.g.", "About.com", "B-"],
    *["In", "1950", "the", "well", "known", "ship", "24", "in", "wasn", "was", "did", "big", "It", "is", "He", "The"],
    *["1", "5", "250", "000", "half", "a", "of", "Smiths", "dog", "Tolkien", "rock", "O", "We", "70s", "and", "or"],
    *["C", "Part", "Title", "n", "t", "s", "It", "x"],
}
KNOWN = VOCABULARY.__contains__
SPACED = [
    'In 1950 , the U.S. well @-@ known ship ( 24 in ) wasn \'t " big " .',
    "a half @-@ well @-@ known ship of 1 @,@ 250 @,@ 000 and 5 @.@ 5 % ;",
    "It 's \" the U.S. \" , Mr. <unk> : the Smiths ' dog \u2019 s ... [ e.g. ] — 1 \u2013 5 ? !",
    "= Title =\n\n= = Part = =\nWe <unk> in the U.S. .",
    "O 'Brien was in the <unk> @-@ <unk> of <unk> @,@ 000 $ 1 and £ 5 at 5 ° C",
    "the ' well known ' rock 'n'roll of the ' 70s did n't",
    "About.com is well @-@",
]
SENTENCES = {
    'In 1950, the U.S. well-known ship (24 in) wasn\'t "big".': SPACED[0],
    "It didn't / wasn't": "It did n't / wasn 't",
    "He's in \"Xyzzyville\", Xyzzy's half-Xyzzy": "He 's in \" Xyzzyville \" , Xyzzy 's half @-@ Xyzzy",
    "J.R.R. Tolkien, About.com. and/or": "J.R.R. Tolkien , About.com . and / or",
    "the ship. The big... U.S.? J.R.R..": "the ship . The big ... U.S. ? J.R.R. .",
    "a half- and well-known": "a half - and well @-@ known",
    "known\u00a0ship,\t1,250\r": "known\u00a0ship ,\t1 @,@ 250\r",
    "1,250.5": "1 @,@ 250 @.@ 5",
    "1.x 1,x,big": "1.x 1 , x , big",
}
UNKNOWN = ["Xyzzy-Foobar", "O'Foobar", "Xyzzy", "x_y", "isn't", "12,345", ".50", "J.K.", "@", "two-", "\ufeff", "<eos>"]
"""No part of them is a word."""
WORDS = st.sampled_from(sorted(VOCABULARY))
SIGNS = st.sampled_from(sorted({*"\"'.,-()@<>x1A_/=é²\u0301", "<unk>", "n't", "N'T", "...", "Xy", "s", "R", "\n", " "}))
TEXTS = st.lists(WORDS | SIGNS, max_size=12).map("".join) | st.lists(WORDS | SIGNS).map(" ".join) | st.text()


@pytest.mark.parametrize("spaced", SPACED)
def test_printed_text_comes_back_as_the_same_words(spaced: str) -> None:
    assert detokenize(spaced) != spaced
    assert respace(detokenize(spaced), KNOWN) == spaced


@pytest.mark.parametrize("plain", SENTENCES)
def test_sentences_as_people_write_them(plain: str) -> None:
    assert respace(plain, KNOWN) == SENTENCES[plain]


@given(st.lists(WORDS | st.just("\n")).map(" ".join))
def test_what_is_all_known_stays(text: str) -> None:
    assert respace(text, KNOWN) == text


@pytest.mark.parametrize("word", UNKNOWN)
def test_what_would_be_no_better_apart_stays_whole(word: str) -> None:
    assert respace(f"{word} x", lambda _: False) == f"{word} x"
    assert respace(f"{word} x", {"@-@", "@,@", "@.@", "<unk>"}.__contains__) == f"{word} x"


@example("@,@-@,@")
@given(TEXTS)
def test_only_spaces_and_at_signs_are_added(text: str) -> None:
    def rest(text: str) -> str:
        return "".join(text.split()).replace("@", "")

    respaced = respace(text, KNOWN)
    assert rest(respaced) == rest(text)
    assert respaced.count("@") >= text.count("@")


@given(TEXTS, st.sets(WORDS | SIGNS))
def test_no_letter_or_digit_is_ever_lost(text: str, words: set[str]) -> None:
    def kept(text: str) -> list[str]:
        return [sign for sign in text if unicodedata.category(sign)[0] in "LNM"]

    assert kept(respace(text, words.__contains__)) == kept(text)


@example("xn'tn't", {"n't", "x"})
@example("<unk>n's@", {"<unk>", "'s", "@"})
@example("x'Foo", {"x", "'"})
@given(TEXTS, st.sets(WORDS | SIGNS))
def test_a_second_pass_changes_nothing(text: str, words: set[str]) -> None:
    once = respace(text, words.__contains__)
    assert respace(once, words.__contains__) == once


@given(TEXTS, st.sets(WORDS | SIGNS))
def test_there_are_never_more_unknown_words(text: str, words: set[str]) -> None:
    def unknown(text: str) -> int:
        return sum(word not in words for word in text.split())

    assert unknown(respace(text, words.__contains__)) <= unknown(text)


def test_of_several_ways_the_longest_words_count() -> None:
    assert respace("was-wasn't", {"was", "n't", "wasn", "'t", "@-@"}.__contains__) == "was @-@ wasn 't"
    assert respace("U.S.?", {"U.S.", "U.S", ".", "?", "U", "S"}.__contains__) == "U.S. ?"
    assert respace("aren't", {"are", "n", "'t"}.__contains__) == "aren 't"


def test_long_pieces_are_left_alone_and_cost_no_time() -> None:
    longest = "(" * (LONGEST - 1) + "x"
    assert respace(longest, KNOWN) == " ".join(longest)
    assert respace("(" + longest, KNOWN) == "(" + longest
    start = time.process_time()
    assert respace(f"{'(' * 1_000_000} ship.", KNOWN).endswith("( ship .")
    assert time.process_time() - start < 1
