"""Negative controls of the tests of resuming: each item of the state, omitted on purpose, is detected by its name."""

import dataclasses
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from lmtrain.config.schema import Config
from lmtrain.data.order import SampleOrder
from lmtrain.data.tokens import TokenStore
from lmtrain.errors import LmtrainError
from lmtrain.storage import checkpoint, run_checkpoints, run_folder
from lmtrain.system.seeds import step_seed
from lmtrain.training import loop, opening, samples, state
from lmtrain.training.checkpoint_info import CheckpointInfo, Counters, read_info
from lmtrain.training.state import Samples, Training, restore, snapshot
from tests.training.helpers import LOGGED, change, curves, run, start
from tests.training.resuming import (
    BATCH,
    MATRIX,
    SMALL,
    Reference,
    begin,
    copied_for_every_kill,
    departures,
    refer,
    save,
)

pytestmark = pytest.mark.usefixtures("one_thread")

STEPS, CUT = 12, 7


PARTS = ("model", "optimizer", "ema", "counters")


class Shifted(SampleOrder):
    """A sample order that starts again at the beginning."""

    def starts(self, first: int, count: int) -> Any:
        return super().starts(first - CUT * BATCH, count)


def _weights(training: Training, fresh: Training) -> None:
    training.model.load_state_dict(fresh.model.state_dict())


def _moment(entry: str) -> Callable[[Training, Training], None]:
    def forget(training: Training, fresh: Training) -> None:
        for moments in training.optimizer.state.values():
            moments[entry].zero_()

    return forget


def _one_moment(training: Training, fresh: Training) -> None:
    training.optimizer.state[next(training.model.parameters())]["exp_avg"].zero_()


def _averages(training: Training, fresh: Training) -> None:
    assert training.ema is not None
    assert fresh.ema is not None
    for name, value in training.ema.items():
        value.copy_(fresh.ema[name])


def _averages_from_weights(training: Training, fresh: Training) -> None:
    assert training.ema is not None
    for name, value in training.model.named_parameters():
        training.ema[name].copy_(value)


def _scaler(training: Training, fresh: Training) -> None:
    training.scaler.load_state_dict(fresh.scaler.state_dict())


def _statistic(name: str) -> Callable[[Training, Training], None]:
    return lambda training, fresh: getattr(training.statistics, name).zero_()


def _counter(name: str) -> Callable[[Training, Training], None]:
    def forget(training: Training, fresh: Training) -> None:
        setattr(training.counters, name, getattr(Counters(), name))

    return forget


def _order(training: Training, fresh: Training) -> None:
    samples = Samples(training.samples.ids, Shifted(**vars(training.samples.order)))
    object.__setattr__(training, "samples", samples)


FORGOTTEN: dict[str, tuple[Callable[[Training, Training], None], str]] = {
    "parameters": (_weights, "at once: model/"),
    "means of gradients": (_moment("exp_avg"), "at once: optimizer/.*/exp_avg$"),
    "means of squares": (_moment("exp_avg_sq"), "at once: optimizer/.*/exp_avg_sq$"),
    "steps of the optimizer": (_moment("step"), "at once: optimizer/.*/step$"),
    "one mean of one parameter": (_one_moment, "at once: optimizer/.*/exp_avg$"),
    "averages": (_averages, "at once: ema/"),
    "averages copied from the weights": (_averages_from_weights, "at once: ema/"),
    "scaler": (_scaler, "at once: counters/scaler$"),
    **{name: (_counter(name), f"at once: counters/{name}$") for name in ("step", "evaluated", "best", "best_step")},
    "stale": (_counter("stale"), "at once: counters/stale$"),
    "skipped": (_statistic("skipped"), "at once: counters/skipped$"),
    "skipped in a row": (_statistic("in_a_row"), "at once: counters/in_a_row$"),
    "sums of the meter": (_statistic("sums"), "at once: counters/window$"),
    "position in the data": (_order, f"step {CUT + 1}: windows$"),
}


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
        variant = {"scaler": "fp16, ema, 1 micro-batch"}.get(item, "fp32, ema, 1 micro-batch")
        if variant not in references:
            config = change(little, **SMALL | MATRIX[variant] | {"train__steps": STEPS})
            references[variant] = refer(config, little_store, tmp_path_factory.mktemp("reference"), STEPS)
        assert departures(references[variant], CUT) == []
        return references[variant]

    return find


