"""From a configuration to the tokens that it asks for."""

from collections.abc import Callable

from lmtrain.config.schema import Config
from lmtrain.data.corpus import download, each
from lmtrain.data.tokenizing import tokenize
from lmtrain.data.tokens import TokenStore


def prepare_store(
    config: Config, *, force: bool = False, verify: bool = False, note: Callable[[str], None], progress: bool
) -> TokenStore:
    """The token store of a configuration; what is missing before it is made, with `force` the store itself anew.

    `verify` checks every file, even those checked before; `note` receives one-line messages. Raises LmtrainError as
    `corpus.download` and `tokenizing.tokenize` do.
    """
    corpora = [download(data, anew=verify, note=note, progress=progress) for data in each(config.data)]
    return tokenize(
        corpora,
        config.tokenizer,
        config.data.dir,
        weights=[source.weight for source in config.data.sources or ()] or None,
        force=force,
        anew=verify,
        note=note,
        progress=progress,
    )
