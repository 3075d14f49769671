"""The splits of a corpus: the lines of each in one text file, the line numbers of its documents in one array.

`<split>.txt` is UTF-8, every line ended by a newline; `<split>.docs.npy` holds int64 line numbers, the first of them 0.
"""

import re
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import numpy as np
from pydantic import BaseModel, NonNegativeInt, PositiveInt, ValidationError
from tqdm import tqdm

from lmtrain.errors import LmtrainError
from lmtrain.storage.files import MANIFEST, read_errors, read_manifest, verify
from lmtrain.system.messages import log, shows_bars

_HEADING = re.compile(r" ?= [^=\s](?:.*[^=\s])? = ?")
MAX_LINE = 1 << 17
"""Characters of a line in a corpus, at most."""
_PART = re.compile(rf".{{1,{MAX_LINE}}}(?:(?<=\s)|$)|.{{{MAX_LINE}}}")

SHARE = 0.05
"""The part of a text that is cut off for a validation or test split."""
HELD_OUT = 25_000_000
"""Bytes of a larger text that are cut off for one: scoring more takes long, for the same answer."""

Lines = Iterable[tuple[str, bool]]
"""Lines of text without their ends, and whether a document is known to start there."""
SplitName = Literal["train", "valid", "test"]


class Counts(BaseModel, strict=True, extra="forbid"):
    """The counts of a split; see `write_split`."""

    lines: PositiveInt
    words: NonNegativeInt
    bytes: PositiveInt
    documents: PositiveInt


class SplitsManifest(BaseModel, strict=True):
    """What is read in the manifest of a corpus, and of a token store too."""

    splits: Mapping[SplitName, Counts]


def read_splits_manifest(
    folder: Path, folder_format: str, suffixes: Sequence[str], form: type[SplitsManifest] = SplitsManifest
) -> dict[str, Any]:
    """Return the manifest as `read_manifest` does, if the files have their hashes.

    The entries must be those of `form`, since anybody can compute a manifest's hash. Each split must have files with
    its name and each of these `suffixes`.
    """
    manifest = read_manifest(folder, folder_format)
    try:
        splits = form.model_validate(manifest).splits
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"]))[:99]
        raise LmtrainError(f"{folder / MANIFEST} is damaged: {place}: {first['msg']}") from None
    files = {f"{split}{suffix}" for split in splits for suffix in suffixes}
    if "train" not in splits or not files <= manifest["files"].keys():
        raise LmtrainError(f"{folder / MANIFEST} is damaged: it lacks the training split or a file")
    verify(folder, manifest["files"])
    return manifest


@dataclass(frozen=True)
class Text:
    """The text of a source: the lines of its splits, and entries `about` it for the manifest of the corpus."""

    splits: Mapping[str, Lines]
    about: dict[str, Any]
    is_one_file: bool = False


def write_split(folder: Path, split: str, lines: Lines, label: str) -> dict[str, int]:
    """Write a split and return its counts: lines, words (between whitespace), bytes (with newlines), documents.

    A line of more than `MAX_LINE` characters is broken, after whitespace if there is any, so that later steps take each
    line at once. Documents start at WikiText's level-one headings (` = Title = ` between blank lines), if there are any
    and no row of the source has several lines; else where the source's rows start; else the split is one document.
    Memory grows with the documents and the longest line, not with the text. Raises LmtrainError if the split has no
    words; `label` is its name in the message.
    """
    starts, headings = array("q"), array("q")
    words = size = 0
    number = first_text = heading = -1
    after_blank = True
    with (folder / f"{split}.txt").open("wb", buffering=1 << 20) as file:
        bar = tqdm(_broken(lines), desc=split, unit=" lines", unit_scale=True, disable=not shows_bars(), delay=0.5)
        for number, (text, starts_document) in enumerate(bar):
            size += file.write(text.encode() + b"\n")
            line_words = len(text.split())
            if starts_document:
                starts.append(number)
            if heading >= 0 and line_words == 0:
                headings.append(heading)
            heading = number if after_blank and _HEADING.fullmatch(text) else -1
            after_blank = line_words == 0
            first_text = number if first_text < 0 and line_words else first_text
            words += line_words
    if words == 0:
        raise LmtrainError(f"{label} has no words: give it some text")
    if headings and len(starts) in (0, number + 1):
        starts = headings
    if not starts or starts[0] > first_text:
        starts.insert(0, 0)
    starts[0] = 0
    np.save(folder / f"{split}.docs.npy", np.asarray(starts, dtype=np.int64))
    return {"lines": number + 1, "words": words, "bytes": size, "documents": len(starts)}


