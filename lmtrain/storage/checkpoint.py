"""Checkpoints in a run folder: their one reader and writer. Safetensors and JSON, hashed; nothing is ever unpickled.

runs/<name>/  config.yaml  tokenizer.json  state.json  metrics.jsonl  tensorboard/
              checkpoints/step-00001000/  manifest.json  model.safetensors  optimizer.safetensors  ema.safetensors

Where a model is sharded, each process writes the rows that it holds: model-00001-of-00004.safetensors and so on.
"""

import json
import math
import re
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from lmtrain.config.schema import ModelConfig
from lmtrain.errors import LmtrainError, SaidElsewhere, UnreadableError
from lmtrain.storage.files import (
    new_folder,
    parse_manifest,
    read_error,
    read_manifest,
    remove_folder,
    sha256_bytes,
    sha256_file,
    writing,
)
from lmtrain.storage.run_folder import (
    CONFIG,
    METRICS,
    STATE,
    TOKENIZER,
    create_run,
    find_run,
    lock,
    run_config,
    write_state,
)
from lmtrain.storage.tensor_files import Stored, in_rows, open_files, serialize
from lmtrain.system import disk
from lmtrain.system.process_group import SINGLE_PROCESS, ProcessGroup

__all__ = ["CONFIG", "METRICS", "STATE", "TOKENIZER", "create_run", "find_run", "lock", "run_config", "write_state"]

FORMAT = "lmtrain-checkpoint/1"

FEW = 4
"""Files that one thread hashes: one process writes no more."""
_STEP = re.compile(r"[0-9]{1,18}")
_FILE = re.compile(r"(.+?)(-[0-9]{5}-of-[0-9]{5})?\.safetensors")

Tensors = dict[str, dict[str, Tensor]]
Note = Callable[[str], None]


@dataclass(frozen=True)
class Checkpoint:
    """One checkpoint, verified: groups of tensors (`model`, `optimizer`, `ema`), not read yet, and its counters.

    It holds its files open, so that they can be read though they are deleted, and keep their place on the disk.
    """

    folder: Path
    tensors: dict[str, dict[str, Stored]]
    info: dict[str, Any]


def save(
    run_dir: Path, step: int, tensors: Tensors, info: dict[str, Any], processes: ProcessGroup = SINGLE_PROCESS
) -> Path:
    """Write the checkpoint of `step` and return its folder: whole, flushed to disk and hashed, or not there at all.

    `info` must hold `score` (lower is better, None = not evaluated) beside whatever the loop wants back.
    Several `processes` all call this, each with what it holds: rows of tensors, under the names of `rows_name`, and the
    leader also what is whole. All write into one folder, which their nodes must share. It takes its name when all files
    are on the disk, and never does when a process ends before that.
    """
    folder = run_dir / "checkpoints" / f"step-{step:08d}"
    if not processes.is_main:
        with writing(folder):
            _write_together(folder.with_name(processes.all_gather_text("")[0]), tensors, processes)
        return folder
    hashes: dict[str, str] = {}
    with new_folder(folder, FORMAT, {"step": step, **info}, hashes) as temporary:
        processes.all_gather_text(temporary.name)
        hashes.update(_write_together(temporary, tensors, processes))
        unseen = hashes.keys() - {file.name for file in temporary.iterdir()}
        if unseen:
            raise LmtrainError(f"{min(unseen)} is not to be seen in {folder.parent}: run.dir must be a shared folder")
    return folder


def _write_together(folder: Path, tensors: Tensors, processes: ProcessGroup) -> dict[str, str]:
    """Write what this process has; the sha256 of the files of all. Raises SaidElsewhere where another one failed."""
    try:
        mine = json.dumps(_write(folder, tensors, processes))
    except BaseException:
        processes.all_gather_text("")
        raise
    told = processes.all_gather_text(mine)
    if "" in told:
        raise SaidElsewhere
    return {name: sha256 for text in told for name, sha256 in json.loads(text).items()}


def _write(folder: Path, tensors: Tensors, processes: ProcessGroup) -> dict[str, str]:
    """Write what this process has of each group; the sha256 of each file."""
    hashes = {}
    for group, named in tensors.items():
        if named or processes.is_main:
            part = f"-{processes.rank + 1:05d}-of-{processes.world_size:05d}" if in_rows(named) else ""
            parts, name = serialize(named), f"{group}{part}.safetensors"
            hashes[name] = sha256_bytes(*parts)
            disk.write(folder / name, parts)
            if not processes.is_main:  # whose files are flushed with the folder
                disk.sync(folder / name)
    return hashes


