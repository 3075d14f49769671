"""One file of text as a split of its own, for a trained model to be measured on."""

import tempfile
from pathlib import Path

import numpy as np

from lmtrain.data import local
from lmtrain.data.ids import Ids
from lmtrain.data.normal import write_split
from lmtrain.data.processes import perform_all
from lmtrain.data.tokenizer import Tokenizer
from lmtrain.data.tokenizing import encoding_tasks
from lmtrain.data.tokens import TOKENIZER, Split
from lmtrain.errors import LmtrainError


def text_split(path: Path, tokenizer: Tokenizer, text_column: str, *, progress: bool) -> Split:
    """The split that `path` would be in a corpus, encoded by `tokenizer`: the same ids and the same counts.

    It is made in a temporary folder and then held in memory. Raises LmtrainError when there is no such file, when its
    kind isn't one of `local.SUFFIXES` or its content can't be read, and when it has no words.
    """
    if not path.is_file() or not local.is_text(path):
        known = ", ".join(local.SUFFIXES)
        raise LmtrainError(f"{path} is no file of text: name one that is there and ends in one of {known}")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        tokenizer.save(folder / TOKENIZER)
        counts = write_split(folder, "text", local.read_lines([path], text_column), progress, str(path))
        tasks = list(encoding_tasks("text", [folder / "text.txt"], tokenizer, folder))
        records = list(perform_all(tasks, lambda lines: None))
        parts = [np.load(f"{task.stem}.npy") for task in tasks]
        starts = [np.load(f"{task.stem}.docs.npy") for task in tasks]
    tokens = [record["tokens"] for record in records]
    begins = np.cumsum([0, *tokens[:-1]])
    documents = np.concatenate([begin + own for begin, own in zip(begins, starts, strict=True)])
    return Split(
        Ids(parts),
        documents,
        sum(tokens),
        counts["words"] + counts["lines"],
        counts["bytes"],
        (sum(tokens),),
        sum(record["replaced"] for record in records),
    )
