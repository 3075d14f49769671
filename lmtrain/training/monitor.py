"""What is watched while training: metrics.jsonl, TensorBoard, and one bar or plain lines on stderr.

The three agree after an interruption too: a resumed run cuts metrics.jsonl back to where its checkpoint was written and
tells TensorBoard to drop the later points, so that every curve is one curve, without gaps and without doubles.
"""

import json
import math
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, TextIO

import numpy as np
from tqdm import tqdm

from lmtrain.generation.picture import heatmap
from lmtrain.storage.checkpoint import write_state
from lmtrain.storage.files import write_error
from lmtrain.system import disk
from lmtrain.system.escapes import escaped

METRICS_FILE = "metrics.jsonl"
TENSORBOARD_FOLDER = "tensorboard"

_PLAIN_LINE_SECONDS = 10.0
_BAR_FORMAT = "{desc}{percentage:3.0f}%|{bar}| {elapsed}<{remaining}{postfix}"


class Monitor:
    """Writes what it is told to `run_dir`, and keeps the person at the terminal informed.

    Every metric goes to metrics.jsonl, one JSON object per line with `step` and `kind` (train, valid, final); numbers
    that are not finite become null there. On a terminal there is a progress bar on stderr; elsewhere a plain line takes
    its place, at most one in ten seconds. `quiet` drops both; evaluations and notes are always written.

    `step` is the step that the run resumes from (0: a new one), `progress` the share of its budget that was done by
    then, `total_steps` the budget in steps where it is one, `metrics_bytes` the value of `metrics_bytes()` at the
    checkpoint. What is logged at a step must be logged before the checkpoint of that step is written. `clock` tells
    seconds.
    Raises LmtrainError where metrics.jsonl can't be written.
    """

    def __init__(
        self,
        run_dir: Path,
        *,
        step: int,
        progress: float,
        total_steps: int | None,
        metrics_bytes: int,
        hyperparameters: dict[str, Any],
        quiet: bool,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._path = run_dir / METRICS_FILE
        self._file = _open_metrics(self._path, metrics_bytes)
        try:
            with self._writing():
                self._writer, self._session_end = _open_tensorboard(run_dir / TENSORBOARD_FOLDER, step, hyperparameters)
        except BaseException:
            self._file.close()
            raise
        self._total_steps, self._quiet, self._clock = total_steps, quiet, clock
        self._step, self._progress = step, progress
        self._started, self._first_progress, self._last_line = clock(), progress, -math.inf
        self._stderr = sys.stderr
        self._bar: tqdm[Any] | None = None
        if not quiet and _has_columns(self._stderr):
            self._bar = tqdm(
                file=self._stderr,
                total=1.0,
                initial=progress,
                bar_format=_BAR_FORMAT,
                dynamic_ncols=True,
                mininterval=0.2,
                miniters=0,
                smoothing=0.0,
                desc=f"{self._position()}: ",
            )

    def advance(self, step: int, progress: float) -> None:
        """`step` is done, and with it the share `progress` (0 to 1) of the budget, be that steps or time."""
        self._step, self._progress = step, min(progress, 1.0)
        if self._bar is not None:
            self._bar.set_description_str(f"{self._position()}: ", refresh=False)
            self._bar.update(self._progress - self._bar.n)

    def train(self, step: int, metrics: dict[str, float]) -> None:
        """Log a point of training; `loss` (nats a token), `perplexity` and `tokens_per_second` are shown as it runs."""
        self._record(step, "train", metrics)
        shown = [
            form.format(metrics[name])
            for name, form in (
                ("loss", "loss {:.3f}"),
                ("perplexity", "ppl {:,.1f}"),
                ("tokens_per_second", "{:,.0f} tok/s"),
            )
            if name in metrics
        ]
        if self._bar is not None:
            self._bar.set_postfix_str(", ".join(shown), refresh=False)
        elif not self._quiet and self._clock() - self._last_line >= _PLAIN_LINE_SECONDS:
            self._last_line = self._clock()
            self.note("  ".join([f"{self._position()} ({self._progress:.0%})", *shown, f"ETA {self._time_left()}"]))

    def evaluation(self, step: int, metrics: dict[str, float], remark: str = "") -> None:
        """Log an evaluation, and write it to stderr as a line that ends in `remark`."""
        self._record(step, "valid", metrics)
        shown = [f"{name.replace('_', ' ')} {_readable(value)}" for name, value in metrics.items()]
        self.note("  ".join([f"step {step:,} valid:", *shown]) + remark)

    def text(self, step: int, title: str, text: str) -> None:
        """Show `text` in TensorBoard as it stands, whatever it contains."""
        with self._writing():
            self._writer.add_text(title, _escape(text), step)

    def weights(self, step: int, title: str, words: list[str], weights: np.ndarray) -> None:
        """Show in TensorBoard how H heads weigh T `words`; `weights` (H, T), each row a distribution."""
        with self._writing():
            self._writer.add_image(title, heatmap(words, weights), step, dataformats="HWC")

    def note(self, message: str) -> None:
        """Write a line to stderr, above the bar where there is one."""
        tqdm.write(escaped(message), file=self._stderr)
        self._stderr.flush()

    def state(self, status: str, **details: Any) -> None:
        """Say in `state.json` how the run stands; see `checkpoint.write_state`."""
        write_state(self._path.parent, status, **details)

    def metrics_bytes(self) -> int:
        """The length of metrics.jsonl, all of it on disk: what a checkpoint must remember."""
        try:
            self._file.flush()
            os.fsync(self._file.fileno())
        except OSError as error:
            raise write_error(self._path, error) from error
        return self._file.tell()

    def flush(self) -> None:
        """Bring everything to the files, for those who read along."""
        self.metrics_bytes()
        with self._writing():
            self._writer.flush()

    def close(self, final: dict[str, float] | None) -> None:
        """End the watch. `final`: the metrics of a run that is complete, None for one that was interrupted."""
        if self._bar is not None:
            self._bar.close()
        if final is not None:
            self._record(self._step, "final", final)
            with self._writing():
                self._writer.file_writer.add_summary(self._session_end, self._step)
        self.metrics_bytes()
        self._file.close()
        with self._writing():
            self._writer.close()

    def _record(self, step: int, kind: str, metrics: dict[str, float]) -> None:
        finite = {name: value if math.isfinite(value) else None for name, value in metrics.items()}
        line = json.dumps({"step": step, "kind": kind, **finite}, allow_nan=False)
        try:
            self._file.write(line.encode() + b"\n")
            self._file.flush()
        except OSError as error:
            raise write_error(self._path, error) from error
        # A run resumed from its last step purges what TensorBoard has after it: the final figures must be among that.
        shown = step + 1 if kind == "final" else step
        with self._writing():
            for name, value in metrics.items():
                self._writer.add_scalar(f"{kind}/{name}", value, shown)

    @contextmanager
    def _writing(self) -> Iterator[None]:
        """Say which file TensorBoard could not write: its own error, from another thread, does not."""
        try:
            yield
        except OSError as error:
            raise write_error(self._path.with_name(TENSORBOARD_FOLDER), error) from error

    def _position(self) -> str:
        return f"step {self._step:,}" + (f"/{self._total_steps:,}" if self._total_steps is not None else "")

    def _time_left(self) -> str:
        done = self._progress - self._first_progress
        if done <= 0.0:
            return "?"
        return tqdm.format_interval((self._clock() - self._started) * (1.0 - self._progress) / done)


class Silent(Monitor):
    """The monitor of a process that does not lead: it takes the same calls, and writes and says nothing."""

    def __init__(self, *_: Any, **__: Any) -> None:
        """Open nothing."""

    def _ignore(self, *_: Any, **__: Any) -> None:
        """Nothing."""

    advance = train = evaluation = text = weights = note = state = flush = close = _ignore

    def metrics_bytes(self) -> int:
        """Nothing was written."""
        return 0


def _open_metrics(path: Path, length: int) -> BinaryIO:
    """Open `path` to write after its first `length` bytes, or after its last whole line where it is shorter."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = disk.open_in_place(path)
        kept = file.read(length)
        file.truncate(kept.rfind(b"\n") + 1)
        file.seek(0, os.SEEK_END)
    except OSError as error:
        raise write_error(path, error) from error
    return file


def _open_tensorboard(folder: Path, step: int, hyperparameters: dict[str, Any]) -> tuple[Any, Any]:
    """A SummaryWriter for a run that goes on from `step`, and the summary that marks the run as complete.

    The hyper-parameters are written to the run itself, where `SummaryWriter.add_hparams` would make a second run. The
    description of the experiment is left out: without it TensorBoard's table takes its columns from all runs together,
    and every scalar as a metric.
    """
    # The import takes seconds: only who trains waits for it.
    from torch.utils import tensorboard

    untyped: Any = tensorboard
    # From this step on, TensorBoard forgets what earlier parts of the run wrote; a new run starts from nothing.
    writer = untyped.SummaryWriter(folder, purge_step=step + 1 if step else 0, flush_secs=30)
    plain = {name: _plain(value) for name, value in hyperparameters.items()}
    _, session_start, session_end = untyped.summary.hparams(plain, {})
    writer.file_writer.add_summary(session_start, step)
    return writer, session_end


def _has_columns(stream: TextIO) -> bool:
    """Whether `stream` is a terminal that tells its width; on one that does not, a bar would be empty."""
    return stream.isatty() and os.get_terminal_size(stream.fileno()).columns > 0


def _plain(value: Any) -> Any:
    """A value in a form that TensorBoard's table takes."""
    return value if isinstance(value, str | int | float) else str(value)


def _readable(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def _escape(text: str) -> str:
    """Markdown that shows as `text`: signs as character references, so that none can mean markup or HTML."""
    lines = ("".join(_reference(sign) for sign in line.strip()) for line in text.splitlines())
    return "  \n".join(lines)


def _reference(sign: str) -> str:
    return sign if sign.isalnum() or sign == " " or not sign.isascii() else f"&#{ord(sign)};"
