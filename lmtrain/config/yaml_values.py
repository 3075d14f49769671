"""The YAML of configurations: the core schema of YAML 1.2, without aliases, tags, infinity and numbers that are not
decimal, and with each key once.

`0100` is 100 and `1e-3` a number; `1:30`, `1_000`, `2026-11-22` and `yes` are strings. An override is one such value: a
list in brackets, a string in quotes, and anything else is a scalar, including `#` and `: `.
"""

import re
from collections.abc import Hashable
from typing import Any

import yaml

from lmtrain.errors import UsageError

_WORDS: dict[str, bool | None] = dict.fromkeys(("", "~", "null", "Null", "NULL"))
_WORDS |= dict.fromkeys(("true", "True", "TRUE"), True) | dict.fromkeys(("false", "False", "FALSE"), False)
_NUMBER = re.compile(r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?\Z")


class _Loader(yaml.BaseLoader):
    """Rejects aliases, which can expand a small file to gigabytes, tags, and duplicate keys, which lose a value."""

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        event: Any = self.peek_event()  # type: ignore[no-untyped-call]
        if isinstance(event, yaml.AliasEvent) or event.tag is not None:
            raise yaml.composer.ComposerError(None, None, "aliases (*) and tags (!) are not allowed", event.start_mark)
        return super().compose_node(parent, index)

    def construct_scalar(self, node: yaml.ScalarNode) -> Any:
        text = super().construct_scalar(node)
        return text if node.style else _scalar(text)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        names = set[str]()
        for key, _ in node.value:
            name = str(key.value)
            if name in names:
                shown = f" {name}" if name.isidentifier() else ""  # an address may contain a password
                raise yaml.constructor.ConstructorError(None, None, f"duplicate key{shown}", key.start_mark)
            names.add(name)
        return super().construct_mapping(node, deep)


def _scalar(text: str) -> Any:
    """The value of a scalar without quotes."""
    if text in _WORDS:
        return _WORDS[text]
    if not _NUMBER.match(text):
        return text
    try:
        return int(text)
    except ValueError:  # also for more digits than Python reads, which no field needs
        return float(text)


class _Dumper(yaml.SafeDumper):
    """Quotes every string that `_Loader` or another YAML reader would take for something else, and escapes unusual
    characters."""


_Dumper.add_implicit_resolver("tag:yaml.org,2002:float", _NUMBER, list("-+.0123456789"))
_Dumper.add_representer(
    str,
    lambda dumper, text: dumper.represent_scalar(
        "tag:yaml.org,2002:str", text, style=None if text.isprintable() else '"'
    ),
)


def write(values: object) -> str:
    """Return plain values as YAML."""
    return str(yaml.dump(values, Dumper=_Dumper, sort_keys=False, allow_unicode=True))


def read(text: str, origin: str) -> Any:
    """Return the values of a file. Raises UsageError, naming `origin`, if it is not such YAML."""
    try:
        return yaml.load(text, Loader=_Loader)
    except yaml.MarkedYAMLError as error:
        # The text of the error quotes the lines around it, which may contain a secret.
        place = f"line {error.problem_mark.line + 1}: " if error.problem_mark else ""
        raise UsageError(f"{origin} is not valid YAML: {place}{error.problem}") from None
    except (yaml.YAMLError, RecursionError) as error:
        raise UsageError(f"{origin} is not valid YAML: {' '.join(str(error).split())}") from None


def read_value(text: str, origin: str, *, is_text: bool) -> Any:
    """Return the value of an override or a variable.

    For a field of text (`is_text`), anything but `null`, nothing and a quoted string is taken literally. Raises
    UsageError, naming `origin`, if a list or a quoted string is not YAML.
    """
    text = text.strip()
    quoted = len(text) > 1 and text[0] == text[-1] and text[0] in "'\""
    if quoted or (text[:1] == "[" and not is_text):
        return read(text, origin)
    if is_text:
        return None if text in ("", "null") else text
    return _scalar(text)
