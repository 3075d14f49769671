"""The YAML of configurations: the core schema of YAML 1.2, without aliases and with each key once.

`0100` is 100 and `1e-3` a number; `1:30`, `1_000`, `2026-11-22` and `yes` are strings. An override is one such value: a
list in brackets, a string in quotes, and anything else is a scalar, including `#` and `: `.
"""

import re
from collections.abc import Callable, Hashable
from typing import Any, ClassVar

import yaml

from lmtrain.errors import UsageError

_TAG = "tag:yaml.org,2002:"
_CORE = {
    "null": (re.compile(r"(?:~|null|Null|NULL|)$"), ["~", "n", "N", ""]),
    "bool": (re.compile(r"(?:true|True|TRUE|false|False|FALSE)$"), list("tTfF")),
    "int": (re.compile(r"(?:[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+)$"), list("-+0123456789")),
    "float": (
        re.compile(
            r"(?:[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))$"
        ),
        list("-+.0123456789"),
    ),
}


class _Loader(yaml.SafeLoader):
    """Rejects aliases, which can expand a small file to gigabytes, and duplicate keys, which lose a value."""

    yaml_implicit_resolvers: dict[str, Any] = {}  # noqa: RUF012 -- as PyYAML declares it
    yaml_constructors: ClassVar[dict[str | None, Any]] = {}

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        if self.check_event(yaml.AliasEvent):
            raise yaml.YAMLError("aliases (*name) are not allowed")
        return super().compose_node(parent, index)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        if not isinstance(node, yaml.MappingNode):
            raise ValueError("no mapping")
        found: dict[Hashable, Any] = {}
        for key_node, value_node in node.value:
            key = self.construct_object(key_node, deep=True)
            mistake = None if isinstance(key, Hashable) else "a list or a mapping can't be a key"
            if mistake is None and key in found:
                mistake = f"duplicate key {key}" if str(key).isidentifier() else "duplicate key"
            if mistake is not None:
                raise yaml.constructor.ConstructorError(None, None, mistake, key_node.start_mark)
            found[key] = self.construct_object(value_node, deep=True)
        return found


def _integer(text: str) -> int:
    return int(text, 0) if text.startswith(("0o", "0x")) else int(text)


def _number(text: str) -> float:
    return float(text.replace(".inf", "inf").replace(".nan", "nan") if text[-1].isalpha() else text)


def _truth(text: str) -> bool:
    return {"true": True, "false": False}[text]


def _of_scalar(read: Callable[[str], Any]) -> Callable[[_Loader, Any], Any]:
    return lambda loader, node: read(str(loader.construct_scalar(node)).lower())


for _name, (_pattern, _first) in _CORE.items():
    _Loader.add_implicit_resolver(_TAG + _name, _pattern, _first)
_Loader.yaml_constructors |= {
    f"{_TAG}null": _of_scalar(lambda text: None),
    f"{_TAG}bool": _of_scalar(_truth),
    f"{_TAG}int": _of_scalar(_integer),
    f"{_TAG}float": _of_scalar(_number),
    f"{_TAG}str": _Loader.construct_scalar,
    f"{_TAG}seq": lambda loader, node: loader.construct_sequence(node, deep=True),
    f"{_TAG}map": _Loader.construct_mapping,
    None: _Loader.construct_undefined,
}


class _Dumper(yaml.SafeDumper):
    """Quotes every string that `_Loader` or another YAML reader would take for something else, and escapes unusual
    characters."""


for _name, (_pattern, _first) in _CORE.items():
    _Dumper.add_implicit_resolver(_TAG + _name, _pattern, _first)
_Dumper.add_representer(
    str,
    lambda dumper, text: dumper.represent_scalar(f"{_TAG}str", text, style=None if text.isprintable() else '"'),
)


def write(values: Any) -> str:
    """Plain values as YAML."""
    return str(yaml.dump(values, Dumper=_Dumper, sort_keys=False, allow_unicode=True))


def read(text: str, origin: str) -> Any:
    """The values of a file. Raises UsageError, naming `origin`, if it is not such YAML."""
    return _checked(lambda: yaml.load(text, Loader=_Loader), origin)


def read_value(text: str, origin: str, *, is_text: bool) -> Any:
    """The value of an override or a variable. For a field of text (`is_text`) anything but `null`, nothing and a quoted
    string is taken literally. Raises UsageError, naming `origin`, if it is no such value."""
    text = text.strip()
    quoted = len(text) > 1 and text[0] == text[-1] and text[0] in "'\""
    if quoted or (text[:1] == "[" and not is_text):
        return _checked(lambda: _whole(text), origin)
    if is_text:
        return None if text in ("", "null") else text
    return _checked(lambda: _scalar(text), origin)


def _scalar(text: str) -> Any:
    loader: Any = _Loader("")
    tag = loader.resolve(yaml.ScalarNode, text, (True, False))
    return loader.construct_object(yaml.ScalarNode(tag, text), deep=True)


def _whole(text: str) -> Any:
    loader: Any = _Loader(text)
    node = loader.get_single_node()
    if text[node.end_mark.index :]:
        raise yaml.YAMLError("there is more after the closing mark")
    return loader.construct_document(node)


def _checked(load: Callable[[], Any], origin: str) -> Any:
    try:
        return load()
    except yaml.MarkedYAMLError as error:
        # The text of the error quotes the lines around it, which may contain a secret.
        place = f"line {error.problem_mark.line + 1}: " if error.problem_mark else ""
        raise UsageError(f"{origin} is not valid YAML: {place}{error.problem}") from None
    except (yaml.YAMLError, RecursionError) as error:
        raise UsageError(f"{origin} is not valid YAML: {' '.join(str(error).split())}") from None
    except (ValueError, LookupError):  # for example of `!!int x`
        raise UsageError(f"{origin} is not valid YAML: a value is not of the kind that its tag says") from None
