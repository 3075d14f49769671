"""The loop: what a step computes, what ends a run, and what a finished run contains."""

import math
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode, unset_fake_temporarily

import lmtrain
from lmtrain.config.schema import Config
from lmtrain.data.order import SampleOrder
from lmtrain.data.tokens import TokenStore
from lmtrain.errors import LmtrainError
from lmtrain.storage import checkpoint, run_checkpoints, run_folder
from lmtrain.training import loop, opening, randomness, trainer
from lmtrain.training.loop import train_step
from lmtrain.training.meter import Meter
from lmtrain.training.monitor import RunMonitor
from lmtrain.training.optimizers import optimizer_tensors, update_ema
from lmtrain.training.saving import CheckpointSaver
from lmtrain.training.train_state import StepStatistics, TrainState, new_state
from lmtrain.training.validation import evaluate_step
from tests.helpers import CPU, Interrupt, choices, flip_bit
from tests.training.helpers import (
    change,
    last_hash,
    metrics,
    run,
    run_interrupted,
    run_state,
    scaled_step,
    start,
    state_of,
    take_step,
    verified_steps,
    without_dropout,
    worsen,
)

FINISHED = "is finished, so nothing is trained: set run.name to train another run"


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """The clock of a run: the `seconds` that have passed. Each step, which is `take`, adds `per_step` of them."""
    clock = SimpleNamespace(seconds=0.0, per_step=0.0, take=train_step)

    def step(state: TrainState, lr: float) -> None:
        clock.seconds += clock.per_step
        clock.take(state, lr)

    monkeypatch.setattr(loop, "train_step", step)
    monkeypatch.setattr("lmtrain.training.meter.time", SimpleNamespace(monotonic=lambda: clock.seconds))
    return clock


def test_micro_batches_of_any_size_give_the_gradient_of_the_whole_batch(tiny: Config) -> None:
    found = []
    for micro_batch in (1, 2, 4, None):
        state = start(change(without_dropout(tiny), train__micro_batch=micro_batch))
        loss, norm = take_step(state, 1e-3)
        found.append((loss, norm, optimizer_tensors(state.model, state.optimizer)))
    for loss, norm, tensors in found[:-1]:
        torch.testing.assert_close(loss, found[-1][0])
        torch.testing.assert_close(norm, found[-1][1])
        torch.testing.assert_close(tensors, found[-1][2], rtol=1e-4, atol=1e-7)


def test_the_logged_loss_is_the_mean_of_nats_over_targets(tiny: Config, store: TokenStore) -> None:
    state = start(without_dropout(tiny))
    starts = state.order.starts(0, 4)
    ids = torch.from_numpy(store.split("train").ids.astype("int64"))
    rows = torch.stack([ids[start : start + 17] for start in starts])
    expected = -state.model.predict(rows[:, :-1]).gather(-1, rows[:, 1:, None]).mean()
    loss, _ = take_step(state, 1e-3)
    torch.testing.assert_close(loss, expected.detach())


def test_the_loss_has_the_configured_chunks(tiny: Config) -> None:
    assert start(change(tiny, train__loss_chunk=5)).model.loss_chunk == 5


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_a_step_with_a_gradient_that_is_not_finite_changes_neither_weights_nor_optimizer(
    tiny: Config, precision: str
) -> None:
    state = start(change(tiny, train__precision=precision))
    train_step(state, 1e-2)
    before = state_of(state)
    assert state.config.train.ema is not None
    expected = {name: value.clone() for name, value in state.ema.items()}
    update_ema(expected, state.model, state.config.train.ema, state.step)
    scaled_step(state, 1e-2, torch.nan)
    after = state_of(state)
    assert all(torch.equal(value, expected[name]) for name, value in state.ema.items())
    averaged = {name for name in before if name.startswith("ema/")}  # over steps, of which this is one
    counted = {f"counters/{name}" for name in ("step", "skipped", "in_a_row")}
    reduced = {"counters/scaler"} if precision == "fp16" else set()
    assert {name for name in before if before[name] != after[name]} - averaged == counted | reduced
    train_step(state, 1e-2)
    assert int(state.statistics.in_a_row) == 0
    assert state_of(state)["model/embedding.weight"] != before["model/embedding.weight"]
    if precision == "fp16":
        assert state.scaler.get_scale() == 2.0**15


