"""Token shift: each position also reads the one before it.

Shapes: B rows, T positions, D features.
"""

import torch
from torch import Tensor, nn


class TokenShift(nn.Module):
    """x_t + g x_(t-1), with a learned gain g for each feature, a half at first (after Peng et al., 2023, RWKV).

    So the model knows pairs of words before any attention has learned to attend to the previous token.
    """

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.full((dim,), 0.5))

    def forward(self, x: Tensor, before: Tensor | None = None) -> Tensor:
        """(B, T, D) -> (B, T, D); `before` (B, 1, D) is the vector before the first, zero by default."""
        if before is None:
            before = x.new_zeros(len(x), 1, x.shape[-1])
        return x + self.gain * torch.cat((before, x[:, :-1]), dim=1)
