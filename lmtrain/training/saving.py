"""Checkpoints written in the background: the training loop waits only until its tensors are copied."""

import os
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn, Self

import numpy as np
from torch import Tensor

from lmtrain.errors import LmtrainError
from lmtrain.storage import checkpoint, run_checkpoints, run_folder
from lmtrain.storage.files import folder_lock
from lmtrain.storage.tensor_files import in_rows, rows_name
from lmtrain.system.process_group import SINGLE_PROCESS, ProcessGroup
from lmtrain.system.signals import INTERRUPTED, end_at_once
from lmtrain.training.sharding import is_sharded, local_rows


class CheckpointSaver:
    """Writes one checkpoint at a time, in the order of the calls, in a thread of its own.

    The main process writes tensors that are not sharded. Each process writes its own rows of sharded tensors; none are
    sent. A write error is raised by the next call of any method, and at the end of the block at the latest. Between
    `save` and the next `wait` the newest complete checkpoint may be the previous one. The first call of `save` deletes
    the checkpoints after the step `delete_after`, to which the run goes back; `before_decay` is `before` of `prune`.
    """

    def __init__(
        self,
        run_dir: Path,
        keep: int,
        processes: ProcessGroup = SINGLE_PROCESS,
        *,
        delete_after: int | None = None,
        before_decay: int = 0,
    ) -> None:
        self._run_dir = run_dir
        self._keep = keep
        self._delete_after = delete_after
        self.before_decay = before_decay
        self._processes = processes.new_group()  # the loop uses its own collectives at the same time
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
        """Copy the tensors and start writing the copy; waits for the previous checkpoint. Called by all processes."""
        self.wait()
        copies = {group: _copies(named, self._processes.is_main) for group, named in tensors.items()}
        sharded = any(in_rows(named) for named in copies.values())
        if sharded or self._processes.is_main:
            self._pending = self._thread.submit(
                self._write, step, copies, info, self._processes if sharded else SINGLE_PROCESS
            )

    def check(self) -> None:
        """Raise the error of the last checkpoint if its write has failed by now."""
        if self._pending is not None and self._pending.done():
            self.wait()

    def wait(self) -> None:
        """Return when everything this process had to write is on disk.

        Only the main process then knows that the checkpoint is complete. Raises LmtrainError if it can't be written.
        """
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()

    def _write(self, step: int, tensors: checkpoint.Tensors, info: dict[str, Any], processes: ProcessGroup) -> None:
        for group, named in tensors.items():
            for name, tensor in named.items():
                if tensor.is_floating_point() and tensor.numel() and not _is_finite(tensor):
                    raise LmtrainError(
                        f"step {step}: {group} tensor {name} is not finite, so this checkpoint was not written: "
                        "lower train.lr or raise train.warmup"
                    )
        if processes.is_main and self._delete_after is not None:
            # Before the first checkpoint gets its name: after a kill, the newest one says that the run goes back.
            run_checkpoints.remove_after(self._run_dir, self._delete_after)
            self._delete_after = None
        checkpoint.save(self._run_dir, step, tensors, info, processes)
        if processes.is_main:
            run_checkpoints.prune(self._run_dir, self._keep, self.before_decay)


def abort(run_dir: Path, processes: ProcessGroup) -> NoReturn:
    """Exit at once, with the newest checkpoint on disk as the run's last; the main process reports it."""
    if not processes.is_main:
        os._exit(INTERRUPTED)
    with folder_lock(run_dir / "checkpoints"):  # or the thread that writes one might finish it after this has looked
        steps = [int(folder.name.removeprefix("step-")) for folder in run_checkpoints.folders(run_dir)]
        with suppress(LmtrainError):
            run_folder.write_state(run_dir, "interrupted", step=steps[-1] if steps else 0, signal="SIGINT")
        kept = "no checkpoint has been saved yet"
        if steps:
            kept = f"the checkpoint of step {steps[-1]:,} is good; rerun the same command to resume from it"
        end_at_once(f"interrupted again, so ended at once: {kept}")


def _copies(named: Mapping[str, Tensor], is_main: bool) -> dict[str, Tensor]:
    """Host copies of what this process writes: its rows of sharded tensors, and in the main process all others."""
    copies = {}
    for name, tensor in named.items():
        if is_sharded(tensor):
            rows, values = local_rows(tensor)
            copies[rows_name(name, rows.start, rows.stop, len(tensor))] = values.to("cpu", copy=True)
        elif is_main:
            copies[name] = tensor.detach().to("cpu", copy=True)
    return copies


def _is_finite(tensor: Tensor) -> bool:
    """Whether all elements of a tensor on the CPU are finite, by the minimum and maximum.

    By numpy, since torch would start more threads for this one: with more threads than cores, OpenMP's no longer spin
    while they wait for each other, and all later training steps take a third longer.
    """
    values = tensor.numpy()
    return bool(np.isfinite((values.min(), values.max())).all())
