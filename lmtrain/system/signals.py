"""Signals: SIGINT (Ctrl-C), SIGUSR1, SIGTERM and SIGHUP (a closed terminal) end a command without a traceback; training
first saves a checkpoint.

From the first moment of a command on, the first SIGINT or SIGUSR1 ends it without a traceback, the second at once; the
other two have their default action. Python or torch may drop the first one, in a destructor or an import: the command
then continues until the second. `catch_stop_signals` replaces all handlers during training.
This module imports only the standard library, because `install` must run before anything else is loaded.
"""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:
    from lmtrain.system.process_group import ProcessGroup

INTERRUPTED = 130
"""The exit code."""

_ending = False


def install() -> None:
    """Handle the signals, except those that this process inherited as ignored, as a shell's background job does."""
    for number in (signal.SIGINT, signal.SIGUSR1):
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, _handle)


def ending() -> bool:
    """Whether a signal has requested the end of the command."""
    return _ending


def uninstall() -> None:
    """Let SIGINT end a process that only has to exit, without the traceback of Python's handler; ignore SIGUSR1."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)


def _end_at_once(message: str) -> NoReturn:
    """Write a line to stderr and exit without waiting for anything. Further interrupts are ignored."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        _write_line(message)
    finally:
        os._exit(INTERRUPTED)


def _write_line(message: str) -> None:
    """Write a line to stderr without Python's buffers, as a signal handler must."""
    start = "\n" if os.isatty(2) else ""  # there may be a progress bar
    os.write(2, f"{start}lmtrain: {message}\n".encode(errors="backslashreplace"))


def _handle(number: int, _frame: FrameType | None) -> None:
    global _ending  # noqa: PLW0603 -- signals belong to the process
    if _ending:
        _end_at_once("interrupted again: exited")
    _ending = True
    if number == signal.SIGUSR1:
        _write_line("ended by SIGUSR1: training was not running, so there is nothing to save")
    raise KeyboardInterrupt


class Interrupted(Exception):  # noqa: N818 -- not an error
    """Raised by `StopSignal.check`, with the name of the signal."""


class StopSignal:
    """A request to end training: the first signal for it that a process received; if these differ, the largest number.

    All `processes` stop at the same `check`. The main process prints at once that it has received the signal.
    """

    def __init__(self, processes: "ProcessGroup") -> None:
        self.number = 0
        self._processes = processes

    def handle(self, number: int, _frame: FrameType | None) -> None:
        """Record the signal: this is the signal handler. A Ctrl-C after another signal ends the process at once."""
        if self.number and number == signal.SIGINT:
            if not self._processes.is_main:
                os._exit(INTERRUPTED)
            _end_at_once("interrupted again: exited; the same command resumes from the last checkpoint, if any")
        if self.number:
            return
        self.number = number
        if self._processes.is_main:
            with suppress(OSError):  # such as a closed terminal
                _write_line("stopping: saving a checkpoint (Ctrl-C again exits without saving)")

    def check(self) -> None:
        """Raise Interrupted if any process has received a signal. Called by all processes."""
        number = int(max(self._processes.all_gather(self.number)))
        if number:
            raise Interrupted(signal.Signals(number).name)


@contextmanager
def catch_stop_signals(processes: "ProcessGroup") -> Iterator[StopSignal]:
    """Handle SIGINT, SIGTERM, SIGUSR1 and SIGHUP inside the block, and restore the previous handlers after it.

    A signal whose handler is not Python's own, as in a program that embeds Python, is left to that handler, and SIGHUP
    stays ignored if it is, as by `nohup`.
    """
    stop = StopSignal(processes)
    numbers = [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1]
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        numbers.append(signal.SIGHUP)
    previous = {
        number: signal.signal(number, stop.handle) for number in numbers if signal.getsignal(number) is not None
    }
    try:
        yield stop
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
