"""The rule of spikes, against means written out, and a training that goes through one unharmed."""

import math
from pathlib import Path

import pytest
import torch

from lmtrain.config.schema import Config
from lmtrain.data.tokens import TokenStore
from lmtrain.errors import LmtrainError
from lmtrain.storage import checkpoint
from lmtrain.training.loop import train_step
from lmtrain.training.spikes import MEMORY, Spikes
from lmtrain.training.state import prepare, restore, snapshot
from tests.training.test_loop import change


def judge(spikes: Spikes, loss: float, norm: float, sigmas: float = 6.0) -> bool:
    return bool(spikes.judge(torch.tensor(loss), torch.tensor(norm), sigmas))


def test_means_are_those_of_the_definition() -> None:
    spikes = Spikes.none(torch.device("cpu"))
    generator = torch.Generator().manual_seed(0)
    mean, variance = 0.0, 0.0
    for step in range(3 * MEMORY):
        loss = 3 + torch.randn((), generator=generator).item()
        assert not judge(spikes, loss, 1.0)
        rate = 1 / min(step + 1, MEMORY)
        distance = torch.tensor(loss).double().item() - mean
        mean += rate * distance
        variance = (1 - rate) * (variance + rate * distance**2)
        assert spikes.mean[0].item() == pytest.approx(mean)
        assert spikes.variance[0].item() == pytest.approx(variance)
        if step < MEMORY:  # up to there it is the plain mean of all
            assert spikes.count.item() == step + 1
    assert mean == pytest.approx(3, abs=0.3)
    assert variance == pytest.approx(1, abs=0.3)


@pytest.mark.parametrize(("loss", "norm"), [(10.0, 1.0), (3.0, 8.0), (10.0, 8.0)])
def test_a_spike_is_named_and_forgotten(loss: float, norm: float) -> None:
    spikes = Spikes.none(torch.device("cpu"))
    for step in range(MEMORY + 10):
        early = judge(spikes, loss, norm) if step == MEMORY // 2 else False  # too early to tell
        assert not early
        if step != MEMORY // 2:
            assert not judge(spikes, 3.0 + 0.1 * math.sin(step), 1.0 + 0.1 * math.cos(step))
    for _ in range(300):
        judge(spikes, 3.0 + 0.1 * math.sin(_), 1.0 + 0.1 * math.cos(_))
    before = spikes.mean.clone()
    assert judge(spikes, loss, norm)
    assert torch.equal(spikes.mean, before)
    assert not judge(spikes, 3.1, 1.1)
    assert not judge(spikes, -5.0, 0.0)  # low is no spike


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_what_is_not_finite_never_enters(value: float) -> None:
    spikes = Spikes.none(torch.device("cpu"))
    for step in range(10):
        judge(spikes, value if step % 2 else 3.0, 1.0)
    assert spikes.mean.tolist() == [3.0, 1.0]
    assert spikes.count.item() == 5


@pytest.mark.parametrize("found", ["fp16", "auto"])
def test_fp16_which_skips_steps_by_its_own_scale_is_refused(
    tiny: Config, store: TokenStore, found: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU older than bf16 `auto` is fp16."""
    monkeypatch.setattr("lmtrain.training.state.choose_precision", lambda name, device: "fp16")
    with pytest.raises(LmtrainError, match=r"train\.spike_sigmas needs train.precision=bf16 or fp32"):
        prepare(change(tiny, train__spike_sigmas=6.0, train__precision=found), store, lambda message: None)


def test_a_spike_changes_nothing_and_its_memory_is_saved(tiny: Config, store: TokenStore, tmp_path: Path) -> None:
    config = change(tiny, train__spike_sigmas=6.0)
    training = prepare(config, store, lambda message: None)
    assert training.spikes is not None
    for _ in range(2):
        assert not train_step(training, 1e-3).skipped
    training.spikes.count += MEMORY  # as after a long run
    training.spikes.variance += 1e-4
    honest, training.forward = training.forward, lambda tokens, targets: 3 * honest(tokens, targets)
    before = {name: value.detach().clone() for name, value in training.model.named_parameters()}
    result = train_step(training, 1e-3)
    assert result.skipped
    assert torch.isfinite(result.grad_norm)
    assert all(torch.equal(before[name], value) for name, value in training.model.named_parameters())
    training.forward = honest
    training.spikes.variance += 100
    assert not train_step(training, 1e-3).skipped
    assert not all(torch.equal(before[name], value) for name, value in training.model.named_parameters())
    parts = snapshot(training, store, None, {"seconds": 1.0, "metrics_bytes": 0})
    folder = checkpoint.save(tmp_path, training.counters.step, *parts)
    resumed = prepare(config, store, lambda message: None)
    restore(resumed, checkpoint.load(folder))
    assert resumed.spikes is not None
    assert all(torch.equal(value, vars(resumed.spikes)[name]) for name, value in vars(training.spikes).items())
