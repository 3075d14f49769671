"""A run resumed from the checkpoint of any step, any number of times, equals an uninterrupted run bit for bit."""

import dataclasses
import os
import random
import re
import shutil
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

import lmtrain
from lmtrain.config.schema import Config
from lmtrain.errors import LmtrainError
from lmtrain.generation.complete import complete
from lmtrain.generation.options import Options
from lmtrain.storage import checkpoint, run_checkpoints, run_folder
from lmtrain.system import disk
from lmtrain.training import loop, train_state, validation
from lmtrain.training.loop import train_step
from lmtrain.training.monitor import RunMonitor
from lmtrain.training.saving import CheckpointSaver
from lmtrain.training.train_state import TrainState, restore, snapshot
from tests.helpers import Child, Interrupt, compiles, flip_bit, messages
from tests.training.helpers import (
    CIRCUMSTANCES,
    LOGGED,
    change,
    curves,
    full_disk,
    last_hash,
    logged,
    metrics,
    run,
    run_interrupted,
    scaled_step,
    start,
    state_of,
    worsen,
)

BATCH = 15
SMALL = {"model__dim": 8, "model__layers": 0, "train__batch_size": BATCH, "train__micro_batch": None}
MATRIX: dict[str, dict[str, Any]] = {
    f"{precision}, {'ema' if ema else 'no ema'}, {micros} micro-batch{'es' if micros > 1 else ''}": {
        "train__precision": precision,
        "train__ema": ema,
        "train__micro_batch": BATCH // micros,
    }
    for precision, ema, micros in (("fp32", 0.9, 1), ("bf16", None, 3), ("fp16", 0.9, 1), ("fp16", None, 3))
}
MATRIX |= {
    "token noise": {"train__token_noise": 0.3, "train__micro_batch": BATCH // 3},
    "copying": {"model__layers": 1, "model__copy": True, "model__tie_embeddings": False},
    "adaptive": {"model__layers": 1, "model__output": "adaptive", "train__precision": "bf16"},
    "linear attention": {"model__layers": 1, "model__attention": "linear", "train__schedule": "wsd"},
    "windowed": {"model__layers": 1, "model__mode": "windowed", "train__schedule": "linear"},
    "muon": {"model__layers": 1, "train__optimizer": "muon"},
    "muon, fp16, 3 micro-batches": {
        "train__optimizer": "muon",
        "train__precision": "fp16",
        "train__micro_batch": BATCH // 3,
    },
}
SHORT: dict[str, Any] = {
    "train__steps": 14,  # of 15 windows; an epoch has 66
    "train__log_steps": 4,
    "train__eval_steps": 5,
    "train__eval_tokens": 50,
    "train__sample_prompts": [],
    "eval__stride": None,
}
"""A run of which an epoch ends inside a step, twice."""


def overflow(state: TrainState, lr: float) -> None:
    """A step; the loss of the seventh overflows in any precision."""
    scaled_step(state, lr, 1e30 if state.step == 6 else 1.0)


@pytest.mark.parametrize("variant", MATRIX)
def test_a_run_that_is_interrupted_after_every_step_equals_an_uninterrupted_one(
    little: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variant: str
) -> None:
    """In its last checkpoint, and in its metrics."""
    config = change(little, **SMALL | SHORT | MATRIX[variant])
    monkeypatch.setattr(loop, "train_step", overflow)
    run(config, tmp_path / "whole")

    def interrupted(state: TrainState, lr: float) -> None:
        overflow(state, lr)
        signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr(loop, "train_step", interrupted)
    for _ in range(14):
        run_interrupted(config, tmp_path / "parts")
    run(config, tmp_path / "parts")
    assert last_hash(tmp_path / "parts") == last_hash(tmp_path / "whole")
    assert logged(tmp_path / "parts") == logged(tmp_path / "whole")
    assert [row["skipped_steps"] for row in metrics(tmp_path / "parts") if row["kind"] == "train"][-1] == 1


@compiles
@pytest.mark.usefixtures("two_threads")
def test_a_compiled_training_can_be_resumed(little: Config, tmp_path: Path) -> None:
    """With two threads, which share the gradient of each embedding."""
    fields = {"model__dim": 64, "train__batch_size": 64, "train__compile": True, "train__threads": 2}
    config = change(little, **SMALL | SHORT | fields)
    run(config, tmp_path)
    expected = last_hash(tmp_path)
    newest = run_checkpoints.choose(tmp_path, "last")
    found = checkpoint.load(newest)
    assert found.info["compiled"]
    assert not any("_orig_mod" in name for name in found.tensors["model"])
    shutil.rmtree(newest)
    run(config, tmp_path)
    assert last_hash(tmp_path) == expected


@contextmanager
def copied_for_every_kill(run_dir: Path, folder: Path) -> Iterator[list[Path]]:
    """Copies of a run's folder, made in the block at every moment at which a kill would leave another one behind."""
    copies: list[Path] = []

    def copy() -> None:
        copies.append(folder / f"{len(copies)}")
        shutil.copytree(run_dir, copies[-1])

    step, record, save_ = loop.train_step, RunMonitor.record, CheckpointSaver.save

    def stepped(state: TrainState, lr: float) -> None:
        step(state, lr)
        copy()

    def recorded(*arguments: Any) -> None:
        record(*arguments)
        copy()

    def saved(saver: CheckpointSaver, *arguments: Any) -> None:
        save_(saver, *arguments)
        saver.wait()
        copy()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "train_step", stepped)
        patch.setattr(RunMonitor, "record", recorded)
        patch.setattr(CheckpointSaver, "save", saved)
        yield copies


