"""Normalisation of the last axis, before each sub-layer.

Shapes: ... any leading axes, D the normalised width.
"""

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

NormKind = Literal["layer", "rms", "scale"]

EPSILON = 1e-6


class ScaleNorm(nn.Module):
    """g x / ||x||, with one learned length g for all features (Nguyen & Salazar, 2019).

    g starts at sqrt(dim), so that a normalised vector starts with unit mean square, as under RMSNorm.
    """

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.length = nn.Parameter(torch.tensor(float(dim) ** 0.5))

    def forward(self, x: Tensor) -> Tensor:
        """(..., D) -> (..., D)."""
        # The sum of squares is taken in float32 at least: in bf16 it keeps only 8 bits.
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        norm: Tensor = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
        return (wide * (self.length / norm.clamp_min(EPSILON))).to(x.dtype)


class RMSNorm(nn.RMSNorm):
    """x / rms(x) times a learned gain per feature (Zhang & Sennrich, 2019), computed in the gain's type."""

    def forward(self, x: Tensor) -> Tensor:
        """(..., D) -> (..., D), in the type of x: torch's fused kernel wants x and gain to be of one type."""
        return F.rms_norm(x.to(self.weight.dtype), self.normalized_shape, self.weight, self.eps).to(x.dtype)


def norm(kind: NormKind, dim: int) -> nn.Module:
    """The norm called `kind`: `layer` (Ba et al., 2016), `rms` (RMSNorm) or `scale` (ScaleNorm)."""
    if kind == "layer":
        return nn.LayerNorm(dim)
    if kind == "rms":
        return RMSNorm(dim, eps=EPSILON)
    return ScaleNorm(dim)


def cut_gradients_at_zero(model: nn.Module) -> None:
    """Let no gradient pass the norms of `model`, while it trains, where the vector that they read is zero.

    Such is the state of a dropped word that sees no other. A norm's slope at zero is 1 / epsilon or the root of it, so
    that a few of them in a row overflow any arithmetic, for a gradient that the word's own zero cancels in the end.
    What learns is the same, but for LayerNorm's bias, whose gradient there would have been as great as the slope.
    """
    for module in model.modules():
        if isinstance(module, nn.LayerNorm | nn.RMSNorm | ScaleNorm):
            module.register_forward_pre_hook(_cut_gradient_at_zero)


def _cut_gradient_at_zero(module: nn.Module, inputs: tuple[Tensor]) -> Tensor:
    (x,) = inputs
    return x.masked_fill((x == 0).all(-1, keepdim=True), 0.0) if module.training else x
