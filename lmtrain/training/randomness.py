"""What is random in a training step: the seed of each micro-batch, and noise on its inputs.

Shapes: B rows, T positions.
"""

import numpy as np
import torch
from torch import Tensor


def step_seed(seed: int, step: int, micro: int) -> int:
    """The seed of one micro-batch: a function of the run's seed, the step and the micro-batch, so no state is saved.

    SplitMix64's finalizer (Steele et al., 2014) over the three numbers.
    """
    mixed = 0
    for part in (seed, step, micro):
        mixed = (mixed ^ part) + 0x9E3779B97F4A7C15 & (1 << 64) - 1
        mixed = (mixed ^ mixed >> 30) * 0xBF58476D1CE4E5B9 & (1 << 64) - 1
        mixed = (mixed ^ mixed >> 27) * 0x94D049BB133111EB & (1 << 64) - 1
        mixed ^= mixed >> 31
    return mixed >> 1


def noisy(inputs: Tensor, ids: np.ndarray, share: float) -> Tensor:
    """Inputs (B, T), each replaced with probability `share` by a random token of `ids` (tokens,): unigram noise (Xie et
    al., 2017). Uses torch's default generator."""
    chosen = torch.rand(inputs.shape) < share
    positions = torch.randint(len(ids), (int(chosen.sum()),))
    result = inputs.clone()
    result[chosen] = torch.from_numpy(ids[positions.numpy()].astype(np.int64))
    return result
