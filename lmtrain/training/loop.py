"""The training loop: `fit` trains a configuration until its budget is spent, and `train_step` is one of its steps.

All randomness is a function of (seed, step, micro-batch) and the learning rate is a function of progress, so the state
of a run is its tensors and the numbers in `Counters`. A resumed run equals an uninterrupted one if the budget is
in steps, epochs or tokens.
"""

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import torch

from lmtrain.config.schema import Config
from lmtrain.data.tokens import TokenStore
from lmtrain.system.device import autocast, to_device
from lmtrain.system.machine import explain_out_of_memory
from lmtrain.system.messages import log
from lmtrain.system.process_group import SINGLE_PROCESS, ProcessGroup
from lmtrain.training.finished import Outcome, finished_outcome
from lmtrain.training.opening import checkpoint_to_resume, locked, open_run
from lmtrain.training.optimizers import update_ema
from lmtrain.training.parallel import check_agreement
from lmtrain.training.randomness import noisy, step_seed
from lmtrain.training.schedule import make_budget
from lmtrain.training.sharding import full_tensor
from lmtrain.training.train_state import TrainState

MEMORY_REMEDY = (
    "lower train.micro_batch or train.loss_chunk (the batch stays the same), model.context, model.dim or model.layers"
)

Measure = Callable[[str], AbstractContextManager[object]]
"""How `--profile` times a step: given the name of a part, returns a context manager to run that part in."""


def fit(config: Config, store: TokenStore, run_dir: Path, processes: ProcessGroup = SINGLE_PROCESS) -> Outcome:
    """Train until the budget is spent, or the score stops improving. Return the outcome.

    If `run_dir` has an undamaged checkpoint, training resumes from it. If the run is finished, this only returns its
    outcome.
    Call this in every process of a distributed run. All return the same.
    Raises LmtrainError if the run has another configuration or other data, and if training diverges; and
    KeyboardInterrupt after a stop signal, once the checkpoint is saved.
    """
    check_agreement(config, store, processes)
    budget = make_budget(config, store)
    with explain_out_of_memory(MEMORY_REMEDY), locked(run_dir, processes):
        checkpoint = checkpoint_to_resume(config, store, run_dir, processes)
        if outcome := finished_outcome(run_dir, config, budget, checkpoint, processes):
            log.info(f"{run_dir} is finished, so nothing is trained: set run.name to train another run")
            return outcome
        with open_run(config, store, run_dir, budget, checkpoint, processes) as trainer:
            try:
                if trainer.evaluation_is_due():  # a signal may have interrupted this step's evaluation
                    trainer.evaluate()
                while trainer.progress() < 1.0 and not trainer.out_of_patience():
                    lr = trainer.learning_rate()
                    train_step(trainer.state, lr)
                    trainer.after_step(lr)
                return trainer.finish()
            except KeyboardInterrupt:
                trainer.save_interrupted()
                raise


def train_step(state: TrainState, lr: float, measure: Measure = nullcontext) -> None:
    """Take one optimizer step over `batch_size` sequences, and add its loss and gradient norm to `state.statistics`.

    The loss is the sum of nats over the count of all targets in the step, however they are divided into micro-batches.
    If the gradient is not finite, the step is skipped: weights and optimizer state stay unchanged, and the EMA
    weights move toward the same weights again.
    """
    train, model, processes = state.config.train, state.model, state.processes
    step, micro_batch_size = state.step, train.micro_batch_size
    ids = state.store.split("train").ids
    total = torch.zeros((), device=state.device)
    for group in state.optimizer.param_groups:
        group["lr"] = lr * group["lr_factor"]
    micro_batches = processes.shard(train.batch_size // micro_batch_size)  # the indices of this process's micro-batches
    for index in micro_batches:
        with measure("data"):
            torch.manual_seed(step_seed(state.config.run.seed, step, index))
            first = step * train.batch_size + index * micro_batch_size
            inputs, targets = state.order.batch(ids, first, micro_batch_size)
            if train.token_noise:
                inputs = noisy(inputs, ids, train.token_noise)
            inputs, targets = to_device(inputs, state.device), to_device(targets, state.device)
        state.set_requires_gradient_sync(index == micro_batches[-1])
        with measure("forward"), autocast(state.device, state.precision):
            losses = state.forward(inputs, targets)  # one per target: cross-entropy, or the distillation loss
        with measure("backward"):
            loss = losses.sum() / state.config.targets_per_step
            state.scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
            total += loss.detach()
    with measure("clip"):
        processes.all_reduce(total)
        state.scaler.unscale_(state.optimizer)
        # Sharded by FSDP, the norm is a DTensor.
        grad_norm = full_tensor(torch.nn.utils.clip_grad_norm_(model.parameters(), train.clip or math.inf))
        skipped = ~torch.isfinite(grad_norm)
    with measure("optimizer"):
        state.optimizer.step_unless(skipped)  # not `scaler.step`, which skips with fp16 only
        state.scaler.update()
        state.optimizer.zero_grad(set_to_none=True)
        if train.ema:
            update_ema(state.ema, model, train.ema, step)
    state.step += 1
    state.statistics.add(total, grad_norm, skipped)
