"""Data sets from the Hugging Face hub: pinned, checked, read file by file, and every failure one sentence.

`datasets` says which files a data set has and reads those that aren't parquet. A file is downloaded into the hub's own
cache, compared with the hub's hash of it, and read from there: there is no other copy beside the text that it becomes.

The environment is honoured as the hub's own libraries do it: HF_TOKEN, HF_HOME, HF_ENDPOINT, HF_HUB_OFFLINE,
HF_DATASETS_OFFLINE and HTTPS_PROXY, all read when those libraries are first imported. Messages quote neither tokens
nor addresses, which may hold credentials.
"""

import re
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lmtrain.data.hub_cache import Listing, in_cache, listing_of, reader, remember
from lmtrain.data.hub_client import contained, explained, settle
from lmtrain.data.local import no_column, parquet_rows, text_row
from lmtrain.errors import LmtrainError
from lmtrain.storage.files import sha256_file

_BATCH = 1024
_AT_ONCE = 8
"""Files that are downloaded at once: as many as the hub's own client takes."""

_ROOM = 4
"""Times the size of its files that a data set may take with its text: parquet holds text in a half to a third."""

_ADDRESS = re.compile(r"hf://datasets/[^/@]+/[^/@]+@[^/]+/")


@dataclass(frozen=True)
class HubData:
    """A data set: its commit, its licence where its card names one, the rows of its splits, and how many were read."""

    revision: str
    licence: str | None
    splits: dict[str, Iterator[str]]
    rows: dict[str, int]


def fetch(
    dataset: str,
    subset: str | None,
    revision: str | None,
    text_column: str,
    folder: Path,
    *,
    force: bool,
    progress: bool,
) -> HubData:
    """Find the data set `dataset` (`owner/name`), download what the cache lacks, and read it as it is asked for.

    A revision that is no full commit is resolved to one first, so that what is recorded can be had again. `force`
    downloads files that the cache has already. Where the cache has no room for all files beside their text, which goes
    to `folder`, each is downloaded when its turn comes and deleted once it is read.
    Raises LmtrainError saying what went wrong and what to do, also while rows are read.
    """
    import datasets

    settle(progress)
    with explained(dataset, subset, revision):
        if datasets.config.HF_HUB_OFFLINE:
            listing, place = in_cache(dataset, subset, revision)
            source = _Source(dataset, listing, reader(place, subset), frozenset(), place)
        else:
            source = _from_hub(dataset, subset, revision, folder, force)
    rows = dict.fromkeys(source.listing.splits, 0)
    splits = {split: _rows(source, split, text_column, rows, (dataset, subset, revision)) for split in rows}
    return HubData(source.listing.revision, source.listing.licence, splits, rows)


@dataclass(frozen=True)
class _Source:
    """A data set whose files are in the cache, but for those `passing` through it: each is brought to be read."""

    name: str
    listing: Listing
    builder: Any
    """What `datasets` reads the data set with."""
    passing: frozenset[str]
    place: Path | None = None
    """The folder that all files are in, where the network isn't asked."""

    def bring(self, file: str, *, force: bool = False) -> Path:
        """The path of a file in the cache; it is downloaded if it isn't there, or with `force`."""
        from huggingface_hub import hf_hub_download

        if self.place is not None:
            return self.place / file
        revision = self.listing.revision
        return Path(hf_hub_download(self.name, file, repo_type="dataset", revision=revision, force_download=force))

    def file_rows(self, path: Path, text_column: str) -> Iterator[str]:
        """The rows of one file, a batch of them in memory."""
        if path.suffix == ".parquet":
            yield from parquet_rows(path, text_column)
            return
        self.builder.config.data_files = {"train": [str(path)]}
        number = 0
        for table in self.builder.as_streaming_dataset("train").with_format("arrow").iter(_BATCH):
            if text_column not in table.column_names:
                raise no_column(str(path), text_column, table.column_names)
            for value in table.column(text_column):
                number += 1
                yield text_row(value.as_py(), text_column, f"{path}, row {number},")


