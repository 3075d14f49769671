"""`train --profile`: the time of a training step by part and by operator, and a trace.

The measurements would slow each other, so each has its own steps: whole steps, steps that synchronize with the device
after each part, and steps under torch's profiler.
"""

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

from torch.profiler import ProfilerActivity, profile, record_function

from lmtrain.config.schema import Config
from lmtrain.data.tokens import TokenStore
from lmtrain.storage.files import make_folders, write_errors
from lmtrain.system import disk
from lmtrain.system.device import synchronize
from lmtrain.system.machine import explain_out_of_memory, machine, peak_flops
from lmtrain.system.messages import log
from lmtrain.training.flops import step_flops
from lmtrain.training.loop import MEMORY_REMEDY, Measure, train_step
from lmtrain.training.train_state import TrainState, new_state

PARTS = ("data", "forward", "backward", "clip", "optimizer")
WARM_UP, STEPS = 5, 5
ROWS = 20
"""Of torch's table, in which the step and its parts take several."""


def profile_steps(config: Config, store: TokenStore, folder: Path) -> dict[str, Any]:
    """Take 5 steps to warm up and 3 times 5 measured ones, from the initial weights. Return the figures.

    Times are in seconds per step; the operators are torch's table of 5 steps as text. Writes `trace.json.gz`, in
    Chrome's format, into `folder`, and no checkpoint.
    Raises LmtrainError if the memory is exhausted or the folder can't be written.
    """
    make_folders(folder)
    trace = folder / "trace.json.gz"
    with explain_out_of_memory(MEMORY_REMEDY):
        state = new_state(config, store)
        log.info(f"profiling {WARM_UP + 3 * STEPS} steps")
        for _ in range(WARM_UP):
            _step(state)
        whole, parts = _timed(state)
        operators = _traced(state, trace)
    tokens = state.config.targets_per_step
    flops = step_flops(state.model, config, store)
    return {
        "trace": str(trace),
        "steps": STEPS,
        "tokens_per_step": tokens,
        "seconds": whole,
        "tokens_per_second": tokens / whole,
        "mfu": flops / whole / peak_flops(state.device, state.precision),
        "parts": parts,
        "operators": operators,
        "precision": state.precision,
        "compiled": state.compiled,
        "machine": machine(state.device),
    }


def profile_text(result: dict[str, Any]) -> str:
    """Return a table of the parts with their share of the step, and torch's table of the operators."""
    about = result["machine"]
    device = about["device"]
    if device == "cpu":
        device = f"{about['processor']}, {about['threads']} thread{'s' * (about['threads'] > 1)}"
    how = f"{result['precision']}{', compiled' if result['compiled'] else ''}, {device}"
    step = sum(result["parts"].values())
    lines = [
        f"{1e3 * result['seconds']:,.2f} ms a step of {result['tokens_per_step']:,} tokens, "
        f"{result['tokens_per_second']:,.0f} tokens/s, MFU {result['mfu']:.0%} ({how})",
        "",
        f"{'part of the step':40} {'ms':>10} {'share':>7}",
        *(f"{name:40} {1e3 * seconds:10.2f} {seconds / step:7.1%}" for name, seconds in result["parts"].items()),
        "",
        f"{result['steps']} steps:",
        result["operators"].rstrip(),
    ]
    return "\n".join(lines)


def _step(state: TrainState, measure: Measure = nullcontext) -> float:
    """Take a step at the peak learning rate, and return its seconds."""
    start = time.perf_counter()
    train_step(state, state.config.train.lr, measure)
    synchronize(state.device)
    return time.perf_counter() - start


def _timed(state: TrainState) -> tuple[float, dict[str, float]]:
    """Return the mean seconds of a step, and those of its parts and the rest of it.

    Whole steps and steps by parts alternate, so that other load on the machine affects both alike.
    """
    seconds = dict.fromkeys(PARTS, 0.0)

    @contextmanager
    def timed(name: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        synchronize(state.device)
        seconds[name] += (time.perf_counter() - start) / STEPS

    whole = by_parts = 0.0
    for _ in range(STEPS):
        whole += _step(state) / STEPS
        by_parts += _step(state, timed) / STEPS
    return whole, seconds | {"rest": by_parts - sum(seconds.values())}


def _traced(state: TrainState, path: Path) -> str:
    """Write the trace of `STEPS` steps to `path`. Return torch's table of the most expensive operators and kernels."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # else the profiler's library writes to stderr
    cuda = state.device.type == "cuda"
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if cuda else [])]
    with profile(activities=activities, acc_events=True) as profiler:
        for _ in range(STEPS):
            with record_function("lmtrain step"):
                _step(state, lambda name: record_function(f"lmtrain {name}"))
    with write_errors(path):
        disk.remove(path)  # which may be a link to a file elsewhere
        profiler.export_chrome_trace(str(path))
    averages, order = profiler.key_averages(), "self_device_time_total" if cuda else "self_cpu_time_total"
    table: str = averages.table(sort_by=order, row_limit=ROWS, max_name_column_width=40)
    return table
