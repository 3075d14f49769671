"""Tokenizers of published shapes as `tokenizer.file`: ids as the library gives them, and the text back."""

import io
import json
from pathlib import Path

import pytest
import tokenizers
from hypothesis import example, given
from hypothesis import strategies as st

from lmtrain.config.schema import TokenizerConfig
from lmtrain.data.tokenizer import Tokenizer
from lmtrain.data.tokenizing import text_split, tokenize
from lmtrain.errors import LmtrainError
from tests.data.helpers import DOCUMENTS, corpus_of
from tests.data.published import EXACT, SHAPES, as_given, published, reference, tokenizer_of

WORDS = ["the", "cat", "'s", " ", "  ", "\n", "\t", "\r", "é", "東", "😀", "\x00", "7", "Cat", ".", "-"]
TEXT = st.lists(st.sampled_from(WORDS)).map("".join) | st.text(st.characters(codec="utf-8", exclude_characters="▁"))
EVERY_SHAPE = pytest.mark.parametrize("name", SHAPES)


def write(folder: Path, name: str) -> Path:
    """The tokenizer.json of a shape in a folder."""
    path = folder / "tokenizer.json"
    path.write_text(published(name))
    return path


@EVERY_SHAPE
def test_the_special_tokens_are_found(name: str) -> None:
    tokenizer, library = as_given(name), reference(name)
    _, eos, unk = SHAPES[name]
    assert (tokenizer.kind, tokenizer.eos_token, tokenizer.eos_id) == ("file", eos, library.token_to_id(eos))
    assert tokenizer.unk_id == (None if unk is None else library.token_to_id(unk))
    assert tokenizer.vocab_size == max(library.get_vocab().values()) + 1
    assert not tokenizer.knows("the")
    assert tokenizer.token(tokenizer.eos_id) == eos
    assert all(tokenizer.token(index).isprintable() for index in range(tokenizer.vocab_size))


@EVERY_SHAPE
@given(text=TEXT)
@example(text=" = A title = \n\n\n the  cat 's 1,234 \n")
def test_each_line_is_encoded_as_the_library_does(name: str, text: str) -> None:
    encoded = [reference(name).encode(line, add_special_tokens=False).ids for line in io.StringIO(text)]
    assert as_given(name).encode(text) == [index for ids in encoded for index in ids]


@EVERY_SHAPE
@given(text=TEXT)
@example(text=" = A title = \n\n\n the  cat 's 1,234 \n")
def test_decoding_restores_what_the_tokenizer_keeps(name: str, text: str) -> None:
    tokenizer, library = as_given(name), reference(name)
    assert name not in EXACT or tokenizer.decode(tokenizer.encode(text)) == text
    for line in io.StringIO(text):
        ids = tokenizer.encode(line)
        assert tokenizer.decode(ids) == library.decode(ids, skip_special_tokens=False)


@EVERY_SHAPE
@given(data=st.data())
def test_pieces_joined_are_the_text_of_any_ids(name: str, data: st.DataObject) -> None:
    tokenizer = as_given(name)
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=20))
    joined = b"".join(tokenizer.token_bytes(*pair) for pair in zip([tokenizer.eos_id, *ids], ids, strict=False))
    assert joined.decode(errors="replace") == tokenizer.decode(ids)
    assert tokenizer.token_bytes(None, tokenizer.eos_id) == b""


@EVERY_SHAPE
def test_text_that_continues_another_begins_with_its_space(name: str) -> None:
    tokenizer = as_given(name)
    assert tokenizer.adds_space == (name != "gpt2")
    ids = tokenizer.encode("the cat")
    pieces = [tokenizer.token_bytes(None if index == 0 else ids[index - 1], ids[index]) for index in range(len(ids))]
    assert b"".join(pieces) == b" " * tokenizer.adds_space + b"the cat"


@EVERY_SHAPE
@pytest.mark.parametrize("text", ["{}", "a {} b\n", "x{}y{}\n{}\n", " {}{} "])
def test_no_text_becomes_the_end_of_text_token(name: str, text: str) -> None:
    tokenizer = as_given(name)
    for spelling in (tokenizer.eos_token, tokenizer.eos_token.lower(), tokenizer.eos_token.upper()):
        ids = tokenizer.encode(text.format(*[spelling] * 3))
        assert ids
        assert tokenizer.eos_id not in ids
        if name in EXACT:
            assert tokenizer.decode(ids) == text.format(*[spelling] * 3)


def test_a_word_that_is_the_end_of_text_token_is_spelled() -> None:
    """As Unigram does with `</s>` in a text."""
    assert reference("t5").encode("a </s>", add_special_tokens=False).tokens[-1] == "</s>"
    ids = as_given("t5").encode("a </s>")
    assert [as_given("t5").token(index) for index in ids][-2:] == ["s", ">"]


@EVERY_SHAPE
def test_the_file_is_complete_by_itself_and_the_library_reads_it(name: str, tmp_path: Path) -> None:
    tokenizer, path = as_given(name), tmp_path / "tokenizer.json"
    tokenizer.save(path)
    again, library = Tokenizer.load(path), tokenizers.Tokenizer.from_file(str(path))
    assert (again.sha256, again.kind) == (tokenizer.sha256, "file")
    assert (again.eos_id, again.unk_id) == (tokenizer.eos_id, tokenizer.unk_id)
    assert library.to_str() == tokenizers.Tokenizer.from_str(published(name)).to_str()
    assert Tokenizer.load(path, tokenizer.eos_token).sha256 == tokenizer.sha256
    with pytest.raises(LmtrainError, match=r"is one of a run, in which .* ends a text: leave tokenizer\.eos_token out"):
        Tokenizer.load(path, "x")


