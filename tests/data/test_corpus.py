"""Local text, the sample and the corpus folder: the counts, the documents, the refusals, and what is left behind."""

import bz2
import json
import math
import os
import resource
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lmtrain.config.schema import DataConfig, TokenizerConfig
from lmtrain.data import compressed, corpus, local, normal, sample
from lmtrain.data.corpus import Corpus, corpus_folder, download, open_corpus
from lmtrain.data.tokenizing import tokenize
from lmtrain.errors import LmtrainError
from tests.hostile.inputs import limited_memory

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
"""13 lines, 35 words and marks, two articles, the second at line 9; ` = ` alone and ` = = x = = ` start none."""


class Importer:
    """Imports a local source into a fresh data folder and keeps the notes."""

    def __init__(self, tmp_path: Path) -> None:
        self.dir = tmp_path / "data"
        self.notes: list[str] = []

    def __call__(self, source: Path | str, *, force: bool = False, **fields: Any) -> Corpus:
        self.notes.clear()
        data = DataConfig(source=str(source), dir=self.dir, **fields)
        return download(data, force=force, note=self.notes.append)


@pytest.fixture
def load(tmp_path: Path) -> Importer:
    return Importer(tmp_path)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "text"
    path.mkdir()
    return path


def write(path: Path, content: str | bytes) -> Path:
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def parquet(path: Path, rows: list[Any], column: str = "text") -> Path:
    pq.write_table(pa.table({column: rows}), path)
    return path


def test_wikitext_counts_and_documents(load: Importer, folder: Path) -> None:
    text = "\n".join(ARTICLES) + "\n"
    write(folder / "wiki.train.tokens", text)
    write(folder / "wiki.valid.tokens", text.removesuffix("\n"))
    write(folder / "wiki.test.tokens", text)
    made = load(folder)
    words = sum(len(line.split()) for line in ARTICLES)
    expected = {"lines": 13, "words": words, "bytes": len(text.encode()), "documents": 2}
    assert made.manifest["splits"] == {"train": expected, "valid": expected, "test": expected}
    assert made.splits == ("train", "valid", "test")
    assert list(made.lines("train")) == ARTICLES
    assert made.document_starts("train").tolist() == [0, 9]
    assert made.document_starts("train").dtype == np.int64
    assert (made.folder / "train.txt").read_bytes() == text.encode()


def test_text_before_the_first_heading_is_a_document(load: Importer, folder: Path) -> None:
    write(folder / "train.txt", "preface\n\n= One =\n\ntext\n\n = Two = \n\ntext\n = Three = \n\n = Four =\ntext\n")
    write(folder / "valid.txt", "a\n")
    assert load(folder).document_starts("train").tolist() == [0, 2, 6]


@pytest.mark.parametrize(
    ("content", "lines"),
    [
        (b"a b\r\nc\r\n", ["a b", "c"]),
        (b"a\rb\nc\r", ["a\rb", "c\r"]),
        (b"\xef\xbb\xbfa\n\xef\xbb\xbfb\n", ["a", "\ufeffb"]),
        (b"a\n\n\nb", ["a", "", "", "b"]),
        ("a\u2028b\x0bc\x85d\x1ce\n".encode(), ["a\u2028b\x0bc\x85d\x1ce"]),
    ],
    ids=["crlf", "lone-cr", "bom", "blank-and-no-last-end", "unicode-separators"],
)
def test_line_rule(load: Importer, folder: Path, content: bytes, lines: list[str]) -> None:
    write(folder / "train.txt", content)
    write(folder / "valid.txt", "x\n")
    made = load(folder)
    assert list(made.lines("train")) == lines
    assert made.manifest["splits"]["train"]["documents"] == 1


@settings(max_examples=60, deadline=None)
@given(st.lists(st.text(st.characters(codec="utf-8", exclude_characters="\0\n\r\ufeff")), min_size=1))
def test_any_text_round_trips(tmp_path_factory: pytest.TempPathFactory, lines: list[str]) -> None:
    lines = [*lines, "word"]
    where = tmp_path_factory.mktemp("text")
    source = write(where / "source.txt", "\n".join(lines))
    counts = normal.write_split(where, "train", local.read_lines([source], "text"), False)
    assert list(normal.read_lines(where / "train.txt")) == lines
    assert counts["words"] == sum(len(line.split()) for line in lines)
    assert counts["bytes"] == (where / "train.txt").stat().st_size