@pytest.mark.parametrize("variant", ["to the end", "evaluating by share", "stopping early"])
def test_a_kill_at_any_moment_leaves_no_trace(
    little: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variant: str
) -> None:
    """The same bits, status, best checkpoint and final score, and curves without gaps or duplicates."""
    config = change(little, **LOGGED)
    if variant == "stopping early":
        monkeypatch.setattr(loop, "train_step", worsen)
        fields = {"train__steps": 50, "train__eval_steps": 1, "train__patience": 2, "train__keep": 1}
        config = change(little, **LOGGED | fields)
    if variant == "evaluating by share":
        config = change(little, **LOGGED | {"train__steps": 9, "train__eval_steps": None})
    monkeypatch.setattr(validation, "show_samples", lambda *arguments: None)
    with copied_for_every_kill(tmp_path / "whole", tmp_path / "copies") as copies:
        whole, _ = run(config, tmp_path / "whole")
    assert len(copies) > 15
    assert whole.status == ("stopped early" if variant == "stopping early" else "finished")
    expected = curves(tmp_path / "whole")
    for copy in copies:
        resumed, _ = run(config, copy)
        assert dataclasses.replace(resumed, minutes=0.0) == dataclasses.replace(whole, minutes=0.0)
        assert last_hash(copy) == last_hash(tmp_path / "whole")
        assert curves(copy) == expected


