"""Normalization of the last axis.

Shapes: ... any leading axes, D the normalized width.
"""

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lmtrain.nn.precision import at_least_float32

NormKind = Literal["layer", "rms", "scale"]

EPSILON = 1e-6


class ScaleNorm(nn.Module):
    """g x / ||x||, with one learned length g for all features (Nguyen & Salazar, 2019).

    g starts at sqrt(dim), so that a normalized vector starts with unit mean square, as under RMSNorm. It is
    a vector of one element, since FSDP2 can't shard a scalar.
    """

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.length = nn.Parameter(torch.tensor([float(dim) ** 0.5]))

    def forward(self, x: Tensor) -> Tensor:
        """(..., D) -> (..., D)."""
        # The sum of squares is taken in float32 at least: in bf16 it keeps only 8 bits.
        wide = at_least_float32(x)
        length: Tensor = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
        return (wide * (self.length / length.clamp_min(EPSILON))).to(x.dtype)


class RMSNorm(nn.RMSNorm):
    """x / rms(x) times a learned gain per feature (Zhang & Sennrich, 2019), computed in the gain's dtype."""

    def __init__(self, dim: int) -> None:
        super().__init__(dim, eps=EPSILON)

    def forward(self, x: Tensor) -> Tensor:
        """(..., D) -> (..., D), in the dtype of x: torch's fused kernel needs x and gain of one dtype."""
        return F.rms_norm(x.to(self.weight.dtype), self.normalized_shape, self.weight, self.eps).to(x.dtype)


NORMS: dict[NormKind, type[nn.Module]] = {"layer": nn.LayerNorm, "rms": RMSNorm, "scale": ScaleNorm}
"""Every norm; `layer` is LayerNorm (Ba et al., 2016)."""
