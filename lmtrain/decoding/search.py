"""What every search shares (the step function, the hypothesis, the choice of tokens), and greedy search.

Shapes: B rows, V vocabulary.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Protocol, Self, TypeVar

import torch
from torch import Tensor

from lmtrain.errors import LmtrainError


class State(Protocol):
    """What a model remembers of the tokens that it has read, one row for each text."""

    def select(self, index: Tensor) -> Self:
        """The state whose row i is this state's row `index[i]`; `index` (B',) int64 may drop and repeat rows."""
        ...


S = TypeVar("S", bound=State)

Step = Callable[[S, Tensor], tuple[Tensor, S]]
"""`step(state, tokens (B,) int64) -> (log_probs (B, V) float32, state)`: read a token per row, predict the next one."""

IsEnd = Callable[[Sequence[int]], bool]
"""Whether a text is over, from the ids generated so far (never empty); must depend on nothing else.

Any of several end tokens: `lambda ids: ids[-1] in end_ids`.
"""


@dataclass(frozen=True)
class Hypothesis:
    """A generated text.

    `token_log_probs` are the model's own, in nats: what is banned keeps its share of the probability, so that the
    numbers of two searches can be compared, and equal those of the same ids scored by the model.
    """

    ids: tuple[int, ...]
    """The generated ids, the one that ended the text included."""
    token_log_probs: tuple[float, ...]
    """log p of each id, given the prompt and the ids before it."""
    score: float
    """What the search maximises; see there."""
    finished: bool
    """True: `is_end` held. False: cut at `max_tokens`."""


@torch.no_grad()
def greedy(
    log_probs: Tensor, state: S, step: Step[S], *, max_tokens: int, is_end: IsEnd, banned: Collection[int] = ()
) -> list[Hypothesis]:
    """Take the likeliest token at every step; of equals, the lowest id.

    `log_probs` (B, V) and `state` are the model's after reading B prompts. A row goes on until `is_end` holds for its
    ids or it has `max_tokens` of them; rows that are over leave the batch. The ids in `banned` are never taken.
    Returns a hypothesis per prompt, in their order; its score is the sum of its log-probabilities.
    Raises LmtrainError when the model's probabilities are not numbers.
    """
    check_arguments(log_probs, max_tokens, banned)
    ids: list[list[int]] = [[] for _ in range(len(log_probs))]
    scores: list[list[float]] = [[] for _ in range(len(log_probs))]
    finished = [False] * len(log_probs)
    rows = list(range(len(log_probs)))  # the prompt that each row of the state belongs to
    while True:
        best = ban(log_probs, banned).max(dim=-1)
        check_numbers(best.values)
        for row, token, log_prob in zip(rows, best.indices.tolist(), best.values.tolist(), strict=True):
            ids[row].append(token)
            scores[row].append(log_prob)
            finished[row] = is_end(ids[row])
        going = [i for i, row in enumerate(rows) if not finished[row] and len(ids[row]) < max_tokens]
        if not going:
            break
        tokens = best.indices
        if len(going) < len(rows):
            index = torch.tensor(going, device=tokens.device)
            rows, tokens, state = [rows[i] for i in going], tokens[index], state.select(index)
        log_probs, state = step(state, tokens)
    return [
        Hypothesis(tuple(row_ids), tuple(row_scores), sum(row_scores), end)
        for row_ids, row_scores, end in zip(ids, scores, finished, strict=True)
    ]


def check_arguments(log_probs: Tensor, max_tokens: int, banned: Collection[int]) -> None:
    """ValueError for a search that can't produce anything."""
    if max_tokens < 1:
        raise ValueError(f"max_tokens={max_tokens} must be at least 1")
    if len(set(banned)) >= log_probs.shape[-1]:
        raise ValueError("every token is banned")


def check_numbers(best: Tensor) -> None:
    """Refuse what a diverged model predicts. `best`: the highest log-probabilities, which are NaN where any is."""
    if best.isnan().any():
        raise LmtrainError(
            "the model's probabilities are not numbers (NaN), so there is nothing to choose from: its training "
            "diverged; use an earlier checkpoint, or train again with a lower learning rate"
        )


def ban(log_probs: Tensor, banned: Collection[int]) -> Tensor:
    """`log_probs` (B, V) with minus infinity at the banned ids; the others are left as they are, not renormalised."""
    if not banned:
        return log_probs
    return log_probs.index_fill(-1, torch.tensor(sorted(banned), device=log_probs.device), -torch.inf)
