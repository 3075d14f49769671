import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lmtrain.config.schema import TokenizerConfig
from lmtrain.data import shards, tokenizing
from lmtrain.data import tokenizer as tokenizer_module
from lmtrain.data.corpus import FORMAT as CORPUS_FORMAT
from lmtrain.data.corpus import Corpus, open_corpus
from lmtrain.data.tokenizer_file import Kind
from lmtrain.data.tokenizing import tokenize
from lmtrain.data.tokens import TOKENIZER, TokenStore, find_store, open_store, store_folder
from lmtrain.errors import LmtrainError
from lmtrain.storage.files import MANIFEST, alone_in, new_folder

KINDS: tuple[Kind, ...] = ("word", "bpe", "byte")
CONFIGS = {
    "word": TokenizerConfig(kind="word"),
    "bpe": TokenizerConfig(kind="bpe", vocab_size=280),
    "byte": TokenizerConfig(kind="byte"),
}
DOCUMENTS = {
    "train": [["= One =", "", "the cat sat on the mat"], ["the <eos> é\r"], ["", ""]],
    "valid": [["the dog\tsat", "on the mat"]],
}
FLOOR = {"valid": {"word_perplexity": 3.0, "nats": 1.0, "tokens": 1}}


def make_corpus(folder: Path, documents: dict[str, list[list[str]]], **info: Any) -> Corpus:
    """A corpus folder in normal form from the lines of each document of each split."""
    splits: dict[str, dict[str, int]] = {}
    with new_folder(folder, CORPUS_FORMAT, {"name": folder.name, "splits": splits, **info}) as temporary:
        for split, texts in documents.items():
            lines = [line for text in texts for line in text]
            content = "".join(f"{line}\n" for line in lines).encode()
            (temporary / f"{split}.txt").write_bytes(content)
            starts = np.cumsum([0, *map(len, texts)])[: len(texts)]
            np.save(temporary / f"{split}.docs.npy", starts.astype(np.int64))
            words = sum(len(line.split()) for line in lines)
            splits[split] = {"lines": len(lines), "words": words, "bytes": len(content), "documents": len(texts)}
    return open_corpus(folder)


def make(data: Path, kind: Kind = "word", documents: dict[str, list[list[str]]] | None = None) -> TokenStore:
    corpus = make_corpus(data / "tiny", documents or DOCUMENTS)
    return tokenize(corpus, CONFIGS[kind], data, note=lambda _: None, progress=False)


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> Kind:
    kind: Kind = request.param
    return kind


@pytest.fixture
def notes() -> list[str]:
    return []


def test_word_store_is_every_line_with_its_end(tmp_path: Path) -> None:
    store = make(tmp_path)
    split = store.split("train")
    assert store.tokenizer.decode(split.ids[:].tolist()) == "= One =\n\nthe cat sat on the mat\nthe <unk> é\n\n\n"
    assert split.documents.tolist() == [0, 12, 16]
    assert (split.tokens, split.words) == (18, 18)
    assert store.tokenizer.decode(store.split("valid").ids[:].tolist()) == "the <unk> sat\non the mat\n"


@pytest.mark.parametrize("kind", ["bpe", "byte"])
def test_other_stores_are_the_text_with_a_mark_at_each_document_s_end(kind: Kind, tmp_path: Path) -> None:
    store = make(tmp_path, kind)
    for name, texts in DOCUMENTS.items():
        split = store.split(name)
        parts = np.split(split.ids[:], split.documents[1:])
        assert [store.tokenizer.decode(part.tolist()) for part in parts] == ["\n".join([*t, ""]) for t in texts]
        assert [part[-1] for part in parts] == [store.tokenizer.eos_id] * len(texts)
        assert (split.ids[:] == store.tokenizer.eos_id).sum() == len(texts)


def test_counts_do_not_depend_on_the_tokenizer(kind: Kind, tmp_path: Path) -> None:
    store = make(tmp_path, kind)
    assert store.splits == ("train", "valid")
    assert [store.split(name).words for name in store.splits] == [12 + 6, 6 + 2]
    assert [store.split(name).bytes for name in store.splits] == [
        len("= One =\n\nthe cat sat on the mat\nthe <eos> é\r\n\n\n") + 1,
        23,
    ]
    assert all(len(store.split(name).ids) == store.split(name).tokens for name in store.splits)


