"""Messages about invalid values: what pydantic finds, with the place where each value was set."""

import re
from collections.abc import Iterable, Sequence
from itertools import groupby

from pydantic_core import ErrorDetails

from lmtrain.config.base import NOT_UNICODE
from lmtrain.config.names import suggestion
from lmtrain.config.schema import SECTIONS

Origins = dict[tuple[str | int, ...], str]
"""Where the value of a (section, field) was set, if not in the file."""

_TEXT = "should be a string (in quotes, if YAML reads it as something else)"
_MESSAGES = {
    "model_type": "a section holds one `field: value` per line",
    "string_type": _TEXT,
    "path_type": _TEXT,
    "tuple_type": "should be a list, as in [a, b]",
    "string_pattern_mismatch": "a name has letters, digits, `_`, `-` and `.` only, and does not begin with `-` or `.`",
    "string_unicode": NOT_UNICODE,
    "invalid_key": "names of sections and fields are strings",
}
"""Messages by pydantic's type of error, where its own is about Python or leaves out the remedy."""
_KEY = re.compile(rf"\b({'|'.join(SECTIONS)})\.(\w+)")


def error_message(errors: Iterable[ErrorDetails], origin: str, origins: Origins) -> str:
    """Return one message about the errors of a pydantic ValidationError: the first few, each with its origin."""
    mistakes = [[*alike] for _, alike in groupby(errors, key=_location)]
    shown_first = [_sentence(alike, _origin(alike[0], origins, origin)) for alike in mistakes[:5]]
    more = len(mistakes) - len(shown_first)
    return "; ".join(shown_first) + (f"; and {more} more" if more else "")


def _location(error: ErrorDetails) -> tuple[str | int, ...]:
    """The section, the field and the index in a list, without pydantic's names of the types that a field may have."""
    location = error["loc"]
    return location if len(location) < 3 or isinstance(location[2], int) else location[:2]


def _origin(error: ErrorDetails, origins: Origins, otherwise: str) -> str:
    """Where a value was set. If several fields conflict, it is the first one that was set outside the file."""
    place = error["loc"][:2]
    if len(place) == 2:
        return origins.get(place, otherwise)
    if error["type"] == "extra_forbidden":
        return next((origin for (section, _), origin in origins.items() if section == place[0]), otherwise)
    return next((origins[named] for named in _KEY.findall(error["msg"]) if named in origins), otherwise)


def _sentence(errors: Sequence[ErrorDetails], origin: str) -> str:
    """One message about the errors of a field; there are several if it may have values of several types."""
    error, location = errors[0], _location(errors[0])
    key = cleaned(".".join(map(str, location)))
    if error["type"] == "extra_forbidden":
        return f"{origin}: unknown {'field' if len(location) > 1 else 'section'} {key}{suggestion(key)}"
    message = " or ".join(dict.fromkeys(map(_message, errors)))
    has_value = len(location) > 1 or error["type"] == "model_type"  # else it is about several fields
    return f"{origin}: {key}={shown(error['input'])}: {message}" if has_value else f"{origin}: {message}"


def _message(error: ErrorDetails) -> str:
    message = _MESSAGES.get(error["type"], error["msg"])
    return message.removeprefix("Value error, ").removeprefix("Input ")


def shown(value: object) -> str:
    """Return a value for a message: not too long, and without the user name and password of an address."""
    return cleaned(repr(value))


def cleaned(text: str) -> str:
    """Return a text for a message, as `shown` does, without quotes."""
    return re.sub(r"(?<=://)[^/\s]*@", "", text)[:200]
