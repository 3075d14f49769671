"""WikiText's spaced words to plain text: marks are joined to their words, and nothing else changes."""

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from lmtrain.generation.spacing import Detokenizer

SENTENCES = {
    "A well @-@ known ship of 1 @,@ 250 tons , 3 @.@ 5 m wide .": "A well-known ship of 1,250 tons, 3.5 m wide.",
    "It grows to 60 cm ( 24 in ) ; some [ rarely ] to 90 % more : why ?": (
        "It grows to 60 cm (24 in); some [rarely] to 90% more: why?"
    ),
    'He said " it is " , and " no " .': 'He said "it is", and "no".',
    'The word " it " is short': 'The word "it" is short',
    "She isn 't \" what they 're saying \"": "She isn't \"what they're saying\"",
    "The Smiths ' dog 's tail": "The Smiths' dog's tail",
    "He saw ' the Rock ' twice": "He saw 'the Rock' twice",
    "It did n't cost $ 5 or \u00a3 4 .": "It didn't cost $5 or \u00a34.",
    "The ship \u2019 s crew saw \u201c land \u201d \u2026": "The ship\u2019s crew saw \u201cland\u201d\u2026",
    "Mr. Hill lived in St. Ives from 1914 \u2013 18 .": "Mr. Hill lived in St. Ives from 1914 \u2013 18.",
    '" one\n" two "': '"one\n"two"',
    "ends with a space \nnext": "ends with a space\nnext",
    "« one » at 5 ° , YOU 'LL and you \u2019 LL": "«one» at 5°, YOU'LL and you\u2019LL",
}
PLAIN = [
    'He said, "well (yes)" \u2013 it\'s 1,000.5% of "x".',
    "  Two  spaces\tand a tab, 'quoted words' and the dogs' bowl.",
    "== A Part ==\n\nAnd/or e.g. rock 'n' roll; $5?",
    "Say 'em: a 'thing' is a \u201cthing\u201d.",
]
WORDS = st.text(st.sampled_from("abcdstDO09"), min_size=2, max_size=4)
MARKS = st.sampled_from(
    ["@-@", "@,@", "@.@", ",", ".", "(", ")", '"', "'", "'s", "n't", "=", "\n", "$", "%", "-", "...", "@", "/"]
)
SPACED = st.lists(WORDS | MARKS, max_size=20).map(" ".join)


@pytest.mark.parametrize("spaced", SENTENCES)
def test_spaced_sentences_become_plain_text(spaced: str) -> None:
    assert Detokenizer().feed(spaced) == SENTENCES[spaced]


@pytest.mark.parametrize("text", [*PLAIN, *SENTENCES.values()])
def test_plain_text_is_unchanged(text: str) -> None:
    assert Detokenizer().feed(text) == text


@example("@.@ , @,@")
@given(SPACED)
def test_only_spaces_and_at_signs_are_removed(spaced: str) -> None:
    kept = [word[1] if word in {"@-@", "@,@", "@.@"} else word for word in spaced.split(" ")]
    assert Detokenizer().feed(spaced).replace(" ", "") == "".join(kept)


@given(st.text())
def test_no_letter_or_digit_is_ever_lost(text: str) -> None:
    assert [sign for sign in Detokenizer().feed(text) if sign.isalnum()] == [sign for sign in text if sign.isalnum()]


@given(st.lists(WORDS | st.sampled_from(["@-@", "@,@", ",", ".", "(", ")", '"', "\n", "%"]), max_size=20).map(" ".join))
def test_a_second_pass_changes_nothing(spaced: str) -> None:
    assert Detokenizer().feed(Detokenizer().feed(spaced)) == Detokenizer().feed(spaced)


@given(SPACED)
def test_word_by_word_gives_the_same_text(spaced: str) -> None:
    detokenizer = Detokenizer()
    words = spaced.split(" ")
    pieces = [detokenizer.feed(word if number == 0 else f" {word}") for number, word in enumerate(words)]
    assert "".join(pieces) == Detokenizer().feed(spaced)


def test_a_space_waits_for_the_word_after_it() -> None:
    detokenizer = Detokenizer()
    assert detokenizer.feed("river ") == "river"
    assert detokenizer.feed(",") == ","
    assert detokenizer.feed(" and ") == " and"
    detokenizer.pause()
    assert detokenizer.feed("so") == "so"
