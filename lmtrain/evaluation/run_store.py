"""Finds or makes the token store that a run was trained on."""

from collections.abc import Sequence

from lmtrain.config.mistakes import shown
from lmtrain.config.schema import DataConfig
from lmtrain.data.sources import KNOWN
from lmtrain.data.tokenizing import prepare_run_store
from lmtrain.data.tokens import TokenStore, find_store
from lmtrain.errors import LmtrainError
from lmtrain.model.trained import TrainedWeights
from lmtrain.system.messages import log


def find_run_store(run: TrainedWeights, data: DataConfig, *, may_make: bool) -> TokenStore:
    """Return the token store that the run was trained on, found by its hash in the folder of `data` or of the run.

    With `may_make`, the user has named data.source: the store holds its text, or is made from it. Without, a missing
    store is made only if lmtrain knows the corpus by name: a path or a hub id that only the run names is not read,
    because the run may come from a stranger. A run of an earlier version has no hash, and a warning says so.
    Raises LmtrainError if the store is not found, or if the one that is made is another.
    """
    trained_on = run.info.get("store")
    folders = dict.fromkeys(path.absolute() for path in (data.dir, run.config.data.dir))
    found = next(filter(None, (find_store(folder, trained_on) for folder in folders)), None)
    if not may_make:
        if found is not None:
            return found
        if data.source not in KNOWN:
            raise LmtrainError(
                f"the tokens that {run.run_dir} was trained on are not in {data.dir}: say where they are with "
                "data.dir=FOLDER, or what to make them from with data.source=... (the run says "
                f"{shown(data.source)}); --text scores any file as it is"
            )
    store = prepare_run_store(data, run.run_dir, found)
    if trained_on is None:
        log.warning(f"{run.run_dir} is of an earlier version: lmtrain can't check that {store.folder} is its text")
    elif store.sha256 != trained_on:
        raise LmtrainError(
            f"{store.folder} is not what {run.run_dir} was trained on: the corpus has changed or is another one, "
            "so its test split may contain text that the run was trained on. --text scores any file as it is, "
            "data.dir=... names the folder of the run's own token store, and data.source=... its own text"
        )
    return store


def check_same_corpus(members: Sequence[TrainedWeights]) -> None:
    """Raise LmtrainError unless all members were trained on the same tokens: else a split of one corpus may be in the
    training text of another."""
    first, *others = members
    for other in others:
        # Runs of earlier versions have a hash called `tokens`, by which two of them can be compared.
        if any(other.info.get(name) != first.info.get(name) for name in ("store", "tokens")):
            raise LmtrainError(
                f"{other.run_dir} and {first.run_dir} were trained on different corpora, and a split of one may "
                "contain text that the other was trained on: leave one of them out, or score a file with --text and "
                "without --dynamic"
            )
