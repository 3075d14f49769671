"""The corpus: the text of a source in one form, a folder that every tokenizer and every run reads alike.

A corpus folder holds for each split `<split>.txt`, UTF-8 lines that each end with a newline, and `<split>.docs.npy`,
the int64 line numbers at which documents start, and a manifest with the counts, the license and where the text is from.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lmtrain.config.schema import DataConfig
from lmtrain.data.sample import SampleSplit
from lmtrain.data.sources import find_source
from lmtrain.data.splits import Text, cut_split, read_splits_manifest, write_split
from lmtrain.errors import LmtrainError
from lmtrain.storage.files import MANIFEST, new_folder, read_errors, recover, sha256_bytes
from lmtrain.system.messages import log

FORMAT = "lmtrain-corpus/1"
_SPLITS = ("train", "valid", "test")
_OWN_FILE = re.compile(r"(train|valid|test)\.(txt|docs\.npy|bin)|(tokenizer|manifest)\.json")
"""The names of the files of corpora and token stores."""


@dataclass(frozen=True)
class Corpus:
    """A corpus folder, open for reading."""

    folder: Path
    manifest: dict[str, Any]

    @property
    def splits(self) -> dict[str, dict[str, int]]:
        """The counts of `train`, `valid` and, if there is one, `test`."""
        return self.manifest["splits"]

    @property
    def sha256(self) -> str:
        """What identifies the text: a hash over the hashes of the splits' files."""
        files = self.manifest["files"]
        return sha256_bytes("".join(f"{name} {files[name]['sha256']}\n" for name in sorted(files)).encode())


def open_corpus(folder: Path) -> Corpus:
    """Open a corpus folder and check its content. Raises LmtrainError when it is missing, foreign or changed."""
    return Corpus(folder, read_splits_manifest(folder, FORMAT, (".txt", ".docs.npy")))


def make_corpus(data: DataConfig) -> Corpus:
    """Return the corpus of `data.source`: an existing one if source and content are unchanged, else a new one.

    What killed processes left unfinished in `data.dir` is deleted first.
    Raises LmtrainError if anything is wrong with the source, the network or the disk.
    """
    recover(data.dir)
    source = find_source(data)
    folder = data.dir / source.folder
    corpus: Corpus | None = existing(folder, open_corpus, {"origin": source.origin})
    if corpus is not None:
        return corpus
    log.info(f"making corpus {folder} from {data.source}")
    text = source.read()
    info = {"source": data.source, "origin": source.origin, **text.about}
    with new_folder(folder, FORMAT, info) as temporary:
        info["splits"] = _write(temporary, text, data.source)
        if floor := {split: own.floor() for split, own in text.splits.items() if isinstance(own, SampleSplit)}:
            info["floor"] = floor
    return open_corpus(folder)


def existing(folder: Path, open_folder: Callable[[Path], Any], entries: dict[str, Any]) -> Any:
    """Return the corpus or token store in `folder` if it can be opened and its manifest has these entries; None if it
    is to be made, or made again, for a reason that a message names.

    Raises LmtrainError if the folder holds other files, or if the system does not say whether there is one.
    """
    reason = "its source or configuration has changed"
    try:
        found = open_folder(folder)
        if entries.items() <= found.manifest.items():
            return found
    except LmtrainError as error:
        reason = str(error)
    with read_errors(folder):
        _reject_foreign(folder)
        if (folder / MANIFEST).exists():
            log.info(f"making {folder} again: {reason}")
    return None


def _reject_foreign(folder: Path) -> None:
    """Raise LmtrainError unless `folder`, which would be replaced, is missing, empty, a corpus or a token store."""
    if not folder.exists():
        return
    paths = [*folder.iterdir()] if folder.is_dir() else [folder]
    files = {path.name for path in paths if path.is_file()}
    if paths and (MANIFEST not in files or len(files) < len(paths) or not all(map(_OWN_FILE.fullmatch, files))):
        raise LmtrainError(f"{folder} holds files that lmtrain didn't write: move them away or change data.dir")


def _write(folder: Path, text: Text, source: str) -> dict[str, dict[str, int]]:
    """Write the splits and return their counts.

    Without a validation split, `cut_split` splits one off the training text. A single file is cut into train, valid and
    test.
    """
    lines, counts = dict(text.splits), {}
    if "valid" not in lines:
        splits = _SPLITS if text.is_one_file else ("train", "valid")
        counts = cut_split(folder, lines.pop("train"), splits, source)
    for split, own in lines.items():
        counts[split] = write_split(folder, split, own, f"the {split} split of {source}")
    return {split: counts[split] for split in _SPLITS if split in counts}
