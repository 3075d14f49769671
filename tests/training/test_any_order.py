"""Whatever happens to a run, in any order: its steps stay those of an uninterrupted one, and so does its end."""

import dataclasses
import errno
import os
import shutil
import signal
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from lmtrain.config.schema import Config
from lmtrain.data.tokens import TokenStore
from lmtrain.errors import LmtrainError
from lmtrain.generation.complete import complete
from lmtrain.generation.options import Options
from lmtrain.model.trained import load_trained
from lmtrain.storage import checkpoint, run_checkpoints
from lmtrain.system import disk
from lmtrain.training import loop, opening, samples
from lmtrain.training.loop import StepResult, train_step
from lmtrain.training.state import Training, restore
from tests.training.helpers import LOGGED, change, cpu, flip_bit, last_hash, run

pytestmark = pytest.mark.usefixtures("one_thread")

STEPS = st.integers(1, 6)


@dataclass
class Whole:
    """An uninterrupted run: the tensors' hashes at each step, and the state's at the end."""

    config: Config
    store: TokenStore
    folder: Path
    """For the histories' own folders."""
    tensors: dict[int, dict[str, str]]
    end: str


def tensor_hashes(folder: Path) -> dict[str, str]:
    files = checkpoint.load(folder).info["files"]
    return {name: entry["sha256"] for name, entry in files.items()}


@pytest.fixture
def whole(little: Config, little_store: TokenStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Whole:
    monkeypatch.setattr(samples, "show", lambda *arguments: None)
    config = change(little, **LOGGED | {"train__steps": 12, "train__eval_steps": 5, "train__save_minutes": 1e-9})
    every = change(config, train__keep=100)
    run(every, little_store, tmp_path / "whole")
    tensors = {
        checkpoint.load(folder).info["step"]: tensor_hashes(folder)
        for folder in run_checkpoints.folders(tmp_path / "whole")
    }
    assert list(tensors) == list(range(1, 13))
    return Whole(config, little_store, tmp_path, tensors, last_hash(tmp_path / "whole"))


class AnyOrder(RuleBasedStateMachine):
    """A run and the events that may happen to it."""

    whole: ClassVar[Whole]

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp(dir=self.whole.folder))
        self.run_dir = self.folder / "run"

    def teardown(self) -> None:
        self.train(lambda training, step: None)
        assert last_hash(self.run_dir) == self.whole.end
        shutil.rmtree(self.folder)

    def train(self, after: Callable[[Training, int], None]) -> None:
        """Train to the end; `after` is called after each step with its number in this part."""
        first: list[int] = []

        def step(training: Training, lr: float) -> StepResult:
            first.append(training.counters.step)
            result = train_step(training, lr)
            after(training, len(first))
            return result

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(loop, "train_step", step)
            run(self.whole.config, self.whole.store, self.run_dir)

    def train_or_fail(self, after: Callable[[Training, int], None], message: str) -> None:
        """Train until this error, or to the end if that comes before its cause."""
        found = message
        try:
            self.train(after)
        except LmtrainError as error:
            found = str(error)
        assert message in found

    @rule(steps=STEPS, number=st.sampled_from([signal.SIGTERM, signal.SIGINT, signal.SIGUSR1]))
    def interrupt(self, steps: int, number: int) -> None:
        self.train(lambda training, step: signal.raise_signal(number) if step == steps else None)

    @rule(steps=STEPS)
    def run_out_of_memory(self, steps: int) -> None:
        def fail(training: Training, step: int) -> None:
            if step == steps:
                raise torch.OutOfMemoryError("no more")

        self.train_or_fail(fail, "out of memory: lower train.micro_batch")

    @rule(steps=STEPS)
    def fill_the_disk(self, steps: int) -> None:
        def full(path: Path, data: bytes) -> None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        with pytest.MonkeyPatch.context() as patch:
            self.train_or_fail(
                lambda training, step: patch.setattr(disk, "write", full) if step == steps else None,
                "No space left on device",
            )

    @precondition(lambda self: len(run_checkpoints.folders(self.run_dir)) > 1)
    @rule(place=st.integers(0, 10**6), name=st.sampled_from(["model", "optimizer", "ema"]))
    def damage_the_newest(self, place: int, name: str) -> None:
        path = run_checkpoints.choose(self.run_dir, "last") / f"{name}.safetensors"
        flip_bit(path, place % path.stat().st_size)
        notes: list[str] = []
        run_checkpoints.last(self.run_dir, notes.append)
        assert "it was set aside" in notes[0]

    @precondition(lambda self: bool(run_checkpoints.folders(self.run_dir)))
    @rule()
    def generate(self) -> None:
        trained = load_trained(self.run_dir, "last", "auto", cpu())
        assert complete(trained.model, trained.tokenizer, ["The"], Options(max_tokens=3))

    @invariant()
    def every_checkpoint_is_one_of_the_uninterrupted_run(self) -> None:
        for folder in run_checkpoints.folders(self.run_dir):
            assert tensor_hashes(folder) == self.whole.tensors[checkpoint.load(folder).info["step"]]


def assert_same_end(whole: Whole, examples: int) -> None:
    """Random histories of a run: `AnyOrder` checks it after every event and at the end."""
    AnyOrder.whole = whole
    options = settings(
        max_examples=examples,
        stateful_step_count=6,
        phases=[Phase.generate],
        derandomize=True,
        deadline=None,
        database=None,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
    )
    run_state_machine_as_test(AnyOrder, settings=options)


def test_any_sequence_of_events_leads_to_the_same_end(whole: Whole) -> None:
    assert_same_end(whole, examples=15)


def test_averages_that_are_not_restored_are_detected(whole: Whole, monkeypatch: pytest.MonkeyPatch) -> None:
    def forgetful(training: Training, found: checkpoint.Checkpoint) -> None:
        restore(dataclasses.replace(training, ema=None), found)

    monkeypatch.setattr(opening, "restore", forgetful)
    with pytest.raises(AssertionError):
        assert_same_end(whole, examples=3)
