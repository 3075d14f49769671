"""One model trained by several processes: each reads its part of every batch, and their gradients are summed.

DISTRIBUTED.md describes `ddp` (Li et al., 2020) and `fsdp` (Zhao et al., 2023). The loss is a sum of nats over the
count of targets in the whole batch, so gradients are summed, never averaged.
"""

import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lmtrain import __version__
from lmtrain.config.loader import flat
from lmtrain.config.schema import Config
from lmtrain.data.tokens import TokenStore
from lmtrain.errors import LmtrainError
from lmtrain.evaluation.perplexity import Forward
from lmtrain.model.language_model import LanguageModel
from lmtrain.system.device import choose_device, choose_precision
from lmtrain.system.process_group import SINGLE_PROCESS, ProcessGroup


def with_micro_batch(config: Config, processes: ProcessGroup) -> Config:
    """Return the configuration with a process's micro-batch size. Raises LmtrainError if the batch can't be divided."""
    batch, micro, size = config.train.batch_size, config.train.micro_batch, processes.world_size
    if batch % (size * (micro or 1)):
        raise LmtrainError(
            f"train.batch_size={batch} can't be divided among {size} processes"
            f"{f' in parts of train.micro_batch={micro}' if micro else ''}: make it a multiple of {size * (micro or 1)}"
        )
    return config.with_fields(train={"micro_batch": micro or batch // size})


def check_agreement(config: Config, store: TokenStore, processes: ProcessGroup) -> None:
    """Raise LmtrainError if processes differ in configuration, data, lmtrain or PyTorch, or can't divide the batch."""
    with_micro_batch(config, processes)
    device = choose_device(config.train.device)
    mine = {name: str(value) for name, value in flat(config).items() if not name.startswith("data.")} | {
        "train.device": device.type,
        "train.precision": choose_precision(config.train.precision, device),
        "token store": store.sha256[:16],
        "tokenizer": store.tokenizer.sha256[:16],
        "lmtrain": __version__,
        "torch": torch.__version__,
    }
    main, *others = processes.all_gather_json(mine)
    for rank, theirs in enumerate(others, start=1):
        if differing := main.items() ^ theirs.items():
            name, _ = min(differing)
            raise LmtrainError(
                f"process {rank} has {name}={theirs.get(name)} where process 0 has {main.get(name)}: start all "
                "processes with the same command, data and versions"
            )


def choose_strategy(config: Config, precision: str, processes: ProcessGroup) -> str:
    """Return `single`, which it is without torchrun, `ddp` or `fsdp`. Raises LmtrainError if `fsdp` is impossible."""
    if processes is SINGLE_PROCESS:
        return "single"
    needed = [
        setting
        for setting, is_missing in {
            "train.optimizer=adamw": config.train.optimizer == "muon",
            "train.compile=false": config.train.compile is True,
            "train.teacher=null": bool(config.train.teacher),
            "train.precision=bf16 or fp32": precision == "fp16",
        }.items()
        if is_missing
    ]
    if config.train.parallel == "fsdp" and needed:
        raise LmtrainError(f"train.parallel=fsdp needs {' and '.join(needed)}: set that, or train.parallel=ddp")
    return config.train.parallel


def distribute(
    strategy: str, model: LanguageModel, forward: Forward, device: torch.device, precision: str, processes: ProcessGroup
) -> tuple[Forward, Callable[[bool], None]]:
    """Distribute the model over the processes. Return its forward pass, and how its gradients are summed over them."""
    if strategy == "ddp":
        assert isinstance(forward, nn.Module)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # PyTorch 2.10 does not know the new name
            # Buffers are constant tables, equal in all processes.
            wrapped = nn.parallel.DistributedDataParallel(
                forward, broadcast_buffers=False, gradient_as_bucket_view=True
            )
        wrapped.register_comm_hook(None, _sum_gradients)

        def sync_gradients(is_last: bool) -> None:
            wrapped.require_backward_grad_sync = is_last  # as `wrapped.no_sync()` does for a block

        return wrapped, sync_gradients
    if strategy == "fsdp":
        _shard(model, device, precision, processes)
        sharded: Any = model  # `fully_shard` added this method
        return forward, sharded.set_requires_gradient_sync
    return forward, lambda _is_last: None


def _sum_gradients(
    _state: object,
    bucket: dist.GradBucket,  # type: ignore[name-defined]
) -> torch.futures.Future[Tensor]:
    """Sum the gradients of a bucket over the processes; the default hook averages them."""
    work: Any = dist.all_reduce(bucket.buffer(), async_op=True)
    summed: torch.futures.Future[Tensor] = work.get_future().then(lambda done: done.value()[0])
    return summed


def _shard(model: LanguageModel, device: torch.device, precision: str, processes: ProcessGroup) -> None:
    """Shard all parameters by rows, on the device: the linear layers of each block as one unit, the rest as another.

    With bf16 the linear layers are gathered in bf16, to which autocast would cast them. Gains, biases and embeddings
    are gathered in float32, and gradients are summed in float32.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

    mesh = init_device_mesh(device.type, (processes.world_size,))
    # A linear layer's output is a view; nothing in the blocks modifies it in place.
    warnings.filterwarnings("ignore", "FSDP2-wrapped module", UserWarning)
    narrow = MixedPrecisionPolicy(torch.bfloat16 if precision == "bf16" else None, torch.float32, None, False)
    for block in model.encoder.blocks:
        linear: list[nn.Module] = [module for module in block.modules() if isinstance(module, nn.Linear)]
        fully_shard(linear, mesh=mesh, mp_policy=narrow)
    fully_shard(model, mesh=mesh, reshard_after_forward=True)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
