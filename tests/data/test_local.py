"""Local files: their lines and documents, plain and compressed, and errors that name the file and the place."""

import bz2
import csv
import gzip
import json
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from lmtrain.data import local
from lmtrain.errors import LmtrainError
from tests.data.helpers import parquet, write
from tests.hostile import limited_memory

Line = tuple[str, bool]
ROWS = [f"row {number}\nis é" for number in range(3_000)]


def zstd(content: bytes) -> bytes:
    packed: bytes = pa.compress(content, codec="zstd", asbytes=True)
    return packed


NOT_UTF8 = parquet(pa.array([b"plain", b"na\xefve"]).view(pa.string()))

PACK: dict[str, Callable[[bytes], bytes]] = {".gz": gzip.compress, ".bz2": bz2.compress, ".zst": zstd}


def read(*paths: Path, column: str = "text") -> list[Line]:
    return list(local.read_lines(paths, column))


@pytest.mark.parametrize(
    ("content", "lines"),
    [
        (b"a b\r\nc\r\n", ["a b", "c"]),
        (b"a\rb\nc\r", ["a", "b", "c"]),
        (b"\xef\xbb\xbfa\n\xef\xbb\xbfb\n", ["a", "\ufeffb"]),
        (b"a\n\n\nb", ["a", "", "", "b"]),
        ("a\u2028b\x0bc\x85d\x1ce\n".encode(), ["a\u2028b\x0bc\x85d\x1ce"]),
    ],
    ids=["crlf", "lone-cr", "bom", "blank-and-no-last-end", "unicode-separators"],
)
def test_lines_end_at_every_kind_of_line_end(tmp_path: Path, content: bytes, lines: list[str]) -> None:
    assert read(write(tmp_path / "a.txt", content)) == [(line, False) for line in lines]


def test_rows_are_documents(tmp_path: Path) -> None:
    rows = ["one\ntwo\n", "three", "", "four\r\n\nfive"]
    expected = [("one", True), ("two", False), ("three", True), ("", True)]
    expected += [("four", True), ("", False), ("five", False)]
    objects = [{"id": number, "body": row} for number, row in enumerate(rows)]
    lines = "".join(json.dumps(row) + "\n\n" for row in objects)
    assert read(write(tmp_path / "a.jsonl", lines), column="body") == expected
    assert read(write(tmp_path / "b.json", lines), column="body") == expected
    assert read(write(tmp_path / "c.json", json.dumps(objects, indent=1)), column="body") == expected
    assert read(write(tmp_path / "a.parquet", parquet(rows, "body")), column="body") == expected
    for name, dialect in (("a.csv", "excel"), ("a.tsv", "excel-tab")):
        with (tmp_path / name).open("w", encoding="utf-8-sig", newline="") as file:
            table = csv.DictWriter(file, ["id", "body"], dialect=dialect)
            table.writeheader()
            table.writerows(objects)
        packed = write(tmp_path / f"{name}.gz", gzip.compress((tmp_path / name).read_bytes()))
        assert read(tmp_path / name, column="body") == read(packed, column="body") == expected
    quoted = write(tmp_path / "q.csv", '\ntext,n\n"one, ""two""\nthree",1\n\nplain,2\n')
    assert read(quoted) == [('one, "two"', True), ("three", False), ("plain", True)]
    pq.write_table(pa.table([["first"], ["second"]], ["text", "text"]), tmp_path / "twice.parquet")
    assert read(tmp_path / "twice.parquet") == [("first", True)]


@pytest.mark.parametrize("name", ["notes", "main.zig", "a.b.c", "page.gz", "train.TXT", "TRAIN.TXT.GZ"])
def test_a_file_with_any_other_ending_is_plain_text(tmp_path: Path, name: str) -> None:
    content = gzip.compress(b"a,b\nc\n") if name.lower().endswith(".gz") else b"a,b\nc\n"
    path = write(tmp_path / name, content)
    assert read(path) == [("a,b", False), ("c", False)]


