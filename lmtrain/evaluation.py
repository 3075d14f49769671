"""Perplexity by sums: total nats over a stated count, so that batch size and window cuts can't change the number.

The split is one stream y_1 .. y_N, preceded by one `<eos>`, and every y_i is scored exactly once. A window of the
model's context slides over it by `stride` tokens; only the tokens that the window before did not reach are scored, so
each has at least `context - stride` tokens of context (less at the very start of the stream).

B = windows in a batch, C = context length, N = tokens in the split
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lmtrain.data.tokens import Split
from lmtrain.errors import LmtrainError
from lmtrain.runtime import autocast

Forward = Callable[[Tensor, Tensor], Tensor]
Advance = Callable[[int], object]


@dataclass(frozen=True)
class Score:
    """What a model paid for a stretch of text, in nats, and the counts to divide it by."""

    nats: float
    tokens: int
    words: float
    bytes: float
    context: int
    stride: int

    @property
    def loss(self) -> float:
        """Nats per token."""
        return self.nats / self.tokens

    @property
    def token_perplexity(self) -> float:
        """exp(nats / tokens): depends on the tokenizer."""
        return _exp(self.loss)

    @property
    def word_perplexity(self) -> float:
        """exp(nats / words), a line end counting as a word: comparable across tokenizers, and as published."""
        return _exp(self.nats / self.words)

    @property
    def bits_per_byte(self) -> float:
        """Bits per byte of UTF-8 text."""
        return self.nats / math.log(2) / self.bytes

    def figures(self) -> dict[str, float]:
        """Every figure under its own name."""
        return {
            "word_perplexity": self.word_perplexity,
            "token_perplexity": self.token_perplexity,
            "bits_per_byte": self.bits_per_byte,
            "loss": self.loss,
        }

    def summary(self) -> dict[str, Any]:
        """The figures and all that they were made from."""
        return {
            **self.figures(),
            "nats": self.nats,
            "tokens": self.tokens,
            "words": self.words,
            "bytes": self.bytes,
            "context": self.context,
            "stride": self.stride,
        }


def _exp(value: float) -> float:
    return math.exp(value) if value < 700 else math.inf


def default_stride(mode: str, context: int) -> int:
    """A quarter of the context, or 1 for a windowed model, which predicts one token per window."""
    return 1 if mode == "windowed" else max(1, context // 4)


@torch.no_grad()
def evaluate(
    forward: Forward,
    split: Split,
    *,
    mode: str,
    context: int,
    stride: int,
    batch_size: int,
    first_token: int,
    device: torch.device,
    precision: str,
    limit: int | None = None,
    advance: Advance | None = None,
) -> Score:
    """Score the split (its first `limit` tokens; None = all) with `forward(inputs, targets) -> nats per target`.

    `first_token` stands before the stream as the context of its first token. `advance` hears of each batch's tokens.
    Word and byte counts of a limited stretch are the split's own, in proportion. Raises LmtrainError on an empty split.
    """
    count = split.tokens if limit is None else min(limit, split.tokens)
    if count < 1:
        raise LmtrainError("the split has no tokens: there is nothing to evaluate")
    stream = np.concatenate([[first_token], split.ids[:count]]).astype(np.int64)
    batches = (
        _windowed(stream, context, batch_size) if mode == "windowed" else _causal(stream, context, stride, batch_size)
    )
    nats = 0.0
    for inputs, targets, scored in batches:
        with autocast(device, precision):
            losses = forward(torch.from_numpy(inputs).to(device), torch.from_numpy(targets).to(device))
        nats += float(losses.double().cpu()[torch.from_numpy(scored)].sum())
        if advance is not None:
            advance(int(scored.sum()))
    share = count / split.tokens
    return Score(nats, count, split.words * share, split.bytes * share, context, stride)


Batch = tuple[np.ndarray, np.ndarray, np.ndarray]
"""Inputs, targets, and which targets to score."""


def _causal(stream: np.ndarray, context: int, stride: int, batch_size: int) -> Iterator[Batch]:
    """Full windows of inputs (B, C), targets (B, C), scored (B, C); each target is scored in one window only."""
    count = len(stream) - 1
    length = min(context, count)
    starts = [*range(0, count - length, stride), count - length]
    begin = np.array([0, *(start + length for start in starts[:-1])])  # the first target that no window before reached
    windows = np.lib.stride_tricks.sliding_window_view(stream, length + 1)
    for first in range(0, len(starts), batch_size):
        chosen = np.array(starts[first : first + batch_size])
        batch = windows[chosen]
        scored = chosen[:, None] + np.arange(length) >= begin[first : first + batch_size, None]
        yield batch[:, :-1].copy(), batch[:, 1:].copy(), scored


def _windowed(stream: np.ndarray, context: int, batch_size: int) -> Iterator[Batch]:
    """Inputs (B, C) and the one target (B,) after each; the first targets have shorter windows, one to a batch."""
    count = len(stream) - 1
    for length in range(1, min(context, count + 1)):
        yield stream[None, :length].copy(), stream[length : length + 1].copy(), np.ones(1, dtype=bool)
    if count < context:
        return
    windows = np.lib.stride_tricks.sliding_window_view(stream, context + 1)
    for first in range(0, len(windows), batch_size):
        batch = windows[first : first + batch_size]
        yield batch[:, :-1].copy(), batch[:, -1].copy(), np.ones(len(batch), dtype=bool)