def test_arrays_are_npy_files_of_the_smallest_type(tmp_path: Path) -> None:
    store = make(tmp_path)
    loaded = np.load(store.folder / "train-00000.npy")
    assert loaded.dtype == np.uint16
    assert loaded.tolist() == store.split("train").ids[:].tolist()
    assert np.load(store.folder / "train-00000.docs.npy").tolist() == [0, 12, 16]
    many = {"train": [[" ".join(f"w{number}" for number in range(2**16 - 1))]]}
    wide = make(tmp_path / "wide", documents=many)
    assert wide.split("train").ids.dtype == np.uint32
    assert wide.split("train").ids[:-1].tolist() == [
        wide.tokenizer.encode(word)[0] for word in many["train"][0][0].split()
    ]


def test_words_of_other_splits_are_not_in_the_vocabulary(tmp_path: Path) -> None:
    assert make(tmp_path).tokenizer.encode("dog") == [0]


@settings(max_examples=40, deadline=None)
@given(
    documents=st.lists(
        st.lists(st.text("ab \n\t<eos>é").map(lambda text: text.replace("\n", "")), min_size=1), min_size=1
    ),
    size=st.integers(1, 5),
    kind=st.sampled_from(KINDS),
)
def test_the_size_of_batches_changes_nothing(
    documents: list[list[str]], size: int, kind: Kind, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("store")
    whole = make(folder / "whole", kind, {"train": documents})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shards, "_BATCH_LINES", size)
        patch.setattr(shards, "_BATCH_CHARACTERS", 3 * size)
        small = make(folder / "small", kind, {"train": documents})
    assert small.sha256 == whole.sha256
    assert small.split("train").documents.tolist() == whole.split("train").documents.tolist()


def test_one_very_long_line_is_cut_and_gives_the_same_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    documents = {"train": [["the cat  sat " * 50], ["on"]]}
    whole = make(tmp_path / "whole", documents=documents)
    monkeypatch.setattr(tokenizer_module, "_PIECE", 16)
    cut = make(tmp_path / "cut", documents=documents)
    assert cut.sha256 == whole.sha256
    assert cut.split("train").tokens == 153


def test_an_empty_split_is_an_empty_array(kind: Kind, tmp_path: Path) -> None:
    split = make(tmp_path, kind, DOCUMENTS | {"test": []}).split("test")
    assert (split.tokens, split.words, split.ids[:].tolist(), split.documents.tolist()) == (0, 0, [], [])


def test_missing_splits_are_named(tmp_path: Path) -> None:
    with pytest.raises(LmtrainError, match="has no test split: it has train, valid"):
        make(tmp_path).split("test")
    with pytest.raises(LmtrainError, match="no train split"):
        make(tmp_path / "other", documents={"valid": [["a"]]})


def test_the_floor_travels_with_the_store(tmp_path: Path) -> None:
    corpus = make_corpus(tmp_path / "sample", DOCUMENTS, floor=FLOOR)
    store = tokenize(corpus, CONFIGS["word"], tmp_path, note=lambda _: None, progress=False)
    assert store.manifest["floor"] == FLOOR
    assert "floor" not in make(tmp_path).manifest


@pytest.mark.parametrize(("vocab_size", "holds"), [(5, False), (1000, True)])
def test_the_floor_is_that_of_a_text_whose_words_are_all_known(vocab_size: int, holds: bool, tmp_path: Path) -> None:
    """`<unk>` in place of rare words is easier to predict than they are."""
    corpus = make_corpus(tmp_path / "sample", DOCUMENTS, floor=FLOOR)
    config = TokenizerConfig(kind="word", vocab_size=vocab_size)
    store = tokenize(corpus, config, tmp_path, note=lambda _: None, progress=False)
    assert ("floor" in store.manifest) == holds
    given = tokenize(
        corpus, TokenizerConfig(file=store.folder / TOKENIZER), tmp_path, note=lambda _: None, progress=False
    )
    assert "floor" not in given.manifest