def test_each_of_several_files_is_a_document(tmp_path: Path) -> None:
    lines = read(*(write(tmp_path / name, "one\ntwo\n") for name in ("a.txt", "b-1-of-2.txt")))
    assert [start for _, start in lines] == [True, False, True, False]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.txt", b"good line\nna\xefve\n", r"a\.txt is not plain text in UTF-8: convert it"),
        ("a.txt", b"good line\n" * 10_000 + b"na\xefve\n", r"a\.txt is not plain text in UTF-8 after line 9\d\d\d: "),
        ("a.txt", b"\xff\xfea\0b\0", r"a\.txt is not plain text in UTF-8: convert it, .* iconv -f UTF-16"),
        ("a.txt", b"one\ntwo\0\n", r"a\.txt is not plain text in UTF-8 after line 1: .*, remove NUL bytes, "),
        ("a.txt", b"x\n" + b"y" * 400_000, r"a\.txt has a line of over 0 MiB after line 1"),
        ("a.jsonl", '{"text": "a"}\n{"text": \n', r"jsonl, line 2, is not JSON .* each line must be one JSON object"),
        ("a.jsonl", '{"text": "a"}\n[1]\n', r"line 2, is not a JSON object"),
        ("a.jsonl", '{"body": "a", "id": 1}\n', r"line 1, has no column 'text'.*\('body', 'id'\)"),
        ("a.jsonl", '{"text": 3}\n', r"line 1, has int in 'text'"),
        ("a.jsonl", '{"text": "\\ud800"}\n', r"a\.jsonl, line 1, has a lone surrogate"),
        ("a.jsonl", "[" * 100_000 + "\n", "line 1, is not JSON"),
        ("a.json", '[{"text": "a"},\n{"text": 3}]\n', r"a\.json, item 1, has int in 'text'"),
        ("a.json", '[{"text": "a"},\n', r"a\.json, line 1, is not JSON .* must be an array of objects"),
        ("a.csv", "id,body\n1,a\n", r"a\.csv has no column 'text'.*\('id', 'body'\) with data\.text_column=NAME"),
        ("a.csv", "", r"a\.csv has no column 'text'.*\(none\)"),
        ("a.csv", "id,text\n1,a\n2,b, c\n", r"a\.csv, line 3, has 3 fields, but its header 2: put quotes"),
        ("a.csv", 'id,text\n1,"a\nb\n', r"a\.csv, line 3, is not well-formed \(unexpected end of data\)"),
        ("a.tsv", 'id\ttext\n1\t"a" b\n', r"a\.tsv, line 2, is not well-formed"),
        ("a.parquet", b"PAR1 no parquet", r"a\.parquet can't be read as parquet"),
        ("a.parquet", NOT_UTF8, r"a\.parquet, row 2, is not UTF-8 text: take the row out, or convert it"),
        ("none.txt", None, r"none\.txt is not a text file: name an existing file"),
        (100 * "a long text ", None, "a long text  is not a text file: name an existing file"),
        ("", None, "is not a text file: name an existing file"),  # a folder
    ],
)
def test_what_cannot_be_read_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, content: str | bytes | None, message: str
) -> None:
    monkeypatch.setattr(local, "MAX_LINE_LENGTH", 300_000)
    if content is not None:
        write(tmp_path / name, content)
    with pytest.raises(LmtrainError, match=message):
        read(tmp_path / name)


def test_rows_of_parquet_that_cannot_be_read_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local, "MAX_LINE_LENGTH", 1 << 20)
    with pytest.raises(LmtrainError, match=r"a\.parquet, row 2, has nothing \(null\) in 'text'.*take the row out"):
        read(write(tmp_path / "a.parquet", parquet(["a", None])))
    with pytest.raises(LmtrainError, match=r"has no column 'body'.*\('id', 'text'\)"):
        read(tmp_path / "a.parquet", column="body")
    with pytest.raises(LmtrainError, match=r"row 2, is longer than 1 MiB: break it up"):
        read(write(tmp_path / "a.parquet", parquet(["a", "b" * (2 << 20)])))


