"""Data sets from the Hugging Face hub: `huggingface_hub` downloads and caches their files, `datasets` reads them there.

These libraries handle revisions, the cache, HF_HUB_OFFLINE, HF_HOME, HF_ENDPOINT and HF_TOKEN. No file in the cache is
changed or deleted; the files are read as a stream, without a second copy. Messages quote neither tokens nor addresses,
which may contain credentials.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from logging import CRITICAL
from pathlib import Path, PurePosixPath
from typing import Any

from pydantic import BaseModel

from lmtrain.data.local import column_rows, row_lines
from lmtrain.data.split_files import SPLIT_NAMES
from lmtrain.data.splits import Text
from lmtrain.errors import LmtrainError
from lmtrain.system.messages import log, shows_bars

_CARD = "README.md"
_OTHER_CARDS = ["*/README.md", ".huggingface.yaml"]
"""Not downloaded: in these too, `datasets` would read which files there are, anywhere on this machine."""


class _SplitFiles(BaseModel):
    split: str
    path: str | list[str]


class _Subset(BaseModel):
    config_name: str | None = None
    default: bool | None = False
    data_dir: str = ""
    data_files: str | list[str | _SplitFiles] = []

    def patterns(self) -> dict[str, list[str]]:
        """Return the names of each split's files, which may have wildcards; empty if the card names none."""
        splits: dict[str, list[str]] = {}
        for files in [self.data_files] if isinstance(self.data_files, str) else self.data_files:
            split, path = ("train", files) if isinstance(files, str) else (files.split, files.path)
            paths = [path] if isinstance(path, str) else path
            splits.setdefault(split, []).extend(str(PurePosixPath(self.data_dir, each)) for each in paths)
        return splits


class _Card(BaseModel):
    """The machine-readable part of a dataset's card, as the hub documents it."""

    license: str | list[str] | None = None
    configs: list[_Subset] = []


def fetch(dataset: str, subset: str | None, revision: str | None, text_column: str) -> Text:
    """Download the files of `dataset` (`owner/name`) into the hub's cache and return their text, which is read later.

    Raises LmtrainError with the cause and the remedy, also while the text is read.
    """
    _silence_libraries()
    folder = _download(dataset, revision, [_CARD])
    card = _card(dataset, folder / _CARD)
    chosen = _choose(dataset, subset, card.configs)
    paths = [path for paths in chosen.patterns().values() for path in paths]
    if any(":" in path or path.startswith("/") or ".." in path.split("/") for path in [*paths, chosen.data_dir]):
        raise LmtrainError(f"the card of dataset {dataset} names files outside the dataset: choose another")
    commit = folder.name
    patterns = paths or [str(Path(chosen.data_dir, "*"))]  # everything, if the card names neither files nor a folder
    _download(dataset, commit, [path.replace("**/", "*") for path in patterns])  # where a single `*` spans folders
    about = {
        "source": dataset,
        "revision": commit,
        "license": ", ".join(card.license) if isinstance(card.license, list) else card.license,
    }
    lines = {
        split: row_lines(column_rows(_tables(dataset, folder, data), text_column, f"dataset {dataset}, {split}"))
        for split, data in _open(dataset, folder, chosen).items()
    }
    return Text(lines, about)


def _silence_libraries() -> None:
    """Silence the libraries' log lines, which quote addresses, and their progress bars unless `shows_bars`."""
    import datasets
    from huggingface_hub.utils import logging
    from huggingface_hub.utils.tqdm import disable_progress_bars

    datasets.logging.set_verbosity(CRITICAL)
    logging.set_verbosity(CRITICAL)
    if not shows_bars():
        datasets.disable_progress_bars()
        disable_progress_bars()


def _download(dataset: str, revision: str | None, patterns: list[str]) -> Path:
    """Download the files that `patterns` name; return the folder in the cache, which is named after the commit."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    http: Any = HfHubHTTPError.__bases__
    """OSError and the root of the HTTP library's errors, a library that differs between versions."""
    what: Any = {"allow_patterns": patterns, "ignore_patterns": _OTHER_CARDS}
    try:
        return Path(snapshot_download(dataset, repo_type="dataset", revision=revision, **what))
    except HFValidationError as error:
        raise LmtrainError(f"{dataset} can't be the name of a dataset on the hub: check data.source") from error
    except (*http, RuntimeError) as error:  # a failed transfer of a large file, by hf_xet, is a RuntimeError
        raise LmtrainError(_reason(error, dataset, revision)) from error


