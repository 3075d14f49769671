"""Where text comes from: hub, local files or the built-in sample, brought into one normal form, a corpus folder.

A corpus folder holds for each split `<split>.txt`, UTF-8 lines that each end with a newline, and `<split>.docs.npy`,
the int64 line numbers at which documents start, and a manifest with the counts, the licence and where it all is from.
"""

import difflib
import hashlib
import json
import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import BaseModel, ValidationError

from lmtrain.config.schema import DataConfig
from lmtrain.data import local
from lmtrain.data.local import Lines
from lmtrain.data.normal import Counts, SplitName, cut_split, load_starts, read_lines, write_split
from lmtrain.data.split_files import find_splits, named
from lmtrain.data.verified import Hashes
from lmtrain.errors import LmtrainError
from lmtrain.storage.files import MANIFEST, new_folder, read_manifest, recover, sha256_bytes, verify

FORMAT = "lmtrain-corpus/1"
_SPLITS = ("train", "valid", "test")
_CORPUS_FILES = {MANIFEST, *(f"{split}.{ending}" for split in _SPLITS for ending in ("txt", "docs.npy"))}

_WIKITEXT = "Salesforce/wikitext"
_WIKITEXT_REVISION = "b08601e04326c79dfdd32d625aee71d232d685c3"
_WIKITEXT_LICENCE = "CC BY-SA 3.0 and GFDL"
_WIKITEXT_SUBSETS = {
    "wikitext-2": "wikitext-2-v1",
    "wikitext-2-raw": "wikitext-2-raw-v1",
    "wikitext-103": "wikitext-103-v1",
}
_KNOWN = ("sample", *_WIKITEXT_SUBSETS)
_COLUMN = DataConfig().text_column
_NOT_NAME = re.compile(r"[^\w.-]")
_LONGEST_STEM = 190
"""Bytes of a source's name in its folder's: what else is in the names of folders that are made of it fits into 255."""
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+", re.ASCII)

_SAMPLE_SEEDS = {"train": 1, "valid": 2, "test": 3}
_SAMPLE_LEAST = 5_000


class _CorpusInfo(BaseModel, strict=True):
    """What the manifest of a corpus says beside its files."""

    name: str
    splits: dict[SplitName, Counts]


@dataclass(frozen=True)
class Corpus:
    """A corpus folder, open for reading."""

    folder: Path
    manifest: dict[str, Any]

    @property
    def name(self) -> str:
        """The corpus's short name."""
        return str(self.manifest["name"])

    @property
    def splits(self) -> tuple[str, ...]:
        """`train`, `valid` and, where there is one, `test`."""
        return tuple(self.manifest["splits"])

    @property
    def sha256(self) -> str:
        """What identifies the text: a hash over the hashes of the splits' files."""
        files = self.manifest["files"]
        return sha256_bytes("".join(f"{name} {files[name]['sha256']}\n" for name in sorted(files)).encode())

    def lines(self, split: str) -> Iterator[str]:
        """The lines of `split` in order, without their newlines."""
        return read_lines(self._file(split, "txt"))

    def document_starts(self, split: str) -> np.ndarray:
        """The line numbers at which the documents of `split` start, int64, ascending; the first is 0."""
        return load_starts(self._file(split, "docs.npy"))

    def _file(self, split: str, ending: str) -> Path:
        if split not in self.splits:
            raise LmtrainError(f"corpus {self.name} has no {split} split: it has {', '.join(self.splits)}")
        return self.folder / f"{split}.{ending}"


def open_corpus(folder: Path) -> Corpus:
    """Open a corpus folder. Raises LmtrainError when it is missing, foreign or truncated."""
    manifest = read_manifest(folder, FORMAT)
    try:
        splits = _CorpusInfo.model_validate(manifest).splits
    except ValidationError:
        splits = {}
    if not splits or manifest["files"].keys() != {f"{split}.{end}" for split in splits for end in ("txt", "docs.npy")}:
        raise LmtrainError(f"{folder / MANIFEST} is damaged: delete {folder} and make it again")
    return Corpus(folder, manifest)


def corpus_folder(data: DataConfig, origin: dict[str, Any]) -> Path:
    """Where the corpus of `data.source` lies: a known name, a hub id, or a path's name with a hash of its content, so
    that a text that has changed does not replace the one that a run was trained on; what comes of one source by another
    column or revision lies elsewhere. `origin` is what identifies the source's state."""
    return data.dir / _slug(data, origin)


def each(data: DataConfig) -> list[DataConfig]:
    """The data of each corpus: one, or as many as `data.sources` has, each as if it were `data.source`."""
    if data.sources is None:
        return [data]
    return [
        data.model_copy(update={"sources": None, **source.model_dump(exclude={"weight"})}) for source in data.sources
    ]


def is_known(data: DataConfig) -> bool:
    """Whether every corpus has a name that means the same on all machines, and none is a path or a hub id."""
    return all(corpus.source in _KNOWN for corpus in each(data))


