"""Data sets from the Hugging Face hub, through `datasets`: pinned, checked, and every failure one sentence.

The environment is honoured as the hub's own libraries do it: HF_TOKEN, HF_HOME, HF_ENDPOINT, HF_HUB_OFFLINE,
HF_DATASETS_OFFLINE and HTTPS_PROXY, all read when those libraries are first imported. Messages quote neither tokens
nor addresses, which may hold credentials.
"""

import errno
import re
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from logging import CRITICAL
from pathlib import Path
from typing import Any

from lmtrain.data.local import SPLIT_NAMES, no_column, text_row
from lmtrain.errors import LmtrainError
from lmtrain.files import sha256_file

_BATCH = 1024
_COMMIT = re.compile(r"[0-9a-f]{40}")
_FILE_NAME = re.compile(r"[\w-][\w.-]*")
_NOT_WRITABLE = {errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EPERM, errno.EROFS}


@dataclass(frozen=True)
class HubData:
    """A data set in the local cache: its commit, its licence where its card names one, and the rows of its splits."""

    revision: str | None
    licence: str | None
    splits: dict[str, Iterator[str]]
    rows: dict[str, int]


def fetch(
    dataset: str, subset: str | None, revision: str | None, text_column: str, *, force: bool, progress: bool
) -> HubData:
    """Download the data set `dataset` (`owner/name`) into the cache of `datasets`, or find it there, and open it.

    A revision that is no full commit is resolved to one first, so that what is recorded can be had again. `force`
    downloads files that the cache has already. Raises LmtrainError saying what went wrong and what to do.
    """
    import datasets
    import yaml
    from datasets.exceptions import DatasetsError
    from huggingface_hub.errors import HfHubHTTPError

    _settle(progress)
    failures = (OSError, ValueError, TypeError, LookupError, RuntimeError, DatasetsError, yaml.YAMLError)
    mode = "force_redownload" if force else None
    try:
        info = None if datasets.config.HF_HUB_OFFLINE else _info(dataset, revision)
        commit = info.sha if info is not None else revision
        with _contained():
            builder = datasets.load_dataset_builder(dataset, subset, revision=commit, download_mode=mode)
        _check_revision(builder, dataset, commit)
        _check_room(builder, dataset, info)
        with _contained():
            builder.download_and_prepare(download_mode=mode)
        _check_content(builder, dataset, info)
        loaded = builder.as_dataset()
    # The HTTP library underneath differs between versions: the root of its errors is a base of HfHubHTTPError.
    except (*failures, *HfHubHTTPError.__bases__) as error:
        raise LmtrainError(_sentence(error, dataset, subset, revision)) from error
    licence = None if info is None or info.card_data is None else info.card_data.get("license")
    parts = {SPLIT_NAMES[name]: part for name, part in loaded.items() if name in SPLIT_NAMES}
    if "train" not in parts:
        raise LmtrainError(f"data set {dataset} has no train split (it has {', '.join(loaded)}): choose another")
    for part in parts.values():
        if text_column not in part.column_names:
            raise no_column(f"data set {dataset}", text_column, part.column_names)
    return HubData(
        revision=builder.hash,
        licence=licence if isinstance(licence, str) or licence is None else ", ".join(map(str, licence)),
        splits={split: _rows(part, text_column, f"{dataset}, {split} split") for split, part in parts.items()},
        rows={split: part.num_rows for split, part in parts.items()},
    )


def _settle(progress: bool) -> None:
    """Silence the hub's libraries, whose log lines quote addresses and paths, and keep their bars to terminals."""
    import datasets
    from huggingface_hub.utils import logging
    from huggingface_hub.utils.tqdm import disable_progress_bars

    datasets.logging.set_verbosity(CRITICAL)
    logging.set_verbosity(CRITICAL)
    if not (progress and sys.stderr.isatty()):
        datasets.disable_progress_bars()
        disable_progress_bars()


@contextmanager
def _contained() -> Iterator[None]:
    """Keep downloads in the cache, whatever the server says.

    The hub's client names the cached file by the ETag of the answer and follows one such as `../../x` out of the cache.
    The function that it reads ETags with is its own affair: in a version without it, nothing is checked.
    """
    from huggingface_hub import file_download

    untyped: Any = file_download
    normalize = getattr(untyped, "_normalize_etag", None)
    if normalize is None:
        yield
        return

    def checked(etag: str | None) -> str | None:
        name: str | None = normalize(etag)
        if name is not None and not _FILE_NAME.fullmatch(name):
            raise ValueError("the server names a file by what is no file name")
        return name

    untyped._normalize_etag = checked
    try:
        yield
    finally:
        untyped._normalize_etag = normalize


def _info(dataset: str, revision: str | None) -> Any:
    """What the hub knows of the data set at `revision`: commit, card, and the sha256 of its large files."""
    from huggingface_hub import HfApi

    return HfApi().dataset_info(dataset, revision=revision, timeout=30, files_metadata=True)


def _check_revision(builder: Any, dataset: str, commit: str | None) -> None:
    """When the hub can't be asked, `datasets` takes the latest version that its cache has, whichever was asked for."""
    if commit is not None and _COMMIT.fullmatch(commit) and builder.hash != commit:
        raise LmtrainError(
            f"the cache has data set {dataset} at revision {builder.hash} and not at {commit}: go online "
            "(HF_HUB_OFFLINE unset) to download it, or set data.revision to the one that is there"
        )


