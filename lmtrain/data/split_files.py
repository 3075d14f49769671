"""Assigns the files of a folder to splits, by their names."""

import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from lmtrain.data.local import CODE, SHARD, SUFFIXES, kind, plain
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
    """Return the files of each split in `folder`.

    - A file belongs to a split if it has the name of one, up to extensions and a number (`train.txt`, `DEV.jsonl`,
      `train-00000-of-00002.parquet`), or if names differ in the split only (`wiki.train.tokens`, `wiki.valid.tokens`).
    - So does every file below a subfolder with such a name (`train/1/a.jsonl.gz`).
    - If no file or subfolder is named after a split, all files, also in subfolders, are training text, in the order of
      their paths; `strangers-on-a-train.txt` is a book.
    - Hidden names, and folders that lmtrain wrote, are skipped.
    - If all text is in one subfolder, the names inside it count.

    Messages say what is not used. Raises LmtrainError if the folder is a run, if there is no training text, if two
    files or folders claim one split, if a shard of a named split is missing, or if a link leads to a missing file.
    """
    if _holds(folder, _RUN) and (folder / CHECKPOINTS).is_dir():
        raise LmtrainError(f"{folder} is a run, not a text: resume it with `lmtrain train --resume {folder}`")
    every = [*_files(folder, set())]
    named = [path for path in every if kind(path) in SUFFIXES]
    for path in named:
        reject_dangling(path)
    by_inode = {(path.stat().st_dev, path.stat().st_ino): path for path in reversed(named)}
    texts = sorted(by_inode.values())  # each file under the first of its names: a link to it is the same text
    root = _root(folder, texts)
    splits = _named_splits(root, texts)
    if not splits and texts:
        splits = {"train": texts}
        if held_out := [path for path in texts if {"valid", "test"}.intersection(map(SPLIT_NAMES.get, _parts(path)))]:
            advice = f"read as training text; to have splits, name files or folders in {root} train, valid and test"
            log.info(f"{listed(folder, held_out)}: {advice}")
    if "train" not in splits:
        raise LmtrainError(
            f"{root} has no training text: name a file train.txt (or .md, .csv, .jsonl, .parquet), or put all "
            f"training text in a folder {root / 'train'}; found {listed(folder, every) or 'nothing'}"
        )
    for reason, paths in (
        ("files with their extensions are not read in a folder", set(every).difference(named)),
        ("other files are named after splits", set(texts).difference(*splits.values())),
        ("they are links to other files", set(named).difference(texts)),
    ):
        if paths:
            log.info(f"not used in {folder}, since {reason}: {listed(folder, sorted(paths))}")
    if empty := [path for paths in splits.values() for path in paths if path.stat().st_size == 0]:
        log.info(f"empty in {folder}: {listed(folder, empty)}")
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
    """The files of the splits that files in `folder` and its subfolders are named after."""
    named = _by_name([path for path in texts if path.parent == folder])
    splits = {split: _in_order(folder, split, paths) for split, paths in named.items()}
    subfolders = {path.relative_to(folder).parts[0] for path in texts if path.parent != folder and _may_name(path)}
    for name in sorted(subfolders):
        split = SPLIT_NAMES.get(name.lower())
        if split is None:
            continue
        if other := splits.get(split):
            both = f"{name_in(folder, other[0])} and {name}/"
            raise LmtrainError(f"{folder} has its {split} split in two places, {both}: keep one of them")
        splits[split] = [path for path in texts if path.is_relative_to(folder / name)]
    for split, paths in splits.items():
        _reject_missing_shards(folder, split, paths)
    return splits


def name_in(folder: Path, file: Path) -> str:
    """Return the name of a file in the source folder, or of the source file; bytes that are not UTF-8 are escaped."""
    return os.fsencode(file.relative_to(folder) if file != folder else file.name).decode(errors="backslashreplace")


def reject_dangling(path: Path) -> None:
    """Raise LmtrainError if a path is a link to a missing file: ignoring it would lose text silently."""
    if path.is_symlink() and not path.exists():
        raise LmtrainError(f"{path} is a broken link: fix it or delete it")


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


def _may_name(path: Path) -> bool:
    """Whether the names of a file and its folders may be those of splits: `test.py` and `test/a.c` are programs."""
    return kind(path) not in CODE


def _parts(path: Path) -> list[str]:
    """The parts of the name of a file that may be named after a split, without its extensions and number."""
    return re.split("([._-])", _NUMBER.sub("", plain(path).stem.lower())) if _may_name(path) else []


def _by_name(paths: list[Path]) -> dict[str, list[Path]]:
    """The files that are named after a split."""
    alike: dict[str, dict[str, list[Path]]] = {}
    for path in paths:
        parts = _parts(path)
        words = [part for part in parts if part in SPLIT_NAMES]
        if len(words) == 1:
            rest = "".join("*" if part in SPLIT_NAMES else part for part in parts)
            alike.setdefault(rest, {}).setdefault(SPLIT_NAMES[words[0]], []).append(path)
    splits: dict[str, list[Path]] = {}
    for rest, by_split in alike.items():
        if rest == "*" or len(by_split) > 1:
            for split, files in by_split.items():
                splits.setdefault(split, []).extend(files)
    return splits


def _in_order(folder: Path, split: str, paths: list[Path]) -> list[Path]:
    """The files of a split in order: one, or all the numbered parts of one."""
    numbers = {path: int(match[1]) for path in paths if (match := _NUMBER.search(plain(path).stem))}
    if len(paths) > 1 and (len({*numbers.values()}) < len(paths) or len({kind(path) for path in paths}) > 1):
        names = " and ".join(path.name for path in paths)
        raise LmtrainError(
            f"{folder} has several files for its {split} split, {names}: keep one of them, or number them all and "
            "give them one extension"
        )
    return sorted(paths, key=lambda path: numbers.get(path, 0))


def _reject_missing_shards(folder: Path, split: str, paths: list[Path]) -> None:
    """Raise LmtrainError if a file of a split is one of several, `part-00000-of-00003.txt`, and not all exist."""
    shards: dict[tuple[Path, str, int], list[int]] = {}
    for path in paths:
        if match := SHARD.search(stem := plain(path).stem):
            file_set = path.parent / stem[: match.start()], kind(path), int(match[2])
            shards.setdefault(file_set, []).append(int(match[1]))
    for (_, _, total), numbers in shards.items():
        if len(numbers) != total or sorted(numbers) != list(range(total)):
            raise LmtrainError(
                f"{folder} has {len(numbers)} of the {total} files of its {split} split: it needs those numbered 0 to "
                f"{total - 1}, each once"
            )
