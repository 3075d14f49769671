"""Compressed files and folders of files give the text that plain ones do, and their damage is told in a sentence."""

import bz2
import gzip
import json
import lzma
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from lmtrain.data import local
from lmtrain.data.split_files import find_splits
from lmtrain.errors import LmtrainError

ROWS = [f"row {number}\nis é" for number in range(3_000)]


def zstd(content: bytes) -> bytes:
    packed: bytes = pa.compress(content, codec="zstd", asbytes=True)
    return packed


PACK: dict[str, Callable[[bytes], bytes]] = {
    ".gz": gzip.compress,
    ".xz": lzma.compress,
    ".bz2": bz2.compress,
    ".zst": zstd,
}


@pytest.fixture(params=[".txt", ".jsonl", ".parquet"])
def plain(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    path: Path = tmp_path / f"train{request.param}"
    if path.suffix == ".parquet":
        pq.write_table(pa.table({"text": ROWS}), path)
    else:
        path.write_text("".join(f"{json.dumps({'text': row}) if path.suffix == '.jsonl' else row}\n" for row in ROWS))
    return path


def pack(path: Path, ending: str) -> Path:
    packed = path.with_name(path.name + ending)
    packed.write_bytes(PACK[ending](path.read_bytes()))
    return packed


@pytest.mark.parametrize("ending", PACK)
def test_compressed_text_is_the_text(plain: Path, ending: str) -> None:
    expected = list(local.read_lines([plain], "text"))
    assert len(expected) == 6_000
    packed = pack(plain, ending)
    assert list(local.read_lines([packed], "text")) == expected
    plain.unlink()
    assert find_splits(packed.parent) == {"train": [packed]}


@pytest.mark.parametrize("ending", PACK)
@pytest.mark.parametrize("how", ["cut", "flip", "none"])
def test_damage_names_the_file(plain: Path, ending: str, how: str) -> None:
    packed = pack(plain, ending)
    content = bytearray(packed.read_bytes())
    middle = len(content) // 2
    if how == "flip":
        if ending == ".zst" and plain.suffix != ".parquet":
            pytest.skip("this zstd writes no checksums, so a changed byte is another text")
        content[middle : middle + 20] = bytes(byte ^ 0x55 for byte in content[middle : middle + 20])
    packed.write_bytes({"cut": bytes(content[:middle]), "flip": bytes(content), "none": b"no such thing"}[how])
    with pytest.raises(LmtrainError) as found:
        list(local.read_lines([packed], "text"))
    sentence = str(found.value)
    assert sentence.startswith(f"{packed}")
    if plain.suffix != ".parquet":
        assert " line " in sentence or "(byte " in sentence  # a flipped byte may come out as text that is none
    assert "\n" not in sentence


def test_files_in_folders_are_the_splits(tmp_path: Path) -> None:
    for name, text in (
        ("train/b.txt", "b1\nb2\n"),
        ("train/a.txt.gz", "a1\n"),
        ("dev/x.txt", "x\n"),
        ("notes.csv", ""),
    ):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())
    splits = find_splits(tmp_path)
    assert splits == {
        "train": [tmp_path / "train/a.txt.gz", tmp_path / "train/b.txt"],
        "valid": [tmp_path / "dev/x.txt"],
    }
    assert list(local.read_lines(splits["train"], "text")) == [("a1", True), ("b1", True), ("b2", False)]
    (tmp_path / "train.txt").write_text("again\n")
    with pytest.raises(LmtrainError, match=r"its train split in two places, train\.txt and train/"):
        find_splits(tmp_path)


def test_folders_of_splits_in_any_letters(tmp_path: Path) -> None:
    for name in ("Train/a.txt", "DEV/b.txt", "test/notes.csv"):
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_text("x\n")
    assert find_splits(tmp_path) == {"train": [tmp_path / "Train/a.txt"], "valid": [tmp_path / "DEV/b.txt"]}
    (tmp_path / "valid").mkdir()
    (tmp_path / "valid/c.txt").write_text("x\n")
    with pytest.raises(LmtrainError, match=r"its valid split in two places, DEV/b\.txt and valid/"):
        find_splits(tmp_path)


@pytest.mark.parametrize("ending", PACK)
def test_what_follows_a_damaged_stream_is_not_left_out(tmp_path: Path, ending: str) -> None:
    streams = [PACK[ending](f"part {number}\n".encode() * 1_000) for number in range(4)]
    path = tmp_path / f"train.txt{ending}"
    path.write_bytes(b"".join(streams))
    assert len(list(local.read_lines([path], "text"))) == 4_000
    streams[1] = bytes(byte ^ 0x55 for byte in streams[1][:2]) + streams[1][2:]
    path.write_bytes(b"".join(streams))
    with pytest.raises(LmtrainError, match=r"train\.txt\.\w+ is damaged after line \d+"):
        list(local.read_lines([path], "text"))


@pytest.mark.parametrize("ending", [".gz", ".xz", ".bz2"])
def test_padding_after_a_stream_is_no_damage(tmp_path: Path, ending: str) -> None:
    path = tmp_path / f"train.txt{ending}"
    path.write_bytes(PACK[ending](b"a\n") + bytes(512) + PACK[ending](b"b\n") + bytes(3 << 20))
    assert list(local.read_lines([path], "text")) == [("a", False), ("b", False)]


def test_files_without_a_split_s_name_are_all_training_text(tmp_path: Path) -> None:
    for name in ("two.txt", "one.txt", "three.jsonl.xz"):
        (tmp_path / name).write_text("x\n")
    assert [path.name for path in find_splits(tmp_path)["train"]] == ["one.txt", "three.jsonl.xz", "two.txt"]
