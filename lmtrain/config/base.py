"""What all sections of a configuration share: no unknown fields, no number too large, no impossible path."""

import os
from pathlib import Path
from typing import Annotated, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator


def _expanded(path: Path) -> Path:
    if not _can_be_path(path):
        raise ValueError("holds a character that no path can contain")
    try:
        return path.expanduser()
    except RuntimeError as error:
        raise ValueError(str(error)) from None


def _can_be_path(path: Path) -> bool:
    try:
        return b"\0" not in os.fsencode(path)
    except UnicodeEncodeError:
        return False


UserPath = Annotated[Path, AfterValidator(_expanded)]
"""A path in which `~` means the home folder, which a shell does not expand in a file or after `data.dir=`."""
Rate = Annotated[float, Field(ge=0.0, lt=1.0)]

LARGEST = 2**40
"""No number may be larger, so that products of two fit into int64."""


class Section(BaseModel):
    """A section: immutable, without unknown fields or unbounded numbers."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, allow_inf_nan=False, use_attribute_docstrings=True, regex_engine="python-re"
    )

    @model_validator(mode="after")
    def _bounded(self) -> Self:
        section = type(self).__name__.removesuffix("Config").lower()
        for name, value in self:
            if isinstance(value, int | float) and value > LARGEST:
                raise ValueError(f"{section}.{name} is larger than 2**40")
        return self
