"""`lmtrain download` and `lmtrain tokenize`."""

from lmtrain.cli.options import ConfigFile, Json, Overrides, Quiet, Source, arguments
from lmtrain.cli.output import show, table


def download(
    source: Source = None,
    overrides: Overrides = None,
    config: ConfigFile = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Fetch a corpus into the data folder.

    Its source is the Hugging Face Hub, local files, or the built-in sample. An existing corpus is reused if it is
    undamaged.
    """
    from lmtrain.config.loader import load, with_source
    from lmtrain.data.corpus import make_corpus

    data = load(config, with_source(arguments(source, overrides))).data
    corpus = make_corpus(data)
    show({"folder": str(corpus.folder), **corpus.manifest}, f"{corpus.folder}\n{table(corpus.splits)}", as_json)


def tokenize(
    source: Source = None,
    overrides: Overrides = None,
    config: ConfigFile = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Write a corpus as token ids.

    Trains a tokenizer on the training split, or uses an existing one. Downloads the corpus first if it is missing.
    Existing ids are reused if they are undamaged.
    """
    from lmtrain.config.loader import load, with_source
    from lmtrain.data.tokenizing import prepare_store

    settings = load(config, with_source(arguments(source, overrides)))
    store = prepare_store(settings)
    units = ("tokens", "words", "lines", "bytes", "documents")
    counts = {split: {unit: store.manifest["splits"][split][unit] for unit in units} for split in store.splits}
    heading = f"{store.folder}\n{store.tokenizer.vocab_size:,} entries ({store.tokenizer.kind})"
    show({"folder": str(store.folder), **store.manifest}, f"{heading}\n{table(counts)}", as_json)
