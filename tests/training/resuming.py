"""What the tests of resuming share: a reference, the comparison with it, and what a kill leaves behind."""

import dataclasses
import itertools
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
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import Tensor

from lmtrain.config.schema import Config
from lmtrain.data.ids import Ids
from lmtrain.data.order import Mode, batch
from lmtrain.data.tokens import TokenStore
from lmtrain.storage import checkpoint
from lmtrain.storage.files import sha256_bytes
from lmtrain.training import loop, state
from lmtrain.training.budget import make_budget
from lmtrain.training.checkpoint_info import Counters
from lmtrain.training.loop import StepResult, train_step
from lmtrain.training.monitor import Monitor
from lmtrain.training.optim import learning_rate
from lmtrain.training.saving import Saver
from lmtrain.training.state import Training

BATCH = 15
FOLLOWED = 3
"""Steps that a resumed training is followed for."""
TROUBLE = {6: 1e30}
"""Factors on the loss of a step: this one overflows in any arithmetic."""

SMALL = {"model__dim": 8, "model__layers": 0, "train__batch_size": BATCH, "train__micro_batch": None}
MATRIX: dict[str, dict[str, Any]] = {
    f"{precision}, {'ema' if ema else 'no ema'}, {parts} part{'s' if parts > 1 else ''}": {
        "train__precision": precision,
        "train__ema": ema,
        "train__micro_batch": BATCH // parts,
    }
    for precision, ema, parts in itertools.product(("fp32", "bf16", "fp16"), (0.9, None), (1, 3))
}
MATRIX |= {
    "scheduled sampling": {"train__scheduled_sampling": 0.8},
    "token noise": {"train__token_noise": 0.3, "train__micro_batch": BATCH // 3},
    "copying": {"model__layers": 1, "model__copy": True, "model__tie_embeddings": False},
    "adaptive": {"model__layers": 1, "model__output": "adaptive", "train__precision": "bf16"},
    "linear attention": {"model__layers": 1, "model__attention": "linear", "train__schedule": "wsd"},
    "windowed": {"model__layers": 1, "model__mode": "windowed", "train__schedule": "linear"},
    "muon": {"model__layers": 1, "train__optimizer": "muon"},
    "muon, fp16, 3 parts": {"train__optimizer": "muon", "train__precision": "fp16", "train__micro_batch": BATCH // 3},
    "muon, bf16": {"train__optimizer": "muon", "train__precision": "bf16"},
}


class Step(NamedTuple):
    """A training after a step: a digest of each item of its state, and the windows that the step saw."""

    state: dict[str, str]
    windows: list[int]
    skipped: bool


@dataclass
class Reference:
    """An uninterrupted training, with the checkpoint of every step."""

    config: Config
    store: TokenStore
    steps: list[Step]
    folders: list[Path]


def state_of(training: Training) -> dict[str, str]:
    """Digests of all that decides how training goes on, gathered without the help of what saves it."""
    tensors: dict[str, Tensor] = {}
    for name, parameter in training.model.named_parameters():
        tensors[f"model/{name}"] = parameter.detach()
        tensors |= {f"optimizer/{name}/{entry}": value for entry, value in training.optimizer.state[parameter].items()}
    tensors |= {f"ema/{name}": value for name, value in (training.ema or {}).items()}
    digests = {
        name: sha256_bytes(f"{value.dtype} {tuple(value.shape)}".encode() + value.contiguous().numpy().tobytes())
        for name, value in tensors.items()
    }
    counters = dataclasses.asdict(training.counters) | {
        "scaler": training.scaler.state_dict(),
        "skipped": int(training.skipped),
        "in_a_row": int(training.in_a_row),
        "window": training.window.tolist(),
    }
    return digests | {f"counters/{name}": json.dumps(value, sort_keys=True) for name, value in counters.items()}


def begin(config: Config, store: TokenStore) -> Training:
    """A training that meets trouble on its way."""
    training = state.prepare(config, store, lambda message: None)
    honest = training.forward
    training.forward = lambda tokens, targets: honest(tokens, targets) * TROUBLE.get(training.counters.step, 1.0)
    return training


def go_on(training: Training, count: int) -> list[Step]:
    """Take steps as the loop does."""
    config, steps = training.config.train, []
    budget = make_budget(config, training.samples.order.per_epoch())
    with pytest.MonkeyPatch.context() as patch:
        windows: list[int] = []

        def noted(ids: Ids, starts: np.ndarray, context: int, mode: Mode) -> tuple[Tensor, Tensor]:
            windows.extend(starts.tolist())
            return batch(ids, starts, context, mode)

        patch.setattr(loop, "batch", noted)
        for _ in range(count):
            windows.clear()
            progress = budget.progress(training.counters.step, 0.0)
            lr = learning_rate(config, progress)
            result = train_step(training, lr, config.scheduled_sampling * progress)
            steps.append(Step(state_of(training), list(windows), bool(result.skipped)))
    return steps


def save(training: Training, store: TokenStore, run_dir: Path) -> Path:
    parts = state.snapshot(training, store, None, {"seconds": 1.0, "metrics_bytes": 0})
    return checkpoint.save(run_dir, training.counters.step, *parts)


def refer(config: Config, store: TokenStore, run_dir: Path, count: int) -> Reference:
    """Train without an interruption, and save after every step."""
    training = begin(config, store)
    training.counters = Counters(evaluated=2, best=4.5, best_step=1, stale=1)  # as after some evaluations
    reference = Reference(config, store, [], [])
    for _ in range(count):
        reference.steps += go_on(training, 1)
        reference.folders.append(save(training, store, run_dir))
    return reference


def departures(reference: Reference, number: int) -> list[str]:
    """Where a training that is resumed after the step `number` departs from the reference; empty = nowhere."""
    for seed in (torch.manual_seed, np.random.seed, random.seed):
        seed(1000 + number)
    training = begin(reference.config, reference.store)
    state.restore(training, checkpoint.load(reference.folders[number - 1]))
    np.random.seed(number)
    torch.rand(number)
    found = [f"at once: {name}" for name in _differing(reference.steps[number - 1].state, state_of(training))]
    followed = reference.steps[number : number + FOLLOWED]
    for later, (old, new) in enumerate(zip(followed, go_on(training, len(followed)), strict=True), start=number + 1):
        found += [f"step {later}: windows"] * (old.windows != new.windows)
        found += [f"step {later}: {name}" for name in _differing(old.state, new.state)]
    return found


def _differing(old: dict[str, str], new: dict[str, str]) -> list[str]:
    return sorted(name for name in old.keys() | new.keys() if old.get(name) != new.get(name))


@contextmanager
def photographed(run_dir: Path, folder: Path) -> Iterator[list[Path]]:
    """Copies of a run's folder, made in the block at every moment at which a kill would leave another one behind."""
    copies: list[Path] = []

    def photograph() -> None:
        copies.append(folder / f"{len(copies)}")
        shutil.copytree(run_dir, copies[-1])

    step, record, save_ = loop.train_step, Monitor._record, Saver.save

    def stepped(training: Training, lr: float, sampling: float) -> StepResult:
        result = step(training, lr, sampling)
        photograph()
        return result

    def recorded(*arguments: Any) -> None:
        record(*arguments)
        photograph()

    def saved(saver: Saver, *arguments: Any) -> None:
        save_(saver, *arguments)
        saver.wait()
        photograph()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "train_step", stepped)
        patch.setattr(Monitor, "_record", recorded)
        patch.setattr(Saver, "save", saved)
        yield copies


WATCHED = ("loss", "perplexity", "word_perplexity", "raw_loss", "lr", "grad_norm", "epoch")
"""Metrics that no clock has a part in."""
LOGGED: dict[str, Any] = {
    "model__dim": 8,
    "model__layers": 0,
    "train__steps": 6,
    "train__log_steps": 1,
    "train__eval_steps": 2,
    "train__eval_tokens": 50,
    "eval__batch_size": 256,
    "eval__stride": 16,
}


def curves(run_dir: Path) -> list[Any]:
    """All that metrics.jsonl and TensorBoard show of a run, but for the times."""
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    shown: list[Any] = [(row["kind"], row["step"], [row[name] for name in WATCHED if name in row]) for row in rows]
    events = EventAccumulator(str(run_dir / "tensorboard"))
    events.Reload()
    tags = sorted(tag for tag in events.Tags()["scalars"] if tag.partition("/")[2] in WATCHED)
    return shown + [(tag, [(event.step, event.value) for event in events.Scalars(tag)]) for tag in tags]


def worsen(training: Training, lr: float, sampling: float) -> StepResult:
    """A step that does harm from the third on."""
    result = train_step(training, 0.5 if training.counters.step >= 2 else 1e-2)
    assert training.ema is not None
    for name, value in training.model.named_parameters():
        training.ema[name].copy_(value.detach())
    return result
