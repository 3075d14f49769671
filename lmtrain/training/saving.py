"""Checkpoints written behind the loop's back: the loop waits for the copy of its tensors, and no longer."""

from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor

from lmtrain import checkpoint
from lmtrain.errors import LmtrainError
from lmtrain.training.parallel import whole
from lmtrain.workers import ALONE, Workers


class Saver:
    """Writes one checkpoint at a time, in the order in which they are given, in a thread of its own.

    What can't be written is raised by the next call of any kind, and at the end of the block at the latest. Between a
    `save` and the next `wait` the newest checkpoint on the disk is the one before.
    """

    def __init__(self, run_dir: Path, keep: int, workers: Workers = ALONE) -> None:
        self._run_dir = run_dir
        self._keep = keep
        self._workers = workers
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
        """Copy the tensors, and let the copy be written; waits for the checkpoint before it.

        Sharded tensors are gathered one by one, for which all processes must call this; the leader alone writes.
        """
        self.wait()
        copies: checkpoint.Tensors = {}
        for group, named in tensors.items():
            copies[group] = {}
            for name, tensor in named.items():
                all_of_it = whole(tensor.detach())
                if self._workers.leads:
                    copies[group][name] = all_of_it.to("cpu", copy=True)
        if self._workers.leads:
            self._pending = self._thread.submit(self._write, step, copies, info)

    def check(self) -> None:
        """Raise what went wrong with the last checkpoint, if that is known by now."""
        if self._pending is not None and self._pending.done():
            self.wait()

    def wait(self) -> None:
        """Return when all that was given is on the disk. Raises LmtrainError when it could not be written."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()

    def _write(self, step: int, tensors: checkpoint.Tensors, info: dict[str, Any]) -> None:
        for group, named in tensors.items():
            for name, tensor in named.items():
                if tensor.is_floating_point() and tensor.numel() and not _is_finite(tensor):
                    raise LmtrainError(
                        f"step {step}: {group} tensor {name} is not finite, so this checkpoint was not written; "
                        "the one before it is good: lower train.lr or raise train.warmup"
                    )
        checkpoint.save(self._run_dir, step, tensors, info)
        checkpoint.prune(self._run_dir, self._keep)


def _is_finite(tensor: Tensor) -> bool:
    """Whether all elements are finite, told from the least and the greatest: a fifth of the time of asking each."""
    return bool(torch.stack(torch.aminmax(tensor)).isfinite().all())
