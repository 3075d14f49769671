"""The cross-entropy of a linear layer from a few rows' logits at a time, which the backward pass recomputes.

Both passes are custom operators, which are opaque to the compiler: it would otherwise compile each chunk separately.

Shapes: N rows, R of them in a chunk, E their width, V classes, in clusters of given sizes.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, library

from lmtrain.nn.precision import at_least_float32

MULTIPLE = 32
"""The rows of a cluster are padded to a multiple of this, so that few numbers of rows occur. On a CPU, oneDNN
compiles a kernel for each new shape of a bf16 product, which takes longer than the product, and buffers of another size
in each step fragment the heap."""


def linear_cross_entropy(
    hidden: Tensor, weight: Tensor, bias: Tensor, targets: Tensor, rows: int, sizes: Sequence[int] = ()
) -> Tensor:
    """Return -log p of each target, in nats, with p the softmax of hidden W^T + bias, in chunks of at most `rows` rows.

    hidden (N, E), weight (V, E), bias (V,), targets (N,) int64 -> (N,), float32 or float64 if they are. `sizes` are
    those of consecutive clusters of classes, with the sum V: p is then the softmax within the target's cluster, whose
    logits only are computed, and a negative target has 0 nats.

    It differs from F.cross_entropy of all logits by rounding only. The backward pass recomputes the logits (Chen et
    al., 2016), a fourth product, because each row's weight in the loss is not known before. Under autocast
    the products have its dtype, as F.linear's would; bias, softmax, and sums over chunks are in float32. There is no
    second derivative.
    """
    if sizes:  # the last row then pads the rows of each cluster
        hidden, targets = F.pad(hidden, (0, 0, 0, 1)), F.pad(targets, (0, 1), value=-1)
    nats = _forward(hidden, weight, bias, targets, sizes, rows, matmul_dtype(hidden))
    return nats[:-1] if sizes else nats


def matmul_dtype(hidden: Tensor) -> torch.dtype:
    """Return the dtype of matrix products with `hidden`: autocast's, if it is enabled."""
    device_type = hidden.device.type
    return torch.get_autocast_dtype(device_type) if torch.is_autocast_enabled(device_type) else hidden.dtype


def linear_logits(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """(R, E) -> (R, V), a new tensor, float32 or float64 whatever the dtype of the product."""
    return at_least_float32(F.linear(x, weight)).add_(bias)


def target_softmax(x: Tensor, weight: Tensor, bias: Tensor, targets: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return -log p of the targets (R,), e^(logit - the largest of the row) (R, V), and its row sums (R,)."""
    logits = linear_logits(x, weight, bias)
    logits.sub_(logits.amax(-1, keepdim=True))
    target = logits.gather(1, targets.unsqueeze(-1)).squeeze(-1)
    exponentials = logits.exp_()
    sums = exponentials.sum(-1)
    return sums.log() - target, exponentials, sums


def _forward_chunks(
    hidden: Tensor, weight: Tensor, bias: Tensor, targets: Tensor, sizes: Sequence[int], rows: int, dtype: torch.dtype
) -> Tensor:
    """Return -log p (N,)."""
    narrow, nats = weight.to(dtype), _zeros(hidden, dtype)
    for classes, part, labels in _chunks(targets, sizes, rows):
        nats[part] = target_softmax(hidden[part].to(dtype), narrow[classes], bias[classes], labels)[0]
    return nats


def _backward_chunks(
    upstream: Tensor,
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor,
    targets: Tensor,
    sizes: Sequence[int],
    rows: int,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of hidden, weight and bias."""
    narrow = weight.to(dtype)
    grad_hidden, grad_weight, grad_bias = (torch.zeros_like(x) for x in (hidden, weight, bias))
    for classes, part, labels in _chunks(targets, sizes, rows):
        x = hidden[part].to(dtype)
        nats, error, sums = target_softmax(x, narrow[classes], bias[classes], labels)
        error[torch.arange(len(x), device=x.device), labels] = sums * torch.expm1(-nats)
        error.mul_((upstream[part] / sums).unsqueeze(-1))  # p - 1 at the target, p elsewhere, times upstream: (R, V)
        grad_bias[classes].add_(error.sum(0))
        error = error.to(dtype)
        grad_hidden[part] = (error @ narrow[classes]).to(hidden.dtype)
        if dtype == weight.dtype:
            grad_weight[classes].addmm_(error.t(), x)
        else:
            grad_weight[classes].add_(error.t() @ x)
    return grad_hidden, grad_weight, grad_bias


def _chunks(targets: Tensor, sizes: Sequence[int], rows: int) -> Iterator[tuple[slice, slice | Tensor, Tensor]]:
    """Yield for each chunk its classes, its rows, and their targets among these classes.

    A chunk has at most R rows, and all classes, or with `sizes` those of one cluster, and rows with targets in it; the
    last row of all, whose target is in no cluster, pads them.
    """
    if not sizes:
        for first in range(0, len(targets), rows):
            part = slice(first, first + rows)
            yield slice(None), part, targets[part]
    start = 0
    for size in sizes:
        in_cluster = ((targets >= start) & (targets < start + size)).nonzero().squeeze(-1)
        for members in torch.split(in_cluster, rows):
            missing = min(-len(members) % MULTIPLE, rows - len(members))
            filled = F.pad(members, (0, missing), value=-1)
            yield slice(start, start + size), filled, (targets[filled] - start).clamp_(min=0)
        start += size


def _zeros(hidden: Tensor, dtype: torch.dtype) -> Tensor:
    return hidden.new_zeros(len(hidden), dtype=torch.promote_types(dtype, torch.float32))


_forward = library.custom_op("lmtrain::linear_cross_entropy", _forward_chunks, mutates_args=())
_backward = library.custom_op("lmtrain::linear_cross_entropy_backward", _backward_chunks, mutates_args=())


@_forward.register_fake
def _(hidden: Tensor, weight: Any, bias: Any, targets: Any, sizes: Any, rows: int, dtype: torch.dtype) -> Any:
    return _zeros(hidden, dtype)


@_backward.register_fake
def _(upstream: Tensor, hidden: Tensor, weight: Tensor, bias: Tensor, *_: Any) -> tuple[Tensor, ...]:
    return torch.empty_like(hidden), torch.empty_like(weight), torch.empty_like(bias)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    *tensors, ctx.sizes, ctx.rows, ctx.dtype = inputs
    ctx.save_for_backward(*tensors)


def _gradients(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
    gradients = _backward(upstream, *ctx.saved_tensors, ctx.sizes, ctx.rows, ctx.dtype)
    return *gradients, None, None, None, None


_forward.register_autograd(_gradients, setup_context=_save)
