"""The clock of a run, and means over the steps between two logged ones."""

import math
import time

import torch

from lmtrain.errors import LmtrainError
from lmtrain.system.machine import peak_flops, peak_memory_bytes
from lmtrain.system.process_group import ProcessGroup
from lmtrain.training.flops import step_flops
from lmtrain.training.train_state import TrainState

MAX_SKIPPED_IN_A_ROW = 20


class Clock:
    """The seconds that a run has taken, on the main process's clock, with evaluations and the time before a resume."""

    def __init__(self, seconds: float, processes: ProcessGroup) -> None:
        self.seconds = seconds
        """The same in all processes, and until the next `update`."""
        self._processes = processes
        self._zero = processes.all_gather(time.monotonic())[0] - seconds

    def update(self) -> float:
        """Read the time. Return `seconds`. All processes call this."""
        self.seconds = self._processes.all_gather(time.monotonic())[0] - self._zero
        return self.seconds


class Meter:
    """Means and rates over the steps since the last logged one.

    The sums are part of the state, so the means include steps before a resume; rates cover only the time since then.
    """

    def __init__(self, state: TrainState, clock: Clock) -> None:
        self._state, self._clock = state, clock
        self._flops = step_flops(state.model, state.config, state.store)
        self._peak = peak_flops(state.device, state.precision) * state.processes.world_size
        if state.device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(state.device)  # raised by measuring `peak_flops`
        self._step, self._start = state.step, clock.update()

    def leave_out(self, seconds: float) -> None:
        """Leave the time that an evaluation has taken out of the rates."""
        self._start += seconds

    def metrics(self, lr: float) -> dict[str, float]:
        """Return the metrics of the steps since the last call, also if the run was resumed in between."""
        state, step, seconds = self._state, self._state.step, self._clock.seconds
        sums = state.statistics.sums
        loss, norm = (sums[:2] / sums[2]).tolist()  # NaN if all steps were skipped
        sums.zero_()
        steps_per_second = (step - self._step) / (seconds - self._start)
        self._step, self._start = step, seconds
        return {
            "loss": loss,
            **({} if state.config.train.teacher else {"perplexity": math.exp(min(loss, 700.0))}),
            "lr": lr,
            "grad_norm": norm,
            "tokens_per_second": steps_per_second * state.config.targets_per_step,
            "mfu": steps_per_second * self._flops / self._peak,
            "memory_gb": peak_memory_bytes(state.device) / 1e9,
            "epoch": step * state.config.train.batch_size / state.order.per_epoch(),
            "minutes": seconds / 60,
            "skipped_steps": float(state.statistics.skipped),
        }


def check_divergence(state: TrainState) -> None:
    """Raise LmtrainError after MAX_SKIPPED_IN_A_ROW skipped steps.

    Reading their number waits for the device, so on a GPU this is checked up to 20 steps late.
    """
    if state.device.type == "cuda" and state.step % MAX_SKIPPED_IN_A_ROW:
        return
    in_a_row = int(state.statistics.in_a_row)
    if in_a_row >= MAX_SKIPPED_IN_A_ROW:
        raise LmtrainError(
            f"training diverged: {in_a_row} steps in a row up to step {state.step} were skipped, "
            "because their gradients were not finite: lower train.lr or raise train.warmup"
        )