@pytest.fixture(params=[".txt", ".jsonl"])
def plain(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    rows = [json.dumps({"text": row}) if request.param == ".jsonl" else row for row in ROWS]
    return write(tmp_path / f"train{request.param}", "".join(f"{row}\n" for row in rows))


@pytest.mark.parametrize("extension", PACK)
def test_compressed_text_is_the_text(plain: Path, extension: str) -> None:
    packed = write(plain.with_name(plain.name + extension), PACK[extension](plain.read_bytes()))
    assert local.kind(packed) in local.SUFFIXES
    assert len(read(packed)) == 6_000
    assert read(packed) == read(plain)


@pytest.mark.parametrize("extension", PACK)
@pytest.mark.parametrize("damage", ["cut", "flip", "other"])
def test_damage_names_the_file(plain: Path, extension: str, damage: str) -> None:
    content = bytearray(PACK[extension](plain.read_bytes()))
    middle = len(content) // 2
    if damage == "flip":
        if extension == ".zst":
            pytest.skip("this zstd writes no checksums, so a changed byte is another text")
        content[middle : middle + 20] = bytes(byte ^ 0x55 for byte in content[middle : middle + 20])
    damaged = {"cut": bytes(content[:middle]), "flip": bytes(content), "other": b"no such thing"}[damage]
    packed = write(plain.with_name(plain.name + extension), damaged)
    lines = list[Line]()
    with pytest.raises(LmtrainError) as found:
        lines.extend(local.read_lines([packed], "text"))  # which keeps those before the error
    message = str(found.value)
    assert message.startswith(f"{packed}")
    assert " line " in message or not lines
    assert " line 0" not in message
    assert "\n" not in message


@pytest.mark.parametrize("extension", PACK)
def test_what_follows_a_damaged_stream_is_not_ignored(tmp_path: Path, extension: str) -> None:
    streams = [PACK[extension](f"part {number}\n".encode() * 1_000) for number in range(4)]
    path = write(tmp_path / f"train.txt{extension}", b"".join(streams))
    assert len(read(path)) == 4_000
    streams[1] = bytes(byte ^ 0x55 for byte in streams[1][:2]) + streams[1][2:]
    write(path, b"".join(streams))
    with pytest.raises(LmtrainError, match=r"train\.txt\.\w+ can't be read(?: after line [1-9]\d*)? \("):
        read(path)


@pytest.mark.parametrize("with_type", [False, True])
def test_a_small_parquet_file_is_read_in_little_memory(tmp_path: Path, with_type: bool) -> None:
    """400 MB if its rows were decoded at once."""
    row = "a " * (1 << 20)
    rows = pa.DictionaryArray.from_arrays(pa.array([0] * 200, pa.int32()), pa.array([row]))  # the row is stored once
    path = write(tmp_path / "train.parquet", parquet(rows, compression="zstd", store_schema=with_type))
    assert path.stat().st_size < 5_000
    with limited_memory(256 << 20):
        assert sum(len(text) == len(row) for text, _ in local.read_lines([path], "text")) == 200


def test_a_long_field_of_a_table_is_read(tmp_path: Path) -> None:
    csv.field_size_limit(131_072)  # Python's own, which other tests may have raised
    text = "a " * 100_000
    assert read(write(tmp_path / "a.csv", f"text\n{text}\n")) == [(text, True)]


def test_a_text_has_no_byte_order_mark() -> None:
    assert list(local.text_lines("\ufeffa\n")) == [("a", False)]


def test_rows_may_end_with_empty_lines(tmp_path: Path) -> None:
    assert read(write(tmp_path / "a.jsonl", '{"text": "one\\n\\n"}\n')) == [("one", True), ("", False)]


def test_of_two_columns_of_one_name_the_first_is_read(tmp_path: Path) -> None:
    assert read(write(tmp_path / "twice.csv", "text,text\nfirst,second\n")) == [("first", True)]
