"""Run folders and checkpoints: their one reader and writer. Safetensors and JSON, hashed; nothing is ever unpickled.

runs/<name>/  config.yaml  tokenizer.json  state.json  metrics.jsonl  tensorboard/
              checkpoints/step-00001000/  manifest.json  model.safetensors  optimizer.safetensors  ema.safetensors

Where a model is sharded, each process writes the rows that it holds: model-00001-of-00004.safetensors and so on.
"""

import fcntl
import json
import re
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from lmtrain.config.loader import dump as dump_config
from lmtrain.config.loader import load as load_config
from lmtrain.config.schema import Config
from lmtrain.errors import LmtrainError, SaidElsewhere
from lmtrain.storage.files import (
    make_folders,
    new_folder,
    read_manifest,
    recover,
    remove_folder,
    sha256_bytes,
    sha256_file,
    write_error,
    write_file,
    writing,
)
from lmtrain.storage.tensor_files import Stored, in_rows, open_files, serialize
from lmtrain.system import disk
from lmtrain.system.distributed import ALONE, Workers

FORMAT = "lmtrain-checkpoint/1"
CONFIG, TOKENIZER, STATE, METRICS = "config.yaml", "tokenizer.json", "state.json", "metrics.jsonl"

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


def create_run(run_dir: Path, config: Config, tokenizer: Path) -> None:
    """Make the run's folder with its configuration and its tokenizer, or refresh them in an existing one."""
    make_folders(run_dir / "checkpoints")
    write_file(run_dir / CONFIG, dump_config(config))
    write_file(run_dir / TOKENIZER, tokenizer.read_bytes())


def run_config(run_dir: Path) -> Config:
    """The configuration stored with a run, whatever the environment says."""
    return load_config(run_dir / CONFIG, environment={}, stored=True)


def find_run(path: Path | None, runs_dir: Path) -> Path:
    """The run at `path`, or the latest in `runs_dir` that has a checkpoint. Raises LmtrainError if there is none."""
    if path is not None:
        if not (path / CONFIG).is_file():
            raise LmtrainError(f"{path} is not a run folder: it has no {CONFIG}")
        return path
    runs = [folder.parent.parent for folder in runs_dir.glob("*/checkpoints/step-*") if folder.is_dir()]
    runs = [run for run in runs if (run / CONFIG).is_file()]
    if not runs:
        raise LmtrainError(f"no trained run in {runs_dir}: train one with `lmtrain train`, or name one with --run")
    return max(runs, key=lambda run: (run / STATE).stat().st_mtime if (run / STATE).exists() else 0.0)


def write_state(run_dir: Path, status: str, **details: Any) -> None:
    """Say in `state.json` how the run stands: running, finished, interrupted or failed."""
    write_file(run_dir / STATE, json.dumps({"status": status, **details}, indent=2) + "\n")


@contextmanager
def lock(run_dir: Path) -> Iterator[None]:
    """Keep a second process out of the run, and put in order what one that was killed has left in it.

    The system drops the lock when the process ends, however it ends.
    """
    make_folders(run_dir)
    try:
        disk.check_regular(run_dir / ".lock")
        file = (run_dir / ".lock").open("w")
    except OSError as error:
        raise write_error(run_dir, error) from error
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


def save(run_dir: Path, step: int, tensors: Tensors, info: dict[str, Any], workers: Workers = ALONE) -> Path:
    """Write the checkpoint of `step` and return its folder: whole, flushed to disk and hashed, or not there at all.

    `info` must hold `score` (lower is better, None = not evaluated) beside whatever the loop wants back.
    Several `workers` all call this, each with what it holds: rows of tensors, under the names of `rows_name`, and the
    leader also what is whole. All write into one folder, which their nodes must share. It takes its name when all files
    are on the disk, and never does when a process ends before that.
    """
    folder = run_dir / "checkpoints" / f"step-{step:08d}"
    if not workers.leads:
        with writing(folder):
            _write_together(folder.with_name(workers.texts("")[0]), tensors, workers)
        return folder
    hashes: dict[str, str] = {}
    with new_folder(folder, FORMAT, {"step": step, **info}, hashes) as temporary:
        workers.texts(temporary.name)
        hashes.update(_write_together(temporary, tensors, workers))
        unseen = hashes.keys() - {file.name for file in temporary.iterdir()}
        if unseen:
            raise LmtrainError(f"{min(unseen)} is not to be seen in {folder.parent}: run.dir must be a shared folder")
    return folder


