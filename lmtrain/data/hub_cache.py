"""What the hub's cache has of a data set, told without the network: lmtrain's own downloads, and those of others.

A cache that has some of the files doesn't tell that it lacks the others. What lmtrain downloads it therefore lists, in
HF_HOME/lmtrain; of what `datasets` or `hf download` left there, the data set's card says what belongs to it.
"""

import errno
import re
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from lmtrain.data.local import SPLIT_NAMES
from lmtrain.errors import LmtrainError
from lmtrain.storage.files import make_folders, sha256_bytes, write_file

_COMMIT = re.compile(r"[0-9a-f]{40}")
_SHA256 = re.compile(r"[0-9a-f]{64}")
_SHARD = re.compile(r"(.*?)\d+-of-(\d+)")


class Listing(BaseModel, strict=True):
    """What a data set consists of: the sha256 of each split's files, where it is known, by their names."""

    revision: str
    licence: str | None
    splits: dict[str, dict[str, str | None]]

    @property
    def names(self) -> list[str]:
        """The names of all files, in the folder of the data set."""
        return [name for files in self.splits.values() for name in files]


def listing_of(dataset: str, commit: str, licence: Any, splits: dict[str, dict[str, str | None]]) -> Listing:
    """What there is of the splits that lmtrain knows. Raises LmtrainError where none of them is for training, and where
    two are for the same."""
    known = [SPLIT_NAMES[split] for split in splits if split in SPLIT_NAMES]
    if "train" not in known:
        raise LmtrainError(f"data set {dataset} has no train split (it has {', '.join(splits)}): choose another")
    twice = [split for split in splits if known.count(SPLIT_NAMES.get(split, "")) > 1]
    if twice:
        raise LmtrainError(
            f"data set {dataset} has one split under several names ({', '.join(twice)}): download its files into a "
            "folder, keep one of them, and give the folder as data.source"
        )
    return Listing(
        revision=commit,
        licence=licence if isinstance(licence, str) or licence is None else ", ".join(map(str, licence)),
        splits={SPLIT_NAMES[split]: files for split, files in splits.items() if split in SPLIT_NAMES},
    )


def remember(listing: Listing, dataset: str, subset: str | None, revision: str | None) -> None:
    """Keep a listing for `in_cache`, as what was last downloaded and as what the branch or tag `revision` was then; a
    cache that can only be read serves all the same."""
    with suppress(LmtrainError):
        for memory in {_memory(dataset, subset), _memory(dataset, subset, _moving(revision))}:
            make_folders(memory.parent)
            write_file(memory, listing.model_dump_json())


def in_cache(dataset: str, subset: str | None, revision: str | None) -> tuple[Listing, Path]:
    """What the cache has of a data set whole, and the folder of its files.

    That is what was last downloaded of that revision, where it is remembered; or else the hub's own folder of the
    commit that `revision` is, or named when the cache was filled; or else what `datasets` converted to Arrow of that
    commit, as lmtrain once had it do.
    Raises OSError where nothing is there or files are missing, and LmtrainError where only another commit is there.
    """
    import datasets
    from datasets.naming import camelcase_to_snakecase
    from huggingface_hub.constants import HF_HUB_CACHE

    store = Path(HF_HUB_CACHE) / f"datasets--{dataset.replace('/', '--')}"
    commit = revision if revision is not None and _COMMIT.fullmatch(revision) else None
    memory = _memory(dataset, subset, _moving(revision))
    listing = Listing.model_validate_json(memory.read_bytes()) if memory.exists() else None
    if listing is not None and commit in (None, listing.revision):
        place = store / "snapshots" / listing.revision
        for name in listing.names:
            (place / name).stat()
        return listing, place
    commit = commit or (store / "refs" / (revision or "main")).read_text().strip()
    owner, _, name = dataset.partition("/")
    converted = f"{owner}___{camelcase_to_snakecase(name)}/{subset or 'default'}/*/{commit}"
    arrow = [(None, place) for place in Path(datasets.config.HF_DATASETS_CACHE).glob(converted)]
    for part, place in [(subset, store / "snapshots" / commit), *arrow]:
        with suppress(FileNotFoundError):
            return _found(dataset, part, commit, place), place
    if listing is not None:
        raise LmtrainError(
            f"the cache has data set {dataset} at revision {listing.revision} and not at {revision}: go online "
            "(HF_HUB_OFFLINE unset) to download it, or set data.revision to the one that is there"
        )
    raise FileNotFoundError(errno.ENOENT, "not in the cache", dataset)


