"""Reads a configuration from YAML, the environment and dotted overrides; errors name the invalid field.

Later sources win: the defaults, then the YAML file, then `LMTRAIN_SECTION__FIELD` variables, then
`section.field=value` overrides. The resolved configuration is stored with every run.
"""

import json
import os
import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from lmtrain.config import yaml_values
from lmtrain.config.base import SURROGATE, UserPath
from lmtrain.config.earlier import upgrade
from lmtrain.config.mistakes import Origins, cleaned, error_message, shown
from lmtrain.config.names import suggestion
from lmtrain.config.schema import SECTIONS, Config
from lmtrain.errors import LmtrainError, UsageError
from lmtrain.system import disk

ENVIRONMENT_PREFIX = "LMTRAIN_"
RECIPES = dict(sorted((path.stem, path) for path in (Path(__file__).parents[1] / "configs").glob("*.yaml")))
"""The configurations that are installed with the package: `--config wikitext2-cpu` is the one of this name."""
MAX_FILE_BYTES = 1 << 18
"""Bytes: far more than a configuration needs, and few enough for the slowest constructs of YAML."""

_TEXTS = (str, str | None, Path, UserPath | None)
_ASSIGNMENT = re.compile(r"[\w.-]+=")
_OVERRIDE = re.compile(rf"({'|'.join(SECTIONS)})\.[a-z0-9_]+=")

ConfigSource = Path | Mapping[str, Mapping[str, Any]] | Config | None
"""Where a configuration comes from: a YAML file, its sections, a Config, or nothing but defaults."""


def load(
    source: ConfigSource = None,
    overrides: Iterable[str] = (),
    environment: Mapping[str, str] | None = None,
    *,
    stored: bool = False,
) -> Config:
    """Read a configuration: defaults, then the YAML file, then the environment, then `section.field=value` overrides.

    In place of the file there may be its sections, or a Config. `environment` defaults to that of the process. If
    `stored`, the file is the configuration that a run was trained with, in which removed fields are ignored.
    Raises UsageError naming the field, the value and the remedy, and LmtrainError if the file can't be read.
    """
    values = _values(source)
    if stored:
        upgrade(values)
    origins = _override(values, overrides, os.environ if environment is None else environment)
    origin = str(source) if isinstance(source, Path) else "the configuration"
    try:
        return Config.model_validate(values)
    except ValidationError as error:
        raise UsageError(error_message(error.errors(include_url=False), origin, origins)) from None


def _values(source: ConfigSource) -> dict[str, Any]:
    """Return the values of a configuration, in a copy."""
    if source is None:
        return {}
    if isinstance(source, Path):
        return _read_yaml(source)
    if isinstance(source, Config):
        return source.model_dump(mode="json")
    return {section: {**fields} if isinstance(fields, Mapping) else fields for section, fields in source.items()}


def environment_of(*keys: str) -> dict[str, str]:
    """Return the environment variables that set these fields, or fields of these sections."""
    names = {f"{ENVIRONMENT_PREFIX}{key.replace('.', '__')}".upper() for key in keys}
    return {name: text for name, text in os.environ.items() if names & {name.upper(), name.upper().partition("__")[0]}}


def _override(values: dict[str, Any], overrides: Iterable[str], environment: Mapping[str, str]) -> Origins:
    """Set the fields of `environment` in `values`, then those of `overrides`."""
    origins: Origins = {}
    for name, text in sorted(environment.items()):
        if name.startswith(ENVIRONMENT_PREFIX):
            key = name.removeprefix(ENVIRONMENT_PREFIX).lower().replace("__", ".", 1)
            origins[_assign(values, key, text, name)] = name
    for override in overrides:
        key, separator, text = override.partition("=")
        key = key.strip()
        if not separator or not key:
            raise UsageError(
                f"override {shown(override)} is not of the form section.field=value; a source comes before the "
                "overrides, and a configuration file after -c"
            )
        origins[_assign(values, key, text, f"override {cleaned(key)}")] = "the command line"
    return origins


def is_override(argument: str) -> bool:
    """Whether `argument`, which may be a prompt instead, sets a field of a section: `model.dim=64`."""
    return _OVERRIDE.match(argument) is not None


