"""The protocol for writing files and folders: complete or absent, with a hash of every file."""

import fcntl
import json
import os
import signal
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import pytest

from lmtrain.errors import LmtrainError
from lmtrain.storage import files
from lmtrain.storage.checkpoint import FORMAT
from lmtrain.system import disk
from tests.helpers import Child
from tests.hostile import unsealed


def _write(path: Path, kind: str = "kind/1") -> None:
    with files.new_folder(path, kind, {"note": "x"}) as folder:
        (folder / "data").write_bytes(b"content")


def _check(path: Path, kind: str = "kind/1") -> None:
    files.verify(path, files.read_manifest(path, kind)["files"])


def test_a_folder_appears_whole_with_its_manifest(tmp_path: Path) -> None:
    _write(tmp_path / "a")
    manifest = files.read_manifest(tmp_path / "a", "kind/1")
    assert manifest["note"] == "x"
    assert manifest["files"] == {"data": {"bytes": 7, "sha256": files.sha256_bytes(b"content")}}
    files.verify(tmp_path / "a", manifest["files"])
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


@pytest.mark.parametrize(
    ("name", "content"),
    [
        *(("data", content) for content in (b"cont", b"contents", None)),
        *((files.MANIFEST, content) for content in (None, b"", b"[]", b'{"format": "kind/1", "files": {"data": 5}}')),
        (files.MANIFEST, b'{"format": "other/1", "files": {}}'),
    ],
)
def test_a_damaged_folder_is_rejected_on_opening(tmp_path: Path, name: str, content: bytes | None) -> None:
    _write(tmp_path / "a")
    (tmp_path / "a" / name).unlink()
    if content is not None:
        (tmp_path / "a" / name).write_bytes(content)
    with pytest.raises(LmtrainError, match=str(tmp_path)):
        _check(tmp_path / "a")


def test_what_a_killed_process_left_is_cleaned_up(tmp_path: Path) -> None:
    (tmp_path / ".tmp-a-00000001").mkdir()
    (tmp_path / ".tmp-a-00000001" / "x").touch()
    (tmp_path / ".tmp-b-0123abcd").touch()
    (tmp_path / ".tmp-my-old-book-11111111").mkdir()  # half-written, regardless of its name
    (tmp_path / ".tmp-a~old-deadbeef").mkdir()
    _write(tmp_path / "a")
    _write(tmp_path / "c")
    (tmp_path / "c").rename(tmp_path / ".tmp-c~old-00000002")  # killed between the two renames
    files.recover(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "c"]
    _check(tmp_path / "c")


@pytest.mark.parametrize("first", ["nothing", "a damaged one"])
def test_an_equal_folder_that_another_process_made_meanwhile_stays(tmp_path: Path, first: str) -> None:
    """That process may be reading it; one that was there before is replaced."""
    if first == "a damaged one":
        _write(tmp_path / "a")
        (tmp_path / "a" / "data").unlink()
    with files.new_folder(tmp_path / "a", "kind/1", {"note": "x"}) as folder:
        (folder / "data").write_bytes(b"content")
        _write(tmp_path / "a")
        made = (tmp_path / "a").stat().st_ino
    assert (tmp_path / "a").stat().st_ino == made
    assert [path.name for path in tmp_path.iterdir()] == ["a"]
    _check(tmp_path / "a")


def test_a_name_that_is_too_long_is_the_error(tmp_path: Path) -> None:
    with (
        pytest.raises(LmtrainError, match=r"can't write .*File name too long"),
        files.new_folder(tmp_path / ("a" * 250), "kind/1", {}),
    ):
        pass


