"""Joining the processes that torchrun started, and reporting an error only once if all of them meet it."""

import itertools
import logging
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from lmtrain.errors import LmtrainError
from lmtrain.system.device import choose_device
from lmtrain.system.launcher import is_launched, is_main_process
from lmtrain.system.messages import log, log_level
from lmtrain.system.process_group import POLL_SECONDS, SINGLE_PROCESS, DistributedGroup, ProcessGroup

TIMEOUT = timedelta(minutes=10)
"""How long the processes wait for one that does not answer, before they end."""
MAIN_REPORT_SECONDS = 5.0
"""How long a process that fails waits for the main process's error message."""

_joins = itertools.count()
"""Numbers the runs that a process trains one after another: the store keeps the keys of earlier ones."""


@contextmanager
def join_processes(device: str) -> Iterator[ProcessGroup]:
    """Yield the processes of this run: those that torchrun started, or only this one.

    Only the main process reports messages and warnings.
    `device` is `auto`, `cpu` or `cuda`; each process takes the CUDA device of its local rank. Raises LmtrainError if
    there are too few devices, and if another process ends or does not answer for `TIMEOUT`.
    """
    if not is_launched():
        yield SINGLE_PROCESS
        return
    from torch.distributed.distributed_c10d import PrefixStore
    from torch.distributed.rendezvous import rendezvous

    device_type = choose_device(device).type
    if device_type == "cuda":
        _set_cuda_device()
    with _explain_lost_process():
        kv_store, rank, world_size = next(iter(rendezvous("env://", timeout=TIMEOUT)))
        number = next(_joins)
        if number and dist.is_initialized():  # the run before has failed
            dist.destroy_process_group()
        kv_store = PrefixStore(f"join {number}", _of_this_start(kv_store))
        backend = "cpu:gloo,cuda:nccl" if device_type == "cuda" else "gloo"
        dist.init_process_group(backend, store=kv_store, rank=rank, world_size=world_size, timeout=TIMEOUT)
        with log_level(logging.ERROR if rank else log.level):
            processes = DistributedGroup(kv_store, TIMEOUT)
            try:
                yield processes
                processes.barrier()  # torchrun may end the main process, which writes last, once another one has exited
            except KeyboardInterrupt:  # after a stop signal, when all processes have saved
                dist.destroy_process_group()
                raise
        dist.destroy_process_group()  # not after an error: it could wait for the other processes


def report_once(message: str) -> None:
    """Report why this process fails, unless the main process fails with the same message and reports it.

    If the main process reports nothing within MAIN_REPORT_SECONDS, this process reports its own error.
    """
    if is_main_process():
        log.error(f"lmtrain: {message}")
        with suppress(RuntimeError):
            _connect().set("error", message)
    elif _main_message() != message:
        log.error(f"lmtrain: process {os.environ['RANK']}: {message}")


def _main_message() -> str | None:
    """Return the error message of the main process; None if there is none within MAIN_REPORT_SECONDS."""
    end = time.monotonic() + MAIN_REPORT_SECONDS
    with suppress(RuntimeError):
        kv_store = _connect()
        while time.monotonic() < end:
            if kv_store.check(["error"]):
                return str(kv_store.get("error").decode())
            time.sleep(POLL_SECONDS)
    return None


def _connect() -> Any:
    """Connect to torchrun's key-value store, which works even when collectives no longer do."""
    untyped: Any = dist  # torch's stubs lack TCPStore
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    timeout = timedelta(seconds=MAIN_REPORT_SECONDS)
    return _of_this_start(untyped.TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timeout))


def _of_this_start(kv_store: Any) -> Any:
    """Return the part of torchrun's store for this start: the store keeps all keys when the processes are restarted."""
    from torch.distributed.distributed_c10d import PrefixStore

    return PrefixStore(f"{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')} of {os.environ['WORLD_SIZE']}", kv_store)


def _set_cuda_device() -> None:
    local_rank, devices = int(os.environ.get("LOCAL_RANK", "0")), torch.cuda.device_count()
    if local_rank >= devices:
        raise LmtrainError(
            f"process {local_rank} of this node has no CUDA device, because the node has {devices}: start {devices} "
            "processes per node"
        )
    torch.cuda.set_device(local_rank)


@contextmanager
def _explain_lost_process() -> Iterator[None]:
    """Turn the errors of a failed collective into LmtrainError."""
    try:
        yield
    except RuntimeError as error:
        if not isinstance(error, dist.DistError) and "gloo" not in str(error):
            raise
        reason = (str(error).splitlines() or [""])[0][:160]
        raise LmtrainError(
            "another process of this run has ended, or has not answered for 10 minutes: see its message; "
            f"the same command resumes from the last checkpoint, if one was saved ({reason})"
        ) from error