@pytest.mark.parametrize("item", FORGOTTEN)
def test_an_item_that_is_not_restored_is_detected(refer_to: Refer, monkeypatch: pytest.MonkeyPatch, item: str) -> None:
    forget, expected = FORGOTTEN[item]
    reference = refer_to(item)

    def forgetful(training: Training, found: checkpoint.Checkpoint) -> None:
        restore(training, found)
        with torch.no_grad():
            forget(training, start(reference.config, reference.store))

    monkeypatch.setattr(state, "restore", forgetful)
    found = departures(reference, CUT)
    at_once = [line for line in found if line.startswith("at once")] or found[:1]
    assert at_once
    assert [line for line in at_once if not re.match(expected, line)] == []


def test_a_wrong_seed_is_detected(refer_to: Refer, monkeypatch: pytest.MonkeyPatch) -> None:
    reference = refer_to("dropout")
    monkeypatch.setattr(loop, "step_seed", lambda seed, step, micro: step_seed(seed, step - CUT, micro))
    found = departures(reference, CUT)
    assert found
    assert {line.partition("/")[0] for line in found if "windows" not in line} == {
        f"step {step}: {part}" for step in (CUT + 1, CUT + 2, CUT + 3) for part in PARTS
    }


@pytest.mark.parametrize(
    ("item", "expected"),
    [
        ("optimizer", "at once: optimizer/"),
        *(
            (name, f"at once: counters/{name}$")
            for name in ("step", "evaluated", "best", "best_step", "stale", "skipped", "in_a_row", "window")
        ),
        *((name, "LmtrainError") for name in ("model", "ema", "scaler")),
    ],
)
def test_an_item_that_is_not_saved_is_detected(
    refer_to: Refer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, item: str, expected: str
) -> None:
    """By the comparison, or by an error of `restore`."""
    reference = refer_to(item)

    def forgetful(*arguments: Any) -> tuple[checkpoint.Tensors, dict[str, Any]]:
        tensors, info = snapshot(*arguments)
        tensors.pop(item, None)
        info["counters"].pop(item, None)
        return tensors, info

    training = begin(reference.config, reference.store)
    restore(training, checkpoint.load(reference.folders[CUT - 1]))
    monkeypatch.setattr(state, "snapshot", forgetful)
    folders = [*reference.folders[: CUT - 1], save(training, reference.store, tmp_path)]
    reference = dataclasses.replace(reference, folders=folders)
    if expected == "LmtrainError":
        with pytest.raises(LmtrainError, match=r"not a checkpoint|does not fit"):
            departures(reference, CUT)
    else:
        at_once = [line for line in departures(reference, CUT) if line.startswith("at once")]
        assert at_once
        assert [line for line in at_once if not re.match(expected, line)] == []


@pytest.mark.parametrize("forgotten", [0, 10**9])
def test_a_wrong_length_of_the_metrics_is_detected(
    little: Config, little_store: TokenStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, forgotten: int
) -> None:
    monkeypatch.setattr(samples, "show", lambda *arguments: None)
    config = change(little, **LOGGED)
    with copied_for_every_kill(tmp_path / "whole", tmp_path / "copies") as copies:
        run(config, little_store, tmp_path / "whole")
    ahead = [copy for copy in copies if (copy / "checkpoints").is_dir() and _lines_after_the_checkpoint(copy)]
    killed = ahead[len(ahead) // 2]

    def amnesiac(found: checkpoint.Checkpoint) -> CheckpointInfo:
        return dataclasses.replace(read_info(found), metrics_bytes=forgotten)

    with monkeypatch.context() as patch:
        patch.setattr(opening, "read_info", amnesiac)
        run(config, little_store, killed)
    assert curves(killed) != curves(tmp_path / "whole")


def _lines_after_the_checkpoint(run_dir: Path) -> bool:
    folders = run_checkpoints.folders(run_dir)
    if not folders:
        return False
    written = (run_dir / run_folder.METRICS).stat().st_size
    return bool(written > checkpoint.load(folders[-1]).info["metrics_bytes"])
