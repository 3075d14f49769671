"""The log of lmtrain, which goes to stderr, and texts without control sequences, which could act on a terminal."""

import json
import logging
import re
import sys
import unicodedata
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

_JOINERS = "\u200c\u200d"
"""Invisible, and required by some scripts and emoji."""


class _Stderr(logging.Handler):
    """Prints each message to stderr as one line, unbuffered, above the progress bars."""

    def emit(self, record: logging.LogRecord) -> None:
        from tqdm import tqdm  # would slow `lmtrain -h` down

        if sys.stderr is None:  # a program without it
            return
        with suppress(OSError):  # such as a closed terminal, or a pipe that nobody reads any more
            tqdm.write(escaped(record.getMessage()), file=sys.stderr)
            sys.stderr.flush()


log = logging.getLogger("lmtrain")
"""Progress has the level INFO, and what the user should always see WARNING."""
log.addHandler(_Stderr())
log.setLevel(log.level or logging.INFO)  # a program may have set a level before anything of lmtrain is imported
log.propagate = False  # a root logger, which other libraries configure, would print the messages again


@contextmanager
def log_level(level: int) -> Iterator[None]:
    """Inside the block, report only messages of at least this level of `logging`, and of at least the level before."""
    before = log.level
    log.setLevel(max(level, before))
    try:
        yield
    finally:
        log.setLevel(before)


def shows_bars() -> bool:
    """Whether to show progress bars: INFO is reported, and stderr is a terminal."""
    return log.isEnabledFor(logging.INFO) and getattr(sys.stderr, "isatty", bool)()


def escaped(message: str) -> str:
    """Return the message on one line, with Python escape sequences for the characters that are not printable."""
    return _replaced(message, str.isprintable)


def for_terminal(text: str) -> str:
    """Return `escaped_lines(text)` if standard output is a terminal, else the text itself."""
    return escaped_lines(text) if sys.stdout.isatty() else text


def escaped_lines(text: str) -> str:
    """Return the text with Python escape sequences for its control characters, except newlines and tabs."""
    return _replaced(text, _is_text)


def to_json(value: object) -> str:
    """Return one line of JSON without control characters or line separators, of which JSON itself allows some."""
    text = json.dumps(value, ensure_ascii=False)
    return re.sub(r"[\x7f-\x9f\u2028\u2029]", lambda match: f"\\u{ord(match[0]):04x}", text)


def _replaced(text: str, keep: Callable[[str], bool]) -> str:
    return "".join(sign if keep(sign) else sign.encode("unicode_escape").decode() for sign in text)


def _is_text(character: str) -> bool:
    return character.isprintable() or character in "\n\t" + _JOINERS or unicodedata.category(character) == "Zs"
