"""The copy mechanism of the language model: a pointer over the tokens of the context, mixed into its prediction.

Shapes: B rows, T positions that predict, the last of the Tk tokens of the context, D the model's width, V vocabulary
entries.
"""

import torch
from torch import Tensor, nn

from lmtrain.nn.norms import NORMS, NormKind
from lmtrain.nn.pointer import PointerAttention, copy_log_probs, copy_target_log_prob, point

GATE_BIAS = -2.0
"""The pointer starts with an eighth of the probability: enough to learn from, too little to disturb."""


class ContextCopy(nn.Module):
    """p(w) = (1 - g) p_vocabulary(w) + g sum of the pointer's weights of the tokens equal to w (See et al., 2017;
    Merity et al., 2017), where the gate g is the sigmoid of a learned function of the pooled vector.

    The pooled vector is also the query. The key of a token is made of the encoder's outputs at its position and at the
    one before, which predicted the token. In all methods, the pooled vector of a position points to its own token and
    those before.
    """

    def __init__(self, dim: int, norm_kind: NormKind) -> None:
        super().__init__()
        self.query_norm = NORMS[norm_kind](dim)
        self.key_norm = NORMS[norm_kind](dim)
        self.pointer = PointerAttention(dim, 2 * dim, dim)
        self.gate = nn.Linear(dim, 1)
        nn.init.constant_(self.gate.bias, GATE_BIAS)

    def keys(self, encoded: Tensor, before: Tensor | None = None) -> Tensor:
        """The encoder's outputs (B, Tk, D) -> keys (B, Tk, D). `before` (B, 1, D) is the output before the first."""
        if before is None:
            before = encoded.new_zeros(len(encoded), 1, encoded.shape[-1])
        normed = self.key_norm(torch.cat((before, encoded), dim=1))  # (B, Tk + 1, D)
        return self.pointer.key(torch.cat((normed[:, 1:], normed[:, :-1]), dim=-1))

    def target_log_prob(
        self, log_target: Tensor, pooled: Tensor, keys: Tensor, tokens: Tensor, targets: Tensor
    ) -> Tensor:
        """Mix the pointer into log p of the targets: log_target and targets (B, T), tokens (B, Tk) -> (B, T)."""
        pointer, gate = self._point(pooled, keys, None)
        return copy_target_log_prob(log_target, pointer, tokens, gate, targets)

    def log_probs(
        self, log_vocabulary: Tensor, pooled: Tensor, keys: Tensor, tokens: Tensor, position: Tensor | None = None
    ) -> Tensor:
        """Mix the pointer into log p of every word: (B, T, V), tokens (B, Tk) -> (B, T, V). With one position
        per row, `position` (B, 1) says which; by default it is the last."""
        pointer, gate = self._point(pooled, keys, position)
        return copy_log_probs(log_vocabulary, pointer, tokens, gate)

    def _point(self, pooled: Tensor, keys: Tensor, position: Tensor | None) -> tuple[Tensor, Tensor]:
        """The pointer's log-probabilities (B, T, Tk) and the gate's logits (B, T)."""
        key_positions = torch.arange(keys.shape[1], device=keys.device)
        position = key_positions[-pooled.shape[1] :] if position is None else position
        mask = key_positions <= position.unsqueeze(-1)  # (T, Tk) or (B, 1, Tk)
        normed = self.query_norm(pooled)
        return point(self.pointer.query(normed), keys, mask), self.gate(normed).squeeze(-1)
