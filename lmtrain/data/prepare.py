"""The two ways to tokens: what a configuration asks for as a token store, one file of text as a split."""

import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np

from lmtrain.config.schema import Config
from lmtrain.data import local
from lmtrain.data.corpus import download, each
from lmtrain.data.ids import Ids
from lmtrain.data.processes import perform_all
from lmtrain.data.shards import TOKENIZER, encoding_tasks
from lmtrain.data.splits import write_split
from lmtrain.data.tokenizer import Tokenizer
from lmtrain.data.tokenizing import tokenize
from lmtrain.data.tokens import Split, TokenStore
from lmtrain.errors import LmtrainError


def prepare_store(
    config: Config, *, force: bool = False, verify: bool = False, note: Callable[[str], None], progress: bool
) -> TokenStore:
    """The token store of a configuration; missing corpora are downloaded first. With `force` the store is made again.

    `verify` reads every file to check it, even those checked before; `note` receives one-line messages. Raises
    LmtrainError as `corpus.download` and `tokenizing.tokenize` do.
    """
    corpora = [download(data, reread=verify, note=note, progress=progress) for data in each(config.data)]
    return tokenize(
        corpora,
        config.tokenizer,
        config.data.dir,
        weights=[source.weight for source in config.data.sources or ()] or None,
        force=force,
        reread=verify,
        note=note,
        progress=progress,
    )


def text_split(path: Path, tokenizer: Tokenizer, text_column: str, *, progress: bool) -> Split:
    """The split that `path` would be in a corpus, encoded by `tokenizer`: the same ids and the same counts.

    It is made in a temporary folder and then held in memory. Raises LmtrainError when the file is missing or of another
    kind than `local.SUFFIXES`, when its content can't be read, and when it has no words.
    """
    if not path.is_file() or not local.is_text(path):
        known = ", ".join(local.SUFFIXES)
        raise LmtrainError(f"{path} is no file of text: name an existing one that ends in one of {known}")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        tokenizer.save(folder / TOKENIZER)
        counts = write_split(folder, "text", local.read_lines([path], text_column), progress, str(path))
        tasks = encoding_tasks("text", [folder / "text.txt"], tokenizer, folder)
        records = list(perform_all(tasks, lambda _lines: None))
        ids = Ids([np.load(f"{task.stem}.npy") for task in tasks])
    words, replaced = counts["words"] + counts["lines"], sum(record["replaced"] for record in records)
    return Split(ids, len(ids), words, counts["bytes"], (len(ids),), replaced)
