"""The corpus of a trained run, as tokens."""

from collections.abc import Sequence

from lmtrain.config.loader import shown
from lmtrain.config.schema import Config, TokenizerConfig
from lmtrain.data.sources import KNOWN
from lmtrain.data.tokenizing import prepare_store
from lmtrain.data.tokens import TokenStore, find_store
from lmtrain.errors import LmtrainError
from lmtrain.model.trained import TrainedWeights
from lmtrain.storage.run_folder import TOKENIZER
from lmtrain.system.messages import ignore, note


def find_run_store(run: TrainedWeights, config: Config, *, may_make: bool, progress: bool) -> TokenStore:
    """The token store that the run was trained on, found by its hash in the data folder of `config` or of the run.

    A missing one is created again if the user has named data.source (`may_make`; it is then not searched for) or if
    the corpus is one that lmtrain knows by name. A path or a hub id that only the run names is not read: the run may
    come from a stranger. Of a run of an earlier version the hash is not known, and a note says so. How a store is made
    is noted only with `progress`.
    Raises LmtrainError where there is no such store.
    """
    wanted = run.info.get("store")
    if isinstance(wanted, str) and not may_make:
        for folder in (config.data.dir, run.config.data.dir):
            if (found := find_store(folder, wanted, note)) is not None:
                return found
    if not may_make and config.data.source not in KNOWN:
        raise LmtrainError(
            f"the tokens that {run.run_dir} was trained on are not in {config.data.dir}: say where they are with "
            "data.dir=FOLDER, or what to make them from with data.source=... (the run says "
            f"{shown(config.data.source)}); --text scores any file as it is"
        )
    # Another version may train another tokenizer on the same text, and a file that was given may be gone.
    config = config.model_copy(update={"tokenizer": TokenizerConfig(file=run.run_dir / TOKENIZER)})
    store = prepare_store(config, trained_on=wanted, note=note if progress else ignore)
    if wanted is None:
        note(f"{run.run_dir} is of an earlier version: whether {store.folder} is its text can't be checked")
    elif store.sha256 != wanted:
        raise LmtrainError(
            f"{store.folder} is not what {run.run_dir} was trained on: the corpus has changed or is another one, "
            "so its test split may contain text that the run was trained on. --text scores any file as it is, "
            "data.dir=... names the folder of the run's own token store, and data.source=... its own text"
        )
    return store


def check_same_corpus(members: Sequence[TrainedWeights]) -> None:
    """Raise LmtrainError unless all members were trained on the same tokens: the split of one may be in what another
    has learned."""
    first, *others = members
    for other in others:
        # Runs of earlier versions have a hash called `tokens`, by which two of them can be compared.
        if any(other.info.get(name) != first.info.get(name) for name in ("store", "tokens")):
            raise LmtrainError(
                f"{other.run_dir} and {first.run_dir} were trained on different corpora, and a split of one may "
                "contain text that the other was trained on: leave one of them out, or score a file with --text"
            )
