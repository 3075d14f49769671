"""The state of a run: what a step reads and changes; creating, saving and restoring it."""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lmtrain.config.loader import flat
from lmtrain.config.schema import Config
from lmtrain.data.order import SampleOrder
from lmtrain.data.tokens import TokenStore
from lmtrain.errors import LmtrainError
from lmtrain.evaluation.perplexity import Forward
from lmtrain.model.build import build_model, build_uninitialized, set_embedding, set_output_bias
from lmtrain.model.cooccurrence import cooccurrence_embedding
from lmtrain.model.distillation import Distillation
from lmtrain.model.language_model import LanguageModel
from lmtrain.model.trained import TrainedWeights, check_default_dtype
from lmtrain.storage.checkpoint import Checkpoint, Tensors
from lmtrain.system.device import choose_device, choose_precision
from lmtrain.system.machine import machine
from lmtrain.system.process_group import SINGLE_PROCESS, ProcessGroup
from lmtrain.training.checkpoint_info import CheckpointInfo, Counters, read_info
from lmtrain.training.compilation import compiled_forward
from lmtrain.training.optimizers import AdamW, make_optimizer, optimizer_tensors
from lmtrain.training.other_runs import load_teacher
from lmtrain.training.parallel import choose_strategy, distribute, with_micro_batch
from lmtrain.training.schedule import make_budget, sample_order
from lmtrain.training.sharding import copy_all


class StepStatistics:
    """Statistics of the steps, on the device: the host waits for them only when it reads them."""

    def __init__(self, device: torch.device) -> None:
        self.skipped = torch.zeros((), dtype=torch.int64, device=device)
        """How many steps were skipped, changing neither weights nor optimizer."""
        self.in_a_row = torch.zeros((), dtype=torch.int64, device=device)
        """How many steps in a row were skipped, up to the last step."""
        self.sums = torch.zeros(3, dtype=torch.float64, device=device)
        """Sum of the loss, sum of the gradient norm, and number of steps: over the steps since the last logged one that
        were not skipped."""

    def add(self, loss: Tensor, norm: Tensor, skipped: Tensor) -> None:
        """Count a step."""
        self.skipped.add_(skipped)
        self.in_a_row.add_(1).mul_(skipped)
        figures = torch.stack((loss, norm, torch.ones_like(loss))).double()
        self.sums.add_(torch.where(skipped | ~torch.isfinite(loss), 0.0, figures))


@dataclass
class TrainState:
    """What a step reads and changes, and how it is computed. Only the last four fields are rebound."""

    config: Config
    model: LanguageModel
    forward: Forward
    """Inputs and targets -> the loss of each target: the model, or its `Distillation` by a teacher. Compiled, and
    wrapped in DDP, where that applies."""
    optimizer: AdamW
    scaler: torch.amp.GradScaler
    ema: dict[str, Tensor]
    """The exponential moving average of the weights, by parameter name; empty without `train.ema`."""
    store: TokenStore
    order: SampleOrder
    """The order of the sequences in the training split."""
    device: torch.device
    precision: str
    statistics: StepStatistics
    processes: ProcessGroup
    strategy: str
    """`single`, `ddp` or `fsdp`: how the processes work together."""
    set_requires_gradient_sync: Callable[[bool], None]
    """Sets whether the next backward pass sums gradients over the processes, as FSDP2's method of this name does."""
    teacher_hash: str | None
    """The hash of the teacher's checkpoint, or of the checkpoints of several; None without a teacher."""
    compiled: bool
    step: int = 0
    evaluated: int = 0
    """The step of the last evaluation."""
    best: float | None = None
    """Nats per token of the best evaluation."""
    stale: int = 0
    """Evaluations in a row without a new best."""


