"""Opening a run: lock its folder, find the checkpoint to resume, compare configuration and data, restore the state."""

from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path

import torch

from lmtrain.config.loader import differences
from lmtrain.config.schema import BUDGET_FIELDS, CHANGEABLE_FIELDS, Config
from lmtrain.data.tokens import TokenStore
from lmtrain.errors import LmtrainError
from lmtrain.storage import run_checkpoints, run_folder
from lmtrain.storage.checkpoint import Checkpoint
from lmtrain.storage.checkpoint import load as load_checkpoint
from lmtrain.system.messages import log
from lmtrain.system.process_group import ProcessGroup
from lmtrain.system.signals import catch_stop_signals
from lmtrain.training.announce import plan_lines, plan_sizes, report_device
from lmtrain.training.checkpoint_info import NEW_RUN, CheckpointInfo, read_info
from lmtrain.training.meter import Clock, Meter
from lmtrain.training.monitor import Monitor, RunMonitor
from lmtrain.training.other_runs import initial_weights
from lmtrain.training.saving import CheckpointSaver
from lmtrain.training.schedule import Budget
from lmtrain.training.train_state import TrainState, new_state, restore
from lmtrain.training.trainer import Trainer


@contextmanager
def locked(run_dir: Path, processes: ProcessGroup) -> Iterator[None]:
    """Lock the run's folder inside the block. Raises LmtrainError if another command trains this run."""
    with ExitStack() as stack:
        processes.on_main(lambda: stack.enter_context(run_folder.lock(run_dir)))
        yield


def checkpoint_to_resume(config: Config, store: TokenStore, run_dir: Path, processes: ProcessGroup) -> Path | None:
    """Return the folder of the undamaged checkpoint that the run is resumed from; None if it is new.

    The main process chooses it, and sets newer, damaged ones aside. Raises LmtrainError, with nothing changed, if the
    run can't be resumed with this configuration and data.
    """

    def chosen() -> str | None:
        newest, damaged = run_checkpoints.last(run_dir)
        if newest is None:
            return None
        check_same_run(config, store, run_dir, newest)
        run_checkpoints.set_aside(damaged)
        return str(newest.folder)

    name = processes.on_main(chosen)
    folder = None if name is None else Path(name)
    shared = folder or run_dir / run_folder.LOCK
    if not all(processes.all_gather(shared.exists())):
        raise LmtrainError(f"not all processes see {shared}: run.dir must be a folder that all nodes share")
    return folder


@contextmanager
def open_run(
    config: Config, store: TokenStore, run_dir: Path, budget: Budget, folder: Path | None, processes: ProcessGroup
) -> Iterator[Trainer]:
    """Yield the trainer of a run at its next step, restored from the checkpoint `folder`; None: a new run.

    Inside the block stop signals are caught, and the run's status is "running", or "failed" after an error.
    """
    last = load_checkpoint(folder, verify_hashes=False) if folder else None
    info = NEW_RUN if last is None else read_info(last)
    budget = budget.with_setup(info.prepared)
    clock = Clock(info.seconds, processes)
    step, spent = info.counters.step, budget.progress(info.counters.step, info.seconds)
    log.info(f"{run_dir}: " + (f"resuming from step {step:,} ({spent:.0%} of the budget)" if step else "a new run"))
    for line in plan_lines(config, plan_sizes(config, store), store.tokenizer.kind):
        log.info(line)
    base = None if last is not None else initial_weights(config, store, processes)
    state = new_state(config, store, processes, initialize=last is None, base=base)
    report_device(state)
    if last is not None:
        restore(state, last)
        _warn_of_differences(info, state)
    elif base is not None:
        log.info(f"starting from the weights of {base.run_dir} at step {base.info['step']:,}")
    del last, base  # they hold their files open, which then stay on the disk after they are pruned
    monitor = Monitor()
    progress = budget.progress(step, clock.update()) if step else 0.0  # loading took some of a budget in time
    with processes.main_first():
        if processes.is_main:
            run_folder.create_run(run_dir, config)
            store.tokenizer.save(run_dir / run_folder.TOKENIZER)
            steps, size = budget.fixed_steps, info.metrics_bytes
            monitor = RunMonitor(run_dir, step=step, progress=progress, total_steps=steps, metrics_bytes=size)
    with closing(monitor):
        try:
            with (
                catch_stop_signals(processes) as stop,
                CheckpointSaver(run_dir, config.train.keep, processes) as saver,
            ):
                monitor.write_status("running", step=step)
                meter = Meter(state, clock)
                if step == 0:
                    budget = budget.with_setup(clock.seconds)
                yield Trainer(state, run_dir, budget, clock, meter, monitor, saver, stop)
        except Exception:
            monitor.write_status("failed", step=state.step)
            raise


def check_same_run(config: Config, store: TokenStore, run_dir: Path, last: Checkpoint) -> None:
    """Raise LmtrainError if the configuration or the data differs from what the checkpoint `last` was trained with.

    After the warmup, a constant learning rate does not depend on the budget in steps, epochs or tokens, so that may
    change. With a second budget, in time, the run may have ended by either.
    """
    info = read_info(last)
    stored = run_folder.run_config(run_dir)
    is_constant = stored.train.schedule == "constant" and stored.train.max_minutes is None
    free = CHANGEABLE_FIELDS | BUDGET_FIELDS if is_constant else CHANGEABLE_FIELDS
    changed = {key: values for key, values in differences(stored, config).items() if key not in free}
    if changed:
        fields = "; ".join(f"{key}: {old} -> {new}" for key, (old, new) in changed.items())
        is_budget = changed.keys() <= BUDGET_FIELDS | {"train.max_minutes"}
        raise LmtrainError(
            f"{run_dir} was started with another configuration ({fields}): "
            f"give the old values, or train another run with run.name={run_dir.name}-2"
            f"{f'; train.init_from={run_dir} starts it from the weights of this one' if is_budget else ''}"
        )
    for what, then, now, remedy in (
        ("tokenizer", info.tokenizer, store.tokenizer.sha256, f"keep it with `lmtrain train --resume {run_dir}`, or "),
        ("corpus", info.store, store.sha256, ""),
    ):
        if then not in (None, now):
            raise LmtrainError(
                f"the {what} is not the one that {run_dir} was trained on: {remedy}choose another run.name; "
                f"train.init_from={run_dir} starts it from the weights of this one"
            )


def _warn_of_differences(info: CheckpointInfo, state: TrainState) -> None:
    """Report why a resumed run may not equal an uninterrupted one to the last bit."""
    if info.store is None:
        log.warning("the run is of an earlier version: lmtrain can't check that its text is unchanged")
    for what, then, now in (
        ("precision, by train.precision=auto", info.precision, state.precision),
        ("compiled", info.compiled, state.compiled),
        ("CPU threads", info.threads, torch.get_num_threads()),
        ("processes", info.processes, state.processes.world_size),
        ("sequences per micro-batch", info.micro_batch, state.config.train.micro_batch_size),
    ):
        if then not in (None, now):
            log.warning(f"{what}: {then} before, {now} now; the results may not be equal bit for bit")
