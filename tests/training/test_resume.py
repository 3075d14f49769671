"""A run resumed from the checkpoint of any step, any number of times, equals an uninterrupted run bit for bit."""

import dataclasses
import functools
import json
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from lmtrain.config.schema import Config
from lmtrain.data.tokens import TokenStore
from lmtrain.evaluation.perplexity import Score, evaluate
from lmtrain.generation.complete import complete
from lmtrain.generation.options import Options
from lmtrain.storage import checkpoint, run_checkpoints
from lmtrain.system.device import lacks_to_compile
from lmtrain.training import loop, samples, state, validation
from lmtrain.training.loop import StepResult, train_step
from lmtrain.training.state import Training
from tests.training.helpers import LOGGED, change, cpu, curves, last_hash, logged, run, worsen
from tests.training.resuming import BATCH, MATRIX, SMALL, begin, copied_for_every_kill, departures, refer

pytestmark = pytest.mark.usefixtures("one_thread")

EPOCHS, MORE = 2, 5


@pytest.mark.parametrize("variant", MATRIX)
def test_every_step_can_be_resumed(little: Config, little_store: TokenStore, tmp_path: Path, variant: str) -> None:
    config = change(little, **SMALL | MATRIX[variant])
    if config.model.mode == "windowed":  # its epochs are sixteen times as long
        length = 15
    else:
        per_epoch = begin(config, little_store).samples.order.per_epoch()
        length = -(-EPOCHS * per_epoch // BATCH) + MORE
        assert EPOCHS * per_epoch % BATCH, "an epoch must end inside a step"
    config = change(config, train__steps=length)
    reference = refer(config, little_store, tmp_path, length)
    skipped = [number for number, step in enumerate(reference.steps) if step.skipped]
    assert skipped == [6]
    assert len({json.dumps(step.state) for step in reference.steps}) == length
    assert [departures(reference, number) for number in range(1, length + 1)] == [[]] * length


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_a_compiled_training_can_be_resumed(
    little: Config, little_store: TokenStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, backend: str
) -> None:
    if backend == "inductor" and lacks_to_compile(cpu()) is not None:
        pytest.skip("nothing can be compiled here")
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=backend))
    monkeypatch.setattr("lmtrain.training.compilation.lacks_to_compile", lambda device: None)
    config = change(little, **SMALL, train__compile=True, train__steps=10)
    reference = refer(config, little_store, tmp_path, 8)
    assert not any("_orig_mod" in name for name in reference.steps[-1].state)
    assert departures(reference, 5) == []


@pytest.mark.parametrize("variant", ["to the end", "stopping early"])
def test_a_kill_at_any_moment_leaves_no_trace(
    little: Config, little_store: TokenStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variant: str
) -> None:
    """The same bits, status, best checkpoint and final score, and curves without gaps or duplicates."""
    config = change(little, **LOGGED)
    if variant == "stopping early":
        monkeypatch.setattr(loop, "train_step", worsen)
        fields = {"train__steps": 50, "train__eval_steps": 1, "train__patience": 2, "train__keep": 1}
        config = change(little, **LOGGED | fields)
    monkeypatch.setattr(samples, "show", lambda *arguments: None)
    with copied_for_every_kill(tmp_path / "whole", tmp_path / "copies") as copies:
        whole, _ = run(config, little_store, tmp_path / "whole")
    assert len(copies) > 15
    assert whole.status == ("finished" if variant == "to the end" else "stopped early")
    expected = curves(tmp_path / "whole")
    for copy in copies:
        resumed, _ = run(config, little_store, copy)
        assert dataclasses.replace(resumed, minutes=0.0) == dataclasses.replace(whole, minutes=0.0)
        assert last_hash(copy) == last_hash(tmp_path / "whole")
        assert curves(copy) == expected


