"""The budget of a run in steps or time, its progress, and the learning rate, which follows from that."""

import math
from dataclasses import dataclass, replace
from typing import Self

from lmtrain.config.schema import Config
from lmtrain.config.train import TrainConfig
from lmtrain.data.order import SampleOrder
from lmtrain.data.tokens import TokenStore
from lmtrain.errors import LmtrainError

DEFAULT_EPOCHS = 10.0


@dataclass(frozen=True)
class Budget:
    """Steps, seconds, or both: then whichever is spent first."""

    steps: int | None
    seconds: float | None
    setup_seconds: float = 0.0
    """Seconds before the first step, mostly compilation."""

    @property
    def fixed_steps(self) -> int | None:
        """The steps, if nothing else limits the run; None if its schedule follows the clock."""
        return self.steps if self.seconds is None else None

    def progress(self, step: int, seconds: float) -> float:
        """Return the fraction of the budget that is spent, in [0, 1].

        A budget in time counts from the first step on; otherwise compiling could take up the whole warmup.
        """
        fractions = [0.0]
        if self.steps is not None:
            fractions.append(step / self.steps)
        if self.seconds is not None:
            fractions.append((seconds - self.setup_seconds) / (self.seconds - self.setup_seconds))
        return min(1.0, max(fractions))

    def with_setup(self, seconds: float) -> Self:
        """Return the budget with these `setup_seconds`. Raises LmtrainError if they are the whole budget."""
        if self.seconds is not None and seconds >= self.seconds:
            raise LmtrainError(
                f"train.max_minutes={self.seconds / 60:g} is over before the first step: preparations, such "
                f"as compiling, took {seconds / 60:.2f} minutes. Raise train.max_minutes"
            )
        return replace(self, setup_seconds=seconds)


def sample_order(config: Config, store: TokenStore) -> SampleOrder:
    """Return the order of the sequences in the training split. Raises LmtrainError if it is shorter than one."""
    return SampleOrder(store.split("train").tokens, config.model.context, config.model.targets, config.run.seed)


def make_budget(config: Config, store: TokenStore) -> Budget:
    """Return the configured budget in steps and seconds. The last step of an epoch may reach into the next one.

    Raises LmtrainError if the training split is shorter than a sequence, whatever the unit of the budget.
    """
    minutes, steps = config.train.max_minutes, _budget_steps(config, sample_order(config, store).per_epoch())
    return Budget(steps, None if minutes is None else 60.0 * minutes)


def _budget_steps(config: Config, samples_per_epoch: int) -> int | None:
    """Return the budget in steps, or None if it is only in minutes."""
    train = config.train
    if train.steps is not None:
        return train.steps
    if train.tokens is not None:
        return -(-train.tokens // config.targets_per_step)
    if train.epochs is None and train.max_minutes is not None:
        return None
    return math.ceil((train.epochs or DEFAULT_EPOCHS) * samples_per_epoch / train.batch_size)


def learning_rate(train: TrainConfig, budget: Budget, step: int, seconds: float) -> float:
    """Return the learning rate of this step; at least a thousandth of the peak, so that the first step has an effect.

    It rises linearly over the warmup and then follows `_schedule`.
    """
    progress, warmup = budget.progress(step, seconds), train.warmup
    if warmup >= 1 and budget.steps is not None:
        warmup /= budget.steps
    scale = progress / warmup if progress < warmup else _schedule(train, progress, warmup)
    return train.lr * max(scale, 1e-3)


def _schedule(train: TrainConfig, progress: float, warmup: float) -> float:
    """Return the learning rate as a fraction of its peak, at `progress` in [`warmup`, 1] of the run.

    `cosine` decays to `final_lr` along half a cosine (Loshchilov & Hutter, 2017), `linear` decays to it linearly, `wsd`
    is constant and decays linearly over the last `decay` (Hu et al., 2024), and `constant` stays constant.
    """
    rest = (progress - warmup) / (1.0 - warmup)
    if train.schedule == "cosine":
        return train.final_lr + (1.0 - train.final_lr) * 0.5 * (1.0 + math.cos(math.pi * rest))
    if train.schedule == "linear":
        return 1.0 - (1.0 - train.final_lr) * rest
    if train.schedule == "wsd":
        return 1.0 - (1.0 - train.final_lr) * max(0.0, (progress - (1.0 - train.decay)) / train.decay)
    return 1.0
