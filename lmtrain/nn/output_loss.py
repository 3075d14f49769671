"""The loss of an output layer: whole, or without its logits, of which those of a few rows exist at a time, made twice.

In chunks both passes are operators of their own, which a compiler takes as they are: it would compile each chunk anew.

Shapes: N rows, R of them at once, E their width, V classes.
"""

from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, library
from torch.autograd.function import once_differentiable

Chunk = int | Literal["auto"] | None
"""Rows whose logits exist at once; None = all of them; `auto` = see `rows_at_once`."""

LARGE = 2**30
"""Bytes of float32 logits from which `auto` no longer makes them all at once."""
FEWEST_ROWS = 512
"""Of `auto`: fewer are no quicker, and the weight's gradient is read and written once for every chunk."""
MOST_CHUNKS = 16


def rows_at_once(chunk: Chunk, rows: int, classes: int) -> int | None:
    """How many rows' logits may exist at once; None = all of them.

    `auto` is the whole loss up to LARGE, and then at most 16 chunks of 512 rows or more.
    """
    if chunk == "auto":
        chunk = max(FEWEST_ROWS, -(-rows // MOST_CHUNKS)) if 4 * rows * classes > LARGE else None
    return None if chunk is None or chunk >= rows else chunk


def target_nats(hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, chunk: Chunk) -> Tensor:
    """`linear_cross_entropy` with the rows that `chunk` asks for, or where that is all of them the whole loss.

    In bf16 a product makes the bias's gradient of the whole loss, which then is rounded as the weight's is.
    """
    rows = rows_at_once(chunk, len(targets), len(weight))
    if rows is not None:
        return linear_cross_entropy(hidden, weight, bias, targets, rows)
    dtype = product_type(hidden)
    if dtype == torch.float16:  # in which a row's errors, as large as its most likely class makes them, would end
        return F.cross_entropy(_logits(hidden, weight, bias), targets, reduction="none")
    if not torch.is_grad_enabled():
        return _likelihoods(hidden.to(dtype), weight.to(dtype), bias, targets)[0]
    nats: Tensor = _CrossEntropy.apply(hidden, weight, bias, targets, dtype)  # type: ignore[no-untyped-call]
    return nats


def linear_cross_entropy(hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, rows: int) -> Tensor:
    """-log p of each target, in nats, with p the softmax of hidden W^T + bias, from at most `rows` x V logits at once.

    hidden (N, E), weight (V, E), bias (V,), targets (N,) int64 -> (N,), float32 or float64 if they are.

    Exact: it differs from F.cross_entropy of all logits by rounding alone. The backward pass makes the logits again
    (Chen et al., 2016), a fourth product beside three, because it alone knows each row's weight in the loss. Under
    autocast the products are made in its type, as F.linear's would be; bias, softmax, and sums over chunks are in
    float32. It has no second derivative.
    """
    nats: Tensor = _forward(hidden, weight, bias, targets, rows, product_type(hidden))[0]
    return nats


def product_type(hidden: Tensor) -> torch.dtype:
    """The type of the products with `hidden`: autocast's, where it is on."""
    kind = hidden.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else hidden.dtype


def adversarial_nats(nats: Tensor, hidden: Tensor, rows: Tensor, share: float) -> Tensor:
    """-log p of each target if its row w of the output layer were moved against the state h by `share` of its length:
    its logit is then lower by share |w| |h| (Wang et al., 2019). Rows that point away from the state stay.

    nats (N,) are those of the row as it is; hidden (N, E), and the targets' rows (N, E) -> (N,). The odds against the
    target, e^nats - 1, grow by a factor of e to the loss of the logit, so that no logits are needed.
    """
    hidden, rows = hidden.to(nats.dtype), rows.to(nats.dtype)
    margin = share * rows.norm(dim=-1) * hidden.norm(dim=-1) * ((rows * hidden).sum(-1) > 0)
    nats = nats.clamp_min(1e-6)  # certainty has no odds
    return F.softplus(nats + (-torch.expm1(-nats)).log() + margin)


def forward(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, rows: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """Nats, and what normalises the logits: the largest of each row, and the logarithm of the sum over it. (N,) each.

    The two stay apart: their sum would round small losses away.
    """
    weight = weight.to(dtype)
    nats, largest, log_sums = vectors(hidden, dtype)
    for first in range(0, len(hidden), rows):
        part = slice(first, first + rows)
        logits = _logits(hidden[part].to(dtype), weight, bias)
        largest[part] = logits.amax(-1)
        logits.sub_(largest[part].unsqueeze(-1))
        target = logits.gather(1, targets[part].unsqueeze(-1)).squeeze(-1)
        log_sums[part] = logits.exp_().sum(-1).log()
        nats[part] = log_sums[part] - target
    return nats, largest, log_sums


def backward(
    upstream: Tensor,
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    largest: Tensor,
    log_sums: Tensor,
    rows: int,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of hidden, weight and bias; the last is empty where there is none."""
    narrow = weight.to(dtype)
    grad_hidden = torch.empty_like(hidden)
    grad_weight = torch.zeros_like(weight)
    grad_bias = weight.new_zeros(0) if bias is None else torch.zeros_like(bias)
    for first in range(0, len(hidden), rows):
        part = slice(first, first + rows)
        x = hidden[part].to(dtype)
        error = _logits(x, narrow, bias).sub_(largest[part].unsqueeze(-1)).sub_(log_sums[part].unsqueeze(-1)).exp_()
        error[torch.arange(len(x), device=x.device), targets[part]] -= 1  # p - 1 at the target, p elsewhere: (R, V)
        error.mul_(upstream[part].unsqueeze(-1))
        if bias is not None:
            grad_bias.add_(error.sum(0))
        error = error.to(dtype)
        grad_hidden[part] = error @ narrow
        if dtype == weight.dtype:
            grad_weight.addmm_(error.t(), x)
        else:
            grad_weight.add_(error.t() @ x)
    return grad_hidden, grad_weight, grad_bias


class _CrossEntropy(torch.autograd.Function):
    """The loss of all rows at once: the forward pass leaves the errors of the logits in the products' type, and the
    backward pass is three products with them.

    A row of errors is e^(logit - largest), and at the target that less the row's sum: p and p - 1 but for the sum. What
    the row weighs, upstream / sum, goes into the small side of each product, so that nothing goes over the largest
    tensor of a step again. It has no second derivative.
    """

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, dtype: torch.dtype
    ) -> Tensor:
        narrow = weight.to(dtype)
        nats, likelihoods, sums = _likelihoods(hidden.to(dtype), narrow, bias, targets)
        errors = likelihoods.to(dtype)
        errors[torch.arange(len(targets), device=targets.device), targets] = (sums * torch.expm1(-nats)).to(dtype)
        ctx.save_for_backward(hidden, narrow, errors, sums)
        ctx.types = weight.dtype, None if bias is None else bias.dtype
        return nats

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        hidden, narrow, errors, sums = ctx.saved_tensors
        of_weight, of_bias = ctx.types
        factors = (upstream / sums).unsqueeze(-1)
        grad_hidden = (errors @ narrow * factors).to(hidden.dtype)
        grad_weight = (errors.t() @ (hidden * factors).to(errors.dtype)).to(of_weight)
        grad_bias = None if of_bias is None else (factors.t().to(errors.dtype) @ errors).squeeze(0).to(of_bias)
        return grad_hidden, grad_weight, grad_bias, None, None


def _likelihoods(x: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Nats of the targets (N,), e^(logit - largest) of each class (N, V), and the sums of these (N,)."""
    logits = _logits(x, weight, bias)
    logits.sub_(logits.amax(-1, keepdim=True))
    target = logits.gather(1, targets.unsqueeze(-1)).squeeze(-1)
    likelihoods = logits.exp_()
    sums = likelihoods.sum(-1)
    return sums.log() - target, likelihoods, sums


_forward = library.custom_op("lmtrain::linear_cross_entropy", forward, mutates_args=())
_backward = library.custom_op("lmtrain::linear_cross_entropy_backward", backward, mutates_args=())


@_forward.register_fake
def _(hidden: Tensor, weight: Tensor, bias: Any, targets: Any, rows: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
    return vectors(hidden, dtype)


@_backward.register_fake
def _(upstream: Tensor, hidden: Tensor, weight: Tensor, bias: Tensor | None, *_: Any) -> tuple[Tensor, ...]:
    grad_bias = weight.new_empty(0) if bias is None else torch.empty_like(bias)
    return torch.empty_like(hidden), torch.empty_like(weight), grad_bias


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    hidden, weight, bias, targets, ctx.rows, ctx.dtype = inputs
    ctx.save_for_backward(hidden, weight, bias, targets, *output[1:])


def _gradients(ctx: Any, upstream: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
    hidden, weight, bias = _backward(upstream, *ctx.saved_tensors, ctx.rows, ctx.dtype)
    return hidden, weight, bias if ctx.needs_input_grad[2] else None, None, None, None


_forward.register_autograd(_gradients, setup_context=_save)


def vectors(hidden: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Room for the three results of the forward pass."""
    exact = torch.promote_types(dtype, torch.float32)
    nats, largest, log_sums = (hidden.new_empty(len(hidden), dtype=exact) for _ in range(3))
    return nats, largest, log_sums


def _logits(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """(R, E) -> (R, V), a new tensor, float32 or float64 whatever the type of the product."""
    logits = F.linear(x, weight)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return logits if bias is None else logits.add_(bias)