def reader(place: Path, subset: str | None) -> Any:
    """What `datasets` reads the files in `place` with; its configuration says which of them are in what split.

    Left alone, it would tell their kind by those of the card's first configuration, which needn't be there. A folder
    without a card is of one subset.
    """
    import datasets

    files = {split: names for split, names in _named(place, subset).items() if names}
    name = None if _card(place) is None else subset
    return datasets.load_dataset_builder(str(place), name, data_files=files or None)


def _named(place: Path, subset: str | None) -> dict[str, list[str]]:
    """The paths of each split that the card names, if it does; none for a split that lacks files.

    Raises ValueError where it names them by their address.
    """
    from datasets.data_files import resolve_pattern, sanitize_patterns
    from datasets.utils.metadata import MetadataConfigs

    card = _card(place)
    if card is None:
        return {}
    configurations: Any = MetadataConfigs.from_dataset_card_data(card)
    chosen = subset or (configurations.get_default_config_name() if configurations else None)
    patterns = sanitize_patterns(configurations.get(chosen, {}).get("data_files") or {})
    if any("://" in name for names in patterns.values() for name in names):
        raise ValueError("its card names files by address")  # which `datasets` would ask for, though offline
    splits: dict[str, list[str]] = {split: [] for split in patterns}
    for split, names in patterns.items():
        with suppress(FileNotFoundError):
            splits[split] = [path for name in names for path in resolve_pattern(name, place.resolve().as_posix())]
    return splits


def _found(dataset: str, subset: str | None, commit: str, place: Path) -> Listing:
    """A listing of the files that are there.

    That some are missing is told by the splits that the card names, if it does, and by how many shards the names of the
    others speak of. The cache names the content of large files by its sha256.
    Raises FileNotFoundError where files are missing, and ValueError for a card that names files outside `place`.
    """
    card = _card(place)
    if not place.exists() or (subset is not None and card is None):
        raise FileNotFoundError(errno.ENOENT, "not in the cache", str(place))
    builder = reader(place, subset)
    splits: dict[str, dict[str, str | None]] = {split: {} for split in (builder.info.splits or _named(place, subset))}
    for split, files in (builder.config.data_files or {}).items():
        paths = [Path(file).parent.resolve() / Path(file).name for file in files]
        splits[str(split)] = {path.relative_to(place.resolve()).as_posix(): _sha256(path) for path in paths}
    listing = listing_of(dataset, commit, None if card is None else card.get("license"), splits)
    for names in listing.splits.values():
        shards = Counter(shard.groups() for shard in map(_SHARD.match, names) if shard)
        if not names or any(count != int(total) for (_, total), count in shards.items()):
            raise FileNotFoundError(errno.ENOENT, "not in the cache", str(place))
    return listing


def _sha256(path: Path) -> str | None:
    content = path.resolve().name
    return content if path.is_symlink() and _SHA256.fullmatch(content) else None


def _card(place: Path) -> Any:
    """What the data set's card says for programs, or None where there is no card."""
    from huggingface_hub import DatasetCard

    readme = place / "README.md"
    return DatasetCard.load(readme).data if readme.exists() else None


def _moving(revision: str | None) -> str | None:
    """The branch or tag, which may come to be another commit; None where `revision` is a commit, or none is named."""
    return None if revision is None or _COMMIT.fullmatch(revision) else revision


def _memory(dataset: str, subset: str | None, moving: str | None = None) -> Path:
    """Where a listing is kept."""
    from huggingface_hub.constants import HF_HOME

    key = " ".join(str(part) for part in (dataset, subset, *([moving] if moving else [])))
    return Path(HF_HOME) / "lmtrain" / f"{sha256_bytes(key.encode())}.json"