def _rows(
    source: _Source, split: str, text_column: str, read: dict[str, int], asked: tuple[str, str | None, str | None]
) -> Iterator[str]:
    """The rows of a split, counted in `read`; each file is checked before any of it is read."""
    with explained(*asked):
        for name, sha256 in source.listing.splits[split].items():
            with contained():
                path = source.bring(name, force=name in source.passing)
            # The hub's own client checks no more than sizes.
            if sha256 is not None and sha256_file(path) != sha256:
                raise LmtrainError(
                    f"{name} of data set {source.name} arrived damaged: `lmtrain download --force` brings it anew"
                )
            for row in source.file_rows(path, text_column):
                read[split] += 1
                yield row
            if name in source.passing:
                content = path.resolve()
                path.unlink()
                content.unlink(missing_ok=True)  # the cache keeps a link to it under the file's name


def _from_hub(dataset: str, subset: str | None, revision: str | None, folder: Path, force: bool) -> _Source:
    """Ask the hub what the data set consists of, remember that for HF_HUB_OFFLINE, and download its files."""
    import datasets
    from huggingface_hub import HfApi

    info: Any = HfApi().dataset_info(dataset, revision=revision, timeout=30, files_metadata=True)
    mode = "force_redownload" if force else None
    with contained():
        builder = datasets.load_dataset_builder(dataset, subset, revision=info.sha, download_mode=mode)
    hashes = {file.rfilename: file.lfs.sha256 for file in info.siblings if file.lfs}
    splits = {
        str(split): {name: hashes.get(name) for name in (_ADDRESS.sub("", file) for file in files)}
        for split, files in (builder.config.data_files or {}).items()
    }
    licence = None if info.card_data is None else info.card_data.get("license")
    listing = listing_of(dataset, builder.hash, licence, splits)
    sizes = {file.rfilename: file.size or 0 for file in info.siblings}
    missing = {name: sizes.get(name, 0) for name in listing.names if force or _cached(dataset, listing, name) is None}
    source = _Source(dataset, listing, builder, _passing(dataset, missing, folder))
    remember(listing, dataset, subset, revision)
    with contained(), ThreadPoolExecutor(_AT_ONCE) as pool:
        for _ in pool.map(lambda name: source.bring(name, force=force), missing.keys() - source.passing):
            pass
    return source


def _cached(dataset: str, listing: Listing, name: str) -> Path | None:
    from huggingface_hub import try_to_load_from_cache

    path = try_to_load_from_cache(dataset, name, revision=listing.revision, repo_type="dataset")
    return Path(path) if isinstance(path, str) else None


def _passing(dataset: str, missing: dict[str, int], folder: Path) -> frozenset[str]:
    """The files to keep no longer than they are read, from the sizes of those to download: all of them, or none.

    Raises LmtrainError where there is no room for the largest, or for the text, before the disk is full.
    """
    from huggingface_hub.constants import HF_HUB_CACHE

    needed = sum(missing.values())
    cache = _room(Path(HF_HUB_CACHE))
    for setting, least, (place, free) in (
        ("HF_HOME", max(missing.values(), default=0), cache),
        ("data.dir", needed, _room(folder)),
    ):
        if least > free:
            raise LmtrainError(
                f"data set {dataset} has {needed / 1e9:,.1f} GB to download, and {place} has room for "
                f"{free / 1e9:,.1f} GB: set {setting} to a folder with more, or name a part of it with data.subset"
            )
    return frozenset(missing if _ROOM * needed > cache[1] else ())


def _room(folder: Path) -> tuple[Path, int]:
    """The folder, or the nearest above it that is there, and the bytes that are free in it."""
    place = next(place for place in [folder, *folder.absolute().parents] if place.is_dir())
    return place, shutil.disk_usage(place).free