@EVERY_SHAPE
def test_a_store_has_one_end_of_text_token_for_each_document(name: str, tmp_path: Path, notes: list[str]) -> None:
    corpus = corpus_of(tmp_path / "tiny", DOCUMENTS)
    store = tokenize(corpus, TokenizerConfig(file=write(tmp_path, name)))
    for split, documents in DOCUMENTS.items():
        ids = store.split(split).ids
        assert (ids == store.tokenizer.eos_id).sum() == len(documents)
        text = "".join(f"{line}\n" for lines in documents for line in lines)
        assert name not in EXACT or store.tokenizer.decode(ids.tolist()) == text
        unknown = 0 if store.tokenizer.unk_id is None else (ids == store.tokenizer.unk_id).sum()
        assert store.split(split).replaced == unknown
    assert store.folder.name.startswith("tiny.file-")
    assert bool(store.split("train").replaced) == (name in {"t5", "words"})
    assert (name in {"t5", "words"}) == (f"does not know all words: {SHAPES[name][2]} replaces" in str(notes))
    assert (name in EXACT) != ("the tokenizer does not restore the text exactly" in str(notes))
    notes.clear()
    text_split(((line, False) for line in DOCUMENTS["train"][0]), store.tokenizer, label="the text")
    assert (name in EXACT) != ("the tokenizer does not restore the text exactly" in str(notes))


def test_the_end_of_text_token_is_given_or_has_a_usual_name(tmp_path: Path) -> None:
    path = write(tmp_path, "llama2")
    assert [Tokenizer.load(path, given).eos_token for given in (None, "<s>")] == ["</s>", "<s>"]
    with pytest.raises(LmtrainError, match=r"has no token 'the end': set tokenizer\.eos_token to one that it has"):
        Tokenizer.load(path, "the end")
    as_gemma = published("words").replace("[EOS]", "<eos>").replace('"the"', '"</s>"')
    assert tokenizer_of(tmp_path, as_gemma).eos_token == "<eos>"


def test_a_file_without_an_end_of_text_token_names_the_field(tmp_path: Path) -> None:
    text = published("bert").replace("[SEP]", "[END]")
    with pytest.raises(LmtrainError, match=r"has no common end-of-text token: set tokenizer\.eos_token to the token"):
        tokenizer_of(tmp_path, text)
    assert tokenizer_of(tmp_path, text, "[END]").eos_id == 3


def test_ids_may_have_gaps(tmp_path: Path) -> None:
    document = json.loads(published("gpt2"))
    last = max(document["model"]["vocab"].values())
    document["model"]["vocab"]["last"] = last + 100
    tokenizer = tokenizer_of(tmp_path, document)
    assert tokenizer.vocab_size == last + 101
    assert (tokenizer.token(last + 99), tokenizer.decode([last + 99])) == ("", "")


def test_dropout_and_an_added_token_that_is_not_special_change_no_text(tmp_path: Path) -> None:
    document = json.loads(published("llama2"))
    document["model"]["dropout"] = 0.9
    for token in document["added_tokens"]:
        token["special"] = False
    tokenizer, text = tokenizer_of(tmp_path, document), "the cat sat on the mat"
    assert tokenizer.encode(text) == reference("llama2").encode(text, add_special_tokens=False).ids
    assert tokenizer.decode(tokenizer.encode("the cat</s> sat")).replace(" ", "") == "thecat</s>sat"
    assert tokenizer.eos_id not in tokenizer.encode("the cat</s> sat")


def test_what_the_library_fails_on_is_one_error(tmp_path: Path) -> None:
    """A panic while the file is read, and an expression that never ends on a text."""
    document, normalizer = json.loads(published("t5")), {"type": "Precompiled", "precompiled_charsmap": "AAAA"}
    with pytest.raises(LmtrainError, match=r"tokenizer\.json is damaged, or not a Hugging Face tokenizer\.json"):
        tokenizer_of(tmp_path, document | {"normalizer": normalizer})
    split = {"type": "Split", "pattern": {"Regex": "(a+)+$"}, "behavior": "Isolated", "invert": False}
    tokenizer = tokenizer_of(tmp_path, document | {"pre_tokenizer": split})
    with pytest.raises(LmtrainError, match="the tokenizer can't encode the text: "):
        tokenizer.encode("a" * 30 + "!")


def test_words_that_a_vocabulary_without_an_unknown_token_lacks_are_an_error(tmp_path: Path) -> None:
    document = json.loads(published("words"))
    document["model"]["unk_token"] = "<absent>"
    with pytest.raises(LmtrainError, match="the tokenizer can't encode the text: WordLevel error: Missing"):
        tokenizer_of(tmp_path, document, "[EOS]").encode("the absent words")


def test_a_tokenizer_that_loses_text_has_no_floor(tmp_path: Path) -> None:
    floor = {"train": {"word_perplexity": 3.0, "nats": 1.0, "tokens": 1}}
    corpus = corpus_of(tmp_path / "sample", {"train": [["The Cat"]]}, floor=floor)
    lossy, lossless = (tokenize(corpus, TokenizerConfig(file=write(tmp_path, name))) for name in ("bert", "gpt2"))
    assert (lossy.split("train").floor, lossless.split("train").floor) == (None, 3.0)
