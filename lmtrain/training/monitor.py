"""Reports of a run in training: metrics.jsonl, TensorBoard, and a progress bar or plain lines on stderr.

A resumed run truncates metrics.jsonl to its length at the checkpoint and lets TensorBoard drop later points, so that
every curve is continuous, without gaps or duplicates.
"""

import json
import math
import os
import re
import time
from pathlib import Path
from typing import Any, BinaryIO, Literal, NoReturn

import numpy as np
from tqdm import tqdm

from lmtrain.evaluation.perplexity import readable
from lmtrain.storage.files import write_errors
from lmtrain.storage.run_folder import METRICS, Status, write_state
from lmtrain.system import disk
from lmtrain.system.messages import escaped, log, shows_bars

CHARTS = {
    ("train", "loss"): "loss/train",
    ("valid", "loss"): "loss/valid",
    ("train", "lr"): "optimizer/learning_rate",
    ("train", "grad_norm"): "optimizer/gradient_norm",
    ("valid", "word_perplexity"): "perplexity/valid",
    ("valid", "bits_per_byte"): "quality/bits_per_byte",
    ("train", "tokens_per_second"): "speed/tokens_per_second",
    ("train", "mfu"): "speed/mfu",
    ("train", "memory_gb"): "speed/memory_gb",
}
"""The metrics with a chart, and their tags. TensorBoard sorts groups by name, so the page opens on the losses."""

_SHOWN = {"loss": ("loss {}", 3), "perplexity": ("ppl {}", 1), "tokens_per_second": ("{} tok/s", 0)}
"""Formats and decimals of the metrics of training steps that are displayed."""


class Monitor:
    """A monitor that does nothing, for every process except the main one, which has a `RunMonitor`."""

    def advance(self, step: int, progress: float) -> None:
        """Show that `step` is done, and the fraction `progress` of the budget, which may be in steps or in time."""

    def record(self, step: int, kind: Literal["train", "valid", "final"], metrics: dict[str, float]) -> None:
        """Log the metrics of training steps, of an evaluation or of the best checkpoint at the end of a run.

        Of training steps, `loss` (nats per token), `perplexity` and `tokens_per_second` are displayed too.
        """

    def text(self, step: int, title: str, markdown: str) -> None:
        """Show a text in TensorBoard."""

    def write_status(self, status: Status, **details: object) -> None:
        """Write the run's status to `state.json`."""

    def flush(self) -> int:
        """Flush all files to the disk. Return the length of metrics.jsonl, which the checkpoint must store."""
        return 0

    def close(self) -> None:
        """Close the files."""


