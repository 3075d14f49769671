"""Sharded runs: each process saves its own rows, any number of processes reads them; failed saves."""

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from types import EllipsisType
from typing import Any

import pytest
import torch
import torch.distributed.tensor
from torch import Tensor

from lmtrain.config.schema import Config
from lmtrain.data.tokens import TokenStore
from lmtrain.model.trained import load_trained
from lmtrain.storage import checkpoint, run_checkpoints, run_folder
from lmtrain.storage.tensor_files import _Piece
from lmtrain.system import disk
from lmtrain.system.process_group import ProcessGroup
from lmtrain.training.costs import memory_estimate
from lmtrain.training.loop import fit, train_step
from lmtrain.training.saving import Saver
from lmtrain.training.sharding import local
from lmtrain.training.state import new_training, restore, snapshot
from tests.helpers import read
from tests.training.helpers import change, cpu, last_hash, run, silent
from tests.training.ranks import output, together

pytestmark = pytest.mark.usefixtures("one_thread")

CLOCK = {"seconds": 1.0, "metrics_bytes": 0}
MOST_SENT = 4096
"""Numbers that processes may send each other while they save: file names and hashes."""


def _never(*_: object, **__: object) -> Any:
    raise AssertionError("a tensor is gathered")


def forbid_gathering(patch: pytest.MonkeyPatch) -> None:
    """Let every way to send a tensor fail, except short messages."""
    all_gather = torch.distributed.all_gather

    def short(found: list[Tensor], tensor: Tensor, **more: Any) -> Any:
        assert tensor.numel() <= MOST_SENT, "a tensor is sent"
        return all_gather(found, tensor, **more)

    patch.setattr(torch.distributed, "all_gather", short)
    patch.setattr(torch.distributed.tensor.DTensor, "full_tensor", _never)
    patch.setattr(torch.distributed.tensor.DTensor, "redistribute", _never)
    for name in ("all_reduce", "all_gather_into_tensor", "broadcast", "gather", "send"):
        patch.setattr(torch.distributed, name, _never)


def copying(config: Config, store: TokenStore, source: Path, target: Path, kind: str) -> Callable[[ProcessGroup], None]:
    """Restore the last checkpoint of `source` and save it in `target`; `target`-<rank>.json records what it read."""

    def work(processes: ProcessGroup) -> None:
        training = new_training(change(config, train__parallel=kind), store, silent, processes)
        if kind == "fsdp":
            most = max(local(value).numel() / value.numel() for value in training.model.parameters())
            assert most < 1, "a process holds all of a parameter"
        found = checkpoint.load(run_checkpoints.choose(source, "last"))
        elements, read_piece = 0, _Piece.read

        def counted(piece: _Piece, rows: slice | EllipsisType) -> Tensor:
            nonlocal elements
            tensor = read_piece(piece, rows)
            elements += tensor.numel()
            return tensor

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(_Piece, "read", counted)
            forbid_gathering(patch)
            restore(training, found)
            with Saver(target, 1, processes) as saver:
                saver.save(training.counters.step, *snapshot(training, store, None, CLOCK))
        train_step(training, 1e-3)
        moments = [value for entries in training.optimizer.state.values() for value in entries.values() if value.ndim]
        bytes_held = sum(local(value).nbytes for value in moments)
        target.with_name(f"{target.name}-{processes.rank}.json").write_text(json.dumps([elements, bytes_held]))

    return work


