"""Messages to the user, on stderr."""

import sys
from collections.abc import Callable

from lmtrain.system.escapes import escaped

Note = Callable[[str], None]
"""What is given messages of one line."""


def note(message: str) -> None:
    """Print a message to stderr as one line, unbuffered."""
    print(escaped(message), file=sys.stderr, flush=True)


def ignore(_message: str) -> None:
    """Take the place of `note` where nothing is to be printed, progress bars included."""


def no_bar(note: Note) -> bool | None:
    """Whether tqdm is to `disable` a bar where `note` receives the messages; None = unless stderr is a terminal."""
    return True if note is ignore else None
