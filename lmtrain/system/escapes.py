"""Text from files and users as it may reach a terminal: no character of it may act as a control sequence."""

import json
import re
import sys
import unicodedata
from collections.abc import Callable
from typing import Any

_JOINERS = "\u200c\u200d"
"""Invisible, and part of how some scripts and emoji are written."""


def escaped(message: str) -> str:
    """A message in one line, with each character that is not printable as Python writes it."""
    return _replaced(message, str.isprintable)


def for_terminal(text: str) -> str:
    """The same for a text that standard output shows on a terminal, with its line ends, tabs and spaces; elsewhere
    the text as it is."""
    return with_lines(text) if sys.stdout.isatty() else text


def with_lines(text: str) -> str:
    """A text of several lines with its control characters as Python writes them."""
    return _replaced(text, _is_text)


def in_one_line(text: str) -> str:
    r"""A text with `\n`, `\r`, `\t` and `\\` in place of line ends, tabs and backslashes."""
    return text.replace("\\", "\\\\").replace("\n", "\\n").replace("\r", "\\r").replace("\t", "\\t")


def to_json(value: Any) -> str:
    """One line of JSON, in which no control character is left: JSON itself allows those above U+007E."""
    return re.sub(r"[\x7f-\x9f]", lambda found: f"\\u{ord(found[0]):04x}", json.dumps(value, ensure_ascii=False))


def _replaced(text: str, keep: Callable[[str], bool]) -> str:
    if text.isprintable():
        return text
    return "".join(sign if keep(sign) else sign.encode("unicode_escape").decode() for sign in text)


def _is_text(character: str) -> bool:
    return character.isprintable() or character in "\n\t" + _JOINERS or unicodedata.category(character) == "Zs"
