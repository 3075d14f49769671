"""What all sections of a configuration share: no unknown fields, no number too large, no impossible path."""

import os
import re
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidatorFunctionWrapHandler, field_validator

MAX_NUMBER = 2**40
"""No number may be larger, so that its product with a width or a context, 2**20 at most, fits into int64."""
NOT_UNICODE = "a text has a lone surrogate, which is not a character"
SURROGATE = re.compile(r"[\ud800-\udfff]")


def _expanded(path: Path) -> Path:
    """Replace `~`. Raises ValueError if there can't be such a path."""
    try:
        if b"\0" in os.fsencode(path):
            raise ValueError
        return path.expanduser()
    except ValueError:  # of which UnicodeEncodeError is a kind
        raise ValueError("contains a NUL byte, or a character that this locale can't encode") from None
    except RuntimeError as error:
        raise ValueError(str(error)) from None


UserPath = Annotated[Path, AfterValidator(_expanded)]
"""A path in which `~` means the home folder, which a shell does not expand in a file or after `data.dir=`."""
Fraction = Annotated[float, Field(ge=0.0, lt=1.0)]


def listed(value: object) -> list[Any] | tuple[Any, ...]:
    """Return one value as a list of one, and null as an empty list; a list stays as it is."""
    return value if isinstance(value, list | tuple) else [] if value is None else [value]


class Section(BaseModel):
    """A section: immutable, without unknown fields, unbounded numbers or texts that are not Unicode."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, allow_inf_nan=False, use_attribute_docstrings=True, regex_engine="python-re"
    )

    @field_validator("*", mode="wrap")
    @classmethod
    def _checked(cls, value: object, read: ValidatorFunctionWrapHandler) -> Any:
        result = read(str(value) if isinstance(value, Path) else value)  # data.source may be a Path in Python
        # pydantic reads true as 1
        if any(isinstance(item, bool) for item in listed(value)) and not isinstance(result, bool):
            raise ValueError("a number is needed")
        if isinstance(result, int | float) and result > MAX_NUMBER:
            raise ValueError("a number may not be larger than 2**40")
        if any(isinstance(item, str) and SURROGATE.search(item) for item in listed(result)):
            raise ValueError(NOT_UNICODE)
        return result
