"""`lmtrain download` and `lmtrain tokenize`."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from lmtrain.cli.options import (
    ConfigFile,
    DataDir,
    Force,
    Json,
    Overrides,
    Quiet,
    Revision,
    Source,
    Subset,
    TextColumn,
    as_overrides,
    split_source,
)
from lmtrain.cli.output import show, table
from lmtrain.errors import UsageError
from lmtrain.system.messages import ignore, note

UNITS = ("tokens", "words", "lines", "bytes", "documents")


class Kind(StrEnum):
    """The kinds of tokenizer."""

    auto = "auto"
    word = "word"
    bpe = "bpe"
    byte = "byte"


def download(
    source: Source = None,
    overrides: Overrides = None,
    config: ConfigFile = None,
    subset: Subset = None,
    revision: Revision = None,
    text_column: TextColumn = None,
    data_dir: DataDir = None,
    force: Force = False,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Fetch a corpus from the Hugging Face Hub, local files, or the built-in sample into the data folder.

    Does nothing if the corpus exists and is unchanged.
    """
    from lmtrain.config.loader import load
    from lmtrain.data.corpus import download as make_corpus

    data = load(config, _overrides(source, overrides, subset, revision, text_column, data_dir)).data
    corpus = make_corpus(data, force=force, note=ignore if quiet else note, progress=not quiet)
    counts = {split: corpus.manifest["splits"][split] for split in corpus.splits}
    show({"folder": str(corpus.folder), **corpus.manifest}, f"{corpus.folder}\n{table(counts)}", as_json)


def tokenize(
    source: Source = None,
    overrides: Overrides = None,
    config: ConfigFile = None,
    subset: Subset = None,
    revision: Revision = None,
    text_column: TextColumn = None,
    kind: Annotated[Kind | None, typer.Option(help="auto, the default: word or bpe, as suits the text.")] = None,
    vocab_size: Annotated[int | None, typer.Option(metavar="N", help="Maximum vocabulary size.")] = None,
    tokenizer: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Use this tokenizer.json, of a run or any published model, instead of training one."
        ),
    ] = None,
    data_dir: DataDir = None,
    force: Force = False,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Train a tokenizer on the training split, or use an existing one, and write the corpus as token ids.

    Downloads the corpus first if it is missing. Does nothing if the ids exist and are unchanged.
    """
    from lmtrain.config.loader import load
    from lmtrain.data.prepare import prepare_store

    if tokenizer is not None and (kind, vocab_size) != (None, None):
        raise UsageError("--tokenizer has a kind and a vocabulary of its own: leave --kind and --vocab-size out")
    given = _overrides(source, overrides, subset, revision, text_column, data_dir)
    given += as_overrides({"tokenizer.kind": kind, "tokenizer.vocab_size": vocab_size, "tokenizer.file": tokenizer})
    store = prepare_store(load(config, given), force=force, note=ignore if quiet else note, progress=not quiet)
    counts = {split: {unit: store.manifest["splits"][split][unit] for unit in UNITS} for split in store.splits}
    heading = f"{store.folder}\n{store.tokenizer.vocab_size:,} entries ({store.tokenizer.kind})"
    show({"folder": str(store.folder), **store.manifest}, f"{heading}\n{table(counts)}", as_json)


def _overrides(
    source: str | None,
    overrides: list[str] | None,
    subset: str | None,
    revision: str | None,
    text_column: str | None,
    data_dir: Path | None,
) -> list[str]:
    source, overrides = split_source(source, overrides)
    given = {"source": source, "subset": subset, "revision": revision, "text_column": text_column, "dir": data_dir}
    return [*overrides, *as_overrides({f"data.{key}": value for key, value in given.items()})]
