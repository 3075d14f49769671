"""One model trained by several processes: each reads its part of every batch, and PyTorch adds up their gradients.

`ddp`: every process has the whole model (Li et al., 2020). `fsdp`: each has its share of every parameter, gradient and
optimizer state, and gathers a block's weights when it comes to the block (Zhao et al., 2023).

A loss is a sum of nats over the count of targets in the whole batch, so gradients are added, never averaged.
"""

import json
import math
import warnings
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lmtrain import __version__
from lmtrain.config.loader import flat
from lmtrain.config.schema import Config
from lmtrain.data.tokens import TokenStore
from lmtrain.errors import AlreadyReported, LmtrainError
from lmtrain.model.language_model import LanguageModel
from lmtrain.storage.checkpoint import CONFIG, check_fit
from lmtrain.storage.tensor_files import Stored
from lmtrain.system.distributed import ALONE, Workers
from lmtrain.training.compilation import Forward

STATE_SHARE = 0.5
"""Of a device's memory that `auto` lets parameters, gradients and optimizer state have before it shards them."""

Adding = Callable[[bool], AbstractContextManager[Any]]


@dataclass(frozen=True)
class Parallel:
    """How the processes of a run share its work: `kind` is `alone`, `ddp` or `fsdp`."""

    kind: str = "alone"
    workers: Workers = ALONE
    adding: Adding = lambda _last: nullcontext()
    """Entered around the passes of each micro-batch, told whether it is the last: then gradients are added up."""