def _write_together(folder: Path, tensors: Tensors, workers: Workers) -> dict[str, str]:
    """Write what this process has; the sha256 of the files of all. Raises SaidElsewhere where another one failed."""
    try:
        mine = json.dumps(_write(folder, tensors, workers))
    except BaseException:
        workers.texts("")
        raise
    told = workers.texts(mine)
    if "" in told:
        raise SaidElsewhere
    return {name: sha256 for text in told for name, sha256 in json.loads(text).items()}


def _write(folder: Path, tensors: Tensors, workers: Workers) -> dict[str, str]:
    """Write what this process has of each group; the sha256 of each file."""
    hashes = {}
    for group, named in tensors.items():
        if named or workers.leads:
            part = f"-{workers.rank + 1:05d}-of-{workers.size:05d}" if in_rows(named) else ""
            parts, name = serialize(named), f"{group}{part}.safetensors"
            hashes[name] = sha256_bytes(*parts)
            disk.write(folder / name, parts)
            if not workers.leads:  # whose files are flushed with the folder
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
        raise LmtrainError(f"{file} can't be read: {error.strerror or error}") from error


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
    found = (run_dir / "checkpoints").glob("step-*")
    named = [folder for folder in found if folder.is_dir() and _STEP.fullmatch(folder.name.removeprefix("step-"))]
    return sorted(named, key=_step)


def _step(folder: Path) -> int:
    return int(folder.name.removeprefix("step-"))


def last(run_dir: Path, note: Note, *, hashed: bool = True) -> Checkpoint | None:
    """The newest good checkpoint; damaged ones are named in a note and set aside as `<name>.damaged`.

    With `hashed` False another process has just done that, and the newest must be good.
    """
    for folder in reversed(folders(run_dir)):
        try:
            return load(folder, hashed=hashed)
        except LmtrainError as error:
            if not hashed:
                raise
            names = (folder.with_name(f"{folder.name}.damaged{number}") for number in ["", *range(2, 1000)])
            aside = next(name for name in names if not name.exists())
            with writing(folder):
                disk.rename(folder, aside)
            note(f"{error}; it was set aside as {aside.name}, and the checkpoint before it is used")
    return None


def best_folder(run_dir: Path) -> Path | None:
    """The checkpoint with the lowest score, of equals the first; without scores the newest; None = no checkpoint."""
    scored = []
    for folder in folders(run_dir):
        try:
            score = read_manifest(folder, FORMAT).get("score")
        except LmtrainError:
            continue
        if not isinstance(score, float | int | None):
            continue
        step = _step(folder)
        scored.append((score is None, score or 0.0, step if score is not None else -step, folder))
    return min(scored)[3] if scored else None


def choose(run_dir: Path, which: str) -> Path:
    """The folder of the `best` or the `last` checkpoint, or of a step number. Raises LmtrainError if it isn't there."""
    if which == "best":
        chosen = best_folder(run_dir)
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


def prune(run_dir: Path, keep: int) -> None:
    """Delete all checkpoints but the newest `keep` good ones and the best.

    Good is what can be read and has its hashes: a damaged one neither counts nor, being newer, costs a good one its
    place. It stays for `last` to set aside.
    """
    best, good = best_folder(run_dir), 0
    for folder in reversed(folders(run_dir)):
        if good < keep:
            good += _is_good(folder)
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
