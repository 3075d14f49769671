"""The training loop: `fit` runs a configuration to the end of its budget, from scratch or from its last checkpoint.

Everything random is a function of (seed, step, micro-batch) and the learning rate is a function of progress, so the
state of a run is its tensors and the few counters in `Counters`, and a resumed run repeats an uninterrupted one.
"""

import math
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import torch

from lmtrain.config.loader import flat
from lmtrain.config.schema import RESOURCE_FIELDS, Config
from lmtrain.data.order import batch
from lmtrain.data.tokens import TokenStore
from lmtrain.errors import LmtrainError
from lmtrain.evaluation.perplexity import Score
from lmtrain.storage import checkpoint
from lmtrain.system.distributed import ALONE, Workers
from lmtrain.system.runtime import (
    Interrupted,
    Interrupts,
    autocast,
    enough_memory,
    interrupts,
    set_threads,
    step_seed,
    to_device,
)
from lmtrain.training.budget import Budget, evaluation_steps, make_budget
from lmtrain.training.meter import Clock, StepResult, Window
from lmtrain.training.monitor import Monitor, Silent
from lmtrain.training.noise import noisy
from lmtrain.training.optim import learning_rate, update_ema
from lmtrain.training.other_runs import begin_with
from lmtrain.training.parallel import check_agreement, check_shared, share_batch, whole
from lmtrain.training.saving import Saver, abort
from lmtrain.training.state import Counters, Past, Training, check_same_run, past, prepare, restore, snapshot
from lmtrain.training.validation import evaluate_and_show, final_score

Note = Callable[[str], None]

MEMORY_REMEDY = (
    "lower train.micro_batch or train.loss_chunk (the batch stays the same), model.context, or the model's size; "
    "the last checkpoint is good"
)


@dataclass(frozen=True)
class Outcome:
    """How a run ended."""

    status: str
    """finished, stopped early, or interrupted."""
    step: int
    minutes: float
    score: Score | None
    """The best checkpoint on the whole validation split; None when interrupted."""
    best_step: int


def fit(
    config: Config,
    store: TokenStore,
    run_dir: Path,
    *,
    resume: bool,
    note: Note,
    quiet: bool = False,
    workers: Workers = ALONE,
) -> Outcome:
    """Train until the budget is spent, the score stops improving, or a signal asks for an end.

    With `resume`, goes on from the newest good checkpoint in `run_dir`; without, the folder must hold none.
    Several `workers` all call this, and the outcome of the leader is that of all.
    Raises LmtrainError when the folder belongs to another configuration or to other data, and when training diverges.
    """

    def check(found: checkpoint.Checkpoint) -> None:
        if not resume:
            raise LmtrainError(f"{run_dir} holds a run already: choose another run.name, or leave --resume at auto")
        check_same_run(config, store, run_dir, found)

    shared = share_batch(config, workers)
    check_agreement(config, store, workers)
    with enough_memory(MEMORY_REMEDY), ExitStack() as held:
        with workers.in_turn():
            if workers.leads:
                held.enter_context(checkpoint.lock(run_dir))
            found = checkpoint.last(run_dir, note, hashed=workers.leads, check=check)  # the leader compares the hashes
        before = past(found) if found is not None else None
        workers.agree(0)  # on the time, which downloading and tokenizing have taken none of
        clock = Clock(before.seconds if before is not None else 0.0, workers.time)
        set_threads(config.train.threads)
        training = prepare(shared, store, note, workers)
        if found is not None and before is not None:
            restore(training, found)
            del found  # it would keep its files on the disk when they are pruned
            note(f"resuming {run_dir} from step {training.counters.step:,}")
            _note_what_rounds_otherwise(before, training, note)
        elif (base := config.train.init_from) is not None:
            step = begin_with(base, shared, store, training.model, training.ema, workers)
            note(f"beginning with the weights of {base} at step {step:,}")
        with workers.in_turn():
            if workers.leads:
                checkpoint.create_run(run_dir, config, store.folder / checkpoint.TOKENIZER)
        check_shared(run_dir, before.counters.step if before is not None else -1, workers)
        workers.agree(0)  # on the time again, for the progress of all to begin where preparing ended
        budget = make_budget(config.train, training.order.per_epoch())
        progress = 0.0
        if before is not None:
            budget = budget.begun(before.prepared)
            progress = budget.progress(training.counters.step, clock.read())
        monitor = (Monitor if workers.leads else Silent)(
            run_dir,
            step=training.counters.step,
            progress=progress,
            total_steps=budget.steps if budget.seconds is None else None,
            metrics_bytes=before.metrics_bytes if before is not None else 0,
            hyperparameters={
                key: value for key, value in flat(config).items() if key not in RESOURCE_FIELDS and value is not None
            },
            quiet=quiet,
        )
        outcome: Outcome | None = None
        try:
            with (
                interrupts(workers.agree, lambda: abort(run_dir, workers)) as asked,
                Saver(run_dir, config.train.keep, workers) as saver,
            ):
                monitor.state("running", step=training.counters.step)
                outcome = _run(training, store, run_dir, budget, clock, monitor, asked, saver)
        finally:
            try:
                if outcome is None:
                    monitor.state("failed", step=training.counters.step)
            finally:
                monitor.close(outcome.score.figures() if outcome is not None and outcome.score is not None else None)
        workers.agree(0)  # who ends before the leader has written all may have torchrun end the leader too
        return outcome


