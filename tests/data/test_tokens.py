"""The token store: what it holds, when it is made again, and that damaged files are rejected."""

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lmtrain.config.schema import DataConfig, TokenizerConfig
from lmtrain.data import tokens as tokens_module
from lmtrain.data.corpus import make_corpus, open_corpus
from lmtrain.data.tokenizer_file import Kind
from lmtrain.data.tokenizing import tokenize
from lmtrain.data.tokens import find_store, open_store
from lmtrain.errors import LmtrainError
from lmtrain.storage.run_folder import TOKENIZER
from tests.data.helpers import CONFIGS, DOCUMENTS, KINDS, corpus_of, make_store
from tests.helpers import flip_bit

FLOOR = {split: {"word_perplexity": 3.0, "nats": 1.0, "tokens": 1} for split in ("train", "valid")}


def test_word_store_is_every_line_with_its_end(tmp_path: Path) -> None:
    store = make_store(tmp_path)
    split = store.split("train")
    assert store.tokenizer.decode(split.ids.tolist()) == "= One =\n\nthe cat sat on the mat\nthe <unk> é\n\n\n"
    assert (split.tokens, split.words) == (18, 18)
    assert store.tokenizer.decode(store.split("valid").ids.tolist()) == "the <unk> sat\non the mat\n"
    assert store.tokenizer.encode("dog") == [0], "words of other splits are not in the vocabulary"


@pytest.mark.parametrize("kind", ["bpe", "byte"])
def test_other_stores_are_the_text_with_a_token_at_each_document_s_end(kind: Kind, tmp_path: Path) -> None:
    store = make_store(tmp_path, kind)
    for name, texts in DOCUMENTS.items():
        split = store.split(name)
        ends = np.flatnonzero(split.ids == store.tokenizer.eos_id) + 1
        assert ends[-1] == split.tokens
        parts = np.split(split.ids, ends[:-1])
        assert [store.tokenizer.decode(part.tolist()) for part in parts] == ["\n".join([*t, ""]) for t in texts]


@pytest.mark.parametrize("kind", KINDS)
def test_counts_do_not_depend_on_the_tokenizer(kind: Kind, tmp_path: Path) -> None:
    store = make_store(tmp_path, kind)
    assert list(store.splits) == ["train", "valid"]
    assert [store.split(name).words for name in store.splits] == [12 + 6, 6 + 2]
    train = "= One =\n\nthe cat sat on the mat\nthe <eos> é\r\n\n\n"
    assert [store.split(name).bytes for name in store.splits] == [len(train.encode()), 23]


def test_ids_are_stored_in_the_smallest_type(tmp_path: Path) -> None:
    store = make_store(tmp_path)
    loaded = np.fromfile(store.folder / "train.bin", np.uint16)
    assert loaded.tolist() == store.split("train").ids.tolist()
    for size, dtype in ((2**16, "uint16"), (2**16 + 1, "uint32")):
        words = [f"w{number}" for number in range(size - 2)]  # beside `<unk>` and `<eos>`
        store = make_store(tmp_path / str(size), documents={"train": [[" ".join(words)]]})
        assert (store.tokenizer.vocab_size, store.split("train").ids.dtype.name) == (size, dtype)
        assert store.split("train").ids[:-1].tolist() == [store.tokenizer.encode(word)[0] for word in words]


def test_counts_are_those_of_each_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    split = make_store(tmp_path).split("train")
    expected = [(split.ids == index).sum() for index in range(20)]
    monkeypatch.setattr(tokens_module, "_BLOCK", 7)
    assert split.counts(20).tolist() == expected


def test_a_text_may_have_any_name(tmp_path: Path) -> None:
    (tmp_path / "½ m².txt").write_text("once upon a time there was a river .\n" * 20)
    data = DataConfig(source=str(tmp_path / "½ m².txt"), dir=tmp_path / "data")
    store = tokenize(make_corpus(data), CONFIGS["word"])
    assert open_store(store.folder).manifest["corpus"].startswith("½_m²-")


