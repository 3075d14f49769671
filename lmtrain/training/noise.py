"""Noise on what a model reads in training.

Shapes: B rows, T positions.
"""

import numpy as np
import torch
from torch import Tensor


def noisy(inputs: Tensor, ids: np.ndarray, share: float) -> Tensor:
    """Inputs (B, T), each replaced with probability `share` by a token drawn from all of `ids` (1-D): unigram noise
    (Xie et al., 2017). Drawn from torch's default generator."""
    chosen = torch.rand(inputs.shape) < share
    places = torch.randint(len(ids), (int(chosen.sum()),))
    result = inputs.clone()
    result[chosen] = torch.from_numpy(ids[places.numpy()].astype(np.int64))
    return result
