"""Assigns the files of a folder to splits, by their names."""

import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from lmtrain.data.local import CODE, SUFFIXES, kind, plain
from lmtrain.errors import LmtrainError
from lmtrain.storage.files import MANIFEST, read_errors
from lmtrain.storage.run_folder import CHECKPOINTS, CONFIG, METRICS
from lmtrain.system.messages import log

SPLIT_NAMES = {
    "train": "train",
    "training": "train",
    "valid": "valid",
    "validation": "valid",
    "val": "valid",
    "dev": "valid",
    "test": "test",
}
"""The names of splits in file names and on the hub."""

_NUMBER = re.compile(r"[._-]?(\d+)(-of-\d+)?$")
_SHOWN = 3
_RUN = (CONFIG, METRICS)
_WRITTEN = (_RUN, (MANIFEST, "train.docs.npy"), (MANIFEST, "train.bin"), (MANIFEST, "modeling_lmtrain.py"))
"""Files by which a run, a corpus, a token store and an exported model are recognized: they may be inside the folder of
their text."""


def find_splits(folder: Path) -> dict[str, list[Path]]:
    """Return the files of each split in `folder`, in the order of their paths.

    - A file or subfolder belongs to a split if it has the name of one, up to extensions and a number (`train.txt`,
      `DEV.jsonl`, `train-00000-of-00002.parquet`, `test/`), or if names differ in the split only (`wiki.train.tokens`,
      `wiki.valid.tokens`).
    - If none does, all files, also in subfolders, are training text; `strangers-on-a-train.txt` is a book.
    - Hidden names, and folders that lmtrain wrote, are skipped.
    - If all text is in one subfolder, the names inside it count.

    Messages say what is not used. Raises LmtrainError if the folder is a run, or if there is no training text.
    """
    if _holds(folder, _RUN) and (folder / CHECKPOINTS).is_dir():
        raise LmtrainError(f"{folder} is a run, not a text: resume it with `lmtrain train --resume {folder}`")
    every = [*_files(folder, set())]
    texts = [path for path in every if kind(path) in SUFFIXES]
    root = _root(folder, texts)
    splits = _named_splits(root, texts)
    if not splits and texts:
        splits = {"train": texts}
    if "train" not in splits:
        raise LmtrainError(
            f"{root} has no training text: name a file train.txt (or .md, .csv, .jsonl, .parquet), or put all "
            f"training text in a folder {root / 'train'}; found {listed(folder, every) or 'nothing'}"
        )
    for reason, paths in (
        ("files with their extensions are not read in a folder", set(every).difference(texts)),
        ("other files are named after splits", set(texts).difference(*splits.values())),
    ):
        if paths:
            log.info(f"not used in {folder}, since {reason}: {listed(folder, sorted(paths))}")
    return splits


def _root(folder: Path, texts: list[Path]) -> Path:
    """Return the innermost folder that all texts are in, but none inside a folder that is named after a split."""
    while len(inside := {path.relative_to(folder).parts[0] for path in texts}) == 1:
        only = folder / inside.pop()
        if only in texts or only.name.lower() in SPLIT_NAMES:
            break
        folder = only
    return folder


def _named_splits(folder: Path, texts: list[Path]) -> dict[str, list[Path]]:
    """The files of the splits that files in `folder` and its subfolders are named after: not programs (`test.py`), nor
    subfolders that hold nothing else.
    """
    may_name = {path.relative_to(folder).parts[0] for path in texts if kind(path) not in CODE}
    alike: dict[str, dict[str, list[Path]]] = {}
    for path in texts:
        name, *below = path.relative_to(folder).parts
        stem = name if below else plain(path).stem
        parts = re.split("([._-])", _NUMBER.sub("", stem.lower()))
        named = [part for part in parts if part in SPLIT_NAMES]
        if len(named) == 1 and name in may_name:
            rest = "".join("*" if part in SPLIT_NAMES else part for part in parts)
            alike.setdefault(rest, {}).setdefault(SPLIT_NAMES[named[0]], []).append(path)
    splits: dict[str, list[Path]] = {}
    for rest, by_split in alike.items():
        if rest == "*" or len(by_split) > 1:
            for split, paths in by_split.items():
                splits[split] = sorted([*splits.get(split, []), *paths])
    return splits


def name_in(folder: Path, file: Path) -> str:
    """Return the name of a file in the source folder, or of the source file; bytes that are not UTF-8 are escaped."""
    return os.fsencode(file.relative_to(folder) if file != folder else file.name).decode(errors="backslashreplace")


def listed(folder: Path, paths: Sequence[Path]) -> str:
    """Return the names of the first files of a source, and how many there are in all."""
    more = f", ... ({len(paths):,} files)" if len(paths) > _SHOWN else ""
    return ", ".join(name_in(folder, path) for path in paths[:_SHOWN]) + more


def _files(folder: Path, seen: set[Path]) -> Iterator[Path]:
    """Yield the files below a folder, in order, but no hidden ones and none that lmtrain wrote.

    Links to folders are followed. Each folder is read once; those that have been read are added to `seen`.
    """
    seen.add(folder.resolve())
    with read_errors(folder):
        paths = sorted(folder.iterdir())
    for path in paths:
        if path.name.startswith("."):
            continue
        if not path.is_dir():
            yield path
        elif path.resolve() not in seen and not any(_holds(path, names) for names in _WRITTEN):
            yield from _files(path, seen)


def _holds(folder: Path, names: Sequence[str]) -> bool:
    return all((folder / name).is_file() for name in names)
