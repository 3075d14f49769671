"""Several processes that train together: forked from this one, and told of each other as torchrun would tell them."""

import os
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch.distributed as dist

from lmtrain.workers import Workers, connected
from tests.children import Child

TIMEOUT_MINUTES = 0.5
Work = Callable[[Workers], None]


def start(size: int, work: Work, folder: Path, timeout_minutes: float = TIMEOUT_MINUTES) -> list[Child]:
    """Start processes that do `work`; what one of them prints or raises is in `folder`/<rank>."""
    folder.mkdir(parents=True, exist_ok=True)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # a port that is free
    _stores.append(store)  # lives as long as the processes may ask for it
    return [Child(partial(_rank, rank, size, store.port, work, folder, timeout_minutes)) for rank in range(size)]


_stores: list[dist.TCPStore] = []


def together(size: int, work: Work, folder: Path, timeout_minutes: float = TIMEOUT_MINUTES) -> list[int]:
    """The exit statuses of processes that did `work`."""
    return [child.end() for child in start(size, work, folder, timeout_minutes)]


def said(folder: Path, rank: int) -> str:
    """What a process printed and raised."""
    return (folder / str(rank)).read_text()


def _rank(rank: int, size: int, port: int, work: Work, folder: Path, timeout_minutes: float, _say: object) -> None:
    log = os.open(folder / str(rank), os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "GLOO_SOCKET_IFNAME": "lo",
    }
    try:
        with connected("cpu", timeout_minutes) as workers:
            work(workers)
    except BaseException:
        traceback.print_exc()
        raise
