"""Text in local files: which file is which split, and their lines, streamed, from plain text, JSON lines and parquet.

A line comes as (text without its end, whether a document starts there for certain). In JSON lines and parquet each row
is a document, of one line or several. Plain text never says where one starts, but where a split is several files with
names of their own, each of them is a document. Each kind may be compressed.
"""

import json
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from lmtrain.data.compressed import COMPRESSED, DAMAGE, open_bytes, open_seekable
from lmtrain.errors import LmtrainError

Lines = Iterator[tuple[str, bool]]

SPLIT_NAMES = {
    "train": "train",
    "training": "train",
    "valid": "valid",
    "validation": "valid",
    "val": "valid",
    "dev": "valid",
    "test": "test",
}
"""The names that a split goes by, in file names and on the hub."""

SUFFIXES = (".txt", ".tokens", ".raw", ".jsonl", ".parquet")
LONGEST_LINE = 256 << 20
"""Bytes: a longer line is refused, because what follows has to hold a line in memory."""

_SHARD = re.compile(r"-(\d+)-of-(\d+)$")
_BOM = b"\xef\xbb\xbf"
_FEWEST_ROWS, _MOST_ROWS = 16, 1024
_BATCH_BYTES = 256 << 20
"""What the rows of a parquet file that are decoded at once may come to, as far as its own figures can be believed."""


def plain(path: Path) -> Path:
    """The path without the ending of its compression."""
    return path.with_suffix("") if path.suffix in COMPRESSED else path


def is_text(path: Path) -> bool:
    """Whether the name is one of a text file of a known kind."""
    return plain(path).suffix in SUFFIXES


def is_structured(path: Path) -> bool:
    """Whether the file holds rows with named columns instead of plain lines."""
    return plain(path).suffix in (".jsonl", ".parquet")


def name_in(folder: Path, file: Path) -> str:
    """What a file is called in a folder, or the one file that a source is; readable where it isn't in UTF-8 either."""
    return os.fsencode(file.relative_to(folder) if file != folder else file.name).decode(errors="backslashreplace")


def find_splits(folder: Path) -> dict[str, list[Path]]:
    """The files of each split in `folder`, by their names: `train.txt`, `wiki.valid.tokens.gz`, `dev.jsonl`,
    `train-00000-of-00002.parquet`, or every file in a folder of such a name: `train/a.jsonl.xz`.

    Where no name is one of a split, all files are training text, in the order of their names.
    Raises LmtrainError when there is no training text, when two files or folders claim one split, when a shard is
    missing, or where a link leads nowhere.
    """
    splits: dict[str, list[Path]] = {}
    for path, name in _texts(folder):
        names = {SPLIT_NAMES[part] for part in re.split(r"[._-]", name.lower()) if part in SPLIT_NAMES}
        if len(names) == 1:
            splits.setdefault(names.pop(), []).append(path)
    in_folders: dict[str, list[Path]] = {}
    for place in sorted(path for path in folder.iterdir() if path.is_dir() and path.name.lower() in SPLIT_NAMES):
        split = SPLIT_NAMES[place.name.lower()]
        if other := splits.get(split) or in_folders.get(split):
            found = f"{other[0].relative_to(folder)} and {place.name}/"
            raise LmtrainError(f"{folder} has its {split} split in two places, {found}: keep one of them")
        if paths := [path for path, _ in _texts(place)]:
            in_folders[split] = paths
    if not splits and not in_folders:
        in_folders = {"train": [path for path, _ in _texts(folder)]}
    if not splits.get("train") and not in_folders.get("train"):
        found = ", ".join(sorted(path.name for path in folder.iterdir())[:8]) or "nothing"
        raise LmtrainError(
            f"{folder} has no training text: name a file train.txt (or .tokens, .jsonl, .parquet); found {found}"
        )
    return {split: _shards(folder, split, paths) for split, paths in splits.items()} | in_folders


def _texts(folder: Path) -> list[tuple[Path, str]]:
    """The text files in a folder in the order of their names, with what they are called without endings."""
    paths = [path for path in sorted(folder.iterdir()) if is_text(path) and not path.name.startswith(".")]
    for path in paths:
        refuse_dangling(path)
    return [(path, plain(path).stem) for path in paths if path.is_file()]


def refuse_dangling(path: Path) -> None:
    """Raise LmtrainError where a path is a link whose target isn't there: to pass over it would be to lose text."""
    if path.is_symlink() and not path.exists():
        raise LmtrainError(f"{path} is a link to a file that isn't there: mend it or delete it")


def _shards(folder: Path, split: str, paths: list[Path]) -> list[Path]:
    """The files of a split in order: one, or all the numbered parts of one."""
    numbers = {path: match for path in paths if (match := _SHARD.search(plain(path).stem))}
    if len(paths) > 1 and (len(numbers) < len(paths) or len({path.suffix for path in paths}) > 1):
        names = " and ".join(path.name for path in paths)
        raise LmtrainError(f"{folder} has several files for its {split} split, {names}: keep one of them")
    if numbers:
        total = int(next(iter(numbers.values()))[2])
        if total != len(paths) or sorted(int(match[1]) for match in numbers.values()) != list(range(total)):
            raise LmtrainError(f"{folder} has {len(paths)} of the {total} files of its {split} split: get the others")
        paths.sort(key=lambda path: int(numbers[path][1]))
    return paths


