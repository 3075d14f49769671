"""A run that is resumed with a larger budget is, to the last bit, the run that had it from the start."""

import re
import shutil
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from lmtrain.config.schema import Config
from lmtrain.errors import LmtrainError
from lmtrain.storage import checkpoint, run_checkpoints, run_folder
from lmtrain.training import train_state
from lmtrain.training.saving import CheckpointSaver
from tests.helpers import Interrupt, flip_bit
from tests.training.helpers import change, curves, last_hash, logged, run, run_state, verified_steps
from tests.training.resuming import copied_for_every_kill

STABLE: dict[str, Any] = {
    "train__schedule": "wsd",
    "train__warmup": 2,
    "train__decay": 0.25,
    "train__steps": 8,
    "train__log_steps": 1,
    "train__keep": 1,
    "train__sample_prompts": [],
}
"""Of 8 steps the last 2 decay, of 16 the last 4; with dropout, EMA weights, and an evaluation each 5 steps."""


@pytest.mark.parametrize(
    "variant",
    [
        {},
        {"train__optimizer": "muon", "train__token_noise": 0.2},
        {"train__schedule": "constant", "train__eval_steps": 4},
        {"train__schedule": "constant", "train__eval_steps": 4, "train__steps": 9, "train__lr": 0.2},
        {"train__patience": 50, "train__warmup": 0.25},
        {"train__patience": 50, "train__schedule": "constant", "train__eval_steps": 4, "train__steps": 9},
    ],
)
def test_a_finished_run_goes_on_as_if_it_had_had_its_budget_from_the_start(
    little: Config, tmp_path: Path, variant: dict[str, Any]
) -> None:
    """Twice, and with the same curves; a warmup that is a fraction of the run is given as the steps that it took."""
    small = change(little, **STABLE | variant)
    large, larger = (change(small, train__steps=steps, train__warmup=2) for steps in (16, 21))
    run(small, tmp_path / "run")
    for config, name in ((large, "large"), (larger, "larger")):
        whole, _ = run(config, tmp_path / name)
        outcome, notes = run(config, tmp_path / "run")
        assert notes == [] or config.train.schedule == "wsd" or "train__steps" in variant, "it need not go back"
        assert outcome.score == whole.score
        assert (outcome.step, outcome.best_step) == (whole.step, whole.best_step)
        assert last_hash(tmp_path / "run") == last_hash(tmp_path / name)
        assert curves(tmp_path / "run") == curves(tmp_path / name)
        assert run_folder.run_config(tmp_path / "run") == config
    assert last_hash(tmp_path / "large") != last_hash(tmp_path / "larger")


@pytest.mark.parametrize(
    ("small", "large"),
    [
        ({"train__epochs": 0.5}, {"train__epochs": 1.0}),
        ({"train__tokens": 8 * 64 - 5}, {"train__tokens": 14 * 64 + 1}),
        ({"train__tokens": 8 * 64}, {"train__steps": 15}),
    ],
)
def test_any_budget_in_steps_can_grow_with_evaluations_at_parts_of_it(
    little: Config, tmp_path: Path, small: dict[str, Any], large: dict[str, Any]
) -> None:
    base = change(little, **STABLE | {"train__steps": None, "train__eval_steps": None})
    for name, budget in (("run", small), ("run", large), ("whole", large)):
        run(change(base, **budget), tmp_path / name)
    ends = [checkpoint.load(run_checkpoints.choose(tmp_path / name, "last")).info for name in ("run", "whole")]
    assert ends[0]["files"] == ends[1]["files"]
    steps = [[row for row in logged(tmp_path / name) if row[0] == "train"] for name in ("run", "whole")]
    assert steps[0] == steps[1]
    assert len(steps[0]) > 8


def test_the_checkpoint_before_the_decay_is_kept_with_the_best_one_until_then(little: Config, tmp_path: Path) -> None:
    config = change(little, **STABLE | {"train__steps": 20, "train__eval_steps": 1, "train__save_minutes": 1e-9})
    run(config, tmp_path)
    scores = {row[1]: row[2][0] for row in logged(tmp_path) if row[0] == "valid"}
    best = [min(range(1, until + 1), key=lambda step: scores[step]) for until in (15, 20)]
    assert verified_steps(tmp_path) == sorted({15, 20, *best})
    linear = change(config, train__schedule="linear", run__name="linear")
    run(linear, tmp_path / "linear")
    assert 15 not in verified_steps(tmp_path / "linear")


