"""Resuming with another budget: up to which step the two runs are the same, and where to resume.

A step is a function of the state, of (seed, step, micro-batch) and of its learning rate. So two runs that differ only
in their budgets are the same, to the last bit, as long as their learning rates are.
"""

from pathlib import Path

from lmtrain.config.train import TrainConfig
from lmtrain.errors import LmtrainError
from lmtrain.storage import run_checkpoints
from lmtrain.storage.checkpoint import Checkpoint
from lmtrain.system.messages import log
from lmtrain.training.checkpoint_info import read_info
from lmtrain.training.schedule import Budget, schedule_length


def steps_independent_of_budget(train: TrainConfig, budget: Budget) -> int:
    """Return how many steps from the start are the same with every larger budget, to the last bit.

    These are the steps before the decay of `wsd` (rounded down: the step at its beginning may be part of it), and all
    steps with `constant`, except the last one if it is evaluated only because it is the last. 0 for other schedules,
    and if the schedule follows the clock.
    """
    steps = budget.fixed_steps
    if steps is None:
        return 0
    if train.schedule == "constant":
        return steps - (train.eval_steps is not None and steps % train.eval_steps > 0)
    return int((1.0 - train.decay) * steps) if train.schedule == "wsd" else 0


def last_common(run_dir: Path, train: TrainConfig, budget: Budget, last: Checkpoint) -> Checkpoint:
    """Return the last checkpoint that the run has in common with one with `budget`; `last` is the run's last one.

    Raises LmtrainError, with what to do instead, if there is none.
    """
    now, then = schedule_length(train, budget), read_info(last).schedule
    if then is None or then.steps is None or then == now:
        return last  # `check_same_run` rejects another schedule where it follows the clock
    if steps_independent_of_budget(train, budget) == 0:
        obstacle = f"with train.schedule={train.schedule} the learning rate depends on the budget from the start"
    elif train.patience is not None and train.eval_steps is None:
        obstacle = "train.patience counts evaluations, and the budget decides when they are"
    elif then.warmup != now.warmup:
        took = f"the warmup took {then.warmup:g} steps and would take {now.warmup:g}"
        obstacle = f"{took}: give train.warmup={then.warmup}"
    elif now.steps is None or now.steps < then.steps:
        obstacle = f"it had a larger budget, of {then.steps:,} steps"
    else:
        step, common = last.info["step"], steps_independent_of_budget(train, Budget(then.steps, None))
        if step <= common:
            return last
        checkpoint = run_checkpoints.last_until(run_dir, common)
        if checkpoint is not None:
            log.warning(
                f"{run_dir}: resuming from step {checkpoint.info['step']:,} with another budget; later "
                f"checkpoints, up to step {step:,}, are deleted"
            )
            return checkpoint
        obstacle = f"it has no undamaged checkpoint up to step {common:,}"
    raise LmtrainError(
        f"{run_dir} can't be resumed with another budget or warmup: {obstacle}. Give the old values, or train another "
        f"run (run.name=...; train.init_from={run_dir} starts from its weights)"
    )
