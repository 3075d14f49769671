"""Runs whose processes each save what they hold: nothing is gathered, any number reads it, a death costs nothing."""

import json
import os
import signal
import weakref
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
from lmtrain.storage import checkpoint
from lmtrain.storage.tensor_files import Stored, _Piece
from lmtrain.system import disk
from lmtrain.system.distributed import Workers
from lmtrain.training import state
from lmtrain.training.loop import fit
from lmtrain.training.saving import Saver
from tests.reading import read
from tests.training.ranks import said, together
from tests.training.test_loop import change, last_hash, run

pytestmark = pytest.mark.usefixtures("one_thread")

CLOCK = {"seconds": 1.0, "metrics_bytes": 0}
MOST_SENT = 4096
"""Numbers that may go between processes while they save: names of files and hashes."""


def _never(*_: object, **__: object) -> Any:
    raise AssertionError("a tensor is gathered")


def ungathered(patch: pytest.MonkeyPatch) -> None:
    """Let every way to send a tensor fail, but for short messages."""
    real = torch.distributed.all_reduce

    def small(tensor: Tensor, *rest: Any, **more: Any) -> Any:
        assert tensor.numel() <= MOST_SENT, "a tensor is sent"
        return real(tensor, *rest, **more)

    patch.setattr(torch.distributed, "all_reduce", small)
    patch.setattr(torch.distributed.tensor.DTensor, "full_tensor", _never)
    patch.setattr(torch.distributed.tensor.DTensor, "redistribute", _never)
    for name in ("all_gather", "all_gather_into_tensor", "broadcast", "gather", "send"):
        patch.setattr(torch.distributed, name, _never)


def copying(config: Config, store: TokenStore, source: Path, target: Path, kind: str) -> Callable[[Workers], None]:
    """Restore the last checkpoint of `source` and save it as `target`; `target`-read-* say how much each has read."""

    def work(workers: Workers) -> None:
        training = state.prepare(change(config, train__parallel=kind), store, print, workers)
        if kind == "fsdp":
            most = max(value.to_local().numel() / value.numel() for value in training.model.parameters())  # type: ignore[attr-defined]
            assert most < 1, "a process holds all of a parameter"
        found = checkpoint.load(checkpoint.choose(source, "last"))
        elements = 0
        honest = _Piece.read

        def counted(piece: _Piece, rows: slice | EllipsisType) -> Tensor:
            nonlocal elements
            tensor = honest(piece, rows)
            elements += tensor.numel()
            return tensor

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(_Piece, "read", counted)
            ungathered(patch)
            state.restore(training, found)
            with Saver(target, 1, workers) as saver:
                saver.save(training.counters.step, *state.snapshot(training, store, None, CLOCK))
        (target.with_name(f"{target.name}-read-{workers.rank}")).write_text(str(elements))

    return work


def test_a_state_goes_from_any_number_of_processes_to_any_other(
    tiny: Config, store: TokenStore, tmp_path: Path
) -> None:
    run(tiny, store, tmp_path / "run")
    before = tmp_path / "run"
    expected = last_hash(before)
    total = sum(
        tensor.numel()
        for named in read(checkpoint.choose(before, "last")).tensors.values()
        for tensor in named.values()
    )
    for size, kind in ((3, "fsdp"), (4, "fsdp"), (1, "ddp")):
        after = tmp_path / f"{size}-{kind}"
        log = tmp_path / f"log-{after.name}"
        assert together(size, copying(tiny, store, before, after, kind), log) == [0] * size, said(log, 0)
        assert last_hash(after) == expected
        files = {path.name for path in checkpoint.choose(after, "last").glob("model*")}
        parts = {f"model-{number:05d}-of-{size:05d}.safetensors" for number in range(1, size + 1)}
        assert files == (parts if kind == "fsdp" else {"model.safetensors"})
        elements = [int((tmp_path / f"{after.name}-read-{rank}").read_text()) for rank in range(size)]
        steps = sum(name.endswith("/step") for name in read(checkpoint.choose(after, "last")).tensors["optimizer"])
        assert sum(elements) == total + (size - 1) * steps if kind == "fsdp" else elements == [total] * size
        before = after


def test_a_sharded_run_is_scored_and_generates_as_any_other(
    tiny: Config, store: TokenStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = change(tiny, train__steps=4, train__eval_steps=2, train__parallel="fsdp", train__keep=1)

    def work(workers: Workers) -> None:
        fit(config, store, tmp_path / "run", resume=True, note=print, quiet=True, workers=workers)

    assert together(2, work, tmp_path / "log") == [0, 0], said(tmp_path / "log", 0)
    assert len(checkpoint.folders(tmp_path / "run")) <= 2
    alive: list[weakref.ref[Tensor]] = []
    honest = Stored.__getitem__

    def watched(stored: Stored, rows: slice | EllipsisType) -> Tensor:
        assert not any(reference() is not None for reference in alive), "a second copy of the model"
        tensor = honest(stored, rows)
        alive.append(weakref.ref(tensor))
        return tensor

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Stored, "__getitem__", watched)
        trained = load_trained(tmp_path / "run", "last", "auto", torch.device("cpu"))
    assert trained.weights == "ema"
    stored = read(checkpoint.choose(tmp_path / "run", "last")).tensors["ema"]
    assert len(alive) == len(stored)
    assert all(torch.equal(value, stored[name]) for name, value in trained.model.named_parameters())
    run(change(config, train__parallel="auto", train__steps=4), store, tmp_path / "run")


def saving(
    config: Config, store: TokenStore, run_dir: Path, victim: int, harm: Callable[[], None]
) -> Callable[[Workers], None]:
    """Save step 0 and then another, in whose writing one process comes to harm."""

    def work(workers: Workers) -> None:
        training = state.prepare(change(config, train__parallel="fsdp"), store, print, workers)
        write = disk.write

        def harmed(path: Path, data: Any) -> None:
            if workers.rank == victim and path.name.startswith("ema"):
                harm()
            write(path, data)

        with pytest.MonkeyPatch.context() as patch, Saver(run_dir, 1, workers) as saver:
            saver.save(1, *state.snapshot(training, store, None, CLOCK))
            saver.wait()
            workers.agree(0)
            patch.setattr(disk, "write", harmed)
            saver.save(2, *state.snapshot(training, store, None, CLOCK))

    return work


def _full() -> None:
    raise OSError(28, "No space left on device")


def _killed() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize(("victim", "harm"), [(0, _killed), (1, _killed), (0, _full), (1, _full)])
def test_a_process_that_fails_in_writing_leaves_the_checkpoint_before(
    tiny: Config, store: TokenStore, tmp_path: Path, victim: int, harm: Callable[[], None]
) -> None:
    work = saving(tiny, store, tmp_path / "run", victim, harm)
    statuses = together(2, work, tmp_path / "log")
    assert statuses[victim] == (-signal.SIGKILL if harm is _killed else 1)
    assert statuses[1 - victim] == 1
    if harm is _full:
        assert "No space left on device" in said(tmp_path / "log", victim)
    other = "AlreadyReported" if harm is _full else "another process of this run has ended"
    assert other in said(tmp_path / "log", 1 - victim)
    notes: list[str] = []
    with checkpoint.lock(tmp_path / "run"):
        found = checkpoint.last(tmp_path / "run", notes.append)
    assert found is not None
    assert (found.info["step"], notes) == (1, [])
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == ["step-00000001"]
    assert all(torch.isfinite(tensor).all() for tensor in read(found.folder).tensors["model"].values())
    assert json.loads((found.folder / "manifest.json").read_text())["processes"] == 2
