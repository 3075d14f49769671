"""Time and means over the steps between two logged points."""

import math
import time
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from lmtrain.errors import LmtrainError
from lmtrain.runtime import memory_bytes, peak_flops, synchronize
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
    """The steps since the last logged point. Sums stay on the device, so that only a logged step waits for it."""

    def __init__(self, training: Training) -> None:
        self._training = training
        self._in_a_row = torch.zeros((), device=training.device)
        self._tokens_per_step = training.config.train.batch_size * training.targets_per_sample
        self._flops_per_step = step_flops(training.model, training.config)
        self._peak = peak_flops(training.device, training.precision) * training.parallel.workers.size
        self.restart()

    def restart(self) -> None:
        """Forget the steps so far, and the time they took."""
        self._losses: list[Tensor] = []
        self._norms: list[Tensor] = []
        self._began = time.perf_counter()

    def add(self, result: StepResult) -> None:
        """One step's outcome."""
        self._losses.append(result.loss)
        self._norms.append(result.grad_norm)
        self._in_a_row = (self._in_a_row + 1) * result.skipped.float()

    def metrics(self, lr: float, seconds: float) -> dict[str, float]:
        """Means since the last call. Raises LmtrainError after too many skipped steps in a row."""
        training = self._training
        losses, norms = torch.stack(self._losses), torch.stack(self._norms)
        finite = torch.isfinite(norms)
        skipped = int((~finite).sum())
        if int(self._in_a_row) >= MAX_SKIPPED_IN_A_ROW:
            size = training.config.train.batch_size
            starts = training.order.starts((training.counters.step - 1) * size, min(size, NAMED_WINDOWS))
            raise LmtrainError(
                f"training diverged: {int(self._in_a_row)} steps in a row up to step {training.counters.step} were "
                "left out, their gradient being not finite (the last one's windows start at tokens "
                f"{', '.join(map(str, starts))}{' ..' if size > NAMED_WINDOWS else ''}); the last checkpoint is good: "
                "lower train.lr or raise train.warmup"
            )
        loss = float(losses[finite].mean()) if skipped < len(losses) else math.nan
        synchronize(training.device)
        per_second = len(losses) / (time.perf_counter() - self._began)
        metrics = {
            "loss": loss,
            "perplexity": math.exp(min(loss, 700.0)),
            "lr": lr,
            "grad_norm": float(norms[finite].mean()) if skipped < len(losses) else math.nan,
            "tokens_per_second": per_second * self._tokens_per_step,
            "peak_share": per_second * self._flops_per_step / self._peak,
            "memory_gb": memory_bytes(training.device) / 1e9,
            "epoch": training.counters.step * training.config.train.batch_size / training.order.per_epoch(),
            "minutes": seconds / 60,
            "skipped_steps": float(training.skipped),
        }
        self.restart()
        return metrics