def new_state(
    config: Config,
    store: TokenStore,
    processes: ProcessGroup = SINGLE_PROCESS,
    *,
    initialize: bool = True,
    base: TrainedWeights | None = None,
) -> TrainState:
    """Return the state before the first step; compile and distribute the model as configured.

    The weights are those of `base`, or else the seed decides them, so nothing may draw random numbers before the model
    is built. The EMA weights and the optimizer are made of the distributed parameters, so they come last. Without
    `initialize`, the weights are arbitrary: the caller loads others, and this saves seconds. Raises LmtrainError if
    torch's default dtype is not float32, or its default device not the CPU.
    """
    check_default_dtype()
    if torch.get_default_device().type != "cpu":
        raise LmtrainError(
            f'torch\'s default device is {torch.get_default_device()}: call torch.set_default_device("cpu") first, and '
            "give the device of the run as train.device"
        )
    config = with_micro_batch(config, processes)
    if config.train.threads is not None:
        torch.set_num_threads(config.train.threads)
    device = choose_device(config.train.device)
    precision = choose_precision(config.train.precision, device)
    vocab_size = store.tokenizer.vocab_size
    torch.manual_seed(config.run.seed)
    if initialize and base is None:
        model, split = build_model(config.model, vocab_size), store.split("train")
        set_output_bias(model, torch.from_numpy(split.counts(vocab_size)))
        set_embedding(model, cooccurrence_embedding(split.ids, *model.embedding.weight.shape))
    else:
        model = build_uninitialized(config.model, vocab_size)
    model.encoder.activation_checkpointing = config.train.activation_checkpointing
    model.loss_chunk = config.train.loss_chunk
    objective: nn.Module = model
    teacher_hash = None
    if config.train.teacher:
        teacher, teacher_hash = load_teacher(config, store, device, processes)
        objective = Distillation(model, teacher, config.train.teacher_weight)
    forward: Forward = objective
    strategy = choose_strategy(config, precision, processes)
    if strategy != "fsdp":  # sharding moves the model to the device block by block, and is not compiled
        model.to(device)
        forward = compiled_forward(objective, config, make_budget(config, store), device, precision)
    compiled = forward is not objective
    forward, set_requires_gradient_sync = distribute(strategy, model, forward, device, precision, processes)
    if base is not None:  # if the model is sharded, each process reads only its own rows
        copy_all(base.tensors, dict(model.named_parameters()))
    ema = {name: value.detach().clone() for name, value in model.named_parameters()} if config.train.ema else {}
    return TrainState(
        config=config,
        model=model,
        forward=forward,
        optimizer=make_optimizer(model, config.train),
        scaler=torch.amp.GradScaler(device.type, enabled=precision == "fp16"),
        ema=ema,
        store=store,
        order=sample_order(config, store),
        device=device,
        precision=precision,
        statistics=StepStatistics(device),
        processes=processes,
        strategy=strategy,
        set_requires_gradient_sync=set_requires_gradient_sync,
        teacher_hash=teacher_hash,
        compiled=compiled,
    )


def snapshot(
    state: TrainState, score: float | None, *, prepared: float, seconds: float, metrics_bytes: int
) -> tuple[Tensors, dict[str, Any]]:
    """Return the whole state of the run for `CheckpointSaver.save`: its tensors (not copies), and the manifest.

    `score` is the validation loss at this step, if it was evaluated. For the rest see `CheckpointInfo`.
    """
    tensors: Tensors = {
        "model": dict(state.model.named_parameters()),
        "optimizer": optimizer_tensors(state.model, state.optimizer),
        "ema": state.ema,
    }
    statistics, train = state.statistics, state.config.train
    loss, norm, steps = statistics.sums.tolist()
    counters = Counters(
        step=state.step,
        evaluated=state.evaluated,
        best=state.best,
        stale=state.stale,
        scaler=state.scaler.state_dict(),
        skipped=int(statistics.skipped),
        in_a_row=int(statistics.in_a_row),
        window=(loss, norm, int(steps)),
    )
    info = CheckpointInfo(
        counters=counters,
        seconds=seconds,
        prepared=prepared,
        metrics_bytes=metrics_bytes,
        tokenizer=state.store.tokenizer.sha256,
        store=state.store.sha256,
        teacher=state.teacher_hash,
        precision=state.precision,
        compiled=state.compiled,
        threads=torch.get_num_threads(),
        micro_batch=train.micro_batch_size,
        processes=state.processes.world_size,
    )
    return tensors, {
        **dataclasses.asdict(info),
        "score": score,
        "machine": machine(state.device),
    }


def restore(state: TrainState, checkpoint: Checkpoint) -> None:
    """Restore the whole state from a checkpoint, bit for bit.

    If the model is sharded, each process reads only its own rows.
    Raises LmtrainError if the shapes differ, or the run had another teacher.
    """
    info, statistics = read_info(checkpoint), state.statistics
    saved = info.counters
    if info.teacher != state.teacher_hash:
        learned = "no teacher" if info.teacher is None else "another teacher, or an earlier checkpoint of it"
        raise LmtrainError(
            f"train.teacher={flat(state.config)['train.teacher']}: {checkpoint.folder} was trained with {learned}: "
            "choose another run.name, or restore train.teacher"
        )
    try:
        copy_all(checkpoint.tensors["model"], dict(state.model.named_parameters()))
        copy_all(checkpoint.tensors["optimizer"], optimizer_tensors(state.model, state.optimizer))
        if state.ema:
            copy_all(checkpoint.tensors.get("ema", {}), state.ema)
        if saved.scaler:  # else it was disabled
            state.scaler.load_state_dict(saved.scaler)
    except (KeyError, ValueError) as error:
        raise LmtrainError(f"{checkpoint.folder} does not fit this model: {error}") from error
    statistics.skipped.fill_(saved.skipped)
    statistics.in_a_row.fill_(saved.in_a_row)
    statistics.sums.copy_(torch.tensor(saved.window, dtype=torch.float64))
    state.step, state.evaluated, state.best, state.stale = saved.step, saved.evaluated, saved.best, saved.stale
