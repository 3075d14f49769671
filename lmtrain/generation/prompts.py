"""Prompts from a file or from standard input, read one at a time."""

import sys
from collections.abc import Iterator
from pathlib import Path

from lmtrain.data.local import READERS, file_lines, kind
from lmtrain.errors import LmtrainError


def read_prompts(path: Path) -> Iterator[str]:
    """Yield the prompts in a file, or on standard input for `-`, one at a time.

    The column `prompt` of a file with rows (.jsonl, .json, .csv, .tsv, .parquet), or each line of any other text that
    is not blank.

    Raises LmtrainError if the content can't be read, and if there are no prompts.
    """
    is_empty = True
    if kind(path) in READERS:
        prompts = READERS[kind(path)](path, "prompt")
    else:
        prompts = filter(str.strip, _input_lines() if path == Path("-") else file_lines(path))
    for prompt in prompts:
        is_empty = False
        yield prompt
    if is_empty:
        raise LmtrainError(f"{'standard input' if path == Path('-') else path} has no prompts: write one on each line")


def read_all() -> str:
    """Return all of standard input as one prompt. Raises LmtrainError if it is empty or not UTF-8."""
    text = "\n".join(_input_lines())
    if not text:
        raise LmtrainError('no prompt: give one as an argument, on standard input or with --prompts ("": empty)')
    return text


def _input_lines() -> Iterator[str]:
    return file_lines(Path("standard input"), sys.stdin.buffer)
