"""A run with another budget than before: how far the two are the same, and from which checkpoint it continues.

All that a step does is a function of the state and of (seed, step, micro-batch), except for its learning rate. So two
runs that differ only in their budgets are the same, to the last bit, as long as their learning rates are.
"""

from pathlib import Path

from lmtrain.config.train import TrainConfig
from lmtrain.errors import LmtrainError
from lmtrain.storage import checkpoint, run_checkpoints
from lmtrain.system.messages import Note
from lmtrain.system.process_group import ProcessGroup
from lmtrain.training.budget import Budget
from lmtrain.training.checkpoint_info import CheckpointInfo, Schedule, read_info
from lmtrain.training.optim import steps_before_decay, warmup_steps


def schedule_of(train: TrainConfig, budget: Budget) -> Schedule:
    """What is stored with a checkpoint of the run."""
    return Schedule(budget.steps, warmup_steps(train, budget))


def common_steps(run_dir: Path, train: TrainConfig, budget: Budget, info: CheckpointInfo) -> int:
    """Up to which step the run of a checkpoint and one with `budget`, which may be larger, are the same.

    Raises LmtrainError, with what to do instead, if they differ from the first step on.
    """
    now, then = schedule_of(train, budget), info.schedule
    if then is None or then == now:
        return info.counters.step
    if then.steps is None or now.warmup is None:
        obstacle = "the schedule of a run with train.max_minutes follows the clock"
    elif steps_before_decay(train, budget) == 0:
        obstacle = f"with train.schedule={train.schedule} the learning rate depends on the budget from the start"
    elif train.patience is not None and (train.schedule == "constant" or train.eval_steps is None):
        obstacle = "train.patience counts evaluations, and the budget decides when they are"
    elif then.warmup != now.warmup:
        obstacle = f"the warmup took {then.warmup} steps and would take {now.warmup}: give train.warmup={then.warmup}"
    elif now.steps is None or now.steps < then.steps:
        obstacle = f"it had a larger budget, of {then.steps:,} steps"
    else:
        return steps_before_decay(train, Budget(then.steps, None))
    raise _rejection(run_dir, obstacle)


def last_common(
    run_dir: Path, train: TrainConfig, budget: Budget, last: checkpoint.Checkpoint, note: Note, processes: ProcessGroup
) -> checkpoint.Checkpoint:
    """The last checkpoint that the run and one with `budget` have in common; `last` is the last one of the run.

    Called by all processes, and the same in all. Raises LmtrainError if there is none.
    """
    step = last.info["step"]
    common = common_steps(run_dir, train, budget, read_info(last))
    if step <= common:
        return last

    def find() -> str:
        found = run_checkpoints.last_until(run_dir, common)
        if found is None:
            raise _rejection(run_dir, f"it has no undamaged checkpoint up to step {common:,}")
        return str(found.folder)

    found = checkpoint.load(Path(processes.on_main(find)), verify_hashes=False)
    note(
        f"{run_dir}: going back to step {found.info['step']:,}, before the decay of the learning rate, to resume with "
        f"another budget; later checkpoints, up to step {step:,}, are deleted when the next one is saved"
    )
    return found


def _rejection(run_dir: Path, obstacle: str) -> LmtrainError:
    return LmtrainError(
        f"{run_dir} was started with another budget or warmup and can't be resumed with this one as if it had always "
        f"had it ({obstacle}): choose another run.name, with train.init_from={run_dir} to start from its weights, or "
        "give the old values"
    )
