"""Where the time of a training step goes: by part of the step, by operator, and as a trace to look at.

Each is measured in steps of its own, so that no measurement weighs on another: whole steps, steps that wait for the
device at the end of each part, and steps under torch's profiler.
"""

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch.autograd import DeviceType  # type: ignore[attr-defined]
from torch.profiler import ProfilerActivity, profile, record_function

from lmtrain.config.schema import Config
from lmtrain.data.tokens import TokenStore
from lmtrain.model.objective import Objective
from lmtrain.storage.files import make_folders, write_file, writing
from lmtrain.system import disk
from lmtrain.system.runtime import enough_memory, machine, peak_flops, set_threads, synchronize
from lmtrain.training.costs import step_flops
from lmtrain.training.loop import MEMORY_REMEDY, train_step
from lmtrain.training.optim import learning_rate
from lmtrain.training.state import Part, Training, prepare

Note = Callable[[str], None]

PARTS = ("data", "forward", "backward", "clip", "optimizer")
WARM_UP, STEPS = 5, 5
OPERATORS = 10
MIDDLE = 0.5
"""The share of the run at which its steps are looked at, where it changes with progress what a step does."""
REST = "rest"
STEP = "lmtrain step"
PREFIX = "lmtrain "
"""Of the names that the trace has for parts of a step."""


def profile_steps(config: Config, store: TokenStore, folder: Path, note: Note) -> dict[str, Any]:
    """Take the configuration's own steps from its initial weights, 5 to warm up and 3 times 5 that are measured.

    Writes `trace.json.gz`, in Chrome's format, and `profile.txt` into `folder`, and no checkpoint. Times are in
    seconds per step. Raises LmtrainError where memory ends or the folder can't be written.
    """
    make_folders(folder)
    trace, text = folder / "trace.json.gz", folder / "profile.txt"
    with enough_memory(MEMORY_REMEDY):
        set_threads(config.train.threads)
        training = prepare(config, store, note)
        note(f"profiling {WARM_UP + 3 * STEPS} steps")
        for _ in range(WARM_UP):
            _step(training)
        whole, parts = _timed(training)
        operators = _traced(training, trace)
    tokens = config.train.batch_size * training.targets_per_sample
    flops = step_flops(training.model, config)
    result = {
        "trace": str(trace),
        "steps": STEPS,
        "tokens_per_step": tokens,
        "seconds": whole,
        "tokens_per_second": tokens / whole,
        "peak_share": flops / whole / peak_flops(training.device, training.precision),
        "parts": parts,
        "operators": operators,
        "operators_on": "CPU" if training.device.type == "cpu" else "device",
        "precision": training.precision,
        "compiled": not isinstance(training.forward, Objective),
        "machine": machine(training.device),
    }
    write_file(text, profile_text(result) + "\n")
    return result


def profile_text(result: dict[str, Any]) -> str:
    """The figures as tables: parts with their share of the step, operators with their share of all operators."""
    about = result["machine"]
    place = (
        about["device"]
        if about["device"] != "cpu"
        else f"{about['processor']}, {about['threads']} thread{'s' * (about['threads'] > 1)}"
    )
    how = f"{result['precision']}{', compiled' if result['compiled'] else ''}, {place}"
    step = sum(result["parts"].values())
    lines = [
        f"{1e3 * result['seconds']:,.2f} ms a step of {result['tokens_per_step']:,} tokens, "
        f"{result['tokens_per_second']:,.0f} tokens/s, {result['peak_share']:.0%} of the matrix peak ({how})",
        "",
        f"{'part of the step':40} {'ms':>10} {'share':>7}",
        *(f"{name:40} {1e3 * seconds:10.2f} {seconds / step:7.1%}" for name, seconds in result["parts"].items()),
        "",
        f"{'operator (' + result['operators_on'] + ' time, self)':40} {'ms':>10} {'share':>7} {'calls':>8}",
        *(
            f"{row['name'][:40]:40} {1e3 * row['seconds']:10.2f} {row['share']:7.1%} {row['calls']:8,.1f}"
            for row in result["operators"]
        ),
    ]
    return "\n".join(lines)


def _step(training: Training) -> None:
    config = training.config.train
    train_step(training, learning_rate(config, MIDDLE))


def _seconds(training: Training) -> float:
    synchronize(training.device)
    begun = time.perf_counter()
    _step(training)
    synchronize(training.device)
    return time.perf_counter() - begun


@contextmanager
def _watched(training: Training, part: Part) -> Iterator[None]:
    former, training.part = training.part, part
    try:
        yield
    finally:
        training.part = former


def _timed(training: Training) -> tuple[float, dict[str, float]]:
    """Mean seconds of a step, and of its parts; the rest is what it does beside them.

    Whole steps and steps by parts take turns, so that what else runs on the machine weighs on both alike.
    """
    spent = dict.fromkeys(PARTS, 0.0)

    @contextmanager
    def timed(name: str) -> Iterator[None]:
        begun = time.perf_counter()
        yield
        synchronize(training.device)
        spent[name] += (time.perf_counter() - begun) / STEPS

    whole = by_parts = 0.0
    for _ in range(STEPS):
        whole += _seconds(training) / STEPS
        with _watched(training, timed):
            by_parts += _seconds(training) / STEPS
    return whole, spent | {REST: by_parts - sum(spent.values())}


def _traced(training: Training, path: Path) -> list[dict[str, Any]]:
    """Write the trace; the operators that cost most, with seconds and calls per step."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # else the library below the profiler writes on stderr
    cuda = training.device.type == "cuda"
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if cuda else [])]
    with (
        profile(activities=activities, acc_events=True) as profiler,
        _watched(training, lambda name: record_function(PREFIX + name)),
    ):
        for _ in range(STEPS):
            with record_function(STEP):
                _step(training)
        synchronize(training.device)
    with writing(path):
        disk.remove(path)  # which may be a link to a file elsewhere
        profiler.export_chrome_trace(str(path))
    rows = [
        (float(event.self_device_time_total if cuda else event.self_cpu_time_total) / 1e6, event)
        for event in profiler.key_averages()
        # A kernel's time on the device is that of the operator that started it, and is not counted twice.
        if not event.key.startswith(PREFIX) and event.device_type == DeviceType.CPU
    ]
    total = sum(seconds for seconds, _ in rows)
    costliest = sorted(rows, key=lambda row: -row[0])[:OPERATORS]
    return [
        {"name": event.key, "seconds": seconds / STEPS, "share": seconds / total, "calls": event.count / STEPS}
        for seconds, event in costliest
    ]
