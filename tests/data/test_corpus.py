"""Sources and the corpus folder: the counts, the documents, what is rejected, and what is left on the disk."""

import math
import os
import resource
import shutil
from itertools import product
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from lmtrain.config.schema import DataConfig
from lmtrain.data import sample
from lmtrain.data.corpus import Corpus, make_corpus, open_corpus
from lmtrain.data.sources import find_source
from lmtrain.errors import LmtrainError, UsageError
from tests.data.helpers import lines, parquet, starts, write
from tests.helpers import messages

ARTICLES = [
    " ",
    " = Robin = ",
    " ",
    " The robin is a bird . ",
    " = ",
    " = = Song = = ",
    " ",
    " It sings = well . ",
    " ",
    " = Owl = ",
    " ",
    " The owl <unk> . ",
    " ",
]
"""13 lines, two articles, the second at line 9; ` = ` and ` = = x = = ` start none."""


class Importer:
    """Imports a local source into a new data folder and keeps the notes."""

    def __init__(self, tmp_path: Path) -> None:
        self.dir = tmp_path / "data"
        self.notes: list[str] = []

    def __call__(self, source: Path | str, **fields: Any) -> Corpus:
        data = DataConfig(source=str(source), dir=self.dir, **fields)
        with messages() as self.notes:
            return make_corpus(data)


@pytest.fixture
def load(tmp_path: Path) -> Importer:
    return Importer(tmp_path)


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    path = tmp_path / "text"
    path.mkdir()
    return path


@pytest.fixture
def small(texts: Path) -> Path:
    """A folder with two lines of text."""
    write(texts / "train.txt", "one two\n")
    write(texts / "valid.txt", "x\n")
    return texts


def test_wikitext_has_its_counts_and_a_document_at_each_title(load: Importer, texts: Path) -> None:
    text = "\n".join(ARTICLES) + "\n"
    write(texts / "wiki.train.tokens", text)
    write(texts / "wiki.valid.tokens", text.removesuffix("\n"))
    write(texts / "wiki.test.tokens", text)
    made = load(texts)
    words = sum(len(line.split()) for line in ARTICLES)
    expected = {"lines": 13, "words": words, "bytes": len(text.encode()), "documents": 2}
    assert made.splits == {"train": expected, "valid": expected, "test": expected}
    assert list(made.splits) == ["train", "valid", "test"]
    assert starts(made, "train") == [0, 9]
    assert (made.folder / "train.txt").read_bytes() == text.encode()


def test_text_before_the_first_heading_is_a_document(load: Importer, texts: Path) -> None:
    write(texts / "train.txt", "preface\n\n= One =\n\ntext\n\n = Two = \n\ntext\n = Three = \n\n = Four =\ntext\n")
    write(texts / "valid.txt", "a\n")
    assert starts(load(texts), "train") == [0, 2, 6]


def test_rows_that_are_wikitext_lines_start_documents_at_titles_only(load: Importer, texts: Path) -> None:
    write(texts / "train.parquet", parquet(["" if line == " " else f"{line}\n" for line in ARTICLES]))
    write(texts / "valid.parquet", parquet(["one\n\n = No article = \n\ntwo", "three"]))
    made = load(texts)
    assert starts(made, "train") == [0, 9]
    assert starts(made, "valid") == [0, 5]


@pytest.mark.parametrize("content", ["", " \n\n\t\n"])
def test_a_split_without_words_is_rejected(load: Importer, texts: Path, content: str) -> None:
    write(texts / "valid.txt", "a\n")
    write(texts / "train.txt", content)
    with pytest.raises(LmtrainError, match=r"the train split of .* has no words"):
        load(texts)
    assert not any(load.dir.iterdir())


def test_single_file_is_cut_90_5_5_by_lines(load: Importer, tmp_path: Path) -> None:
    text = [f"line {number}" for number in range(40)]
    made = load(write(tmp_path / "book.txt", "\n".join(text)))
    assert (lines(made, "train"), lines(made, "valid"), lines(made, "test")) == (text[:36], text[36:38], text[38:])
    assert any("lines are split, in order, into 90% train, 5% valid, 5% test" in note for note in load.notes)
    assert set(made.manifest["files"]) == {f"{split}.{end}" for split in made.splits for end in ("txt", "docs.npy")}


def test_missing_valid_is_cut_from_train(load: Importer, texts: Path) -> None:
    write(texts / "train.txt", "".join(f"line {number}\n" for number in range(40)))
    made = load(texts)
    assert list(made.splits) == ["train", "valid"]
    assert lines(made, "valid") == ["line 38", "line 39"]
    assert any("no validation split" in note for note in load.notes)
    write(texts / "test.txt", "held out\n")
    assert lines(load(texts), "test") == ["held out"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("two words", r"book\.txt can't be split, since it has few lines, or one"),
        ("word\n" * 22 + "\n\n" + "word\n", "the valid split, .* could be a file of its own, has no words: give it"),
    ],
)
def test_too_little_text_to_cut_is_rejected(load: Importer, tmp_path: Path, content: str, message: str) -> None:
    with pytest.raises(LmtrainError, match=message):
        load(write(tmp_path / "book.txt", content))
    assert not any(load.dir.iterdir())


