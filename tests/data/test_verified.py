"""Hashes of large files are remembered only while nothing was written."""

import json
import os
import time
from pathlib import Path

import pytest

from lmtrain.data import verified
from lmtrain.data.verified import REMEMBERED, Hashes
from lmtrain.storage.files import sha256_bytes

CONTENT = b"x" * 100


@pytest.fixture
def large(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file whose hash is remembered."""
    monkeypatch.setattr(verified, "LARGE", 100)
    monkeypatch.setattr(verified, "_SETTLED", -1.0)
    path = tmp_path / "ids.npy"
    path.write_bytes(CONTENT)
    assert was_read(path)
    return path


def was_read(path: Path, *, reread: bool = False) -> bool:
    hashes = Hashes(path.parent, reread=reread)
    assert hashes.sha256(path) == sha256_bytes(path.read_bytes())
    return path in hashes.read


def test_a_large_file_is_read_once(large: Path) -> None:
    assert not was_read(large)
    assert was_read(large, reread=True)


def test_a_change_is_found_though_size_and_time_are_restored(large: Path) -> None:
    before = large.stat()
    time.sleep(0.02)  # longer than a tick of the file system's clock
    with large.open("r+b") as file:
        file.write(b"y")
    os.utime(large, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert (large.stat().st_size, large.stat().st_mtime_ns) == (before.st_size, before.st_mtime_ns)
    assert was_read(large)


def test_another_file_under_the_name_is_found(large: Path) -> None:
    (large.parent / "other").write_bytes(b"z" * 100)
    (large.parent / "other").replace(large)
    assert was_read(large)


def test_damage_on_the_disk_is_found_by_reading_again(large: Path) -> None:
    memory = large.parent / REMEMBERED
    memory.write_text(memory.read_text().replace(sha256_bytes(CONTENT), sha256_bytes(b"before")))
    assert Hashes(large.parent).sha256(large) == sha256_bytes(b"before")
    assert was_read(large, reread=True)
    assert not was_read(large)


@pytest.mark.parametrize(("name", "value"), [("_SETTLED", 60.0), ("LARGE", 101)])
def test_small_and_young_files_are_always_read(
    large: Path, name: str, value: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verified, name, value)
    (large.parent / REMEMBERED).unlink()
    assert was_read(large)
    assert was_read(large)


@pytest.mark.parametrize("content", ["", "[" * 99_999, '{"%s": 5}', '{"%s": [1, 2, 3, 4, 5]}'])
def test_a_damaged_memory_is_empty(large: Path, content: str) -> None:
    (large.parent / REMEMBERED).write_text(content.replace("%s", str(large)))
    assert was_read(large)
    assert json.loads((large.parent / REMEMBERED).read_text())[str(large)][0] == 100


def test_in_a_folder_that_can_not_be_written_files_are_always_read(large: Path) -> None:
    (large.parent / REMEMBERED).unlink()
    (large.parent / REMEMBERED).mkdir()
    assert was_read(large)
    assert was_read(large)
