"""The dtype of sums and logarithms, for which the 8 bits of bf16 are too few."""

import torch
from torch import Tensor


def at_least_float32(x: Tensor) -> Tensor:
    """Return x, of any shape, in float32, or in float64 if it has that dtype; also under autocast."""
    return x.to(torch.promote_types(x.dtype, torch.float32))