def test_signals_after_some_steps(
    little: Config, little_store: TokenStore, tmp_path: Path, interrupt_after: Callable[[int, int], None]
) -> None:
    """Also between two logged steps, whose means are to the bit those of an uninterrupted run."""
    config = change(little, **LOGGED | {"train__steps": 12, "train__log_steps": 4, "train__eval_steps": 3})
    whole, _ = run(config, little_store, tmp_path / "whole")
    step = 0
    for steps, number in ((1, signal.SIGTERM), (1, signal.SIGINT), (5, signal.SIGUSR1), (3, signal.SIGTERM)):
        interrupt_after(steps, number)
        outcome, _ = run(config, little_store, tmp_path / "parts")
        step += steps
        assert (outcome.status, outcome.step) == ("interrupted", step)
    interrupt_after(1000, signal.SIGTERM)
    parts, notes = run(config, little_store, tmp_path / "parts")
    assert "step 10" in notes[0]
    assert (parts.score, parts.best_step) == (whole.score, whole.best_step)
    assert last_hash(tmp_path / "whole") == last_hash(tmp_path / "parts")
    assert curves(tmp_path / "parts") == curves(tmp_path / "whole")


@pytest.mark.parametrize("when", ["before", "during", "final"])
def test_an_interrupted_evaluation_is_repeated(
    tiny: Config, store: TokenStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    whole, _ = run(tiny, store, tmp_path / "whole")
    calls = 0

    def interrupted(*arguments: Any, advance: Callable[[int], object], **options: Any) -> Score:
        nonlocal calls
        calls += 1
        batches = 0

        def send(count: int) -> None:
            nonlocal batches
            batches += 1
            if calls == {"before": 1, "during": 3, "final": 7}[when] and batches == (1 if when == "before" else 2):
                signal.raise_signal(signal.SIGTERM)
            advance(count)

        return evaluate(*arguments, advance=send, **{**options, "batch_size": 2})

    with monkeypatch.context() as patch:
        patch.setattr(validation, "evaluate", interrupted)
        stopped, _ = run(tiny, store, tmp_path / "parts")
    assert stopped.status == "interrupted"
    assert stopped.step == {"before": 5, "during": 10, "final": 12}[when]
    parts, _ = run(tiny, store, tmp_path / "parts")
    assert parts.score == whole.score
    assert last_hash(tmp_path / "whole") == last_hash(tmp_path / "parts")
    assert logged(tmp_path / "parts") == logged(tmp_path / "whole")


def test_observing_a_run_changes_nothing(
    little: Config, little_store: TokenStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Evaluating, generating, logging and saving at every step, or never: the same final state."""
    fields = SMALL | MATRIX["fp16, no ema, 3 micro-batches"]
    never = change(little, **fields, train__log_steps=1000, train__eval_steps=1000, train__steps=6)
    often = {"log_steps": 1, "eval_steps": 1, "save_minutes": 1e-9, "sample_prompts": ["The", "A"]}
    run(never, little_store, tmp_path / "never")

    def distracted(training: Training, lr: float) -> StepResult:
        result = train_step(training, lr)
        torch.rand(17)
        training.model.eval()
        complete(training.model, little_store.tokenizer, ["The"], Options(max_tokens=5))
        training.model.train()
        return result

    monkeypatch.setattr(loop, "train_step", distracted)
    run(change(never, **{f"train__{name}": value for name, value in often.items()}), little_store, tmp_path / "often")
    ends = [checkpoint.load(run_checkpoints.choose(tmp_path / name, "last")) for name in ("never", "often")]
    assert ends[0].info["files"] == ends[1].info["files"]
    assert ends[0].info["counters"]["scaler"] == ends[1].info["counters"]["scaler"]
    assert len(curves(tmp_path / "often")) > 2 * len(curves(tmp_path / "never"))


def test_another_precision_is_reported(
    tiny: Config, store: TokenStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`auto` depends on the machine, and is the same configuration."""
    config = change(tiny, train__precision="auto", train__steps=1)
    notes = []
    for precision in ("bf16", "bf16", "fp32"):
        monkeypatch.setattr(state, "choose_precision", lambda name, device, precision=precision: precision)
        notes.append([note for note in run(config, store, tmp_path)[1] if "bf16" in note])
    assert notes == [[], [], ["fp32 instead of bf16: train.precision=auto differs on this machine"]]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_resume_on_cuda_gives_the_same_bits(
    tiny: Config, store: TokenStore, tmp_path: Path, interrupt_after: Callable[[int, int], None], precision: str
) -> None:
    config = change(tiny, train__device="cuda", train__precision=precision)
    run(config, store, tmp_path / "whole")
    interrupt_after(7, signal.SIGTERM)
    run(config, store, tmp_path / "parts")
    interrupt_after(1000, signal.SIGTERM)
    run(config, store, tmp_path / "parts")
    assert last_hash(tmp_path / "whole") == last_hash(tmp_path / "parts")
