"""The costs of training: operations and memory; for `train --dry-run` and MFU (model FLOPs utilization)."""

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

from lmtrain.config.schema import Config, ModelConfig
from lmtrain.data.tokens import TokenStore
from lmtrain.model.build import build_uninitialized
from lmtrain.model.ensemble import Ensemble
from lmtrain.model.language_model import LanguageModel
from lmtrain.model.objective import Objective
from lmtrain.nn.output_loss import rows_at_once
from lmtrain.storage.run_folder import run_config
from lmtrain.system.device import autocast, choose_device, choose_precision
from lmtrain.system.machine import installed_bytes
from lmtrain.training.optimizers import make_optimizer, optimizer_tensors
from lmtrain.training.schedule import make_budget, sample_order

DISTILLATION_BUFFERS = 3
"""Arrays of the size of all logits that exist at once in the distillation loss, besides those that autograd saves."""


def step_flops(model: LanguageModel, config: Config, store: TokenStore) -> float:
    """Return the floating-point operations of a training step: those of the matrix products, two per multiply-add.

    Both passes over a batch count, as on a CPU: masked scores count, except those that local attention skips in long
    sequences. The optimizer, recomputed activations and the teacher do not count. A tail of an adaptive output counts
    for its fraction of the training tokens.
    """
    rows = config.train.micro_batch_size
    flops = _matrix_products(config.model, model.vocab_size, rows) * config.train.batch_size / rows
    if model.adaptive is not None:
        counts = torch.from_numpy(store.split("train").counts(model.vocab_size))
        in_tails = model.adaptive.tail_logits_per_target(counts)
        flops += 6.0 * config.targets_per_step * in_tails * (config.model.embed_dim or config.model.dim)
    return flops


@lru_cache
def _matrix_products(config: ModelConfig, vocab_size: int, rows: int) -> int:
    """Return what torch counts in both passes of a micro-batch on fake tensors, without the tails of the output."""
    with FakeTensorMode(), FlopCounterMode(display=False) as counter:
        objective = Objective(build_uninitialized(config, vocab_size), None)
        objective(*blank_batch(config, rows, torch.device("cpu"))).sum().backward()
    return counter.get_total_flops()


def blank_batch(model: ModelConfig, rows: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return a micro-batch of zeros, of the shapes of `SampleOrder.batch`."""
    inputs = torch.zeros(rows, model.context, dtype=torch.int64, device=device)
    return inputs, inputs.new_zeros(rows, model.targets)


def memory_estimate(config: Config, vocab_size: int, precision: str) -> dict[str, float]:
    """Return the bytes of the tensors that exist at once in training, by part, without the program itself.

    What autograd saves in eager mode is counted, not estimated: the forward pass of one micro-batch runs on fake
    tensors, which have no data. The logits in the tails of an adaptive output are left out: they are temporary, and few
    except with unusual cutoffs. Teachers need their weights, and a distribution over the vocabulary for every target.
    """
    cpu, teachers = torch.device("cpu"), [run_config(run_dir).model for run_dir in config.train.teacher]
    with FakeTensorMode():
        model = build_uninitialized(config.model, vocab_size)
        teacher = Ensemble([build_uninitialized(each, vocab_size) for each in teachers]) if teachers else None
        objective = Objective(model, config.train.loss_chunk, teacher)
        inputs, targets = blank_batch(config.model, config.train.micro_batch_size, cpu)
        activations = _saved_bytes(objective, inputs, targets, precision)
        if config.train.activation_checkpointing:
            model.encoder.activation_checkpointing = True
            between_blocks = 4.0 * inputs.numel() * config.model.dim * config.model.layers
            outside = _saved_bytes(objective, inputs, targets, precision)  # with what is saved between blocks
            blocks = activations - outside + between_blocks
            one_block = blocks / config.model.layers if config.model.layers else 0.0
            activations = max(outside, between_blocks + one_block)  # a block is recomputed after what follows is freed
    parameters = float(sum(parameter.numel() for parameter in model.parameters()))
    state = optimizer_tensors(model, make_optimizer(model, config.train))
    tokens = targets.numel()
    classes = vocab_size if model.adaptive is None else model.adaptive.classes
    rows = rows_at_once(config.train.loss_chunk, tokens, classes)
    estimate = {
        "weights": 4 * parameters,
        "gradients": 4 * parameters,
        "optimizer": 4.0 * sum(value.numel() for value in state.values() if value.ndim),
        "averaged weights": 4 * parameters if config.train.ema else 0.0,
        "activations": activations,
        "logits": 4.0 * rows * classes,
    }
    if teacher is not None:
        estimate["logits"] = DISTILLATION_BUFFERS * 4.0 * tokens * vocab_size
        estimate["teacher"] = 4.0 * sum(parameter.numel() for parameter in teacher.parameters())
    return estimate


def _saved_bytes(model: nn.Module, inputs: Tensor, targets: Tensor, precision: str) -> float:
    """Return the bytes of all storages that autograd saves in a forward pass, without those of the parameters."""
    parameters = {parameter.untyped_storage()._cdata for parameter in model.parameters()}
    saved: dict[int, torch.UntypedStorage] = {}  # by address; kept alive, so that no address is used again

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        saved[storage._cdata] = storage
        return tensor

    with (
        torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor),
        autocast(torch.device("cpu"), "fp32" if precision == "fp32" else "bf16"),
    ):
        model(inputs, targets).sum()
    return float(sum(storage.nbytes() for address, storage in saved.items() if address not in parameters))


def costs(config: Config, store: TokenStore) -> dict[str, Any]:
    """Return the figures of `train --dry-run`, without `steps` if the budget is only in minutes.

    The memory is that of one process, without evaluations.
    """
    samples, budget = sample_order(config, store).per_epoch(), make_budget(config, store)
    with FakeTensorMode():  # also for a model that is larger than the memory
        model = build_uninitialized(config.model, store.tokenizer.vocab_size)
    device = choose_device(config.train.device)
    precision = choose_precision(config.train.precision, device)
    memory = memory_estimate(config, store.tokenizer.vocab_size, precision)
    return {
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "vocabulary": store.tokenizer.vocab_size,
        "tokens_per_epoch": store.split("train").tokens,
        "tokens_per_step": config.targets_per_step,
        "windows_per_epoch": samples,
        "steps_per_epoch": samples / config.train.batch_size,
        **({"steps": budget.steps} if budget.steps is not None else {}),
        "flops_per_step": step_flops(model, config, store),
        "memory_bytes": memory | {"total": sum(memory.values())},
        "device": device.type,
        "precision": precision,
        "device_memory_bytes": installed_bytes(device),
    }
