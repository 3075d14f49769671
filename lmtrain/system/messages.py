"""Messages to the user on stderr, and texts without control sequences, which could act on a terminal."""

import json
import re
import sys
import unicodedata
from collections.abc import Callable
from typing import Any

Note = Callable[[str], None]
"""A function that reports a message of one line: `note`, `ignore`, or a list's `append`."""
_JOINERS = "\u200c\u200d"
"""Invisible, and required by some scripts and emoji."""


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


def escaped(message: str) -> str:
    """Return the message on one line, with Python escape sequences for the characters that are not printable."""
    return _replaced(message, str.isprintable)


def for_terminal(text: str) -> str:
    """Return `with_lines(text)` if standard output is a terminal, else the text itself."""
    return with_lines(text) if sys.stdout.isatty() else text


def with_lines(text: str) -> str:
    """Return the text with Python escape sequences for its control characters, except newlines and tabs."""
    return _replaced(text, _is_text)


def to_json(value: Any) -> str:
    """Return one line of JSON without control characters or line separators, of which JSON itself allows some."""
    text = json.dumps(value, ensure_ascii=False)
    return re.sub(r"[\x7f-\x9f\u2028\u2029]", lambda match: f"\\u{ord(match[0]):04x}", text)


def _replaced(text: str, keep: Callable[[str], bool]) -> str:
    if text.isprintable():
        return text
    return "".join(sign if keep(sign) else sign.encode("unicode_escape").decode() for sign in text)


def _is_text(character: str) -> bool:
    return character.isprintable() or character in "\n\t" + _JOINERS or unicodedata.category(character) == "Zs"
