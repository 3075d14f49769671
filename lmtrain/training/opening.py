"""Opening a run: lock its folder, find the last checkpoint, compare configuration and data, restore the state."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import torch

from lmtrain.config.loader import identity_difference
from lmtrain.config.schema import Config
from lmtrain.data.tokens import TokenStore
from lmtrain.errors import LmtrainError
from lmtrain.storage import checkpoint, run_checkpoints, run_folder
from lmtrain.system.device import set_threads
from lmtrain.system.process_group import ProcessGroup
from lmtrain.system.signals import catch_stop_signals
from lmtrain.training.budget import make_budget
from lmtrain.training.checkpoint_info import CheckpointInfo, read_info
from lmtrain.training.compilation import Note
from lmtrain.training.meter import Clock
from lmtrain.training.monitor import Monitor, RunMonitor
from lmtrain.training.other_runs import load_initial_weights
from lmtrain.training.parallel import check_agreement, check_shared, share_batch
from lmtrain.training.run import OpenRun
from lmtrain.training.saving import Saver, abort
from lmtrain.training.state import Training, new_training, restore


@contextmanager
def open_run(
    config: Config,
    store: TokenStore,
    run_dir: Path,
    *,
    resume: bool,
    note: Note,
    quiet: bool,
    processes: ProcessGroup,
) -> Iterator[OpenRun]:
    """A run ready for its next step: new, or restored from its last good checkpoint.

    Inside the block the folder is locked and stop signals are caught. An error in it makes the run's state "failed".
    Raises LmtrainError if the run can't be started or resumed with this configuration and data.
    """

    def check(found: checkpoint.Checkpoint) -> None:
        if not resume:
            raise LmtrainError(f"{run_dir} holds a run already: choose another run.name, or leave --resume at auto")
        check_same_run(config, store, run_dir, found)

    shared = share_batch(config, processes)
    check_agreement(config, store, processes)
    with ExitStack() as stack:
        with processes.main_first():
            if processes.is_main:
                stack.enter_context(run_folder.lock(run_dir))
            found = run_checkpoints.last(run_dir, note, hashed=processes.is_main, check=check)
        info = read_info(found) if found is not None else None
        clock = Clock(info.seconds if info is not None else 0.0, processes)
        set_threads(config.train.threads)
        training = new_training(shared, store, note, processes)
        if found is not None and info is not None:
            restore(training, found)
            del found  # it holds its files open, which then stay on the disk after they are pruned
            note(f"resuming {run_dir} from step {training.counters.step:,}")
            _note_rounding_differences(info, training, note)
        elif (base := config.train.init_from) is not None:
            step = load_initial_weights(base, shared, store, training.model, training.ema, processes)
            note(f"starting from the weights of {base} at step {step:,}")
        with processes.main_first():
            if processes.is_main:
                run_folder.create_run(run_dir, config, store.folder / run_folder.TOKENIZER)
        check_shared(run_dir, info.counters.step if info is not None else -1, processes)
        clock.tick()
        budget = make_budget(config.train, training.samples.order.per_epoch())
        if info is not None:
            budget = budget.begun(info.prepared)
        progress = budget.progress(training.counters.step, clock.read()) if info is not None else 0.0
        monitor = Monitor()
        if processes.is_main:
            monitor = RunMonitor(
                run_dir,
                config,
                step=training.counters.step,
                progress=progress,
                total_steps=budget.steps if budget.seconds is None else None,
                metrics_bytes=info.metrics_bytes if info is not None else 0,
                quiet=quiet,
            )
        stack.enter_context(_closing(monitor, training))
        stop = stack.enter_context(catch_stop_signals(processes.all_max, lambda: abort(run_dir, processes)))
        saver = stack.enter_context(Saver(run_dir, config.train.keep, processes))
        monitor.state("running", step=training.counters.step)
        if training.counters.step == 0:
            clock.tick()
            budget = budget.begun(clock.read())
        yield OpenRun(training, store, run_dir, budget, clock, monitor, saver, stop)


def check_same_run(config: Config, store: TokenStore, run_dir: Path, found: checkpoint.Checkpoint) -> None:
    """Raise LmtrainError if the configuration or the data differs from what the checkpoint was trained with."""
    changed = identity_difference(run_folder.run_config(run_dir), config)
    if changed:
        raise LmtrainError(
            f"{run_dir} was started with another configuration ({'; '.join(changed)}): "
            "choose another run.name, or give the old values"
        )
    checkpoint.check_model(found, config.model)
    info = read_info(found)
    for what, then, now in (
        ("tokenizer", info.tokenizer, store.tokenizer.sha256),
        ("corpus", info.tokens, store.sha256),
    ):
        if then != now:
            raise LmtrainError(f"the {what} is not the one that {run_dir} was trained on: choose another run.name")


def _note_rounding_differences(info: CheckpointInfo, training: Training, note: Note) -> None:
    """Report why a resumed run will not equal an uninterrupted one to the last bit."""
    threads, processes = torch.get_num_threads(), training.parallel.processes.world_size
    if info.precision not in (None, training.precision):
        note(f"{training.precision} instead of {info.precision}: train.precision=auto differs on this machine")
    if info.threads != threads:
        note(f"{threads} CPU threads instead of {info.threads}: the results will not be equal bit for bit")
    if info.processes != processes:
        note(f"{processes} processes instead of {info.processes}: sums of gradients round differently")


@contextmanager
def _closing(monitor: Monitor, training: Training) -> Iterator[None]:
    """Close the monitor after the block; an error in the block makes the run's state "failed"."""
    try:
        yield
    except BaseException:
        monitor.state("failed", step=training.counters.step)
        raise
    finally:
        monitor.close()
