"""AdamW that can skip a step by a condition on the device."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor


class AdamW(torch.optim.AdamW):
    """Fused AdamW (Loshchilov & Hutter, 2019)."""

    def __init__(
        self, params: Iterable[dict[str, Any]], lr: float, betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8
    ) -> None:
        super().__init__(params, lr=lr, betas=betas, eps=eps, fused=True)

    def step_unless(self, skip: Tensor) -> None:
        """Take a step, or where `skip`, () bool on the device, leave parameters and state unchanged.

        The host does not wait for the value. `found_inf` is how `torch.amp.GradScaler` passes the same condition.
        """
        self.found_inf = skip.float()
        self.step()
