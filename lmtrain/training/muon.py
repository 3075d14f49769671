"""AdamW; and Muon for the hidden matrices, combined with AdamW for the other parameters.

Both can skip a step by a condition on the device. Shapes: N matrices of one shape, A rows, B columns.
"""

from typing import Any

import torch
from torch import Tensor

MOMENTUM = 0.95
COEFFICIENTS = ((8.0132, -22.9258, 16.5994), (3.6006, -2.6419, 0.5105), (2.635, -1.919, 0.4306))
"""The coefficients (a, b, c) of polynomials a x + b x^3 + c x^5 that are applied one after the other. They bring
singular values from 0.01 to 1 nearest to 1: between 0.71 and 1.27. Each is a polynomial in x / 1.01, a margin for
rounding, since it grows fast above its range."""
EPS = 1e-7


class AdamW(torch.optim.AdamW):
    """AdamW (Loshchilov & Hutter, 2019), to be constructed with `fused=True`."""

    def step_unless(self, skip: Tensor) -> None:
        """Take a step, unless `skip`, () bool on the device: then parameters and state stay unchanged.

        The host does not wait for the value. `torch.amp.GradScaler` passes the same condition as `found_inf`.
        """
        self.found_inf = skip.float()
        self.step()


def orthogonalized(matrices: Tensor, dtype: torch.dtype) -> Tensor:
    """Return about U V^T for each matrix U S V^T: (N, A, B) -> (N, A, B) in `dtype`.

    The Polar Express (Amsel et al., 2025): Newton-Schulz iterations, each with the polynomial that is best after the
    previous ones.
    """
    tall = matrices.shape[-2] > matrices.shape[-1]
    x = matrices.to(dtype)
    x = x.mT if tall else x  # the smaller Gram matrix
    x = x / torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True).clamp(min=EPS)
    for a, b, c in COEFFICIENTS:
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if tall else x


class Muon(torch.optim.Optimizer):
    """Muon (Jordan et al., 2024) with Nesterov momentum: the update is the orthogonalized momentum.

    The elements of an update have a root mean square of 0.2 times the learning rate, like AdamW's (Liu et al., 2025),
    so that both have the same learning rate and decoupled weight decay. Matrices of one shape are batched, in `dtype`.

    `matrices` are parameter groups of 2-D parameters with their `weight_decay`. `rest` optimizes all other parameters;
    its groups and its state also belong to this optimizer.
    """

    def __init__(self, matrices: list[dict[str, Any]], rest: AdamW, lr: float, dtype: torch.dtype) -> None:
        super().__init__(matrices, {"lr": lr, "momentum": MOMENTUM})
        self._matrices = list(self.param_groups)
        self._dtype = dtype
        self._rest = rest
        self.param_groups += rest.param_groups
        rest.state = self.state

    @torch.no_grad()
    def step_unless(self, skip: Tensor) -> None:
        """Take a step, unless `skip`, () bool on the device: then parameters and state stay unchanged.

        The host does not wait for the value.
        """
        self._rest.step_unless(skip)
        for group in self._matrices:
            shapes: dict[torch.Size, list[Tensor]] = {}
            for parameter in group["params"]:
                shapes.setdefault(parameter.shape, []).append(parameter)
            for parameters in shapes.values():
                self._update(parameters, group, skip)

    def _update(self, parameters: list[Tensor], group: dict[str, Any], skip: Tensor) -> None:
        lr, momentum = group["lr"], group["momentum"]
        rows, columns = parameters[0].shape
        for parameter in parameters:
            if not self.state[parameter]:
                self.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
        buffers = [self.state[parameter]["momentum_buffer"] for parameter in parameters]
        # (N, A, B). In a skipped step all sums get 0 added, which keeps their bits, and never 0 x NaN.
        gradients = torch.stack([parameter.grad for parameter in parameters]).masked_fill_(skip, 0.0)  # type: ignore[misc]
        means = torch.stack(buffers).lerp_(gradients, torch.where(skip, 0.0, 1.0 - momentum))
        torch._foreach_copy_(buffers, list(means.unbind()))
        update = orthogonalized(gradients.lerp_(means, momentum), self._dtype).float().masked_fill_(skip, 0.0)
        torch._foreach_mul_(parameters, torch.where(skip, 1.0, 1.0 - lr * group["weight_decay"]))
        torch._foreach_add_(parameters, list(update.unbind()), alpha=-0.2 * max(rows, columns) ** 0.5 * lr)
