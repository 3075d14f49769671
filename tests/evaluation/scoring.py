"""Splits made of given ids, and their scores."""

import numpy as np
import torch

from lmtrain.data.tokens import Split
from lmtrain.evaluation.perplexity import Forward, Score, evaluate

CPU = torch.device("cpu")


def split_of(ids: np.ndarray) -> Split:
    """Two tokens per word, five bytes per token."""
    return Split(ids, max(1, len(ids) // 2), 5 * len(ids))


def score_of(
    forward: Forward,
    split: Split,
    *,
    context: int,
    stride: int,
    batch_size: int = 1,
    mode: str = "causal",
    limit: int | None = None,
) -> Score:
    """`evaluate` on the CPU, with the id 0 as the first token."""
    return evaluate(
        forward,
        split,
        mode=mode,
        context=context,
        stride=stride,
        batch_size=batch_size,
        first_token=0,
        device=CPU,
        precision="fp32",
        limit=limit,
    )
