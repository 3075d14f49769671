"""The run folder around its checkpoints: its configuration, its tokenizer, its state, and its lock."""

import fcntl
import json
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from lmtrain.config.loader import dump as dump_config
from lmtrain.config.loader import load as load_config
from lmtrain.config.schema import Config
from lmtrain.errors import LmtrainError, UsageError
from lmtrain.storage.files import TEMPORARY_NAME, make_folders, read_errors, recover, write_errors, write_file
from lmtrain.system import disk

CONFIG, TOKENIZER, STATE, METRICS = "config.yaml", "tokenizer.json", "state.json", "metrics.jsonl"
OPEN_BPE_SIZE = 16_384
"""The size of a bpe vocabulary that earlier versions left open."""
_LOCK = ".lock"
_NOT_NAME = re.compile(r"[^\w.-]+")
_BEFORE_CONFIG = {_LOCK, "checkpoints", "profile"}
"""What a run folder may contain before its configuration is written."""


def create_run(run_dir: Path, config: Config, tokenizer: Path) -> None:
    """Make a run folder with this configuration and tokenizer, or write them again into an existing one."""
    make_folders(run_dir / "checkpoints")
    write_file(run_dir / CONFIG, dump_config(config))
    write_file(run_dir / TOKENIZER, tokenizer.read_bytes())


def run_config(run_dir: Path) -> Config:
    """The configuration that is stored with a run, regardless of the environment."""
    try:
        config = load_config(run_dir / CONFIG, environment={}, stored=True)
    except UsageError as error:  # the run is damaged; the command is right
        raise LmtrainError(str(error)) from None
    tokenizer = config.tokenizer
    if (tokenizer.kind, tokenizer.vocab_size, tokenizer.file) == ("bpe", None, None):
        tokenizer = tokenizer.model_copy(update={"vocab_size": OPEN_BPE_SIZE})
    return config.model_copy(update={"tokenizer": tokenizer})


def default_name(path: Path) -> str:
    """The name of a run without `run.name`: that of its configuration file, or else of its text."""
    given = path.parent if path.name == CONFIG and path.parent.name else path
    is_folder = os.path.isdir(given)  # noqa: PTH112 -- a path of any length
    name = _NOT_NAME.sub("_", given.name if is_folder else given.stem).lstrip(".-")
    if not name:
        raise UsageError(f"a run can't be named after {path}: set run.name")
    return name.encode()[:255].decode(errors="ignore")  # no file has a longer one


def find_run(path: Path | None, runs_dir: Path) -> Path:
    """The run at `path` or of this name in `runs_dir`; without it, the latest there that has a checkpoint.

    Raises LmtrainError, naming the runs that there are, if there is none.
    """
    places = [] if path is None else [path, runs_dir / path]
    for folder in places:
        if os.path.isfile(folder / CONFIG):  # noqa: PTH113 -- a path of any length
            return folder
    with read_errors(runs_dir):
        found = [*runs_dir.iterdir()] if runs_dir.is_dir() else []
    runs = {run for run in found if any(run.glob("checkpoints/step-*")) and (run / CONFIG).is_file()}
    if path is not None:
        others = f"; the runs in {runs_dir}: {', '.join(sorted(run.name for run in runs))}" if runs else ""
        is_folder = any(map(os.path.isdir, places))
        problem = f"{path} is not a run folder: it has no {CONFIG}" if is_folder else f"there is no run {path}"
        raise LmtrainError(problem + others)
    if not runs:
        raise LmtrainError(f"no trained run in {runs_dir}: train one with `lmtrain train`, or name one with --run")
    return max(runs, key=lambda run: (run / STATE).stat().st_mtime if (run / STATE).exists() else 0.0)


def write_state(run_dir: Path, status: str, **details: Any) -> None:
    """Write `state.json`; `status` is running, finished, interrupted or failed."""
    write_file(run_dir / STATE, json.dumps({"status": status, **details}, indent=2) + "\n")


@contextmanager
def lock(run_dir: Path) -> Iterator[None]:
    """Keep other processes out of a run, and clean up what a killed one left in it.

    The system releases the lock however the process ends. Raises LmtrainError if another process has it, or if the
    folder has files in it that belong to no run.
    """
    make_folders(run_dir)
    _reject_foreign(run_dir)
    with write_errors(run_dir):
        file = disk.open_in_place(run_dir / _LOCK)
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
        recover(run_dir / "checkpoints")
        yield


def _reject_foreign(run_dir: Path) -> None:
    """Raise LmtrainError if the folder has files that belong to no run, which a run could overwrite."""
    with read_errors(run_dir):
        names = {path.name for path in run_dir.iterdir() if not TEMPORARY_NAME.fullmatch(path.name)}
    try:
        if CONFIG in names:
            run_config(run_dir)
        elif foreign := names - _BEFORE_CONFIG:
            raise LmtrainError(f"it holds {min(foreign)} and no {CONFIG}")
    except LmtrainError as error:
        raise LmtrainError(f"{run_dir} is not a run folder: {error}; choose another run.name or run.dir") from error