def test_very_long_line_counts_its_words(tmp_path: Path) -> None:
    line = "word \u00a0\x1c" * 400_000
    counts = normal.write_split(tmp_path, "train", iter([(line, False)]), False)
    assert counts["words"] == len(line.split()) == 400_000


def test_line_over_the_cap_is_refused(load: Importer, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local, "LONGEST_LINE", 10)
    write(folder / "train.txt", "123456789\n12345678901\n")
    with pytest.raises(LmtrainError, match=r"train\.txt has a line of over .* \(byte 10\)"):
        load(folder)


@pytest.mark.parametrize(
    ("content", "byte"), [(b"good line\nna\xefve\n", 12), (b"\xef\xbb\xbfna\xefve\n", 5), (b"\xff\xfea\0b\0", 0)]
)
def test_not_utf8_names_file_and_byte(load: Importer, folder: Path, content: bytes, byte: int) -> None:
    write(folder / "train.txt", content)
    with pytest.raises(LmtrainError, match=rf"train\.txt is not UTF-8 text \(byte {byte}\)"):
        load(folder)
    assert not any(load.dir.iterdir())


@pytest.mark.parametrize(("encoding", "byte"), [("utf-16-le", 1), ("utf-16-be", 0)])
def test_utf16_without_a_mark_is_rejected(load: Importer, folder: Path, encoding: str, byte: int) -> None:
    write(folder / "train.txt", "plain words\n".encode(encoding))
    with pytest.raises(LmtrainError, match=rf"train\.txt has a NUL byte \(byte {byte}\), as text in UTF-16 has"):
        load(folder)


def test_json_lines_rows_are_documents(load: Importer, folder: Path) -> None:
    rows = ["one\ntwo\n", "three", "", "four\r\n\nfive"]
    write(folder / "train.jsonl", "".join(json.dumps({"body": row}) + "\n\n" for row in rows))
    parquet(folder / "dev.parquet", rows, "body")
    made = load(folder, text_column="body")
    for split in ("train", "valid"):
        assert list(made.lines(split)) == ["one", "two", "three", "", "four", "", "five"]
        assert made.document_starts(split).tolist() == [0, 2, 3, 4]


def test_rows_that_are_wikitext_lines(load: Importer, folder: Path) -> None:
    parquet(folder / "train.parquet", ["" if line == " " else f"{line}\n" for line in ARTICLES])
    parquet(folder / "valid.parquet", ["one\n\n = No article = \n\ntwo", "three"])
    made = load(folder)
    assert made.document_starts("train").tolist() == [0, 9]
    assert made.document_starts("valid").tolist() == [0, 5]


def test_parquet_shards_in_order(load: Importer, folder: Path) -> None:
    for number in range(11):
        parquet(folder / f"train-{number:05}-of-00011.parquet", [f"row {number}"])
    parquet(folder / "validation-00000-of-00001.parquet", ["valid"])
    parquet(folder / "test-00000-of-00001.parquet", ["test"])
    made = load(folder)
    assert list(made.lines("train")) == [f"row {number}" for number in range(11)]
    assert made.splits == ("train", "valid", "test")
    (folder / "train-00003-of-00011.parquet").unlink()
    with pytest.raises(LmtrainError, match="10 of the 11 files of its train split"):
        load(folder)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("train.jsonl", '{"text": "a"}\n{"text": \n', r"train\.jsonl, line 2, is not JSON"),
        ("train.jsonl", '{"text": "a"}\n[1]\n', r"line 2, is not a JSON object"),
        ("train.jsonl", '{"body": "a", "id": 1}\n', r"line 1, has no column 'text'.*\(body, id\)"),
        ("train.jsonl", '{"text": 3}\n', r"line 1, has int in 'text'"),
        ("train.jsonl", '{"text": "\\ud800"}\n', r"train\.jsonl, line 1, has half a surrogate pair"),
        ("train.jsonl", "[" * 100_000 + "\n", "line 1, is not JSON"),
        ("train.parquet", b"PAR1 no parquet", r"train\.parquet can't be read as parquet"),
        ("train.txt", "", "the train split of the source has no words"),
        ("train.txt", " \n\n\t\n", "the train split of the source has no words"),
        ("notes.txt", "a\n", "has no training text.*notes.txt"),
        ("train.csv", "a\n", "has no training text.*train.csv"),
    ],
)
def test_unreadable_source_is_one_sentence(
    load: Importer, folder: Path, name: str, content: str | bytes, message: str
) -> None:
    write(folder / "valid.txt", "a\n")
    write(folder / name, content)
    with pytest.raises(LmtrainError, match=message):
        load(folder)
    assert not load.dir.exists() or not any(load.dir.iterdir())


