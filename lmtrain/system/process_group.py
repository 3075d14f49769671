"""The processes of a run and the collectives they use: a single process, or several that torchrun started.

The main process has rank 0: only it prints, and it writes everything except the other processes' rows of a sharded
model. Numbers on the host go over gloo; gradients on CUDA devices go over NCCL.
"""

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from lmtrain.errors import AlreadyReported

POLL_SECONDS = 0.1

T = TypeVar("T")


class ProcessGroup:
    """A single process, for which all collectives are trivial."""

    def __init__(self, rank: int = 0, world_size: int = 1) -> None:
        self.rank, self.world_size = rank, world_size

    @property
    def is_main(self) -> bool:
        """Whether this process prints and writes."""
        return self.rank == 0

    def shard(self, count: int) -> range:
        """Return which of `count` items are this process's; `count` must be a multiple of the number of processes."""
        each = count // self.world_size
        return range(self.rank * each, (self.rank + 1) * each)

    def all_reduce(self, tensor: Tensor) -> None:
        """Replace the tensor by its sum over all processes."""

    def all_gather(self, value: float) -> list[float]:
        """Return the value of each process, by rank."""
        return [value]

    def all_gather_json(self, value: T) -> list[T]:
        """Return the value of each process, which JSON can represent, by rank."""
        return [value]

    def barrier(self) -> None:
        """Wait until all processes have reached this call."""
        self.all_gather(0)

    def new_group(self) -> "ProcessGroup":
        """Return a group of the same processes with its own collectives, for use in another thread."""
        return self

    @contextmanager
    def main_first(self) -> Iterator[None]:
        """Run the block in the main process before the others run it; they raise AlreadyReported if it fails.

        The main process may take any time: the others poll the key-value store, since a collective would time out.
        """
        yield

    def on_main(self, function: Callable[[], T]) -> T:
        """Call `function` in the main process only. Return its result, which JSON can represent, in all; the others
        raise AlreadyReported if it fails."""
        result: Any = None
        with self.main_first():
            if self.is_main:
                result = function()
        return self.all_gather_json(result)[0]


SINGLE_PROCESS = ProcessGroup()


class DistributedGroup(ProcessGroup):
    """Several processes. All of them must call every method except `shard`."""

    def __init__(self, kv_store: Any, timeout: timedelta, group: Any = None) -> None:
        super().__init__(dist.get_rank(), dist.get_world_size())
        self._kv_store = kv_store
        self._timeout = timeout
        self._group = group
        self._turns = 0

    def all_reduce(self, tensor: Tensor) -> None:
        dist.all_reduce(tensor, group=self._group)

    def all_gather(self, value: float) -> list[float]:
        values = [torch.zeros(1, dtype=torch.float64) for _ in range(self.world_size)]
        dist.all_gather(values, torch.tensor([value], dtype=torch.float64), group=self._group)
        return torch.cat(values).tolist()

    def all_gather_json(self, value: T) -> list[T]:
        data = torch.tensor(list(json.dumps(value).encode()), dtype=torch.uint8)  # never as pickled objects
        lengths = [int(length) for length in self.all_gather(len(data))]
        rows = [torch.zeros(max(lengths), dtype=torch.uint8) for _ in lengths]
        dist.all_gather(rows, torch.nn.functional.pad(data, (0, max(lengths) - len(data))), group=self._group)
        return [json.loads(bytes(row[:length].tolist())) for row, length in zip(rows, lengths, strict=True)]

    def new_group(self) -> ProcessGroup:
        from torch.distributed.distributed_c10d import PrefixStore

        group = dist.new_group(timeout=self._timeout, backend="gloo")
        kv_store = PrefixStore(group.group_name, self._kv_store)
        return DistributedGroup(kv_store, self._timeout, group)

    @contextmanager
    def main_first(self) -> Iterator[None]:
        self._turns += 1
        key = f"turn {self._turns}"
        if not self.is_main:
            while not self._kv_store.check([key]):
                time.sleep(POLL_SECONDS)
            if self._kv_store.get(key) != b"done":
                raise AlreadyReported
            yield
            return
        try:
            yield
        except BaseException:
            self._kv_store.set(key, "failed")
            raise
        self._kv_store.set(key, "done")
