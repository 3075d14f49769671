"""Saving a checkpoint: a full disk, and tensors that are not finite."""

from pathlib import Path

import pytest
import torch

from lmtrain.errors import LmtrainError
from lmtrain.storage import checkpoint, run_checkpoints
from lmtrain.system import disk
from lmtrain.training.saving import save_checkpoint
from tests.training.helpers import full_disk


def state(value: float) -> checkpoint.Tensors:
    return {"model": {"weight": torch.full((4,), value)}}


def test_a_failed_write_leaves_the_previous_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_checkpoint(tmp_path, 1, state(1.0), {"score": None}, keep=1)
    monkeypatch.setattr(disk, "write", full_disk)
    with pytest.raises(LmtrainError, match="No space left on device"):
        save_checkpoint(tmp_path, 2, state(2.0), {"score": None}, keep=1)
    assert [folder.name for folder in (tmp_path / "checkpoints").iterdir()] == ["step-00000001"]
    last = checkpoint.load(run_checkpoints.choose(tmp_path, "last"))
    assert last.tensors["model"]["weight"][...].tolist() == [1.0] * 4


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_tensors_that_are_not_finite_are_never_written(tmp_path: Path, value: float) -> None:
    tensors = {**state(1.0), "optimizer": {"weight/exp_avg": torch.tensor([0.0, value])}}
    with pytest.raises(LmtrainError, match="weight/exp_avg is not finite"):
        save_checkpoint(tmp_path, 1, tensors, {"score": None}, keep=1)
    assert not run_checkpoints.folders(tmp_path)
