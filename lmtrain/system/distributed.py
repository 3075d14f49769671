"""The processes of one run: one alone, or several that torchrun has started, which take turns, add up and end together.

The first, of rank 0, leads: it alone prints, and writes all but what others hold of a sharded model. What the processes
tell each other in numbers of the host goes over gloo; gradients go over NCCL between CUDA devices.
"""

import ctypes
import math
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lmtrain.errors import AlreadyReported, LmtrainError
from lmtrain.system.launcher import leads, started
from lmtrain.system.runtime import choose_device

PR_SET_PDEATHSIG = 1
"""From Linux's <sys/prctl.h>."""
WAIT_SECONDS = 0.1
LEADER_SECONDS = 5.0
"""How long a process that fails waits for the leader to fail of the same."""


class Workers:
    """One process alone: what several do together, in its simplest case."""

    rank = 0
    size = 1

    @property
    def leads(self) -> bool:
        """Whether this process is the one that writes and prints."""
        return self.rank == 0

    def part(self, count: int) -> range:
        """This process's share of `count` things, which the number of processes must divide."""
        each = count // self.size
        return range(self.rank * each, (self.rank + 1) * each)

    def add(self, _tensor: Tensor) -> None:
        """Put the sum over all processes in the tensor's place."""

    def gather(self, value: float) -> list[float]:
        """The value that each process gives, by rank."""
        return [value]

    def texts(self, text: str) -> list[str]:
        """The text that each process gives, by rank."""
        return [text]

    def from_leader(self, find: Callable[[], str]) -> str:
        """What `find` gives in the leader, which alone calls it. Raises AlreadyReported in the others when it fails."""
        text = ""
        with self.in_turn():
            if self.leads:
                text = find()
        return self.texts(text)[0]

    def apart(self) -> "Workers":
        """The same processes with messages of their own, for a thread beside the one that works."""
        return self

    def agree(self, number: int) -> int:
        """The largest number that any process gives; sets the time that all read until the next call."""
        return number

    def time(self) -> float:
        """Seconds of a clock that is the same in all processes."""
        return time.monotonic()

    @contextmanager
    def in_turn(self) -> Iterator[None]:
        """The leader goes through the block before the others do, however long it takes."""
        yield


ALONE = Workers()


class Group(Workers):
    """Several processes. Every method but `part` and `time` is to be called by all of them."""

    def __init__(self, store: Any, rank: int, size: int, timeout: timedelta, group: Any = None) -> None:
        self.rank, self.size = rank, size
        self._store = store
        self._timeout = timeout
        self._group = group
        self._turns = 0
        self._now = 0.0
        self.agree(0)

    def add(self, _tensor: Tensor) -> None:
        """Put the sum over all processes in the tensor's place."""
        dist.all_reduce(_tensor, group=self._group)

    def gather(self, value: float) -> list[float]:
        """The value that each process gives, by rank."""
        values = torch.zeros(self.size, dtype=torch.float64)
        values[self.rank] = value
        dist.all_reduce(values, group=self._group)
        return values.tolist()

    def texts(self, text: str) -> list[str]:
        """The text that each process gives, by rank; sent as bytes, never as pickled objects."""
        data = torch.tensor(list(text.encode()), dtype=torch.uint8)
        lengths = [int(length) for length in self.gather(len(data))]
        rows = torch.zeros(self.size, max(lengths), dtype=torch.uint8)
        rows[self.rank, : len(data)] = data
        dist.all_reduce(rows, group=self._group)
        return [bytes(row[:length].tolist()).decode() for row, length in zip(rows, lengths, strict=True)]

    def apart(self) -> Workers:
        """The same processes with messages of their own, for a thread beside the one that works."""
        from torch.distributed.distributed_c10d import PrefixStore

        group = dist.new_group(timeout=self._timeout, backend="gloo")
        return Group(PrefixStore(group.group_name, self._store), self.rank, self.size, self._timeout, group)

    def agree(self, number: int) -> int:
        """The largest number that any process gives; sets the time that all read until the next call."""
        told = torch.tensor([number, time.monotonic() if self.leads else -math.inf], dtype=torch.float64)
        dist.all_reduce(told, dist.ReduceOp.MAX, group=self._group)
        self._now = float(told[1])
        return int(told[0])

    def time(self) -> float:
        """Seconds of the leader's clock, when all last agreed on a number."""
        return self._now

    @contextmanager
    def in_turn(self) -> Iterator[None]:
        """The leader goes through the block before the others do, however long it takes.

        Raises AlreadyReported in the others when the leader fails in it.
        """
        self._turns += 1
        key = f"turn {self._turns}"
        if not self.leads:
            while not self._store.check([key]):
                time.sleep(WAIT_SECONDS)
            if self._store.get(key) != b"done":
                raise AlreadyReported
            yield
            return
        try:
            yield
        except BaseException:
            self._store.set(key, "failed")
            raise
        self._store.set(key, "done")


