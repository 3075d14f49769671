"""Types for sums and logarithms, for which bf16 has too few bits: 8."""

import torch
from torch import Tensor


def at_least_float32(x: Tensor) -> Tensor:
    """x, of any shape, in float32, or in float64 if it has that type; also under autocast."""
    return x.to(torch.promote_types(x.dtype, torch.float32))
