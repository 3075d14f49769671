"""What training costs: operations, memory, tokens; for `train --dry-run` and for the share of the machine's peak."""

from collections import Counter
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

from lmtrain.config.schema import Config, ModelConfig
from lmtrain.data.order import sample_order
from lmtrain.data.tokens import TokenStore
from lmtrain.model.build import build_uninitialized
from lmtrain.model.language_model import LanguageModel
from lmtrain.model.objective import Objective
from lmtrain.nn.output_loss import rows_at_once
from lmtrain.storage.checkpoint import run_config
from lmtrain.system.device import autocast, choose_device, choose_precision
from lmtrain.training.budget import make_budget

TAUGHT_AT_ONCE = 3
"""Arrays as large as the logits that learning from a teacher makes at one time, beside those that are kept."""


def step_flops(model: LanguageModel, config: Config) -> float:
    """Floating-point operations of the matrix products of a training step, two per multiplication and addition.

    Counted are the forward and the backward pass of the model over the text of a batch, in the form that a CPU
    computes: in long rows whole blocks of keys that a pattern forbids, such as a causal one, are left out. Not counted
    is what is no product of matrices, what the optimizer does, what is computed again to save memory, and the pass of
    a teacher. A tail of an adaptive output counts by the share of the targets that its module
    knows.
    """
    rows = config.train.micro_batch or config.train.batch_size
    flops = float(_products(config.model, model.vocab_size, rows))
    if model.adaptive is not None:
        answers = rows * (1 if config.model.mode == "windowed" else config.model.context)
        in_tails = model.adaptive.logits_per_target - model.adaptive.classes
        flops += 6.0 * answers * in_tails * (config.model.embed_dim or config.model.dim)
    return flops * config.train.batch_size / rows


@lru_cache
def _products(config: ModelConfig, vocab_size: int, rows: int) -> int:
    """Of one micro-batch. Layers of a kind are alike, so one of each is counted, and training begins sooner."""
    kinds = Counter(config.layer_attention)
    outside = _counted(config.model_copy(update={"layers": 0, "attention": "full"}), vocab_size, rows)
    layers = {
        kind: _counted(config.model_copy(update={"layers": 1, "attention": kind}), vocab_size, rows) - outside
        for kind in kinds
    }
    return outside + sum(count * layers[kind] for kind, count in kinds.items())


def _counted(config: ModelConfig, vocab_size: int, rows: int) -> int:
    """What torch counts of both passes on fake tensors; an adaptive output's tails are operators that it can't."""
    with FakeTensorMode(), FlopCounterMode(display=False) as counter:
        objective = Objective(LanguageModel(config, vocab_size), None)
        tokens = torch.zeros(rows, config.context, dtype=torch.int64)
        objective(tokens, tokens[:, 0] if config.mode == "windowed" else tokens).sum().backward()
    flops: int = counter.get_total_flops()
    return flops


def blank_batch(config: Config, device: torch.device) -> tuple[Tensor, Tensor]:
    """Inputs (B, C) and targets (B, C), or (B,) if windowed, of one micro-batch, all zero."""
    rows, context = config.train.micro_batch or config.train.batch_size, config.model.context
    shape = (rows,) if config.model.mode == "windowed" else (rows, context)
    return (
        torch.zeros(rows, context, dtype=torch.int64, device=device),
        torch.zeros(shape, dtype=torch.int64, device=device),
    )


def memory_estimate(config: Config, vocab_size: int, precision: str) -> dict[str, float]:
    """Bytes that training will need, by part; what eager mode keeps for the backward pass is counted, not guessed.

    The forward pass of one micro-batch runs on fake tensors, which have shapes and hold no data. Of an adaptive output
    only the first classes are counted: a tail's logits come and go, and are few but for unusual cutoffs. A teacher
    takes its weights, and the distributions over all words of every target.
    """
    cpu, teacher = torch.device("cpu"), config.train.teacher
    with FakeTensorMode():
        model = LanguageModel(config.model, vocab_size)
        taught_by = LanguageModel(run_config(teacher).model, vocab_size) if teacher is not None else None
        objective = Objective(model, config.train.loss_chunk, taught_by)
        inputs, targets = blank_batch(config, cpu)
        activations = _saved_bytes(objective, inputs, targets, precision)
        if config.train.activation_checkpointing:
            recomputing = LanguageModel(config.model, vocab_size, recompute_blocks=True)
            between_blocks = 4.0 * inputs.numel() * config.model.dim * config.model.layers
            objective = Objective(recomputing, config.train.loss_chunk, taught_by)
            outside = _saved_bytes(objective, inputs, targets, precision)  # with these
            blocks = activations - outside + between_blocks
            one_block = blocks / config.model.layers if config.model.layers else 0.0
            activations = max(outside, between_blocks + one_block)  # a block is made again when what follows is gone
    parameters = float(sum(parameter.numel() for parameter in model.parameters()))
    matrices = model.hidden_matrices() if config.train.optimizer == "muon" else []
    tokens = targets.numel()
    classes = vocab_size if model.adaptive is None else model.adaptive.classes
    rows = rows_at_once(config.train.loss_chunk, tokens, classes) or tokens
    estimate = {
        "weights": 4 * parameters,
        "gradients": 4 * parameters,
        "optimizer": 8 * parameters - 4.0 * sum(parameter.numel() for parameter in matrices),
        "averaged weights": 4 * parameters if config.train.ema else 0.0,
        "activations": activations,
        "logits": 4.0 * rows * classes,
    }
    if taught_by is not None:
        estimate["logits"] = TAUGHT_AT_ONCE * 4.0 * tokens * vocab_size
        estimate["teacher"] = 4.0 * sum(parameter.numel() for parameter in taught_by.parameters())
    return estimate


def _saved_bytes(model: nn.Module, inputs: Tensor, targets: Tensor, precision: str) -> float:
    """The bytes of each storage that autograd saves in a forward pass, once, beside the parameters' own."""
    seen, total = {parameter.untyped_storage()._cdata for parameter in model.parameters()}, 0.0

    def pack(tensor: Tensor) -> Tensor:
        nonlocal total
        storage = tensor.untyped_storage()
        if storage._cdata not in seen:
            seen.add(storage._cdata)
            total += storage.nbytes()
        return tensor

    with (
        torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor),
        autocast(torch.device("cpu"), "fp32" if precision == "fp32" else "bf16"),
    ):
        model(inputs, targets).sum()
    return total


def costs(config: Config, store: TokenStore) -> dict[str, Any]:
    """The figures of `train --dry-run`; `steps` is absent where only a budget of minutes is given."""
    split, seed = store.split("train"), config.run.seed
    samples = sample_order(split.corpora, store.weights, config.model.context, config.model.mode, seed).per_epoch()
    model = build_uninitialized(config.model, store.tokenizer.vocab_size)
    if model.adaptive is not None:
        model.adaptive.set_shares(torch.from_numpy(split.ids.counts(store.tokenizer.vocab_size)))
    precision = choose_precision(config.train.precision, choose_device(config.train.device))
    memory = memory_estimate(config, store.tokenizer.vocab_size, precision)
    steps = make_budget(config.train, samples).steps
    return {
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "vocabulary": store.tokenizer.vocab_size,
        "tokens_per_epoch": split.tokens,
        "windows_per_epoch": samples,
        "steps_per_epoch": samples / config.train.batch_size,
        **({"steps": steps} if steps is not None else {}),
        "flops_per_step": step_flops(model, config),
        "memory_bytes": memory | {"total": sum(memory.values())},
    }
