"""Checkpoints that several processes write, each its rows: read by rows, and rejected if rows are missing."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lmtrain.errors import LmtrainError
from lmtrain.storage import checkpoint, run_checkpoints
from lmtrain.storage.checkpoint import Tensors
from lmtrain.storage.files import MANIFEST
from lmtrain.storage.tensor_files import rows_name, serialize
from lmtrain.system import disk
from lmtrain.system.process_group import ProcessGroup
from tests.helpers import state_hash
from tests.hostile import sign


class Threads(ProcessGroup):
    """Threads in the place of processes."""

    def __init__(self, rank: int, said: list[Any], barrier: threading.Barrier) -> None:
        super().__init__(rank, len(said))
        self._said, self._barrier = said, barrier

    def all_gather_json(self, value: Any) -> list[Any]:
        self._said[self.rank] = value
        self._barrier.wait(20)
        told = list(self._said)
        self._barrier.wait(20)
        return told


def example(seed: int) -> Tensors:
    torch.manual_seed(seed)
    model = {f"w{rows}": torch.randn(rows, 3, 2) for rows in (1, 2, 5, 8, 9)} | {"bias": torch.randn(7).bfloat16()}
    moments = {f"{name}/exp_avg": torch.randn(tensor.shape) for name, tensor in model.items()}
    return {"model": model, "optimizer": {**moments, "bias/step": torch.tensor(3.0)}, "spikes": {"mean": torch.ones(2)}}


def part(named: dict[str, Tensor], rank: int, size: int, whole: Callable[[str], bool]) -> dict[str, Tensor]:
    """What one process has of tensors that are split by rows as `torch.chunk` does, and of whole ones."""
    held = {}
    for name, tensor in named.items():
        if not whole(name):
            chunks = torch.chunk(tensor, size)
            first = sum(len(chunk) for chunk in chunks[:rank])
            mine = chunks[rank] if rank < len(chunks) else tensor[:0]
            held[rows_name(name, first, first + len(mine), len(tensor))] = mine
        elif rank == 0:
            held[name] = tensor
    return held


def save(run_dir: Path, step: int, size: int) -> Path:
    """The checkpoint of a step, written by as many threads."""
    said, barrier, tensors = [""] * size, threading.Barrier(size), example(step)

    def write(rank: int) -> Path:
        mine = {
            group: part(named, rank, size, lambda name: name in ("bias/step", "mean"))
            for group, named in tensors.items()
        }
        return checkpoint.save(run_dir, step, mine, {"score": float(step)}, Threads(rank, said, barrier))

    with ThreadPoolExecutor(size) as pool:
        return next(iter(set(pool.map(write, range(size)))))


@pytest.mark.parametrize("size", [1, 2, 3, 4, 8])
def test_rows_are_read_as_they_were_cut(tmp_path: Path, size: int) -> None:
    folder = save(tmp_path, 1, size)
    names = {f"{group}-{part:05d}-of-{size:05d}" for group in ("model", "optimizer") for part in range(1, size + 1)}
    assert {path.stem for path in folder.iterdir()} == names | {f"spikes-00001-of-{size:05d}", "manifest"}
    assert [path.name for path in folder.parent.iterdir()] == ["step-00000001"]
    found, expected = checkpoint.load(folder), example(1)
    for group, named in expected.items():
        checkpoint.check_shapes(found.tensors[group], named)
        for name, tensor in named.items():
            stored = found.tensors[group][name]
            assert torch.equal(stored[...], tensor)
            for first in range(len(tensor) if tensor.ndim else 0):
                for end in range(first, len(tensor) + 1):
                    assert torch.equal(stored[first:end], tensor[first:end])
    whole = checkpoint.save(tmp_path / "whole", 1, expected, {"score": 1.0})
    assert state_hash(found) == state_hash(checkpoint.load(whole))
    assert checkpoint.load(folder, only_weights=True).tensors.keys() == {"model"}


def test_the_same_step_is_written_again_by_fewer_and_older_ones_are_pruned(tmp_path: Path) -> None:
    for step, size in ((1, 4), (2, 3), (3, 2), (3, 4), (3, 1)):
        save(tmp_path, step, size)
        run_checkpoints.prune(tmp_path, 1)
    assert [folder.name for folder in run_checkpoints.folders(tmp_path)] == ["step-00000001", "step-00000003"]
    assert len(list(run_checkpoints.choose(tmp_path, "last").iterdir())) == 4


def test_each_flushes_what_it_wrote_before_the_folder_has_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[tuple[str, int, str]] = []

    def noted(call: str, real: Callable[..., None], path: Path, *rest: Any) -> None:
        real(path, *rest)
        calls.append((call, threading.get_ident(), path.name))

    for call in ("write", "sync", "rename"):
        monkeypatch.setattr(disk, call, partial(noted, call, getattr(disk, call)))
    save(tmp_path, 1, 3)
    before = calls[: next(i for i, (call, _, name) in enumerate(calls) if call == "rename" and "step" in name)]
    written = [(thread, name) for call, thread, name in before if call == "write" and name != MANIFEST]
    assert len(written) == 7
    assert len({thread for thread, _ in written}) == 3
    assert all(("sync", thread, name) in before for thread, name in written)


SECOND = "model-00002-of-00002.safetensors"


@pytest.mark.parametrize(
    ("name", "rows", "columns"),
    [
        ("of another type", slice(0, 4), 3),
        (None, slice(0), 3),
        ("w8[0:4/8]", slice(0, 4), 3),
        ("w8[5:8/8]", slice(1, 4), 3),
        ("w8[4:7/8]", slice(0, 3), 3),
        ("w8[3:8/8]", slice(0, 4), 3),
        ("w8[4:8/8]", slice(0, 3), 3),
        ("w8[4:8/9]", slice(0, 4), 3),
        ("w8[4:8/8]", slice(0, 4), 2),
        ("w8", slice(0, 4), 3),
    ],
)
def test_missing_doubled_and_foreign_rows_are_rejected(
    tmp_path: Path, name: str | None, rows: slice, columns: int
) -> None:
    """The second part, which should have rows 4 to 8 of `w8`, has others or none."""
    folder = save(tmp_path, 2, 2)
    held = part(example(2)["model"], 1, 2, lambda name: False)
    sound = held.pop("w8[4:8/8]")
    if name == "of another type":
        held["w8[4:8/8]"] = sound.double()
    elif name is not None:
        held[name] = sound[rows, :columns]
    (folder / SECOND).write_bytes(b"".join(serialize(held)))
    sign(folder / SECOND)
    with pytest.raises(LmtrainError, match=r"rows of 'w8' are missing or stored twice"):
        checkpoint.load(folder)
