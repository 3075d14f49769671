"""The hub's own libraries, made to behave: silent, kept to their cache, and what they raise in one sentence."""

import errno
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from logging import CRITICAL
from typing import Any

from lmtrain.errors import LmtrainError

_FILE_NAME = re.compile(r"[\w-][\w.-]*")
_NOT_WRITABLE = {errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EPERM, errno.EROFS}


def settle(progress: bool) -> None:
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
def contained() -> Iterator[None]:
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


@contextmanager
def explained(dataset: str, subset: str | None, revision: str | None) -> Iterator[None]:
    """Turn what the hub's libraries raise into LmtrainError."""
    import yaml
    from datasets.exceptions import DatasetsError
    from huggingface_hub.errors import HfHubHTTPError
    from pyarrow import ArrowException

    failures = (OSError, ValueError, TypeError, LookupError, RuntimeError)
    try:
        yield
    # The HTTP library underneath differs between versions: the root of its errors is a base of HfHubHTTPError.
    except (*failures, DatasetsError, ArrowException, yaml.YAMLError, *HfHubHTTPError.__bases__) as error:
        raise LmtrainError(_sentence(error, dataset, subset, revision)) from error


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
