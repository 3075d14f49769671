"""The cross-entropy of an output layer: from all logits at once, or in chunks of rows.

Shapes: N rows, E their width, V classes.
"""

from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from lmtrain.nn.chunked_loss import linear_cross_entropy, linear_logits, matmul_dtype, target_softmax

Chunk = int | Literal["auto"] | None
"""How many rows' logits exist at once; None = all; `auto` = see `rows_at_once`."""

MAX_LOGIT_BYTES = 2**30
"""`auto` splits float32 logits of more bytes than this."""
MIN_ROWS = 512
"""The fewest rows that `auto` chooses: fewer are no faster, and every chunk reads and writes the weight's gradient."""
MAX_CHUNKS = 16
ALIGNMENT = 16
"""On a GPU the number of classes is padded to a multiple of this: its fastest kernels need rows of k x 16 bytes."""


def target_nats(hidden: Tensor, weight: Tensor, bias: Tensor, targets: Tensor, chunk: Chunk) -> Tensor:
    """Return -log p of each target, in nats, with p the softmax of hidden W^T + bias.

    hidden (N, E), weight (V, E), bias (V,), targets (N,) int64 -> (N,), float32 at least. If `chunk` allows all logits
    at once, the loss saves them for the backward pass; in bf16 the bias's gradient is then rounded as the weight's is.
    Otherwise this is `linear_cross_entropy`.
    """
    rows = rows_at_once(chunk, len(targets), len(weight))
    if hidden.is_cuda:
        weight, bias = aligned(weight, bias)
    if rows < len(targets):
        return linear_cross_entropy(hidden, weight, bias, targets, rows)
    dtype = matmul_dtype(hidden)
    if dtype == torch.float16:  # whose range is too small for a row's errors, relative to its most likely class
        return F.cross_entropy(linear_logits(hidden, weight, bias), targets, reduction="none")
    if not torch.is_grad_enabled():
        return target_softmax(hidden.to(dtype), weight.to(dtype), bias, targets)[0]
    return _CrossEntropy.apply(hidden, weight, bias, targets, dtype)  # type: ignore[no-untyped-call]


def aligned(weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """Return weight (V, E) and bias (V,), padded with classes of probability 0 to a multiple of ALIGNMENT."""
    missing = -len(weight) % ALIGNMENT
    return F.pad(weight, (0, 0, 0, missing)), F.pad(bias, (0, missing), value=-torch.inf)


def rows_at_once(chunk: Chunk, rows: int, classes: int) -> int:
    """Return how many of the `rows` rows' logits may exist at once.

    `auto` splits logits of more than MAX_LOGIT_BYTES into at most 16 chunks of 512 rows or more.
    """
    if chunk == "auto":
        chunk = max(MIN_ROWS, -(-rows // MAX_CHUNKS)) if 4 * rows * classes > MAX_LOGIT_BYTES else None
    return rows if chunk is None else min(chunk, rows)


class _CrossEntropy(torch.autograd.Function):
    """The loss of all rows at once: the forward pass saves the errors of the logits in the products' dtype, and the
    backward pass is three products with them.

    A row of errors is p - 1 at the target and p elsewhere, times the row's sum of e^(logit - largest). The factor
    upstream / sum is applied to the small side of each product, so that the errors, the largest tensor of a step, are
    not traversed again.
    """

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor, targets: Tensor, dtype: torch.dtype) -> Tensor:
        narrow = weight.to(dtype)
        nats, exponentials, sums = target_softmax(hidden.to(dtype), narrow, bias, targets)
        errors = exponentials.to(dtype)
        errors[torch.arange(len(targets), device=targets.device), targets] = (sums * torch.expm1(-nats)).to(dtype)
        ctx.save_for_backward(hidden, narrow, errors, sums)
        ctx.types = weight.dtype, bias.dtype
        return nats

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        hidden, narrow, errors, sums = ctx.saved_tensors
        of_weight, of_bias = ctx.types
        factors = (upstream / sums).unsqueeze(-1)
        grad_hidden = (errors @ narrow * factors).to(hidden.dtype)
        grad_weight = (errors.t() @ (hidden * factors).to(errors.dtype)).to(of_weight)
        grad_bias = (factors.t().to(errors.dtype) @ errors).squeeze(0).to(of_bias)
        return grad_hidden, grad_weight, grad_bias, None, None
