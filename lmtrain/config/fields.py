"""Every field of a configuration with its type, default and description, for `train --fields` and the pages."""

from collections.abc import Iterator
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin

import yaml

from lmtrain.config.schema import SECTIONS


class FieldDescription(NamedTuple):
    """One field by its dotted name: the type, the default as YAML writes it, and a sentence or two."""

    name: str
    type: str
    default: str
    description: str


def fields(prefix: str = "") -> Iterator[FieldDescription]:
    """Yield the fields whose dotted name begins with `prefix`, in the order of the schema."""
    for section, described in SECTIONS.items():
        for field, info in described.items():
            name = f"{section}.{field}"
            if name.startswith(prefix):
                yield FieldDescription(name, _type(info.annotation), _default(info.default), info.description or "")


def _type(annotation: Any) -> str:
    """A type in words: `int`, choices as `a | b`, `list of ...`; null is left to the description."""
    if get_origin(annotation) is Annotated:
        return _type(get_args(annotation)[0])
    arguments = get_args(annotation)
    if get_origin(annotation) is Literal:
        return " | ".join(str(choice) for choice in arguments)
    if get_origin(annotation) in (Union, UnionType):
        return " | ".join(_type(part) for part in arguments if part is not NoneType)
    if get_origin(annotation) is tuple:
        return f"list of {_type(arguments[0])}"
    return {str: "text", Path: "path", bool: "true | false", int: "int", float: "float"}[annotation]


def _default(value: Any) -> str:
    plain = str(value) if isinstance(value, Path) else list(value) if isinstance(value, tuple) else value
    return yaml.safe_dump(plain, default_flow_style=True, width=1000).split("\n")[0].removesuffix("...").strip()


def as_text(prefix: str) -> str:
    """Return the fields as lines for a terminal: name, type and default, then the description, indented."""
    blocks = [
        f"{field.name}={field.default}  ({field.type})\n    {' '.join(field.description.split())}"
        for field in fields(prefix)
    ]
    return "\n".join(blocks)
