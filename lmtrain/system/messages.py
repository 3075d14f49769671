"""Messages to the user, on stderr."""

import sys
from collections.abc import Callable

from lmtrain.system.escapes import escaped

Note = Callable[[str], None]
"""A function that reports a message of one line: `note`, `ignore`, or a list's `append`."""


def note(message: str) -> None:
    """Print a message to stderr as one line, unbuffered."""
    print(escaped(message), file=sys.stderr, flush=True)


def ignore(_message: str) -> None:
    """Report nothing: takes the place of `note`, and also disables progress bars (`no_bar`)."""


def no_bar(note: Note) -> bool | None:
    """Return tqdm's `disable` for a bar beside messages to `note`: True if that is `ignore`, else None.

    With None, tqdm shows the bar on a terminal only.
    """
    return True if note is ignore else None
