"""Escaping of text from files and users, so that it can't act as a control sequence on a terminal."""

import json
import re
import sys
import unicodedata
from collections.abc import Callable
from typing import Any

_JOINERS = "\u200c\u200d"
"""Invisible, and required by some scripts and emoji."""


def escaped(message: str) -> str:
    """A message on one line, with each character that is not printable as a Python escape sequence."""
    return _replaced(message, str.isprintable)


def for_terminal(text: str) -> str:
    """The same for a text on standard output, except its newlines and tabs; if that is no terminal, the text itself."""
    return with_lines(text) if sys.stdout.isatty() else text


def with_lines(text: str) -> str:
    """A text of several lines, with its control characters as Python escape sequences."""
    return _replaced(text, _is_text)


def to_json(value: Any) -> str:
    """One line of JSON without control characters: JSON itself allows those above U+007E."""
    return re.sub(r"[\x7f-\x9f]", lambda found: f"\\u{ord(found[0]):04x}", json.dumps(value, ensure_ascii=False))


def _replaced(text: str, keep: Callable[[str], bool]) -> str:
    if text.isprintable():
        return text
    return "".join(sign if keep(sign) else sign.encode("unicode_escape").decode() for sign in text)


def _is_text(character: str) -> bool:
    return character.isprintable() or character in "\n\t" + _JOINERS or unicodedata.category(character) == "Zs"