def test_unchanged_is_skipped_and_changed_is_made_beside_it(load: Importer, small: Path) -> None:
    first = load(small)
    inode = first.folder.stat().st_ino
    (small / "train.txt").touch()
    again = load(small)
    assert (again.folder.stat().st_ino, again.sha256, load.notes) == (inode, first.sha256, [])
    write(small / "train.txt", "one TWO\n")
    changed = load(small)
    assert lines(changed, "train") == ["one TWO"]
    assert changed.sha256 != first.sha256
    assert {path.name for path in load.dir.iterdir()} == {first.folder.name, changed.folder.name}
    assert lines(open_corpus(first.folder), "train") == ["one two"]


def test_damaged_corpus_is_made_again(load: Importer, small: Path) -> None:
    made = load(small)
    write(made.folder / "train.txt", "one twa\n")
    assert lines(load(small), "train") == ["one two"]
    assert "train.txt is damaged or was changed" in load.notes[0]
    write(made.folder / "manifest.json", "{")
    assert lines(load(small), "train") == ["one two"]


def test_of_many_files_a_few_are_named(load: Importer, texts: Path) -> None:
    for number in range(300):
        (texts / f"{number % 3}").mkdir(exist_ok=True)
        write(texts / f"{number % 3}/{number:03}.txt", f"the text of {number}\n")
    made = load(texts)
    assert "train split: 0/000.txt, 0/003.txt, 0/006.txt, ... (300 files)" in load.notes
    assert max(map(len, load.notes)) < 300
    assert (len(starts(made, "train")), len(starts(made, "valid"))) == (285, 15)


def test_the_corpus_of_a_hidden_file_is_not_hidden(load: Importer, tmp_path: Path) -> None:
    """Hidden folders of data are those that are not finished."""
    assert load(write(tmp_path / ".notes.txt", "a word\n" * 20)).folder.name.startswith("notes-")


def test_foreign_files_in_the_corpus_folder_survive(load: Importer, small: Path) -> None:
    foreign = load(small).folder
    shutil.rmtree(foreign)
    foreign.mkdir()
    for name in ("train.txt", "thesis.txt", "manifest.json"):
        write(foreign / name, "years of work")
        with pytest.raises(LmtrainError, match="holds files that lmtrain didn't write"):
            load(small)
        assert (foreign / name).read_text() == "years of work"
        assert load.notes == [] or name == "manifest.json"
    shutil.rmtree(foreign)
    write(foreign, "years of work")
    with pytest.raises(LmtrainError, match="holds files that lmtrain didn't write"):
        load(small)
    assert foreign.read_text() == "years of work"


def test_an_empty_folder_is_not_made_again(load: Importer, small: Path) -> None:
    folder = load(small).folder
    shutil.rmtree(folder)
    folder.mkdir()
    assert load(small).folder == folder
    assert not any("again" in note for note in load.notes)


@pytest.mark.parametrize(
    "source",
    ["wikitext2", "books/trian.json", "/nowhere/at/all", "a/b/c", "a\0b", "x" * 5_000, "~nosuchuser/text", "../a"],
)
@pytest.mark.usefixtures("folder")
def test_an_unknown_source_is_named_with_what_it_may_be(load: Importer, source: str) -> None:
    with pytest.raises(LmtrainError, match=r"not a file or folder here, not a hub id .* none of sample, wikitext-2"):
        load(source)


def test_a_folder_that_the_system_rejects_is_named(load: Importer) -> None:
    load.dir.mkdir()
    with pytest.raises(LmtrainError, match=r"/owner--x{300} can't be read: File name too long"):
        load(f"owner/{'x' * 300}")


@pytest.mark.usefixtures("folder")
def test_an_existing_path_wins_over_a_hub_id(load: Importer) -> None:
    Path("owner/name").mkdir(parents=True)
    write(Path("owner/name/train.txt"), "mine\n")
    write(Path("owner/name/valid.txt"), "mine\n")
    assert lines(load("owner/name"), "train") == ["mine"]


def test_a_name_of_any_length_can_be_used(load: Importer, tmp_path: Path) -> None:
    made = load(write(tmp_path / f"{'漢' * 83}.txt", "a b\n" * 30))
    assert made.folder.name.startswith(f"{'漢' * 50}-")


def test_names_in_another_encoding_can_be_used(load: Importer, texts: Path) -> None:
    for name in (b"caf\xe9.txt", b"other.txt"):
        (texts / os.fsdecode(name)).write_text("a\n" * 30)
    write(texts / os.fsdecode(b"caf\xe9.parquet"), parquet(["a"]))
    (texts / os.fsdecode(b"caf\xe9.txt.zst")).write_bytes(pa.compress(b"a\n", codec="zstd", asbytes=True))
    made = load(texts)
    names = ["caf\\xe9.parquet", "caf\\xe9.txt", "caf\\xe9.txt.zst", "other.txt"]
    assert list(made.manifest["origin"]["files"]["train"]) == names
    assert load(texts).sha256 == made.sha256
    assert load.notes == []