def load(folder: Path, groups: tuple[str, ...] | None = None, *, hashed: bool = True) -> Checkpoint:
    """A checkpoint (its `groups` of tensors; None = all), whose tensors are read when they are asked for.

    Each file is compared with its hash first, unless, with `hashed` False, another process has just done so.
    Raises LmtrainError when anything in it is missing, foreign or damaged.
    """
    manifest = read_manifest(folder, FORMAT)
    names: dict[str, list[str]] = {}
    for name in manifest["files"]:
        match = _FILE.fullmatch(name)
        group = match[1] if match else name
        if groups is None or group in groups:
            names.setdefault(group, []).append(name)
    if hashed:
        _check_hashes(
            folder, {name: manifest["files"][name]["sha256"] for of_group in names.values() for name in of_group}
        )
    if "model" not in names or not isinstance(manifest.get("step"), int):
        raise LmtrainError(f"{folder} is not a checkpoint: it has no weights or no step")
    tensors = {group: open_files([folder / name for name in of_group]) for group, of_group in names.items()}
    return Checkpoint(folder, tensors, manifest)


def _check_hashes(folder: Path, hashes: Mapping[str, str]) -> None:
    """Compare files with their sha256, many at once. Raises LmtrainError naming the first that is not as it was."""
    with ThreadPoolExecutor() as pool:
        each = pool.map if len(hashes) > FEW else map
        for name, found in zip(hashes, each(lambda name: _sha256(folder / name), hashes), strict=True):
            if found != hashes[name]:
                raise LmtrainError(f"{folder / name} is damaged")


def _sha256(file: Path) -> str:
    try:
        return sha256_file(file)
    except OSError as error:
        raise read_error(file, error) from error


def check_model(found: Checkpoint, model: ModelConfig) -> None:
    """Raise LmtrainError unless the checkpoint was trained with the fields of `model`, or doesn't say with which.

    A field that came later had its default.
    """
    stored, default = found.info.get("model", {}), ModelConfig().model_dump(mode="json")
    if not isinstance(stored, dict):
        raise LmtrainError(f"{found.folder} is damaged: its manifest names no model")
    for name, value in model.model_dump(mode="json").items() if stored else ():
        if stored.get(name, default[name]) != value:
            raise LmtrainError(
                f"{found.folder.parent.parent / CONFIG} has model.{name}={value}, and {found.folder} was trained with "
                f"{str(stored.get(name, default[name]))[:99]}: put that back"
            )


def check_fit(found: Mapping[str, Tensor | Stored], wanted: Mapping[str, Tensor]) -> None:
    """Raise ValueError unless `found` has the names, the shapes and the types of `wanted`."""
    if found.keys() != wanted.keys():
        raise ValueError(f"it lacks or has too many of {str(sorted(found.keys() ^ wanted.keys()))[1:200]}")
    for name, tensor in wanted.items():
        theirs, ours = ((tuple(each.shape), each.dtype) for each in (found[name], tensor))
        if theirs != ours:
            raise ValueError(f"{name} is {theirs[1]} of shape {theirs[0]}, not {ours[1]} of shape {ours[0]}")


def folders(run_dir: Path) -> list[Path]:
    """The run's checkpoint folders, oldest first, verified or not."""
    return sorted((folder for folder in _listed(run_dir) if _STEP.fullmatch(folder.name[5:])), key=_step)


def _listed(run_dir: Path) -> list[Path]:
    """The folders in the run's that are named as checkpoints are, those that were set aside included."""
    try:
        found = [*(run_dir / "checkpoints").iterdir()]
        return [folder for folder in found if folder.name.startswith("step-") and folder.is_dir()]
    except FileNotFoundError:
        return []
    except OSError as error:
        raise read_error(run_dir / "checkpoints", error) from error


def _step(folder: Path) -> int:
    return int(folder.name.removeprefix("step-"))


def last(
    run_dir: Path, note: Note, *, hashed: bool = True, check: Callable[[Checkpoint], None] = lambda _: None
) -> Checkpoint | None:
    """The newest good checkpoint; damaged ones are named in a note and set aside as `<name>.damaged`. None = none yet.

    Before that, `check` may raise LmtrainError. With `hashed` False another process has just done all this, and the
    newest must be good.
    Raises LmtrainError where all are damaged, and UnreadableError where one can't be read; then nothing is changed.
    """
    damaged: list[tuple[Path, LmtrainError]] = []
    for folder in reversed(folders(run_dir)):
        try:
            found = load(folder, hashed=hashed)
        except LmtrainError as error:
            if not hashed or isinstance(error, UnreadableError):
                raise
            damaged.append((folder, error))
            continue
        check(found)
        for bad, reason in damaged:
            _set_aside(bad, reason, note)
        return found
    if lost := sorted(folder.name for folder in _listed(run_dir)):
        why = f" ({damaged[0][1]})" if damaged else ""
        raise LmtrainError(
            f"{run_dir} has no good checkpoint{why}: {', '.join(lost)} can't be resumed from. To start over, delete "
            "or move this folder, or choose another run.name"
        )
    return None


