"""Work done in a forked child, which may die of it."""

import os
import warnings
from collections.abc import Callable
from typing import NoReturn


class Child:
    """A child process that runs `work`; what `work` says into its pipe can be heard, and it ends with the child."""

    def __init__(self, work: Callable[[Callable[[str], None]], None]) -> None:
        hear, speak = os.pipe()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # the other threads do not matter to the child
            self.process = os.fork()
        if self.process == 0:
            _run(work, speak)
        os.close(speak)
        self._pipe = os.fdopen(hear)

    def hear(self) -> str:
        """The next line that the child says; empty when it has ended."""
        return self._pipe.readline().rstrip("\n")

    def end(self) -> int:
        """Wait for the end: the exit status, or minus the number of the signal."""
        self._pipe.close()
        return os.waitstatus_to_exitcode(os.waitpid(self.process, 0)[1])


def _run(work: Callable[[Callable[[str], None]], None], speak: int) -> NoReturn:
    status = 1
    try:
        work(lambda line: _say(speak, line))
        status = 0
    finally:
        os._exit(status)


def _say(speak: int, line: str) -> None:
    os.write(speak, f"{line}\n".encode())
