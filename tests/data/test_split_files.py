"""Which files are which split by their names, and what is said of the others."""

import os
from pathlib import Path

import pytest

from lmtrain.config.schema import DataConfig
from lmtrain.data.corpus import download
from lmtrain.data.split_files import find_splits
from lmtrain.errors import LmtrainError


def fill(folder: Path, names: str) -> None:
    for name in names.split():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"the text of {name}\n")


def found(folder: Path) -> tuple[dict[str, str], list[str]]:
    notes: list[str] = []
    splits = find_splits(folder, notes.append)
    return {
        split: " ".join(str(path.relative_to(folder)) for path in paths) for split, paths in sorted(splits.items())
    }, notes


@pytest.mark.parametrize(
    ("names", "splits"),
    [
        ("train.txt valid.txt", {"train": "train.txt", "valid": "valid.txt"}),
        ("TRAIN.TXT Dev.JsonL.GZ", {"train": "TRAIN.TXT", "valid": "Dev.JsonL.GZ"}),
        (
            "wiki.train.tokens wiki.valid.tokens wiki.test.tokens",
            {"train": "wiki.train.tokens", "valid": "wiki.valid.tokens", "test": "wiki.test.tokens"},
        ),
        ("train.en.txt dev.en.txt", {"train": "train.en.txt", "valid": "dev.en.txt"}),
        (
            "Tales-v2-train.txt Tales-v2-valid.txt",
            {"train": "Tales-v2-train.txt", "valid": "Tales-v2-valid.txt"},
        ),
        ("train_2.txt train_10.txt valid_1.txt", {"train": "train_2.txt train_10.txt", "valid": "valid_1.txt"}),
        (
            "b-train-1-of-2.txt b-train-0-of-2.txt b-test.txt",
            {"train": "b-train-0-of-2.txt b-train-1-of-2.txt", "test": "b-test.txt"},
        ),
        ("a.md B.TXT c.jsonl.XZ", {"train": "B.TXT a.md c.jsonl.XZ"}),
        ("train/b.txt train/a.txt.gz dev/x.txt", {"train": "train/a.txt.gz train/b.txt", "valid": "dev/x.txt"}),
        ("Train/a.txt DEV/b.txt", {"train": "Train/a.txt", "valid": "DEV/b.txt"}),
        (
            "novel-1.txt novel-2.txt novel-3.txt strangers-on-a-train.txt",
            {"train": "novel-1.txt novel-2.txt novel-3.txt strangers-on-a-train.txt"},
        ),
    ],
)
def test_names_of_splits(tmp_path: Path, names: str, splits: dict[str, str]) -> None:
    fill(tmp_path, names)
    assert found(tmp_path) == (dict(sorted(splits.items())), [])


@pytest.mark.parametrize("book", ["test-of-time.txt", "the-test-of-time.txt", "book_valid.txt"])
def test_a_name_that_only_looks_like_a_split_is_training_text_and_named(tmp_path: Path, book: str) -> None:
    fill(tmp_path, f"novel.txt strangers-on-a-train.txt {book}")
    splits, notes = found(tmp_path)
    assert splits == {"train": " ".join(sorted(["novel.txt", "strangers-on-a-train.txt", book]))}
    assert notes == [f"{book}: read as training text; name a file valid.txt or test.txt to have it as that split"]


@pytest.mark.parametrize(
    ("names", "unused"),
    [
        ("train.txt chapter-2.txt", "chapter-2.txt"),
        ("train.txt the-test-of-time.txt eval.txt", "eval.txt, the-test-of-time.txt"),
        ("train.parquet b.txt", "b.txt"),
        ("a.txt b.csv c.csv d/e.txt f.json g.pdf", "b.csv, c.csv, d/ and 2 more"),
        ("train/a.txt train/b/c.txt train/d.csv test/e.csv .git/f.txt", "test/, train/b/, train/d.csv"),
    ],
)
def test_what_is_not_used_is_named(tmp_path: Path, names: str, unused: str) -> None:
    fill(tmp_path, names)
    assert found(tmp_path)[1] == [f"not used in {tmp_path}: {unused}"]


def test_a_second_name_of_a_file_is_no_second_text(tmp_path: Path) -> None:
    fill(tmp_path, "a.txt c.txt")
    (tmp_path / "b.txt").symlink_to("a.txt")
    os.link(tmp_path / "c.txt", tmp_path / "d.txt")
    assert found(tmp_path) == ({"train": "a.txt c.txt"}, [f"not used in {tmp_path}: b.txt, d.txt"])


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (
            "wiki.valid.txt wiki.test.txt",
            r"has no training text: name a file train\.txt .* or put all training text",
        ),
        ("test.txt novel.txt", r"has no training text: .*; found novel\.txt, test\.txt"),
        (
            "a-train.txt a-valid.txt b-train.txt b-valid.txt",
            "several files for its train split, a-train.txt and b",
        ),
        ("train.txt train_1.txt", "several files for its train split"),
        ("train.txt train.jsonl", r"several files for its train split, train\.jsonl and train\.txt"),
        ("train.txt train/a.txt", r"its train split in two places, train\.txt and train/"),
        ("train.txt DEV/b.txt valid/c.txt", r"its valid split in two places, DEV/b\.txt and valid/"),
        ("notes.csv valid.txt", r"has no training text.*found notes\.csv, valid\.txt"),
    ],
)
def test_names_that_contradict_are_rejected(tmp_path: Path, names: str, message: str) -> None:
    fill(tmp_path, names)
    with pytest.raises(LmtrainError, match=message):
        find_splits(tmp_path)


@pytest.mark.parametrize("shards", ["0-of-99999999999", "1-of-1", "0-of-0", "3-of-11"])
def test_a_missing_shard_is_named(tmp_path: Path, shards: str) -> None:
    fill(tmp_path, f"train-{shards}.txt")
    with pytest.raises(LmtrainError, match=f"1 of the {shards.rpartition('-')[2]} files of its train split"):
        find_splits(tmp_path)


@pytest.mark.parametrize("name", ["valid.txt", "train/a.txt", "source"])
def test_a_link_to_a_missing_file_is_not_ignored(tmp_path: Path, name: str) -> None:
    fill(tmp_path, "train/b.txt")
    (tmp_path / name).symlink_to("nowhere")
    source = tmp_path / name if name == "source" else tmp_path
    with pytest.raises(LmtrainError, match=f"{name} is a link to a file that isn't there: mend it or delete it"):
        download(DataConfig(source=str(source), dir=tmp_path / "data"))


def test_what_is_not_used_is_named_each_time(tmp_path: Path) -> None:
    folder = tmp_path / "text"
    fill(folder, "train.txt valid.txt")
    data, notes = DataConfig(source=str(folder), dir=tmp_path / "data"), list[str]()
    made = download(data)
    fill(folder, "chapter-2.txt")
    assert download(data, note=notes.append) == made
    assert notes == [f"not used in {folder}: chapter-2.txt"]
