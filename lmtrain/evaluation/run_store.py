"""The corpus of a trained run, as tokens."""

from collections.abc import Callable

from lmtrain.config.loader import shown
from lmtrain.config.schema import Config, TokenizerConfig
from lmtrain.data.prepare import prepare_store
from lmtrain.data.sources import KNOWN
from lmtrain.data.tokens import TokenStore, find_store
from lmtrain.errors import LmtrainError
from lmtrain.model.trained import Trained
from lmtrain.storage.run_folder import TOKENIZER


def find_run_store(
    trained: Trained, config: Config, given: set[str], *, note: Callable[[str], None], progress: bool
) -> TokenStore:
    """The token store that the run was trained on, found by its hash.

    A missing one is created again if the user has said from what (`given` has the fields that were set) or if the
    corpus is one that lmtrain knows by name. A path or a hub id that only the run names is not read: the run may come
    from a stranger. Raises LmtrainError where there is no such store.
    """
    wanted, may_make = trained.info.get("tokens"), "data.source" in given
    if isinstance(wanted, str) and not may_make:
        for folder in (config.data.dir, config.data.dir if "data.dir" in given else trained.config.data.dir):
            if (found := find_store(folder, wanted)) is not None:
                return found
    if not may_make and config.data.source not in KNOWN:
        raise LmtrainError(
            f"the tokens that {trained.run_dir} was trained on are not in {config.data.dir}: say where they are with "
            "data.dir=FOLDER, or what to make them from with data.source=... (the run says "
            f"{shown(config.data.source)}); --text scores any file as it is"
        )
    # Another version may train another tokenizer on the same text, and a file that was given may be gone.
    config = config.model_copy(update={"tokenizer": TokenizerConfig(file=trained.run_dir / TOKENIZER)})
    store = prepare_store(config, trained_on=wanted, note=note, progress=progress)
    if store.sha256 != wanted:
        raise LmtrainError(
            f"{store.folder} is not what {trained.run_dir} was trained on: the corpus has changed or is another one, "
            "so its test split may contain text that the run was trained on. --text scores any file as it is, "
            "--data-dir names the folder of the run's own token store, and data.source=... its own text"
        )
    return store
