"""Noise on the input tokens in training.

Shapes: B rows, T positions.
"""

import numpy as np
import torch
from torch import Tensor


def noisy(inputs: Tensor, ids: np.ndarray, share: float) -> Tensor:
    """Inputs (B, T), each replaced with probability `share` by a random token of `ids` (tokens,): unigram noise (Xie et
    al., 2017). Uses torch's default generator."""
    chosen = torch.rand(inputs.shape) < share
    positions = torch.randint(len(ids), (int(chosen.sum()),))
    result = inputs.clone()
    result[chosen] = torch.from_numpy(ids[positions.numpy()].astype(np.int64))
    return result
