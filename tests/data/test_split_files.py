"""Which files are which split by their names, and what is said of the others."""

import errno
import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest

from lmtrain.config.schema import DataConfig
from lmtrain.data.corpus import make_corpus
from lmtrain.data.sources import find_source
from lmtrain.data.split_files import find_splits
from lmtrain.errors import LmtrainError
from tests.helpers import messages

UNKNOWN_EXTENSIONS = "files with their extensions are not read in a folder"
OTHER_SPLITS = "other files are named after splits"


def fill(folder: Path, names: str) -> None:
    for name in names.split():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"the text of {name}\n")


def found(folder: Path) -> tuple[dict[str, str], list[str]]:
    with messages() as notes:
        splits = find_splits(folder)
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
        (
            "train_2.txt train_10.jsonl train.md train/1/a.txt valid_1.txt DEV/b.txt",
            {"train": "train/1/a.txt train.md train_10.jsonl train_2.txt", "valid": "DEV/b.txt valid_1.txt"},
        ),
        (
            "b-train-1-of-2.txt b-train-0-of-2.txt b-test.txt",
            {"train": "b-train-0-of-2.txt b-train-1-of-2.txt", "test": "b-test.txt"},
        ),
        (
            "train-1.txt train-x.txt train.txt dev-x.txt",
            {"train": "train-1.txt train-x.txt train.txt", "valid": "dev-x.txt"},
        ),
        ("wiki.train/a.txt wiki.test/b.txt", {"train": "wiki.train/a.txt", "test": "wiki.test/b.txt"}),
        ("a-train.txt en/valid.txt train.old/b.txt", {"train": "a-train.txt en/valid.txt train.old/b.txt"}),
        (
            "train/b.txt train/a/c.txt.gz train/a/d.csv dev/x.txt",
            {"train": "train/a/c.txt.gz train/a/d.csv train/b.txt", "valid": "dev/x.txt"},
        ),
        (
            "unpacked/data/train.txt unpacked/data/valid/a.txt data/a/manifest.json data/a/train.docs.npy "
            "data/a/train.txt runs/c/config.yaml runs/c/metrics.jsonl exported/manifest.json "
            "exported/modeling_lmtrain.py exported/README.md",
            {"train": "unpacked/data/train.txt", "valid": "unpacked/data/valid/a.txt"},
        ),
        ("b/z.txt a.MD b/c/y.rst .git/x.txt b/.d.txt", {"train": "a.MD b/c/y.rst b/z.txt"}),
        (
            "a.txt data/a/manifest.json data/a/train.docs.npy data/a/train.txt data/b/manifest.json data/b/train.bin "
            "runs/c/config.yaml runs/c/metrics.jsonl",
            {"train": "a.txt"},
        ),
        ("main.py test.py test/a.py train.c", {"train": "main.py test/a.py test.py train.c"}),
        ("train/a.md train/b.py dev/c.md", {"train": "train/a.md train/b.py", "valid": "dev/c.md"}),
    ],
)
def test_files_belong_to_the_splits_that_their_names_say(tmp_path: Path, names: str, splits: dict[str, str]) -> None:
    fill(tmp_path, names)
    assert found(tmp_path) == (dict(sorted(splits.items())), [])


@pytest.mark.parametrize(
    ("names", "notes"),
    [
        ("train.txt chapter-2.txt", [f"{OTHER_SPLITS}: chapter-2.txt"]),
        ("train.txt the-test-of-time.txt eval.txt", [f"{OTHER_SPLITS}: eval.txt, the-test-of-time.txt"]),
        ("train.parquet b/c.txt", [f"{OTHER_SPLITS}: b/c.txt"]),
        (
            "train.txt config.yaml metrics.jsonl",  # only with checkpoints are they a run
            [f"{UNKNOWN_EXTENSIONS}: config.yaml", f"{OTHER_SPLITS}: metrics.jsonl"],
        ),
        ("train.log text/train.txt text/valid.txt", [f"{UNKNOWN_EXTENSIONS}: train.log"]),
        ("a.txt b.doc c.json d/e.txt d/f.doc g.pdf", [f"{UNKNOWN_EXTENSIONS}: b.doc, c.json, d/f.doc, ... (4 files)"]),
        (
            "train/a.txt train/b/c.txt train/d.doc e.md test/e.png .git/f.txt train/.g.txt",
            [f"{UNKNOWN_EXTENSIONS}: test/e.png, train/d.doc", f"{OTHER_SPLITS}: e.md"],
        ),
    ],
)
def test_what_is_not_used_is_named(tmp_path: Path, names: str, notes: list[str]) -> None:
    fill(tmp_path, names)
    assert found(tmp_path)[1] == [f"not used in {tmp_path}, since {note}" for note in notes]


def test_a_folder_with_many_names_is_read_once(tmp_path: Path) -> None:
    """Each of 30 folders has two links to the next, so that 2**30 paths lead to the last."""
    folders = [tmp_path / f"{number:02}" for number in range(30)]
    for folder in folders:
        folder.mkdir()
    for folder, following in itertools.pairwise(folders):
        (folder / "x").symlink_to(following)
        (folder / "y").symlink_to(following)
    (folders[-1] / "a.txt").write_text("a")
    assert found(folders[0]) == ({"train": f"{'x/' * 29}a.txt"}, [])


@pytest.mark.parametrize(
    ("names", "message"),
    [
        ("wiki.valid.txt wiki.test.txt", r"has no training text: name a file train\.txt .* or put all training text"),
        ("test.txt novel.txt", r"has no training text: .*; found novel\.txt, test\.txt"),
        ("notes.csv valid.txt", r"has no training text.*found notes\.csv, valid\.txt"),
        ("picture.png a/b.pdf", r"has no training text.*found a/b\.pdf, picture\.png"),
    ],
)
def test_a_folder_without_training_text_is_rejected(tmp_path: Path, names: str, message: str) -> None:
    fill(tmp_path, names)
    with pytest.raises(LmtrainError, match=message):
        find_splits(tmp_path)


def test_a_subfolder_that_cannot_be_listed_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fill(tmp_path, "books/open.txt books/private/secret.txt")
    iterdir = Path.iterdir

    def listing(path: Path) -> Iterator[Path]:
        if path.name == "private":
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return iterdir(path)

    monkeypatch.setattr(Path, "iterdir", listing)
    with pytest.raises(LmtrainError, match=r"books/private can't be read: Permission denied"):
        find_source(DataConfig(source=str(tmp_path / "books")))


def test_what_is_not_used_is_named_each_time(tmp_path: Path) -> None:
    folder = tmp_path / "text"
    fill(folder, "train.txt valid.txt")
    data = DataConfig(source=str(folder), dir=tmp_path / "data")
    made = make_corpus(data)
    fill(folder, "chapter-2.txt")
    with messages() as notes:
        assert make_corpus(data) == made
    assert notes == [f"not used in {folder}, since {OTHER_SPLITS}: chapter-2.txt"]
