"""Reads a configuration from YAML, the environment and dotted overrides; errors name the invalid field.

Later sources win: the defaults, then the YAML file, then `LMTRAIN_SECTION__FIELD` variables, then
`section.field=value` overrides. The resolved configuration is stored with every run.
"""

import json
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from lmtrain.config import yaml_values
from lmtrain.config.base import UserPath
from lmtrain.config.names import suggestion
from lmtrain.config.schema import CHANGEABLE_FIELDS, SCHEDULE_FIELDS, SECTIONS, Config
from lmtrain.errors import LmtrainError, UsageError
from lmtrain.system import disk

ENVIRONMENT_PREFIX = "LMTRAIN_"
RECIPES = Path(__file__).parents[1] / "configs"
"""The configurations that are installed with the package: `--config wikitext2-cpu` is the one of this name."""
LARGEST_FILE = 1 << 18
"""Bytes: far more than a configuration needs, and few enough for the slowest constructs of YAML."""

REMOVED: dict[str, tuple[object, str]] = {
    "data.sources": (None, "a run is trained on one corpus: put the texts into one folder and name it in data.source"),
    "data.deduplicate": (False, "remove repeated documents from the text before it is imported"),
    "model.embedding_dropout": (0.0, "it made no measurable difference; use model.input_dropout"),
    "model.output_bias": (True, "every model has one, which costs next to nothing"),
    "train.adversarial_softmax": (0.0, "it made no measurable difference"),
    "train.embedding_weight_decay": (None, "it made no measurable difference; use train.weight_decay"),
    "train.eval_epochs": (None, "use train.eval_steps, or neither: evaluations are then spread over the budget"),
    "train.scheduled_sampling": (0.0, "it made perplexity worse; lmtrain.nn.seq2seq has it for sequence to sequence"),
    "eval.dynamic_decay": (0.0, "zero was best for every model that was measured"),
    "eval.dynamic_rule": ("rms", "steps that it does not scale made the model that was measured worse"),
    "train.spike_sigmas": (None, "a step whose gradient is not finite is left out without it"),
}
"""Fields of earlier versions: the default value, and why the field was removed or what replaces it."""

_MOST_MISTAKES = 5
_LONGEST_VALUE = 200
_MESSAGES = {
    "model_type": "a section holds one `field: value` per line",
    "tuple_type": "a list is needed, as in [a, b]",
    "string_pattern_mismatch": "a name has letters, digits, `_`, `-` and `.` only, and does not begin with `-` or `.`",
}
"""In place of pydantic's words for these types of error."""
_TEXTS = (str, str | None, Path, UserPath | None)
_TEXT_OR_LIST = tuple[UserPath, ...]
_COMMAND_LINE = "the command line"
_ASSIGNMENT = re.compile(r"[\w.-]+=")
_KEY = re.compile(rf"\b({'|'.join(SECTIONS)})\.(\w+)")

ConfigSource = Path | Mapping[str, Mapping[str, Any]] | Config | None
"""Where a configuration comes from: a YAML file, its sections, a Config, or nothing but defaults."""
Origins = dict[tuple[str, str], str]
"""Where the value of a (section, field) was set, if not in the file."""


def load(
    source: ConfigSource = None,
    overrides: Iterable[str] = (),
    environment: Mapping[str, str] | None = None,
    *,
    stored: bool = False,
) -> Config:
    """Read a configuration: defaults, then the YAML file, then the environment, then `section.field=value` overrides.

    In place of the file there may be its sections, or a Config. `environment` defaults to that of the process. If
    `stored`, the file is the configuration that a run was trained with, in which removed fields may have any value.
    Raises UsageError naming the key, the value and the remedy, and LmtrainError if the file can't be read.
    """
    values = _values(source)
    origins = _override(values, overrides, os.environ if environment is None else environment)
    return parse(values, str(source) if isinstance(source, Path) else "the configuration", origins, stored=stored)


def _values(source: ConfigSource) -> dict[str, Any]:
    """The plain values of a configuration, in a copy."""
    if isinstance(source, Path):
        return _read_yaml(source)
    if isinstance(source, Config):
        return source.model_dump(mode="json")
    return {
        section: dict(fields) if isinstance(fields, Mapping) else fields for section, fields in (source or {}).items()
    }