@pytest.mark.usefixtures("folder")
def test_corpus_folders_differ_by_source() -> None:
    for name, text in (("one/text", "0\n"), ("one/train", "0\n"), ("two/text", "1\n"), ("sample", "2\n")):
        Path(name).mkdir(parents=True)
        write(Path(name, "train.txt"), text)
    sources: list[dict[str, Any]] = [
        {"source": "one/text"},
        {"source": "one/text/train.txt"},
        {"source": "one/train"},  # a folder that holds only an equal file
        {"source": "two/text"},
        {"source": "./sample"},
        {"source": "sample"},
        {"source": "sample", "sample_tokens": 2_000},
        {"source": "owner/name"},
        {"source": "owner/name", "subset": "a"},
        {"source": "owner/name", "subset": "b"},
        {"source": "owner/name", "revision": "a"},
        {"source": "owner/name", "revision": "b"},
        {"source": "owner/name", "text_column": "a"},
        {"source": "owner/name-part"},
        {"source": "wikitext-2"},
    ]
    folders = {find_source(DataConfig(**fields)).folder for fields in sources}
    assert len(folders) == len(sources)
    assert {"owner--name", "wikitext-2", "sample-2000"} <= folders


@pytest.mark.parametrize(
    ("source", "field"), [("wikitext-2", "subset"), *product(("sample", "book.txt"), ("subset", "revision"))]
)
@pytest.mark.usefixtures("folder")
def test_a_field_without_meaning_for_the_source_is_rejected(source: str, field: str) -> None:
    Path("book.txt").write_text("one two three\n")
    with pytest.raises(UsageError, match=rf"data\.{field} has no meaning with data\.source={source}: .* null"):
        find_source(DataConfig(source=source, **{field: "main"}))


def another_grammar() -> sample.Grammar:
    """Articles of ten lines of four tokens; each line costs ln 8 nats."""
    return sample.Grammar("one [a|b|c|d|e|f|g|h] two / " * 10, {}, {})


def test_sample_splits_and_floor(load: Importer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sample, "encyclopedia", another_grammar)
    made = load("sample", sample_tokens=200_000)
    tokens = {"train": 200_000, "valid": 10_000, "test": 10_000}
    for split, number in tokens.items():
        counts, floor = made.splits[split], made.manifest["floor"][split]
        assert counts["words"] + counts["lines"] == floor["tokens"] == number
        assert floor["word_perplexity"] == pytest.approx(8**0.25)
        assert floor["nats"] == pytest.approx(number / 4 * math.log(8))
        assert starts(made, split) == list(range(0, number // 4, 10))
    assert len({tuple(lines(made, split)[:100]) for split in made.splits}) == 3


def test_a_full_disk_is_an_error_and_leaves_nothing(load: Importer, small: Path) -> None:
    write(small / "train.txt", "word\n" * 1_000_000)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, hard))
    try:
        with pytest.raises(LmtrainError, match=r"can't write .*Free some space"):
            load(small)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert not any(load.dir.iterdir())


def test_what_a_killed_process_left_is_deleted_at_the_next_start(tmp_path: Path, notes: list[str]) -> None:
    data = DataConfig(dir=tmp_path, sample_tokens=1000)
    corpus = make_corpus(data)
    corpus.folder.rename(tmp_path / f".tmp-{corpus.folder.name}~old-0123abcd")  # killed while it was replaced
    (tmp_path / ".tmp-other.word-4567cdef").mkdir()
    (tmp_path / ".tmp-other.word-4567cdef" / "train.npy").touch()
    notes.clear()
    assert make_corpus(data) == corpus
    assert [path.name for path in tmp_path.iterdir()] == [corpus.folder.name]
    assert notes == []


def test_a_source_may_begin_with_a_tilde(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    write(tmp_path / "book.txt", "a b c d\n" * 40)
    assert find_source(DataConfig(source="~/book.txt")).folder.startswith("book-")


def test_the_column_of_a_table_makes_another_corpus_and_that_of_plain_text_does_not(tmp_path: Path) -> None:
    table = write(tmp_path / "table.csv", "text,title\na,b\n")
    plain = write(tmp_path / "plain.txt", "a\n")
    folders = [
        [find_source(DataConfig(source=str(source), text_column=column)).folder for column in ("text", "title")]
        for source in (table, plain)
    ]
    assert [len(set(names)) for names in folders] == [2, 1]


def test_a_corpus_of_another_origin_is_made_again(load: Importer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sample, "encyclopedia", another_grammar)
    before = load("sample", sample_tokens=1_000).sha256
    monkeypatch.setattr("lmtrain.data.sources._SAMPLE_SEEDS", {"train": 7, "valid": 8, "test": 9})
    assert load("sample", sample_tokens=1_000).sha256 != before
