"""A disk that is full or fails at any moment of a save: one message, and the checkpoint before is unharmed."""

import errno
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from lmtrain.errors import LmtrainError
from lmtrain.storage import files, run_checkpoints
from lmtrain.system import disk
from tests.storage.crash_states import CALLS
from tests.storage.helpers import leftovers, read, restart, save

FULL = os.strerror(errno.ENOSPC)


class FailingDisk:
    """Lets `passing` calls of `lmtrain.system.disk` succeed, and fails the next one, or all after them."""

    def __init__(self, patch: pytest.MonkeyPatch, passing: int, *, for_good: bool) -> None:
        self.made, self.failed = 0, 0
        self._passing, self._for_good = passing, for_good
        for name in CALLS:
            patch.setattr(disk, name, partial(self._call, name, getattr(disk, name)))

    def _call(self, name: str, real: Callable[..., None], path: Path, *rest: Any) -> None:
        made, self.made = self.made, self.made + 1
        if made == self._passing or (made > self._passing and self._for_good):
            self.failed += 1
            if name == "remove":
                return  # which ignores errors
            if name == "write" and not self._for_good:
                real(path, rest[0][: len(rest[0]) // 2])
            raise OSError(errno.ENOSPC, FULL)
        real(path, *rest)


@pytest.mark.parametrize("for_good", [False, True], ids=["once", "for good"])
@pytest.mark.parametrize("kind", ["first", "pruned", "same step"])
def test_an_error_of_any_call_harms_nothing(tmp_path: Path, kind: str, for_good: bool) -> None:
    step = 1 if kind == "same step" else 2
    new = read(save(tmp_path / "new", step, seed=2))
    for passing in range(100):
        run_dir = tmp_path / f"{passing}"
        old = None if kind == "first" else read(save(run_dir, 1))
        message = ""
        with pytest.MonkeyPatch.context() as patch:
            failing = FailingDisk(patch, passing, for_good=for_good)
            try:
                save(run_dir, step, seed=2)
                run_checkpoints.prune(run_dir, 1)
            except LmtrainError as error:
                message = str(error)
        if not failing.failed:
            break
        if message:
            assert str(run_dir) in message
            assert FULL in message
        if not for_good:
            # If the last sync failed, the older folder stays until a restart has read the new one.
            assert all("~old-" in name for name in leftovers(run_dir) if message)
            assert old is None or run_checkpoints.folders(run_dir)
        if old is None and not list(run_dir.glob("checkpoints/step-*")):
            continue
        found, notes = restart(run_dir)
        assert found == new or (old is not None and found == old)
        assert notes == leftovers(run_dir) == []
    assert passing >= 9


@pytest.mark.parametrize("for_good", [False, True], ids=["once", "for good"])
def test_an_error_in_a_single_file_keeps_the_old_one(tmp_path: Path, for_good: bool) -> None:
    path = tmp_path / "state.json"
    for passing, expected in enumerate([b"old", b"old", b"old", b"new"]):
        files.write_file(path, b"old")
        with pytest.MonkeyPatch.context() as patch:
            FailingDisk(patch, passing, for_good=for_good)
            with pytest.raises(LmtrainError, match=f"can't write {path}: {FULL}"):
                files.write_file(path, b"new")
        assert for_good or leftovers(tmp_path) == []
        files.recover(tmp_path)
        assert list(tmp_path.iterdir()) == [path]
        assert path.read_bytes() == expected


def test_a_file_that_cannot_be_removed_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "unlink", Mock(side_effect=OSError(errno.EROFS, os.strerror(errno.EROFS))))
    FailingDisk(monkeypatch, 1, for_good=False)
    with pytest.raises(LmtrainError, match=FULL):
        files.write_file(tmp_path / "state.json", b"new")
    assert len(leftovers(tmp_path)) == 1


def test_a_failed_restart_is_one_message_and_the_next_one_works(tmp_path: Path) -> None:
    """Each of its calls fails once, with a folder to be renamed back and a damaged checkpoint to be set aside."""
    messages = []
    for passing in range(100):
        run_dir = tmp_path / str(passing)
        folder, damaged = save(run_dir, 1), save(run_dir, 2)
        before = read(folder)
        folder.rename(folder.with_name(f".tmp-{folder.name}~old-00000001"))
        (damaged / "model.safetensors").write_bytes(b"")
        with pytest.MonkeyPatch.context() as patch:
            failing = FailingDisk(patch, passing, for_good=False)
            try:
                assert restart(run_dir)[0] == before
            except LmtrainError as error:
                messages.append(str(error))
        assert restart(run_dir)[0] == before
        if not failing.failed:
            break
    assert len(messages) == 3
    assert all(f"can't write {tmp_path}" in message for message in messages)