def environment_of(*keys: str) -> dict[str, str]:
    """The environment variables that set these fields, or fields of these sections."""
    wanted = tuple(f"{ENVIRONMENT_PREFIX}{key.replace('.', '__')}".upper() for key in keys)
    return {name: text for name, text in os.environ.items() if name in wanted or name.partition("__")[0] in wanted}


def _override(values: dict[str, Any], overrides: Iterable[str], environment: Mapping[str, str]) -> Origins:
    """Set the fields of `environment` in `values`, then those of `overrides`."""
    origins: Origins = {}
    for name, text in sorted(environment.items()):
        if name.startswith(ENVIRONMENT_PREFIX):
            section, separator, field = name.removeprefix(ENVIRONMENT_PREFIX).lower().partition("__")
            if not separator:
                raise UsageError(f"{name}: a variable is named LMTRAIN_SECTION__FIELD, for example LMTRAIN_MODEL__DIM")
            _assign(values, section, field, text, name)
            origins[section, field] = name
    for override in overrides:
        key, separator, text = override.partition("=")
        if not separator:
            hint = ": a configuration file is given by --config" if key.endswith((".yaml", ".yml")) else ""
            raise UsageError(f"override {shown(override)} is not of the form section.field=value{hint}")
        section, separator, field = key.strip().partition(".")
        origin = f"override {_cleaned(key.strip())}"
        if not separator:
            raise UsageError(f"{origin}: a field is set as section.field=value{suggestion(section)}")
        _assign(values, section, field, text, origin)
        origins[section, field] = _COMMAND_LINE
    return origins


def as_overrides(fields: Mapping[str, str | Path | float | None]) -> list[str]:
    """The fields that are not None, as `section.field=value`; text is quoted, since YAML reads some text as numbers."""
    given = {key: value for key, value in fields.items() if value is not None}
    return [f"{key}={json.dumps(value, ensure_ascii=False, default=str)}" for key, value in given.items()]


def with_source(arguments: Sequence[str]) -> list[str]:
    """The overrides in `arguments`, of which the first may be a source instead: `book.txt`."""
    if not arguments or _ASSIGNMENT.match(arguments[0]):
        return [*arguments]
    source, *overrides = arguments
    recipes = {recipe.stem for recipe in RECIPES.glob("*.yaml")}
    if source.endswith((".yaml", ".yml")) or (source in recipes and not Path(source).exists()):
        raise UsageError(f"{source}: a configuration file, or a recipe, is given by --config")
    return [*overrides, *as_overrides({"data.source": source})]


def parse(values: Any, origin: str, origins: Origins | None = None, *, stored: bool = False) -> Config:
    """Validate plain values (as from YAML); messages name their source, `origin`, or that of single fields, `origins`.

    If `stored`, removed fields may have any value. Raises UsageError.
    """
    origins = origins or {}
    values = _without_removed(values, origin, origins, stored)
    try:
        return Config.model_validate(values)
    except ValidationError as error:
        mistakes = error.errors(include_url=False)
        sentences = [_sentence(item, _origin(item, origins, origin)) for item in mistakes[:_MOST_MISTAKES]]
        more = len(mistakes) - len(sentences)
        raise UsageError("; ".join(sentences) + (f"; and {more} more like these" if more else "")) from None
    except UnicodeEncodeError:  # raised by pydantic if a validator's message quotes such a text
        raise UsageError(f"{origin}: a text has half a surrogate pair, which is no character") from None


def _without_removed(values: Any, origin: str, origins: Origins, stored: bool) -> Any:
    """`values` without removed fields. Raises UsageError if one is not at its default, unless `stored`."""
    if not isinstance(values, dict):
        return values
    values = {section: dict(fields) if isinstance(fields, dict) else fields for section, fields in values.items()}
    for key, (default, reason) in REMOVED.items():
        section, _, field = key.partition(".")
        fields = values.get(section)
        if isinstance(fields, dict) and field in fields:
            value, place = fields.pop(field), origins.get((section, field))
            if place is not None or (value != default and not stored):
                raise UsageError(f"{place or origin}: {key}={shown(value)}: the field was removed: {reason}")
    return values


def dump(config: Config) -> str:
    """The configuration as YAML, with every field."""
    return yaml_values.write(config.model_dump(mode="json"))


def flat(config: Config) -> dict[str, Any]:
    """Every field by its dotted name, as plain values."""
    sections = config.model_dump(mode="json")
    return {f"{section}.{field}": value for section, fields in sections.items() for field, value in fields.items()}


