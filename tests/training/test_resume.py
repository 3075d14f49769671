"""Resuming: from the checkpoint of any step, any number of times, a run goes on as if nothing had happened."""

import dataclasses
import functools
import json
import random
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from lmtrain.config.schema import Config
from lmtrain.data.tokens import TokenStore
from lmtrain.generation.complete import complete
from lmtrain.generation.options import Options
from lmtrain.storage import checkpoint
from lmtrain.system.device import lacks_to_compile
from lmtrain.training import loop, samples, state
from lmtrain.training.loop import StepResult, train_step
from lmtrain.training.state import Training
from tests.training.resuming import BATCH, LOGGED, MATRIX, SMALL, begin, curves, departures, photographed, refer, worsen
from tests.training.test_loop import change, last_hash, run

pytestmark = pytest.mark.usefixtures("one_thread")

EPOCHS, MORE = 2, 5


@pytest.mark.parametrize("variant", MATRIX)
def test_every_step_can_be_resumed_from(little: Config, little_store: TokenStore, tmp_path: Path, variant: str) -> None:
    config = change(little, **SMALL | MATRIX[variant])
    if config.model.mode == "windowed":  # its epochs are sixteen times as long
        config = change(config, train__steps=15)
        length = 15
    else:
        per_epoch = begin(config, little_store).order.per_epoch()
        length = -(-EPOCHS * per_epoch // BATCH) + MORE
        config = change(config, train__steps=length)
        assert EPOCHS * per_epoch % BATCH, "the edges of epochs are to fall inside of steps"
    reference = refer(config, little_store, tmp_path, length)
    skipped = [number for number, step in enumerate(reference.steps) if step.skipped]
    assert skipped == [6]
    assert len({json.dumps(step.state) for step in reference.steps}) == length
    assert [departures(reference, number) for number in range(1, length + 1)] == [[]] * length


def test_a_compiled_training_is_resumed_with_the_same_bits(
    little: Config, little_store: TokenStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))
    monkeypatch.setattr("lmtrain.training.compilation.lacks_to_compile", lambda device: None)
    config = change(little, **SMALL, train__compile=True, train__steps=10)
    reference = refer(config, little_store, tmp_path, 10)
    assert not any("_orig_mod" in name for name in reference.steps[-1].state)
    assert [departures(reference, number) for number in (4, 8)] == [[], []]


@pytest.mark.skipif(lacks_to_compile(torch.device("cpu")) is not None, reason="nothing can be compiled here")
def test_a_training_compiled_by_inductor_is_resumed_with_the_same_bits(
    little: Config, little_store: TokenStore, tmp_path: Path
) -> None:
    config = change(little, **SMALL, train__compile=True, train__steps=10)
    reference = refer(config, little_store, tmp_path, 8)
    assert departures(reference, 5) == []


@pytest.mark.parametrize("variant", ["to the end", "stopping early"])
def test_a_kill_at_any_moment_leaves_no_trace(
    little: Config, little_store: TokenStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variant: str
) -> None:
    """The same bits, the same end, the same best checkpoint, and curves without gaps and without doubles."""
    config = change(little, **LOGGED)
    if variant == "stopping early":
        monkeypatch.setattr(loop, "train_step", worsen)
        fields = {"train__steps": 50, "train__eval_steps": 1, "train__patience": 2, "train__keep": 1}
        config = change(little, **LOGGED | fields)
    monkeypatch.setattr(samples, "show", lambda *arguments: None)
    with photographed(tmp_path / "whole", tmp_path / "copies") as copies:
        whole, _ = run(config, little_store, tmp_path / "whole")
    assert len(copies) > 15
    assert whole.status == ("finished" if variant == "to the end" else "stopped early")
    expected = curves(tmp_path / "whole")
    for copy in copies:
        resumed, _ = run(config, little_store, copy)
        assert dataclasses.replace(resumed, minutes=0.0) == dataclasses.replace(whole, minutes=0.0)
        assert last_hash(copy) == last_hash(tmp_path / "whole")
        assert curves(copy) == expected


