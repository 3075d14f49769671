"""A run that is finished: its outcome as `state.json` holds it."""

import math
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ValidationError, field_validator

from lmtrain.config.schema import Config
from lmtrain.errors import LmtrainError
from lmtrain.evaluation.perplexity import Score
from lmtrain.model.trained import GROUPS
from lmtrain.storage import checkpoint, run_checkpoints
from lmtrain.storage.run_folder import STATE
from lmtrain.system import disk
from lmtrain.system.process_group import ProcessGroup
from lmtrain.training.budget import Budget
from lmtrain.training.checkpoint_info import Amount, CheckpointInfo, Count
from lmtrain.training.run import Outcome, out_of_patience


class _Finished(BaseModel, strict=True):
    """The state of a finished run; see `OpenRun.finish`."""

    status: Literal["finished"]
    step: Count
    minutes: Amount
    best_step: Count
    valid: Score

    @field_validator("valid")
    @classmethod
    def _usable(cls, score: Score) -> Score:
        positive = score.tokens, score.words, score.bytes, score.floor or 1.0
        if not math.isfinite(score.nats) or not all(0 < value < math.inf for value in positive):
            raise ValueError("not a score")
        return score


def finished_outcome(
    run_dir: Path, config: Config, budget: Budget, last: CheckpointInfo, processes: ProcessGroup
) -> Outcome | None:
    """The outcome of the run; None unless it ended with this last checkpoint, and the best one is undamaged."""
    stopped_early = out_of_patience(config, last.counters)
    if (last.teacher is None) != (not config.train.teacher):
        return None  # not the same run, which `restore` reports
    if not stopped_early and budget.progress(last.counters.step, last.seconds) < 1.0:
        return None

    def read() -> str:
        text = _read(run_dir / STATE)
        state = _parse(text)
        return text if state is not None and state.step == last.counters.step and _has_best(run_dir, state) else ""

    state = _parse(processes.on_main(read))
    if state is None:
        return None
    return Outcome(
        "stopped early" if stopped_early else "finished", state.step, state.minutes, state.valid, state.best_step
    )


def best_score(run_dir: Path) -> tuple[int, Score] | None:
    """The step of the best checkpoint of a finished run, and its score; None for another run."""
    state = _parse(_read(run_dir / STATE))
    return None if state is None else (state.best_step, state.valid)


def _read(path: Path) -> str:
    try:
        disk.check_regular(path)
        return path.read_text()
    except (OSError, UnicodeDecodeError):
        return ""


def _parse(text: str) -> _Finished | None:
    try:
        return _Finished.model_validate_json(text)
    except ValidationError:
        return None


def _has_best(run_dir: Path, state: _Finished) -> bool:
    """Whether the best checkpoint is the one that was scored, and undamaged."""
    try:
        return bool(checkpoint.load(run_checkpoints.choose(run_dir, "best"), GROUPS).info["step"] == state.best_step)
    except LmtrainError:
        return False