def download(
    data: DataConfig,
    *,
    force: bool = False,
    anew: bool = False,
    note: Callable[[str], None] = lambda _: None,
    progress: bool = False,
) -> Corpus:
    """Make the corpus folder of `data.source`, or open the one that is there if source and content are unchanged.

    `anew` reads even large files that did not change since they were last checked.
    Known names come first, then existing paths, then hub ids. `note` receives one-line messages. What killed processes
    left half-written in `data.dir` is deleted first.
    Raises LmtrainError in one sentence for whatever is wrong with the source, the network or the disk.
    """
    recover(data.dir)
    path = _local_path(data)
    files = _files(path, note) if path is not None else {}
    hashes = Hashes(data.dir, anew=anew)
    origin = _origin(data, path, files, hashes)
    folder = corpus_folder(data, origin)
    if not force and _is_current(folder, origin, hashes, note):
        return open_corpus(folder)
    _refuse_foreign(folder)
    if data.source in _KNOWN and Path(data.source).exists():
        note(f"data.source={data.source} is the known corpus of that name; for the path write ./{data.source}")
    info: dict[str, Any] = {"name": folder.name, "source": data.source, "origin": origin}
    info |= dict.fromkeys(("subset", "revision", "licence", "text_column", "rows"))
    note(f"making corpus {folder} from {data.source}")
    if path is not None:
        splits = _local_splits(files, data, info, note)
    elif data.source == "sample":
        splits = _sample_splits(data, info)
    else:
        splits = _hub_splits(data, info, progress=progress)
    with new_folder(folder, FORMAT, info) as temporary:
        info["splits"] = _write(temporary, splits, path, note, progress)
        if "floor" in info:
            info["floor"] = {split: _floor(nats[0], info["splits"][split]) for split, nats in info["floor"].items()}
    for split, counts in info["splits"].items():
        note(f"{split}: " + ", ".join(f"{count:,} {unit}" for unit, count in counts.items()))
    if "test" not in info["splits"]:
        note(f"{data.source} has no test split: train and valid alone")
    return open_corpus(folder)


def _refuse_foreign(folder: Path) -> None:
    """What is about to be replaced must be a corpus folder: someone's own text may lie under the same name."""
    names = {path.name for path in folder.iterdir()} if folder.is_dir() else {folder.name} if folder.exists() else set()
    if names and (MANIFEST not in names or not names <= _CORPUS_FILES):
        raise LmtrainError(f"{folder} holds files that lmtrain didn't write: move them away or change data.dir")


def _is_current(folder: Path, origin: dict[str, Any], hashes: Hashes, note: Callable[[str], None]) -> bool:
    """Whether `folder` holds the corpus of `origin`, undamaged; if it holds something else, `note` says what."""
    if not (folder / MANIFEST).exists():
        return False
    try:
        manifest = open_corpus(folder).manifest
        verify(folder, manifest, hashes.sha256)
    except LmtrainError as error:
        note(f"making it again, since {error}")
        return False
    if manifest.get("origin") != origin:
        note(f"{folder} was made from another state of its source")
        return False
    return True


def _slug(data: DataConfig, origin: dict[str, Any]) -> str:
    path = _local_path(data)
    if path is not None:
        name = _NOT_NAME.sub("_", path.resolve().stem).encode()[:_LONGEST_STEM].decode(errors="ignore")
        return f"{name or 'text'}-{sha256_bytes(json.dumps(origin).encode())[:8]}"
    if data.source == "sample":
        return f"sample-{data.sample_tokens}"
    name = _NOT_NAME.sub("_", "--".join(part for part in (*data.source.split("/"), data.subset) if part))
    variant = (data.revision, data.text_column)
    return name if variant == (None, _COLUMN) else f"{name}-{sha256_bytes(repr(variant).encode())[:8]}"


def _local_path(data: DataConfig) -> Path | None:
    """The local file or folder that `data.source` names; None when it names a corpus to fetch or to generate.

    Raises LmtrainError when it can be neither.
    """
    source = data.source
    if source in _KNOWN:
        if data.subset is not None:
            raise LmtrainError(f"data.subset has no meaning with data.source={source}: leave it out")
        return None
    siblings = []
    try:
        path = Path(source).expanduser()
        if path.exists():
            return path
        local.refuse_dangling(path)
        siblings = [str(path.with_name(other.name)) for other in path.parent.iterdir()]
    except (OSError, ValueError, RuntimeError):
        path = Path(source)  # no such folder, or nothing that could be a path at all
    if _HUB_ID.fullmatch(source) and not source.startswith(".") and not local.is_text(path):
        return None
    near = difflib.get_close_matches(source, [*_KNOWN, *siblings], n=2)
    hint = f"; did you mean {' or '.join(near)}?" if near else ""
    raise LmtrainError(
        f"data.source={source[:200]} is no file or folder here, no hub id (owner/name) and none of "
        f"{', '.join(_KNOWN)}{hint}"
    )