def _note_what_rounds_otherwise(before: Past, training: Training, note: Note) -> None:
    """Say what keeps a resumed run from repeating an uninterrupted one to the last bit."""
    threads, workers = torch.get_num_threads(), training.parallel.workers
    if before.precision not in (None, training.precision):
        note(f"{training.precision} instead of {before.precision}: train.precision=auto is another one on this machine")
    if before.threads != threads:
        note(f"{threads} CPU threads instead of {before.threads}: the run is not repeated bit for bit")
    if before.processes != workers.size:
        note(f"{workers.size} processes instead of {before.processes}: the sums of gradients round otherwise")


def train_step(training: Training, lr: float) -> StepResult:
    """One optimizer step over `batch_size` windows.

    The loss is the sum of nats over the count of all targets in the step, however many micro-batches they come in, and
    whichever processes these go to.
    A step whose gradient is not finite leaves the weights, their average and the optimizer as they are.
    """
    config, model = training.config.train, training.model
    step, micro_batch = training.counters.step, config.micro_batch or config.batch_size
    targets_in_step = config.batch_size * training.targets_per_sample
    total = torch.zeros((), device=training.device)
    for group in training.optimizer.param_groups:
        group["lr"] = lr
    micros = training.parallel.workers.part(config.batch_size // micro_batch)
    for micro in micros:
        with training.part("data"):
            torch.manual_seed(step_seed(training.config.run.seed, step, micro))
            starts = training.order.starts(step * config.batch_size + micro * micro_batch, micro_batch)
            inputs, targets = batch(training.ids, starts, training.order.context, training.order.mode)
            if config.token_noise:
                inputs = noisy(inputs, training.ids, config.token_noise)
            inputs, targets = to_device(inputs, training.device), to_device(targets, training.device)
        with training.parallel.adding(micro == micros[-1]):
            with training.part("forward"), autocast(training.device, training.precision):
                nats = training.forward(inputs, targets)
            with training.part("backward"):
                loss = nats.sum() / targets_in_step
                training.scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
                total += loss.detach()
    with training.part("clip"):
        training.parallel.workers.add(total)
        training.scaler.unscale_(training.optimizer)
        norm = whole(torch.nn.utils.clip_grad_norm_(model.parameters(), config.clip or math.inf))
        skipped = ~torch.isfinite(norm)
    with training.part("optimizer"):
        if training.scaler.is_enabled():
            training.scaler.step(training.optimizer)
            training.scaler.update()
        else:
            # The optimizer leaves everything as it was where `found_inf` is 1, and no host waits for the answer.
            training.optimizer.found_inf = skipped.float()  # type: ignore[attr-defined]
            training.optimizer.step()
        training.optimizer.zero_grad(set_to_none=True)
        if training.ema is not None and config.ema is not None:
            update_ema(training.ema, model, config.ema, step, skipped)
    training.counters.step += 1
    training.skipped += skipped
    training.in_a_row.add_(1).mul_(skipped)
    figures = torch.stack((total, norm, torch.ones_like(total))).double()
    training.window += torch.where(skipped | ~torch.isfinite(total), 0.0, figures)
    return StepResult(total, norm, skipped)


def _run(
    training: Training,
    store: TokenStore,
    run_dir: Path,
    budget: Budget,
    clock: Clock,
    monitor: Monitor,
    asked: Interrupts,
    saver: Saver,
) -> Outcome:
    config, counters = training.config.train, training.counters
    window = Window(training)
    if counters.step == 0:
        training.parallel.workers.agree(0)  # on the time
        budget = budget.begun(clock.read())
    every = evaluation_steps(config, training.order.per_epoch())
    saved = counters.step  # as the checkpoint that the run was resumed from, if it was

    def save(score: float | None) -> None:
        nonlocal saved
        saved = counters.step
        monitor.flush()
        clock.mark_saved()
        times = {"seconds": clock.read(), "prepared": budget.prepared, "metrics_bytes": monitor.metrics_bytes()}
        saver.save(counters.step, *snapshot(training, store, score, times))

    def interrupted() -> Outcome:
        if saved != counters.step:  # an evaluation's checkpoint stands, with its score
            save(None)
        saver.wait()
        monitor.state("interrupted", step=counters.step, signal=asked.name)
        return Outcome("interrupted", counters.step, clock.read() / 60, None, counters.best_step)

    def evaluate() -> None:
        with window.paused():
            save(evaluate_and_show(training, store, monitor, asked))

    try:
        if counters.step and counters.step % every == 0 and counters.evaluated != counters.step:
            evaluate()  # the part before was interrupted in it
        while (progress := budget.progress(counters.step, clock.read())) < 1.0 and not _exhausted(
            config.patience, counters
        ):
            lr = learning_rate(config, progress)
            train_step(training, lr)
            window.count()
            saver.check()
            progress = budget.progress(counters.step, clock.read())
            monitor.advance(counters.step, progress)
            if counters.step % config.log_steps == 0:
                monitor.train(counters.step, window.metrics(lr, clock.read()))
            if counters.step % every == 0:
                evaluate()
            elif clock.since_save() > 60 * config.save_minutes and progress < 1.0:
                save(None)
            if progress < 1.0:
                asked.check()
        if counters.evaluated != counters.step:
            evaluate()
        saver.wait()
        minutes = clock.read() / 60
        score, best_step = final_score(training, store, run_dir, monitor, asked)
    except Interrupted:
        return interrupted()
    monitor.state("finished", step=counters.step, minutes=minutes, best_step=best_step, valid=score.summary())
    status = "stopped early" if _exhausted(config.patience, counters) else "finished"
    return Outcome(status, counters.step, minutes, score, best_step)


def _exhausted(patience: int | None, counters: Counters) -> bool:
    return patience is not None and counters.stale >= patience
