"""Several processes that train together, forked from this one, with the environment that torchrun would set."""

import os
import signal
import sys
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed.fsdp  # imported once for all children

from lmtrain.cli import app as cli
from lmtrain.system.distributed import join_processes
from lmtrain.system.process_group import ProcessGroup
from tests.helpers import Child

TIMEOUT_MINUTES = 0.5
Work = Callable[[ProcessGroup], None]


class Ranks:
    """Processes that run `work`; the output of each, tracebacks included, is in `folder`/<rank>.

    The store is in a process of its own: its threads in this one could hold locks that a fork would copy.
    """

    def __init__(self, size: int, work: Work, folder: Path, timeout_minutes: float = TIMEOUT_MINUTES) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.host = Child(_host)
        port = int(self.host.hear())
        self.children = [Child(partial(_rank, rank, size, port, work, folder, timeout_minutes)) for rank in range(size)]

    def end(self) -> list[int]:
        """Wait for the end: the exit statuses."""
        statuses = [child.end() for child in self.children]
        os.kill(self.host.process, signal.SIGKILL)
        self.host.end()
        return statuses


def together(size: int, work: Work, folder: Path) -> list[int]:
    """The exit statuses of processes that ran `work`; see `Ranks`."""
    return Ranks(size, work, folder).end()


def commands(size: int, arguments: dict[int, list[str]], folder: Path) -> dict[int, int]:
    """The exit statuses, by rank, of the command line in those of `size` processes that have `arguments`."""
    folder.mkdir(parents=True, exist_ok=True)
    host = Child(_host)
    port = int(host.hear())
    children = {rank: Child(partial(_command, rank, size, port, given, folder)) for rank, given in arguments.items()}
    statuses = {rank: child.end() for rank, child in children.items()}
    os.kill(host.process, signal.SIGKILL)
    host.end()
    return statuses


def meeting_place() -> Any:
    """A store on a free port, through which processes connect."""
    return torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]


def _host(say: Callable[[str], None]) -> None:
    store = meeting_place()
    say(str(store.port))
    signal.pause()


def output(folder: Path, rank: int) -> str:
    """What a process printed, tracebacks included."""
    return (folder / str(rank)).read_text()


def variables(rank: int, size: int, port: int) -> dict[str, str]:
    """The environment variables that torchrun sets."""
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "GLOO_SOCKET_IFNAME": "lo",
    }


def _rank(
    rank: int, size: int, port: int, work: Work, folder: Path, minutes: float, _say: Callable[[str], None]
) -> None:
    _start(rank, size, port, folder)
    try:
        with join_processes("cpu", minutes) as processes:
            work(processes)
    except BaseException:
        traceback.print_exc()
        raise
    finally:
        sys.stdout.flush()


def _command(rank: int, size: int, port: int, arguments: list[str], folder: Path, _say: Callable[[str], None]) -> None:
    _start(rank, size, port, folder)
    sys.argv = ["lmtrain", *arguments]
    status: object = 0
    try:
        cli.main()
    except SystemExit as end:
        status = end.code
    sys.stdout.flush()
    os._exit(status if isinstance(status, int) else 0)


def _start(rank: int, size: int, port: int, folder: Path) -> None:
    sys.stdout = sys.stderr = (folder / str(rank)).open("w")
    for descriptor in (1, 2):
        os.dup2(sys.stdout.fileno(), descriptor)
    os.environ |= variables(rank, size, port)