def test_parquet_column_missing_or_not_text(load: Importer, folder: Path) -> None:
    write(folder / "valid.txt", "a\n")
    parquet(folder / "train.parquet", ["a", None])
    with pytest.raises(LmtrainError, match=r"train\.parquet, row 2, has nothing \(null\) in 'text'.*take the row out"):
        load(folder)
    with pytest.raises(LmtrainError, match=r"has no column 'body'.*\(text\)"):
        load(folder, text_column="body")


@pytest.mark.parametrize("shards", ["0-of-99999999999", "1-of-1", "0-of-0"])
def test_a_shard_of_others_that_can_not_be(load: Importer, folder: Path, shards: str) -> None:
    write(folder / f"train-{shards}.txt", "a\n")
    with pytest.raises(LmtrainError, match=f"1 of the {shards.rpartition('-')[2]} files of its train split"):
        load(folder)


@pytest.mark.parametrize("name", ["valid.txt", "train/a.txt", "source"])
def test_a_link_to_nowhere_is_not_passed_over(load: Importer, folder: Path, name: str) -> None:
    (folder / "train").mkdir()
    write(folder / "train/b.txt", "a\n" * 30)
    (folder / name).symlink_to("nowhere")
    with pytest.raises(LmtrainError, match=f"{name} is a link to a file that isn't there: mend it or delete it"):
        load(folder / name if name == "source" else folder)


def test_two_files_for_a_split(load: Importer, folder: Path) -> None:
    for name in ("train.txt", "train.jsonl"):
        write(folder / name, "a\n")
    with pytest.raises(LmtrainError, match=r"several files for its train split, train\.jsonl and train\.txt"):
        load(folder)


def test_single_file_is_cut_90_5_5_by_lines(load: Importer, tmp_path: Path) -> None:
    lines = [f"line {number}" for number in range(40)]
    made = load(write(tmp_path / "book.txt", "\n".join(lines)))
    assert list(made.lines("train")) == lines[:36]
    assert list(made.lines("valid")) == lines[36:38]
    assert list(made.lines("test")) == lines[38:]
    assert any("lines are cut, in order, into 90% train, 5% valid, 5% test" in note for note in load.notes)
    assert sorted(made.manifest["files"]) == sorted(
        f"{split}.{end}" for split in made.splits for end in ("txt", "docs.npy")
    )


def test_single_file_is_cut_at_documents(load: Importer, tmp_path: Path) -> None:
    rows = [f"first {number}\nsecond" for number in range(20)]
    path = write(tmp_path / "book.jsonl", "".join(json.dumps({"text": row}) + "\n" for row in rows))
    made = load(path)
    assert {split: counts["documents"] for split, counts in made.manifest["splits"].items()} == {
        "train": 18,
        "valid": 1,
        "test": 1,
    }
    assert list(made.lines("valid")) == ["first 18", "second"]
    assert made.document_starts("train").tolist() == list(range(0, 36, 2))


