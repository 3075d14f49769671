"""Where texts end, compared with a search of the whole decoded text after every token."""

import random
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmtrain.config.schema import TokenizerConfig
from lmtrain.data.tokenizer import Tokenizer
from lmtrain.generation.options import Options, StopKind
from lmtrain.generation.stops import Ending, Stops

LINES = ["= Title =", "", "a b . c ? d e ! e.g. ...", "the cat sat on the mat . the cat é €", "= = Part = ="]
WORD = Tokenizer.train(LINES, TokenizerConfig(kind="word"))
BPE = Tokenizer.train(LINES * 3, TokenizerConfig(kind="bpe", vocab_size=290))
BYTE = Tokenizer.train([], TokenizerConfig(kind="byte"))
TOKENIZERS = {"word": WORD, "bpe": BPE, "byte": BYTE}
STRINGS = ["at", "cat s", " the", "é", "\n", ". ", "€", "at sat on the ma", "e", "mat . the"]


def first_end(stops: Stops, ids: Sequence[int]) -> tuple[int, Ending] | None:
    """How many tokens a text has when it ends, and how."""
    for length in range(1, len(ids) + 1):
        if (ending := stops.ending(ids[:length])) is not None:
            return length, ending
    return None


def spelled(tokenizer: Tokenizer, ids: Sequence[int]) -> bytes:
    before = [None, *ids]
    return b"".join(tokenizer.token_bytes(before[i], token) for i, token in enumerate(ids))


@pytest.mark.parametrize("kind", TOKENIZERS)
@given(seed=st.integers(0, 10_000), strings=st.lists(st.sampled_from(STRINGS), min_size=1, max_size=3, unique=True))
def test_stop_strings_are_found_as_soon_as_they_are_in_the_text(kind: str, seed: int, strings: list[str]) -> None:
    tokenizer = TOKENIZERS[kind]
    rng = random.Random(seed)
    ids = tokenizer.encode(
        "".join(rng.choice(["the cat ", "sat on ", "the mat . ", "é", "€ ", "\n"]) for _ in range(8))
    )
    stops = Stops(tokenizer, Options(stop_strings=tuple(strings)))
    expected = None
    for length in range(1, len(ids) + 1):
        text = spelled(tokenizer, ids[:length])
        starts = [start for string in strings if (start := text.find(string.encode())) >= 0]
        if starts:
            expected = length, len(text) - min(starts)
            break
    found = first_end(stops, ids)
    assert (found and (found[0], found[1].cut)) == expected
    assert found is None or stops.is_end(ids[: found[0]])


def test_a_long_text_costs_no_more_per_token_than_a_short_one() -> None:
    class Counting(Tokenizer):
        pieces = 0

        def token_bytes(self, before: int | None, id: int) -> bytes:  # noqa: A002
            self.pieces += 1
            return super().token_bytes(before, id)

    tokenizer = Counting.train([], TokenizerConfig(kind="byte"))
    stops = Stops(tokenizer, Options(stop="sentence", stop_strings=("twelve bytes",)))
    counts = []
    for length in (100, 10_000):
        tokenizer.pieces = 0
        assert stops.ending(tokenizer.encode("x" * length)) is None
        counts.append(tokenizer.pieces)
    assert counts[0] == counts[1] < 20


def test_the_string_that_begins_first_ends_the_text() -> None:
    ids = BPE.encode("the cat")
    assert first_end(Stops(BPE, Options(stop_strings=("t", "cat"))), ids[-1:]) == (1, Ending("stop string 'cat'", 3))


def test_a_sign_before_a_stop_string_is_text() -> None:
    assert first_end(Stops(BYTE, Options(stop_strings=("b",))), BYTE.encode("a@b")) == (3, Ending("stop string 'b'", 1))


CASES = {
    "word": [
        ("line", "a b\nc", "a b\n", "line"),
        ("line", "a b . c", None, None),
        ("sentence", "a e.g. ... b . c", "a e.g. ... b .", "sentence"),
        ("sentence", "d !", "d !", "sentence"),
        ("sentence", "a b\nc .", "a b\n", "line"),
        ("none", "a\n= Title =\nb", None, None),
    ],
    "bpe": [
        ("line", "a b.\nc", "a b.\n", "line"),
        ("sentence", "a 3.5 b. c", "a 3.5 b.", "sentence"),
        ("sentence", 'a "b." c', 'a "b."', "sentence"),
        ("sentence", "a (b!)\u201d c", "a (b!)\u201d", "sentence"),
        ("sentence", "a b.\u201d\u2019\u201d c", "a b.\u201d\u2019\u201d", "sentence"),
        ("sentence", "a e.g b\nc", "a e.g b\n", "line"),
        ("sentence", "a b.\nc", "a b.", "sentence"),
        ("sentence", "a b.", None, None),
    ],
}
CASES["byte"] = CASES["bpe"]


@pytest.mark.parametrize(
    ("kind", "stop", "text", "expected", "reason"), [(kind, *case) for kind, cases in CASES.items() for case in cases]
)
def test_texts_end_after_lines_and_sentences(
    kind: str, stop: StopKind, text: str, expected: str | None, reason: str | None
) -> None:
    tokenizer = TOKENIZERS[kind]
    found = first_end(Stops(tokenizer, Options(stop=stop)), tokenizer.encode(text))
    if expected is None:
        assert found is None
        return
    assert found is not None
    length, ending = found
    whole = spelled(tokenizer, tokenizer.encode(text)[:length])
    assert whole[: len(whole) - ending.cut].decode().removeprefix(" " if kind == "word" else "") == expected
    assert ending.reason == reason


def test_a_line_ends_at_the_first_line_end_of_a_token() -> None:
    class Paragraphs(Tokenizer):
        def token_bytes(self, before: int | None, id: int) -> bytes:  # noqa: A002
            return b"a\n\nb"

    stops = Stops(Paragraphs.train([], TokenizerConfig(kind="byte")), Options(stop="line"))
    assert stops.ending([1]) == Ending("line", 2)


@pytest.mark.parametrize("kind", ["bpe", "byte"])
@pytest.mark.parametrize("stop", ["none", "line", "sentence"])
def test_the_end_of_a_document_ends_a_text(kind: str, stop: StopKind) -> None:
    tokenizer = TOKENIZERS[kind]
    ids = [*tokenizer.encode("ab"), tokenizer.eos_id]
    assert first_end(Stops(tokenizer, Options(stop=stop)), ids) == (len(ids), Ending("document"))


def test_what_a_vocabulary_lacks_ends_nothing() -> None:
    tokenizer = Tokenizer.train(["a . b"], TokenizerConfig(kind="word"))
    stops = Stops(tokenizer, Options(stop="sentence"))
    ends = {token for token in range(tokenizer.vocab_size) if stops.is_end([token])}
    assert ends == {tokenizer.eos_id, tokenizer.encode(".")[0]}


def test_a_stop_string_is_cut_off_where_a_sentence_ends_too() -> None:
    stops = Stops(BYTE, Options(stop="sentence", stop_strings=(". ",)))
    assert first_end(stops, BYTE.encode("a b. c")) == (5, Ending("stop string '. '", 2))
