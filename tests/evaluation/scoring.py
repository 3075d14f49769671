"""Splits made of given ids, and their scores."""

from typing import Any

import numpy as np

from lmtrain.config.schema import Config
from lmtrain.data.tokens import Split
from lmtrain.evaluation.perplexity import Forward, Score, evaluate
from tests.helpers import CPU


def split_of(ids: np.ndarray) -> Split:
    """Two tokens per word, five bytes per token."""
    return Split(ids, max(1, len(ids) // 2), 5 * len(ids))


def score_of(
    forward: Forward, split: Split, *, context: int, mode: str = "causal", batch_size: int = 1, **options: Any
) -> Score:
    """`evaluate` on the CPU, with the id 0 as the first token."""
    config = Config.model_validate({"model": {"mode": mode, "context": context}, "eval": {"batch_size": batch_size}})
    return evaluate(forward, split, config, first_token=0, device=CPU, precision="fp32", **options)