def test_progress_goes_to_no_bar_without_a_terminal(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    corpus = make_corpus(tmp_path / "tiny", DOCUMENTS)
    for kind in KINDS:
        tokenize(corpus, CONFIGS[kind], tmp_path, note=lambda _: None, progress=True)
    assert capfd.readouterr() == ("", "")


def test_a_current_store_is_opened_and_not_made_again(kind: Kind, tmp_path: Path, notes: list[str]) -> None:
    store = make(tmp_path, kind)
    inode = (store.folder / MANIFEST).stat().st_ino
    corpus = open_corpus(tmp_path / "tiny")
    again = tokenize(corpus, CONFIGS[kind], tmp_path, note=notes.append, progress=False)
    assert (again.sha256, notes) == (store.sha256, [])
    assert (store.folder / MANIFEST).stat().st_ino == inode
    forced = tokenize(corpus, CONFIGS[kind], tmp_path, force=True, note=notes.append, progress=False)
    assert forced.sha256 == store.sha256
    assert (store.folder / MANIFEST).stat().st_ino != inode
    assert "asked to" in notes[0]


def test_who_waited_for_another_process_takes_its_store(
    kind: Kind, tmp_path: Path, notes: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    corpus = make_corpus(tmp_path / "tiny", DOCUMENTS)
    others: list[TokenStore] = []

    @contextmanager
    def waiting(parts: Path) -> Iterator[None]:
        with monkeypatch.context() as patch:
            patch.setattr(tokenizing, "alone_in", alone_in)
            others.append(tokenize(corpus, CONFIGS[kind], tmp_path, note=lambda _: None, progress=False))
        yield

    monkeypatch.setattr(tokenizing, "alone_in", waiting)
    store = tokenize(corpus, CONFIGS[kind], tmp_path, note=notes.append, progress=False)
    assert (store.sha256, notes) == (others[0].sha256, [])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["tiny", store.folder.name]


def test_a_changed_corpus_has_a_store_beside_the_old_one(tmp_path: Path, notes: list[str]) -> None:
    old = make(tmp_path)
    corpus = make_corpus(tmp_path / "tiny", DOCUMENTS | {"valid": [["the cat sat", "on a mat"]]})
    new = tokenize(corpus, CONFIGS["word"], tmp_path, note=notes.append, progress=False)
    assert new.sha256 != old.sha256
    assert open_store(old.folder).sha256 == old.sha256
    for store in (old, new):
        store.folder.rename(tmp_path / f"moved-{store.sha256[:4]}")
        found = find_store(tmp_path, store.sha256)
        assert found is not None
        assert found.sha256 == store.sha256
        flip(found.folder / "valid-00000.npy", 130)
        assert find_store(tmp_path, store.sha256) is None
    assert find_store(tmp_path / "missing", new.sha256) is None


def test_a_store_of_another_configuration_is_made_again(tmp_path: Path, notes: list[str]) -> None:
    store = make(tmp_path)
    config = TokenizerConfig(kind="word", vocab_size=5)
    corpus = open_corpus(tmp_path / "tiny")
    assert store_folder(corpus, config, tmp_path) != store.folder
    store.folder.rename(store_folder(corpus, config, tmp_path))
    assert tokenize(corpus, config, tmp_path, note=notes.append, progress=False).tokenizer.vocab_size == 5
    assert "configuration has changed" in notes[0]


def test_a_damaged_store_is_made_again(tmp_path: Path, notes: list[str]) -> None:
    store = make(tmp_path)
    flip(store.folder / "valid-00000.npy", 130)
    again = tokenize(open_corpus(tmp_path / "tiny"), CONFIGS["word"], tmp_path, note=notes.append, progress=False)
    assert again.sha256 == store.sha256
    assert "damaged" in notes[0]


def test_a_damaged_corpus_is_refused(tmp_path: Path) -> None:
    corpus = make_corpus(tmp_path / "tiny", DOCUMENTS)
    flip(tmp_path / "tiny" / "valid.txt", 3)
    with pytest.raises(LmtrainError, match=r"valid\.txt is damaged"):
        tokenize(corpus, CONFIGS["word"], tmp_path, note=lambda _: None, progress=False)
    assert not store_folder(corpus, CONFIGS["word"], tmp_path).exists()


def test_other_files_in_the_store_s_place_are_never_deleted(tmp_path: Path) -> None:
    corpus = make_corpus(tmp_path / "tiny", DOCUMENTS)
    folder = store_folder(corpus, CONFIGS["word"], tmp_path)
    folder.mkdir()
    (folder / "thesis.txt").write_text("mine")
    for force in (False, True):
        with pytest.raises(LmtrainError, match="holds something else"):
            tokenize(corpus, CONFIGS["word"], tmp_path, force=force, note=lambda _: None, progress=False)
    assert (folder / "thesis.txt").read_text() == "mine"


def flip(path: Path, position: int) -> None:
    content = bytearray(path.read_bytes())
    content[position] ^= 1
    path.write_bytes(content)


def test_the_data_package_needs_no_torch() -> None:
    code = (
        "import sys, lmtrain.data.order, lmtrain.data.tokens; print('torch' in sys.modules, 'datasets' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "False"]
