"""Which files of a folder are which split, by their names."""

import re
from collections.abc import Callable, Sequence
from pathlib import Path

from lmtrain.data.local import SHARD, SPLIT_NAMES, is_text, name_in, plain, reject_dangling
from lmtrain.errors import LmtrainError

_NUMBER = re.compile(r"[._-]?\d+(-of-\d+)?$")
_SHOWN = 3


def find_splits(folder: Path, note: Callable[[str], None] = lambda _message: None) -> dict[str, list[Path]]:
    """The files of each split in `folder`.

    A file belongs to a split when its name, up to endings and a number, is one of a split (`train.txt`, `DEV.jsonl`,
    `train-00000-of-00002.parquet`), or when names differ in the split only (`wiki.train.tokens` and
    `wiki.valid.tokens`). So do all files in a folder of such a name (`train/a.jsonl.xz`). Where no name is one of a
    split, all files are training text, in the order of their names: `strangers-on-a-train.txt` is a book. `note`
    receives the names of what is not used. Raises LmtrainError when there is no training text, when two files or
    folders claim one split, when a shard is missing, or where a link leads to no file.
    """
    texts = _texts(folder)
    named, similar = _by_name(texts)
    splits = {split: _in_order(folder, split, paths) for split, paths in named.items()}
    for place in sorted(path for path in folder.iterdir() if path.is_dir() and path.name.lower() in SPLIT_NAMES):
        split = SPLIT_NAMES[place.name.lower()]
        if other := splits.get(split):
            found = f"{other[0].relative_to(folder)} and {place.name}/"
            raise LmtrainError(f"{folder} has its {split} split in two places, {found}: keep one of them")
        if paths := _once(_texts(place)):
            splits[split] = paths
    if not splits and texts:
        splits = {"train": _once(texts)}
        if similar:
            advice = "read as training text; name a file valid.txt or test.txt to have it as that split"
            note(f"{_names(folder, similar)}: {advice}")
    if "train" not in splits:
        found = ", ".join(sorted(path.name for path in folder.iterdir())[:8]) or "nothing"
        raise LmtrainError(
            f"{folder} has no training text: name a file train.txt (or .tokens, .jsonl, .parquet), or put all training "
            f"text in a folder {folder / 'train'}; found {found}"
        )
    if unused := _unused(folder, splits):
        note(f"not used in {folder}: {_names(folder, unused)}")
    return splits


def listed(names: Sequence[str]) -> str:
    """The first names, and how many others there are."""
    others = len(names) - _SHOWN
    return ", ".join(names[:_SHOWN]) + (f" and {others:,} more" if others > 0 else "")


def _names(folder: Path, paths: list[Path]) -> str:
    return listed([name_in(folder, path) + "/" * path.is_dir() for path in paths])


def _texts(folder: Path) -> list[Path]:
    """The text files in a folder in the order of their names."""
    paths = [path for path in sorted(folder.iterdir()) if is_text(path) and not path.name.startswith(".")]
    for path in paths:
        reject_dangling(path)
    return [path for path in paths if path.is_file()]


def _by_name(paths: list[Path]) -> tuple[dict[str, list[Path]], list[Path]]:
    """The files that are named after a split, and others whose names contain a word for held-out text."""
    alike: dict[str, dict[str, list[Path]]] = {}
    for path in paths:
        parts = re.split("([._-])", _NUMBER.sub("", plain(path).stem.lower()))
        words = [part for part in parts if part in SPLIT_NAMES]
        if len(words) == 1:
            rest = "".join("*" if part in SPLIT_NAMES else part for part in parts)
            alike.setdefault(rest, {}).setdefault(SPLIT_NAMES[words[0]], []).append(path)
    splits: dict[str, list[Path]] = {}
    similar: list[Path] = []
    for rest, found in alike.items():
        for split, own in found.items():
            if rest == "*" or len(found) > 1:
                splits.setdefault(split, []).extend(own)
            elif split != "train":
                similar += own
    return splits, similar


def _once(paths: list[Path]) -> list[Path]:
    """Each file under the first of its names: a link to another one of them is the same text."""
    files: dict[tuple[int, int], Path] = {}
    for path in paths:
        status = path.stat()
        files.setdefault((status.st_dev, status.st_ino), path)
    return list(files.values())


def _in_order(folder: Path, split: str, paths: list[Path]) -> list[Path]:
    """The files of a split in order: one, or all the numbered parts of one."""
    numbers = {path: match for path in paths if (match := _NUMBER.search(plain(path).stem))}
    if len(paths) > 1 and (len(numbers) < len(paths) or len({path.suffix.lower() for path in paths}) > 1):
        names = " and ".join(path.name for path in paths)
        raise LmtrainError(
            f"{folder} has several files for its {split} split, {names}: keep one of them, or number them all"
        )
    shards = [match for path in paths if (match := SHARD.search(plain(path).stem))]
    if shards:
        total = int(shards[0][2])
        if total != len(paths) or sorted(int(match[1]) for match in shards) != list(range(total)):
            raise LmtrainError(f"{folder} has {len(paths)} of the {total} files of its {split} split: get the others")
    return sorted(paths, key=lambda path: int(re.findall(r"\d+", numbers[path][0])[0]) if len(paths) > 1 else 0)


def _unused(folder: Path, splits: dict[str, list[Path]]) -> list[Path]:
    """What is in the folder, or in those of splits, and in no split; hidden files are not counted."""
    used = {path for paths in splits.values() for path in paths}
    folders = {folder, *(path.parent for path in used)}
    found = (path for place in sorted(folders) for path in sorted(place.iterdir()))
    return [path for path in found if path not in used | folders and not path.name.startswith(".")]
