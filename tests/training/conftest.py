"""Fixtures of the tests of training: a smaller text, a finished run, a signal after a step, event files in order."""

import itertools
import signal
from pathlib import Path
from types import SimpleNamespace

import pytest

from lmtrain.config.schema import Config
from lmtrain.data.tokenizing import prepare_store
from lmtrain.training import loop, train_state
from lmtrain.training.loop import train_step
from tests.helpers import Interrupt
from tests.training.helpers import change, run


@pytest.fixture(autouse=True)
def event_files_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """Event files are read in the order of their names, which contain the second: give each a second of its own."""
    from tensorboard.summary.writer import event_file_writer

    seconds = itertools.count(1_700_000_000)
    monkeypatch.setattr(event_file_writer, "time", SimpleNamespace(time=lambda: next(seconds)))


@pytest.fixture(scope="session")
def little(tiny: Config) -> Config:
    """The tiny configuration on a third of its text."""
    config = change(tiny, data__sample_tokens=1000)
    prepare_store(config)
    return config


@pytest.fixture(scope="session")
def base(tiny: Config, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run that no test changes: others start from it or learn from it."""
    folder = tmp_path_factory.mktemp("base") / "run"
    run(tiny, folder)
    return folder


@pytest.fixture
def interrupt_after(monkeypatch: pytest.MonkeyPatch) -> Interrupt:
    """Send a signal at the end of the n-th step from now on."""

    def arm(steps: int, number: int = signal.SIGTERM) -> None:
        taken = 0

        def step(state: train_state.TrainState, lr: float) -> None:
            nonlocal taken
            train_step(state, lr)
            taken += 1
            if taken == steps:
                signal.raise_signal(number)

        monkeypatch.setattr(loop, "train_step", step)

    return arm
