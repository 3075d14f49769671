"""TensorBoard's files of runs that follow each other faster than real ones do."""

import itertools
from types import SimpleNamespace

import pytest


@pytest.fixture(autouse=True)
def event_files_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """Event files are read in the order of their names, which hold the second: give each a second of its own."""
    from tensorboard.summary.writer import event_file_writer

    seconds = itertools.count(1_700_000_000)
    monkeypatch.setattr(event_file_writer, "time", SimpleNamespace(time=lambda: next(seconds)))
