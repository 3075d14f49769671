"""Checkpoints in a run folder: their one reader and writer. Safetensors and JSON, hashed; nothing is ever unpickled.

runs/<name>/  config.yaml  tokenizer.json  state.json  metrics.jsonl  tensorboard/
              checkpoints/step-00001000/  manifest.json  model.safetensors  optimizer.safetensors  ema.safetensors

Where a model is sharded, each process writes the rows that it holds: model-00001-of-00004.safetensors and so on.
"""

import json
import math
import re
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from lmtrain.config.schema import ModelConfig
from lmtrain.errors import AlreadyReported, LmtrainError, UnreadableError
from lmtrain.storage.files import (
    new_folder,
    parse_manifest,
    read_error,
    read_manifest,
    remove_folder,
    sha256_bytes,
    sha256_file,
    verify,
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
"""Files that are hashed one after the other: the checkpoint of a single process has no more."""
_STEP = re.compile(r"[0-9]{1,18}")
_FILE = re.compile(r"(.+?)(-[0-9]{5}-of-[0-9]{5})?\.safetensors")

Tensors = dict[str, dict[str, Tensor]]
Note = Callable[[str], None]


@dataclass(frozen=True)
class Checkpoint:
    """One verified checkpoint: groups of tensors (`model`, `optimizer`, `ema`), not read yet, and its manifest.

    It keeps its files open, so that the tensors can be read even after the files are deleted.
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
    """Write what this process has; the sha256 of the files of all. Raises AlreadyReported where another one failed."""
    try:
        mine = json.dumps(_write(folder, tensors, processes))
    except BaseException:
        processes.all_gather_text("")
        raise
    told = processes.all_gather_text(mine)
    if "" in told:
        raise AlreadyReported
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
    """A checkpoint, or only these `groups` of its tensors; the tensors are read when they are indexed.

    The hash of each file is verified first, unless `hashed` is False because another process has just done so.
    Raises LmtrainError if anything in it is missing, foreign or damaged.
    """
    manifest = read_manifest(folder, FORMAT)
    names: dict[str, list[str]] = {}
    for name in manifest["files"]:
        match = _FILE.fullmatch(name)
        group = match[1] if match else name
        if groups is None or group in groups:
            names.setdefault(group, []).append(name)
    if hashed:
        _verify(folder, {name: manifest["files"][name] for of_group in names.values() for name in of_group})
    if "model" not in names or not isinstance(manifest.get("step"), int):
        raise LmtrainError(f"{folder} is not a checkpoint: it has no weights or no step")
    tensors = {group: open_files([folder / name for name in of_group]) for group, of_group in names.items()}
    return Checkpoint(folder, tensors, manifest)


def _verify(folder: Path, files: dict[str, Any]) -> None:
    """Verify the hashes of `files`, entries of a manifest; many files in parallel."""
    with ThreadPoolExecutor() as pool:
        each = pool.map if len(files) > FEW else map
        list(each(lambda name: verify(folder, {"files": {name: files[name]}}, sha256_file), files))


def check_model(found: Checkpoint, model: ModelConfig) -> None:
    """Raise LmtrainError unless the checkpoint was trained with the fields of `model`.

    A field that its manifest lacks had its default; older manifests, which have none, are accepted.
    """
    stored, default = found.info.get("model", {}), ModelConfig().model_dump(mode="json")
    if not isinstance(stored, dict):
        raise LmtrainError(f"{found.folder} is damaged: the model in its manifest is no mapping")
    for name, value in model.model_dump(mode="json").items() if stored else ():
        if stored.get(name, default[name]) != value:
            raise LmtrainError(
                f"{found.folder.parent.parent / CONFIG} has model.{name}={value}, but {found.folder} was trained with "
                f"{str(stored.get(name, default[name]))[:99]}: restore that value"
            )


def check_fit(found: Mapping[str, Tensor | Stored], wanted: Mapping[str, Tensor]) -> None:
    """Raise ValueError unless `found` has the names, shapes and types of `wanted`."""
    if found.keys() != wanted.keys():
        raise ValueError(f"its tensors are not the expected ones: {str(sorted(found.keys() ^ wanted.keys()))[1:200]}")
    for name, tensor in wanted.items():
        theirs, ours = ((tuple(each.shape), each.dtype) for each in (found[name], tensor))
        if theirs != ours:
            raise ValueError(f"{name} is {theirs[1]} of shape {theirs[0]}, not {ours[1]} of shape {ours[0]}")


def folders(run_dir: Path) -> list[Path]:
    """The checkpoint folders of a run, oldest first, verified or not."""
    return sorted((folder for folder in _all_folders(run_dir) if _STEP.fullmatch(folder.name[5:])), key=_step)


def _all_folders(run_dir: Path) -> list[Path]:
    """The folders that are named as checkpoints are, including damaged ones that were set aside."""
    try:
        found = [*(run_dir / "checkpoints").iterdir()]
        return [folder for folder in found if folder.name.startswith("step-") and folder.is_dir()]
    except FileNotFoundError:
        return []
    except OSError as error:
        raise read_error(run_dir / "checkpoints", error) from error


def _step(folder: Path) -> int:
    return int(folder.name.removeprefix("step-"))


Damaged = list[tuple[Path, LmtrainError]]


def _first_good(candidates: Iterable[Path], groups: tuple[str, ...] | None = None) -> tuple[Checkpoint | None, Damaged]:
    """The first of the `candidates` that is undamaged, and those before it, each with its error.

    Raises UnreadableError if one before it can't be read, since nothing says that it is damaged.
    """
    damaged: Damaged = []
    for folder in candidates:
        try:
            return load(folder, groups), damaged
        except UnreadableError:
            raise
        except LmtrainError as error:
            damaged.append((folder, error))
    return None, damaged


def last(
    run_dir: Path, note: Note, *, hashed: bool = True, check: Callable[[Checkpoint], None] = lambda _: None
) -> Checkpoint | None:
    """The newest undamaged checkpoint; newer ones are reported and renamed to `<name>.damaged`. None = none yet.

    Nothing is renamed if `check` raises LmtrainError. With `hashed` False another process has just done all this, so
    the newest checkpoint must be good.
    Raises LmtrainError if all are damaged, and UnreadableError if one can't be read; then nothing is changed.
    """
    newest_first = folders(run_dir)[::-1]
    damaged: Damaged = []
    if hashed:
        found, damaged = _first_good(newest_first)
    else:
        found = load(newest_first[0], hashed=False) if newest_first else None
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


def _set_aside(folder: Path, error: LmtrainError, note: Note) -> None:
    names = (folder.with_name(f"{folder.name}.damaged{number}") for number in ["", *range(2, 1000)])
    aside = next(name for name in names if not name.exists())
    with writing(folder):
        disk.rename(folder, aside)
    note(f"{error}; it was set aside as {aside.name}, and the checkpoint before it is used")


def best_first(run_dir: Path) -> list[Path]:
    """The checkpoints of a run by score, the lowest first, of equals the oldest; then those without one, newest first.

    One with a damaged manifest comes before all others if it may be the best, and is left out otherwise.
    """
    ranked, damaged = [], []
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
        if score is None:
            ranked.append((math.inf, -step, folder))
        elif isinstance(score, float | int) and math.isfinite(score):
            ranked.append((score, step, folder))
    unknown = [bad for bad in damaged if best_step is None or _step(bad) > newest or _step(bad) == best_step]
    return [*reversed(unknown), *(folder for _, _, folder in sorted(ranked))]


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


def load_best(run_dir: Path, groups: tuple[str, ...], note: Note) -> Checkpoint:
    """The best undamaged checkpoint; damaged ones that may be better are reported. Raises LmtrainError if none is good,
    and UnreadableError if a better one can't be read."""
    found, damaged = _first_good(best_first(run_dir), groups)
    if found is None:
        return load(choose(run_dir, "best"), groups)  # raises what is wrong with it
    for folder, error in damaged:
        note(f"{folder} may be the best checkpoint and is damaged ({error}): {found.folder.name} is used instead")
    return found


def choose(run_dir: Path, which: str) -> Path:
    """The folder of the `best` or the `last` checkpoint, or of a step number, damaged or not.

    Raises LmtrainError if there is none.
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
        steps = ", ".join(str(_step(folder)) for folder in folders(run_dir)) or "none yet"
        raise LmtrainError(f"{run_dir} has no checkpoint {which!r}: it has {steps}")
    return chosen


def prune(run_dir: Path, keep: int, good: set[Path] | None = None) -> None:
    """Delete all checkpoints but the newest `keep` good ones and the best.

    Good ones are readable and have their hashes. A damaged one does not count, and stays for `last` to set aside.
    Checkpoints in `good` are not read again; those that are found to be good are added to it.
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
        _verify(folder, read_manifest(folder, FORMAT)["files"])
    except LmtrainError:
        return False
    return True


def state_hash(checkpoint: Checkpoint) -> str:
    """One hash of everything that decides how training continues: all tensors and the counters, but no times.

    It does not depend on how many processes wrote the tensors.
    """
    files = {
        f"{group}.safetensors": sha256_bytes(*serialize({name: stored[...] for name, stored in named.items()}))
        for group, named in checkpoint.tensors.items()
    }
    state = {"step": checkpoint.info["step"], "files": files, "counters": checkpoint.info.get("counters")}
    return sha256_bytes(json.dumps(state, sort_keys=True).encode())
