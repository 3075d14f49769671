"""The budget of a run in steps or time, its progress, and when it is evaluated."""

import math
from dataclasses import dataclass, replace
from typing import Self

from lmtrain.config.schema import Config
from lmtrain.errors import LmtrainError, UsageError

DEFAULT_EPOCHS = 10.0
EVALUATIONS = 20
"""Into how many parts the budget is divided for evaluations, unless the configuration says how often."""
EVALUATION_COST = 0.1
"""How much time evaluations may take then, in relation to training steps."""


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


def targets_per_step(config: Config) -> int:
    """Predictions per optimizer step: what a budget in tokens counts."""
    return config.train.batch_size * (1 if config.model.mode == "windowed" else config.model.context)


def make_budget(config: Config, samples_per_epoch: int) -> Budget:
    """The configured budget in steps and seconds; the last step of an epoch may reach into the next one.

    Raises UsageError if a warmup that is given in steps does not fit into it.
    """
    train, steps = config.train, _budget_steps(config, samples_per_epoch)
    if steps is not None and train.warmup >= 1:
        decay = train.decay if train.schedule == "wsd" else 0.0
        if train.warmup > (1 - decay) * steps:
            also = f" steps and train.decay={decay:g} are" if decay else " steps is"
            raise UsageError(f"train.warmup={train.warmup:g}{also} more than the whole run of {steps:,}: lower them")
    return Budget(steps, None if train.max_minutes is None else 60.0 * train.max_minutes)


def _budget_steps(config: Config, samples_per_epoch: int) -> int | None:
    """The budget as a number of steps; None = it is only in minutes."""
    train = config.train
    if train.steps is not None:
        return train.steps
    if train.tokens is not None:
        return -(-train.tokens // targets_per_step(config))
    if train.epochs is None and train.max_minutes is not None:
        return None
    epochs = DEFAULT_EPOCHS if train.epochs is None else train.epochs
    return math.ceil(epochs * samples_per_epoch / train.batch_size)


@dataclass(frozen=True)
class Evaluations:
    """When a run is evaluated: after each multiple of `steps`, or if that is None whenever the progress enters another
    part of the budget, unless evaluations would take more than `EVALUATION_COST`: not within `least` steps of the last
    one, or if that is None by what they have cost so far."""

    steps: int | None
    least: int | None = None

    def due(self, step: int, progress: float, last_step: int, last_progress: float, cost: float) -> bool:
        """Whether to evaluate at `step`, the last evaluation having been at `last_step`; `cost` is the time that
        evaluations have taken in relation to training steps."""
        if step == last_step:
            return False
        if self.steps is not None:
            return step % self.steps == 0
        affordable = cost <= EVALUATION_COST if self.least is None else step - last_step >= self.least
        return affordable and int(EVALUATIONS * progress) > int(EVALUATIONS * last_progress)


def make_evaluations(config: Config, validation_tokens: int) -> Evaluations:
    """The configured evaluations, without `eval_steps` those by parts of the budget.

    With a budget in steps, where they must depend only on the step, their cost is estimated: a step takes three times
    as long as an evaluation per target.
    """
    train = config.train
    if train.eval_steps is not None:
        return Evaluations(train.eval_steps)
    if train.max_minutes is not None:
        return Evaluations(None)
    scored = min(train.eval_tokens or validation_tokens, validation_tokens)
    return Evaluations(None, math.ceil(scored / (3 * EVALUATION_COST * targets_per_step(config))))
