"""What the tests of several packages share: a tiny configuration, results of commands, forked children, checkpoints."""

import fcntl
import io
import json
import logging
import os
import pty
import signal
import struct
import sys
import termios
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, get_args

import pytest
import torch

from lmtrain.config.schema import SECTIONS
from lmtrain.storage import checkpoint, run_checkpoints
from lmtrain.storage.checkpoint import Checkpoint
from lmtrain.storage.files import sha256_bytes
from lmtrain.storage.tensor_files import serialize
from lmtrain.system.device import missing_to_compile
from lmtrain.system.messages import log, log_level

CPU = torch.device("cpu")
compiles = pytest.mark.skipif(missing_to_compile(CPU) is not None, reason="nothing can be compiled here")

TINY = [
    "data.sample_tokens=3000",
    "tokenizer.kind=word",
    "model.context=16",
    "model.dim=16",
    "model.layers=1",
    "model.heads=2",
    "model.dropout=0.1",
    "model.attention_dropout=0.1",
    "model.input_dropout=0.1",
    "model.output_dropout=0.1",
    "train.threads=1",
    "train.device=cpu",
    "train.precision=fp32",
    "train.batch_size=4",
    "train.micro_batch=2",
    "train.steps=12",
    "train.log_steps=2",
    "train.eval_steps=5",
    "train.eval_tokens=200",
    "train.ema=0.9",
    "train.sample_tokens=3",
    "eval.batch_size=256",
]
"""Overrides for a model that trains in a second; dropout everywhere, so that a lost seed shows."""


def choices(field: str) -> tuple[Any, ...]:
    """The values that a field of the configuration has to choose from."""
    section, _, name = field.partition(".")
    return get_args(SECTIONS[section][name].annotation)


@contextmanager
def messages(level: int = logging.INFO) -> Iterator[list[str]]:
    """A list that receives the messages of at least this level inside the block."""
    found: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: found.append(record.getMessage())  # type: ignore[method-assign]
    log.addHandler(handler)
    try:
        with log_level(level):
            yield found
    finally:
        log.removeHandler(handler)


@dataclass
class Result:
    """What a command returned and printed."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        """What a command that succeeded printed with --json."""
        assert self.code == 0, self.err
        return json.loads(self.out)


Lmtrain = Callable[..., Result]
"""The fixture that runs a command in this process."""
Interrupt = Callable[..., None]
"""The fixture that sends a signal, SIGTERM unless another is given, at the end of the n-th step from now on."""


class Child:
    """A forked process that runs `work`, which gets a function that sends a line to the parent.

    It may end in any way: by an exception, by a signal, by os._exit. With `output`, that file has what it prints.
    """

    def __init__(self, work: Callable[[Callable[[str], None]], None], output: Path | None = None) -> None:
        receiver, sender = os.pipe()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of forking with threads: the child uses none of them
            self.process = os.fork()
        if self.process == 0:
            _run(work, sender, output)
        os.close(sender)
        self._pipe = os.fdopen(receiver)

    def hear(self) -> str:
        """The next line that the child sends; empty when it has ended."""
        return self._pipe.readline().rstrip("\n")

    def end(self) -> int:
        """Wait for the end: the exit status, or minus the number of the signal."""
        self._pipe.close()
        return os.waitstatus_to_exitcode(os.waitpid(self.process, 0)[1])


def _run(work: Callable[[Callable[[str], None]], None], sender: int, output: Path | None) -> NoReturn:
    def send(line: str) -> None:
        os.write(sender, f"{line}\n".encode())

    if output is not None:
        sys.stdout = sys.stderr = output.open("w")
        for descriptor in (1, 2):
            os.dup2(sys.stdout.fileno(), descriptor)
    status = 1
    try:
        work(send)
        status = 0
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else 0
    except BaseException:  # noqa: BLE001 -- this process ends here
        traceback.print_exc()
    finally:
        if output is not None:
            sys.stdout.flush()
        os._exit(status)


def tensors_of(run_dir: Path) -> checkpoint.Tensors:
    """The tensors of a run's last checkpoint."""
    return in_memory(checkpoint.load(run_checkpoints.choose(run_dir, "last")))


def in_memory(found: Checkpoint) -> checkpoint.Tensors:
    return {group: {name: stored[...] for name, stored in named.items()} for group, named in found.tensors.items()}


def give_input(patch: pytest.MonkeyPatch, content: bytes) -> None:
    """Standard input that is not a terminal."""
    patch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(content)))


def contents(folder: Path) -> dict[str, bytes]:
    """Every file below a folder, by its path."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@contextmanager
def terminal(columns: int) -> Iterator[Callable[[], str]]:
    """A terminal as stderr; yields a function that closes it and returns what was printed."""
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))
    with os.fdopen(slave, "w", encoding="utf-8") as stream, pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "stderr", stream)

        def printed() -> str:
            stream.close()
            shown = b""
            with suppress(OSError):  # Linux's answer when everything has been read
                while part := os.read(master, 1 << 16):
                    shown += part
            return shown.decode()

        yield printed
    os.close(master)


def flip_bit(path: Path, place: int = -1) -> None:
    """Damage a file."""
    content = bytearray(path.read_bytes())
    content[place] ^= 1
    path.write_bytes(content)


def default_interrupts() -> None:
    """For the start of a child: a shell's background jobs ignore Ctrl-C, and so would their children."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def state_hash(found: Checkpoint) -> str:
    """One hash of everything that decides how training continues: all tensors and the counters, but no times.

    It does not depend on how many processes wrote the tensors.
    """
    files = {f"{group}.safetensors": sha256_bytes(*serialize(named)) for group, named in in_memory(found).items()}
    state = {"step": found.info["step"], "files": files, "counters": found.info.get("counters")}
    return sha256_bytes(json.dumps(state, sort_keys=True).encode())
