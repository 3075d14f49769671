"""Negative controls of the tests of resuming: each item of the state, omitted on purpose, is detected by its name."""

import dataclasses
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from lmtrain.config.schema import Config
from lmtrain.data.order import SampleOrder
from lmtrain.data.tokens import TokenStore
from lmtrain.errors import LmtrainError
from lmtrain.storage import checkpoint
from lmtrain.storage.checkpoint import Checkpoint
from lmtrain.training import loop, opening, state
from lmtrain.training.checkpoint_info import Counters, read_info
from lmtrain.training.randomness import step_seed
from lmtrain.training.state import Training, restore
from tests.training.helpers import LOGGED, change, curves, run
from tests.training.resuming import BATCH, MATRIX, SMALL, Reference, begin, departures, refer

pytestmark = pytest.mark.usefixtures("one_thread")

STEPS, CUT = 12, 7
PARTS = ("model", "optimizer", "ema", "counters")
FRESH = dataclasses.asdict(Counters(scaler=torch.amp.GradScaler("cpu").state_dict()))
ITEMS = (
    "model/embedding.weight",
    *(f"optimizer/embedding.weight/{entry}" for entry in ("exp_avg", "exp_avg_sq", "step")),
    "ema/embedding.weight",
    *(f"counters/{name}" for name in FRESH),
)

Refer = Callable[[str], Reference]


@pytest.fixture(scope="module")
def references() -> dict[str, Reference]:
    return {}


@pytest.fixture
def refer_to(
    one_thread: None,
    references: dict[str, Reference],
    little: Config,
    little_store: TokenStore,
    tmp_path_factory: pytest.TempPathFactory,
) -> Refer:
    """A reference run in which the item matters, and from which an honest resume does not depart."""

    def find(item: str) -> Reference:
        variant = f"{'fp16' if item == 'counters/scaler' else 'fp32'}, ema, 1 micro-batch"
        if variant not in references:
            config = change(little, **SMALL | MATRIX[variant] | {"train__steps": STEPS})
            references[variant] = refer(config, little_store, tmp_path_factory.mktemp("reference"), STEPS)
        assert departures(references[variant], CUT) == []
        return references[variant]

    return find


def without(found: Checkpoint, item: str) -> Checkpoint:
    """The checkpoint with one item as in a new run, or zero."""
    group, _, name = item.partition("/")
    if group == "counters":
        counters = found.info["counters"] | {name: FRESH[name]}
        return dataclasses.replace(found, info=found.info | {"counters": counters})
    zeros = {name: torch.zeros(found.tensors[group][name].shape)}
    tensors: Any = {**found.tensors, group: {**found.tensors[group], **zeros}}
    return dataclasses.replace(found, tensors=tensors)


@pytest.mark.parametrize("item", ITEMS)
def test_an_item_that_is_not_restored_is_detected(refer_to: Refer, monkeypatch: pytest.MonkeyPatch, item: str) -> None:
    reference = refer_to(item)

    def forgetful(training: Training, found: Checkpoint) -> None:
        restore(training, without(found, item))

    monkeypatch.setattr(state, "restore", forgetful)
    at_once = [line for line in departures(reference, CUT) if line.startswith("at once")]
    assert at_once == [f"at once: {item}"]


@pytest.mark.parametrize("item", ["model", "optimizer", "ema", "scaler"])
def test_a_checkpoint_without_an_item_is_rejected(refer_to: Refer, item: str) -> None:
    reference = refer_to(f"counters/{item}")
    found = checkpoint.load(reference.folders[CUT - 1])
    tensors: Any = {group: named if group != item else {} for group, named in found.tensors.items()}
    counters = {name: value for name, value in found.info["counters"].items() if name != item}
    damaged = dataclasses.replace(found, tensors=tensors, info=found.info | {"counters": counters})
    with pytest.raises(LmtrainError, match="does not fit"):
        restore(begin(reference.config, reference.store), damaged)


def test_out_of_memory_is_not_called_a_checkpoint_that_does_not_fit(
    refer_to: Refer, monkeypatch: pytest.MonkeyPatch
) -> None:
    reference = refer_to("model")

    def full(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(state, "copy_all", full)
    with pytest.raises(torch.OutOfMemoryError):
        restore(begin(reference.config, reference.store), checkpoint.load(reference.folders[CUT - 1]))


def test_a_wrong_position_in_the_data_is_detected(refer_to: Refer, monkeypatch: pytest.MonkeyPatch) -> None:
    reference, starts = refer_to("order"), SampleOrder.starts
    monkeypatch.setattr(SampleOrder, "starts", lambda self, first, count: starts(self, first - CUT * BATCH, count))
    assert departures(reference, CUT)[0] == f"step {CUT + 1}: windows"


def test_a_wrong_seed_is_detected(refer_to: Refer, monkeypatch: pytest.MonkeyPatch) -> None:
    reference = refer_to("dropout")
    monkeypatch.setattr(loop, "step_seed", lambda seed, step, micro: step_seed(seed, step - CUT, micro))
    found = departures(reference, CUT)
    assert found
    assert {line.partition("/")[0] for line in found if "windows" not in line} == {
        f"step {step}: {part}" for step in (CUT + 1, CUT + 2, CUT + 3) for part in PARTS
    }


def test_a_wrong_length_of_the_metrics_is_detected(
    little: Config,
    little_store: TokenStore,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    interrupt_after: Callable[[int, int], None],
) -> None:
    config = change(little, **LOGGED)
    run(config, little_store, tmp_path / "whole")
    interrupt_after(3, signal.SIGTERM)
    run(config, little_store, tmp_path / "parts")
    monkeypatch.setattr(opening, "read_info", lambda found: dataclasses.replace(read_info(found), metrics_bytes=0))
    run(config, little_store, tmp_path / "parts")
    assert curves(tmp_path / "parts") != curves(tmp_path / "whole")
