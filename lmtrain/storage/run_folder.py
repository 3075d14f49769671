"""The run folder: its layout, configuration, state and lock."""

import fcntl
import json
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

from lmtrain.config.loader import dump as dump_config
from lmtrain.config.loader import load as load_config
from lmtrain.config.schema import Config
from lmtrain.errors import LmtrainError, UsageError
from lmtrain.storage.files import TEMPORARY_NAME, make_folders, read_errors, recover, write_errors, write_file
from lmtrain.system import disk

CONFIG, TOKENIZER, STATE, METRICS = "config.yaml", "tokenizer.json", "state.json", "metrics.jsonl"
Status = Literal["running", "finished", "stopped early", "interrupted", "failed"]
CHECKPOINTS = "checkpoints"
STEP_PREFIX = "step-"
LOCK = ".lock"
_SHOWN = 10
"""Runs that a message lists, at most."""
_NOT_NAME = re.compile(r"[^\w.-]+")
_BEFORE_CONFIG = {LOCK, CHECKPOINTS, "profile"}
"""What a run folder may contain before its configuration is written."""


def is_run(folder: Path) -> bool:
    """Whether the folder is that of a run: it has a configuration."""
    return os.path.isfile(folder / CONFIG)  # noqa: PTH113 -- Path.is_file raises OSError for a name that is too long


def has_checkpoint(folder: Path) -> bool:
    """Whether the folder is that of a run with a checkpoint, damaged or not."""
    return is_run(folder) and any(folder.glob(f"{CHECKPOINTS}/{STEP_PREFIX}*"))


def step_folder(run_dir: Path, step: int) -> Path:
    """Return the folder of the checkpoint of `step`, which need not exist."""
    return run_dir / CHECKPOINTS / f"{STEP_PREFIX}{step:08d}"


def step_of(folder: Path) -> int:
    """Return the step of a checkpoint by the name of its folder."""
    return int(folder.name.removeprefix(STEP_PREFIX))


def create_run(run_dir: Path, config: Config) -> None:
    """Make a run folder with this configuration, or write it again into an existing one."""
    make_folders(run_dir / CHECKPOINTS)
    write_file(run_dir / CONFIG, dump_config(config))


def run_config(run_dir: Path) -> Config:
    """Return the configuration that is stored with a run, regardless of the environment."""
    try:
        return load_config(run_dir / CONFIG, environment={}, stored=True)
    except UsageError as error:  # the run is damaged; the command is right
        raise LmtrainError(str(error)) from None


def default_name(path: Path) -> str:
    """Return the name of a run that has no `run.name`: it is named after `path`, its configuration file or its text."""
    of_run = path.name == CONFIG and path.parent.name
    name = _NOT_NAME.sub("_", path.parent.name if of_run else path.stem).lstrip(".-")
    if not name:
        raise UsageError(f"a run can't be named after {path}: set run.name")
    return name


def find_run(path: Path | None, runs_dir: Path) -> Path:
    """Return the folder of the run at `path`, or of the run of this name in `runs_dir`.

    If `path` is None, return the latest run in `runs_dir` that has a checkpoint.
    Raises LmtrainError, which lists the existing runs, if there is no such run.
    """
    places = [] if path is None else [path, runs_dir / path]
    for folder in places:
        if is_run(folder):
            return folder if folder.name not in ("", "..") else folder.resolve()  # `.` says no name
    with read_errors(runs_dir):
        folders = [*runs_dir.iterdir()] if runs_dir.is_dir() else []
    runs = set(filter(has_checkpoint, folders))
    if path is not None:
        names = sorted(run.name for run in runs)
        more = f", ... ({len(names)} runs)" if len(names) > _SHOWN else ""
        others = f"; the runs in {runs_dir}: {', '.join(names[:_SHOWN])}{more}" if runs else ""
        if any(map(os.path.isdir, places)):
            raise LmtrainError(f"{path} is not a run folder: it has no {CONFIG}{others}")
        raise LmtrainError(f"there is no run {path}{others or ': train one with `lmtrain train`'}")
    if not runs:
        raise LmtrainError(f"no trained run in {runs_dir}: train one with `lmtrain train`, or name one with --run")
    return max(runs, key=lambda run: (run / STATE).stat().st_mtime if (run / STATE).exists() else 0.0)


def write_state(run_dir: Path, status: Status, **details: object) -> None:
    """Write `state.json`."""
    write_file(run_dir / STATE, json.dumps({"status": status, **details}, indent=2) + "\n")


@contextmanager
def lock(run_dir: Path) -> Iterator[None]:
    """Keep other processes out of a run, and clean up what a killed one left in it.

    The system releases the lock however the process ends. Raises LmtrainError if another process has the lock, or if
    the folder contains files that do not belong to a run.
    """
    make_folders(run_dir)
    _reject_foreign(run_dir)
    with write_errors(run_dir / LOCK):
        file = disk.open_in_place(run_dir / LOCK)
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise LmtrainError(f"{run_dir} is in use by another process: wait for it or set run.name") from None
        except OSError as error:
            raise LmtrainError(
                f"{run_dir} can't be locked against other processes ({error.strerror}): set run.dir to a folder on "
                "another file system"
            ) from error
        recover(run_dir)
        recover(run_dir / CHECKPOINTS)
        yield


def _reject_foreign(run_dir: Path) -> None:
    """Raise LmtrainError if the folder contains files that do not belong to a run, since a run could overwrite them."""
    with read_errors(run_dir):
        names = {path.name for path in run_dir.iterdir() if not TEMPORARY_NAME.fullmatch(path.name)}
    try:
        if CONFIG in names:
            run_config(run_dir)
        elif foreign := names - _BEFORE_CONFIG:
            raise LmtrainError(f"it contains {min(foreign)} but no {CONFIG}")
    except LmtrainError as error:
        raise LmtrainError(f"{run_dir} is not a run folder: {error}; choose another run.name or run.dir") from error