def test_a_kill_before_or_during_the_continuation_loses_nothing(
    little: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = change(little, **STABLE)
    large, run_dir = change(small, train__steps=16), tmp_path / "run"
    run(large, tmp_path / "whole")
    first, _ = run(small, run_dir)
    assert verified_steps(run_dir) == [5, 6, 8]
    first_curves = curves(run_dir)
    with monkeypatch.context() as patch:
        patch.setattr(CheckpointSaver, "save", Mock(side_effect=KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            run(large, run_dir)
    assert run_folder.run_config(run_dir) == large
    assert verified_steps(run_dir) == [5, 6]
    shutil.copytree(run_dir, tmp_path / "back")
    again, _ = run(small, tmp_path / "back")
    assert (again.step, again.score) == (first.step, first.score)
    assert curves(tmp_path / "back") == first_curves
    with copied_for_every_kill(run_dir, tmp_path / "copies") as copies:
        run(large, run_dir)
    assert len(copies) > 20
    for copy in [*copies[::5], run_dir]:
        run(large, copy)
        assert last_hash(copy) == last_hash(tmp_path / "whole")
        assert curves(copy) == curves(tmp_path / "whole")


def test_no_checkpoint_of_the_old_decay_stays(little: Config, tmp_path: Path) -> None:
    """Nor one of a step before the first new one, of step 10, which could be taken for the best."""
    often = {"train__save_minutes": 1e-9, "train__keep": 100}
    small = change(little, **STABLE | often)
    large = change(small, train__steps=16)
    run(small, tmp_path / "run")
    assert verified_steps(tmp_path / "run") == [*range(1, 9)]
    run(large, tmp_path / "whole")
    run(change(large, train__save_minutes=99.0), tmp_path / "run")
    assert verified_steps(tmp_path / "run") == [*range(1, 7), 10, 12, 15, 16]
    for folder in run_checkpoints.folders(tmp_path / "run"):
        files = checkpoint.load(folder).info["files"]
        assert files == checkpoint.load(tmp_path / "whole/checkpoints" / folder.name).info["files"]


def test_a_run_that_goes_back_says_so_and_one_that_need_not_does_not(
    little: Config, tmp_path: Path, interrupt_after: Interrupt
) -> None:
    small, large = (change(little, **STABLE | {"train__steps": steps}) for steps in (8, 16))
    run(large, tmp_path / "whole")
    interrupt_after(4)
    run(small, tmp_path / "run")
    _, notes = run(large, tmp_path / "run")
    assert notes == []
    assert last_hash(tmp_path / "run") == last_hash(tmp_path / "whole")
    before = run_state(tmp_path / "run")
    _, notes = run(change(large, train__steps=24), tmp_path / "run")
    assert notes == [
        f"{tmp_path / 'run'}: resuming from step 12 with another budget; later checkpoints, up to step 16, are deleted"
    ]
    assert (before["step"], run_state(tmp_path / "run")["step"]) == (16, 24)


@pytest.mark.parametrize(
    ("fields", "changed", "reason"),
    [
        ({"train__schedule": "cosine"}, {}, "with train.schedule=cosine the learning rate depends on the budget from"),
        ({"train__schedule": "linear"}, {}, "with train.schedule=linear the learning rate depends on the budget from"),
        ({"train__warmup": 0.25}, {}, "the warmup took 2 steps and would take 4: give train.warmup=2.0"),
        ({}, {"train__warmup": 3}, "the warmup took 2 steps and would take 3: give train.warmup=2.0"),
        ({"train__patience": 9, "train__eval_steps": None}, {}, "train.patience counts evaluations"),
        (
            {"train__patience": 9, "train__eval_steps": None, "train__schedule": "constant"},
            {},
            "train.patience counts evaluations",
        ),
        ({}, {"train__steps": 4}, "it had a larger budget, of 8 steps"),
        ({"train__schedule": "constant"}, {"train__steps": 4}, "it had a larger budget, of 8 steps"),
        ({}, {}, "it has no undamaged checkpoint up to step 6"),
    ],
)
def test_what_cannot_be_exact_is_rejected_with_a_remedy(
    little: Config, tmp_path: Path, fields: dict[str, Any], changed: dict[str, Any], reason: str
) -> None:
    config = change(little, **STABLE | {"train__eval_steps": 8} | fields)
    finished, _ = run(config, tmp_path)
    steps = verified_steps(tmp_path)
    if "undamaged" in reason:
        flip_bit(tmp_path / "checkpoints/step-00000006/optimizer.safetensors")
    with pytest.raises(LmtrainError) as caught:
        run(change(config, **{"train__steps": 16} | changed), tmp_path)
    assert reason in str(caught.value)
    assert str(caught.value).startswith(f"{tmp_path} can't be resumed with another budget or warmup: ")
    remedy = f"Give the old values, or train another run (run.name=...; train.init_from={tmp_path} starts from its wei"
    assert re.search(re.escape(remedy), str(caught.value))
    assert run_folder.run_config(tmp_path) == config
    assert [run_folder.step_of(folder) for folder in run_checkpoints.folders(tmp_path)] == steps
    assert run(config, tmp_path)[0].score == finished.score


@pytest.mark.parametrize("steps", [None, 8])
@pytest.mark.parametrize(("field", "value"), [("warmup", 0.5), ("steps", 16)])
def test_a_schedule_that_follows_the_clock_cannot_change(
    little: Config, tmp_path: Path, interrupt_after: Interrupt, steps: int | None, field: str, value: Any
) -> None:
    budget = {"train__steps": steps, "train__max_minutes": 9.0, "train__warmup": 0.1}
    config = change(little, **STABLE | budget, train__compile=False)  # so long a run would be compiled
    interrupt_after(2)
    run(config, tmp_path)
    old = getattr(config.train, field)
    with pytest.raises(LmtrainError, match=rf"another configuration \(train\.{field}: {old} -> {value}\)"):
        run(change(config, **{f"train__{field}": value}), tmp_path)
    assert run_folder.run_config(tmp_path) == config


def test_a_compiled_model_after_one_that_was_not_is_reported(
    little: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = change(little, **STABLE)
    run(small, tmp_path)
    monkeypatch.setattr(train_state, "compiled_forward", lambda objective, *_: partial(objective))
    _, notes = run(change(small, train__steps=16), tmp_path)
    assert notes[1:] == ["compiled: False before, True now; the results may not be equal bit for bit"]
