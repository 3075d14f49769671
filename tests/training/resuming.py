"""The tests of resuming: a reference run, the comparison of a resumed run with it, and copies for every kill."""

import json
import random
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

from lmtrain.config.schema import Config
from lmtrain.data.order import SampleOrder
from lmtrain.evaluation.perplexity import Forward
from lmtrain.storage import checkpoint
from lmtrain.storage.files import sha256_bytes
from lmtrain.training import loop, train_state
from lmtrain.training.loop import train_step
from lmtrain.training.monitor import RunMonitor
from lmtrain.training.saving import CheckpointSaver
from lmtrain.training.schedule import learning_rate, make_budget
from lmtrain.training.train_state import TrainState
from tests.training.helpers import CIRCUMSTANCES, start, with_forward

BATCH = 15
FOLLOWED = 3
"""Steps for which resumed training is compared."""
OVERFLOW = {6: 1e30}
"""Factors on the loss of a step: this one overflows in any precision."""

SMALL = {"model__dim": 8, "model__layers": 0, "train__batch_size": BATCH, "train__micro_batch": None}
MATRIX: dict[str, dict[str, Any]] = {
    f"{precision}, {'ema' if ema else 'no ema'}, {micros} micro-batch{'es' if micros > 1 else ''}": {
        "train__precision": precision,
        "train__ema": ema,
        "train__micro_batch": BATCH // micros,
    }
    for precision, ema, micros in (("fp32", 0.9, 1), ("bf16", None, 3), ("fp16", 0.9, 1), ("fp16", None, 3))
}
MATRIX |= {
    "token noise": {"train__token_noise": 0.3, "train__micro_batch": BATCH // 3},
    "copying": {"model__layers": 1, "model__copy": True, "model__tie_embeddings": False},
    "adaptive": {"model__layers": 1, "model__output": "adaptive", "train__precision": "bf16"},
    "linear attention": {"model__layers": 1, "model__attention": "linear", "train__schedule": "wsd"},
    "windowed": {"model__layers": 1, "model__mode": "windowed", "train__schedule": "linear"},
    "muon": {"model__layers": 1, "train__optimizer": "muon"},
    "muon, fp16, 3 micro-batches": {
        "train__optimizer": "muon",
        "train__precision": "fp16",
        "train__micro_batch": BATCH // 3,
    },
}


class Step(NamedTuple):
    """The state of training after a step: a digest of each item of its state, and the windows that the step read."""

    state: dict[str, str]
    windows: list[int]
    skipped: bool


@dataclass
class Reference:
    """Uninterrupted training, with the checkpoint of every step."""

    config: Config
    steps: list[Step]
    folders: list[Path]


def state_of(state: TrainState) -> dict[str, str]:
    """Digests of everything that determines how training continues, collected without the code that saves it."""
    tensors: dict[str, Tensor] = {}
    for name, parameter in state.model.named_parameters():
        tensors[f"model/{name}"] = parameter.detach()
        tensors |= {f"optimizer/{name}/{entry}": value for entry, value in state.optimizer.state[parameter].items()}
    tensors |= {f"ema/{name}": value for name, value in state.ema.items()}
    digests = {
        name: sha256_bytes(f"{value.dtype} {tuple(value.shape)}".encode() + value.contiguous().numpy().tobytes())
        for name, value in tensors.items()
    }
    counters = {name: getattr(state, name) for name in ("step", "evaluated", "best", "stale")} | {
        "scaler": state.scaler.state_dict(),
        "skipped": int(state.statistics.skipped),
        "in_a_row": int(state.statistics.in_a_row),
        "window": state.statistics.sums.tolist(),
    }
    return digests | {f"counters/{name}": json.dumps(value, sort_keys=True) for name, value in counters.items()}


def begin(config: Config) -> TrainState:
    """Training whose loss overflows in one step."""
    state = start(config)

    def overflowing(forward: Forward) -> Forward:
        return lambda tokens, targets: forward(tokens, targets) * OVERFLOW.get(state.step, 1.0)

    return with_forward(state, overflowing)


def take_steps(state: TrainState, count: int) -> list[Step]:
    """Take steps as the loop does."""
    config, starts, steps = state.config.train, SampleOrder.starts, []
    budget = make_budget(state.config, state.store)
    with pytest.MonkeyPatch.context() as patch:
        windows: list[int] = []

        def noted(order: SampleOrder, first: int, count: int) -> np.ndarray:
            found = starts(order, first, count)
            windows.extend(found.tolist())
            return found

        patch.setattr(SampleOrder, "starts", noted)
        for _ in range(count):
            windows.clear()
            lr = learning_rate(config, budget, state.step, 0.0)
            skipped = int(state.statistics.skipped)
            train_step(state, lr)
            steps.append(Step(state_of(state), list(windows), int(state.statistics.skipped) > skipped))
    return steps


def refer(config: Config, run_dir: Path, count: int) -> Reference:
    """Train without an interruption, and save after every step."""
    state = begin(config)
    state.evaluated, state.best, state.stale = 2, 4.5, 1  # as after some evaluations
    reference = Reference(config, [], [])
    for _ in range(count):
        reference.steps += take_steps(state, 1)
        parts = train_state.snapshot(state, None, **CIRCUMSTANCES)
        reference.folders.append(checkpoint.save(run_dir, state.step, *parts))
    return reference


def departures(reference: Reference, number: int) -> list[str]:
    """Where training that is resumed after the step `number` departs from the reference; empty = nowhere."""
    for seed in (torch.manual_seed, np.random.seed, random.seed):
        seed(1000 + number)
    state = begin(reference.config)
    train_state.restore(state, checkpoint.load(reference.folders[number - 1]))
    np.random.seed(number)
    torch.rand(number)
    found = [f"at once: {name}" for name in _differing(reference.steps[number - 1].state, state_of(state))]
    followed = reference.steps[number : number + FOLLOWED]
    for later, (old, new) in enumerate(zip(followed, take_steps(state, len(followed)), strict=True), start=number + 1):
        found += [f"step {later}: windows"] * (old.windows != new.windows)
        found += [f"step {later}: {name}" for name in _differing(old.state, new.state)]
    return found


def _differing(old: dict[str, str], new: dict[str, str]) -> list[str]:
    return sorted(name for name in old.keys() | new.keys() if old.get(name) != new.get(name))


@contextmanager
def copied_for_every_kill(run_dir: Path, folder: Path) -> Iterator[list[Path]]:
    """Copies of a run's folder, made in the block at every moment at which a kill would leave another one behind."""
    copies: list[Path] = []

    def copy() -> None:
        copies.append(folder / f"{len(copies)}")
        shutil.copytree(run_dir, copies[-1])

    step, record, save_ = loop.train_step, RunMonitor.record, CheckpointSaver.save

    def stepped(state: TrainState, lr: float) -> None:
        step(state, lr)
        copy()

    def recorded(*arguments: Any) -> None:
        record(*arguments)
        copy()

    def saved(saver: CheckpointSaver, *arguments: Any) -> None:
        save_(saver, *arguments)
        saver.wait()
        copy()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "train_step", stepped)
        patch.setattr(RunMonitor, "record", recorded)
        patch.setattr(CheckpointSaver, "save", saved)
        yield copies
