"""The language model with `mode: windowed`: one prediction per window, whose tokens attend in both directions.

It has the weights of the causal model. Its positions are aligned to the right end of the context, so that the token
before the prediction always has the last position.

Shapes: B rows, T tokens (at most the context), D the model's width, V vocabulary entries.
"""

import torch
from torch import Tensor

from lmtrain.model.decoding_state import State, WindowState
from lmtrain.model.language_model import LanguageModel


class WindowedLanguageModel(LanguageModel):
    """`LanguageModel`, but the pool reads the whole window and predicts the one token after it.

    It has no cache: each step of decoding re-encodes the window.
    """

    @torch.no_grad()
    def start(self, tokens: Tensor, valid: Tensor | None = None, max_tokens: int | None = None) -> tuple[Tensor, State]:
        """Read prompts (B, T) as `LanguageModel.start` does: log p of the next token (B, V), and the state.

        `max_tokens` has no effect, since the state is a window.
        """
        tokens, valid = self._last_columns(tokens, valid)
        log_probs = torch.empty(len(tokens), self.vocab_size, device=tokens.device)
        # Rows of one length are computed together, so that no layer needs to handle padding.
        lengths = valid.sum(1)
        for length in lengths.unique().tolist():  # type: ignore[no-untyped-call]
            rows = lengths == length
            log_probs[rows] = self.predict(tokens[rows, -length:]).squeeze(1).float()
        return log_probs, WindowState(tokens, valid)

    def step(self, state: State, tokens: Tensor) -> tuple[Tensor, State]:
        """Read one more token per row (B,): log p of the next one (B, V), and the state."""
        assert isinstance(state, WindowState)
        valid = torch.cat((state.valid, torch.ones_like(state.valid[:, :1])), dim=1)
        return self.start(torch.cat((state.tokens, tokens.unsqueeze(-1)), dim=1), valid)

    def _positions(self, tokens: Tensor) -> Tensor:
        """Return the positions (T,) of a row's tokens (B, T): the last T of the context."""
        return torch.arange(self.config.context - tokens.shape[1], self.config.context, device=tokens.device)

    def _pool(self, encoded: Tensor, _first: int = 0) -> Tensor:
        """The pool of the whole window: (B, T, D) -> (B, 1, D)."""
        return self.pool.window(encoded)
