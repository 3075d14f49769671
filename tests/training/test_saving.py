"""Checkpoints written in the background: what is copied, in which order they appear, and how failures are raised."""

import threading
from pathlib import Path

import pytest
import torch

from lmtrain.errors import LmtrainError
from lmtrain.storage import checkpoint, run_checkpoints
from lmtrain.system import disk
from lmtrain.training.saving import CheckpointSaver
from tests.training.helpers import full_disk


def state(value: float) -> checkpoint.Tensors:
    return {"model": {"weight": torch.full((4,), value)}}


def weight(run_dir: Path, step: int) -> list[float]:
    return checkpoint.load(run_checkpoints.choose(run_dir, str(step))).tensors["model"]["weight"][...].tolist()


def test_the_copy_is_of_the_moment_of_saving(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    go, real = threading.Event(), disk.write

    def slow(path: Path, data: bytes) -> None:
        assert go.wait(20)
        real(path, data)

    monkeypatch.setattr(disk, "write", slow)
    tensors = state(1.0)
    with CheckpointSaver(tmp_path, keep=5) as saver:
        saver.save(1, tensors, {"score": None})
        tensors["model"]["weight"].fill_(2.0)  # the next step
        assert not run_checkpoints.folders(tmp_path)  # nothing is there until all of it is
        go.set()
        saver.save(2, tensors, {"score": None})
    assert weight(tmp_path, 1) == [1.0] * 4
    assert weight(tmp_path, 2) == [2.0] * 4


@pytest.mark.parametrize("call", ["save", "wait", "end"])
def test_a_failed_write_is_raised_and_leaves_the_previous_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    def fail_to_save() -> None:
        with CheckpointSaver(tmp_path, keep=1) as saver:
            saver.save(1, state(1.0), {"score": None})
            saver.wait()
            monkeypatch.setattr(disk, "write", full_disk)
            saver.save(2, state(2.0), {"score": None})
            assert saver._pending is not None
            saver._pending.exception()  # until it is done
            if call == "wait":
                saver.wait()
            elif call == "save":
                saver.save(3, state(3.0), {"score": None})

    with pytest.raises(LmtrainError, match="No space left on device"):
        fail_to_save()
    assert [folder.name for folder in (tmp_path / "checkpoints").iterdir()] == ["step-00000001"]
    assert weight(tmp_path, 1) == [1.0] * 4
