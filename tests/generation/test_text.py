"""Streamed text: only what is final, and all of it at the end."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmtrain.config.schema import TokenizerConfig
from lmtrain.data.tokenizer import Tokenizer
from lmtrain.generation.options import Options, StopKind
from lmtrain.generation.spacing import Detokenizer, changes_spacing, in_corpus_spacing
from lmtrain.generation.text import TextStreamer, unknown_words
from tests.data.published import as_given

LINES = ["= Title =", "", 'a b , c @-@ d " e " . ( f ) /', "= = Part = =", "é € g 's @.@"]
WORD = Tokenizer.train(LINES, TokenizerConfig(kind="word"))
PLAIN = Tokenizer.train(["a b, c-d"], TokenizerConfig(kind="word"))
BPE = Tokenizer.train(LINES * 3, TokenizerConfig(kind="bpe", vocab_size=280))
BYTE = Tokenizer.train([], TokenizerConfig(kind="byte"))
LLAMA2, BERT = as_given("llama2"), as_given("bert")
TOKENIZERS = [WORD, PLAIN, BPE, BYTE, LLAMA2, BERT]
PROMPTS = ["", "a b", "a b ", "a\n", 'a " b', "(", "a-b", 'a, "b', '"', "c-"]
STRINGS = ["d e", " a", "é", "b", "\n", ", c", "-"]


def run(tokenizer: Tokenizer, prompt: str, ids: list[int], **options: Any) -> tuple[list[str], TextStreamer]:
    """What is final after each token until the text ends, and the rest."""
    streamer = TextStreamer(tokenizer, prompt, Options(**options))
    final = []
    for token in ids:
        final.append(streamer.push(token))
        if streamer.ending.reason != "length":
            break
    final.append(streamer.close())
    return final, streamer


@given(
    number=st.integers(0, len(TOKENIZERS) - 1),
    prompt=st.sampled_from(PROMPTS),
    numbers=st.lists(st.integers(0, 10**6), min_size=1, max_size=30),
    strings=st.lists(st.sampled_from(STRINGS), max_size=2, unique=True),
    stop=st.sampled_from(["none", "line", "sentence"]),
)
def test_streamed_pieces_join_to_the_final_text(
    number: int, prompt: str, numbers: list[int], strings: list[str], stop: StopKind
) -> None:
    tokenizer = TOKENIZERS[number]
    ids = [value % tokenizer.vocab_size for value in numbers]
    final, streamer = run(tokenizer, prompt, ids, stop=stop, stop_strings=strings)
    used = ids[: len(final) - 1]
    # The definition: the pieces without what the ending cuts off, and no second space after the prompt's.
    pieces = [tokenizer.token_bytes(before, token) for before, token in zip([None, *used], used, strict=False)]
    whole = b"".join(pieces)
    whole = whole[: len(whole) - streamer.ending.cut]
    if tokenizer in (WORD, PLAIN, LLAMA2, BERT) and (not prompt or prompt[-1].isspace()):
        whole = whole.removeprefix(b" ")
    expected = whole.decode(errors="replace")
    if changes_spacing(tokenizer):
        detokenizer = Detokenizer()
        detokenizer.feed(in_corpus_spacing(tokenizer, prompt))
        detokenizer.pause()
        expected = detokenizer.feed(expected)
    assert "".join(final) == expected


def test_words_are_final_at_once_or_as_soon_as_no_stop_string_can_begin_in_them() -> None:
    assert run(WORD, "a", WORD.encode("a b d e"))[0] == [" a", " b", " d", " e", ""]
    assert run(WORD, "a", WORD.encode("a b d e"), stop_strings=["d f"])[0] == ["", "", " a", " b", " d e"]
    assert run(WORD, "a", WORD.encode("a d f"), stop_strings=["d f"])[0] == ["", "", "", " a"]
    assert run(BYTE, "", BYTE.encode(" é!"))[0] == [" ", "", "é", "!", ""]


@pytest.mark.parametrize(("prompt", "text"), [("", "cat"), ("the", " cat"), ("the ", "cat"), ("the\n", "cat")])
def test_a_first_word_follows_one_space_whatever_the_tokenizer(prompt: str, text: str) -> None:
    for tokenizer in (LLAMA2, BERT):
        assert "".join(run(tokenizer, prompt, tokenizer.encode("cat"))[0]) == text


def test_prompt_and_text_are_joined_as_one_text() -> None:
    ids = WORD.encode("@-@ d \" . ( f ) 's")
    assert "".join(run(WORD, 'a " b ,', ids)[0]) == "-d\". (f)'s"


@pytest.mark.parametrize(
    ("prompt", "text", "expected"),
    [("a-b", "@-@ c", "-c"), ("a/b-", "d", "d"), ('"a, b', '" . d', '". d'), ('("', "a", "a"), ("a  b, ", "c", "c")],
)
def test_a_plain_prompt_is_read_as_words(prompt: str, text: str, expected: str) -> None:
    assert "".join(run(WORD, prompt, WORD.encode(text))[0]) == expected
    assert WORD.unk_id not in WORD.encode(in_corpus_spacing(WORD, prompt))


@pytest.mark.parametrize(("tokenizer", "spaced"), [(WORD, True), (PLAIN, False), (BPE, False), (BYTE, False)])
def test_only_a_wikitext_vocabulary_changes_the_spacing(tokenizer: Tokenizer, spaced: bool) -> None:
    assert changes_spacing(tokenizer) is spaced
    assert in_corpus_spacing(tokenizer, "a,b (c)") == ("a , b ( c )" if spaced else "a,b (c)")


def test_the_line_ends_of_a_prompt_are_those_of_a_corpus() -> None:
    assert in_corpus_spacing(BYTE, "a\r\nb\rc\n") == "a\nb\nc\n"


@pytest.mark.parametrize(
    ("string", "text", "printed"),
    [
        ("b,", "a b , c", " a"),
        ("c-d", "a c @-@ d", " a"),
        ("(f", "a ( f )", " a"),
        ("b , c", "a b , c", " a"),
        ("-", "a c @-@ d", " a c"),
        (".", "a g @.@ g", " a g"),
    ],
)
def test_a_stop_string_is_found_as_it_is_printed_and_as_the_corpus_spells_it(
    string: str, text: str, printed: str
) -> None:
    final, streamer = run(WORD, "a", WORD.encode(text), stop_strings=[string])
    assert (streamer.ending.reason, "".join(final)) == (f"stop string {string!r}", printed)


def test_unknown_words_are_named() -> None:
    assert unknown_words(WORD, "a xyzzy <unk> b <eos> xyzzy") == ["xyzzy", "<eos>"]
    assert unknown_words(BYTE, "anything") == []
    assert unknown_words(as_given("t5"), "the 東京 cat") == ["東京"]
