"""What greedy search, sampling, and beam search share: the type of the model's step function, `Hypothesis`, `block`.

Shapes: R rows, V vocabulary.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Protocol, Self, TypeVar

import torch
from torch import Tensor

from lmtrain.errors import LmtrainError


class SearchState(Protocol):
    """A model's state after the tokens that it has read, one row per text."""

    def select(self, index: Tensor) -> Self:
        """Return a state whose row i is this state's row `index[i]`; `index` (R',) int64 may omit and repeat rows.

        This state must not be used afterwards: the result may share its memory.
        """
        ...


S = TypeVar("S", bound=SearchState)

Step = Callable[[S, Tensor], tuple[Tensor, S]]
"""`step(state, tokens (R,) int64) -> (log_probs (R, V) float32, state)`: read a token per row, predict the next one.

The argument `state` must not be used afterwards; the search may overwrite the log-probabilities.
"""

IsEnd = Callable[[Sequence[int]], bool]
"""Whether a text has ended, from the ids generated so far (never empty); a pure function."""


def never(_ids: Sequence[int]) -> bool:
    """Return False: no text ends before `max_tokens`."""
    return False


@dataclass(frozen=True)
class Hypothesis:
    """A generated text.

    `token_log_probs` are the model's own, in nats. Blocked tokens keep their probability, so that the log-probabilities
    equal those of the same ids scored by the model, and two searches can be compared.
    """

    ids: tuple[int, ...]
    """The generated ids, including the one that ended the text."""
    token_log_probs: tuple[float, ...]
    """log p of each id, given the prompt and the ids before it."""
    score: float
    """What texts are ranked by: the sum of `token_log_probs` / length ** length_penalty."""


def block(log_probs: Tensor, blocked: Collection[int]) -> Tensor:
    """Overwrite the entries of the `blocked` ids in `log_probs` (R, V) with minus infinity, and return it.

    Raises LmtrainError if the model's probabilities are NaN.
    """
    if bool(log_probs.sum().isnan()):  # one reduction suffices: no log-probability is plus infinity
        raise LmtrainError(
            "the model's probabilities are NaN, because its training diverged: use an earlier checkpoint, or train "
            "again with a lower train.lr"
        )
    if blocked:
        log_probs.index_fill_(-1, torch.tensor(sorted(blocked), device=log_probs.device), -torch.inf)
    return log_probs
