"""Perplexity from the total nats and a count, so that the batch size and the cuts between windows can't change it.

The split is one stream y_1 .. y_N, preceded by one `<eos>`. Every y_i is scored exactly once, in order: `stride` tokens
at a time, each time with as many tokens before them as fit into the model's context. So each token has at least
`context - stride` tokens of context (fewer at the start of the stream).

Shapes: B windows in a batch, T tokens in each (the context, but fewer in the first windows), S targets in each.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import groupby, islice
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lmtrain.config.schema import Config
from lmtrain.data.tokens import Split
from lmtrain.system.device import autocast
from lmtrain.system.process_group import SINGLE_PROCESS, ProcessGroup

Forward = Callable[[Tensor, Tensor], Tensor]
"""Inputs (B, T), and the targets (B, S) of the last S positions -> nats of each target."""
Advance = Callable[[int], object]
"""Called with the number of tokens of each batch."""


@dataclass(frozen=True)
class Score:
    """The total nats of a text under a model, and the counts to divide them by."""

    nats: float
    tokens: int
    words: float
    """Words between whitespace, and line ends."""
    bytes: float
    context: int
    stride: int
    unknown_share: float = 0.0
    """The fraction of the split's tokens that stand for unknown words."""
    estimated: bool = False
    """True if only part of the split was scored, so that `words` and `bytes` are prorated."""
    floor: float | None = None
    """The word perplexity of the process that generated the text, if it is known."""

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
        """exp(nats / words), where a line end is a word: comparable across tokenizers, and as published."""
        return _exp(self.nats / self.words)

    @property
    def bits_per_byte(self) -> float | None:
        """Bits per byte of UTF-8 text; None if there are unknown words, because their bytes were not predicted."""
        if self.unknown_share:
            return None
        return self.nats / math.log(2) / self.bytes

    def figures(self) -> dict[str, float]:
        """Return the figures by name, without bits per byte if it is None."""
        names = "word_perplexity", "token_perplexity", "bits_per_byte", "loss"
        return {name: value for name in names if (value := getattr(self, name)) is not None}

    def summary(self) -> dict[str, Any]:
        """Return the figures and what they are computed from, for JSON: None if a value is not finite or missing."""
        values = {"bits_per_byte": None, **self.figures(), **vars(self)}
        return {name: value if value is None or math.isfinite(value) else None for name, value in values.items()}

    @property
    def headline(self) -> str:
        """The first of `lines`, not aligned: `word perplexity 85.312 over 217,646 words and line ends`."""
        return " ".join(self.lines()[0].split())

    def lines(self) -> list[str]:
        """Return the figures as aligned lines, each with the count that it is computed over.

        Word perplexity comes first if every token is a word, otherwise last: where a word is many predictions, a model
        that has learned little has a word perplexity of many digits. The first line also has the floor and the fraction
        of unknown words.
        """
        figures, lines = self.figures(), list[str]()
        of_words = ("word_perplexity", "word", self.words, 3)
        of_bytes, of_tokens = ("bits_per_byte", "byte", self.bytes, 4), ("token_perplexity", "token", self.tokens, 3)
        order = (of_words, of_bytes) if self.tokens == self.words else (of_bytes, of_tokens, of_words)
        for name, unit, count, decimals in order:
            if name not in figures:
                continue
            line = f"{name.replace('_', ' '):16} {readable(figures[name], decimals):>11}   over {count:,.0f} {unit}s"
            line += " and line ends" if unit == "word" else ""
            if not lines and self.floor is not None:
                floor = replace(self, nats=math.log(self.floor) * self.words)  # the score of the generating process
                line += f" (floor {readable(floor.figures()[name], decimals)})"
            if not lines and self.unknown_share:
                line += f" (unknown words: {100 * self.unknown_share:.3g}%)"
            if self.estimated and count != self.tokens:
                line += f" ({unit} count estimated)"
            lines.append(line)
        return lines


def readable(value: float, decimals: int) -> str:
    """Format a figure of any size in at most 11 characters: `85.31`, `2,123,238`, `3.4e+12`."""
    if value >= 1e7:
        return f"{value:.1e}"
    return f"{value:,.0f}" if value >= 1000 else f"{value:.{decimals}f}"


def _exp(value: float) -> float:
    return math.exp(value) if value < 700 else math.inf


@torch.no_grad()
def evaluate(
    forward: Forward,
    split: Split,
    config: Config,
    *,
    stride: int,
    first_token: int,
    device: torch.device,
    precision: str,
    limit: int | None = None,
    advance: Advance = lambda _tokens: None,
    processes: ProcessGroup = SINGLE_PROCESS,
) -> Score:
    """Score the first `limit` tokens of the split (None: all) with `forward(inputs, targets) -> nats per target`.

    The targets of successive calls are the stream, row by row, so a `forward` may remember what it has scored.
    `first_token` precedes the stream as the context of its first token. Several `processes` compute a batch each at a
    time; the nats are added in the order of the batches, so that the sum does not depend on the number of processes.
    If `limit` cuts the split, words and bytes are prorated, and there is no floor.
    """
    context, ids = config.model.context, split.ids[:limit]
    count, is_part = len(ids), len(ids) < split.tokens
    stream = np.concatenate([np.array([first_token], ids.dtype), ids])
    nats = 0.0
    batches = _batches(stream, context, stride, config.eval.batch_size)
    while group := list(islice(batches, processes.world_size)):
        # A process without a batch computes the last one too: a sharded model's passes need all processes.
        inputs, targets = group[min(processes.rank, len(group) - 1)]
        with autocast(device, precision):
            losses = forward(torch.from_numpy(inputs).to(device), torch.from_numpy(targets).to(device))
        for value in processes.all_gather(float(losses.double().sum()))[: len(group)]:
            nats += value
        advance(sum(each.size for _, each in group))
    return Score(
        nats,
        count,
        split.words * count / split.tokens,
        split.bytes * count / split.tokens,
        context,
        stride,
        unknown_share=split.replaced / split.tokens,
        estimated=is_part,
        floor=None if is_part else split.floor,
    )


def _batches(stream: np.ndarray, context: int, stride: int, batch_size: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield inputs (B, T) and the targets (B, S) of their last positions. Every token but the first is a target once.

    The windows of a batch have the same shape. The first windows, which grow to the context, and a shorter last one are
    batches of their own.
    """
    last = len(stream) - 1
    ends = (min(end, last) for end in range(stride, last + stride, stride))  # the last target of each window
    for (length, count), alike in groupby(ends, lambda end: (min(end, context), end % stride or stride)):
        while batch := list(islice(alike, batch_size)):
            windows = stream[np.array(batch)[:, None] + np.arange(-length, 1)].astype(np.int64)
            yield windows[:, :-1], windows[:, -count:]
