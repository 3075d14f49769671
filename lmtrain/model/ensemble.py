"""Several language models as one: the mean of their probabilities.

Shapes: B rows, T tokens, S targets, E the width of all members' states together, V word types.
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

Step = Callable[[State, Tensor], tuple[Tensor, State]]
"""As `LanguageModel.step`."""


class Ensemble(nn.Module):
    """p(w) = the mean over the members m of p_m(w), for evaluation and generation, as `LanguageModel` does them.

    Members share vocabulary, mode and, except as teachers, context. An ensemble of one model computes the same bits as
    it.
    """

    def __init__(self, members: Sequence[LanguageModel]) -> None:
        super().__init__()
        self.members: Any = nn.ModuleList(members)
        self.config = members[0].config

    def score(self, tokens: Tensor, targets: Tensor, *, temperature: float = 1.0) -> tuple[Tensor, Tensor]:
        """-log p of each target, in nats, float32, and the states (..., E) of a cache.

        As `LanguageModel.score`; `temperature` divides the logits of each member. The states are the members', each of
        length 1, one after the other: the cosine of two is the mean of the members' cosines.
        """
        scored = [member.score(tokens, targets, temperature=temperature) for member in self.members]
        nats = -self._mean([-nats for nats, _ in scored])
        return nats, self._joined([states for _, states in scored])

    def predict(self, tokens: Tensor) -> Tensor:
        """log p of every next token, in nats, float32: tokens (B, T) -> (B, T, V) if causal, (B, V) if windowed."""
        return self._mean(member.predict(tokens) for member in self.members)

    @torch.no_grad()
    def start(self, tokens: Tensor, valid: Tensor | None = None) -> tuple[Tensor, State]:
        """Read prompts (B, T): log-probabilities (B, V) and the state, as `LanguageModel.start`."""
        return self._together(member.start(tokens, valid) for member in self.members)

    @torch.no_grad()
    def step(self, state: State, tokens: Tensor) -> tuple[Tensor, State]:
        """Read one more token per row (B,): log-probabilities (B, V) and the state, as `LanguageModel.step`."""
        return self.step_by([member.step for member in self.members], state, tokens)

    def step_by(self, steps: Sequence[Step], state: State, tokens: Tensor) -> tuple[Tensor, State]:
        """`step` by these step functions of the members."""
        assert isinstance(state, EnsembleState)
        return self._together(step(own, tokens) for step, own in zip(steps, state.members, strict=True))

    def _together(self, read: Iterable[tuple[Tensor, State]]) -> tuple[Tensor, State]:
        predictions = list(read)
        states = tuple(state for _, state in predictions)
        return self._mean(log_probs for log_probs, _ in predictions), EnsembleState(states)

    def _mean(self, log_probs: Iterable[Tensor]) -> Tensor:
        """log of the mean of the members' probabilities; only two of them are in memory at once."""
        return functools.reduce(torch.logaddexp, log_probs) - math.log(len(self.members))

    def _joined(self, states: list[Tensor]) -> Tensor:
        """The members' states (..., E_m) as one: (..., E). The state of a single member keeps its bits."""
        if len(states) == 1:
            return states[0]
        return torch.cat([F.normalize(at_least_float32(state), dim=-1) for state in states], -1)


Predictor = LanguageModel | Ensemble
"""What is evaluated, generates, or teaches."""
