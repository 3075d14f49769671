"""Time and means over the steps between two logged points."""

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

from torch import Tensor

from lmtrain.errors import LmtrainError
from lmtrain.system.runtime import memory_bytes, peak_flops, synchronize
from lmtrain.training.costs import step_flops
from lmtrain.training.state import Training

MAX_SKIPPED_IN_A_ROW = 20
NAMED_WINDOWS = 8
"""Windows of a bad batch that a message names."""


class StepResult(NamedTuple):
    """What a step was, left on the device: nats per target, the gradient's norm, whether nothing was changed."""

    loss: Tensor
    grad_norm: Tensor
    skipped: Tensor


class Clock:
    """Seconds that the run has taken, over all its parts, evaluations included."""

    def __init__(self, seconds: float = 0.0, time_now: Callable[[], float] = time.monotonic) -> None:
        self._before, self._now = seconds, time_now
        self._started = self._saved = time_now()

    def read(self) -> float:
        """Seconds so far."""
        return self._before + self._now() - self._started

    def since_save(self) -> float:
        """Seconds since the last checkpoint of this part of the run."""
        return self._now() - self._saved

    def mark_saved(self) -> None:
        """A checkpoint is being written now."""
        self._saved = self._now()


class Window:
    """The steps since the last logged point. Their sums are part of the training's state, on the device, for which only
    a logged step waits; the time is that of this part of the run."""

    def __init__(self, training: Training) -> None:
        self._training = training
        self._tokens_per_step = training.config.train.batch_size * training.targets_per_sample
        self._flops_per_step = step_flops(training.model, training.config)
        self._peak = peak_flops(training.device, training.precision) * training.parallel.workers.size
        self._steps, self._began = 0, time.perf_counter()

    def count(self) -> None:
        """A step was taken. Raises LmtrainError after too many in a row that were left out: on a GPU up to as many
        later, so that the host does not wait for each."""
        self._steps += 1
        if self._training.device.type == "cpu" or self._training.counters.step % MAX_SKIPPED_IN_A_ROW == 0:
            self._check()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """The time in the block is not that of steps."""
        began = time.perf_counter()
        yield
        self._began += time.perf_counter() - began

    def _check(self) -> None:
        training = self._training
        in_a_row = int(training.in_a_row)
        if in_a_row >= MAX_SKIPPED_IN_A_ROW:
            size = training.config.train.batch_size
            starts = training.order.starts((training.counters.step - 1) * size, min(size, NAMED_WINDOWS))
            raise LmtrainError(
                f"training diverged: {in_a_row} steps in a row up to step {training.counters.step} were "
                "left out, their gradient being not finite (the last one's windows start at tokens "
                f"{', '.join(map(str, starts))}{' ..' if size > NAMED_WINDOWS else ''}); the last checkpoint is good: "
                "lower train.lr or raise train.warmup"
            )

    def metrics(self, lr: float, seconds: float) -> dict[str, float]:
        """Means since the last call, also where the run was resumed between. Raises LmtrainError as `count` does."""
        self._check()
        training = self._training
        losses, norms, steps = training.window.tolist()
        training.window.zero_()
        loss = losses / steps if steps else math.nan
        synchronize(training.device)
        per_second = self._steps / (time.perf_counter() - self._began)
        self._steps, self._began = 0, time.perf_counter()
        return {
            "loss": loss,
            "perplexity": math.exp(min(loss, 700.0)),
            "lr": lr,
            "grad_norm": norms / steps if steps else math.nan,
            "tokens_per_second": per_second * self._tokens_per_step,
            "peak_share": per_second * self._flops_per_step / self._peak,
            "memory_gb": memory_bytes(training.device) / 1e9,
            "epoch": training.counters.step * training.config.train.batch_size / training.order.per_epoch(),
            "minutes": seconds / 60,
            "skipped_steps": float(training.skipped),
        }
