"""The outcome of a finished run, from its `state.json`."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, ConfigDict, TypeAdapter, ValidationError

from lmtrain.config.schema import Config
from lmtrain.errors import LmtrainError
from lmtrain.evaluation.perplexity import Score
from lmtrain.storage.checkpoint import load
from lmtrain.storage.run_folder import STATE, run_config, step_folder, step_of
from lmtrain.system import disk
from lmtrain.system.process_group import ProcessGroup
from lmtrain.training.checkpoint_info import MAX_COUNT, Amount, Count
from lmtrain.training.schedule import Budget


def _usable(score: Score) -> Score:
    counts = score.tokens, score.words, score.bytes, score.context, score.stride
    floor = 1.0 if score.floor is None else score.floor
    if not (0 < min(counts) <= max(counts) <= MAX_COUNT and min(score.nats, score.unknown_share, floor - 1) >= 0):
        raise ValueError("not a score")
    return score


@dataclass(frozen=True)
class Outcome:
    """How a run ended. `Trainer.finish` writes it to `state.json`."""

    __pydantic_config__ = ConfigDict(strict=True, allow_inf_nan=False)

    status: Literal["finished", "stopped early"]
    step: Count
    minutes: Amount
    best_step: Count
    """The step of the best checkpoint."""
    valid: Annotated[Score, AfterValidator(_usable)]
    """The score of that checkpoint on the whole validation split."""


_OUTCOME = TypeAdapter(Outcome)


def finished_outcome(
    run_dir: Path, config: Config, budget: Budget, folder: Path | None, processes: ProcessGroup
) -> Outcome | None:
    """Return the outcome of the run whose last checkpoint is `folder`; None unless it ended there, and the best
    checkpoint is undamaged."""
    if folder is None or run_config(run_dir).train.teacher != config.train.teacher:
        return None  # `restore` compares what the teachers are
    step = step_of(folder)

    def undamaged() -> str | None:
        outcome = read_outcome(run_dir)
        if outcome is None or outcome.step != step:
            return None
        # A budget in time can't change, and was perhaps spent only while the last checkpoint was saved.
        if outcome.status == "finished" and budget.fixed_steps is not None and step < budget.fixed_steps:
            return None
        try:
            load(step_folder(run_dir, outcome.best_step), only_weights=True)
        except LmtrainError:
            return None
        return _OUTCOME.dump_json(outcome).decode()

    text = processes.on_main(undamaged)
    return None if text is None else _OUTCOME.validate_json(text)


def read_outcome(run_dir: Path) -> Outcome | None:
    """Return the outcome in `state.json`, or None unless the run is finished."""
    path = run_dir / STATE
    try:
        disk.check_regular(path)
        return _OUTCOME.validate_json(path.read_bytes())
    except (OSError, ValidationError):
        return None