@pytest.mark.parametrize("name", [".tmp-notes", ".tmp-a-1234567", ".tmp-b~old-1", ".tmp-a-ABCDEF12", ".tmp--12345678"])
def test_the_temporary_files_of_others_are_left_alone(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("mine")
    files.recover(tmp_path)
    assert (tmp_path / name).read_text() == "mine"


def test_parent_folders_are_made_and_flushed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[str] = []
    monkeypatch.setattr(disk, "sync", lambda path: synced.append(path.name))
    files.make_folders(tmp_path / "a" / "b" / "c")
    assert (tmp_path / "a" / "b" / "c").is_dir()
    assert synced == [tmp_path.name, "a", "b"]
    files.make_folders(tmp_path / "a" / "b")
    assert len(synced) == 3
    (tmp_path / "file").touch()
    with pytest.raises(LmtrainError, match="can't write"):
        files.make_folders(tmp_path / "file" / "b")


@pytest.mark.parametrize(
    "name", ["../outside", "/etc/passwd", "a/../../outside", "x" * 300, "\x1b[2J", "\ud800", "", "."]
)
def test_a_manifest_names_only_files_in_its_folder(tmp_path: Path, name: str) -> None:
    _write(tmp_path / "a", FORMAT)
    (tmp_path / "outside").write_bytes(b"content")
    manifest = unsealed(tmp_path / "a")
    manifest["files"] = {name: manifest["files"]["data"]}
    (tmp_path / "a" / files.MANIFEST).write_text(json.dumps(manifest))
    with pytest.raises(LmtrainError, match=r"damaged|missing|can't be read") as caught:
        _check(tmp_path / "a", FORMAT)
    assert str(caught.value).isprintable()


def test_only_the_manifest_of_a_checkpoint_may_lack_its_hash(tmp_path: Path) -> None:
    for kind in (FORMAT, "kind/1"):
        _write(tmp_path / "a", kind)
        (tmp_path / "a" / files.MANIFEST).write_text(json.dumps(unsealed(tmp_path / "a")))
        with nullcontext() if kind == FORMAT else pytest.raises(LmtrainError, match="damaged or was changed"):
            files.read_manifest(tmp_path / "a", kind)


def write_forever(path: Path, say: Callable[[str], None]) -> None:
    with files.new_folder(path, "kind/1", {}) as folder:
        (folder / "data").touch()
        say(folder.name)
        signal.alarm(60)  # in case the test ends first
        signal.pause()


def test_a_folder_is_left_alone_while_its_writer_lives_and_deleted_after(tmp_path: Path) -> None:
    child = Child(partial(write_forever, tmp_path / "a"))
    name = child.hear()
    files.recover(tmp_path)
    _write(tmp_path / "a")
    assert {path.name for path in tmp_path.iterdir()} == {"a", name}
    os.kill(child.process, signal.SIGKILL)
    assert child.end() == -signal.SIGKILL
    files.recover(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_a_folder_that_another_process_just_made_is_left_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "theirs").touch()
    disk.make_folder(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["theirs"]


def test_a_new_file_has_the_permissions_that_the_user_has_set(tmp_path: Path) -> None:
    before = os.umask(0o002)
    try:
        disk.open_in_place(tmp_path / "new").close()
    finally:
        os.umask(before)
    assert (tmp_path / "new").stat().st_mode & 0o777 == 0o664


def test_a_folder_is_renamed_while_its_parent_is_locked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two renames replace a folder: another process must not see, or undo, the first one alone."""
    held: list[bool] = []
    rename = disk.rename

    def noted(path: Path, target: Path) -> None:
        with files.folder_lock(target.parent, fcntl.LOCK_EX | fcntl.LOCK_NB) as is_free:
            held.append(not is_free)
        rename(path, target)

    monkeypatch.setattr(disk, "rename", noted)
    for _ in range(2):
        _write(tmp_path / "folder")
        (tmp_path / "folder" / "data").write_bytes(b"changed")  # so that it is replaced
    (tmp_path / "folder").rename(tmp_path / ".tmp-folder~old-00000000")  # as after a crash between two renames
    files.recover(tmp_path)
    assert held == [True] * 4
