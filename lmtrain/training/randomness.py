"""Randomness in a training step: the seed of each micro-batch, and noise on its inputs.

Shapes: B rows, T positions.
"""

import numpy as np
import torch
from torch import Tensor


def step_seed(seed: int, step: int, micro_batch: int) -> int:
    """Return the seed of micro-batch number `micro_batch` in a step; as a function of the three, it is not saved.

    This is SplitMix64's finalizer (Steele et al., 2014) over the three numbers.
    """
    mixed = 0
    for number in (seed, step, micro_batch):
        mixed = (mixed ^ number) + 0x9E3779B97F4A7C15 & (1 << 64) - 1
        mixed = (mixed ^ mixed >> 30) * 0xBF58476D1CE4E5B9 & (1 << 64) - 1
        mixed = (mixed ^ mixed >> 27) * 0x94D049BB133111EB & (1 << 64) - 1
        mixed ^= mixed >> 31
    return mixed >> 1


def noisy(inputs: Tensor, ids: np.ndarray, probability: float) -> Tensor:
    """Return inputs (B, T) with unigram noise (Xie et al., 2017), from torch's default generator.

    Each token is replaced, with this probability, by a random one of `ids` (tokens,).
    """
    chosen = torch.rand(inputs.shape) < probability
    positions = torch.randint(len(ids), (int(chosen.sum()),))
    result = inputs.clone()
    result[chosen] = torch.from_numpy(ids[positions.numpy()].astype(np.int64))
    return result
