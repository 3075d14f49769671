"""Every field of a configuration with its type, default and description, for `train --fields` and the pages."""

from collections.abc import Iterator
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin

from lmtrain.config.loader import flat, override_value
from lmtrain.config.schema import SECTIONS, Config


class FieldDescription(NamedTuple):
    """One field by its dotted name: the type, the default as an override has it, and a sentence or two."""

    name: str
    type: str
    default: str
    description: str


def fields() -> Iterator[FieldDescription]:
    """Yield all fields, in the order of the schema."""
    for name, default in flat(Config()).items():
        section, _, field = name.partition(".")
        info = SECTIONS[section][field]
        description = " ".join((info.description or "").split())
        yield FieldDescription(name, _type(info.annotation), override_value(default), description)


def _type(annotation: Any) -> str:
    """A type in words: `int`, choices as `a | b`, `list of ...`; null is left to the description."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _type(arguments[0])
    if origin is Literal:
        return " | ".join(map(str, arguments))
    if origin in (Union, UnionType):
        return " | ".join(_type(part) for part in arguments if part is not NoneType)
    if origin is tuple:
        return f"list of {_type(arguments[0])}"
    return {str: "string", Path: "path", bool: "true | false", int: "int", float: "float"}[annotation]


def as_text(prefix: str) -> str:
    """Return the fields whose dotted names begin with `prefix` as lines for a terminal: name, default and type, then
    the description, indented."""
    return "\n".join(
        f"{field.name}={field.default}  ({field.type})\n    {field.description}"
        for field in fields()
        if field.name.startswith(prefix)
    )
