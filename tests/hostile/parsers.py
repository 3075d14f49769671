"""All parsers, by name."""

from collections.abc import Callable
from pathlib import Path

from tests.hostile import files, folders
from tests.hostile.inputs import Parser

PARSERS: dict[str, Callable[[Path], Parser]] = {
    "config": files.configuration,
    "overrides": files.overrides,
    "text": files.plain,
    "jsonl": files.json_lines,
    "prompts": files.prompt_lines,
    "prompts.jsonl": files.prompt_json,
    "parquet": files.parquet,
    "tokenizer": files.tokenizer,
    "corpus": folders.corpus,
    "tokens": folders.tokens,
    "checkpoint": folders.checkpoints,
    "run": folders.runs,
}
"""Functions that make a parser in an empty folder."""
