"""The clock of a run, and means over the steps between two logged ones."""

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from lmtrain.errors import LmtrainError
from lmtrain.system.device import synchronize
from lmtrain.system.machine import peak_flops
from lmtrain.system.memory import memory_bytes
from lmtrain.system.process_group import ProcessGroup
from lmtrain.training.budget import targets_per_step
from lmtrain.training.costs import step_flops
from lmtrain.training.train_state import TrainState

MAX_SKIPPED_IN_A_ROW = 20


class Clock:
    """The seconds that a run has taken, by the main process's clock, including evaluations and earlier parts of it."""

    def __init__(self, seconds: float, processes: ProcessGroup) -> None:
        self._before, self._processes = seconds, processes
        self._now = self._started = processes.broadcast(time.monotonic())

    def update(self) -> None:
        """Read the time. All processes call this, so that all have the same time until the next call."""
        self._now = self._processes.broadcast(time.monotonic())

    def seconds(self) -> float:
        """Return the seconds until the last `update`."""
        return self._before + self._now - self._started


class Meter:
    """Means and rates over the steps since the last logged one.

    The sums are part of the state, so the means include steps before a resume; rates cover only the time since then. On
    a GPU only logged steps, and every 20th, wait for the device.
    """

    def __init__(self, state: TrainState) -> None:
        self._state = state
        self._peak = peak_flops(state.device, state.precision) * state.parallel.processes.world_size
        if state.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(state.device)  # raised by measuring `peak_flops`
        self._steps, self._started = 0, time.perf_counter()

    def count_step(self) -> None:
        """Count a step. Raises LmtrainError after MAX_SKIPPED_IN_A_ROW skipped steps, on a GPU up to 20 steps late."""
        self._steps += 1
        if self._state.device.type == "cpu" or self._state.counters.step % MAX_SKIPPED_IN_A_ROW == 0:
            self._check_divergence()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Leave the time that is spent in the block out of the rates."""
        synchronize(self._state.device)
        started = time.perf_counter()
        yield
        self._started += time.perf_counter() - started

    def metrics(self, lr: float, seconds: float) -> dict[str, float]:
        """Return the metrics of the steps since the last call, also if the run was resumed in between.

        The first call counts the operations of a step, in about a second. Raises LmtrainError as `count_step` does.
        """
        self._check_divergence()
        state = self._state
        losses, norms, steps = state.statistics.sums.tolist()
        state.statistics.sums.zero_()
        loss = losses / steps if steps else math.nan
        synchronize(state.device)
        steps_per_second = self._steps / (time.perf_counter() - self._started)
        flops = step_flops(state.model, state.config)
        self._steps, self._started = 0, time.perf_counter()
        return {
            "loss": loss,
            "perplexity": math.exp(min(loss, 700.0)),
            "lr": lr,
            "grad_norm": norms / steps if steps else math.nan,
            "tokens_per_second": steps_per_second * targets_per_step(state.config),
            "mfu": steps_per_second * flops / self._peak,
            "memory_gb": memory_bytes(state.device) / 1e9,
            "epoch": state.counters.step * state.config.train.batch_size / state.order.per_epoch(),
            "minutes": seconds / 60,
            "skipped_steps": float(state.statistics.skipped),
        }

    def _check_divergence(self) -> None:
        state = self._state
        in_a_row = int(state.statistics.in_a_row)
        if in_a_row >= MAX_SKIPPED_IN_A_ROW:
            raise LmtrainError(
                f"training diverged: {in_a_row} steps in a row up to step {state.counters.step} were skipped, "
                "because their gradients were not finite: lower train.lr or raise train.warmup"
            )
