"""Position encodings: sinusoids added to the input, rotated queries and keys, or a bias on the attention scores.

Shapes: H heads, T positions (Tq of queries, Tk of keys), D features (even), ... any leading axes.
"""

import torch
from torch import Tensor

BASE = 10_000.0
"""Wavelengths run from 2 pi to 2 pi BASE, in sinusoids and rotations."""


def _angles(positions: Tensor, dim: int) -> Tensor:
    """(...) positions -> (..., D / 2) angles, computed in float64: float32 is too coarse for position * frequency."""
    exponents = torch.arange(0, dim, 2, dtype=torch.float64, device=positions.device) / dim
    return positions.double().unsqueeze(-1) * BASE**-exponents


def sinusoidal(positions: Tensor, dim: int) -> Tensor:
    """(...) positions -> (..., D): feature 2i is sin(p / 10000^(2i/D)), 2i+1 its cosine (Vaswani et al., 2017)."""
    angles = _angles(positions, dim)
    return torch.stack((angles.sin(), angles.cos()), dim=-1).flatten(-2).float()


def rotation(positions: Tensor, head_dim: int) -> Tensor:
    """(...) positions -> cosines and sines (2, ..., D / 2), for `rotate`."""
    angles = _angles(positions, head_dim)
    return torch.stack((angles.cos(), angles.sin())).float()


def rotate(x: Tensor, by: Tensor | None) -> Tensor:
    """Rotate the feature pairs of `x` (..., T, D) by the angles of their position (rotary embedding, Su et al., 2021).

    `by` (2, ..., T, D / 2) comes from `rotation`; None leaves x unchanged.

    Pair i is (x[i], x[i + D/2]), from the two halves of the head. It becomes
    (x[i] cos - x[i + D/2] sin, x[i + D/2] cos + x[i] sin), so that a rotated query times a rotated key depends only on
    the difference of their positions.
    """
    if by is None:
        return x
    cos, sin = by.unsqueeze(-2)  # (..., T, 1, D / 2)
    halves = x.view(*x.shape[:-1], 2, cos.shape[-1])
    # These operators keep the order of x in memory. Fused attention on a GPU writes its result in the query's order, so
    # another one would cost a copy before the output projection, and one in the backward pass.
    return (halves * cos + halves.flip(-2) * torch.cat((-sin, sin), dim=-2)).flatten(-2).to(x.dtype)


def alibi_slopes(heads: int) -> Tensor:
    """(H,) slopes 2^(-8/H), 2^(-16/H), .. 2^-8 (ALiBi, Press et al., 2022)."""
    return 2.0 ** (-8.0 * torch.arange(1, heads + 1) / heads)


def alibi_bias(slopes: Tensor, queries: Tensor, keys: Tensor) -> Tensor:
    """Bias -slope |query position - key position| on the scores: (H,), (..., Tq), (..., Tk) -> (..., H, Tq, Tk)."""
    distance = (queries.unsqueeze(-1) - keys.unsqueeze(-2)).abs()  # (..., Tq, Tk)
    return -slopes.view(-1, 1, 1) * distance.unsqueeze(-3)