def test_missing_valid_is_cut_from_train_and_missing_test_is_said(load: Importer, folder: Path) -> None:
    write(folder / "train.txt", "".join(f"line {number}\n" for number in range(40)))
    made = load(folder)
    assert made.splits == ("train", "valid")
    assert list(made.lines("valid")) == ["line 38", "line 39"]
    assert any("no valid split" in note for note in load.notes)
    assert any("has no test split" in note for note in load.notes)
    with pytest.raises(LmtrainError, match="has no test split: it has train, valid"):
        made.lines("test")
    write(folder / "test.txt", "held out\n")
    assert list(load(folder).lines("test")) == ["held out"]


def test_too_short_to_cut(load: Importer, tmp_path: Path) -> None:
    with pytest.raises(LmtrainError, match="19 lines are too few"):
        load(write(tmp_path / "book.txt", "word\n" * 19))
    assert not any(load.dir.iterdir())


def test_what_is_cut_off_has_words(load: Importer, tmp_path: Path) -> None:
    with pytest.raises(LmtrainError, match="what is cut off the source for valid has no words: give it some text"):
        load(write(tmp_path / "book.txt", "word\n" * 22 + "\n\n" + "word\n"))
    assert not any(load.dir.iterdir())


def test_unchanged_is_skipped_and_changed_is_made_beside_it(load: Importer, folder: Path) -> None:
    train = write(folder / "train.txt", "one two\n")
    write(folder / "valid.txt", "x\n")
    first = load(folder)
    born = first.folder.stat().st_ino
    train.touch()
    again = load(folder)
    assert again.folder.stat().st_ino == born
    assert load.notes == []
    assert again.sha256 == first.sha256
    write(train, "one TWO\n")
    changed = load(folder)
    assert list(changed.lines("train")) == ["one TWO"]
    assert changed.sha256 != first.sha256
    assert load(folder, force=True).sha256 == changed.sha256
    assert load.notes
    assert {path.name for path in load.dir.iterdir()} == {first.folder.name, changed.folder.name}
    assert list(open_corpus(first.folder).lines("train")) == ["one two"]


def test_damaged_corpus_is_made_again(load: Importer, folder: Path) -> None:
    write(folder / "train.txt", "one two\n")
    write(folder / "valid.txt", "x\n")
    made = load(folder)
    write(made.folder / "train.txt", "one twa\n")
    assert list(load(folder).lines("train")) == ["one two"]
    assert "train.txt is damaged or was changed" in load.notes[0]
    write(made.folder / "manifest.json", "{")
    assert list(load(folder).lines("train")) == ["one two"]
    write(made.folder / "train.txt", "short")
    with pytest.raises(LmtrainError, match="missing or truncated"):
        open_corpus(made.folder)


