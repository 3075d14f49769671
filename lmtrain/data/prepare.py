"""The two ways to tokens: what a configuration asks for as a token store, one text as a split."""

import tempfile
from pathlib import Path

import numpy as np

from lmtrain.config.schema import Config
from lmtrain.data.corpus import download
from lmtrain.data.encoding import encode_text, lines_of
from lmtrain.data.splits import Lines, document_starts, write_split
from lmtrain.data.tokenizer import Tokenizer
from lmtrain.data.tokenizing import tokenize
from lmtrain.data.tokens import Split, TokenStore, find_store
from lmtrain.storage.files import writing
from lmtrain.system.messages import Note


def prepare_store(
    config: Config,
    *,
    trained_on: str | None = None,
    note: Note,
    progress: bool,
) -> TokenStore:
    """The token store of a configuration; a missing corpus is downloaded first.

    A store of the same text whose hash is `trained_on` is used whatever the configuration of its tokenizer. `note`
    receives one-line messages. Raises LmtrainError as `corpus.download` and `tokenizing.tokenize` do.
    """
    corpus = download(config.data, note=note, progress=progress)
    found = find_store(config.data.dir, trained_on, note) if trained_on is not None else None
    if found is not None and corpus.sha256 == found.manifest["corpus_sha256"]:
        return found
    return tokenize(corpus, config.tokenizer, config.data.dir, note=note, progress=progress)


def text_split(lines: Lines, tokenizer: Tokenizer, *, called: str, progress: bool) -> Split:
    """The split that these lines would be in a corpus, encoded by `tokenizer`: the same ids and the same counts.

    They are written to a temporary folder; the ids are held in memory. Raises LmtrainError when there are no words,
    which the message says of `called`, and when `lines` does.
    """
    temporary = Path(tempfile.gettempdir())
    with writing(temporary), tempfile.TemporaryDirectory(dir=temporary) as name:
        folder = Path(name)
        counts = write_split(folder, "text", lines, progress, called)
        text = folder / "text.txt"
        parts, replaced = zip(*encode_text(lines_of(text), document_starts(text), tokenizer), strict=True)
    return Split(np.concatenate(parts), counts["words"] + counts["lines"], counts["bytes"], sum(replaced))