def overrides_of(overrides: Iterable[str], *keys: str) -> list[str]:
    """Return the overrides that set these fields, or fields of these sections."""
    names = ((text, text.partition("=")[0].strip()) for text in overrides)
    return [text for text, name in names if {name, name.partition(".")[0]} & {*keys}]


def load_fields(source: ConfigSource, overrides: Iterable[str], *fields: str) -> Config:
    """Read a configuration as `load` does, but of the environment and the overrides only what sets these fields.

    The others may fit an existing run and not this configuration.
    """
    return load(source, overrides_of(overrides, *fields), environment_of(*fields))


def with_source(arguments: Sequence[str]) -> list[str]:
    """Return the overrides in `arguments`; the first argument may be a source instead, such as `book.txt`.

    Anything of the form `name=value` is taken for an override, so that the message about `lr=3` names the field.
    """
    if not arguments or _ASSIGNMENT.match(arguments[0]):
        return [*arguments]
    source, *overrides = arguments
    if source.endswith((".yaml", ".yml")) or (source in RECIPES and not Path(source).exists()):
        raise UsageError(f"{source} is a configuration: write `-c {shlex.quote(source)}`")
    if overrides_of(overrides, "data.source"):
        raise UsageError(f"the source is {shown(source)} or data.source: leave one of them out")
    return [*overrides, f"data.source={json.dumps(source, ensure_ascii=False)}"]  # quoted: it may be called null


def dump(config: Config) -> str:
    """Return the configuration as YAML, with every field."""
    return yaml_values.write(config.model_dump(mode="json"))


def flat(config: Config) -> dict[str, Any]:
    """Return every field by its dotted name, as plain values."""
    sections = config.model_dump(mode="json")
    return {f"{section}.{field}": value for section, fields in sections.items() for field, value in fields.items()}


def override_value(value: object) -> str:
    """Return a plain value as an override has it."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def differences(first: Config, second: Config) -> dict[str, tuple[Any, Any]]:
    """Return the fields in which two configurations differ, by their dotted names, with both plain values."""
    before, after = flat(first), flat(second)
    return {key: (before[key], after[key]) for key in before if before[key] != after[key]}


def _read_yaml(name: Path) -> dict[str, Any]:
    """Return the values of a file, or of the recipe of this name."""
    path = name if os.path.isfile(name) else RECIPES.get(str(name), name)  # noqa: PTH113 -- a name of any length
    try:
        disk.check_regular(path)
        with path.open("rb") as file:
            content = file.read(MAX_FILE_BYTES + 1)
        if len(content) > MAX_FILE_BYTES:
            raise LmtrainError(f"configuration {path} is larger than {MAX_FILE_BYTES >> 10} KiB: no configuration is")
        text = content.decode()
    except FileNotFoundError:
        raise LmtrainError(f"configuration {path} does not exist; the recipes are {', '.join(RECIPES)}") from None
    except UnicodeDecodeError as error:
        raise LmtrainError(f"configuration {path} is not UTF-8 text (byte {error.start}): convert it") from None
    except OSError as error:
        raise LmtrainError(f"configuration {path} can't be read: {error.strerror}") from None
    values = yaml_values.read(text, str(path))
    if values is None:
        return {}
    if not isinstance(values, dict) or not all(isinstance(key, str) for key in values):
        raise UsageError(f"configuration {path} must hold sections such as 'model:' with fields under them")
    return values


def _assign(values: dict[str, Any], key: str, text: str, origin: str) -> tuple[str, str]:
    """Set the field `key` to the value that `text` gives, and return its section and its name."""
    section, separator, field = key.partition(".")
    if not separator:
        raise UsageError(
            f"{origin}: a field is set as section.field=value, or LMTRAIN_SECTION__FIELD in the environment"
            f"{suggestion(key)}"
        )
    if SURROGATE.search(text):  # how Python represents bytes that are not UTF-8
        raise UsageError(f"{origin}: {shown(text)} is not UTF-8 text: rename the file, or use another path")
    fields = values.setdefault(section, {})
    if not isinstance(fields, dict):
        raise UsageError(f"{origin}: {section} is not a section")
    known = SECTIONS.get(section, {}).get(field)
    holds_text = known is not None and (
        known.annotation in _TEXTS or (known.annotation == tuple[UserPath, ...] and not text.lstrip().startswith("["))
    )
    fields[field] = yaml_values.read_value(text, origin, is_text=holds_text)
    return section, field
