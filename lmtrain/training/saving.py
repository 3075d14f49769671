"""Checkpoints written behind the loop's back: the loop waits for the copy of its tensors, and no longer."""

import os
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn, Self

import torch
from torch import Tensor

from lmtrain.errors import LmtrainError
from lmtrain.storage import checkpoint
from lmtrain.storage.tensor_files import in_rows, rows_name
from lmtrain.system.distributed import ALONE, Workers
from lmtrain.system.signals import INTERRUPTED, end_at_once
from lmtrain.training.parallel import is_sharded, local_rows


class Saver:
    """Writes one checkpoint at a time, in the order in which they are given, in a thread of its own.

    A whole tensor is written by the leader. Of a sharded one each process writes the rows that it holds; none are sent.
    What can't be written is raised by the next call of any kind, and at the end of the block at the latest. Between a
    `save` and the next `wait` the newest checkpoint on the disk is the one before.
    """

    def __init__(self, run_dir: Path, keep: int, workers: Workers = ALONE) -> None:
        self._run_dir = run_dir
        self._keep = keep
        self._good: set[Path] = set()  # checkpoints that this process has written, or has compared with their hashes
        self._workers = workers.apart()  # the loop's messages come and go meanwhile
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._pending: Future[None] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._thread.shutdown(wait=True)
        if error is None:
            self.wait()

    def save(self, step: int, tensors: checkpoint.Tensors, info: dict[str, Any]) -> None:
        """Copy the tensors, and let the copy be written; waits for the checkpoint before it. All processes call it."""
        self.wait()
        copies = {group: _copies(named, self._workers.leads) for group, named in tensors.items()}
        sharded = any(in_rows(named) for named in copies.values())
        if sharded or self._workers.leads:
            self._pending = self._thread.submit(self._write, step, copies, info, self._workers if sharded else ALONE)

    def check(self) -> None:
        """Raise what went wrong with the last checkpoint, if that is known by now."""
        if self._pending is not None and self._pending.done():
            self.wait()

    def wait(self) -> None:
        """Return when all that was given is on the disk; the leader alone has then given it its place.

        Raises LmtrainError when it could not be written.
        """
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()

    def _write(self, step: int, tensors: checkpoint.Tensors, info: dict[str, Any], workers: Workers) -> None:
        for group, named in tensors.items():
            for name, tensor in named.items():
                if tensor.is_floating_point() and tensor.numel() and not _is_finite(tensor):
                    raise LmtrainError(
                        f"step {step}: {group} tensor {name} is not finite, so this checkpoint was not written; "
                        "the one before it is good: lower train.lr or raise train.warmup"
                    )
        self._good.add(checkpoint.save(self._run_dir, step, tensors, info, workers))
        if workers.leads:
            checkpoint.prune(self._run_dir, self._keep, self._good)


def abort(run_dir: Path, workers: Workers) -> NoReturn:
    """Exit at once, with the newest checkpoint on the disk as the run's last; the leader says so, and in state.json."""
    steps = [int(folder.name.removeprefix("step-")) for folder in checkpoint.folders(run_dir)]
    if not workers.leads:
        os._exit(INTERRUPTED)
    with suppress(LmtrainError):
        checkpoint.write_state(run_dir, "interrupted", step=steps[-1] if steps else 0, signal="SIGINT")
    kept = "no checkpoint has been saved yet"
    if steps:
        kept = f"the checkpoint of step {steps[-1]:,} is good, and the same command resumes from it"
    end_at_once(f"interrupted again, so ended at once: {kept}")


def _copies(named: Mapping[str, Tensor], leads: bool) -> dict[str, Tensor]:
    """In the host's memory, what this process is to write: its rows of sharded tensors and, if it leads, whole ones."""
    copies = {}
    for name, tensor in named.items():
        if is_sharded(tensor):
            rows, held = local_rows(tensor)
            copies[rows_name(name, rows.start, rows.stop, len(tensor))] = held.to("cpu", copy=True)
        elif leads:
            copies[name] = tensor.detach().to("cpu", copy=True)
    return copies


def _is_finite(tensor: Tensor) -> bool:
    """Whether all elements are finite, told from the least and the greatest: a fifth of the time of asking each."""
    return bool(torch.stack(torch.aminmax(tensor)).isfinite().all())
