"""The rule by which a step whose loss or gradient stands out is left out.

A step is a spike where its loss or the norm of its gradient lies more than `sigmas` standard deviations above its mean,
both taken over about the last `MEMORY` steps that were no spikes (a simpler form of OLMo 2's, 2025). The decision stays
on the device.
"""

from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

MEMORY = 128
"""Steps that the mean remembers, and that must have been taken before anything is called a spike."""


@dataclass
class Spikes:
    """Exponential means of (loss, gradient norm) and of their squared deviation, (2,) float64, and their steps."""

    mean: Tensor
    variance: Tensor
    count: Tensor

    @classmethod
    def none(cls, device: torch.device) -> Self:
        """Before the first step."""
        zeros = torch.zeros(2, dtype=torch.float64, device=device)
        return cls(zeros, zeros.clone(), torch.zeros((), dtype=torch.float64, device=device))

    def judge(self, loss: Tensor, norm: Tensor, sigmas: float) -> Tensor:
        """Whether this step is a spike, () bool; what is none, and is finite, enters the means."""
        figures = torch.stack((loss, norm)).double()
        distance = figures - self.mean
        high = distance > sigmas * self.variance.sqrt()
        spike = high.any() & (self.count >= MEMORY)
        rate = 1 / torch.clamp(self.count + 1, max=MEMORY)
        rate = torch.where(spike | ~torch.isfinite(figures).all(), 0.0, rate)
        distance = torch.where(rate > 0, distance, 0.0)
        self.mean = self.mean + rate * distance
        self.variance = (1 - rate) * (self.variance + rate * distance.square())
        self.count = self.count + (rate > 0)
        return spike