def lines_of(text: Path) -> Iterator[str]:
    """Yield the lines of a split's text, each with its line end."""
    with read_errors(text), text.open(encoding="utf-8", newline="\n") as file:
        yield from file


def document_starts(text: Path) -> np.ndarray:
    """Return the lines at which the documents of a split start: (documents,) int64."""
    path = text.with_suffix(".docs.npy")
    try:
        starts = np.array(np.load(path, mmap_mode="r"))  # a map, since a header may claim any size
    except Exception as error:  # of many types: NumPy parses the header as Python
        raise LmtrainError(f"{path} can't be read ({type(error).__name__})") from error
    if starts.ndim != 1 or starts.dtype != np.int64:
        raise LmtrainError(f"{path} is damaged: it is not a list of line numbers")
    return starts


def cut_split(folder: Path, lines: Lines, splits: Sequence[str], source: str) -> dict[str, dict[str, int]]:
    """Write `lines` as several `splits`, in order, all but the first with `SHARE` of the documents or lines.

    Cuts fall between documents, unless a share is less than one of them, or their lengths differ so much that the
    documents of a share have less than half or more than twice its bytes; then between lines. If `SHARE` of the text is
    more than `HELD_OUT` bytes, a share is the fraction that these are of the text.

    Return the counts of each split. Raises LmtrainError if one has no words, or if the text has no place for cuts.
    """
    path = folder / "whole.txt"
    whole = write_split(folder, "whole", lines, source)
    starts = document_starts(path)
    share = min(SHARE, HELD_OUT / whole["bytes"])
    parts = dict.fromkeys(splits, share) | {splits[0]: 1 - share * (len(splits) - 1)}
    ends = np.cumsum(list(parts.values()))[:-1]
    bounds: list[int] = []
    if share * len(starts) >= 1:
        bounds = starts[np.round(ends * len(starts)).astype(int)].tolist()
    unit = "documents"
    if not bounds or not all(0.5 <= size / (share * whole["bytes"]) <= 2 for size in _bytes_from(path, bounds)):
        unit, bounds = "lines", np.round(ends * whole["lines"]).astype(int).tolist()
        if share * whole["lines"] < 1 or _longest_line(path) > 2 * SHARE * whole["bytes"]:
            raise LmtrainError(
                f"{source} can't be split, since it has few lines, or one that is over a tenth of it: break its lines, "
                "for example with fold -s, or give a folder with a file for each split"
            )
    percent = ", ".join(f"{100 * part:.3g}% {split}" for split, part in parts.items())
    log.info(f"no validation split: the {unit} are split, in order, into {percent}")
    is_start = np.zeros(whole["lines"], bool)
    is_start[starts] = True
    counts, text = {}, lines_of(path)
    for split, begin, end in zip(splits, [0, *bounds], [*bounds, whole["lines"]], strict=True):
        part = zip((line[:-1] for line in islice(text, end - begin)), is_start[begin:end].tolist(), strict=True)
        label = f"the {split} split, cut from {source} at a line end, which could be a file of its own,"
        counts[split] = write_split(folder, split, part, label)
    path.unlink()
    path.with_suffix(".docs.npy").unlink()
    return counts


def _bytes_from(path: Path, bounds: Sequence[int]) -> list[int]:
    """The bytes of the parts of a text that begin at these lines, each of which ends where the next one begins."""
    lines = [*np.diff(bounds, prepend=0).tolist(), None]  # in what is before the first part, and in each part
    with path.open("rb") as file:
        return [sum(map(len, islice(file, count))) for count in lines][1:]


def _longest_line(path: Path) -> int:
    with path.open("rb") as file:
        return max(map(len, file))


def _broken(lines: Lines) -> Lines:
    """The lines, of which those of more than `MAX_LINE` characters are broken."""
    for line in lines:
        if len(line[0]) <= MAX_LINE:
            yield line
            continue
        first, *others = _PART.findall(line[0])
        yield first, line[1]
        yield from ((part, False) for part in others)
