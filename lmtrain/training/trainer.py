"""The trainer: the state of a run with everything that accompanies it, what happens between steps, and the end."""

from dataclasses import dataclass
from pathlib import Path

from lmtrain.config.schema import Config
from lmtrain.evaluation.perplexity import Score
from lmtrain.system.signals import StopSignal
from lmtrain.training.budget import Budget, evaluation_due
from lmtrain.training.checkpoint_info import Counters
from lmtrain.training.continuing import schedule_of
from lmtrain.training.meter import Clock, Meter
from lmtrain.training.monitor import Monitor
from lmtrain.training.optim import learning_rate
from lmtrain.training.saving import CheckpointSaver
from lmtrain.training.train_state import TrainState, snapshot
from lmtrain.training.validation import evaluate_and_show, final_score


@dataclass(frozen=True)
class Outcome:
    """How a run ended."""

    status: str
    """finished, stopped early, or interrupted."""
    step: int
    minutes: float
    score: Score | None
    """The best checkpoint on the whole validation split; None if interrupted."""
    best_step: int


def out_of_patience(config: Config, counters: Counters) -> bool:
    """Whether `train.patience` evaluations in a row were no new best."""
    return config.train.patience is not None and counters.stale >= config.train.patience


@dataclass
class Trainer:
    """A run that is being trained. `evaluate`, `after_step` and `finish` raise Interrupted after a stop signal."""

    state: TrainState
    run_dir: Path
    budget: Budget
    clock: Clock
    monitor: Monitor
    saver: CheckpointSaver
    stop: StopSignal

    def __post_init__(self) -> None:
        self._meter = Meter(self.state)
        self._saved_step = self.state.counters.step  # a resumed run's checkpoint exists
        self._evaluation_seconds = 0.0
        self._started = self._saved_seconds = self.clock.seconds()
        # With a budget in time, the progress at the last evaluation is not known here, and the present one serves.
        self._evaluated_progress = self.budget.progress(self.state.counters.evaluated, self.clock.seconds())

    def progress(self) -> float:
        """The fraction of the budget that is spent, in [0, 1]."""
        return self.budget.progress(self.state.counters.step, self.clock.seconds())

    def learning_rate(self) -> float:
        """The learning rate of the next step."""
        return learning_rate(self.state.config.train, self.budget, self.state.counters.step, self.clock.seconds())

    def evaluation_is_due(self) -> bool:
        """Whether this step is to be evaluated and has not been."""
        counters, valid = self.state.counters, self.state.store.split("valid")
        step_seconds = self.clock.seconds() - self._started - self._evaluation_seconds
        cost = self._evaluation_seconds / step_seconds if step_seconds > 0 else 0.0
        return evaluation_due(
            self.state.config, valid.tokens, counters, self.progress(), self._evaluated_progress, cost
        )

    def evaluate(self) -> None:
        """Evaluate, and save a checkpoint with the score."""
        self.clock.update()
        started = self.clock.seconds()
        with self._meter.paused():
            loss = evaluate_and_show(self.state, self.monitor, self.stop)
            self._save(loss)
        self.clock.update()
        self._evaluation_seconds += self.clock.seconds() - started
        self._evaluated_progress = self.progress()

    def after_step(self, lr: float) -> None:
        """Log, evaluate and save when that is due, then check for a stop signal."""
        train, step = self.state.config.train, self.state.counters.step
        self.clock.update()
        self._meter.count_step()
        self.saver.check()
        progress = self.progress()
        self.monitor.advance(step, progress)
        if step == 1 or step % train.log_steps == 0:
            self.monitor.train(step, self._meter.metrics(lr, self.clock.seconds()))
        if self.evaluation_is_due():
            self.evaluate()
        elif progress < 1.0:
            unsaved_seconds = self.clock.seconds() - self._saved_seconds
            if step == self.saver.before_decay or unsaved_seconds > 60 * train.save_minutes:
                self._save(None)
        if progress < 1.0:
            self.stop.check()

    def finish(self) -> Outcome:
        """Evaluate the last step, wait for its checkpoint, and score the best checkpoint."""
        if self.state.counters.evaluated != self.state.counters.step:
            self.evaluate()
        self.saver.wait()
        minutes, step = self.clock.seconds() / 60, self.state.counters.step
        score, best_step = final_score(self.state, self.run_dir, self.monitor, self.stop)
        self.monitor.final(score.figures(), score.lines())
        self.monitor.state("finished", step=step, minutes=minutes, best_step=best_step, valid=score.summary())
        status = "stopped early" if out_of_patience(self.state.config, self.state.counters) else "finished"
        return Outcome(status, step, minutes, score, best_step)

    def save_interrupted(self) -> Outcome:
        """Save a checkpoint of the current step, unless an evaluation has saved one, with its score."""
        step = self.state.counters.step
        if self._saved_step != step:
            self._save(None)
        self.saver.wait()
        self.monitor.state("interrupted", step=step, signal=self.stop.name)
        return Outcome("interrupted", step, self.clock.seconds() / 60, None, self.state.counters.best_step)

    def _save(self, score: float | None) -> None:
        self._saved_step = self.state.counters.step
        metrics_bytes = self.monitor.flush()
        self.clock.update()
        self._saved_seconds = self.clock.seconds()
        tensors, manifest = snapshot(
            self.state,
            score,
            seconds=self._saved_seconds,
            setup_seconds=self.budget.setup_seconds,
            metrics_bytes=metrics_bytes,
            schedule=schedule_of(self.state.config.train, self.budget),
        )
        self.saver.save(self.state.counters.step, tensors, manifest)
