"""The trainer: what happens between the steps of a run, and how the run ends."""

from dataclasses import dataclass
from pathlib import Path

from lmtrain.system.device import synchronize
from lmtrain.system.messages import log
from lmtrain.system.signals import StopSignal
from lmtrain.training.finished import Outcome
from lmtrain.training.meter import Clock, Meter, check_divergence
from lmtrain.training.monitor import Monitor
from lmtrain.training.saving import CheckpointSaver
from lmtrain.training.schedule import Budget, learning_rate
from lmtrain.training.train_state import TrainState, snapshot
from lmtrain.training.validation import evaluate_step, final_score

EVALUATIONS = 20
"""Evaluations in a run, at most, if `train.eval_steps` is not set."""
EVALUATION_COST = 0.1
"""The most time that evaluations may then take, as a fraction of that of training steps."""


@dataclass
class Trainer:
    """A run that is being trained. Its methods raise KeyboardInterrupt after a stop signal."""

    state: TrainState
    run_dir: Path
    budget: Budget
    clock: Clock
    meter: Meter
    monitor: Monitor
    saver: CheckpointSaver
    stop: StopSignal

    def __post_init__(self) -> None:
        # A resumed run has its checkpoint, and a new one has nothing to save.
        self._saved_step, self._saved_seconds = self.state.step, self.clock.seconds
        # Checkpoints store the step of the last evaluation, not its time: a budget in time takes the present time.
        self._evaluated_progress = self.budget.progress(self.state.evaluated, self.clock.seconds)

    def progress(self) -> float:
        """Return the fraction of the budget that is spent, in [0, 1]."""
        return self.budget.progress(self.state.step, self.clock.seconds)

    def learning_rate(self) -> float:
        """Return the learning rate of the next step."""
        return learning_rate(self.state.config.train, self.budget, self.state.step, self.clock.seconds)

    def out_of_patience(self) -> bool:
        """Whether the last `train.patience` evaluations had no new best score."""
        patience = self.state.config.train.patience
        return patience is not None and self.state.stale >= patience

    def evaluation_is_due(self) -> bool:
        """Whether the current step is to be evaluated and has not been.

        With `eval_steps` this depends only on the step. Without, an evaluation is due in each twentieth of the budget,
        as long as evaluations take no more than `EVALUATION_COST`. That is estimated, so that a resumed run is
        evaluated at the same steps: training takes three times as long per target as an evaluation.
        """
        state, train = self.state, self.state.config.train
        steps = state.step - state.evaluated
        if steps == 0:
            return False
        if train.eval_steps is not None:
            return state.step % train.eval_steps == 0
        tokens = state.store.split("valid").tokens
        scored = min(train.eval_tokens or tokens, tokens)
        is_affordable = steps >= scored / (3 * EVALUATION_COST * state.config.targets_per_step)
        return is_affordable and int(EVALUATIONS * self.progress()) > int(EVALUATIONS * self._evaluated_progress)

    def evaluate(self) -> None:
        """Evaluate the current step, and save a checkpoint with the score."""
        synchronize(self.state.device)
        started = self.clock.update()
        loss = evaluate_step(self.state, self.monitor, self.stop)
        self._save(loss)
        self.meter.leave_out(self.clock.update() - started)
        self._evaluated_progress = self.progress()

    def after_step(self, lr: float) -> None:
        """Log, evaluate and save if that is due, then check for a stop signal."""
        train, step = self.state.config.train, self.state.step
        is_logged = step == 1 or step % train.log_steps == 0
        if is_logged:
            synchronize(self.state.device)
        self.clock.update()
        check_divergence(self.state)
        progress = self.progress()
        self.monitor.advance(step, progress)
        if is_logged:
            self.monitor.record(step, "train", self.meter.metrics(lr))
        if self.evaluation_is_due():
            self.evaluate()
        elif progress < 1.0 and self.clock.seconds - self._saved_seconds > 60 * train.save_minutes:
            self._save(None)
        if progress < 1.0:
            self.stop.check()

    def finish(self) -> Outcome:
        """Evaluate the last step, wait for its checkpoint, and score the best checkpoint."""
        if self.state.evaluated != self.state.step:
            self.evaluate()
        processes = self.state.processes
        # As of the last checkpoint: saving it may have spent what was left of a budget in time.
        budget_left = self.budget.progress(self.state.step, self._saved_seconds) < 1.0
        if not processes.is_main:
            self.saver.wait()  # if its write fails, the main process, which waits for it, fails too
        processes.on_main(self.saver.wait)  # if the main process's write fails, the others end
        score, best_step = final_score(self.state, self.run_dir, self.stop)
        step, minutes = self.state.step, self.clock.seconds / 60
        stopped_early = budget_left and self.out_of_patience()
        outcome = Outcome("stopped early" if stopped_early else "finished", step, minutes, best_step, score)
        self.monitor.record(step, "final", score.figures())
        self.monitor.write_status(
            outcome.status, step=step, minutes=minutes, best_step=best_step, valid=score.summary()
        )
        return outcome

    def save_interrupted(self) -> None:
        """Save a checkpoint of the current step, unless there is one. All processes return at the same time."""
        step = self.state.step
        if self._saved_step != step:
            self._save(None)
        self.saver.wait()
        self.monitor.write_status("interrupted", step=step)
        log.warning(f"interrupted at step {step:,}; the checkpoint is saved: rerun the same command to resume")
        self.state.processes.barrier()  # torchrun may end the main process once another one has exited

    def _save(self, score: float | None) -> None:
        """Start saving a checkpoint; `score` is the validation loss at this step, or None if it is not evaluated."""
        self._saved_step = self.state.step
        metrics_bytes = self.monitor.flush()
        self._saved_seconds = seconds = self.clock.update()
        prepared = self.budget.setup_seconds
        parts = snapshot(self.state, score, prepared=prepared, seconds=seconds, metrics_bytes=metrics_bytes)
        self.saver.save(self.state.step, *parts)
