"""Tensors that may be sharded by rows over the processes (FSDP2's DTensor), or whole."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from lmtrain.storage.checkpoint import check_shapes
from lmtrain.storage.tensor_files import LazyTensor


def is_sharded(tensor: Tensor) -> bool:
    """Whether the tensor is sharded: each process holds a part of its rows."""
    return hasattr(tensor, "full_tensor")


def full_tensor(tensor: Tensor) -> Tensor:
    """Return the full tensor, whether it is sharded or not. If it is, all processes must call this."""
    return tensor.full_tensor() if is_sharded(tensor) else tensor  # type: ignore[attr-defined]


def local_rows(tensor: Tensor) -> tuple[slice, Tensor]:
    """Return the range of the rows of a sharded tensor that this process holds, as `torch.chunk` divides them, and the
    rows, which share its memory."""
    sharded: Any = tensor.detach()
    assert [placement.is_shard(0) for placement in sharded.placements] == [True]
    rows: Tensor = sharded.to_local()
    count, mesh = len(tensor), sharded.device_mesh
    first = min(count, mesh.get_local_rank() * -(-count // mesh.size()))
    return slice(first, first + len(rows)), rows


@torch.no_grad()
def copy_all(source: Mapping[str, Tensor | LazyTensor], target: Mapping[str, Tensor]) -> None:
    """Copy tensors into `target`: from a checkpoint, of which each process reads only its own rows of sharded tensors,
    or in memory and sharded as `target` is. Raises ValueError as `check_shapes` does."""
    check_shapes(source, target)
    for name, value in source.items():
        if isinstance(value, LazyTensor) and is_sharded(target[name]):
            rows, mine = local_rows(target[name])
            mine.copy_(value[rows])
        else:
            target[name].copy_(value if isinstance(value, Tensor) else value[...])
