"""An open run: the state of training together with everything that accompanies it, and what happens between steps."""

from dataclasses import asdict, dataclass
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
from lmtrain.training.saving import Saver
from lmtrain.training.state import Training, snapshot
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
class OpenRun:
    """A run that is being trained. `evaluate`, `after_step` and `finish` raise Interrupted after a stop signal."""

    training: Training
    run_dir: Path
    budget: Budget
    clock: Clock
    monitor: Monitor
    saver: Saver
    stop: StopSignal

    def __post_init__(self) -> None:
        self._meter = Meter(self.training)
        self._saved_step = self.training.counters.step  # a resumed run's checkpoint exists
        self._evaluation_seconds = 0.0
        self._started = self._saved_seconds = self.clock.read()
        # With a budget in time, the progress at the last evaluation is not known here, and the present one serves.
        self._evaluated_progress = self.budget.progress(self.training.counters.evaluated, self.clock.read())

    def progress(self) -> float:
        """The fraction of the budget that is spent, in [0, 1]."""
        return self.budget.progress(self.training.counters.step, self.clock.read())

    def learning_rate(self) -> float:
        """The learning rate of the next step."""
        return learning_rate(self.training.config.train, self.budget, self.training.counters.step, self.clock.read())

    def evaluation_is_due(self) -> bool:
        """Whether this step is to be evaluated and has not been; at the start: a signal may have stopped it there."""
        counters, valid = self.training.counters, self.training.store.split("valid")
        step_seconds = self.clock.read() - self._started - self._evaluation_seconds
        cost = self._evaluation_seconds / step_seconds if step_seconds > 0 else 0.0
        return evaluation_due(
            self.training.config, valid.tokens, counters, self.progress(), self._evaluated_progress, cost
        )

    def evaluate(self) -> None:
        """Evaluate, and save a checkpoint with the score."""
        self.clock.tick()
        started = self.clock.read()
        with self._meter.paused():
            self._save(evaluate_and_show(self.training, self.monitor, self.stop))
        self.clock.tick()
        self._evaluation_seconds += self.clock.read() - started
        self._evaluated_progress = self.progress()

    def after_step(self, lr: float) -> None:
        """Log, evaluate and save when that is due, then check for a stop signal."""
        config, step = self.training.config.train, self.training.counters.step
        self.clock.tick()
        self._meter.count_step()
        self.saver.check()
        progress = self.progress()
        self.monitor.advance(step, progress)
        if step == 1 or step % config.log_steps == 0:
            self.monitor.train(step, self._meter.metrics(lr, self.clock.read()))
        if self.evaluation_is_due():
            self.evaluate()
        elif progress < 1.0:
            unsaved_seconds = self.clock.read() - self._saved_seconds
            if step == self.saver.before_decay or unsaved_seconds > 60 * config.save_minutes:
                self._save(None)
        if progress < 1.0:
            self.stop.check()

    def finish(self) -> Outcome:
        """Evaluate the last step, wait for its checkpoint, and score the best checkpoint."""
        if self.training.counters.evaluated != self.training.counters.step:
            self.evaluate()
        self.saver.wait()
        minutes, step = self.clock.read() / 60, self.training.counters.step
        score, best_step = final_score(self.training, self.run_dir, self.monitor, self.stop)
        self.monitor.final(score.figures(), score.lines())
        self.monitor.state("finished", step=step, minutes=minutes, best_step=best_step, valid=score.summary())
        status = "stopped early" if out_of_patience(self.training.config, self.training.counters) else "finished"
        return Outcome(status, step, minutes, score, best_step)

    def save_interrupted(self) -> Outcome:
        """Save a checkpoint of the current step, unless an evaluation has saved one, with its score."""
        step = self.training.counters.step
        if self._saved_step != step:
            self._save(None)
        self.saver.wait()
        self.monitor.state("interrupted", step=step, signal=self.stop.name)
        return Outcome("interrupted", step, self.clock.read() / 60, None, self.training.counters.best_step)

    def _save(self, score: float | None) -> None:
        self._saved_step = self.training.counters.step
        metrics_bytes = self.monitor.flush()
        self.clock.tick()
        self._saved_seconds = self.clock.read()
        circumstances = {
            "seconds": self._saved_seconds,
            "prepared": self.budget.prepared,
            "metrics_bytes": metrics_bytes,
            "schedule": asdict(schedule_of(self.training.config.train, self.budget)),
        }
        self.saver.save(self.training.counters.step, *snapshot(self.training, score, circumstances))
