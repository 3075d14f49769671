"""One checkpoint: written, read, and compared with a model. README.md lists its files; nothing is ever unpickled."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from lmtrain.errors import LmtrainError
from lmtrain.storage.files import new_folder, read_manifest, sha256_bytes, verify, write_errors
from lmtrain.storage.run_folder import step_folder, step_of
from lmtrain.storage.tensor_files import LazyTensor, open_files, serialize
from lmtrain.system import disk
from lmtrain.system.process_group import SINGLE_PROCESS, ProcessGroup

FORMAT = "lmtrain-checkpoint/1"
_GAIN = re.compile(r".+\.length(/exp_avg|/exp_avg_sq)?")
"""The gain of a ScaleNorm and its moments, which were scalars in older checkpoints."""
_ENDING = re.compile(r"(-[0-9]{5}-of-[0-9]{5})?\.safetensors\Z")

Tensors = dict[str, dict[str, Tensor]]


@dataclass(frozen=True)
class Checkpoint:
    """One checkpoint: its manifest, and its tensors, which are read when they are indexed.

    It keeps its files open, so that the tensors can be read even after the files are deleted.
    """

    folder: Path
    tensors: dict[str, dict[str, LazyTensor]]
    """By group (`model`, `optimizer`, `ema`) and name."""
    info: dict[str, Any]
    """The manifest."""


def save(
    run_dir: Path, step: int, tensors: Tensors, info: dict[str, Any], processes: ProcessGroup = SINGLE_PROCESS
) -> Path:
    """Write the checkpoint of `step`, complete, flushed to disk and hashed, or not at all. Return its folder.

    `info` must have `score` (lower is better, None = not evaluated), and may have anything else to be stored.
    All `processes` call this, each with its rows of the sharded tensors, under the names of `rows_name`, and rank 0
    also with the tensors that are not sharded. They write into one folder, which their nodes must share. The folder
    gets its name when all files are on the disk, and never if a process ends before that.
    """
    folder = step_folder(run_dir, step)
    if not processes.is_main:
        with write_errors(folder):
            _write_together(folder.with_name(processes.all_gather_json("")[0]), tensors, processes)
        return folder
    hashes: dict[str, str] = {}
    with new_folder(folder, FORMAT, {"step": step, **info}, hashes) as temporary:
        processes.all_gather_json(temporary.name)
        hashes.update(_write_together(temporary, tensors, processes))
    return folder


def _write_together(folder: Path, tensors: Tensors, processes: ProcessGroup) -> dict[str, str]:
    """Write the files of this process. Return the hashes of the files of all processes.

    Raises OSError in all processes if one can't write.
    """
    try:
        mine: Any = _write(folder, tensors, processes)
    except OSError as error:
        mine = error.strerror or str(error)
    gathered = processes.all_gather_json(mine)
    for theirs in gathered:
        if isinstance(theirs, str):
            raise OSError(theirs)
    return {name: sha256 for theirs in gathered for name, sha256 in theirs.items()}


def _write(folder: Path, tensors: Tensors, processes: ProcessGroup) -> dict[str, str]:
    """Write the files of this process, one for each group. Return their hashes by file name."""
    hashes = {}
    is_shared = processes is not SINGLE_PROCESS
    suffix = f"-{processes.rank + 1:05d}-of-{processes.world_size:05d}" if is_shared else ""
    for group, named in tensors.items():
        if named:
            buffers, name = serialize(named), f"{group}{suffix}.safetensors"
            hashes[name] = sha256_bytes(*buffers)
            disk.write(folder / name, buffers)
            if not processes.is_main:  # rank 0 flushes its files with the folder
                disk.sync(folder / name)
    return hashes


def load(folder: Path, *, only_weights: bool = False, verify_hashes: bool = True) -> Checkpoint:
    """Return a checkpoint, or only the tensors that scoring needs. They are read when they are indexed.

    Without `verify_hashes` only the manifest and the headers of the files are checked.
    Raises LmtrainError if a file is missing, foreign or damaged.
    """
    manifest = read_manifest(folder, FORMAT)
    files: dict[str, list[str]] = {}
    for name in manifest["files"]:
        group = _ENDING.sub("", name)
        if group in ("model", "ema") or not only_weights:
            files.setdefault(group, []).append(name)
    if verify_hashes:
        verify(folder, {name: manifest["files"][name] for names in files.values() for name in names})
    if "model" not in files or manifest.get("step") != step_of(folder):
        raise LmtrainError(f"{folder} is not a checkpoint: it has no weights, or those of another step")
    tensors = {
        group: {
            name: replace(stored, shape=(1,)) if not stored.shape and _GAIN.fullmatch(name) else stored
            for name, stored in open_files([folder / name for name in names]).items()
        }
        for group, names in files.items()
    }
    return Checkpoint(folder, tensors, manifest)


def check_shapes(tensors: Mapping[str, Tensor | LazyTensor], expected: Mapping[str, Tensor]) -> None:
    """Raise ValueError unless `tensors` have the names, shapes and types of `expected`."""
    missing, unexpected = expected.keys() - tensors.keys(), tensors.keys() - expected.keys()
    for what, names in (("lacks", missing), ("also has", unexpected)):
        if names:
            raise ValueError(
                f"it {what} {', '.join(sorted(names))[:199]}: was it trained by another version of lmtrain?"
            )
    for name, tensor in expected.items():
        theirs, ours = ((tuple(each.shape), each.dtype) for each in (tensors[name], tensor))
        if theirs != ours:
            raise ValueError(f"{name} is {theirs[1]} of shape {theirs[0]}, not {ours[1]} of shape {ours[0]}")
