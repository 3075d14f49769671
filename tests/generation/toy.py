"""Toy models for the searches: tables over whole histories, with a state that exposes every mistake in its use."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from lmtrain.generation.search import IsEnd, never


@dataclass
class History:
    """The toy model's state: all that each row has read. A row in the wrong place predicts something else.

    A state that was used, by a step or a selection, can't be used again.
    """

    rows: list[tuple[int, ...]]
    used: bool = False

    def select(self, index: Tensor) -> "History":
        self.use()
        return History([self.rows[i] for i in index.tolist()])

    def use(self) -> None:
        assert not self.used, "a state was used twice"
        self.used = True


class Toy:
    """A conditional model with a distribution of its own, drawn from a seed, after every history.

    `steps` counts the steps taken.
    """

    def __init__(self, vocab: int, seed: int, spread: float = 2.0):
        self.vocab, self.seed, self.spread = vocab, seed, spread
        self.steps = 0
        self.known: dict[tuple[int, ...], Tensor] = {}

    def __repr__(self) -> str:
        return f"Toy({self.vocab}, seed={self.seed}, spread={self.spread})"

    def predict(self, history: Sequence[int]) -> Tensor:
        """(V,) float32."""
        key = tuple(history)
        if key not in self.known:
            logits = np.random.default_rng([self.seed, *key]).normal(0.0, self.spread, self.vocab)
            self.known[key] = torch.log_softmax(torch.tensor(logits), dim=0).float()
        return self.known[key]

    def start(self, prompts: Sequence[Sequence[int]]) -> tuple[Tensor, History]:
        rows = [tuple(prompt) for prompt in prompts]
        return torch.stack([self.predict(row) for row in rows]), History(rows)

    def step(self, state: History, tokens: Tensor) -> tuple[Tensor, History]:
        state.use()
        self.steps += 1
        rows = [(*row, token) for row, token in zip(state.rows, tokens.tolist(), strict=True)]
        return torch.stack([self.predict(row) for row in rows]), History(rows)

    def score_tokens(self, prompt: Sequence[int], ids: Sequence[int]) -> list[float]:
        """log p of each id after the prompt and the ids before it."""
        return [float(self.predict((*prompt, *ids[:i]))[token]) for i, token in enumerate(ids)]


def ends_with(*tokens: int) -> IsEnd:
    return lambda ids: ids[-1] in tokens


def second_pair(ids: Sequence[int]) -> bool:
    """A rule over the whole text: it ends when it holds two equal neighbors."""
    return any(a == b for a, b in itertools.pairwise(ids))


ENDS: list[IsEnd] = [never, ends_with(0), ends_with(1, 2), ends_with(0, 1, 2, 3), second_pair]

PROMPTS: list[tuple[int, ...]] = [(1,), (0, 1), (), (1,), (1, 0, 1)]
"""Of ids that every model has; two are equal."""
