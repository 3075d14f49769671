"""Toy models for the searches: tables over whole histories, with a state that shows every mistake in its use."""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor


@dataclass
class History:
    """The toy model's memory: all that each row has read. A row in the wrong place predicts something else.

    A state that was used up, by a step or a selection, refuses to be used again. `broken`: it ignores selections.
    """

    rows: list[tuple[int, ...]]
    broken: bool = False
    used: bool = False

    def select(self, index: Tensor) -> "History":
        self.use()
        return History([self.rows[0 if self.broken else i] for i in index.tolist()], self.broken)

    def use(self) -> None:
        assert not self.used, "a state was used twice"
        self.used = True


class Toy:
    """A conditional model with a distribution of its own, drawn from a seed, after every history.

    `steps` counts the steps taken. `grid`: log-probabilities are multiples of it (so they no longer sum to one), which
    makes ties frequent; sums of its multiples are exact where it is a power of two. `gaps`: how often an id is
    impossible, so that sometimes all are.
    """

    def __init__(self, vocab: int, seed: int, spread: float = 2.0, grid: float = 0.0, gaps: float = 0.0):
        self.vocab, self.seed, self.spread, self.grid, self.gaps = vocab, seed, spread, grid, gaps
        self.steps = 0
        self.known: dict[tuple[int, ...], Tensor] = {}

    def __repr__(self) -> str:
        return f"Toy({self.vocab}, seed={self.seed}, spread={self.spread}, grid={self.grid}, gaps={self.gaps})"

    def predict(self, history: Sequence[int]) -> Tensor:
        """(V,) float32."""
        key = tuple(history)
        if key not in self.known:
            rng = np.random.default_rng([self.seed, *key])
            logits = rng.normal(0.0, self.spread, self.vocab)
            log_probs = torch.log_softmax(torch.tensor(logits), dim=0)
            if self.grid:
                log_probs = (log_probs / self.grid).round() * self.grid
            if self.gaps:
                log_probs[torch.from_numpy(rng.random(self.vocab) < self.gaps)] = -torch.inf
            self.known[key] = log_probs.float()
        return self.known[key]

    def start(self, prompts: Sequence[Sequence[int]], broken: bool = False) -> tuple[Tensor, History]:
        rows = [tuple(prompt) for prompt in prompts]
        return torch.stack([self.predict(row) for row in rows]), History(rows, broken)

    def step(self, state: History, tokens: Tensor) -> tuple[Tensor, History]:
        state.use()
        self.steps += 1
        rows = [(*row, token) for row, token in zip(state.rows, tokens.tolist(), strict=True)]
        return torch.stack([self.predict(row) for row in rows]), History(rows, state.broken)

    def score_tokens(self, prompt: Sequence[int], ids: Sequence[int]) -> list[float]:
        """log p of each id after the prompt and the ids before it."""
        return [float(self.predict((*prompt, *ids[:i]))[token]) for i, token in enumerate(ids)]


def second_pair(ids: Sequence[int]) -> bool:
    """A rule over the whole text: it is over when two equal neighbours have been seen."""
    return any(a == b for a, b in itertools.pairwise(ids))


ENDS: list[tuple[frozenset[int], Callable[[Sequence[int]], bool] | None]] = [
    (frozenset(), None),
    (frozenset({0}), None),
    (frozenset({1, 2}), None),
    (frozenset({0, 1, 2, 3}), None),
    (frozenset(), second_pair),
    (frozenset({0}), second_pair),
]
"""`end_ids` and `is_end` of some rules."""

PROMPTS: list[tuple[int, ...]] = [(1,), (0, 1), (), (1,), (1, 0, 1)]
"""Of ids that every model has; two are equal."""
