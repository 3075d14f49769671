"""The loop: resumed equals uninterrupted, accumulated equals whole, and what a run leaves behind."""

import json
import re
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import Tensor
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode, unset_fake_temporarily

from lmtrain.config.loader import parse
from lmtrain.config.schema import Config
from lmtrain.data import order
from lmtrain.data.tokens import TokenStore
from lmtrain.errors import LmtrainError
from lmtrain.evaluation.perplexity import Score, evaluate
from lmtrain.model.objective import Objective
from lmtrain.model.trained import load_trained
from lmtrain.storage import checkpoint
from lmtrain.system.runtime import Interrupted, lacks_to_compile
from lmtrain.training import loop, noise, state, validation
from lmtrain.training.loop import Outcome, fit, train_step
from lmtrain.training.meter import StepResult
from lmtrain.training.optim import optimizer_tensors
from lmtrain.training.validation import final_score
from tests.training.resuming import state_of, worsen


def change(config: Config, **fields: Any) -> Config:
    """The configuration with fields changed, given as section__field."""
    values = config.model_dump(mode="json")
    for name, value in fields.items():
        section, _, field = name.partition("__")
        values[section][field] = value
    return parse(values, "test")


def run(config: Config, store: TokenStore, run_dir: Path, *, resume: bool = True) -> tuple[Outcome, list[str]]:
    notes: list[str] = []
    return fit(config, store, run_dir, resume=resume, note=notes.append, quiet=True), notes


def last_hash(run_dir: Path) -> str:
    return checkpoint.state_hash(checkpoint.load(checkpoint.choose(run_dir, "last")))


@pytest.mark.parametrize("variant", ["plain", "bf16", "windowed", "no ema", "crossing an epoch", "linear", "noise"])
def test_three_resumes_in_a_chain_give_the_same_bits(
    tiny: Config, store: TokenStore, tmp_path: Path, interrupt_after: Callable[[int, int], None], variant: str
) -> None:
    changes: dict[str, dict[str, Any]] = {
        "plain": {},
        "bf16": {"train__precision": "bf16"},
        "windowed": {"model__mode": "windowed"},
        "no ema": {"train__ema": None},
        "crossing an epoch": {"train__batch_size": 60, "train__micro_batch": 30},
        "noise": {"train__token_noise": 0.3},
        "linear": {"model__copy": True, "model__attention": "linear"},
    }
    config = change(tiny, **changes[variant])
    whole, _ = run(config, store, tmp_path / "whole")
    for steps, number in ((3, signal.SIGTERM), (4, signal.SIGINT), (2, signal.SIGUSR1)):
        interrupt_after(steps, number)
        outcome, _ = run(config, store, tmp_path / "parts")
        assert outcome.status == "interrupted"
    assert outcome.step == 9
    interrupt_after(1000, signal.SIGTERM)
    parts, notes = run(config, store, tmp_path / "parts")
    assert "step 9" in notes[0]
    assert last_hash(tmp_path / "whole") == last_hash(tmp_path / "parts")
    assert whole.score == parts.score
    assert whole.best_step == parts.best_step
    for name in ("whole", "parts"):
        rows = [json.loads(line) for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()]
        assert [row["step"] for row in rows if row["kind"] == "train"] == [2, 4, 6, 8, 10, 12]
        assert [row["step"] for row in rows if row["kind"] == "valid"] == [5, 10, 12]
        events = EventAccumulator(str(tmp_path / name / "tensorboard"))
        events.Reload()
        assert [event.step for event in events.Scalars("train/loss")] == [2, 4, 6, 8, 10, 12]


