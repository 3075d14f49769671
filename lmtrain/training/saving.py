"""Writing checkpoints in the background: the training loop waits only until its tensors are copied."""

from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Self

from torch import Tensor

from lmtrain.storage import checkpoint, run_checkpoints
from lmtrain.storage.tensor_files import rows_name
from lmtrain.system.process_group import SINGLE_PROCESS, ProcessGroup
from lmtrain.training.sharding import is_sharded, local_rows


class CheckpointSaver:
    """Writes checkpoints in a thread, one at a time.

    The main process writes tensors that are not sharded. Each process writes its own rows of sharded tensors; none are
    sent. A write error is raised by the next `save` or `wait`, and at the end of the block at the latest. Between
    `save` and the next `wait` the newest complete checkpoint may be the previous one. The thread computes nothing with
    torch, which would start OpenMP threads for it: with more of them than cores, all later steps take a third longer.
    """

    def __init__(self, run_dir: Path, keep: int, processes: ProcessGroup = SINGLE_PROCESS) -> None:
        self._run_dir = run_dir
        self._keep = keep
        self._processes = processes.new_group()  # the loop uses its own collectives at the same time
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._pending: Future[None] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        self._thread.shutdown(wait=True)
        if error is None:
            self.wait()

    def save(self, step: int, tensors: checkpoint.Tensors, info: dict[str, Any]) -> None:
        """Wait for the previous checkpoint, copy the tensors, and start writing the copies. Called by all processes."""
        self.wait()
        copies = {group: _copies(named, self._processes.is_main) for group, named in tensors.items()}
        sharded = any(is_sharded(tensor) for named in tensors.values() for tensor in named.values())
        if sharded or self._processes.is_main:
            self._pending = self._thread.submit(
                self._write, step, copies, info, self._processes if sharded else SINGLE_PROCESS
            )

    def wait(self) -> None:
        """Wait until this process has written its files; in the main process, until the checkpoint is complete.

        Raises LmtrainError if the checkpoint can't be written.
        """
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()

    def _write(self, step: int, tensors: checkpoint.Tensors, info: dict[str, Any], processes: ProcessGroup) -> None:
        checkpoint.save(self._run_dir, step, tensors, info, processes)
        if processes.is_main:
            run_checkpoints.prune(self._run_dir, self._keep)


def _copies(named: Mapping[str, Tensor], is_main: bool) -> dict[str, Tensor]:
    """Return CPU copies of what this process writes: its rows of sharded tensors, and if it is main, all others."""
    copies = {}
    for name, tensor in named.items():
        if is_sharded(tensor):
            rows, values = local_rows(tensor)
            copies[rows_name(name, rows.start, rows.stop, len(tensor))] = values.to("cpu", copy=True)
        elif is_main:
            copies[name] = tensor.detach().to("cpu", copy=True)
    return copies