def _origin(data: DataConfig, path: Path | None, files: dict[str, list[Path]], hashes: Hashes) -> dict[str, Any]:
    """What tells whether the source is unchanged, had without the network; of a local one, by its `files`."""
    if path is not None:
        try:
            content = {local.name_in(path, file): hashes.sha256(file) for paths in files.values() for file in paths}
        except OSError as error:
            raise LmtrainError(f"{error.filename} can't be read: {error.strerror}") from error
        structured = any(local.is_structured(file) for paths in files.values() for file in paths)
        return {"files": content, "text_column": data.text_column if structured else None}
    if data.source == "sample":
        head = hashlib.sha256()
        for text, _ in islice(_sample_lines(_SAMPLE_LEAST, _SAMPLE_SEEDS["train"], []), 100):
            head.update(text.encode() + b"\n")
        return {"tokens": _sample_tokens(data), "seeds": _SAMPLE_SEEDS, "head": head.hexdigest()}
    dataset, subset, revision = _hub_id(data)
    return {"dataset": dataset, "subset": subset, "revision": revision, "text_column": data.text_column}


def _files(path: Path, note: Callable[[str], None]) -> dict[str, list[Path]]:
    """The files of a local source by split; a single file is all `train`, to be cut."""
    if path.is_dir():
        try:
            return find_splits(path, note)
        except OSError as error:
            raise LmtrainError(f"{path} can't be read: {error.strerror}") from error
    if not local.is_text(path):
        raise LmtrainError(f"{path} is of no known kind: give it one of the endings {', '.join(local.SUFFIXES)}")
    return {"train": [path]}


def _local_splits(
    files: dict[str, list[Path]], data: DataConfig, info: dict[str, Any], note: Callable[[str], None]
) -> dict[str, Lines]:
    info["text_column"] = info["origin"]["text_column"]
    for split, paths in files.items():
        note(f"{split} from {named(file.name for file in paths)}")
    return {split: local.read_lines(paths, data.text_column) for split, paths in files.items()}


def _sample_tokens(data: DataConfig) -> dict[str, int]:
    held_out = max(_SAMPLE_LEAST, data.sample_tokens // 20)
    return {"train": data.sample_tokens, "valid": held_out, "test": held_out}


def _sample_splits(data: DataConfig, info: dict[str, Any]) -> dict[str, Lines]:
    """The sample's splits; each leaves its total nats in `info["floor"]` once it has been read."""
    info["licence"] = "generated text, free of rights"
    info["floor"] = {split: [] for split in _SAMPLE_SEEDS}
    return {
        split: _sample_lines(tokens, _SAMPLE_SEEDS[split], info["floor"][split])
        for split, tokens in _sample_tokens(data).items()
    }


def _sample_lines(tokens: int, seed: int, total_nats: list[float]) -> Lines:
    from lmtrain.data.sample import generate

    nats = 0.0
    for line in generate(tokens, seed):
        nats += line.nats
        yield line.text, line.starts_document
    total_nats.append(nats)


def _floor(nats: float, counts: dict[str, int]) -> dict[str, float | int]:
    """The generator's own cross-entropy: no model can beat it by more than sampling error."""
    tokens = counts["words"] + counts["lines"]
    return {"word_perplexity": math.exp(nats / tokens), "nats": nats, "tokens": tokens}


def _hub_id(data: DataConfig) -> tuple[str, str | None, str | None]:
    """The hub id, subset and revision of `data.source`."""
    if data.source in _WIKITEXT_SUBSETS:
        return _WIKITEXT, _WIKITEXT_SUBSETS[data.source], data.revision or _WIKITEXT_REVISION
    return data.source, data.subset, data.revision


def _hub_splits(data: DataConfig, info: dict[str, Any], *, progress: bool) -> dict[str, Lines]:
    from lmtrain.data.hub import fetch

    dataset, subset, revision = _hub_id(data)
    found = fetch(dataset, subset, revision, data.text_column, progress=progress)
    licence = _WIKITEXT_LICENCE if dataset == _WIKITEXT else found.licence
    info |= {"source": dataset, "subset": subset, "revision": found.revision, "licence": licence}
    info |= {"text_column": data.text_column, "rows": found.rows}
    return {split: local.row_lines(rows) for split, rows in found.splits.items()}


def _write(
    folder: Path,
    splits: dict[str, Lines],
    path: Path | None,
    note: Callable[[str], None],
    progress: bool,
) -> dict[str, dict[str, int]]:
    """Write the splits in normal form and return their counts.

    A source without a valid split gives the last 5 % of its training text for it; a single file is cut into the first
    90 % for train, the next 5 % for valid and the last 5 % for test.
    """
    counts: dict[str, dict[str, int]] = {}
    for split in _SPLITS[1:]:
        if split in splits:
            counts[split] = write_split(folder, split, splits[split], progress)
    if "valid" in splits:
        counts["train"] = write_split(folder, "train", splits["train"], progress)
    else:
        is_file = path is not None and path.is_file()
        shares = {"train": 0.9, "valid": 0.05, "test": 0.05} if is_file else {"train": 0.95, "valid": 0.05}
        counts |= cut_split(folder, splits["train"], shares, note, progress)
    return {split: counts[split] for split in _SPLITS if split in counts}