@pytest.mark.parametrize(
    ("config", "splits"),
    [({"kind": "word", "vocab_size": 5}, []), ({"kind": "word"}, ["train"]), ({"kind": "byte"}, ["train", "valid"])],
)
def test_the_floor_is_that_of_splits_whose_words_are_all_known(
    config: dict[str, Any], splits: list[str], tmp_path: Path
) -> None:
    """`<unk>` in place of rare words is easier to predict than they are."""
    documents = DOCUMENTS | {"train": [["the cat sat on the mat"]]}
    corpus = corpus_of(tmp_path / "sample", documents, floor=FLOOR)
    store = tokenize(corpus, TokenizerConfig(**config))
    again = tokenize(corpus, TokenizerConfig(file=store.folder / TOKENIZER))
    for made in (store, again):
        assert [split for split in made.splits if made.split(split).floor is not None] == splits


@pytest.mark.parametrize(("known", "holds"), [(998, False), (999, True)])
def test_the_floor_allows_a_thousandth_of_unknown_words(known: int, holds: bool, tmp_path: Path) -> None:
    documents = {"train": [["the cat"]], "valid": [[f"{'the ' * (known - 1)}dog"]]}  # with the line's end
    split = tokenize(corpus_of(tmp_path / "sample", documents, floor=FLOOR), TokenizerConfig(kind="word")).split(
        "valid"
    )
    assert (split.tokens, split.replaced) == (known + 1, 1)
    assert (split.floor is not None) == holds


def test_a_changed_corpus_has_a_store_beside_the_old_one(tmp_path: Path, notes: list[str]) -> None:
    old = make_store(tmp_path)
    new = make_store(tmp_path, documents=DOCUMENTS | {"valid": [["the cat sat", "on a mat"]]})
    assert new.sha256 != old.sha256
    assert open_store(old.folder).sha256 == old.sha256
    for store in (old, new):
        store.folder.rename(tmp_path / f"moved-{store.sha256[:4]}")
        found = find_store(tmp_path, store.sha256)
        assert found is not None
        assert found.sha256 == store.sha256
        flip_bit(found.folder / "valid.bin", 2)
        assert find_store(tmp_path, store.sha256) is None
        assert notes.pop() == f"{found.folder / 'valid.bin'} is damaged or was changed: it is not used"
    assert find_store(tmp_path / "missing", new.sha256) is None
    assert find_store(tmp_path / (300 * "n"), new.sha256) is None  # the system fails, as in another user's home


def test_a_store_of_another_configuration_is_made_again(tmp_path: Path, notes: list[str]) -> None:
    store, corpus = make_store(tmp_path), open_corpus(tmp_path / "tiny")
    config = TokenizerConfig(kind="word", vocab_size=5)
    folder = tokenize(corpus, config).folder
    shutil.rmtree(folder)
    store.folder.rename(folder)
    notes.clear()
    assert tokenize(corpus, config).tokenizer.vocab_size == 5
    assert "configuration has changed" in notes[0]


def test_an_unfinished_store_is_not_found(tmp_path: Path) -> None:
    store = make_store(tmp_path)
    store.folder.rename(tmp_path / ".tmp-store-0123abcd")
    assert find_store(tmp_path, store.sha256) is None


@pytest.mark.parametrize("name", ["thesis.txt", "valid.bin/thesis.txt"])
def test_other_files_in_the_store_s_folder_are_never_deleted(tmp_path: Path, name: str) -> None:
    corpus = corpus_of(tmp_path / "tiny", DOCUMENTS)
    folder = tokenize(corpus, CONFIGS["word"]).folder
    (folder / "valid.bin").unlink()
    thesis = folder / name
    thesis.parent.mkdir(exist_ok=True)
    thesis.write_text("mine")
    with pytest.raises(LmtrainError, match="holds files that lmtrain didn't write"):
        tokenize(corpus, CONFIGS["word"])
    assert thesis.read_text() == "mine"


def test_downloading_and_tokenizing_load_no_large_library() -> None:
    code = "import sys; from lmtrain.data import corpus, hub, tokenizing, tokens; "
    code += "print({'torch', 'datasets', 'pyarrow'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
