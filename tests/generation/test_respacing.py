"""Plain text to WikiText's spaced words: the corpus's own spacing where the vocabulary knows it, and nothing lost."""

import unicodedata

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from lmtrain.generation.spacing import Detokenizer, respace

VOCABULARY = {
    *["<unk>", "@-@", "@,@", "@.@", *",.:;?!()[]\"'$%/=-£°", *"\u2013\u2014\u2026\u2019\u201c\u201d", "..."],
    *["'s", "'t", "'re", "'ll", "'Brien", "'n'roll", "U.S.", "Mr.", "J.", "R.", "J.R.R.", "e.g.", "About.com", "B-"],
    *["In", "1950", "the", "well", "known", "ship", "24", "in", "wasn", "didn", "big", "It", "is", "He", "The", "half"],
    *["1", "5", "250", "000", "a", "of", "Smiths", "dog", "Tolkien", "rock", "O", "We", "70s", "and", "or", ".50"],
    *["C", "Part", "Title", "n", "t", "s", "x"],
}
KNOWN = VOCABULARY.__contains__
SPACED = [
    'In 1950 , the U.S. well @-@ known ship ( 24 in ) wasn \'t " big " .',
    "a half @-@ well @-@ known ship of 1 @,@ 250 @,@ 000 and 5 @.@ 50 % ;",
    "It 's \" the U.S. \" , Mr. <unk> : the Smiths ' dog \u2019 s ... [ e.g. ] — 1 \u2013 5 ? !",
    "= Title =\n\n= = Part = =\nWe <unk> in the U.S. .",
    "O 'Brien was in the <unk> @-@ <unk> of <unk> @,@ 000 $ 1 and £ 5 at 5 ° C , B @-@ C",
    "the ' well known ' rock 'n'roll of the ' 70s didn 't",
]
SENTENCES = {
    "He's in \"Xyzzyville\", Xyzzy's half-Xyzzy": "He 's in \" Xyzzyville \" , Xyzzy 's half @-@ Xyzzy",
    "J.R.R. Tolkien, J.K. Xyzzy, About.com. and/or": "J.R.R. Tolkien , J.K. Xyzzy , About.com . and / or",
    "the ship. The big... U.S.?": "the ship . The big ... U.S. ?",
    "a half- and well-known": "a half - and well @-@ known",
    "known\u00a0ship,\t1,250\r": "known\u00a0ship ,\t1 @,@ 250\r",
    "1,x,5,big": "1 , x , 5 , big",
    "The well-": "The well @-@",
}
WORDS = st.sampled_from(sorted(VOCABULARY))
SIGNS = st.sampled_from(sorted({*"\"'.,-()@<>x1A_/=é²\u0301", "<unk>", "n't", "N'T", "...", "Xy", "s", "R", "\n", " "}))
TEXTS = st.lists(WORDS | SIGNS, max_size=12).map("".join) | st.lists(WORDS | SIGNS).map(" ".join) | st.text()


@pytest.mark.parametrize("spaced", SPACED)
def test_printed_text_becomes_the_same_words_again(spaced: str) -> None:
    assert Detokenizer().feed(spaced) != spaced
    assert respace(Detokenizer().feed(spaced), KNOWN) == spaced


@pytest.mark.parametrize("plain", SENTENCES)
def test_ordinary_sentences(plain: str) -> None:
    assert respace(plain, KNOWN) == SENTENCES[plain]


@given(st.lists(WORDS | st.just("\n")).map(" ".join))
def test_known_words_are_unchanged(text: str) -> None:
    assert respace(text, KNOWN) == text


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
    def letters(text: str) -> list[str]:
        return [sign for sign in text if unicodedata.category(sign)[0] in "LNM"]

    assert letters(respace(text, words.__contains__)) == letters(text)


def test_long_words_and_numbers_beside_unknown_words() -> None:
    known = {"a-b-c-d", "(", ")", "a", "b", "c", "d", "@-@"}.__contains__
    assert respace("(a-b-c-d)", known) == "( a-b-c-d )"
    known = {"@.@", "@,@", "3", ",", "."}.__contains__
    assert respace("3.<unk>", known) == "3 @.@ <unk>"
    assert respace("3-3.3", known) == "3 - 3 @.@ 3"