def _reason(error: BaseException, dataset: str, revision: str | None) -> str:
    """Why a download failed and what to do about it."""
    from huggingface_hub import errors, is_offline_mode

    name = f"dataset {dataset}" + (f" at revision {revision}" if revision else "")
    is_missing = isinstance(error, errors.LocalEntryNotFoundError)
    cause = (is_missing and error.__cause__) or error
    status = cause.response.status_code if isinstance(cause, errors.HfHubHTTPError) else None
    if is_missing and is_offline_mode():
        reason = "is not in the cache, and HF_HUB_OFFLINE forbids the network: unset it to download"
    elif isinstance(cause, errors.RevisionNotFoundError):
        reason = "doesn't exist: check data.revision"
    elif isinstance(cause, errors.GatedRepoError) or status == 403:
        reason = "needs access rights: ask for access on its page and set HF_TOKEN"
    elif isinstance(cause, errors.RepositoryNotFoundError):
        reason = "is not on the hub, and no such path exists: check data.source, or set HF_TOKEN if it is private"
    elif status == 401:
        reason = "can't be downloaded, since the hub rejects your token: set HF_TOKEN to a valid one, or unset it"
    elif status is not None:
        reason = f"can't be downloaded, since the hub returned HTTP {status}: try again later"
    elif isinstance(cause, OSError) and cause.errno and not isinstance(cause, ConnectionError | TimeoutError):
        reason = f"needs a cache that can be read and written ({cause.strerror}): set HF_HOME to a folder with space"
    else:
        reason = f"was not downloaded ({type(cause).__name__}): check the network, then the disk, and try again"
    return f"{name} {reason}"


def _card(dataset: str, path: Path) -> _Card:
    from huggingface_hub import DatasetCard

    if not path.exists():
        return _Card()
    try:
        return _Card.model_validate(DatasetCard.load(path).data.to_dict())
    except Exception as error:
        raise LmtrainError(f"the card of dataset {dataset} can't be read: choose another revision") from error


def _choose(dataset: str, name: str | None, subsets: list[_Subset]) -> _Subset:
    """Return the subset of this name, else the only one or the default, or an empty one if the card lists none."""
    for subset in reversed(subsets or [_Subset()]):  # of one name, `datasets` takes the last
        is_default = len(subsets) <= 1 or subset.default or subset.config_name == "default"
        if subset.config_name == name or (name is None and is_default):
            return subset
    names = ", ".join(str(subset.config_name) for subset in subsets)
    has = f"the subsets {names}: set data.subset to one of them" if names else "no subsets: leave data.subset out"
    raise LmtrainError(f"dataset {dataset} has {has}")


@contextmanager
def _reading(dataset: str, folder: Path) -> Iterator[None]:
    """Raise LmtrainError, naming the dataset, if the library can't read it: a damaged file may give any error."""
    try:
        yield
    except Exception as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        raise LmtrainError(
            f"dataset {dataset} can't be read ({reason}): choose another revision or, if its download was damaged, "
            f"delete {folder.parents[1]} and download it again; data.source may also be a folder with its files"
        ) from error


def _open(dataset: str, folder: Path, subset: _Subset) -> dict[str, Any]:
    """The streams of the train, valid and test splits."""
    import datasets

    files = subset.patterns() or None
    named = {"path": str(folder), "name": subset.config_name, "data_files": files}
    if subset.data_dir and files is None:
        named = {"path": str(folder / subset.data_dir)}
    with _reading(dataset, folder):
        streams = datasets.load_dataset(**named, streaming=True)
    names = [split for split in streams if split in SPLIT_NAMES]
    splits = {SPLIT_NAMES[split]: streams[split] for split in names}
    if "train" not in splits or len(splits) < len(names):
        raise LmtrainError(
            f"dataset {dataset} has the splits {', '.join(streams)} where one for training, and at most one each for "
            "validation and test, are needed: choose another, or give a folder with its files as data.source"
        )
    if others := ", ".join(split for split in streams if split not in names):
        log.info(f"not used in dataset {dataset}, since they are not for training, validation or test: {others}")
    return splits


def _tables(dataset: str, folder: Path, data: Any) -> Iterator[Any]:
    """Yield the rows of a split, a batch at a time."""
    with _reading(dataset, folder):  # only the library: an error in what is done with its rows is a bug
        yield from data.with_format("arrow").iter(1024)
