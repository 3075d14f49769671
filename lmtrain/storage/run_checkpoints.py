"""The checkpoints of a run: the last, the best, and which to delete."""

import math
import re
from collections.abc import Iterable
from pathlib import Path

from lmtrain.errors import LmtrainError, UnreadableError, UsageError
from lmtrain.storage.checkpoint import FORMAT, Checkpoint, load
from lmtrain.storage.files import read_errors, read_manifest, remove_folder, write_errors
from lmtrain.storage.run_folder import CHECKPOINTS, STEP_PREFIX, step_folder, step_of
from lmtrain.system import disk
from lmtrain.system.messages import log

_STEP = re.compile(r"[0-9]{1,18}")

Damaged = list[tuple[Path, LmtrainError]]
"""Damaged checkpoints, each with what is wrong with it."""


def folders(run_dir: Path) -> list[Path]:
    """Return the checkpoint folders of a run, oldest first, damaged or not."""
    valid = [folder for folder in _all_folders(run_dir) if _STEP.fullmatch(folder.name.removeprefix(STEP_PREFIX))]
    return sorted(valid, key=step_of)


def _all_folders(run_dir: Path) -> list[Path]:
    """Return all folders whose names begin like a checkpoint's, including damaged ones that were set aside."""
    parent = run_dir / CHECKPOINTS
    with read_errors(parent):
        paths = [*parent.iterdir()] if parent.exists() else []
    return [path for path in paths if path.name.startswith(STEP_PREFIX) and path.is_dir()]


def _first_good(candidates: Iterable[Path], **options: bool) -> tuple[Checkpoint | None, Damaged]:
    """Return the first undamaged one of the `candidates`, `load`ed with `options`, and the damaged ones before it.

    Raises UnreadableError if one before it can't be read, because that one may be undamaged.
    """
    damaged: Damaged = []
    for folder in candidates:
        try:
            return load(folder, **options), damaged
        except UnreadableError:
            raise
        except LmtrainError as error:
            damaged.append((folder, error))
    return None, damaged


def last(run_dir: Path) -> tuple[Checkpoint | None, Damaged]:
    """Return the newest undamaged checkpoint, or None if the run has no checkpoint yet, and the newer, damaged ones.

    Raises LmtrainError if all are damaged, and UnreadableError if one can't be read.
    """
    newest, damaged = _first_good(reversed(folders(run_dir)))
    if newest is None and (lost := sorted(folder.name for folder in _all_folders(run_dir))):
        why = f" ({damaged[0][1]})" if damaged else ""
        raise LmtrainError(
            f"{run_dir} has no undamaged checkpoint{why}: {', '.join(lost)} can't be resumed from. To start over, "
            "delete or move this folder, or choose another run.name"
        )
    return newest, damaged


def set_aside(damaged: Damaged) -> None:
    """Rename damaged checkpoints to `<name>.damaged` or, if that name is taken, `<name>.damaged2` and so on."""
    for folder, error in damaged:
        names = (folder.with_name(f"{folder.name}.damaged{number}") for number in ["", *range(2, 1000)])
        aside = next(name for name in names if not name.exists())
        with write_errors(folder):
            disk.rename(folder, aside)
        log.warning(f"{error}; it was set aside as {aside.name}, and the checkpoint before it is used")


def best_first(run_dir: Path) -> list[Path]:
    """Return the checkpoint folders, the best score first (ties: the oldest first), then those without a score, newest
    first. A checkpoint with a damaged or unreadable manifest, which may be the best, comes before all others.
    """
    ranked = sorted(folders(run_dir), key=_rank)
    return [folder for folder in ranked if folder.is_dir()]  # a run in training may have just deleted it


def _rank(folder: Path) -> tuple[float, int]:
    """The place of a checkpoint in `best_first`; the lowest comes first."""
    try:
        score = read_manifest(folder, FORMAT).get("score")
    except LmtrainError:
        return -math.inf, -step_of(folder)
    if isinstance(score, float | int) and abs(score) < math.inf:
        return score, step_of(folder)
    return math.inf, -step_of(folder)


def best_folder(run_dir: Path) -> Path | None:
    """Return the folder of the best checkpoint whose weights are complete, or None.

    The hashes are not verified.
    """
    best, _ = _first_good(best_first(run_dir), only_weights=True, verify_hashes=False)
    return best.folder if best is not None else None


def load_chosen(run_dir: Path, which: str | None) -> Checkpoint:
    """Return the weights of the checkpoint `which`, as for `choose`; None means the best undamaged one.

    With None, a warning names damaged ones that may be better.
    Raises LmtrainError if there is no such checkpoint or it is damaged, and UnreadableError if it or, with None, a
    better one can't be read.
    """
    candidates = best_first(run_dir) if which is None else [choose(run_dir, which)]
    chosen, damaged = _first_good(candidates or [choose(run_dir, "best")], only_weights=True)  # says if there is none
    if not all(folder.exists() for folder, _ in damaged):
        return load_chosen(run_dir, which)  # a run that is being trained has just replaced them
    if chosen is None:
        other = "choose another checkpoint, or move this one away"
        remedy = other if which else "no checkpoint is undamaged, so train the model again"
        raise LmtrainError(f"{damaged[0][1]}: {remedy}")
    for folder, error in damaged:
        log.warning(
            f"{folder} may be the best checkpoint and is damaged ({error}): {chosen.folder.name} is used instead"
        )
    return chosen


def choose(run_dir: Path, which: str) -> Path:
    """Return the folder of the checkpoint `which`, damaged or not: "best", "last", or a step number.

    Raises LmtrainError if the run does not have it, and UsageError if `which` has another form.
    """
    if which == "best":
        chosen = next(iter(best_first(run_dir)), None)
    elif which == "last":
        chosen = next(reversed(folders(run_dir)), None)
    elif _STEP.fullmatch(which):
        chosen = step_folder(run_dir, int(which))
    else:
        raise UsageError(f"checkpoint {which!r} is neither best, last nor a step number")
    if chosen is None or not chosen.is_dir():
        steps = ", ".join(str(step_of(folder)) for folder in folders(run_dir)) or "none yet"
        raise LmtrainError(f"{run_dir} has no checkpoint {which!r}; its checkpoints: {steps}")
    return chosen


def prune(run_dir: Path, keep: int) -> None:
    """Delete all checkpoints except the newest `keep` and the best one."""
    kept = {best_folder(run_dir), *folders(run_dir)[-keep:]}
    for folder in reversed(folders(run_dir)):
        if folder not in kept:
            remove_folder(folder)
