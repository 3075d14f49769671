"""The outcome of a finished run, from its `state.json`."""

from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ValidationError, field_validator

from lmtrain.config.schema import Config
from lmtrain.errors import LmtrainError
from lmtrain.evaluation.perplexity import Score
from lmtrain.storage.checkpoint import load
from lmtrain.storage.run_folder import STATE, run_config, step_folder, step_of
from lmtrain.system import disk
from lmtrain.system.process_group import ProcessGroup
from lmtrain.training.checkpoint_info import MAX_COUNT, Amount, Count
from lmtrain.training.schedule import Budget
from lmtrain.training.trainer import Outcome


class Finished(BaseModel, strict=True, allow_inf_nan=False):
    """The state of a finished run; see `Trainer.finish`."""

    status: Literal["finished", "stopped early"]
    step: Count
    minutes: Amount
    best_step: Count
    valid: Score

    @field_validator("valid")
    @classmethod
    def _usable(cls, score: Score) -> Score:
        counts = score.tokens, score.words, score.bytes, score.context, score.stride
        floor = 1.0 if score.floor is None else score.floor
        if not (0 < min(counts) <= max(counts) <= MAX_COUNT and min(score.nats, score.unknown_share, floor - 1) >= 0):
            raise ValueError("not a score")
        return score


def finished_outcome(
    run_dir: Path, config: Config, budget: Budget, folder: Path | None, processes: ProcessGroup
) -> Outcome | None:
    """Return the outcome of the run whose last checkpoint is `folder`; None unless it ended there, and the best
    checkpoint is undamaged."""
    if folder is None or run_config(run_dir).train.teacher != config.train.teacher:
        return None  # `restore` compares what the teachers are
    step = step_of(folder)

    def valid_state() -> str | None:
        state = read_finished(run_dir)
        if state is None or state.step != step:
            return None
        # A budget in time can't change, and was perhaps spent only while the last checkpoint was saved.
        if state.status == "finished" and budget.fixed_steps is not None and step < budget.fixed_steps:
            return None
        try:
            load(step_folder(run_dir, state.best_step), only_weights=True)
        except LmtrainError:
            return None
        return state.model_dump_json()

    text = processes.on_main(valid_state)
    if text is None:
        return None
    state = Finished.model_validate_json(text)
    return Outcome(state.status, state.step, state.minutes, state.valid, state.best_step)


def read_finished(run_dir: Path) -> Finished | None:
    """Return the content of `state.json`, or None unless the run is finished."""
    path = run_dir / STATE
    try:
        disk.check_regular(path)
        return Finished.model_validate_json(path.read_bytes())
    except (OSError, ValidationError):
        return None
