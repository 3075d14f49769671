"""TensorBoard's files of runs that follow each other faster than real ones do."""

import itertools
from types import SimpleNamespace

import pytest

from lmtrain.config import parse
from lmtrain.data.corpus import download
from lmtrain.data.tokenizing import tokenize
from lmtrain.data.tokens import TokenStore
from lmtrain.schema import Config


@pytest.fixture(autouse=True)
def event_files_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """Event files are read in the order of their names, which hold the second: give each a second of its own."""
    from tensorboard.summary.writer import event_file_writer

    seconds = itertools.count(1_700_000_000)
    monkeypatch.setattr(event_file_writer, "time", SimpleNamespace(time=lambda: next(seconds)))


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch, one_thread: None) -> None:
    """One thread, and spikes that are told after few steps."""
    monkeypatch.setattr("lmtrain.training.spikes.MEMORY", 4)


@pytest.fixture(scope="session")
def little(tiny: Config) -> Config:
    """The tiny configuration on a third of its text."""
    values = tiny.model_dump(mode="json")
    values["data"]["sample_tokens"] = 1000
    return parse(values, "little")


@pytest.fixture(scope="session")
def little_store(little: Config) -> TokenStore:
    corpus = download(little.data, note=lambda message: None, progress=False)
    return tokenize(corpus, little.tokenizer, little.data.dir, note=lambda message: None, progress=False)