def _check_room(builder: Any, dataset: str, info: Any) -> None:
    """Refuse a download that is larger than what the disk of the cache has room for, before it has filled it."""
    from huggingface_hub.constants import HF_HUB_CACHE

    sizes = {file.rfilename: file.size or 0 for file in info.siblings} if info is not None else {}
    needed = sum(sizes.get(name, 0) for name, path in _files(builder, dataset) if path is None)
    place = next(folder for folder in [Path(HF_HUB_CACHE), *Path(HF_HUB_CACHE).absolute().parents] if folder.is_dir())
    free = shutil.disk_usage(place).free
    if needed > free:
        raise LmtrainError(
            f"data set {dataset} has {needed / 1e9:,.1f} GB to download, and {place} has room for "
            f"{free / 1e9:,.1f} GB: set HF_HOME to a folder with more, or name a part of it with data.subset"
        )


def _files(builder: Any, dataset: str) -> Iterator[tuple[str, Path | None]]:
    """The files of all splits: their names in the data set, and where they lie in the cache, if they are there."""
    from huggingface_hub import try_to_load_from_cache

    prefix = f"hf://datasets/{dataset}@{builder.hash}/"
    for sources in (builder.config.data_files or {}).values():
        for name in (source.removeprefix(prefix) for source in sources):
            path = try_to_load_from_cache(dataset, name, revision=builder.hash, repo_type="dataset")
            yield name, Path(path) if isinstance(path, str) else None


def _check_content(builder: Any, dataset: str, info: Any) -> None:
    """Compare the downloaded files with the hub's sha256 of them: the hub's own client checks their sizes alone."""
    hashes = {file.rfilename: file.lfs.sha256 for file in info.siblings if file.lfs} if info is not None else {}
    for name, path in _files(builder, dataset):
        if name in hashes and path is not None and sha256_file(path) != hashes[name]:
            raise LmtrainError(
                f"{name} of data set {dataset} arrived damaged: `lmtrain download --force` brings it anew"
            )


def _rows(part: Any, text_column: str, place: str) -> Iterator[str]:
    number = 0
    for batch in part.select_columns([text_column]).iter(batch_size=_BATCH):
        for row in batch[text_column]:
            number += 1
            yield text_row(row, text_column, f"data set {place}, row {number},")


def _sentence(error: BaseException, dataset: str, subset: str | None, revision: str | None) -> str:
    """What went wrong with `dataset` and what to do about it: the first case below that fits."""
    import datasets
    import pyarrow
    from datasets.exceptions import DataFilesNotFoundError, DatasetNotFoundError, DatasetsError
    from huggingface_hub import errors

    chain = _chain(error)
    statuses = [link.response.status_code for link in chain if isinstance(link, errors.HfHubHTTPError)]
    status = statuses[0] if statuses else None
    disk = [link for link in chain if isinstance(link, OSError) and link.errno in _NOT_WRITABLE]
    kind = type(chain[-1]).__name__
    name = f"data set {dataset}" + (f" at revision {revision}" if revision else "")

    def has(*kinds: type[BaseException]) -> bool:
        return any(isinstance(link, kinds) for link in chain)

    cases = (
        (
            datasets.config.HF_HUB_OFFLINE and has(OSError),
            f"{name} is not in the cache, and HF_HUB_OFFLINE keeps lmtrain off the network: unset it to download",
        ),
        (
            has(errors.RevisionNotFoundError),
            f"data set {dataset} has no revision {revision}: check data.revision",
        ),
        (
            has(errors.GatedRepoError, DatasetNotFoundError) or status == 403,
            f"{name} needs rights that you haven't shown: ask for access on its page and set HF_TOKEN",
        ),
        (
            has(errors.RepositoryNotFoundError),
            f"{name} is not on the hub, and no such path is here: check data.source, or set HF_TOKEN if it is private",
        ),
        (status == 401, f"the hub refuses your token for {name}: set HF_TOKEN to a valid one, or unset it"),
        (status == 429, f"the hub has had too many requests and refuses {name}: wait a few minutes, or set HF_TOKEN"),
        (status is not None, f"the hub answers with error {status} for {name}: try again later"),
        (
            bool(disk),
            f"the cache can't be written for {name} ({disk and disk[0].strerror}): set HF_HOME to a folder with space",
        ),
        (
            has(DataFilesNotFoundError, datasets.data_files.EmptyDatasetError),
            f"{name} has no data files of a known kind: choose another",
        ),
        (
            has(DatasetsError, pyarrow.ArrowException),
            f"{name} has a file that can't be read ({kind}): `lmtrain download --force` brings it anew",
        ),
        (
            has(OSError, *errors.HfHubHTTPError.__bases__),
            f"the download of {name} failed ({kind}): check the network and try again; files already whole are kept",
        ),
    )
    return next(
        (sentence for fits, sentence in cases if fits),
        f"{name} can't be loaded with data.subset={subset}: {_clean(str(error))}",
    )


def _chain(error: BaseException) -> list[BaseException]:
    """The error and what caused it, outermost first."""
    chain: list[BaseException] = []
    link: BaseException | None = error
    while link is not None and link not in chain:
        chain.append(link)
        link = link.__cause__ or (None if link.__suppress_context__ else link.__context__)
    return chain


def _clean(message: str) -> str:
    """One line of `message`, without addresses, which may hold credentials, and without advice for Python."""
    return re.sub(r"\S*://\S*", "(address)", " ".join(message.split())).partition(" Example of usage")[0][:300]
