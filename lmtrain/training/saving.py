"""Writing a checkpoint: which process writes which tensors, and none that is not finite."""

from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lmtrain.errors import LmtrainError
from lmtrain.storage import checkpoint, run_checkpoints
from lmtrain.storage.tensor_files import in_rows, rows_name
from lmtrain.system.process_group import SINGLE_PROCESS, ProcessGroup
from lmtrain.training.sharding import is_sharded, local_rows


def save_checkpoint(
    run_dir: Path,
    step: int,
    tensors: checkpoint.Tensors,
    info: dict[str, Any],
    processes: ProcessGroup = SINGLE_PROCESS,
    *,
    keep: int,
    common_steps: int = 0,
) -> None:
    """Write the checkpoint of `step`, and delete those that are not among the last `keep`. All processes call this.

    The main process writes tensors that are not sharded, while the others wait. Each process writes its own rows of
    sharded tensors; none are sent. `common_steps` is the last step that a run with a larger budget can continue from
    (0: it can't); see `prune`.
    Raises LmtrainError if a tensor is not finite, or if the checkpoint can't be written: the previous one remains.
    """
    own = {group: _own(named, processes.is_main) for group, named in tensors.items()}
    sharded = any(in_rows(named) for named in own.values())
    with nullcontext() if sharded else processes.main_first():
        for group, named in own.items():
            for name, tensor in named.items():
                if not torch.isfinite(tensor).all():
                    raise LmtrainError(
                        f"step {step}: {group} tensor {name} is not finite, so this checkpoint was not written: "
                        "lower train.lr or raise train.warmup"
                    )
        if sharded or processes.is_main:
            checkpoint.save(run_dir, step, own, info, processes if sharded else SINGLE_PROCESS)
        if processes.is_main:
            run_checkpoints.prune(run_dir, keep, common_steps)


def _own(named: Mapping[str, Tensor], is_main: bool) -> dict[str, Tensor]:
    """Return what this process writes: its rows of sharded tensors, and if it is main, all others."""
    own = {}
    for name, tensor in named.items():
        if is_sharded(tensor):
            rows, values = local_rows(tensor)
            own[rows_name(name, rows.start, rows.stop, len(tensor))] = values
        elif is_main:
            own[name] = tensor.detach()
    return own
