"""Several language models as one: the mean of their probabilities.

Shapes: B rows, T tokens, E the width of all members' hidden vectors together, V vocabulary entries.
"""

import functools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lmtrain.model.decoding_state import EnsembleState, State
from lmtrain.model.language_model import LanguageModel
from lmtrain.nn.precision import at_least_float32

DecodeStep = Callable[[State, Tensor], tuple[Tensor, State]]
"""A function with the arguments and results of `LanguageModel.step`."""


class Ensemble(nn.Module):
    """p(w) = the mean over the members m of p_m(w), with the methods that evaluation and generation call.

    Members share vocabulary, mode and, except as teachers, context.
    """

    def __init__(self, members: Sequence[LanguageModel]) -> None:
        super().__init__()
        self.members: Any = nn.ModuleList(members)
        self.config = members[0].config

    def score(self, tokens: Tensor, targets: Tensor, *, temperature: float = 1.0) -> tuple[Tensor, Tensor]:
        """Return -log p of each target, in nats, float32, and its hidden vector (..., E), for a cache.

        See `LanguageModel.score`; `temperature` divides the log-probabilities of each member.
        """
        return mean_score([member.score(tokens, targets, temperature=temperature) for member in self.members])

    def predict(self, tokens: Tensor) -> Tensor:
        """Return log p of every next token, in nats, float32: (B, T) -> (B, T, V); if windowed, (B, 1, V)."""
        return _mean((member.predict(tokens) for member in self.members), len(self.members))

    def start(self, tokens: Tensor, valid: Tensor | None = None, max_tokens: int | None = None) -> tuple[Tensor, State]:
        """Prefill: read prompts (B, T) and return log p (B, V) and the state; see `LanguageModel.start`."""
        return self._together(member.start(tokens, valid, max_tokens) for member in self.members)

    def step_with(self, steps: Sequence[DecodeStep], state: State, tokens: Tensor) -> tuple[Tensor, State]:
        """Decode: read one more token per row (B,) and return log p (B, V) and the state, by the members' `steps`."""
        assert isinstance(state, EnsembleState)
        return self._together(step(each, tokens) for step, each in zip(steps, state.members, strict=True))

    def _together(self, results: Iterable[tuple[Tensor, State]]) -> tuple[Tensor, State]:
        log_probs, states = zip(*results, strict=True)
        return _mean(log_probs, len(states)), EnsembleState(states)


def mean_score(scored: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Return the score of an ensemble whose members have the scores `scored`: nats and hidden vectors (..., E).

    A hidden vector is the members' own, each of length 1, one after the other: the cosine of two is the mean of the
    members' cosines.
    """
    nats, hidden = zip(*scored, strict=True)
    unit = [F.normalize(at_least_float32(vector), dim=-1) for vector in hidden]
    return -_mean([-own for own in nats], len(nats)), torch.cat(unit, -1)


def _mean(log_probs: Iterable[Tensor], count: int) -> Tensor:
    """log of the mean of `count` members' probabilities; of a generator, only two are in memory at once."""
    return functools.reduce(torch.logaddexp, log_probs) - math.log(count)


Predictor = LanguageModel | Ensemble
"""What evaluation, generation and distillation take: one model or several."""