def read_lines(paths: Sequence[Path], text_column: str) -> Lines:
    """The lines of `paths`, one file after the other, with bounded memory.

    Lines end at "\\n" or "\\r\\n" and nowhere else; a byte order mark at the start of a file is dropped; a file that
    ends without a line end has its last line like any other. NUL and other control characters are text.
    Raises LmtrainError naming the file and the byte or row when the content can't be read.
    """
    are_documents = len(paths) > 1 and not any(_SHARD.search(plain(path).stem) for path in paths)
    for path in paths:
        if plain(path).suffix == ".jsonl":
            yield from row_lines(_json_rows(path, text_column))
        elif plain(path).suffix == ".parquet":
            yield from row_lines(parquet_rows(path, text_column))
        else:
            for number, text in enumerate(_text_lines(path)):
                yield text, are_documents and number == 0


def row_lines(rows: Iterable[str]) -> Lines:
    """The lines of rows that are a document each; a line end at the end of a row adds no line."""
    for row in rows:
        for number, text in enumerate(row.removesuffix("\n").split("\n")):
            yield text.removesuffix("\r"), number == 0


def text_row(row: object, text_column: str, place: str) -> str:
    """`row`, which must be a string."""
    if not isinstance(row, str):
        found = "nothing (null)" if row is None else type(row).__name__
        raise LmtrainError(
            f"{place} has {found} in {text_column!r} where text is needed: take the row out, or set data.text_column "
            "or --text-column"
        )
    return row


def no_column(place: str, text_column: str, columns: Iterable[str]) -> LmtrainError:
    """The sentence for a missing text column."""
    found = ", ".join(list(columns)[:20])[:300] or "none"
    found = found if found.isprintable() else ascii(found)
    return LmtrainError(
        f"{place} has no column {text_column!r}: set data.text_column or --text-column to one of its columns ({found})"
    )


def _text_lines(path: Path) -> Iterator[str]:
    offset = number = 0
    try:
        with open_bytes(path) as file:
            while line := file.readline(LONGEST_LINE + 1):
                if len(line) > LONGEST_LINE:
                    raise LmtrainError(
                        f"{path} has a line of over {LONGEST_LINE >> 20} MiB (byte {offset}): break it up"
                    )
                start = len(_BOM) if offset == 0 and line.startswith(_BOM) else 0
                yield line[start:].removesuffix(b"\n").removesuffix(b"\r" if line.endswith(b"\n") else b"").decode()
                offset += len(line)
                number += 1
    except UnicodeDecodeError as error:
        place = offset + start + error.start
        raise LmtrainError(f"{path} is not UTF-8 text (byte {place}): convert it, for example with iconv") from None
    except DAMAGE as error:
        if path.suffix in COMPRESSED and not getattr(error, "errno", None):
            raise LmtrainError(f"{path} is damaged after line {number} ({error}): make or copy it again") from error
        raise LmtrainError(f"{path} can't be read: {getattr(error, 'strerror', None) or error}") from error


def _json_rows(path: Path, text_column: str) -> Iterator[str]:
    for number, line in enumerate(_text_lines(path), start=1):
        if not line.strip():
            continue
        place = f"{path}, line {number},"
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise LmtrainError(f"{place} is not JSON ({error}): each line must be one JSON object") from None
        if not isinstance(row, dict):
            raise LmtrainError(f"{place} is not a JSON object: write it as {{{json.dumps(text_column)}: ...}}")
        if text_column not in row:
            raise no_column(place, text_column, row)
        text = text_row(row[text_column], text_column, place)
        try:
            text.encode()
        except UnicodeEncodeError:
            raise LmtrainError(f"{place} has half a surrogate pair, which is no character: take it out") from None
        yield text


def parquet_rows(path: Path, text_column: str) -> Iterator[str]:
    """The rows of a parquet file's column, with bounded memory. Raises LmtrainError as `read_lines` does."""
    import pyarrow
    from pyarrow.parquet import ParquetFile

    number = 0
    try:
        with open_seekable(path) as seekable, ParquetFile(seekable) as file:
            if text_column not in file.schema_arrow.names:
                raise no_column(str(path), text_column, file.schema_arrow.names)
            for batch in file.iter_batches(batch_size=_rows_at_once(file.metadata, text_column), columns=[text_column]):
                for value in batch.column(0):
                    number += 1
                    place = f"{path}, row {number},"
                    text = text_row(value.as_py(), text_column, place)
                    if len(text) > LONGEST_LINE:
                        raise LmtrainError(f"{place} is longer than {LONGEST_LINE >> 20} MiB: break it up")
                    yield text
    except (pyarrow.ArrowException, *DAMAGE, UnicodeDecodeError) as error:
        reason = str(error).partition("\n")[0].rstrip(".")
        raise LmtrainError(f"{path} can't be read as parquet ({reason}): make or copy it again") from error


def _rows_at_once(metadata: Any, text_column: str) -> int:
    """So few rows that they stay within bounds even if each is the largest: one that is stored once and referred to a
    thousand times makes a gigabyte of a file of a few hundred bytes. No row is larger than the part that it lies in."""
    groups = (metadata.row_group(number) for number in range(metadata.num_row_groups))
    parts = (group.column(number) for group in groups for number in range(metadata.num_columns))
    sizes = (part.total_uncompressed_size for part in parts if part.path_in_schema == text_column)
    return min(_MOST_ROWS, max(_FEWEST_ROWS, _BATCH_BYTES // max(1, max(sizes, default=1))))