def test_a_killed_process_frees_its_run_folder_and_the_run_is_resumed(
    little: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = change(little, **LOGGED | {"train__steps": 12, "train__save_minutes": 1e-9})
    run(config, tmp_path / "whole")

    def train(say: Callable[[str], None]) -> None:
        def step(state: TrainState, lr: float) -> None:
            say(str(state.step))
            if state.step == 7:
                signal.alarm(60)  # in case the test itself ends first
                signal.pause()
            train_step(state, lr)

        monkeypatch.setattr(loop, "train_step", step)
        run(config, tmp_path / "run")

    child = Child(train)
    assert "7" in iter(child.hear, "")
    in_use = f"{tmp_path / 'run'} is in use by another process: wait for it or set run.name"
    with pytest.raises(LmtrainError, match=re.escape(in_use)):
        run(config, tmp_path / "run")
    os.kill(child.process, signal.SIGKILL)
    assert child.end() == -signal.SIGKILL
    _, notes = run(config, tmp_path / "run", quiet=False)
    assert re.search(r"resuming from step [67] \(5[08]% of the budget\)$", notes[0])
    assert last_hash(tmp_path / "run") == last_hash(tmp_path / "whole")


def train_until(event: int | str, steps: int, config: Config, run_dir: Path) -> None:
    """Train until a signal or an error after this many steps, or to the end if that is sooner."""
    kind, text = {
        "memory": (LmtrainError, "out of memory: lower"),
        "disk": (LmtrainError, "No space left on device"),
    }.get(str(event), (KeyboardInterrupt, ""))
    with pytest.MonkeyPatch.context() as patch:

        def step(state: TrainState, lr: float) -> None:
            nonlocal steps
            train_step(state, lr)
            steps -= 1
            if steps == 0 and event == "memory":
                raise torch.OutOfMemoryError("no more")
            if steps == 0 and event == "disk":
                patch.setattr(disk, "write", full_disk)
            if steps == 0 and isinstance(event, int):
                signal.raise_signal(event)

        patch.setattr(loop, "train_step", step)
        failure: BaseException | None = None
        try:
            run(config, run_dir)
        except (LmtrainError, KeyboardInterrupt) as error:
            failure = error
    assert failure is None or (type(failure) is kind and text in str(failure))


def damage_the_newest(run_dir: Path, choice: random.Random) -> None:
    path = run_checkpoints.choose(run_dir, "last") / f"{choice.choice(['model', 'optimizer', 'ema'])}.safetensors"
    flip_bit(path, choice.randrange(path.stat().st_size))
    with messages() as notes:
        run_checkpoints.set_aside(run_checkpoints.last(run_dir)[1])
    assert "it was set aside" in notes[0]


def test_any_sequence_of_events_leads_to_the_same_end(
    little: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every checkpoint is one of the uninterrupted run, and so are the curves, also between two logged steps."""
    monkeypatch.setattr(validation, "show_samples", lambda *arguments: None)
    fields = {"train__steps": 12, "train__log_steps": 4, "train__eval_steps": 5, "train__save_minutes": 1e-9}
    config, whole = change(little, **LOGGED | fields), tmp_path / "whole"
    end, _ = run(change(config, train__keep=100), whole)
    files = {folder.name: checkpoint.load(folder).info["files"] for folder in run_checkpoints.folders(whole)}
    assert len(files) == 12
    events = (signal.SIGTERM, signal.SIGINT, "memory", "disk", "damage", "generation")
    for seed in range(6):
        choice, run_dir = random.Random(seed), tmp_path / str(seed)
        for event in choice.choices(events, k=5):
            folders = run_checkpoints.folders(run_dir)
            if event == "damage" and len(folders) > 1:
                damage_the_newest(run_dir, choice)
            elif event == "generation" and folders:
                trained = lmtrain.load(run_dir, checkpoint="last", weights="auto", device="cpu")
                assert complete(trained.model, trained.tokenizer, ["The"], Options(max_tokens=3))
            elif event not in ("damage", "generation"):
                train_until(event, choice.randint(1, 6), config, run_dir)
            for folder in run_checkpoints.folders(run_dir):
                assert checkpoint.load(folder).info["files"] == files[folder.name]
        outcome, _ = run(config, run_dir)
        assert dataclasses.replace(outcome, minutes=0.0) == dataclasses.replace(end, minutes=0.0)
        assert last_hash(run_dir) == last_hash(whole)
        assert curves(run_dir) == curves(whole)


def test_observing_a_run_changes_nothing(little: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Evaluating, generating, logging and saving at every step, or never: the same final state."""
    fields = SMALL | MATRIX["fp16, no ema, 3 micro-batches"]
    never = change(little, **fields, train__log_steps=1000, train__eval_steps=1000, train__steps=6)
    often = {"log_steps": 1, "eval_steps": 1, "save_minutes": 1e-9, "sample_prompts": ["The", "A"]}
    run(never, tmp_path / "never")

    def distracted(state: TrainState, lr: float) -> None:
        train_step(state, lr)
        torch.rand(17)
        state.model.eval()
        complete(state.model, state.store.tokenizer, ["The"], Options(max_tokens=5))
        state.model.train()

    monkeypatch.setattr(loop, "train_step", distracted)
    run(change(never, **{f"train__{name}": value for name, value in often.items()}), tmp_path / "often")
    ends = [checkpoint.load(run_checkpoints.choose(tmp_path / name, "last")) for name in ("never", "often")]
    assert ends[0].info["files"] == ends[1].info["files"]
    assert ends[0].info["counters"]["scaler"] == ends[1].info["counters"]["scaler"]
    assert len(curves(tmp_path / "often")) > 2 * len(curves(tmp_path / "never"))


def test_another_precision_is_reported(tiny: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`auto` depends on the machine, and is the same configuration."""
    config = change(tiny, train__precision="auto", train__steps=1)
    notes: list[list[str]] = []
    for precision in ("bf16", "bf16", "fp32", "fp16"):
        if notes:
            run_folder.write_state(tmp_path, "interrupted")
        monkeypatch.setattr(train_state, "choose_precision", lambda name, device, precision=precision: precision)
        notes.append([note for note in run(config, tmp_path)[1] if "train.precision" in note])
    before, after = "precision, by train.precision=auto: bf16 before", "now; the results may not be equal bit for bit"
    assert notes == [[], [], [f"{before}, fp32 {after}"], [f"{before}, fp16 {after}"]]


def test_another_micro_batch_is_reported(tiny: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The dropout masks of a step depend on its micro-batches; those of a run that was killed in its first step count
    for nothing."""
    run(change(tiny, train__steps=5, train__schedule="constant", train__warmup=1), tmp_path)
    other = change(tiny, train__schedule="constant", train__warmup=1, train__micro_batch=1)
    with monkeypatch.context() as patch:
        patch.setattr(loop, "train_step", None)
        with pytest.raises(TypeError):
            run(other, tmp_path)
    _, notes = run(other, tmp_path)
    assert notes == ["sequences per micro-batch: 2 before, 1 now; the results may not be equal bit for bit"]


def test_every_item_of_the_state_is_restored_and_none_may_be_missing(little: Config, tmp_path: Path) -> None:
    """All differ from those of a new run."""
    config = change(little, **SMALL | MATRIX["fp16, ema, 1 micro-batch"])
    state, new = start(config), start(config)
    for _ in range(7):
        overflow(state, 1e-2)
    state.evaluated, state.best, state.stale = 2, 4.5, 1
    found = checkpoint.load(checkpoint.save(tmp_path, 7, *snapshot(state, None, **CIRCUMSTANCES)))
    before = state_of(new)
    assert [name for name, digest in state_of(state).items() if digest == before.get(name)] == []
    for group in ("model", "optimizer", "ema"):
        tensors: Any = {**found.tensors, group: {}}
        with pytest.raises(LmtrainError, match="does not fit"):
            restore(start(config), dataclasses.replace(found, tensors=tensors))
    restore(new, found)
    assert state_of(new) == state_of(state)


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_resume_on_cuda_gives_the_same_bits(
    tiny: Config, tmp_path: Path, interrupt_after: Interrupt, precision: str
) -> None:
    config = change(tiny, train__device="cuda", train__precision=precision)
    run(config, tmp_path / "whole")
    interrupt_after(7)
    run_interrupted(config, tmp_path / "parts")
    run(config, tmp_path / "parts")
    assert last_hash(tmp_path / "whole") == last_hash(tmp_path / "parts")


def test_a_run_that_is_resumed_between_two_shares_is_evaluated_at_the_same_steps(
    little: Config, tmp_path: Path, interrupt_after: Interrupt
) -> None:
    """An evaluation costs 7 steps and a share has 5: the second comes at step 14, in the share that began before."""
    fields: dict[str, Any] = {"train__steps": 100, "train__eval_steps": None, "train__eval_tokens": 130}
    fields |= {"train__patience": 2, "train__lr": 1e-9, "train__sample_prompts": []}
    config = change(little, **LOGGED | fields)
    run(config, tmp_path / "whole")
    interrupt_after(13)
    run_interrupted(config, tmp_path / "run")
    run(config, tmp_path / "run")
    assert logged(tmp_path / "run") == logged(tmp_path / "whole")
