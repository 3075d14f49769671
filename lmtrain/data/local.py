"""Text in local files: their lines, streamed, from plain text and from rows (JSON, CSV, parquet).

A line comes as (text without its end, whether a document is known to start there). Each row is a document, of one line
or several. Plain text does not say where one starts, except where a split is several files: each of them is a document.
All but parquet may be compressed.
"""

import csv
import json
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from io import BufferedReader, TextIOWrapper
from pathlib import Path
from typing import IO, Any

from lmtrain.errors import LmtrainError

CODE = (
    *(".py", ".c", ".h", ".cc", ".cpp", ".hpp", ".cs", ".java", ".js", ".jsx", ".ts", ".tsx", ".rs", ".go", ".rb"),
    *(".php", ".swift", ".kt", ".scala", ".jl", ".lua", ".sh", ".sql", ".css"),
)
"""The extensions of source code."""
_PROSE = (".txt", ".text", ".md", ".rst", ".org", ".tex", ".html", ".htm", ".tokens", ".raw")
MAX_LINE_LENGTH = 256 << 20
"""Characters: a longer line is rejected, because later steps hold a line in memory."""

COMPRESSED = {".gz": "gzip", ".bz2": "bz2", ".zst": "zstd"}
"""The names that pyarrow has for the compression of files with these extensions."""

_ROWS = 32
"""Rows of a parquet file that are decoded at once: each may be long, and stored once for many of them."""


def plain(path: Path) -> Path:
    """The path without the extension of its compression."""
    return path.with_suffix("") if path.suffix.lower() in COMPRESSED else path


def kind(path: Path) -> str:
    """The extension that says what a file holds, one of `SUFFIXES` or any other."""
    return plain(path).suffix.lower()


def text_lines(text: str) -> Iterator[tuple[str, bool]]:
    """Return the lines of a text in the form of `read_lines`; a text does not say where documents start.

    Raises LmtrainError if it has a lone surrogate.
    """
    check_unicode(text, "the text")
    return ((line, False) for line in _lines(text.removeprefix("\ufeff")))


def read_lines(paths: Sequence[Path], text_column: str) -> Iterator[tuple[str, bool]]:
    """Yield the lines of `paths`, one file after the other, with bounded memory.

    A line ends with "\\n", "\\r\\n" or "\\r"; the last line of a file needs no end. A byte order mark at the start of a
    file is not text. A NUL byte is rejected, as a sign of another encoding; other control characters are text. Raises
    LmtrainError, naming the file and the line or row, if the content can't be read.
    """
    for path in paths:
        if not os.path.isfile(path):  # noqa: PTH113 -- Path.is_file raises OSError for a name that is too long
            raise LmtrainError(f"{path} is not a text file: name an existing file")
        if kind(path) in READERS:
            yield from row_lines(READERS[kind(path)](path, text_column))
        else:
            for number, text in enumerate(file_lines(path)):
                yield text, len(paths) > 1 and number == 0


def row_lines(rows: Iterable[str]) -> Iterator[tuple[str, bool]]:
    """Return the lines of rows, each of which is a document; a line end at the end of a row adds no line."""
    return ((text, number == 0) for row in rows for number, text in enumerate(_lines(row)))


def with_newlines(text: str) -> str:
    """Return the text with a newline at each line end, where it may have "\\r\\n" or "\\r"."""
    return text.replace("\r\n", "\n").replace("\r", "\n")


def _lines(text: str) -> list[str]:
    """The lines of a text without their ends; the last line needs no end."""
    return with_newlines(text).removesuffix("\n").split("\n")


def _text_row(row: object, text_column: str, place: str) -> str:
    """Return `row`. Raises LmtrainError, naming its `place`, if it is not a string, too long, or not Unicode."""
    if not isinstance(row, str):
        value = "nothing (null)" if row is None else type(row).__name__
        raise LmtrainError(
            f"{place} has {value} in {text_column!r} where text is needed: take the row out, or, in a corpus, set "
            "data.text_column"
        )
    if len(row) > MAX_LINE_LENGTH:
        raise LmtrainError(f"{place} is longer than {MAX_LINE_LENGTH >> 20} MiB: break it up")
    check_unicode(row, place)
    return row


