"""An existing tokenizer in place of one trained on the corpus: the same file, and its ids."""

import shutil
from pathlib import Path

import pytest

from lmtrain.config.schema import TokenizerConfig
from lmtrain.data.corpus import Corpus
from lmtrain.data.tokenizer import Tokenizer
from lmtrain.data.tokenizing import tokenize
from lmtrain.storage.run_folder import TOKENIZER
from tests.data.helpers import CONFIGS, DOCUMENTS, KINDS, corpus_of

OTHER = {"train": [["the new cat sat", "", "on <unk> 7 hats"], ["a é hat"]], "valid": [["the hat sat on the cat"]]}


@pytest.fixture
def file(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A tokenizer.json away from the store that it was made for; of words unless a test names another kind."""
    corpus = corpus_of(tmp_path / "first" / "tiny", DOCUMENTS)
    config = CONFIGS[getattr(request, "param", "word")]
    store = tokenize(corpus, config)
    return shutil.copyfile(store.folder / TOKENIZER, tmp_path / "given.json")


@pytest.fixture
def corpus(tmp_path: Path) -> Corpus:
    return corpus_of(tmp_path / "data" / "other", OTHER)


@pytest.mark.parametrize("file", KINDS, indirect=True)
def test_the_text_is_encoded_by_the_file(file: Path, corpus: Corpus, notes: list[str]) -> None:
    tokenizer = Tokenizer.load(file)
    words = tokenizer.kind == "word"
    config = TokenizerConfig(kind="byte", file=file)  # the kind of the configuration is ignored
    store = tokenize(corpus, config)
    assert (store.folder / TOKENIZER).read_bytes() == file.read_bytes()
    for split, documents in OTHER.items():
        end = [] if words else [tokenizer.eos_id]
        expected = [token for lines in documents for token in [*tokenizer.encode("\n".join([*lines, ""])), *end]]
        assert store.split(split).ids.tolist() == expected
    unknown = "the tokenizer does not know all words: <unk> replaces 33.3% (train), 14.3% (valid) of the tokens"
    assert notes == [unknown] * words
    file.unlink()
    moved = TokenizerConfig(file=store.folder / TOKENIZER)
    found = tokenize(corpus, moved)
    assert (found.folder, found.sha256) == (store.folder, store.sha256)
    assert len(notes) == words


def test_each_tokenizer_has_a_store_of_its_own(file: Path, corpus: Corpus, notes: list[str]) -> None:
    trained = tokenize(corpus, CONFIGS["word"])
    given = tokenize(corpus, TokenizerConfig(file=file))
    own = tokenize(corpus, TokenizerConfig(file=trained.folder / TOKENIZER))
    assert len({store.folder for store in (trained, given, own)}) == 3
    assert trained.tokenizer.sha256 == own.tokenizer.sha256 != given.tokenizer.sha256
    assert own.split("train").ids.tolist() == trained.split("train").ids.tolist()
    assert sum("training a word tokenizer" in note for note in notes) == 1
