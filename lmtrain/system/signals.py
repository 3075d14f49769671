"""Stop signals: SIGINT (Ctrl-C), SIGTERM and SIGHUP (a closed terminal) end training after it has saved.

Outside training they have their default action, which ends the process at once.
"""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType

from lmtrain.system.process_group import ProcessGroup

INTERRUPTED = 130
"""The exit code."""


class StopSignal:
    """A request to end training, which any of the `processes` may have received; all stop at the same `check`."""

    def __init__(self, processes: ProcessGroup) -> None:
        self.received = False
        self._processes = processes

    def handle(self, number: int, _frame: FrameType | None) -> None:
        """Record a signal: this is the signal handler. A Ctrl-C after another signal ends the process at once."""
        if self.received and number == signal.SIGINT:
            self._print("interrupted again: exited; the same command resumes from the last checkpoint, if any")
            os._exit(INTERRUPTED)
        if not self.received:
            self.received = True
            self._print("stopping: saving a checkpoint (Ctrl-C again exits without saving)")

    def check(self) -> None:
        """Raise KeyboardInterrupt if any process has received a signal. Called by all processes."""
        if any(self._processes.all_gather(self.received)):
            raise KeyboardInterrupt

    def _print(self, message: str) -> None:
        """Write a line to stderr in the main process, without Python's buffers, as a signal handler must."""
        start = "\n" if os.isatty(2) else ""  # there may be a progress bar
        if self._processes.is_main:
            with suppress(OSError):  # such as a closed terminal
                os.write(2, f"{start}lmtrain: {message}\n".encode())


@contextmanager
def catch_stop_signals(processes: ProcessGroup) -> Iterator[StopSignal]:
    """Handle SIGINT, SIGTERM and SIGHUP inside the block, and restore the previous handlers after it.

    SIGHUP stays ignored if it is, as by `nohup`.
    """
    stop = StopSignal(processes)
    numbers = [signal.SIGINT, signal.SIGTERM]
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        numbers.append(signal.SIGHUP)
    previous = {number: signal.signal(number, stop.handle) for number in numbers}
    try:
        yield stop
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
