"""AdamW that can skip a step by a condition on the device."""

import torch
from torch import Tensor


class AdamW(torch.optim.AdamW):
    """AdamW (Loshchilov & Hutter, 2019), to be constructed with `fused=True`."""

    def step_unless(self, skip: Tensor) -> None:
        """Take a step, or where `skip`, () bool on the device, leave parameters and state unchanged.

        The host does not wait for the value. `found_inf` is how `torch.amp.GradScaler` passes the same condition.
        """
        self.found_inf = skip.float()
        self.step()