@contextmanager
def connected(device: str, timeout_minutes: float) -> Iterator[Workers]:
    """The processes of this run, for the length of the block: those that torchrun started, or this one alone.

    `device` is `auto`, `cpu` or `cuda`; each process takes the CUDA device of its number on its node. Raises
    LmtrainError where there are too few, and when another process has ended or has not answered for so many minutes.
    """
    if not started():
        yield ALONE
        return
    from torch.distributed.rendezvous import rendezvous

    _end_with_torchrun()
    kind = choose_device(device).type
    if kind == "cuda":
        _take_device()
    with _together():
        timeout = timedelta(minutes=timeout_minutes)
        store, rank, size = next(iter(rendezvous("env://", timeout=timeout)))
        store = _of_this_start(store)
        backend = "cpu:gloo,cuda:nccl" if kind == "cuda" else "gloo"
        dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timeout)
        yield Group(store, rank, size, timeout)
        dist.destroy_process_group()  # not after an error: it could wait for the others


def _end_with_torchrun() -> None:
    """Let the kernel send SIGTERM when torchrun is killed, after which nobody else would end this process."""
    if sys.platform == "linux" and "TORCHELASTIC_RUN_ID" in os.environ:
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def _of_this_start(store: Any) -> Any:
    """A part of torchrun's store, which outlives a restart: what the former processes have told is still in it."""
    from torch.distributed.distributed_c10d import PrefixStore

    return PrefixStore(f"{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')} of {os.environ['WORLD_SIZE']}", store)


def say_once(sentence: str, say: Callable[[str], None]) -> None:
    """Say why this process ends, unless the leader ends of the same and has said it.

    Where the leader is not heard of in time, or no more, the process speaks for itself.
    """
    if leads():
        say(sentence)
        _heard(sentence)
    elif _heard() != sentence:
        say(f"process {os.environ['RANK']}: {sentence}")


def _heard(told: str | None = None) -> str | None:
    """What the leader says, which tells it here; None where that can't be had."""
    untyped: Any = dist  # torch doesn't declare its TCPStore
    place, port, timeout = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), timedelta(seconds=LEADER_SECONDS)
    end = time.monotonic() + LEADER_SECONDS
    try:
        store = _of_this_start(untyped.TCPStore(place, port, is_master=False, wait_for_workers=False, timeout=timeout))
        if told is not None:
            store.set("said", told)
        while not store.check(["said"]):
            if time.monotonic() > end:
                return None
            time.sleep(WAIT_SECONDS)
        return str(store.get("said").decode())
    except RuntimeError:
        return None


def _take_device() -> None:
    local, devices = int(os.environ.get("LOCAL_RANK", "0")), torch.cuda.device_count()
    if local >= devices:
        raise LmtrainError(
            f"process {local} of this node has no CUDA device, there being {devices}: start {devices} processes a node"
        )
    torch.cuda.set_device(local)


@contextmanager
def _together() -> Iterator[None]:
    """Say what it means when a message does not arrive."""
    try:
        yield
    except RuntimeError as error:
        if not isinstance(error, dist.DistError) and "gloo" not in str(error):
            raise
        reason = (str(error).splitlines() or [""])[0][:160]
        raise LmtrainError(
            "another process of this run has ended, or has not answered for train.timeout_minutes: see what it said; "
            f"the last checkpoint is good, and the same command goes on from it ({reason})"
        ) from error