def test_a_state_moves_between_any_numbers_of_processes(tiny: Config, store: TokenStore, tmp_path: Path) -> None:
    """Each process reads, holds and writes only its own rows."""
    run(tiny, store, tmp_path / "run")
    before = tmp_path / "run"
    expected = last_hash(before)
    tensors = read(run_checkpoints.choose(before, "last")).tensors
    total = sum(tensor.numel() for named in tensors.values() for tensor in named.values())
    steps = sum(name.endswith("/step") for name in tensors["optimizer"])
    optimizer_bytes = memory_estimate(tiny, store.tokenizer.vocab_size, "fp32")["optimizer"]
    for size, kind in ((3, "fsdp"), (2, "fsdp"), (1, "ddp")):
        after = tmp_path / f"{size}-{kind}"
        log = tmp_path / f"log-{after.name}"
        assert together(size, copying(tiny, store, before, after, kind), log) == [0] * size, output(log, 0)
        assert last_hash(after) == expected
        files = {path.name for path in run_checkpoints.choose(after, "last").glob("model*")}
        parts = {f"model-{number:05d}-of-{size:05d}.safetensors" for number in range(1, size + 1)}
        assert files == (parts if kind == "fsdp" else {"model.safetensors"})
        found = [json.loads((tmp_path / f"{after.name}-{rank}.json").read_text()) for rank in range(size)]
        elements, held = ([rank[index] for rank in found] for index in (0, 1))
        assert sum(elements) == total + (size - 1) * steps if kind == "fsdp" else elements == [total] * size
        assert sum(held) == optimizer_bytes
        before = after


def test_a_sharded_run_can_be_loaded_and_resumed_by_one_process(
    tiny: Config, store: TokenStore, tmp_path: Path
) -> None:
    config = change(tiny, train__steps=4, train__eval_steps=2, train__parallel="fsdp", train__keep=1)

    def work(processes: ProcessGroup) -> None:
        fit(config, store, tmp_path / "run", resume=True, note=print, quiet=True, processes=processes)

    assert together(2, work, tmp_path / "log") == [0, 0], output(tmp_path / "log", 0)
    assert len(run_checkpoints.folders(tmp_path / "run")) <= 2
    trained = load_trained(tmp_path / "run", "last", "auto", cpu())
    assert trained.weights == "ema"
    stored = read(run_checkpoints.choose(tmp_path / "run", "last")).tensors["ema"]
    assert all(torch.equal(value, stored[name]) for name, value in trained.model.named_parameters())
    run(change(config, train__parallel="auto"), store, tmp_path / "run")


def saving(
    config: Config, store: TokenStore, run_dir: Path, victim: int, harm: Callable[[], None]
) -> Callable[[ProcessGroup], None]:
    """Save step 1 and then step 2, while writing which one process fails."""

    def work(processes: ProcessGroup) -> None:
        training = new_training(change(config, train__parallel="fsdp"), store, silent, processes)
        write = disk.write

        def harmed(path: Path, data: Any) -> None:
            if processes.rank == victim and path.name.startswith("ema"):
                harm()
            write(path, data)

        with pytest.MonkeyPatch.context() as patch, Saver(run_dir, 1, processes) as saver:
            saver.save(1, *snapshot(training, store, None, CLOCK))
            saver.wait()
            processes.barrier()
            patch.setattr(disk, "write", harmed)
            saver.save(2, *snapshot(training, store, None, CLOCK))

    return work


def _full() -> None:
    raise OSError(28, "No space left on device")


def _killed() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize(("victim", "harm"), [(0, _killed), (1, _killed), (0, _full), (1, _full)])
def test_a_failed_save_leaves_the_previous_checkpoint(
    tiny: Config, store: TokenStore, tmp_path: Path, victim: int, harm: Callable[[], None]
) -> None:
    statuses = together(2, saving(tiny, store, tmp_path / "run", victim, harm), tmp_path / "log")
    assert statuses[victim] == (-signal.SIGKILL if harm is _killed else 1)
    assert statuses[1 - victim] == 1
    if harm is _full:
        assert "No space left on device" in output(tmp_path / "log", victim)
    other = "AlreadyReported" if harm is _full else "another process of this run has ended"
    assert other in output(tmp_path / "log", 1 - victim)
    notes: list[str] = []
    with run_folder.lock(tmp_path / "run"):
        found = run_checkpoints.last(tmp_path / "run", notes.append)
    assert found is not None
    assert (found.info["step"], notes) == (1, [])
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == ["step-00000001"]
    assert json.loads((found.folder / "manifest.json").read_text())["processes"] == 2
