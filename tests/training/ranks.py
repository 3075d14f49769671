"""Several processes that train together, forked from this one, with the environment that torchrun would set."""

import json
import os
import signal
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed.fsdp  # imported once for all children

from lmtrain.cli import app as cli
from lmtrain.system.distributed import join_processes
from lmtrain.system.process_group import ProcessGroup
from tests.helpers import Child

Say = Callable[[str], None]
Work = Callable[[ProcessGroup], Any]


class Ranks:
    """Processes of which each runs a program; the output of each, tracebacks included, is in `folder`/<rank>.

    The store is in a process of its own: its threads in this one could hold locks that a fork would copy.
    """

    def __init__(self, size: int, programs: dict[int, Callable[[Say], None]], folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self.host = Child(_host)
        port = int(self.host.hear())
        self.children = [
            Child(partial(_run, program, variables(rank, size, port)), folder / str(rank))
            for rank, program in programs.items()
        ]

    def output(self, rank: int) -> str:
        """What a process has printed."""
        return (self._folder / str(rank)).read_text()

    def end(self) -> list[int]:
        """Wait for the end: the exit statuses."""
        statuses = [child.end() for child in self.children]
        os.kill(self.host.process, signal.SIGKILL)
        self.host.end()
        return statuses


def train_ranks(size: int, work: Work, folder: Path) -> Ranks:
    """Processes that join and run `work`; each says what it returned, as JSON."""

    def program(say: Say) -> None:
        with join_processes("cpu") as processes:
            found = work(processes)
            if found is not None:
                say(json.dumps(found))

    return Ranks(size, dict.fromkeys(range(size), program), folder)


def together(size: int, work: Work, folder: Path) -> list[Any]:
    """What `work` returned in each of `size` processes, all of which must succeed."""
    ranks = train_ranks(size, work, folder)
    found = [child.hear() for child in ranks.children]
    assert ranks.end() == [0] * size, [ranks.output(rank) for rank in range(size)]
    return [json.loads(text) if text else None for text in found]


def commands(size: int, arguments: dict[int, list[str]], folder: Path) -> Ranks:
    """The command line in those of `size` processes that have `arguments`."""

    def program(given: list[str], _say: Say) -> None:
        sys.argv = ["lmtrain", *given]
        cli.main()

    return Ranks(size, {rank: partial(program, given) for rank, given in arguments.items()}, folder)


def meeting_place() -> Any:
    """A store on a free port, through which processes connect."""
    return torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]


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


def _host(say: Say) -> None:
    store = meeting_place()
    say(str(store.port))
    signal.pause()


def _run(program: Callable[[Say], None], environment: dict[str, str], say: Say) -> None:
    os.environ |= environment
    program(say)
