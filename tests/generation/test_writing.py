"""Text written while it is made: only what is final, and all of it at the end."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmtrain.config.schema import TokenizerConfig
from lmtrain.data.detokenizer import Detokenizer
from lmtrain.data.tokenizer import Tokenizer
from lmtrain.generation.options import Options, StopKind
from lmtrain.generation.stops import Stops
from lmtrain.generation.writing import Writer, as_read, is_spaced_out, write

LINES = ["= Title =", "", 'a b , c @-@ d " e " . ( f ) /', "= = Part = =", "é € g 's @.@"]
WORD = Tokenizer.train(LINES, TokenizerConfig())
PLAIN = Tokenizer.train(["a b, c-d"], TokenizerConfig())
BPE = Tokenizer.train(LINES * 3, TokenizerConfig(kind="bpe", vocab_size=280))
BYTE = Tokenizer.train([], TokenizerConfig(kind="byte"))
TOKENIZERS = [WORD, PLAIN, BPE, BYTE]
PROMPTS = ["", "a b", "a b ", "a\n", 'a " b', "(", "a-b", 'a, "b', '"', "c-"]
STRINGS = ["d e", " a", "é", "b", "\n", ", c", "-"]


def run(tokenizer: Tokenizer, prompt: str, ids: list[int], options: Options) -> tuple[list[str], Writer]:
    """What is written token by token until the text ends, and at its end."""
    writer = Writer(tokenizer, prompt, options, Stops(tokenizer, options.stop, options.stop_strings))
    written = []
    for token in ids:
        written.append(writer.push(token))
        if writer.ending:
            break
    written.append(writer.close())
    return written, writer


@given(
    number=st.integers(0, len(TOKENIZERS) - 1),
    prompt=st.sampled_from(PROMPTS),
    places=st.lists(st.integers(0, 10**6), min_size=1, max_size=30),
    strings=st.lists(st.sampled_from(STRINGS), max_size=2, unique=True),
    stop=st.sampled_from(["none", "line", "sentence", "document"]),
    raw=st.booleans(),
)
def test_what_is_written_early_is_the_beginning_of_the_final_text(
    number: int, prompt: str, places: list[int], strings: list[str], stop: StopKind, raw: bool
) -> None:
    tokenizer = TOKENIZERS[number]
    ids = [place % tokenizer.vocab_size for place in places]
    options = Options(stop=stop, stop_strings=tuple(strings), raw=raw)
    written, writer = run(tokenizer, prompt, ids, options)
    used = ids[: len(written) - 1]
    # The definition: the pieces, what the ending cuts off taken away, and no space where there is one.
    pieces = [tokenizer.piece(before, token) for before, token in zip([None, *used], used, strict=False)]
    whole = b"".join(pieces)
    whole = whole[: len(whole) - (writer.ending.cut if writer.ending else 0)]
    if tokenizer.kind == "word" and (not prompt or prompt[-1].isspace()):
        whole = whole.removeprefix(b" ")
    expected = whole.decode(errors="replace")
    if not raw and is_spaced_out(tokenizer):
        detokenizer = Detokenizer()
        detokenizer.feed(as_read(tokenizer, prompt, options))
        detokenizer.pause()
        expected = detokenizer.feed(expected)
    assert "".join(written) == expected
    stops = Stops(tokenizer, stop, strings)
    assert write(tokenizer, prompt, used, options, stops) == (writer.prompt, expected)


def test_words_appear_at_once_and_the_beginning_of_a_stop_string_waits() -> None:
    ids = WORD.encode("a b d e")
    options = Options(stop_strings=("d f",))
    assert run(WORD, "a", ids, options)[0] == [" a", " b", "", " d e", ""]
    assert run(WORD, "a", WORD.encode("a d f"), options)[0] == [" a", "", "", ""]
    assert run(BYTE, "", BYTE.encode("é!"), Options())[0] == ["", "é", "!", ""]


def test_a_heading_waits_until_it_is_clear_whose_it_is() -> None:
    options = Options(stop="document")
    assert run(WORD, "a", WORD.encode("b\n= = Part"), options)[0] == [" b", "", "", "\n==", " Part", ""]
    assert "".join(run(WORD, "a", WORD.encode("b\n= Title"), options)[0]) == " b\n"


def test_prompt_and_text_are_joined_as_one_text() -> None:
    ids = WORD.encode("@-@ d \" . ( f ) 's")
    writer = Writer(WORD, 'a " b ,', Options(), Stops(WORD))
    assert writer.prompt == 'a "b,'
    assert "".join(map(writer.push, ids)) == "-d\". (f)'s"
    assert write(WORD, 'a " b ,', ids, Options(raw=True), Stops(WORD)) == ('a " b ,', " @-@ d \" . ( f ) 's")


@pytest.mark.parametrize(
    ("prompt", "text", "expected"),
    [
        ("a-b", "@-@ c", "-c"),
        ("a/b-", "d", "d"),
        ('"a, b', '" . d', '". d'),
        ('("', "a", "a"),
        ("a  b, ", "c", "c"),
    ],
)
def test_a_plain_prompt_is_shown_as_given_and_read_as_words(prompt: str, text: str, expected: str) -> None:
    options = Options()
    assert write(WORD, prompt, WORD.encode(text), options, Stops(WORD)) == (prompt, expected)
    assert as_read(WORD, prompt, Options(raw=True)) == prompt
    assert WORD.unk_id not in WORD.encode(as_read(WORD, prompt, options))


def test_only_spaced_out_words_take_prompts_apart() -> None:
    for tokenizer in (PLAIN, BPE, BYTE):
        assert as_read(tokenizer, "a,b (c)", Options()) == "a,b (c)"
    assert as_read(WORD, "a,b (c)", Options()) == "a , b ( c )"


def test_before_its_least_length_a_text_does_not_end() -> None:
    options = Options(stop="line", min_tokens=3)
    written, writer = run(WORD, "a", WORD.encode("b\nb\na"), options)
    assert ("".join(written), writer.ending is not None) == (" b\nb\n", True)


@pytest.mark.parametrize(("tokenizer", "spaced"), [(WORD, True), (PLAIN, False), (BPE, False), (BYTE, False)])
def test_the_style_is_read_off_the_vocabulary(tokenizer: Tokenizer, spaced: bool) -> None:
    assert is_spaced_out(tokenizer) is spaced