def _set_aside(folder: Path, error: LmtrainError, note: Note) -> None:
    names = (folder.with_name(f"{folder.name}.damaged{number}") for number in ["", *range(2, 1000)])
    aside = next(name for name in names if not name.exists())
    with writing(folder):
        disk.rename(folder, aside)
    note(f"{error}; it was set aside as {aside.name}, and the checkpoint before it is used")


def best_folder(run_dir: Path) -> Path | None:
    """The best checkpoint that has all its files; None = there is none."""
    for folder in best_first(run_dir):
        try:
            read_manifest(folder, FORMAT)
        except UnreadableError:
            raise
        except LmtrainError:
            continue
        return folder
    return None


def best_first(run_dir: Path) -> list[Path]:
    """The run's checkpoints by score, the lowest first, of equals the oldest; then those without one, newest first.

    One whose manifest is damaged comes before all if it may be the best, and else is left out.
    """
    scored, damaged = [], []
    newest, best_step = -1, None
    for folder in folders(run_dir):
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
        if score is None or (isinstance(score, float | int) and math.isfinite(score)):
            scored.append((score is None, score or 0.0, step if score is not None else -step, folder))
    unknown = [bad for bad in damaged if best_step is None or _step(bad) > newest or _step(bad) == best_step]
    return [*reversed(unknown), *(entry[3] for entry in sorted(scored))]


def load_best(run_dir: Path, groups: tuple[str, ...], note: Note) -> Checkpoint:
    """The best good checkpoint; those before it that are damaged are named in a note. Raises LmtrainError if none is.

    Raises UnreadableError where one before it can't be read.
    """
    damaged: list[tuple[Path, LmtrainError]] = []
    for folder in best_first(run_dir):
        try:
            found = load(folder, groups)
        except UnreadableError:
            raise
        except LmtrainError as error:
            damaged.append((folder, error))
            continue
        for bad, reason in damaged:
            note(f"{bad} may be the best checkpoint and is damaged ({reason}): {found.folder.name} is used instead")
        return found
    return load(choose(run_dir, "best"), groups)


def choose(run_dir: Path, which: str) -> Path:
    """The folder of the `best` or the `last` checkpoint, damaged or not, or of a step number.

    Raises LmtrainError if it isn't there.
    """
    if which == "best":
        chosen = next(iter(best_first(run_dir)), None)
    elif which == "last":
        chosen = next(reversed(folders(run_dir)), None)
    elif _STEP.fullmatch(which):
        chosen = run_dir / "checkpoints" / f"step-{int(which):08d}"
    else:
        raise LmtrainError(f"checkpoint {which!r} is neither best, last nor a step number")
    if chosen is None or not chosen.is_dir():
        raise LmtrainError(f"{run_dir} has no checkpoint {which!r}: it has {_names(run_dir)}")
    return chosen


def _names(run_dir: Path) -> str:
    return ", ".join(str(_step(folder)) for folder in folders(run_dir)) or "none yet"


def prune(run_dir: Path, keep: int, good: set[Path] | None = None) -> None:
    """Delete all checkpoints but the newest `keep` good ones and the best.

    Good is what can be read and has its hashes: a damaged one neither counts nor, being newer, costs a good one its
    place. It stays for `last` to set aside. What is in `good` is not read again, and what is found to be good is added.
    """
    good = set() if good is None else good
    best, kept = best_folder(run_dir), 0
    for folder in reversed(folders(run_dir)):
        if kept < keep:
            if folder in good or _is_good(folder):
                good.add(folder)
                kept += 1
        elif folder != best:
            remove_folder(folder)


def _is_good(folder: Path) -> bool:
    try:
        files = read_manifest(folder, FORMAT)["files"]
        _check_hashes(folder, {name: entry["sha256"] for name, entry in files.items()})
    except LmtrainError:
        return False
    return True


def state_hash(checkpoint: Checkpoint) -> str:
    """One hash over everything that decides how training goes on: all tensors and the counters, no clock.

    It is the same however many processes wrote the tensors.
    """
    files = {
        f"{group}.safetensors": sha256_bytes(*serialize({name: stored[...] for name, stored in named.items()}))
        for group, named in checkpoint.tensors.items()
    }
    state = {"step": checkpoint.info["step"], "files": files, "counters": checkpoint.info.get("counters")}
    return sha256_bytes(json.dumps(state, sort_keys=True).encode())