@pytest.mark.parametrize("when", ["before", "during", "final"])
def test_an_interruption_of_an_evaluation_is_made_up_for(
    tiny: Config, store: TokenStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    whole, _ = run(tiny, store, tmp_path / "whole")
    honest, calls = evaluate, 0

    def signalled(*arguments: Any, advance: Callable[[int], object], **options: Any) -> Score:
        nonlocal calls
        calls += 1
        batches = 0

        def heard(count: int) -> None:
            nonlocal batches
            batches += 1
            if calls == {"before": 1, "during": 3, "final": 7}[when] and batches == (1 if when == "before" else 2):
                signal.raise_signal(signal.SIGTERM)
            advance(count)

        return honest(*arguments, advance=heard, **{**options, "batch_size": 2})

    monkeypatch.setattr(validation, "evaluate", signalled)
    stopped, _ = run(tiny, store, tmp_path / "parts")
    assert stopped.status == "interrupted"
    assert stopped.step == {"before": 5, "during": 10, "final": 12}[when]
    monkeypatch.setattr(validation, "evaluate", honest)
    parts, _ = run(tiny, store, tmp_path / "parts")
    assert parts.score == whole.score
    assert last_hash(tmp_path / "whole") == last_hash(tmp_path / "parts")
    for name in ("whole", "parts"):
        rows = [json.loads(line) for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()]
        assert [row["step"] for row in rows if row["kind"] == "valid"] == [5, 10, 12]


def test_micro_batches_of_any_size_give_the_gradient_of_the_whole_batch(tiny: Config, store: TokenStore) -> None:
    quiet = {f"model__{kind}dropout": 0.0 for kind in ("", "attention_", "input_", "output_")}
    moments = []
    for micro_batch in (1, 2, 4, None):
        training = state.prepare(change(tiny, train__micro_batch=micro_batch, **quiet), store, print)
        loss, norm, _ = train_step(training, 1e-3)
        moments.append((loss, norm, optimizer_tensors(training.model, training.optimizer)))
    for loss, norm, tensors in moments[:-1]:
        torch.testing.assert_close(loss, moments[-1][0])
        torch.testing.assert_close(norm, moments[-1][1])
        torch.testing.assert_close(tensors, moments[-1][2], rtol=1e-4, atol=1e-7)


def test_the_logged_loss_is_the_mean_of_nats_over_targets(tiny: Config, store: TokenStore) -> None:
    quiet = {f"model__{kind}dropout": 0.0 for kind in ("", "attention_", "input_", "output_")}
    training = state.prepare(change(tiny, **quiet), store, print)
    starts = training.order.starts(0, 4)
    ids = torch.from_numpy(training.ids[:].astype("int64"))
    rows = torch.stack([ids[start : start + 17] for start in starts])
    logits = training.model.logits(training.model.encode(rows[:, :-1]))
    expected = -logits.log_softmax(-1).gather(-1, rows[:, 1:, None]).mean()
    loss, _, _ = train_step(training, 1e-3)
    torch.testing.assert_close(loss, expected.detach())


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_a_gradient_that_is_not_finite_changes_nothing(tiny: Config, store: TokenStore, precision: str) -> None:
    training = state.prepare(change(tiny, train__precision=precision), store, print)
    train_step(training, 1e-2)
    before = state_of(training)
    honest = training.forward
    training.forward = lambda tokens, targets: honest(tokens, targets) * torch.nan
    train_step(training, 1e-2)
    after = state_of(training)
    assert any(name.startswith("ema/") for name in before)
    counted = {f"counters/{name}" for name in ("step", "skipped", "in_a_row")}
    backed_off = {"counters/scaler"} if precision == "fp16" else set()
    assert {name for name in before if before[name] != after[name]} == counted | backed_off


def test_fp16_backs_off_when_the_scaled_gradient_overflows(tiny: Config, store: TokenStore) -> None:
    training = state.prepare(change(tiny, train__precision="fp16"), store, print)
    before = [value.detach().clone() for value in training.model.parameters()]
    honest = training.forward
    training.forward = lambda tokens, targets: honest(tokens, targets) * 1e30
    train_step(training, 1e-2)
    assert training.scaler.get_scale() == 2.0**15
    assert all(torch.equal(old, new) for old, new in zip(before, training.model.parameters(), strict=True))
    training.forward = honest
    train_step(training, 1e-2)
    assert any(not torch.equal(old, new) for old, new in zip(before, training.model.parameters(), strict=True))


def test_the_scaler_of_fp16_comes_back(tiny: Config, store: TokenStore, tmp_path: Path) -> None:
    config = change(tiny, train__precision="fp16")
    whole = state.prepare(config, store, print)
    honest = whole.forward
    whole.forward = lambda tokens, targets: honest(tokens, targets) * 1e30
    train_step(whole, 1e-2)
    whole.forward = honest
    train_step(whole, 1e-2)
    snapshot = state.snapshot(whole, store, None, {"seconds": 1.0, "metrics_bytes": 0})
    folder = checkpoint.save(tmp_path, whole.counters.step, *snapshot)
    resumed = state.prepare(config, store, print)
    state.restore(resumed, checkpoint.load(folder))
    assert resumed.scaler.state_dict() == whole.scaler.state_dict() != {}
    for training in (whole, resumed):
        train_step(training, 1e-2)
    pairs = zip(whole.model.parameters(), resumed.model.parameters(), strict=True)
    assert all(torch.equal(left, right) for left, right in pairs)


def test_divergence_stops_the_run_and_leaves_a_good_checkpoint(
    tiny: Config, store: TokenStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(training: state.Training, lr: float) -> StepResult:
        if training.counters.step >= 6:
            honest, training.forward = training.forward, lambda tokens, targets: honest(tokens, targets) * torch.nan
            result = train_step(training, lr)
            training.forward = honest
            return result
        return train_step(training, lr)

    monkeypatch.setattr(loop, "train_step", broken)
    with pytest.raises(LmtrainError, match=r"diverged: 20 steps in a row up to step 26 were.*lower train\.lr"):
        run(change(tiny, train__steps=60, train__eval_steps=5, train__log_steps=1000), store, tmp_path)
    loaded = checkpoint.load(checkpoint.choose(tmp_path, "last"))
    assert all(torch.isfinite(value[...]).all() for group in loaded.tensors.values() for value in group.values())
    assert json.loads((tmp_path / "state.json").read_text())["status"] == "failed"


def test_early_stopping_and_best(
    tiny: Config, store: TokenStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def worsen(training: state.Training, lr: float) -> StepResult:
        result = train_step(training, 0.5 if training.counters.step >= 2 else 1e-2)
        assert training.ema is not None
        for name, value in training.model.named_parameters():
            training.ema[name].copy_(value.detach())
        return result

    monkeypatch.setattr(loop, "train_step", worsen)
    config = change(tiny, train__steps=100, train__eval_steps=2, train__patience=3, train__keep=1)
    outcome, _ = run(config, store, tmp_path)
    assert outcome.status == "stopped early"
    assert outcome.step == outcome.best_step + 6
    steps = [int(folder.name.removeprefix("step-")) for folder in checkpoint.folders(tmp_path)]
    assert steps == [outcome.best_step, outcome.step]
    best = checkpoint.choose(tmp_path, str(outcome.best_step))
    assert checkpoint.best_folder(tmp_path) == best
    content = (best / "model.safetensors").read_bytes()
    (best / "model.safetensors").write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(LmtrainError, match=r"is damaged: move .* away, and the best of the others is scored"):
        run(config, store, tmp_path)
    best.rename(tmp_path / "away")
    again, _ = run(config, store, tmp_path)
    assert (again.status, again.step, again.best_step) == ("stopped early", outcome.step, outcome.step)
    assert json.loads((tmp_path / "state.json").read_text())["best_step"] == outcome.step


def test_the_final_score_leaves_the_training_as_it_is(
    tiny: Config, store: TokenStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[tuple[dict[str, str], dict[str, str], int]] = []

    def watched(training: state.Training, *rest: Any) -> tuple[Score, int]:
        counters, before = training.counters, state_of(training)
        score, step = final_score(training, *rest)
        assert training.counters is counters
        found.append((before, state_of(training), step))
        return score, step

    monkeypatch.setattr(loop, "train_step", worsen)
    monkeypatch.setattr(loop, "final_score", watched)
    outcome, _ = run(change(tiny, train__steps=5, train__eval_steps=1), store, tmp_path)
    ((before, after, step),) = found
    assert after == before
    assert step == outcome.best_step < outcome.step == 5
    averages = load_trained(tmp_path, str(step), "ema", torch.device("cpu")).model
    score = evaluate(
        averages,
        store.split("valid"),
        mode="causal",
        context=16,
        stride=4,
        batch_size=256,
        first_token=store.tokenizer.eos_id,
        device=torch.device("cpu"),
        precision="fp32",
    )
    assert outcome.score == score


def test_a_loss_that_is_not_finite_is_reported_before_any_sample_is_made(
    tiny: Config, store: TokenStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def ruined(training: state.Training, lr: float, sampling: float) -> StepResult:
        result = train_step(training, lr)
        assert training.ema is not None
        training.ema["embedding.weight"].fill_(torch.nan)
        return result

    monkeypatch.setattr(loop, "train_step", ruined)
    with pytest.raises(LmtrainError, match=r"the validation loss at step 5 is not finite: lower train\.lr"):
        run(tiny, store, tmp_path)


def test_a_finished_run_is_scored_again_and_not_trained(tiny: Config, store: TokenStore, tmp_path: Path) -> None:
    first, _ = run(tiny, store, tmp_path)
    before = last_hash(tmp_path)
    second, _ = run(tiny, store, tmp_path)
    assert (second.score, second.step, last_hash(tmp_path)) == (first.score, 12, before)


def test_another_configuration_or_other_data_is_refused(
    tiny: Config, store: TokenStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(tiny, store, tmp_path)
    with pytest.raises(LmtrainError, match=r"train\.lr: 0\.001 -> 0\.5"):
        run(change(tiny, train__lr=0.5), store, tmp_path)
    with pytest.raises(LmtrainError, match="holds a run already"):
        run(tiny, store, tmp_path, resume=False)
    monkeypatch.setattr(TokenStore, "sha256", property(lambda self: "other"))
    with pytest.raises(LmtrainError, match="corpus is not the one"):
        run(tiny, store, tmp_path)


def test_a_damaged_checkpoint_is_set_aside_and_the_one_before_is_used(
    tiny: Config, store: TokenStore, tmp_path: Path
) -> None:
    run(tiny, store, tmp_path)
    expected = last_hash(tmp_path)
    newest = checkpoint.choose(tmp_path, "last")
    weights = newest / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-3] ^= 1
    weights.write_bytes(bytes(content))
    _, notes = run(tiny, store, tmp_path)
    assert "is damaged; it was set aside as step-00000012.damaged" in notes[0]
    assert "step 10" in notes[1]
    assert last_hash(tmp_path) == expected
    assert (newest.parent / "step-00000012.damaged").is_dir()


def test_two_processes_in_one_folder(tiny: Config, store: TokenStore, tmp_path: Path) -> None:
    with checkpoint.lock(tmp_path), pytest.raises(LmtrainError, match="in use by another process"):
        run(tiny, store, tmp_path)
    outcome, _ = run(tiny, store, tmp_path)
    assert outcome.status == "finished"


def test_a_budget_of_time_ends_the_run(
    tiny: Config, store: TokenStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 0.0

    def tick(training: state.Training, lr: float) -> StepResult:
        nonlocal now
        now += 7.0
        rates.append(lr)
        return train_step(training, lr)

    rates: list[float] = []
    monkeypatch.setattr(loop, "train_step", tick)
    monkeypatch.setattr("lmtrain.training.meter.Clock.read", lambda self: now)
    config = change(tiny, train__steps=None, train__max_minutes=1.0, train__schedule="linear", train__final_lr=0.0)
    outcome, _ = run(config, store, tmp_path)
    assert outcome.step == 9
    assert outcome.minutes == pytest.approx(1.05)
    expected = [1e-6, *(1e-3 * (1 - (7 * k / 60 - 0.02) / 0.98) for k in range(1, 9))]
    assert rates == pytest.approx(expected)


def test_what_comes_before_the_first_step_takes_nothing_from_the_schedule(
    tiny: Config, store: TokenStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 60 seconds 12 go into preparing; the warm-up, the first half of the other 48, is whole. A run that goes on has
    prepared again, in the middle of its schedule."""
    now = 0.0

    def slowly(*arguments: Any) -> state.Training:
        nonlocal now
        now += 12.0
        return state.prepare(*arguments)

    def tick(training: state.Training, lr: float) -> StepResult:
        nonlocal now
        rates[now] = lr
        now += 6.0
        if len(rates) == 3:
            raise Interrupted
        return train_step(training, lr)

    rates: dict[float, float] = {}
    monkeypatch.setattr(loop, "prepare", slowly)
    monkeypatch.setattr(loop, "train_step", tick)
    monkeypatch.setattr("lmtrain.training.meter.Clock.read", lambda self: now)
    budget = {"train__steps": None, "train__max_minutes": 1.0, "train__warmup": 0.5, "train__schedule": "constant"}
    config = change(tiny, **budget)
    assert run(config, store, tmp_path)[0].status == "interrupted"
    assert run(config, store, tmp_path)[0].status == "finished"
    assert list(rates) == [12.0, 18.0, 24.0, 42.0, 48.0, 54.0]
    assert list(rates.values()) == pytest.approx([1e-6, 0.25e-3, 0.5e-3, 1e-3, 1e-3, 1e-3])


def test_a_budget_that_is_over_before_the_first_step_is_a_mistake(
    tiny: Config, store: TokenStore, tmp_path: Path
) -> None:
    config = change(tiny, train__steps=None, train__max_minutes=1e-6)
    with pytest.raises(LmtrainError, match=r"train\.max_minutes=1e-06 is over before the first step"):
        run(config, store, tmp_path)
    assert json.loads((tmp_path / "state.json").read_text())["status"] == "failed"


def test_bf16_and_float32_train_alike(tiny: Config, store: TokenStore) -> None:
    losses = []
    for precision in ("fp32", "bf16"):
        training = state.prepare(change(tiny, train__precision=precision), store, print)
        losses.append([float(train_step(training, 1e-2)[0]) for _ in range(10)])
    assert losses[0] == pytest.approx(losses[1], rel=0.02)
    assert losses[0] != losses[1]


@pytest.mark.skipif(lacks_to_compile(torch.device("cpu")) is not None, reason="nothing can be compiled here")
def test_the_compiled_model_trains_as_the_plain_one(tiny: Config, store: TokenStore) -> None:
    notes: list[str] = []
    quiet = {f"model__{kind}dropout": 0.0 for kind in ("", "attention_", "input_", "output_")}
    losses = []
    for wanted in (False, "auto", True):
        training = state.prepare(change(tiny, train__compile=wanted, **quiet), store, notes.append)
        losses.append([float(train_step(training, 1e-2)[0]) for _ in range(3)])
    assert len(notes) == 1, "auto must not compile so short a run"
    assert losses[0] == losses[1]
    assert losses[2] == pytest.approx(losses[0], rel=1e-4)


class Failing:
    """What `torch.compile` gives, where compiling fails in the first forward or only in the first backward pass."""

    def __init__(self, error: Exception, late: bool) -> None:
        self.error, self.late = error, late

    def __call__(self, model: Callable[..., Tensor], **_: object) -> Callable[..., Tensor]:
        def run(*inputs: Tensor) -> Tensor:
            return self.hooked(model(*inputs)) if self.late else self.fail()

        return run

    def hooked(self, nats: Tensor) -> Tensor:
        nats.register_hook(self.fail)  # type: ignore[no-untyped-call]
        return nats

    def fail(self, *_: object) -> Tensor:
        raise self.error


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (RuntimeError("no compiler\nmore"), "no compiler"),
        (RuntimeError("backend='inductor' raised:\nCalledProcessError: gcc\n"), "CalledProcessError: gcc"),
        (subprocess.CalledProcessError(1, "gcc"), "Command 'gcc' returned non-zero exit status 1."),
        (AssertionError(), "AssertionError"),
    ],
)
def test_a_compiler_that_fails_costs_a_line_or_a_sentence(
    tiny: Config, store: TokenStore, monkeypatch: pytest.MonkeyPatch, error: Exception, reason: str, late: bool
) -> None:
    monkeypatch.setattr(torch, "compile", Failing(error, late))
    monkeypatch.setattr("lmtrain.training.compilation.lacks_to_compile", lambda device: None)
    monkeypatch.setattr("lmtrain.training.compilation.PAYS_AFTER_SECONDS", 0.0)
    notes: list[str] = []
    training = state.prepare(tiny, store, notes.append)
    assert isinstance(training.forward, Objective)
    assert notes[1:] == [f"torch.compile failed and is left out, which costs speed alone ({reason})"]
    assert all(parameter.grad is None for parameter in training.model.parameters())
    with pytest.raises(LmtrainError, match=rf"{re.escape(reason)}.*set train\.compile=false"):
        state.prepare(change(tiny, train__compile=True), store, notes.append)


def test_memory_that_ends_while_compiling_is_no_failure_of_the_compiler(
    tiny: Config, store: TokenStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "compile", Failing(torch.OutOfMemoryError("CUDA out of memory"), late=False))
    monkeypatch.setattr("lmtrain.training.compilation.lacks_to_compile", lambda device: None)
    for wanted in ("auto", True):
        monkeypatch.setattr("lmtrain.training.compilation.PAYS_AFTER_SECONDS", 0.0)
        with pytest.raises(torch.OutOfMemoryError):
            state.prepare(change(tiny, train__compile=wanted), store, print)


def test_a_machine_without_a_compiler_is_told_of_once(
    tiny: Config, store: TokenStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lmtrain.training.compilation.lacks_to_compile", lambda device: "C++ compiler")
    notes: list[str] = []
    state.prepare(tiny, store, notes.append)
    assert notes == [], "auto must not compile so short a run"
    monkeypatch.setattr("lmtrain.training.compilation.PAYS_AFTER_SECONDS", 0.0)
    training = state.prepare(tiny, store, notes.append)
    assert isinstance(training.forward, Objective)
    assert notes == ["not compiling the model, which costs speed alone: this machine has no C++ compiler"]
    with pytest.raises(LmtrainError, match=r"train\.compile=true, but .* no C\+\+ compiler: set train\.compile=false"):
        state.prepare(change(tiny, train__compile=True), store, notes.append)


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


@pytest.mark.parametrize("mode", ["causal", "windowed"])
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_nothing_in_a_step_depends_on_a_value_on_the_device(
    tiny: Config, store: TokenStore, monkeypatch: pytest.MonkeyPatch, optimizer: str, mode: str
) -> None:
    """Once the batch is on the device tensors have no values here, so that whoever waits for one fails."""
    values = {"model__mode": mode, "model__copy": mode == "causal", "model__dropout": 0.1, "model__input_dropout": 0.1}
    values |= {"train__optimizer": optimizer, "train__ema": 0.9, "train__token_noise": 0.1}
    config = change(tiny, **values, train__micro_batch=tiny.train.batch_size // 2)
    training = state.prepare(config, store, lambda message: None)
    loop.train_step(training, 1e-3)  # the first makes the optimizer's state
    fake = FakeTensorMode(allow_non_fake_inputs=True)

    def on_host(part: Callable[..., Any]) -> Callable[..., Any]:
        def run_part(*arguments: Any) -> Any:
            with unset_fake_temporarily():
                return part(*arguments)

        return run_part

    monkeypatch.setattr(loop, "batch", on_host(order.batch))
    monkeypatch.setattr(loop, "noisy", on_host(noise.noisy))
    monkeypatch.setattr(loop, "to_device", lambda tensor, device: fake.from_tensor(tensor))
    with fake:
        result = loop.train_step(training, 1e-3)
        with pytest.raises(DataDependentOutputException):
            float(result.loss)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype:UserWarning")
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_a_step_on_cuda_never_waits_for_the_device(tiny: Config, store: TokenStore, optimizer: str) -> None:
    config = change(tiny, train__device="cuda", train__optimizer=optimizer, train__ema=0.9)
    training = state.prepare(config, store, lambda message: None)
    loop.train_step(training, 1e-3)  # the first makes the optimizer's state
    torch.cuda.set_sync_debug_mode("error")
    try:
        result = loop.train_step(training, 1e-3)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.isfinite(result.loss)
