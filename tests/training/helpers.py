"""What the tests of training share: changed configurations, short runs, curves, signals at a given moment."""

import errno
import json
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import Tensor

from lmtrain.config.schema import Config
from lmtrain.data.tokenizing import prepare_store
from lmtrain.evaluation.perplexity import Forward
from lmtrain.storage import checkpoint, run_checkpoints, run_folder
from lmtrain.storage.files import read_manifest, sha256_bytes, verify
from lmtrain.system.process_group import SINGLE_PROCESS, ProcessGroup
from lmtrain.training.finished import Outcome
from lmtrain.training.loop import fit, train_step
from lmtrain.training.train_state import TrainState, new_state
from tests.helpers import messages, state_hash

LOGGED: dict[str, Any] = {
    "model__dim": 8,
    "model__layers": 0,
    "train__steps": 6,
    "train__log_steps": 1,
    "train__eval_steps": 2,
    "train__eval_tokens": 50,
    "eval__stride": 16,
}
"""A very small run that logs every step."""
CIRCUMSTANCES: dict[str, Any] = {"prepared": 0.0, "seconds": 1.0, "metrics_bytes": 0}
"""What `snapshot` is given of the clock and the log."""
TIMED = ("tokens_per_second", "mfu", "memory_gb", "minutes")
"""Metrics that differ between two runs of the same computation."""


def change(config: Config, **fields: Any) -> Config:
    """The configuration with fields changed, given as section__field."""
    values = config.model_dump(mode="json")
    for name, value in fields.items():
        section, _, field = name.partition("__")
        values[section][field] = value
    return Config.model_validate(values)


def without_dropout(config: Config) -> Config:
    fields = [name for name in config.model_dump()["model"] if name.endswith("dropout")]
    return change(config, **{f"model__{name}": 0.0 for name in fields})


def start(config: Config, processes: ProcessGroup = SINGLE_PROCESS) -> TrainState:
    return new_state(config, prepare_store(config), processes)


def run(
    config: Config, run_dir: Path, *, quiet: bool = True, processes: ProcessGroup = SINGLE_PROCESS
) -> tuple[Outcome, list[str]]:
    """How the run ended, and its messages; if quiet, its warnings."""
    store = prepare_store(config)
    with messages(logging.WARNING if quiet else logging.INFO) as notes:
        outcome = fit(config, store, run_dir, processes=processes)
    return outcome, notes


def run_interrupted(config: Config, run_dir: Path) -> None:
    """Train until a signal ends the run."""
    with pytest.raises(KeyboardInterrupt):
        run(config, run_dir)


def with_forward(state: TrainState, wrap: Callable[[Forward], Forward]) -> TrainState:
    """The same training with another forward pass."""
    state.forward = wrap(state.forward)
    return state


def scaled_step(state: TrainState, lr: float, factor: float) -> None:
    """Take a step with the loss times `factor`."""
    forward = state.forward
    train_step(with_forward(state, lambda forward: lambda *batch: forward(*batch) * factor), lr)
    state.forward = forward


def take_step(state: TrainState, lr: float) -> Tensor:
    """Take a step: its loss and its gradient norm, (2,); 0 if it was skipped."""
    state.statistics.sums.zero_()
    train_step(state, lr)
    return state.statistics.sums[:2].float()


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


def worsen(state: TrainState, _lr: float) -> None:
    """A step that makes the model worse from the third on."""
    train_step(state, 0.5 if state.step >= 2 else 3e-3)
    for name, value in state.model.named_parameters():
        state.ema[name].copy_(value.detach())


def full_disk(path: Path, data: object) -> NoReturn:
    """In place of `disk.write`."""
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def last_hash(run_dir: Path) -> str:
    return state_hash(checkpoint.load(run_checkpoints.choose(run_dir, "last")))


def verified_steps(run_dir: Path) -> list[int]:
    """The steps of a run's checkpoints, all of them whole."""
    for folder in run_checkpoints.folders(run_dir):
        verify(folder, read_manifest(folder, checkpoint.FORMAT)["files"])
    return [run_folder.step_of(folder) for folder in run_checkpoints.folders(run_dir)]


def run_state(run_dir: Path) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads((run_dir / run_folder.STATE).read_text())
    return loaded


def metrics(run_dir: Path) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl, in strict JSON."""

    def reject(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    text = (run_dir / "metrics.jsonl").read_text()
    assert text.endswith("\n")
    return [json.loads(line, parse_constant=reject) for line in text.splitlines()]


def events(run_dir: Path) -> EventAccumulator:
    """What TensorBoard reads: one run, named as its folder."""
    assert {path.parent for path in run_dir.rglob("events*")} == {run_dir}
    return EventAccumulator(str(run_dir), size_guidance={"scalars": 0, "tensors": 0}).Reload()


def logged(run_dir: Path) -> list[tuple[str, int, list[float]]]:
    """What metrics.jsonl contains, except for times."""
    rows = [{name: value for name, value in row.items() if name not in TIMED} for row in metrics(run_dir)]
    return [(row.pop("kind"), row.pop("step"), [*row.values()]) for row in rows]


def curves(run_dir: Path) -> list[Any]:
    """What metrics.jsonl and TensorBoard show of a run, except for times."""
    read = events(run_dir)
    tags = sorted(tag for tag in read.Tags()["scalars"] if not tag.startswith("speed/"))
    shown = [(tag, [(event.step, event.value) for event in read.Scalars(tag)]) for tag in tags]
    return [*logged(run_dir), *shown]
