"""Evaluation during training: the score of a step, samples, and the final score of the best checkpoint."""

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from lmtrain.errors import LmtrainError
from lmtrain.evaluation.perplexity import Score, evaluate, readable
from lmtrain.generation.complete import complete
from lmtrain.generation.options import SAMPLED
from lmtrain.model.language_model import LanguageModel
from lmtrain.storage import run_checkpoints
from lmtrain.storage.checkpoint import load
from lmtrain.storage.tensor_files import LazyTensor
from lmtrain.system.machine import explain_out_of_memory
from lmtrain.system.messages import log
from lmtrain.system.signals import StopSignal
from lmtrain.training.monitor import Monitor, escape_markdown, table
from lmtrain.training.sharding import copy_all
from lmtrain.training.train_state import TrainState

POOL_TOKENS = 8
"""The validation tokens whose pooling weights are shown."""


def validate(state: TrainState, stride: int, limit: int | None, stop: StopSignal) -> Score:
    """Score the validation split, or its first `limit` tokens. Raises KeyboardInterrupt after a stop signal."""
    with explain_out_of_memory("lower eval.batch_size"):
        return evaluate(
            state.model,
            state.store.split("valid"),
            state.config,
            stride=stride,
            first_token=state.store.tokenizer.eos_id,
            device=state.device,
            precision=state.precision,
            limit=limit,
            advance=lambda _tokens: stop.check(),
            processes=state.processes,
        )


def evaluate_step(state: TrainState, monitor: Monitor, stop: StopSignal) -> float:
    """Evaluate the current step, update the best score, log, and show samples. Return the loss in nats per token.

    The EMA weights are evaluated if there are any. A causal model's windows do not overlap (stride = context),
    which is the cheapest way to compare steps.
    Raises KeyboardInterrupt, with the state unchanged, if a stop signal arrives before the evaluation is done.
    """
    config = state.config
    stride = config.model.targets
    with evaluating(state.model, state.ema):
        score = validate(state, stride, config.train.eval_tokens, stop)
        if not math.isfinite(score.loss):
            raise LmtrainError(
                f"the validation loss at step {state.step} is not finite: lower train.lr, or raise train.warmup"
            )
        if state.strategy != "fsdp":  # a sharded model can't decode from a cached state
            show_samples(state, monitor)
    state.evaluated = state.step
    if state.best is None or score.loss < state.best:
        state.best, state.stale = score.loss, 0
    else:
        state.stale += 1
    monitor.record(state.step, "valid", score.figures())
    log.info(f"step {state.step:,} valid:  loss {readable(score.loss, 3)}  {score.headline}")
    return score.loss


@torch.no_grad()
def show_samples(state: TrainState, monitor: Monitor) -> None:
    """Show a sample for each of `train.sample_prompts`, and the pooling weights of the first validation tokens."""
    config, model, store, step = state.config, state.model, state.store, state.step
    options = replace(SAMPLED, max_tokens=config.train.sample_tokens)
    for sample in complete(model, store.tokenizer, config.train.sample_prompts, options):
        monitor.text(step, f"sample: {sample.prompt}", escape_markdown(sample.prompt + sample.completions[0].text))
    ids = store.split("valid").ids[: min(POOL_TOKENS, config.model.context)]
    weights = model.pool_weights(torch.tensor(ids.astype("int64"), device=state.device)[None]).cpu().numpy()
    monitor.text(step, "pooling weights", table([store.tokenizer.token(int(token)) for token in ids], weights))


def final_score(state: TrainState, run_dir: Path, stop: StopSignal) -> tuple[Score, int]:
    """Score the best checkpoint on the whole validation split, with overlapping windows. Return its score and step.

    The main process, which knows that all checkpoints are written, chooses and verifies it.
    """
    folder = state.processes.on_main(lambda: str(run_checkpoints.load_chosen(run_dir, None).folder))
    best = load(Path(folder), only_weights=True, verify_hashes=False)
    step, stride = int(best.info["step"]), state.config.stride
    log.info(f"scoring the best checkpoint (step {step:,}) on the whole validation split, with stride {stride}")
    with evaluating(state.model, best.tensors["ema" if state.ema else "model"]):
        return validate(state, stride, None, stop), step


@contextmanager
def evaluating(model: LanguageModel, weights: Mapping[str, Tensor | LazyTensor]) -> Iterator[None]:
    """Put the model in evaluation mode, with these weights in place of its own, inside the block."""
    replaced = {name: value for name, value in model.named_parameters() if name in weights}
    original = {name: value.detach().clone() for name, value in replaced.items()}
    model.eval()
    try:
        copy_all(weights, replaced)
        yield
    finally:
        model.train()
        copy_all(original, replaced)
