"""Rates and counts of the logged steps, by a clock of the test."""

import dataclasses
import math

import pytest
import torch

from lmtrain.config.schema import Config
from lmtrain.data.tokens import TokenStore
from lmtrain.system.process_group import SINGLE_PROCESS, ProcessGroup
from lmtrain.training.flops import step_flops
from lmtrain.training.loop import train_step
from lmtrain.training.meter import Clock, Meter
from tests.training.helpers import start


def test_rates_are_per_second_of_training_by_all_processes(
    tiny: Config, store: TokenStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock(0.0, SINGLE_PROCESS)
    monkeypatch.setattr("lmtrain.training.meter.peak_flops", lambda *_: 1e9)
    state = dataclasses.replace(start(tiny), processes=ProcessGroup(0, 2))
    monkeypatch.setattr(clock, "update", lambda: clock.seconds)
    meter = Meter(state, clock)
    for steps, seconds in ((3, 2.0), (2, 0.5)):  # the second line covers only its own steps
        for _ in range(steps):
            train_step(state, 1e-3)
            clock.seconds += seconds
        found = meter.metrics(1e-3)
        assert found["tokens_per_second"] == pytest.approx(4 * 16 / seconds)
        assert found["mfu"] == pytest.approx(step_flops(state.model, state.config, store) / seconds / 2e9)
        assert found["minutes"] == pytest.approx(clock.seconds / 60)
    clock.seconds += 1.0
    none = meter.metrics(1e-3)  # all steps were skipped
    assert math.isnan(none["loss"])
    assert math.isnan(none["grad_norm"])
    assert found["epoch"] == pytest.approx(5 * 4 * 16 / store.split("train").tokens, rel=0.02)
    assert 0.01 < found["memory_gb"] < 1000


def test_a_line_has_the_mean_norm_the_rate_and_all_skipped_steps(tiny: Config) -> None:
    state = start(tiny)
    clock = Clock(0.0, SINGLE_PROCESS)
    meter = Meter(state, clock)
    for norm, skipped in ((2.0, False), (math.inf, True), (4.0, False)):
        state.statistics.add(torch.tensor(1.0), torch.tensor(norm), torch.tensor(skipped))
    clock.update()
    found = meter.metrics(5e-4)
    assert (found["grad_norm"], found["skipped_steps"], found["lr"]) == (3.0, 1.0, 5e-4)