def test_foreign_files_in_the_corpus_folder_survive(load: Importer, folder: Path) -> None:
    write(folder / "train.txt", "one two\n")
    write(folder / "valid.txt", "x\n")
    foreign = load(folder).folder
    shutil.rmtree(foreign)
    foreign.mkdir()
    for name in ("train.txt", "thesis.txt", "manifest.json"):
        write(foreign / name, "years of work")
        with pytest.raises(LmtrainError, match="holds files that lmtrain didn't write"):
            load(folder)
        assert (foreign / name).read_text() == "years of work"


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("wikitext2", "did you mean wikitext-2"),
        ("books/trian.txt", r"no file or folder here.*did you mean books/train\.txt"),
        ("/nowhere/at/all", "no file or folder here, no hub id"),
        ("a/b/c", "no file or folder here, no hub id"),
        ("a\0b", "no file or folder here, no hub id"),
        ("x" * 5_000, "no file or folder here, no hub id"),
        ("~nosuchuser/text", "no file or folder here, no hub id"),
        ("../a", "no file or folder here, no hub id"),
        ("books/train.doc", r"is of no known kind.*\.jsonl"),
    ],
)
def test_unknown_source(
    load: Importer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str, message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("books").mkdir()
    for name in ("train.txt", "train.doc"):
        write(Path("books", name), "a\n")
    with pytest.raises(LmtrainError, match=message):
        load(source)


def test_an_existing_path_wins_over_a_hub_id(load: Importer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("owner/name").mkdir(parents=True)
    write(Path("owner/name/train.txt"), "mine\n")
    write(Path("owner/name/valid.txt"), "mine\n")
    assert list(load("owner/name").lines("train")) == ["mine"]


@pytest.mark.parametrize("letter", ["x", "é", "漢"])
def test_a_name_of_any_length_serves(load: Importer, tmp_path: Path, letter: str) -> None:
    longest = letter * (251 // len(letter.encode()))
    made = load(write(tmp_path / f"{longest}.txt", "a b\n" * 30))
    assert longest.startswith(made.folder.name.partition("-")[0])
    kind = TokenizerConfig(kind="word", vocab_size=1_000_000)
    assert tokenize([made], kind, load.dir, note=load.notes.append, progress=False).splits == ("train", "valid", "test")


def test_names_in_another_encoding_serve(load: Importer, folder: Path) -> None:
    for name in (b"caf\xe9.txt", b"other.txt"):
        (folder / os.fsdecode(name)).write_text("a\n" * 30)
    made = load(folder)
    assert list(made.manifest["origin"]["files"]) == ["caf\\xe9.txt", "other.txt"]
    assert load(folder).sha256 == made.sha256
    assert load.notes == []
    data = DataConfig.model_construct(source=os.fsdecode(bytes(folder) + b"/caf\xe9.txt"), dir=folder)
    assert corpus_folder(data, {})


def test_corpus_folders_differ_by_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("one/text", "two/text", "sample"):
        Path(name).mkdir(parents=True)
    sources: list[dict[str, Any]] = [
        {"source": "one/text"},
        {"source": "two/text"},
        {"source": "./sample"},
        {"source": "sample"},
        {"source": "sample", "sample_tokens": 2_000},
        {"source": "owner/name"},
        {"source": "owner/name", "subset": "part"},
        {"source": "owner/name-part"},
        {"source": "wikitext-2"},
    ]
    folders = {corpus_folder(DataConfig(**fields), {"state": number}) for number, fields in enumerate(sources)}
    assert len(folders) == len(sources)
    assert all(folder.parent == Path("data") for folder in folders)
    with pytest.raises(LmtrainError, match=r"data\.subset has no meaning"):
        corpus_folder(DataConfig(source="wikitext-2", subset="part"), {})


def fake_generate(fail_at: int | None = None) -> Callable[[int, int], Iterator[sample.SampleLine]]:
    """Lines `w<seed> w<seed> w<seed>`, worth 4 ln 8 nats with their ends, every tenth the first of a document."""

    def generate(tokens: int, seed: int) -> Iterator[sample.SampleLine]:
        for number in range(tokens // 4):
            if number == fail_at:
                raise KeyboardInterrupt
            yield sample.SampleLine(f"w{seed} " * 3, 4 * math.log(8), number % 10 == 0)

    return generate


def test_sample_splits_and_floor(load: Importer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sample, "generate", fake_generate())
    made = load("sample", sample_tokens=200_000)
    tokens = {"train": 200_000, "valid": 10_000, "test": 10_000}
    for split, number in tokens.items():
        counts, floor = made.manifest["splits"][split], made.manifest["floor"][split]
        assert counts["words"] + counts["lines"] == floor["tokens"] == number
        assert floor["word_perplexity"] == pytest.approx(8)
        assert floor["nats"] == pytest.approx(number * math.log(8))
        assert made.document_starts(split).tolist() == list(range(0, number // 4, 10))
    assert len({next(made.lines(split)) for split in made.splits}) == 3


def test_sample_is_remade_when_its_generator_changes(load: Importer, monkeypatch: pytest.MonkeyPatch) -> None:
    first = load("sample", sample_tokens=1_000)
    assert load("sample", sample_tokens=1_000).sha256 == first.sha256
    assert load.notes == []
    monkeypatch.setattr(sample, "generate", fake_generate())
    assert load("sample", sample_tokens=1_000).sha256 != first.sha256


def test_interrupted_build_leaves_what_was_there(load: Importer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sample, "generate", fake_generate(fail_at=200))
    with pytest.raises(KeyboardInterrupt):
        load("sample", sample_tokens=1_000)
    assert not any(load.dir.iterdir())
    monkeypatch.setattr(sample, "generate", fake_generate())
    made = load("sample", sample_tokens=1_000)
    monkeypatch.setattr(sample, "generate", fake_generate(fail_at=200))
    with pytest.raises(KeyboardInterrupt):
        load("sample", sample_tokens=1_000, force=True)
    assert [path.name for path in load.dir.iterdir()] == [made.folder.name]
    assert open_corpus(made.folder).sha256 == made.sha256


def test_disk_full_is_a_sentence_and_leaves_nothing(load: Importer, folder: Path) -> None:
    write(folder / "train.txt", "word\n" * 1_000_000)
    write(folder / "valid.txt", "x\n")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, hard))
    try:
        with pytest.raises(LmtrainError, match=r"can't write .*Free some space"):
            load(folder)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert not any(load.dir.iterdir())


def test_data_dir_that_can_not_be(load: Importer, folder: Path, tmp_path: Path) -> None:
    write(folder / "train.txt", "a\n")
    write(folder / "valid.txt", "a\n")
    load.dir = write(tmp_path / "file", "") / "data"
    with pytest.raises(LmtrainError, match="can't write"):
        load(folder)


def test_import_needs_no_torch_and_no_datasets() -> None:
    import subprocess
    import sys

    code = (
        "import sys, lmtrain.data.corpus, lmtrain.data.hub; print({'torch', 'datasets', 'pyarrow'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
    assert corpus.FORMAT == "lmtrain-corpus/1"


def test_what_a_killed_process_left_is_deleted_at_the_next_start(tmp_path: Path) -> None:
    data = DataConfig(dir=tmp_path, sample_tokens=1000)
    corpus = download(data)
    corpus.folder.rename(tmp_path / f".tmp-{corpus.folder.name}~old-0123abcd")  # killed while another took its place
    (tmp_path / ".tmp-other.word-4567cdef").mkdir()
    (tmp_path / ".tmp-other.word-4567cdef" / "train.npy").touch()
    notes: list[str] = []
    assert download(data, note=notes.append) == corpus
    assert [path.name for path in tmp_path.iterdir()] == [corpus.folder.name]
    assert notes == []


@pytest.mark.parametrize("name", ["train.parquet", "train.txt.bz2", "train.parquet.bz2"])
def test_a_small_file_of_far_more_text_is_rejected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(compressed, "_SMALL", 16 << 20)
    path, row = tmp_path / name, "a " * (1 << 20)
    if name == "train.parquet":  # the row is stored once, and referred to by all
        table = pa.table({"text": pa.DictionaryArray.from_arrays(pa.array([0] * 200, pa.int32()), pa.array([row]))})
        pq.write_table(table, path, compression="zstd")
    else:
        path.write_bytes(bz2.compress(f"{row}\n".encode() * 10))
    rows: list[int] = []
    with pytest.raises(LmtrainError, match=r"holds over 16 MiB of text, more than 1,000 times its size"):
        rows.extend(len(text) for text, _ in local.read_lines([path], "text"))
    assert sum(rows) <= 16 << 20


def test_a_small_parquet_file_is_read_in_little_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A long row that is stored once, and referred to by all: 1.6 GB if it were read at once."""
    monkeypatch.setattr(compressed, "_SMALL", 2 << 30)
    path, row = tmp_path / "train.parquet", "a " * (4 << 20)
    table = pa.table({"text": pa.DictionaryArray.from_arrays(pa.array([0] * 200, pa.int32()), pa.array([row]))})
    for with_type in (False, True):
        pq.write_table(table, path, compression="zstd", store_schema=with_type)
        assert path.stat().st_size < 5_000
        with limited_memory(1 << 30):
            assert sum(len(text) == len(row) for text, _ in local.read_lines([path], "text")) == 200


def test_a_row_that_is_too_long_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local, "LONGEST_LINE", 1 << 20)
    pq.write_table(pa.table({"text": ["a", "b" * (2 << 20)]}), tmp_path / "train.parquet")
    with pytest.raises(LmtrainError, match=r"row 2, is longer than 1 MiB: break it up"):
        list(local.read_lines([tmp_path / "train.parquet"], "text"))
