"""The budget of a run in steps or time, its progress, and when it is evaluated."""

import math
from dataclasses import dataclass, replace
from typing import Self

from lmtrain.config.schema import TrainConfig
from lmtrain.errors import LmtrainError

DEFAULT_EPOCHS = 10.0
EVALUATIONS = 20
"""Into how many parts the budget is divided for evaluations, unless the configuration says how often."""
EVALUATION_COST = 0.1
"""How much time evaluations may take then, in relation to training steps, which take three times as long per target."""


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


@dataclass(frozen=True)
class Evaluations:
    """When a run is evaluated: after each multiple of `steps`, or if that is None whenever the progress enters another
    part of the budget, but not within `least` steps of the last evaluation."""

    steps: int | None
    least: int = 1

    def due(self, step: int, progress: float, last_step: int, last_progress: float) -> bool:
        """Whether to evaluate at `step`, the last evaluation having been at `last_step`."""
        if step == last_step:
            return False
        if self.steps is not None:
            return step % self.steps == 0
        return step - last_step >= self.least and int(EVALUATIONS * progress) > int(EVALUATIONS * last_progress)


def make_evaluations(
    config: TrainConfig, samples_per_epoch: int, targets_per_step: int, validation_tokens: int
) -> Evaluations:
    """The configured evaluations, without `eval_steps` and `eval_epochs` those by parts of the budget."""
    if config.eval_steps is not None:
        return Evaluations(config.eval_steps)
    if config.eval_epochs is not None:
        return Evaluations(max(1, round(config.eval_epochs * samples_per_epoch / config.batch_size)))
    scored = min(config.eval_tokens or validation_tokens, validation_tokens) * (1 if config.ema is None else 2)
    return Evaluations(None, math.ceil(scored / (3 * EVALUATION_COST * targets_per_step)))
