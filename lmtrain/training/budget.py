"""The budget of a run in steps or time, and its progress."""

import math
from dataclasses import dataclass, replace
from typing import Self

from lmtrain.config.schema import TrainConfig
from lmtrain.errors import LmtrainError

DEFAULT_EPOCHS = 10.0


@dataclass(frozen=True)
class Budget:
    """Steps, seconds, or both: then whichever is spent first."""

    steps: int | None
    seconds: float | None
    prepared: float = 0.0
    """Seconds before the first step, mostly compilation."""

    def progress(self, step: int, seconds: float) -> float:
        """The fraction of the budget that is spent, in [0, 1]. A budget in time counts from the first step: from the
        start, compiling could take up the whole warm-up."""
        fractions = [0.0]
        if self.steps is not None:
            fractions.append(step / self.steps)
        if self.seconds is not None:
            fractions.append((seconds - self.prepared) / (self.seconds - self.prepared))
        return min(1.0, max(fractions))

    def begun(self, seconds: float) -> Self:
        """The same budget with the first step after so many seconds. Raises LmtrainError if it is spent by then."""
        if self.seconds is not None and seconds >= self.seconds:
            raise LmtrainError(
                f"train.max_minutes={self.seconds / 60:g} is over before the first step, {seconds / 60:.2f} minutes "
                "having gone into preparing it: give the run more, or set train.compile=false"
            )
        return replace(self, prepared=seconds)


def make_budget(config: TrainConfig, samples_per_epoch: int) -> Budget:
    """The configured budget in steps and seconds; the last step of an epoch may reach into the next one."""
    steps = config.steps
    epochs = config.epochs
    if steps is None and epochs is None and config.max_minutes is None:
        epochs = DEFAULT_EPOCHS
    if epochs is not None:
        steps = math.ceil(epochs * samples_per_epoch / config.batch_size)
    return Budget(steps, None if config.max_minutes is None else 60.0 * config.max_minutes)


def evaluation_steps(config: TrainConfig, samples_per_epoch: int) -> int:
    """Optimizer steps between two evaluations."""
    if config.eval_steps is not None:
        return config.eval_steps
    return max(1, round((config.eval_epochs or 1.0) * samples_per_epoch / config.batch_size))
