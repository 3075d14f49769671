"""Dropout (Srivastava et al., 2014), per element or locked along the positions.

Shapes: B rows, T positions, D features.
"""

import torch
import torch.nn.functional as F
from torch import Tensor


def drop(x: Tensor, rate: float, training: bool = True) -> Tensor:
    """Set each element of x to 0 with probability `rate`, and divide the others by 1 - rate; return x outside training.

    The mask comes from torch's generator, except in a compiled graph on a CPU: there it is a hash of each element's
    index, computed in vector loops, since torch's generator would produce its numbers one by one.
    """
    if not training or not rate:
        return x
    if rate < 1 and torch.compiler.is_compiling() and x.device.type == "cpu" and x.numel() < 2**31:
        return x / (1 - rate) * hashed_keep_mask(x.shape, rate)
    return F.dropout(x, rate)


def locked_dropout(x: Tensor, rate: float, training: bool) -> Tensor:
    """Dropout of (B, T, D) with one mask per row and feature for all positions (Gal & Ghahramani, 2016)."""
    if not training or not rate:
        return x
    return x * drop(torch.ones_like(x[:, :1]), rate)


def hashed_keep_mask(shape: torch.Size, rate: float) -> Tensor:
    """Return an int8 tensor, 1 with probability 1 - rate, else 0: a hash of each index under a key of 64 random bits.

    The hash is two rounds of the 32-bit finalizer "lowbias32" (C. Wellons, 2018), a key of 32 bits before each, so
    that masks of different keys are not shifted or reordered copies of each other.
    """
    first, second = torch.randint(-(2**31), 2**31, (2,)).to(torch.int32)
    index = torch.arange(shape.numel(), dtype=torch.int32).view(shape)
    half = _mixed(_mixed(index ^ first) + second) >> 1  # so that the difference does not overflow
    # The sign of a difference instead of a comparison: compiled code writes bool tensors element by element.
    return (((half - (round(rate * 2**31) - 2**30)) >> 31) + 1).to(torch.int8)


def _mixed(x: Tensor) -> Tensor:
    """lowbias32: shifts fill with zeros, which needs a mask for signed numbers; products wrap."""
    x = (x ^ ((x >> 16) & 0xFFFF)) * 0x7FEB352D
    x = (x ^ ((x >> 15) & 0x1FFFF)) * (0x846CA68B - 2**32)
    return x ^ ((x >> 16) & 0xFFFF)