class RunMonitor(Monitor):
    """Reports to the files in `run_dir` and to stderr.

    Every metric goes to metrics.jsonl, one JSON object per line with `step` and `kind` (train, valid, final); numbers
    that are not finite become null. On a terminal stderr shows a progress bar; otherwise it gets a line of metrics at
    most every ten seconds.

    `step` is the step that the run resumes from (0: a new run), `progress` the fraction of the budget that was spent by
    then, `total_steps` the budget if it is in steps only, `metrics_bytes` the result of `flush` at the checkpoint.
    The metrics of a step must be logged before the checkpoint of that step is written.
    Raises LmtrainError if metrics.jsonl or the event files can't be written.
    """

    def __init__(
        self, run_dir: Path, *, step: int, progress: float, total_steps: int | None, metrics_bytes: int
    ) -> None:
        from torch.utils import tensorboard  # takes seconds to import, so only training does it

        untyped: Any = tensorboard
        self._run_dir, self._path = run_dir, run_dir / METRICS
        self._file = _open_metrics(self._path, metrics_bytes)
        with write_errors(run_dir):
            self._events = untyped.SummaryWriter(run_dir, purge_step=step + 1, flush_secs=30)
        self._total_steps = total_steps
        self._step, self._progress = step, progress
        self._first: tuple[float, float] | None = None
        self._last_line = -math.inf
        self._bar: tqdm[NoReturn] = tqdm(
            total=1.0,
            initial=progress,
            bar_format="{desc}{percentage:3.0f}%|{bar}| {elapsed}<{remaining}{postfix}",
            dynamic_ncols=True,
            mininterval=0.2,
            miniters=0,
            smoothing=0.0,
            desc=f"{self._position()}: ",
            disable=not shows_bars(),
        )

    def advance(self, step: int, progress: float) -> None:
        self._step, self._progress = step, progress
        if self._first is None:  # the first step takes longer than others
            self._first = time.monotonic(), self._progress
        self._bar.set_description_str(f"{self._position()}: ", refresh=False)
        self._bar.update(self._progress - self._bar.n)

    def record(self, step: int, kind: Literal["train", "valid", "final"], metrics: dict[str, float]) -> None:
        finite = {name: value if math.isfinite(value) else None for name, value in metrics.items()}
        line = json.dumps({"step": step, "kind": kind, **finite}, allow_nan=False)
        with write_errors(self._path):
            self._file.write(line.encode() + b"\n")
            self._file.flush()
        with write_errors(self._run_dir):
            for name, value in metrics.items():
                if (kind, name) in CHARTS:
                    self._events.add_scalar(CHARTS[kind, name], value, step)
        if kind == "train":
            self._display(metrics)

    def text(self, step: int, title: str, markdown: str) -> None:
        with write_errors(self._run_dir):
            self._events.add_text(title, markdown, step)

    def write_status(self, status: Status, **details: object) -> None:
        write_state(self._run_dir, status, **details)

    def flush(self) -> int:
        with write_errors(self._path):
            self._file.flush()
            os.fsync(self._file.fileno())
        with write_errors(self._run_dir):
            self._events.flush()
        return self._file.tell()

    def close(self) -> None:
        self._bar.close()
        self.flush()
        self._file.close()
        with write_errors(self._run_dir):
            self._events.close()

    def _display(self, metrics: dict[str, float]) -> None:
        shown = [
            form.format(readable(metrics[name], decimals))
            for name, (form, decimals) in _SHOWN.items()
            if name in metrics
        ]
        if not self._bar.disable:
            self._bar.set_postfix_str(", ".join(shown), refresh=False)
        elif time.monotonic() - self._last_line >= 10.0:
            self._last_line = time.monotonic()
            log.info("  ".join([f"{self._position()} ({self._progress:.0%})", *shown, *self._time_left()]))

    def _position(self) -> str:
        return f"step {self._step:,}" + (f"/{self._total_steps:,}" if self._total_steps is not None else "")

    def _time_left(self) -> list[str]:
        """Return the estimated time to the end of the budget, or nothing if no step has been timed yet."""
        started, before = self._first or (0.0, self._progress)
        done = self._progress - before
        if done <= 0.0:
            return []
        return [f"ETA {tqdm.format_interval((time.monotonic() - started) * (1.0 - self._progress) / done)}"]


def escape_markdown(text: str) -> str:
    """Return Markdown that renders as `text`: punctuation becomes character references, not markup or HTML."""
    lines = (re.sub(r"[^\w ]|_", lambda match: f"&#{ord(match[0])};", line.strip()) for line in text.splitlines())
    return "  \n".join(lines)


def table(tokens: list[str], weights: np.ndarray) -> str:
    """Return a Markdown table of the `weights` (H, T) of T `tokens` in H heads; each row is a distribution."""
    rows = [["", *(escape_markdown(escaped(token)) for token in tokens)], ["---"] * (len(tokens) + 1)]
    rows += [[f"head {head}", *(f"{weight:.1%}" for weight in row)] for head, row in enumerate(weights, 1)]
    return "\n".join(f"|{'|'.join(row)}|" for row in rows)


def _open_metrics(path: Path, length: int) -> BinaryIO:
    """Open `path` for writing after its first `length` bytes, or after its last complete line if it is shorter."""
    with write_errors(path):
        file = disk.open_in_place(path)
        start = file.read(length)
        file.truncate(start.rfind(b"\n") + 1)
        file.seek(0, os.SEEK_END)
    return file