def test_means_over_several_steps_are_logged_as_if_never_interrupted(
    little: Config, little_store: TokenStore, tmp_path: Path, interrupt_after: Callable[[int, int], None]
) -> None:
    """To the bit, also where an evaluation comes between."""
    config = change(little, **LOGGED | {"train__steps": 12, "train__log_steps": 4, "train__eval_steps": 3})
    run(config, little_store, tmp_path / "whole")
    for steps in (1, 1, 5, 3):
        interrupt_after(steps, signal.SIGTERM)
        assert run(config, little_store, tmp_path / "parts")[0].status == "interrupted"
    interrupt_after(1000, signal.SIGTERM)
    run(config, little_store, tmp_path / "parts")
    assert curves(tmp_path / "parts") == curves(tmp_path / "whole")


@pytest.mark.parametrize("variant", ["fp16, ema, 3 parts", "muon, bf16", "windowed"])
def test_chains_of_three_kills(
    little: Config, little_store: TokenStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variant: str
) -> None:
    config = change(
        little, **SMALL | MATRIX[variant] | LOGGED | {"train__steps": 9, "train__log_steps": 2, "eval__stride": None}
    )
    monkeypatch.setattr(samples, "show", lambda *arguments: None)
    draw = random.Random(variant)
    run_dir, hashes, scores, shown = tmp_path / "whole", [], [], []
    for part in range(4):
        with photographed(run_dir, tmp_path / f"part {part}") as copies:
            outcome, _ = run(config, little_store, run_dir)
        hashes.append(last_hash(run_dir))
        scores.append(outcome.score)
        shown.append(curves(run_dir))
        run_dir = draw.choice(copies)
    assert hashes == hashes[:1] * 4
    assert scores == scores[:1] * 4
    assert shown == shown[:1] * 4


@pytest.mark.parametrize("variant", ["fp16, no ema, 3 parts", "scheduled sampling"])
def test_watching_changes_nothing(
    little: Config, little_store: TokenStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variant: str
) -> None:
    """Evaluating, generating, logging and saving at every step, or never: the same state at the end."""
    never = change(little, **SMALL | MATRIX[variant], train__log_steps=1000, train__eval_steps=1000, train__steps=6)
    often = {"log_steps": 1, "eval_steps": 1, "save_minutes": 1e-9, "sample_prompts": ["The", "A"]}
    run(never, little_store, tmp_path / "never")

    def distracted(training: Training, lr: float, sampling: float) -> StepResult:
        result = train_step(training, lr, sampling)
        torch.rand(17)
        training.model.eval()
        complete(training.model, little_store.tokenizer, ["The"], Options(max_tokens=5))
        training.model.train()
        return result

    monkeypatch.setattr(loop, "train_step", distracted)
    run(change(never, **{f"train__{name}": value for name, value in often.items()}), little_store, tmp_path / "often")
    ends = [checkpoint.load(checkpoint.choose(tmp_path / name, "last")) for name in ("never", "often")]
    assert ends[0].info["files"] == ends[1].info["files"]
    assert ends[0].info["counters"]["scaler"] == ends[1].info["counters"]["scaler"]
    assert len(curves(tmp_path / "often")) > 2 * len(curves(tmp_path / "never"))


def test_a_run_resumed_in_another_precision_says_so(
    tiny: Config, store: TokenStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`auto` chooses by the machine, and the configuration then is the same."""
    config = change(tiny, train__precision="auto")
    monkeypatch.setattr(state, "choose_precision", lambda name, device: "bf16")
    run(config, store, tmp_path)
    _, notes = run(config, store, tmp_path)
    assert not any("bf16" in note for note in notes)
    monkeypatch.setattr(state, "choose_precision", lambda name, device: "fp32")
    _, notes = run(config, store, tmp_path)
    assert "fp32 instead of bf16: train.precision=auto is another one on this machine" in notes