def share_batch(config: Config, workers: Workers) -> Config:
    """The configuration with the micro-batch of a process. Raises LmtrainError where the batch can't be shared."""
    batch, size = config.train.batch_size, workers.size
    if size == 1:
        return config
    micro = config.train.micro_batch
    if batch % (size * (micro or 1)):
        raise LmtrainError(
            f"train.batch_size={batch} can't be shared by {size} processes"
            f"{f' in parts of train.micro_batch={micro}' if micro else ''}: make it a multiple of {size * (micro or 1)}"
        )
    train = config.train.model_copy(update={"micro_batch": micro or batch // size})
    return config.model_copy(update={"train": train})


def check_agreement(config: Config, store: TokenStore, workers: Workers) -> None:
    """Raise LmtrainError, in the leader alone, where a process has other settings, other data or another PyTorch."""
    mine = {name: str(value) for name, value in flat(config).items() if not name.startswith("data.")} | {
        "its tokens": store.sha256[:16],
        "its tokenizer": store.tokenizer.sha256[:16],
        "lmtrain": __version__,
        "torch": torch.__version__,
    }
    for rank, text in enumerate(workers.texts(json.dumps(mine))):
        theirs = json.loads(text)
        differing = [name for name in mine.keys() | theirs.keys() if mine.get(name) != theirs.get(name)]
        if differing and workers.leads:
            name = min(differing)
            raise LmtrainError(
                f"process {rank} has {name}={theirs.get(name)} where process 0 has {mine.get(name)}: start all "
                "processes with the same command, data and versions"
            )
        if differing:
            raise AlreadyReported


def check_shared(run_dir: Path, step: int, workers: Workers) -> None:
    """Raise LmtrainError where a process does not see the run as the leader does: its files, its last checkpoint."""
    steps = workers.gather(step if (run_dir / CONFIG).is_file() else math.nan)
    if any(other != step for other in steps):
        raise LmtrainError(f"not all processes see {run_dir} alike: run.dir must be a folder that all nodes share")


def choose_kind(config: Config, model: LanguageModel, device: torch.device, precision: str, workers: Workers) -> str:
    """`alone`, or the configured way; `auto` shards what would fill half of a CUDA device.

    Raises LmtrainError where the model or its optimizer can't be sharded.
    """
    if workers is ALONE:
        return "alone"
    kind: str = config.train.parallel
    if kind == "auto":
        copies = 4 + (config.train.ema is not None)  # weights, gradients, two moments
        state = 4.0 * copies * sum(parameter.numel() for parameter in model.parameters())
        room = torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else float("inf")
        kind = "fsdp" if state > STATE_SHARE * room else "ddp"
    if kind == "fsdp":
        for name, value, remedy in (
            ("train.optimizer", config.train.optimizer == "muon", "adamw"),
            ("model.norm", config.model.norm == "scale", "rms"),
            ("train.compile", config.train.compile is True, "false"),
            ("train.teacher", config.train.teacher is not None, "null"),
            ("train.precision", precision == "fp16", "bf16 or fp32"),
        ):
            if value:
                field = flat(config)[name]
                raise LmtrainError(f"{name}={field} can't be sharded by train.parallel=fsdp: use {remedy}, or ddp")
    return kind


def distribute(
    kind: str, model: LanguageModel, forward: Forward, precision: str, workers: Workers
) -> tuple[Forward, Parallel]:
    """The forward pass whose gradients are those of the whole batch, and how to take the passes of a step."""
    if kind == "ddp":
        assert isinstance(forward, nn.Module)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # the option's name in later versions is not known to 2.10
            # Buffers are fixed tables, the same everywhere.
            wrapped = nn.parallel.DistributedDataParallel(
                forward, broadcast_buffers=False, gradient_as_bucket_view=True
            )
        wrapped.register_comm_hook(None, _sum)
        return wrapped, Parallel(kind, workers, lambda last: nullcontext() if last else wrapped.no_sync())
    if kind == "fsdp":
        _shard(model, precision)
        return forward, Parallel(kind, workers, lambda last: _only(model, last))
    return forward, Parallel()


def _sum(
    _state: object,
    bucket: dist.GradBucket,  # type: ignore[name-defined]
) -> torch.futures.Future[Tensor]:
    """Add a bucket's gradients over the processes; the hook that is built in takes their mean."""
    work: Any = dist.all_reduce(bucket.buffer(), async_op=True)
    added: torch.futures.Future[Tensor] = work.get_future().then(lambda done: done.value()[0])
    return added


def _shard(model: LanguageModel, precision: str) -> None:
    """Shard every parameter by its rows: each block's linear layers together, and all else as one.

    Under bf16 the linear layers are gathered in bf16, which is what autocast would make of them; gains, biases and
    embeddings are gathered in float32, and gradients are added in float32.
    """
    from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

    # A linear layer's output is a view; nothing in the blocks writes into one.
    warnings.filterwarnings("ignore", "FSDP2-wrapped module", UserWarning)
    narrow = MixedPrecisionPolicy(torch.bfloat16 if precision == "bf16" else None, torch.float32, None, False)
    for block in model.encoder.blocks:
        linear: list[nn.Module] = [module for module in block.modules() if isinstance(module, nn.Linear)]
        fully_shard(linear, mp_policy=narrow)
    fully_shard(model, reshard_after_forward=True)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)


def _only(model: LanguageModel, last: bool) -> AbstractContextManager[None]:
    sharded: Any = model  # `fully_shard` gave it this method
    sharded.set_requires_gradient_sync(last)
    return nullcontext()


def is_sharded(tensor: Tensor) -> bool:
    """Whether each process holds some rows of it."""
    return hasattr(tensor, "full_tensor")


def whole(tensor: Tensor) -> Tensor:
    """All of a tensor, be it sharded or not; of a sharded one, to be called by all processes."""
    return tensor.full_tensor() if is_sharded(tensor) else tensor  # type: ignore[attr-defined]


def local_rows(tensor: Tensor) -> tuple[slice, Tensor]:
    """Which rows of a sharded tensor this process holds, and these rows: as `torch.chunk` would part them."""
    sharded: Any = tensor.detach()
    assert [placement.is_shard(0) for placement in sharded.placements] == [True]
    rows = held(sharded)
    count, mesh = len(tensor), sharded.device_mesh
    first = min(count, mesh.get_local_rank() * -(-count // mesh.size()))
    return slice(first, first + len(rows)), rows


def held(tensor: Tensor) -> Tensor:
    """Of a sharded tensor the rows that this process holds, else all of it: the tensor's own memory."""
    return tensor.to_local() if is_sharded(tensor) else tensor  # type: ignore[attr-defined]


def placed(source: Tensor | Stored, like: Tensor) -> Tensor:
    """A whole tensor on the device of `like`, and sharded as it is; nothing else of it is read, and nothing is sent."""
    if not is_sharded(like):
        return source[...].to(like.device)
    from torch.distributed.tensor import DTensor

    assert isinstance(like, DTensor)
    rows, _ = local_rows(like)
    return DTensor.from_local(
        source[rows].to(like.device),
        like.device_mesh,
        like.placements,
        run_check=False,
        shape=like.shape,
        stride=like.stride(),
    )


@torch.no_grad()
def copy_all(source: Mapping[str, Stored], target: dict[str, Tensor]) -> None:
    """Copy tensors of a checkpoint, placed as their targets are. Raises ValueError where one doesn't fit."""
    check_fit(source, target)
    for name, value in source.items():
        target[name].copy_(placed(value, target[name]))
