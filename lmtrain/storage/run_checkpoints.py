"""The checkpoints of a run: the last, the last before a step, the best, and which to delete."""

import math
import re
from collections.abc import Callable, Iterable
from pathlib import Path

from lmtrain.errors import LmtrainError, UnreadableError, UsageError
from lmtrain.storage.checkpoint import FORMAT, Checkpoint, load
from lmtrain.storage.files import parse_manifest, read_errors, remove_folder, write_errors
from lmtrain.system import disk
from lmtrain.system.messages import Note

_STEP = re.compile(r"[0-9]{1,18}")


def folders(run_dir: Path, until: int | None = None) -> list[Path]:
    """The checkpoint folders of a run, those up to the step `until`, oldest first, verified or not."""
    found = sorted((folder for folder in _all_folders(run_dir) if _STEP.fullmatch(folder.name[5:])), key=_step)
    return [folder for folder in found if until is None or _step(folder) <= until]


def _all_folders(run_dir: Path) -> list[Path]:
    """The folders that are named as checkpoints are, including damaged ones that were set aside."""
    parent = run_dir / "checkpoints"
    with read_errors(parent):
        found = [*parent.iterdir()] if parent.exists() else []
    return [folder for folder in found if folder.name.startswith("step-") and folder.is_dir()]


def _step(folder: Path) -> int:
    return int(folder.name.removeprefix("step-"))


def _first_good(
    candidates: Iterable[Path], groups: tuple[str, ...] | None = None, *, verify_hashes: bool = True
) -> tuple[Checkpoint | None, list[tuple[Path, LmtrainError]]]:
    """The first of the `candidates` that is undamaged, and those before it, each with its error.

    Raises UnreadableError if one before it can't be read, since nothing says that it is damaged.
    """
    damaged: list[tuple[Path, LmtrainError]] = []
    for folder in candidates:
        try:
            return load(folder, groups, verify_hashes=verify_hashes), damaged
        except UnreadableError:
            raise
        except LmtrainError as error:
            damaged.append((folder, error))
    return None, damaged


def last(
    run_dir: Path, note: Note, *, verify_hashes: bool = True, check: Callable[[Checkpoint], None] = lambda _: None
) -> Checkpoint | None:
    """The newest undamaged checkpoint; newer ones are reported and renamed to `<name>.damaged`. None = none yet.

    Nothing is renamed if `check` raises LmtrainError. Without `verify_hashes` the newest checkpoint must be good:
    another process has just verified it.
    Raises LmtrainError if all are damaged, and UnreadableError if one can't be read; then nothing is changed.
    """
    newest_first = folders(run_dir)[::-1]
    found, damaged = _first_good(newest_first if verify_hashes else newest_first[:1], verify_hashes=verify_hashes)
    if found is None:
        if lost := sorted(folder.name for folder in _all_folders(run_dir)):
            why = f" ({damaged[0][1]})" if damaged else ""
            raise LmtrainError(
                f"{run_dir} has no good checkpoint{why}: {', '.join(lost)} can't be resumed from. To start over, "
                "delete or move this folder, or choose another run.name"
            )
        return None
    check(found)
    for folder, error in damaged:
        _set_aside(folder, error, note)
    return found


def last_until(run_dir: Path, step: int) -> Checkpoint | None:
    """The newest undamaged checkpoint of at most this step; nothing is renamed. None = there is none."""
    return _first_good(reversed(folders(run_dir, step)))[0]


def _set_aside(folder: Path, error: LmtrainError, note: Note) -> None:
    names = (folder.with_name(f"{folder.name}.damaged{number}") for number in ["", *range(2, 1000)])
    aside = next(name for name in names if not name.exists())
    with write_errors(folder):
        disk.rename(folder, aside)
    note(f"{error}; it was set aside as {aside.name}, and the checkpoint before it is used")


def best_first(run_dir: Path, until: int | None = None) -> list[Path]:
    """The checkpoints of a run, those up to the step `until`, by score, the lowest first, of equals the oldest; then
    those without one, newest first.

    One with a damaged manifest comes before all others if it may be the best, and is left out otherwise.
    """
    ranked, damaged = [], []
    newest, best_step = -1, None
    for folder in folders(run_dir, until):
        step = _step(folder)
        try:
            manifest = parse_manifest(folder, FORMAT)
        except UnreadableError:
            raise
        except LmtrainError:
            damaged.append(folder)
            continue
        counters = manifest.get("counters")
        newest, best_step = step, counters.get("best_step") if isinstance(counters, dict) else None
        score = manifest.get("score")
        if score is None:
            ranked.append((math.inf, -step, folder))
        elif isinstance(score, float | int) and math.isfinite(score):
            ranked.append((score, step, folder))
    unknown = [bad for bad in damaged if best_step is None or _step(bad) > newest or _step(bad) == best_step]
    return [*reversed(unknown), *(folder for _, _, folder in sorted(ranked))]


def best_folder(run_dir: Path, until: int | None = None) -> Path | None:
    """The best checkpoint, of those up to the step `until`, that has all its files; None = there is none."""
    found, _ = _first_good(best_first(run_dir, until), ("model",), verify_hashes=False)
    return found.folder if found is not None else None


def load_chosen(run_dir: Path, which: str | None, groups: tuple[str, ...], note: Note) -> Checkpoint:
    """The checkpoint that `choose` finds; None = the best undamaged one, and damaged ones that may be better are noted.

    Raises LmtrainError if there is none or it is damaged, and UnreadableError if it or a better one can't be read.
    """
    candidates = best_first(run_dir) if which is None else []
    found, damaged = _first_good(candidates or [choose(run_dir, which or "best")], groups)
    if not all(folder.exists() for folder, _ in damaged):
        return load_chosen(run_dir, which, groups, note)  # a run that is being trained has just replaced them
    if found is None:
        remedy = "choose another checkpoint" if which else "no other one is good, so train the model again"
        raise LmtrainError(f"{damaged[0][1]}: {remedy}")
    for folder, error in damaged:
        note(f"{folder} may be the best checkpoint and is damaged ({error}): {found.folder.name} is used instead")
    return found


def choose(run_dir: Path, which: str) -> Path:
    """The folder of the `best` or the `last` checkpoint, or of a step number, damaged or not.

    Raises LmtrainError if there is none, and UsageError if `which` is none of these.
    """
    if which == "best":
        chosen = next(iter(best_first(run_dir)), None)
    elif which == "last":
        chosen = next(reversed(folders(run_dir)), None)
    elif _STEP.fullmatch(which):
        chosen = run_dir / "checkpoints" / f"step-{int(which):08d}"
    else:
        raise UsageError(f"checkpoint {which!r} is neither best, last nor a step number")
    if chosen is None or not chosen.is_dir():
        steps = ", ".join(str(_step(folder)) for folder in folders(run_dir)) or "none yet"
        raise LmtrainError(f"{run_dir} has no checkpoint {which!r}; its checkpoints: {steps}")
    return chosen


def remove_after(run_dir: Path, step: int) -> None:
    """Delete the checkpoints of later steps."""
    for folder in reversed(folders(run_dir)):
        if _step(folder) > step:
            remove_folder(folder)


def prune(run_dir: Path, keep: int, before: int = 0) -> None:
    """Delete all checkpoints but the newest `keep` and the best, and of those up to the step `before`, to which the run
    may go back, the newest and the best."""
    stay = {best_folder(run_dir), *folders(run_dir)[-keep:]}
    if before:
        stay |= {best_folder(run_dir, before), *folders(run_dir, before)[-1:]}
    for folder in reversed(folders(run_dir)):
        if folder not in stay:
            remove_folder(folder)