def test_divergence_stops_the_run_and_leaves_a_good_checkpoint(
    tiny: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def diverge(state: TrainState, lr: float) -> None:
        scaled_step(state, lr, torch.nan if state.step >= 6 else 1.0)

    monkeypatch.setattr(loop, "train_step", diverge)
    with pytest.raises(LmtrainError, match=r"diverged: 20 steps in a row up to step 26 were.*lower train\.lr"):
        run(change(tiny, train__steps=60, train__log_steps=1000), tmp_path)
    loaded = checkpoint.load(run_checkpoints.choose(tmp_path, "last"))
    assert all(torch.isfinite(value[...]).all() for group in loaded.tensors.values() for value in group.values())
    assert run_state(tmp_path)["status"] == "failed"


def test_a_run_stops_early_and_keeps_its_best_checkpoint_and_a_damaged_one_is_replaced(
    tiny: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(loop, "train_step", worsen)
    config = change(tiny, train__steps=100, train__eval_steps=2, train__patience=3, train__keep=1)
    outcome, _ = run(config, tmp_path)
    assert outcome.status == "stopped early"
    assert outcome.step == outcome.best_step + 6
    assert verified_steps(tmp_path) == [outcome.best_step, outcome.step]
    best = run_checkpoints.choose(tmp_path, str(outcome.best_step))
    assert run_checkpoints.best_folder(tmp_path) == best
    assert run(config, tmp_path, quiet=False) == (outcome, [f"{tmp_path} {FINISHED}"])
    flip_bit(best / "model.safetensors")
    again, _ = run(config, tmp_path, quiet=False)
    assert f"{best} may be the best checkpoint and is damaged" in capsys.readouterr().err
    assert (again.status, again.step, again.best_step) == ("stopped early", outcome.step, outcome.step)
    assert (run_state(tmp_path)["status"], run_state(tmp_path)["best_step"]) == ("stopped early", outcome.step)


def test_the_final_score_is_of_the_best_checkpoint(
    tiny: Config, store: TokenStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop, "train_step", worsen)
    outcome, _ = run(change(tiny, train__steps=5, train__eval_steps=1), tmp_path)
    assert outcome.best_step < outcome.step == 5
    best = lmtrain.load(tmp_path, checkpoint=outcome.best_step, weights="ema", device="cpu")
    assert outcome.valid == best.score_split(store.split("valid"))


def test_a_validation_loss_that_is_not_finite_is_reported_before_text_is_generated(
    tiny: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def ruined(state: TrainState, lr: float) -> None:
        train_step(state, lr)
        state.ema["embedding.weight"].fill_(torch.nan)

    monkeypatch.setattr(loop, "train_step", ruined)
    with pytest.raises(LmtrainError, match=r"the validation loss at step 5 is not finite: lower train\.lr"):
        run(tiny, tmp_path)


def test_running_out_of_memory_in_an_evaluation_names_its_own_remedy(
    tiny: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    starved = Mock(side_effect=torch.OutOfMemoryError("CUDA out of memory"))
    monkeypatch.setattr("lmtrain.training.validation.evaluate", starved)
    with pytest.raises(LmtrainError, match=r"out of memory: lower eval\.batch_size$"):
        run(tiny, tmp_path)


def note_progress(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The list to which the progress at which each run's bar begins is added."""
    shown: list[float] = []

    def noted(*arguments: Any, progress: float, **options: Any) -> RunMonitor:
        shown.append(progress)
        return RunMonitor(*arguments, progress=progress, **options)

    monkeypatch.setattr(opening, "RunMonitor", noted)
    return shown


def test_the_bar_of_a_resumed_run_begins_after_what_loading_took(
    tiny: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, clock: SimpleNamespace
) -> None:
    """Making the model takes 15 of 60 seconds each time, and so does a step; progress counts from the first one on."""
    make, shown = new_state, note_progress(monkeypatch)

    def slowly(*arguments: Any, **options: Any) -> TrainState:
        clock.seconds += 15.0
        return make(*arguments, **options)

    def step(state: TrainState, lr: float) -> None:
        clock.seconds += 15.0
        train_step(state, lr)
        if len(shown) == 1:
            signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr(opening, "new_state", slowly)
    monkeypatch.setattr(loop, "train_step", step)
    config = change(tiny, train__steps=None, train__max_minutes=1.0, train__eval_steps=1000)
    run_interrupted(config, tmp_path)
    run(config, tmp_path)
    assert shown == [0.0, pytest.approx(30 / 45)]


def test_a_finished_run_is_left_alone_and_a_damaged_checkpoint_replaced(
    tiny: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, _ = run(tiny, tmp_path)
    before, written = last_hash(tmp_path), {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    with monkeypatch.context() as patch:
        patch.setattr(opening, "new_state", None)
        assert run(tiny, tmp_path, quiet=False) == (first, [f"{tmp_path} {FINISHED}"])
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == written
    newest = run_checkpoints.choose(tmp_path, "last")
    flip_bit(newest / "model.safetensors", -3)
    shown = note_progress(monkeypatch)
    _, notes = run(tiny, tmp_path, quiet=False)
    assert shown == [10 / 12]
    assert "it was set aside as step-00000012.damaged" in notes[0]
    assert notes[1] == f"{tmp_path}: resuming from step 10 (83% of the budget)"
    assert last_hash(tmp_path) == before


@pytest.mark.parametrize(
    "change_state",
    [
        lambda state: state.pop("valid"),
        lambda state: state["valid"].update(nats=None),
        lambda state: state["valid"].update(words=0),
        lambda state: state["valid"].update(floor=-1.0),
        lambda state: state["valid"].update(floor=0.0),
        lambda state: state["valid"].update(stride=10**400),
        lambda state: state["valid"].update(nats=-1e308),
        lambda state: state.update(step=7),
        lambda state: state.update(best_step=5),
    ],
)
def test_a_run_whose_state_is_not_that_of_its_end_is_scored_again(
    tiny: Config, base: Path, tmp_path: Path, change_state: Callable[[dict[str, Any]], object]
) -> None:
    shutil.copytree(base, tmp_path / "run")
    first, _ = run(tiny, tmp_path / "run")
    state = run_state(base)
    change_state(state)
    run_folder.write_state(tmp_path / "run", **state)
    again, _ = run(tiny, tmp_path / "run")
    assert (again.valid, again.step, again.best_step) == (first.valid, first.step, first.best_step)
    assert run_state(tmp_path / "run") | {"minutes": 0} == run_state(base) | {"minutes": 0}


def test_a_checkpoint_is_saved_when_save_minutes_have_passed_since_the_last_one(
    tiny: Config, tmp_path: Path, clock: SimpleNamespace
) -> None:
    clock.per_step = 15.0
    run(change(tiny, train__eval_steps=7, train__save_minutes=1.0, train__keep=100), tmp_path)
    assert verified_steps(tmp_path) == [5, 7, 12]


def test_an_interrupted_run_saves_no_step_twice(
    tiny: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, interrupt_after: Interrupt
) -> None:
    saved: list[int] = []
    save = CheckpointSaver.save

    def counted(saver: CheckpointSaver, step: int, *parts: Any) -> None:
        saved.append(step)
        save(saver, step, *parts)

    monkeypatch.setattr(CheckpointSaver, "save", counted)
    interrupt_after(3)
    run_interrupted(change(tiny, train__save_minutes=1e-9), tmp_path)
    assert saved == [1, 2, 3]


def test_a_run_says_what_it_starts(tiny: Config, tmp_path: Path) -> None:
    _, notes = run(change(tiny, train__batch_size=10, train__steps=3), tmp_path, quiet=False)
    assert notes[:5] == [
        f"{tmp_path}: a new run",
        "model: 21,269 parameters, 1 block of width 16, context 16",
        "data: 3,166 training tokens; a vocabulary of 899 entries (word); one epoch is 19.6 steps of 160 tokens",
        "budget: 3 steps (480 tokens, 0.153 epochs)",
        "device: cpu, fp32, 1 thread, not compiled",
    ]


def test_a_budget_in_time_counts_from_the_first_step(
    tiny: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, clock: SimpleNamespace
) -> None:
    """Preparing takes 12 of 60 seconds; the warm-up, the first half of the other 48, is complete. A resumed run
    prepares again, in the middle of its schedule, which stays the same."""

    def slowly(*arguments: Any) -> Meter:
        clock.seconds += 12.0
        return Meter(*arguments)

    def step(state: TrainState, lr: float) -> None:
        rates[clock.seconds] = lr
        clock.seconds += 6.0
        if len(rates) == 3:
            raise KeyboardInterrupt
        train_step(state, lr)

    rates: dict[float, float] = {}
    monkeypatch.setattr(opening, "Meter", slowly)
    monkeypatch.setattr(loop, "train_step", step)
    budget = {"train__steps": None, "train__max_minutes": 1.0, "train__warmup": 0.5, "train__schedule": "linear"}
    config = change(tiny, **budget, train__final_lr=0.0)
    run_interrupted(config, tmp_path)
    outcome, _ = run(config, tmp_path)
    assert (outcome.status, outcome.minutes) == ("finished", 1.0)
    assert list(rates) == [12.0, 18.0, 24.0, 42.0, 48.0, 54.0]
    assert list(rates.values()) == pytest.approx([1e-6, 0.25e-3, 0.5e-3, 0.75e-3, 0.5e-3, 0.25e-3])


@pytest.mark.parametrize(
    ("take", "fields", "end"),
    [
        (train_step, {"train__eval_steps": 5}, ("finished", 5, 7.0)),
        (worsen, {"train__eval_steps": 2, "train__patience": 1}, ("stopped early", 4, 6.0)),
    ],
)
def test_a_budget_in_time_may_end_while_the_last_checkpoint_is_saved(
    tiny: Config,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    clock: SimpleNamespace,
    take: Callable[[TrainState, float], object],
    fields: dict[str, Any],
    end: tuple[str, int, float],
) -> None:
    """After five or four of six seconds. Repeating the command gives the same outcome, and trains nothing."""
    clock.per_step, clock.take = 1.0, take
    save = CheckpointSaver.save

    def slowly(self: CheckpointSaver, step: int, *parts: Any) -> None:
        clock.seconds += 2.0 * (step == end[1])
        save(self, step, *parts)

    monkeypatch.setattr(CheckpointSaver, "save", slowly)
    config = change(tiny, train__steps=None, train__max_minutes=0.1, **fields)
    first = run(config, tmp_path)[0]
    assert (first.status, first.step, clock.seconds) == end
    again, notes = run(config, tmp_path, quiet=False)
    assert (again.status, again.step, again.valid) == (*end[:2], first.valid)
    assert notes == [f"{tmp_path} {FINISHED}"]


def test_rates_do_not_include_evaluations(
    tiny: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, clock: SimpleNamespace
) -> None:
    """In steps of a second."""
    clock.per_step = 1.0

    def evaluate(*arguments: Any) -> float:
        clock.seconds += 9.0
        return evaluate_step(*arguments)

    monkeypatch.setattr(trainer, "evaluate_step", evaluate)
    run(tiny, tmp_path)
    rates = [row["tokens_per_second"] for row in metrics(tmp_path) if row["kind"] == "train"]
    assert rates == pytest.approx([4 * 16] * len(rates))


def test_bf16_and_float32_train_alike(tiny: Config) -> None:
    losses = []
    for precision in ("fp32", "bf16"):
        state = start(change(tiny, train__precision=precision))
        losses.append([float(take_step(state, 1e-2)[0]) for _ in range(10)])
    assert losses[0] == pytest.approx(losses[1], rel=0.02)
    assert losses[0] != losses[1]


@pytest.mark.parametrize("mode", ["causal", "windowed"])
@pytest.mark.parametrize("optimizer", choices("train.optimizer"))
def test_nothing_in_a_step_depends_on_a_value_on_the_device(
    tiny: Config, monkeypatch: pytest.MonkeyPatch, optimizer: str, mode: str
) -> None:
    """After the batch is on the device, tensors have no values here, so that reading one fails."""
    values = {"model__mode": mode, "model__copy": mode == "causal", "train__optimizer": optimizer}
    state = start(change(tiny, **values, train__token_noise=0.1))
    fake = FakeTensorMode(allow_non_fake_inputs=True)

    def on_host(function: Any) -> Any:
        def call(*arguments: Any) -> Any:
            with unset_fake_temporarily():
                return function(*arguments)

        return call

    monkeypatch.setattr(SampleOrder, "batch", on_host(SampleOrder.batch))
    monkeypatch.setattr(loop, "noisy", on_host(randomness.noisy))
    monkeypatch.setattr(loop, "to_device", lambda tensor, device: fake.from_tensor(tensor))
    with fake:
        train_step(state, 1e-3)
        with pytest.raises(DataDependentOutputException):
            float(state.statistics.sums[0])


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype:UserWarning")
@pytest.mark.parametrize("optimizer", choices("train.optimizer"))
def test_a_step_on_cuda_never_waits_for_the_device(tiny: Config, optimizer: str) -> None:
    state = start(change(tiny, train__device="cuda", train__optimizer=optimizer))
    train_step(state, 1e-3)
    torch.cuda.set_sync_debug_mode("error")
    try:
        train_step(state, 1e-3)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert state.statistics.sums[2] == 2  # both steps were taken


def test_the_rates_of_a_resumed_run_are_those_since_it_was_resumed(
    tiny: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, clock: SimpleNamespace
) -> None:
    """Of steps of a second; the third one is followed by a pause and a signal."""

    def step(state: TrainState, lr: float) -> None:
        clock.seconds += 1.0
        train_step(state, lr)
        if state.step == 3 and clock.seconds < 10:
            clock.seconds += 100.0
            signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr(loop, "train_step", step)
    run_interrupted(tiny, tmp_path)
    run(tiny, tmp_path)
    rates = [row["tokens_per_second"] for row in metrics(tmp_path) if row["kind"] == "train" and row["step"] > 3]
    assert len(rates) > 1
    assert rates == pytest.approx([64] * len(rates))


def test_an_equal_score_is_no_new_best(tiny: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def count(state: TrainState, lr: float) -> None:
        state.step += 1

    monkeypatch.setattr(loop, "train_step", count)
    outcome, _ = run(change(tiny, train__steps=100, train__eval_steps=2, train__patience=3), tmp_path)
    assert (outcome.status, outcome.step, outcome.best_step) == ("stopped early", 8, 2)
    config = change(tiny, run__name="whole", train__steps=8, train__eval_steps=2, train__patience=3)
    for _ in range(2):  # all steps are done, and then the run is found as it is
        outcome, _ = run(config, tmp_path / "whole")
        assert (outcome.status, outcome.step, outcome.best_step) == ("finished", 8, 2)


def test_the_first_step_is_logged(tiny: Config, tmp_path: Path) -> None:
    run(change(tiny, train__steps=3, train__log_steps=1000), tmp_path)
    assert [row["step"] for row in metrics(tmp_path) if row["kind"] == "train"] == [1]


def test_a_step_whose_loss_is_not_finite_is_not_in_the_mean() -> None:
    """Its gradient may be finite nevertheless."""
    statistics = StepStatistics(CPU)
    for loss in (torch.inf, 2.0):
        statistics.add(torch.tensor(loss), torch.tensor(1.0), torch.tensor(False))
    assert statistics.sums.tolist() == [2.0, 1.0, 1.0]


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
@pytest.mark.parametrize("clip", [0.01, 1.0, None])
def test_the_unscaled_gradient_is_clipped_and_its_norm_before_is_logged(
    tiny: Config, precision: str, clip: float | None
) -> None:
    """AdamW's mean of the gradient is a tenth of it after a step."""
    state = start(change(without_dropout(tiny), train__precision=precision, train__clip=clip, train__beta1=0.9))
    _, norm = take_step(state, 1e-3)
    tensors = optimizer_tensors(state.model, state.optimizer)
    mean = torch.cat([value.flatten() for name, value in tensors.items() if name.endswith("/exp_avg")])
    assert float(norm) > 1.5
    assert float(10 * mean.norm()) == pytest.approx(min(float(norm), clip or math.inf), rel=1e-2)
