"""Prompts from a file or from standard input, read one at a time."""

import sys
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import BinaryIO

from pydantic import BaseModel, ValidationError

from lmtrain.data.local import with_newlines
from lmtrain.errors import LmtrainError

_SHAPE = '{"prompt": "text"}'


class Prompt(BaseModel, strict=True):
    """A prompt, and its `id`: that of its JSON line, or else its line number, from 1."""

    prompt: str
    id: str | int | None = None


def read_prompts(path: Path) -> Iterator[Prompt]:
    """Yield the prompts in a file, or on standard input for `-`, one at a time.

    A file whose name ends in .jsonl holds JSON lines, `{"prompt": text}` with an optional `id` (string or integer);
    other keys are ignored. Every other file, and standard input, has one prompt per line. Empty lines are skipped.

    Raises LmtrainError, naming the line, for anything else, and if there are no prompts.
    """
    name, suffix = "standard input" if path == Path("-") else str(path), path.suffix.lower()
    if suffix == ".json":
        raise LmtrainError(f"{name}: prompts are read from a text file, one per line, or a .jsonl file like {_SHAPE}")
    is_empty = True
    try:
        with nullcontext(sys.stdin.buffer) if path == Path("-") else path.open("rb") as file:
            for number, content in enumerate(file, start=1):
                where = f"{name}, line {number},"
                if (line := _decoded(content, where)).strip():
                    is_empty = False
                    yield _parse(line, number, where) if suffix == ".jsonl" else Prompt(prompt=line, id=number)
    except OSError as error:
        raise LmtrainError(f"{name} can't be read: {error.strerror or error}") from error
    if is_empty:
        raise LmtrainError(f"{name} has no prompts: write one on each line")


def read_all(file: BinaryIO) -> str:
    """Return all of standard input as one prompt. Raises LmtrainError if it is empty or not UTF-8."""
    text = _decoded(file.read(), "standard input")
    if not text:
        raise LmtrainError('no prompt: give one as an argument, on standard input or with --prompts ("": empty)')
    return text


def _decoded(content: bytes, where: str) -> str:
    """Decode UTF-8: line ends become `\\n`, and the last one and a byte order mark are removed."""
    try:
        return with_newlines(content.decode("utf-8-sig")).removesuffix("\n")
    except UnicodeDecodeError as error:
        raise LmtrainError(
            f"{where} is not UTF-8 text (its byte {error.start}): convert it, for example with iconv, or unpack it"
        ) from None


def _parse(line: str, number: int, where: str) -> Prompt:
    try:
        prompt = Prompt.model_validate_json(line)
    except ValidationError:
        raise LmtrainError(
            f'{where} is not JSON of the form {_SHAPE}; it may have an "id" too, a string or an integer'
        ) from None
    return Prompt(prompt=with_newlines(prompt.prompt), id=number if prompt.id is None else prompt.id)
