"""Prompts from a file or from standard input, read one batch at a time."""

import json
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import BinaryIO

from lmtrain.errors import LmtrainError

LONGEST_PROMPT = 16 << 20
"""Bytes of a line, or of standard input read as one prompt."""
_BOM = b"\xef\xbb\xbf"
_SHAPE = '{"prompt": "text"}'


@dataclass(frozen=True)
class Prompt:
    """A prompt, and the `id` of its results: its own, or its line number, from 1."""

    id: str | int
    text: str


def read_prompts(path: Path) -> Iterator[Prompt]:
    """The prompts in a file, or with `-` those on standard input, one at a time.

    A file whose name ends in .jsonl holds JSON lines, `{"prompt": text}` with an optional `id` (text or whole number);
    other keys are ignored. Every other file, and standard input, has one prompt per line. Empty lines are skipped.

    Raises LmtrainError, naming the line, for anything else, and where there is no prompt.
    """
    name = "standard input" if path == Path("-") else str(path)
    if path.suffix == ".json":
        raise LmtrainError(f"{name}: prompts are a text file, one per line, or a .jsonl file of lines like {_SHAPE}")
    found = False
    as_json = path.suffix == ".jsonl"
    try:
        with nullcontext(sys.stdin.buffer) if path == Path("-") else path.open("rb") as file:
            for number, line in _lines(file, name):
                if not line.strip():
                    continue
                found = True
                yield _parse(line, number, f"{name}, line {number},") if as_json else Prompt(number, line)
    except OSError as error:
        raise LmtrainError(f"{name} can't be read: {error.strerror or error}") from error
    if not found:
        raise LmtrainError(f"{name} has no prompts: write one on each line")


def read_all(file: BinaryIO) -> str:
    """All of standard input as one prompt, with `\\n` as its line ends, without the last one.

    Raises LmtrainError when it is empty, too long or not UTF-8.
    """
    content = file.read(LONGEST_PROMPT + 1)
    if len(content) > LONGEST_PROMPT:
        raise LmtrainError(f"standard input is longer than {LONGEST_PROMPT >> 20} MiB: use --prompts for many prompts")
    try:
        text = content.removeprefix(_BOM).decode().replace("\r\n", "\n").removesuffix("\n")
    except UnicodeDecodeError as error:
        raise LmtrainError(f"standard input is not UTF-8 text (byte {error.start}): convert it with iconv") from None
    if not text:
        raise LmtrainError('no prompt: give one as an argument, on standard input or with --prompts ("" is empty)')
    return text


def batches(prompts: Iterator[Prompt], size: int) -> Iterator[list[Prompt]]:
    """`size` prompts at a time; the last batch may have fewer."""
    while batch := list(islice(prompts, size)):
        yield batch


def _lines(file: BinaryIO, name: str) -> Iterator[tuple[int, str]]:
    number = 0
    while line := file.readline(LONGEST_PROMPT + 1):
        number += 1
        if len(line) > LONGEST_PROMPT:
            raise LmtrainError(f"{name}, line {number}, is longer than {LONGEST_PROMPT >> 20} MiB: break it up")
        if number == 1:
            line = line.removeprefix(_BOM)
        try:
            yield number, line.decode().removesuffix("\n").removesuffix("\r")
        except UnicodeDecodeError as error:
            raise LmtrainError(
                f"{name}, line {number}, is not UTF-8 text (its byte {error.start}): convert it, for example with iconv"
            ) from None


def _parse(line: str, number: int, where: str) -> Prompt:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        reason = str(error)[:100]
        raise LmtrainError(f"{where} is not JSON ({reason}): each line must be an object like {_SHAPE}") from None
    if not isinstance(row, dict) or "prompt" not in row:
        what = "has no 'prompt'" if isinstance(row, dict) else "is not a JSON object"
        raise LmtrainError(f"{where} {what}: write it as {_SHAPE}")
    text, name = row["prompt"], row.get("id", number)
    if not isinstance(text, str):
        raise LmtrainError(f"{where} has a 'prompt' that is {type(text).__name__}: give text")
    if isinstance(name, bool) or not isinstance(name, str | int):
        raise LmtrainError(f"{where} has an 'id' that is {type(name).__name__}: give text or a whole number")
    for key, value in (("prompt", text), ("id", str(name))):
        try:
            value.encode()
        except UnicodeEncodeError:
            raise LmtrainError(f"{where} has half a character (a lone surrogate) in its {key!r}: remove it") from None
    return Prompt(name, text.replace("\r\n", "\n"))
