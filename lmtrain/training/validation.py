"""Evaluation while training: the score that ranks one step against another, and the final one."""

import math
from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from lmtrain.data.tokens import TokenStore
from lmtrain.errors import LmtrainError
from lmtrain.evaluation.perplexity import Score, default_stride, evaluate
from lmtrain.storage import checkpoint
from lmtrain.storage.tensor_files import Stored
from lmtrain.system.distributed import Workers
from lmtrain.system.runtime import Interrupts
from lmtrain.training import samples
from lmtrain.training.monitor import Monitor
from lmtrain.training.state import Training, averaged_weights, other_weights

GROUPS = ("model", "ema")
"""What of a checkpoint is scored."""


def validate(training: Training, store: TokenStore, stride: int, limit: int | None, asked: Interrupts) -> Score:
    """Score the validation split with the model as it stands. Raises Interrupted when a signal comes."""
    config = training.config
    training.model.eval()
    try:
        return evaluate(
            training.model,
            store.split("valid"),
            mode=config.model.mode,
            context=config.model.context,
            stride=stride,
            batch_size=config.eval.batch_size,
            first_token=store.tokenizer.eos_id,
            device=training.device,
            precision=training.precision,
            limit=limit,
            advance=asked.check,
            workers=training.parallel.workers,
        )
    finally:
        training.model.train()


def evaluate_and_show(training: Training, store: TokenStore, monitor: Monitor, asked: Interrupts) -> float:
    """Evaluate, judge, and show samples; returns the score (nats per token, of the averaged weights if kept).

    Raises Interrupted, having judged nothing, when a signal comes before there is a score.

    Windows lie side by side here (stride = context), the cheapest way to rank one step against another.
    """
    config, counters = training.config, training.counters
    stride = 1 if config.model.mode == "windowed" else config.model.context
    metrics = {}
    if training.ema is not None:
        metrics["raw_loss"] = validate(training, store, stride, config.train.eval_tokens, asked).loss
    with averaged_weights(training):
        score = validate(training, store, stride, config.train.eval_tokens, asked)
        if not math.isfinite(score.loss):
            raise LmtrainError(
                f"the validation loss at step {counters.step} is not finite: lower train.lr, or raise train.warmup"
            )
        if training.parallel.kind != "fsdp":  # a model in pieces reads whole windows, and can't go on from a state
            samples.show(training.model, store, config, counters.step, monitor)
    counters.evaluated = counters.step
    if counters.best is None or score.loss < counters.best:
        counters.best, counters.best_step, counters.stale = score.loss, counters.step, 0
    else:
        counters.stale += 1
    metrics |= {"loss": score.loss, "perplexity": score.token_perplexity, "word_perplexity": score.word_perplexity}
    monitor.evaluation(counters.step, metrics, score.remark)
    return score.loss


def final_score(
    training: Training, store: TokenStore, run_dir: Path, monitor: Monitor, asked: Interrupts
) -> tuple[Score, int]:
    """The best checkpoint on the whole validation split, with overlapping windows, and the step that it is of."""
    config, step = training.config, training.counters.step
    weights: Mapping[str, Tensor | Stored] | None = training.ema
    if training.counters.best_step != step:
        found = _best(run_dir, training.parallel.workers)
        weights, step = found.tensors["model" if training.ema is None else "ema"], found.info["step"]
    stride = config.eval.stride or default_stride(config.model.mode, config.model.context)
    monitor.note(f"scoring the best checkpoint (step {step:,}) on the validation split")
    with other_weights(training.model, weights):
        return validate(training, store, stride, None, asked), step


def _best(run_dir: Path, workers: Workers) -> checkpoint.Checkpoint:
    """The best checkpoint by the leader's choice, which alone knows that all are written; it compares the hashes."""

    def find() -> str:
        best = checkpoint.choose(run_dir, "best")
        try:
            checkpoint.load(best, GROUPS)
        except LmtrainError as error:
            raise LmtrainError(f"{error}: move {best} away, and the best of the others is scored") from error
        return best.name.removeprefix("step-")

    return checkpoint.load(checkpoint.choose(run_dir, workers.from_leader(find)), GROUPS, hashed=False)
