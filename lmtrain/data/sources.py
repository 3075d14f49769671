"""What `data.source` names: the built-in sample, a corpus of the hub, or local text; and how its lines are read."""

import json
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lmtrain.config.schema import DataConfig
from lmtrain.data import local
from lmtrain.data.hub import fetch
from lmtrain.data.sample import SampleSplit
from lmtrain.data.split_files import find_splits, listed, name_in
from lmtrain.data.splits import Text
from lmtrain.errors import LmtrainError, UsageError
from lmtrain.storage.files import read_errors, sha256_bytes, sha256_file
from lmtrain.system.messages import log

_WIKITEXT = "Salesforce/wikitext"
_WIKITEXT_REVISION = "b08601e04326c79dfdd32d625aee71d232d685c3"
_WIKITEXT_SUBSETS = {
    "wikitext-2": "wikitext-2-v1",
    "wikitext-2-raw": "wikitext-2-raw-v1",
    "wikitext-103": "wikitext-103-v1",
}
KNOWN = ("sample", *_WIKITEXT_SUBSETS)
"""Names that mean the same on all machines."""

_NOT_NAME = re.compile(r"[^\w.-]")
_HUB_ID = re.compile(r"\w[\w.-]*/[\w.-]+", re.ASCII)

_SAMPLE_SEEDS = {"train": 1, "valid": 2, "test": 3}


@dataclass(frozen=True)
class Source:
    """Where the text of a corpus comes from.

    `folder` is the name of the corpus's folder: a known name, a hub id, or the start of a path's name with a hash of
    its content, so that a changed text does not replace the one that a run was trained on. `origin` identifies the
    state of the source, without the network. `read` returns the text.
    """

    folder: str
    origin: dict[str, Any]
    read: Callable[[], Text]


def find_source(data: DataConfig) -> Source:
    """Return the source that `data.source` names: a known name, else an existing path, else a hub id.

    Raises LmtrainError if it is none of these, or a file or folder that can't be used, and UsageError if a field is set
    that has no meaning with the source.
    """
    if data.source == "sample":
        _reject_fields(data, "subset", "revision")
        return _sample(data)
    if data.source in KNOWN:
        _reject_fields(data, "subset")
        return _hub(data, _WIKITEXT, _WIKITEXT_SUBSETS[data.source], data.revision or _WIKITEXT_REVISION)
    if path := local_path(data.source):
        _reject_fields(data, "subset", "revision")
        return _local(path, data)
    if not _HUB_ID.fullmatch(data.source) or local.kind(Path(data.source)) in (*local.SUFFIXES, *local.READERS):
        raise LmtrainError(
            f"data.source={data.source[:200]} is not a file or folder here, not a hub id (owner/name) and none of "
            f"{', '.join(KNOWN)}"
        )
    return _hub(data, data.source, data.subset, data.revision)


def _reject_fields(data: DataConfig, *names: str) -> None:
    for name in names:
        if getattr(data, name) is not None:
            raise UsageError(
                f"data.{name} has no meaning with data.source={data.source}: leave it out, or set it to null"
            )


def local_path(source: str) -> Path | None:
    """Return the file or folder that `data.source` names; None for a known name, a hub id, or a missing path."""
    path = os.path.expanduser(source)  # noqa: PTH111 -- leaves an unknown ~user as it is
    return Path(path) if source not in KNOWN and os.path.exists(path) else None  # noqa: PTH110 -- of any length


def _local(path: Path, data: DataConfig) -> Source:
    is_one_file = not path.is_dir()
    if is_one_file:
        files = {"train": [path]}
    else:
        with read_errors(path):
            files = find_splits(path)
    hashes = {file: sha256_file(file) for paths in files.values() for file in paths}
    column = data.text_column if any(local.kind(file) in local.READERS for file in hashes) else None
    by_split = {split: {name_in(path, file): hashes[file] for file in paths} for split, paths in files.items()}
    # A file and a folder with only this file differ: one is split 90/5/5, the other 95/5.
    origin = {"files": by_split["train"] if is_one_file else by_split, "text_column": column}

    def read() -> Text:
        for split, paths in files.items():
            log.info(f"{split} split: {listed(path, paths)}")
        splits = {split: local.read_lines(paths, data.text_column) for split, paths in files.items()}
        return Text(splits, {}, is_one_file)

    name = _NOT_NAME.sub("_", path.resolve().stem.lstrip("."))[:50]
    return Source(f"{name or 'text'}-{sha256_bytes(json.dumps(origin).encode())[:8]}", origin, read)


def _sample(data: DataConfig) -> Source:
    held_out = max(5_000, data.sample_tokens // 20)
    tokens = {"train": data.sample_tokens, "valid": held_out, "test": held_out}
    origin = {"tokens": tokens, "seeds": _SAMPLE_SEEDS}

    def read() -> Text:
        splits = {split: SampleSplit(count, _SAMPLE_SEEDS[split]) for split, count in tokens.items()}
        return Text(splits, {"license": "generated text, free of rights"})

    return Source(f"sample-{data.sample_tokens}", origin, read)


def _hub(data: DataConfig, dataset: str, subset: str | None, revision: str | None) -> Source:
    name = _NOT_NAME.sub("_", "--".join(part for part in (*data.source.split("/"), data.subset) if part))
    variant = (data.revision, data.text_column)
    if variant != (None, DataConfig().text_column):
        name = f"{name}-{sha256_bytes(repr(variant).encode())[:8]}"
    origin = {"dataset": dataset, "subset": subset, "revision": revision, "text_column": data.text_column}
    return Source(name, origin, lambda: fetch(dataset, subset, revision, data.text_column))
