"""Token embedding whose gradient, compiled for a CPU, has the same bits in every run.

Shapes: V entries, E their width.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, library, nn


class Embedding(nn.Embedding):
    """`nn.Embedding`. Compiled for a CPU, its gradient is computed by the same kernel as if it were not compiled.

    The compiler's own code lets all threads add to a token's row, in whatever order they get there, so that its sum is
    rounded differently in each run.
    """

    def forward(self, ids: Tensor) -> Tensor:
        """(...) int64 -> (..., E)."""
        if torch.compiler.is_compiling() and self.weight.device.type == "cpu":
            return _Lookup.apply(self.weight, ids)  # type: ignore[no-untyped-call]
        return super().forward(ids)


@library.custom_op("lmtrain::embedding_backward", mutates_args=())
def _gradient(upstream: Tensor, ids: Tensor, entries: int) -> Tensor:
    return torch.ops.aten.embedding_dense_backward(upstream, ids, entries, -1, False)


@_gradient.register_fake
def _(upstream: Tensor, ids: Tensor, entries: int) -> Tensor:
    return upstream.new_empty(entries, upstream.shape[-1])


class _Lookup(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor, ids: Tensor) -> Tensor:
        ctx.save_for_backward(ids)
        ctx.entries = len(weight)
        return F.embedding(ids, weight)

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor, None]:
        return _gradient(upstream, *ctx.saved_tensors, ctx.entries), None
