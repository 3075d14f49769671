"""One checkpoint: written, read and compared. Safetensors and JSON, with hashes; nothing is ever unpickled.

runs/<name>/checkpoints/step-00001000/  manifest.json  model.safetensors  optimizer.safetensors  ema.safetensors

If a model is sharded, each process writes its rows: model-00001-of-00004.safetensors and so on.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from lmtrain.config.schema import ModelConfig
from lmtrain.errors import AlreadyReported, LmtrainError
from lmtrain.storage.files import new_folder, read_manifest, sha256_bytes, verify, write_errors
from lmtrain.storage.run_folder import CONFIG
from lmtrain.storage.tensor_files import LazyTensor, in_rows, open_files, serialize
from lmtrain.system import disk
from lmtrain.system.process_group import SINGLE_PROCESS, ProcessGroup

FORMAT = "lmtrain-checkpoint/1"

_GAIN = re.compile(r".+\.length(/exp_avg|/exp_avg_sq)?")
"""The gain of a ScaleNorm and its moments, which were scalars in older checkpoints."""
_FILE = re.compile(r"(.+?)(-[0-9]{5}-of-[0-9]{5})?\.safetensors")

Tensors = dict[str, dict[str, Tensor]]


@dataclass(frozen=True)
class Checkpoint:
    """One checkpoint: groups of tensors (`model`, `optimizer`, `ema`), not read yet, and its manifest.

    It keeps its files open, so that the tensors can be read even after the files are deleted.
    """

    folder: Path
    tensors: dict[str, dict[str, LazyTensor]]
    info: dict[str, Any]


def save(
    run_dir: Path, step: int, tensors: Tensors, info: dict[str, Any], processes: ProcessGroup = SINGLE_PROCESS
) -> Path:
    """Write the checkpoint of `step` and return its folder: complete, flushed to disk and hashed, or not at all.

    `info` must have `score` (lower is better, None = not evaluated), and may have anything else to be stored.
    All `processes` call this, each with its rows of tensors, under the names of `rows_name`, and rank 0 also with the
    tensors that are not sharded. They write into one folder, which their nodes must share. It gets its name when all
    files are on the disk, and never does if a process ends before that.
    """
    folder = run_dir / "checkpoints" / f"step-{step:08d}"
    if not processes.is_main:
        with write_errors(folder):
            _write_together(folder.with_name(processes.all_gather_text("")[0]), tensors, processes)
        return folder
    hashes: dict[str, str] = {}
    with new_folder(folder, FORMAT, {"step": step, **info}, hashes) as temporary:
        processes.all_gather_text(temporary.name)
        hashes.update(_write_together(temporary, tensors, processes))
        unseen = hashes.keys() - {file.name for file in temporary.iterdir()}
        if unseen:
            raise LmtrainError(f"{min(unseen)} does not appear in {folder.parent}: run.dir must be a shared folder")
    return folder


def _write_together(folder: Path, tensors: Tensors, processes: ProcessGroup) -> dict[str, str]:
    """Write what this process has; the hashes of the files of all. Raises AlreadyReported if another one failed."""
    try:
        mine = json.dumps(_write(folder, tensors, processes))
    except BaseException:
        processes.all_gather_text("")
        raise
    gathered = processes.all_gather_text(mine)
    if "" in gathered:
        raise AlreadyReported
    return {name: sha256 for text in gathered for name, sha256 in json.loads(text).items()}


def _write(folder: Path, tensors: Tensors, processes: ProcessGroup) -> dict[str, str]:
    """Write what this process has of each group; the hash of each file."""
    hashes = {}
    for group, named in tensors.items():
        if named or processes.is_main:
            part = f"-{processes.rank + 1:05d}-of-{processes.world_size:05d}" if in_rows(named) else ""
            parts, name = serialize(named), f"{group}{part}.safetensors"
            hashes[name] = sha256_bytes(*parts)
            disk.write(folder / name, parts)
            if not processes.is_main:  # rank 0 flushes its files with the folder
                disk.sync(folder / name)
    return hashes


def load(folder: Path, groups: tuple[str, ...] | None = None, *, verify_hashes: bool = True) -> Checkpoint:
    """A checkpoint, or only these `groups` of its tensors; the tensors are read when they are indexed.

    The hash of each file is verified first; without `verify_hashes` only that the files exist with their sizes.
    Raises LmtrainError if anything in it is missing, foreign or damaged.
    """
    manifest = read_manifest(folder, FORMAT)
    names: dict[str, list[str]] = {}
    for name in manifest["files"]:
        match = _FILE.fullmatch(name)
        group = match[1] if match else name
        if groups is None or group in groups:
            names.setdefault(group, []).append(name)
    if verify_hashes:
        verify(folder, {name: manifest["files"][name] for of_group in names.values() for name in of_group})
    if "model" not in names or not isinstance(manifest.get("step"), int):
        raise LmtrainError(f"{folder} is not a checkpoint: it has no weights or no step")
    tensors = {
        group: {
            name: stored.as_vector() if not stored.shape and _GAIN.fullmatch(name) else stored
            for name, stored in open_files([folder / name for name in of_group]).items()
        }
        for group, of_group in names.items()
    }
    return Checkpoint(folder, tensors, manifest)


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
                f"{found.folder.parent.parent / CONFIG} has model.{name}={value}, and {found.folder} was trained with "
                f"{str(stored.get(name, default[name]))[:99]}: restore that value"
            )


def check_shapes(found: Mapping[str, Tensor | LazyTensor], wanted: Mapping[str, Tensor]) -> None:
    """Raise ValueError unless `found` has the names, shapes and types of `wanted`."""
    for what, names in (("lacks", wanted.keys() - found.keys()), ("also has", found.keys() - wanted.keys())):
        if names:
            raise ValueError(
                f"it {what} {', '.join(sorted(names))[:199]}: was it trained by another version of lmtrain?"
            )
    for name, tensor in wanted.items():
        theirs, ours = ((tuple(each.shape), each.dtype) for each in (found[name], tensor))
        if theirs != ours:
            raise ValueError(f"{name} is {theirs[1]} of shape {theirs[0]}, not {ours[1]} of shape {ours[0]}")
