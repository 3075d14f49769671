"""What every search shares: the step function, the rules that a text is made by, and the hypothesis.

Shapes: R rows, V vocabulary.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Protocol, Self, TypeVar

import torch
from torch import Tensor

from lmtrain.errors import LmtrainError


class State(Protocol):
    """What a model remembers of the tokens that it has read, one row for each text."""

    def select(self, index: Tensor) -> Self:
        """The state whose row i is this state's row `index[i]`; `index` (R',) int64 may drop and repeat rows.

        This state is used up: what is returned may lie in its memory.
        """
        ...


S = TypeVar("S", bound=State)

Step = Callable[[S, Tensor], tuple[Tensor, S]]
"""`step(state, tokens (R,) int64) -> (log_probs (R, V) float32, state)`: read a token per row, predict the next one.

The state that it is given is used up, and what it returns is the search's, to write on.
"""

IsEnd = Callable[[Sequence[int]], bool]
"""Whether a text is over, from the ids generated so far (never empty); must depend on nothing else."""


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
    """True: the text came to an end. False: cut at `max_tokens`, or nothing was allowed to follow."""


@dataclass(frozen=True)
class Rules:
    """What may be generated, and when a text is over.

    A text is over with one of `end_ids`, or when `is_end` holds of it. It comes to no end with fewer than `min_tokens`
    ids, the one that ends it included: until then the `end_ids` are not produced, and `is_end` is not asked. It is cut
    at `max_tokens`, or where nothing is allowed to follow, however short it is.

    The ids in `banned` are never produced. To the log-probability of an id in `bias`, its number (nats; minus infinity
    bans) is added where a search chooses. With `no_repeat` = n > 0 no n-gram of prompt and text together comes a second
    time (Paulus et al., 2018).

    Raises ValueError for rules that nothing can meet.
    """

    max_tokens: int
    min_tokens: int = 0
    end_ids: frozenset[int] = frozenset()
    is_end: IsEnd | None = None
    banned: frozenset[int] = frozenset()
    bias: Mapping[int, float] = field(default_factory=dict)
    no_repeat: int = 0

    def __post_init__(self) -> None:
        if self.max_tokens < 1:
            raise ValueError(f"max_tokens={self.max_tokens} must be at least 1")
        if not 0 <= self.min_tokens <= self.max_tokens:
            raise ValueError(f"min_tokens={self.min_tokens} must lie between 0 and max_tokens={self.max_tokens}")
        if self.no_repeat < 0:
            raise ValueError(f"no_repeat={self.no_repeat} must be at least 0")
        for token, number in self.bias.items():
            if not (number == -torch.inf or -1e6 <= number <= 1e6):
                raise ValueError(f"bias={number} of token {token} must be -inf or lie between -1e6 and 1e6")

    def scores(self, log_probs: Tensor, prompts: Sequence[Sequence[int]], texts: Sequence[Sequence[int]]) -> Tensor:
        """What to choose the next token by: `log_probs` (R, V) plus `bias`, minus infinity for what is not allowed.

        `prompts` and `texts` are each row's; the texts are equally long. `log_probs` may be overwritten, with minus
        infinity alone. Raises LmtrainError where the model's probabilities are not numbers, and ValueError where every
        token is banned.
        """
        if bool(log_probs.sum().isnan()):  # the cheapest look at all of them: no log-probability is plus infinity
            raise LmtrainError(
                "the model's probabilities are not numbers (NaN), so there is nothing to choose from: its training "
                "diverged; use an earlier checkpoint, or train again with a lower learning rate"
            )
        banned = self._banned_early if self.min_tokens and len(texts[0]) + 1 < self.min_tokens else self._banned
        if len(banned) >= log_probs.shape[-1]:
            raise ValueError("every token is banned")
        if len(banned):
            log_probs.index_fill_(-1, banned.to(log_probs.device), -torch.inf)
        if self.no_repeat:
            pairs = [
                (row, token)
                for row, (prompt, text) in enumerate(zip(prompts, texts, strict=True))
                for token in repeats([*prompt, *text], self.no_repeat)
            ]
            if pairs:
                rows, tokens = torch.tensor(pairs, device=log_probs.device).unbind(-1)
                log_probs[rows, tokens] = -torch.inf
        if not self.bias:
            return log_probs
        ids = torch.tensor(list(self.bias), device=log_probs.device)
        added = torch.tensor(list(self.bias.values()), dtype=log_probs.dtype, device=log_probs.device)
        return log_probs.index_add(-1, ids, added.expand(len(log_probs), -1))

    def over(self, text: Sequence[int]) -> bool:
        """Whether the text, not empty, has come to its end (it may also have come to `max_tokens`)."""
        if len(text) < self.min_tokens:
            return False
        return text[-1] in self.end_ids or (self.is_end is not None and self.is_end(text))

    @cached_property
    def _banned(self) -> Tensor:
        return torch.tensor(sorted(self.banned), dtype=torch.long)

    @cached_property
    def _banned_early(self) -> Tensor:
        """What may not be produced while a text is too short to end."""
        return torch.tensor(sorted(self.banned | self.end_ids), dtype=torch.long)


def repeats(ids: list[int], n: int) -> set[int]:
    """The tokens that would make, after `ids`, an n-gram that `ids` already holds.

    Searches ask after every token, so it leaps from one place of the last id to the next with `list.index`, and
    compares the ids before it there alone.
    """
    if n == 1:
        return set(ids)
    found: set[int] = set()
    if len(ids) < n:
        return found
    last = ids[1 - n :]
    place = n - 2
    for _ in range(ids[place:-1].count(last[-1])):
        place = ids.index(last[-1], place) + 1
        if ids[place - n + 1 : place] == last:
            found.add(ids[place])
    return found