def check_unicode(text: str, place: str) -> None:
    """Raise LmtrainError if a text has a lone surrogate, which a str and JSON can hold and a file of text can't."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise LmtrainError(
            f"{place} has a lone surrogate at character {error.start}: it is not Unicode text, so remove it"
        ) from None


def _check_column(place: str, text_column: str, columns: Collection[str]) -> None:
    """Raise LmtrainError if the text column is none of the columns."""
    if text_column not in columns:
        names = ", ".join(map(repr, columns))[:300] or "none"
        raise LmtrainError(
            f"{place} has no column {text_column!r}: name one of its columns ({names}) with data.text_column=NAME, or, "
            "for prompts, rename it"
        )


def _open(path: Path) -> IO[bytes]:
    """Open a file to read its uncompressed content from beginning to end."""
    compression = COMPRESSED.get(path.suffix.lower())
    if compression is None:
        return path.open("rb", buffering=1 << 20)
    import pyarrow

    stream: Any = pyarrow.CompressedInputStream(pyarrow.OSFile(os.fsencode(path)), compression)
    return BufferedReader(stream, 1 << 20)


def file_lines(path: Path, file: IO[bytes] | None = None) -> Iterator[str]:
    """Yield the lines of plain text in `path`, or in an open `file`, which messages call `path`."""
    number = 0
    try:
        with TextIOWrapper(file or _open(path), encoding="utf-8-sig") as lines:
            while line := lines.readline(MAX_LINE_LENGTH + 1):
                if len(line) > MAX_LINE_LENGTH:
                    raise LmtrainError(
                        f"{path} has a line of over {MAX_LINE_LENGTH >> 20} MiB{_after(number)}: break it up"
                    )
                if "\0" in line:  # as in UTF-16, and in archives
                    raise UnicodeError
                number += 1
                yield line.removesuffix("\n")
    except UnicodeError:
        raise LmtrainError(
            f"{path} is not plain text in UTF-8{_after(number)}: convert it, for example with iconv -f UTF-16 -t UTF-8,"
            " remove NUL bytes, unpack it if it is an archive, or export it as plain text"
        ) from None
    except OSError as error:
        reason = error.strerror or error
        raise LmtrainError(
            f"{path} can't be read{_after(number)} ({reason}): make it readable, or copy it again if it is damaged"
        ) from error


def _after(number: int) -> str:
    return f" after line {number}" if number else ""


def _json_rows(path: Path, text_column: str) -> Iterator[str]:
    """The texts of JSON lines, or of one array of objects, which is held in memory."""
    lines = file_lines(path)
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        is_array = kind(path) == ".json" and line.lstrip().startswith("[")
        content = "\n".join([line, *lines]) if is_array else line
        place = f"{path}, line {number},"
        try:
            value = json.loads(content)
        except (ValueError, RecursionError) as error:
            rule = "it must be an array of objects" if is_array else "each line must be one JSON object"
            raise LmtrainError(f"{place} is not JSON ({error}): {rule}") from None
        for index, row in enumerate(value if is_array else [value]):
            place = f"{path}, item {index}," if is_array else place
            if not isinstance(row, dict):
                raise LmtrainError(f"{place} is not a JSON object: write it as {{{json.dumps(text_column)}: ...}}")
            _check_column(place, text_column, row)
            yield _text_row(row[text_column], text_column, place)


def _csv_rows(path: Path, text_column: str) -> Iterator[str]:
    """The texts of a table with a header row; quoted fields may have line ends in them."""
    csv.field_size_limit(MAX_LINE_LENGTH)
    delimiter = "\t" if kind(path) == ".tsv" else ","
    reader = csv.reader((f"{line}\n" for line in file_lines(path)), delimiter=delimiter, strict=True)
    try:
        rows = filter(None, reader)  # an empty line is no row
        header = next(rows, [])
        _check_column(str(path), text_column, header)
        column = header.index(text_column)
        for row in rows:
            if len(row) != len(header):
                raise LmtrainError(
                    f"{path}, line {reader.line_num}, has {len(row)} fields, but its header {len(header)}: put quotes "
                    "around a text that contains separators"
                )
            yield row[column]
    except csv.Error as error:
        raise LmtrainError(
            f"{path}, line {reader.line_num}, is not well-formed ({error}): put quotes around a text with quotes or "
            "line ends in it, and double the quotes inside"
        ) from None


def _parquet_rows(path: Path, text_column: str) -> Iterator[str]:
    import pyarrow
    from pyarrow.parquet import ParquetFile

    try:
        with pyarrow.OSFile(os.fsencode(path)) as source, ParquetFile(source) as file:
            _check_column(str(path), text_column, file.schema_arrow.names)
            yield from column_rows(file.iter_batches(_ROWS, columns=[text_column]), text_column, str(path))
    except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:
        reason = str(error).partition("\n")[0].rstrip(".")
        raise LmtrainError(f"{path} can't be read as parquet ({reason}): make or copy it again") from error


def column_rows(batches: Iterable[Any], text_column: str, place: str) -> Iterator[str]:
    """Yield the texts of a column of Arrow batches or tables."""
    number = 0
    for batch in batches:
        _check_column(place, text_column, batch.column_names)
        for value in batch.column(batch.column_names.index(text_column)):  # the first one of this name, as in a .csv
            number += 1
            where = f"{place}, row {number},"
            try:
                row = value.as_py()
            except UnicodeDecodeError:
                raise LmtrainError(f"{where} is not UTF-8 text: take the row out, or convert it") from None
            yield _text_row(row, text_column, where)


READERS: dict[str, Callable[[Path, str], Iterator[str]]] = {
    ".csv": _csv_rows,
    ".tsv": _csv_rows,
    ".json": _json_rows,
    ".jsonl": _json_rows,
    ".parquet": _parquet_rows,
}
"""The files that hold rows, by their extensions; all others are plain text."""

SUFFIXES = (*_PROSE, *(suffix for suffix in READERS if suffix != ".json"), *CODE)
"""The extensions of files that are read in a folder, before that of a compression; a single file may have any. Most
.json files in folders hold settings."""