def identity_difference(stored: Config, wanted: Config, *, fixed_schedule: bool = False) -> list[str]:
    """The identity fields, with `fixed_schedule` those of the schedule too, in which two configurations differ, as
    readable lines; if none, one can resume the other."""
    old, new = flat(stored), flat(wanted)
    free = CHANGEABLE_FIELDS if fixed_schedule else CHANGEABLE_FIELDS | SCHEDULE_FIELDS
    changed = [key for key in old if key not in free and old[key] != new[key]]
    return [f"{key}: {old[key]} -> {new[key]}" for key in changed]


def _read_yaml(given: Path) -> dict[str, Any]:
    """The values of a file, or of a recipe by its name."""
    path = given
    try:
        recipe = RECIPES / f"{given}.yaml"
        path = recipe if not given.is_file() and given.name == str(given) and recipe.is_file() else given
        disk.check_regular(path)
        with path.open("rb") as file:
            content = file.read(LARGEST_FILE + 1)
        if len(content) > LARGEST_FILE:
            raise LmtrainError(f"configuration {path} is larger than {LARGEST_FILE >> 10} KiB: no configuration is")
        text = content.decode()
    except FileNotFoundError:
        recipes = ", ".join(sorted(recipe.stem for recipe in RECIPES.glob("*.yaml")))
        raise LmtrainError(f"configuration {path} does not exist; the recipes are {recipes}") from None
    except UnicodeDecodeError as error:
        raise LmtrainError(f"configuration {path} is not UTF-8 text (byte {error.start})") from None
    except OSError as error:
        raise LmtrainError(f"configuration {path} can't be read: {error.strerror}") from None
    values = yaml_values.read(text, str(path))
    if values is None:
        return {}
    if not isinstance(values, dict) or not all(isinstance(key, str) for key in values):
        raise UsageError(f"configuration {path} must hold sections such as 'model:' with fields under them")
    return values


def _assign(values: dict[str, Any], section: str, field: str, text: str, origin: str) -> None:
    """Set a field to the value that `text` gives."""
    if any("\ud800" <= sign <= "\udfff" for sign in text):  # how Python represents bytes that are not UTF-8
        raise UsageError(f"{origin}: {shown(text)} is not UTF-8 text: rename what has this name, or use another path")
    fields = values.setdefault(section, {})
    if not isinstance(fields, dict):
        raise UsageError(f"{origin}: {section} is not a section")
    known = SECTIONS.get(section, {}).get(field)
    holds_text = known is not None and (
        known.annotation in _TEXTS or (known.annotation == _TEXT_OR_LIST and not text.lstrip().startswith("["))
    )
    fields[field] = yaml_values.read_value(text, origin, is_text=holds_text)


def _origin(error: Any, origins: Origins, otherwise: str) -> str:
    """Where the value of a pydantic error was set; if several fields conflict, the one that is named first."""
    place = error["loc"][:2]
    if len(place) < 2 and error["type"] == "extra_forbidden":
        return next((origin for (section, _), origin in origins.items() if section == place[0]), otherwise)
    if len(place) < 2 and (named := _KEY.search(error["msg"])):
        place = (named[1], named[2])
    return origins.get(place, otherwise)


def _sentence(error: Any, origin: str) -> str:
    """One pydantic error as a message that names the key."""
    location = error["loc"]
    if len(location) > 2 and not isinstance(location[2], int):  # not an item of a list but pydantic's name of a type
        location = location[:2]
    key = _cleaned(".".join(map(str, location)))
    if error["type"] == "extra_forbidden":
        return f"{origin}: unknown field {key}{suggestion(key)}"
    message = _MESSAGES.get(error["type"], error["msg"].removeprefix("Value error, "))
    if error["type"] in ("string_type", "path_type") and not isinstance(error["input"], list | dict | None):
        message = "a text is needed, and YAML takes this for something else: put it in quotes"
    has_value = len(location) > 1 or error["type"] == "model_type"  # else it is about several fields
    return f"{origin}: {key}={shown(error['input'])}: {message}" if has_value else f"{origin}: {message}"


def shown(value: Any) -> str:
    """A value for a message: not too long, and without the user name and password of an address."""
    try:
        text = repr(value)
    except ValueError:  # Python formats no number of more than 4,300 digits
        return "a number too long to write"
    return _cleaned(text)


def _cleaned(text: str) -> str:
    return re.sub(r"(?<=://)[^/\s]*@", "", text)[:_LONGEST_VALUE]
