"""SIGINT (Ctrl-C) and SIGUSR1 from the first moment of a command: the first ends it, a second one at once.

No traceback is shown, whatever is imported or done meanwhile. Training saves instead, by handlers of its own. Only the
standard library is imported here: this must act before anything else is loaded.
"""

import os
import signal
import sys
from types import FrameType
from typing import NoReturn

INTERRUPTED = 130
"""The exit code."""

_ending = False


def install() -> None:
    """Catch the signals, but for those that the process was started to ignore, as a shell's background jobs are."""
    sys.unraisablehook = _unraisable
    for number in (signal.SIGINT, signal.SIGUSR1):
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, _handle)


def ending() -> bool:
    """Whether a signal has asked the command to end."""
    return _ending


def forget() -> None:
    """Let the command go on after a signal that was meant for a part of it."""
    global _ending  # noqa: PLW0603 -- signals are the process's own
    _ending = False


def uninstall() -> None:
    """Let signals end a process that is over but for its exit, in which Python would show a traceback."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)


def end_at_once(message: str) -> NoReturn:
    """Write a line to stderr, and exit without waiting for anything; no other signal is heard meanwhile."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    start = "\n" if os.isatty(2) else ""  # there may be a progress bar
    try:
        os.write(2, f"{start}lmtrain: {message}\n".encode(errors="backslashreplace"))
    finally:
        os._exit(INTERRUPTED)


def _handle(number: int, _frame: FrameType | None) -> None:
    global _ending  # noqa: PLW0603
    if _ending:
        end_at_once("interrupted again: ended at once")
    _ending = True
    if number == signal.SIGUSR1:
        os.write(2, b"lmtrain: ended by SIGUSR1: training was not under way, so there is nothing to save\n")
    raise KeyboardInterrupt


def _unraisable(failure: "sys.UnraisableHookArgs") -> None:
    """An interrupt that Python would report and forget, because it came while an object was deleted, still ends."""
    if isinstance(failure.exc_value, KeyboardInterrupt):
        os._exit(INTERRUPTED)
    sys.__unraisablehook__(failure)
