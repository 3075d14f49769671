"""A model's matrices in the form in which decoding reads them fastest: every one is read whole for each token.

Shapes: ... any leading axes (R rows in all), K inputs, N outputs.
"""

from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lmtrain.model.language_model import LanguageModel
from lmtrain.nn.attention import MultiHeadAttention
from lmtrain.nn.blocks import EncoderBlock

PREPACKED = hasattr(torch.ops.mkldnn, "_linear_pointwise") and torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
"""Whether oneDNN's own layout of a matrix can be kept. A plain bf16 matrix is brought into it anew by every call."""

BIG = 2**20
"""Elements of a float32 matrix from which oneDNN's layout pays: below, the call costs more than it saves."""


class BatchLinear(nn.Module):
    """x W^T + b in float32: one row by W as it is, more rows by a copy of it in oneDNN's layout, which is quicker."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self.weight = weight.detach()
        self.bias = None if bias is None else bias.detach()
        self.packed = torch.ops.mkldnn._reorder_linear_weight(self.weight, 16)

    def forward(self, x: Tensor) -> Tensor:
        """(..., K) -> (..., N)."""
        if x.numel() == x.shape[-1]:
            return F.linear(x, self.weight, self.bias)
        result: Tensor = torch.ops.mkldnn._linear_pointwise(x, self.packed, self.bias, "none", [], "")
        return result


class NarrowLinear(nn.Module):
    """x W^T + b in the arithmetic of `dtype`, in which W is kept: (..., K) -> (..., N), of x's own type."""

    weight: Tensor
    bias: Tensor | None

    def __init__(self, weight: Tensor, bias: Tensor | None, dtype: torch.dtype, *, prepack: bool = True) -> None:
        super().__init__()
        self.dtype = dtype
        self.prepacked = prepack and PREPACKED and weight.device.type == "cpu" and dtype == torch.bfloat16
        weight = weight.detach().to(dtype)
        weight = torch.ops.mkldnn._reorder_linear_weight(weight, 1) if self.prepacked else weight
        self.register_buffer("weight", weight, persistent=False)
        self.register_buffer("bias", None if bias is None else bias.detach().to(dtype), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """(..., K) -> (..., N)."""
        narrow = x.to(self.dtype)
        if self.prepacked:
            result: Tensor = torch.ops.mkldnn._linear_pointwise(narrow, self.weight, self.bias, "none", [], "")
        else:
            result = F.linear(narrow, self.weight, self.bias)
        return result.to(x.dtype)


class Int8Linear(nn.Module):
    """x W^T + b with each row of W and each row of x as 8-bit integers and one scale (Yao et al., 2022, ZeroQuant).

    A scale is the row's largest absolute value / 127. The products are summed exactly, so that what comes of a row does
    not depend on the rows beside it. (..., K) -> (..., N) of x's own type. Raises ValueError for K = 1, whose layout
    torch's kernel mistakes.
    """

    scale: Tensor
    weight: Tensor
    bias: Tensor | None

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        if weight.shape[1] == 1:
            raise ValueError("a matrix of one column can't be kept as 8-bit integers")
        scale, rows = _to_int8(weight.detach())
        self.register_buffer("scale", scale.squeeze(-1), persistent=False)  # (N,)
        self.register_buffer("weight", rows, persistent=False)
        self.register_buffer("bias", None if bias is None else bias.detach().float(), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """(..., K) -> (..., N)."""
        scale, rows = _to_int8(x.flatten(0, -2))
        result = torch._int_mm(rows, self.weight.t()) * self.scale * scale
        if self.bias is not None:
            result = result + self.bias
        return result.view(*x.shape[:-1], len(self.scale)).to(x.dtype)  # of no rows, too


def _to_int8(x: Tensor) -> tuple[Tensor, Tensor]:
    """(R, K) to each row's scale, (R, 1) float32, and what it has to be multiplied by, (R, K) int8.

    A row with NaN or infinity has such a scale, so that its products are NaN.
    """
    x = x.float()
    scale = (x.abs().amax(-1, keepdim=True) / 127).clamp_min(torch.finfo(torch.float32).tiny)
    return scale, (x / scale).round().to(torch.int8)


@lru_cache
def multiplies_int8() -> bool:
    """Whether this CPU sums products of 8-bit integers exactly: older ones may cut them off at 16 bits."""
    weight = torch.full((32, 64), 127, dtype=torch.int8)
    products = [torch._int_mm(weight[:rows], weight.t()) for rows in (1, 16)]
    return all(bool((product == 64 * 127**2).all()) for product in products)


def pack(model: LanguageModel, weights: str, *, prepack: bool = True) -> None:
    """Put every matrix of the model into the form `weights`, for good: it can no longer be trained or saved.

    fp32 keeps every number as it is, and on a CPU a second copy of the big matrices. bf16 and fp16 round the inputs,
    weights and results of every product, as autocast does; int8 rounds inputs and weights to 8-bit integers and scales.
    All else stays float32. Without `prepack` the layout is left to a compiler. Raises ValueError for int8 on another
    device than a CPU, and on a CPU that can't.
    """
    device = model.output_weight.device.type
    if weights == "int8" and device != "cpu":
        raise ValueError("int8 weights are for a CPU")
    if weights == "int8" and not multiplies_int8():
        raise ValueError("this CPU has no exact arithmetic for int8 weights")
    for block in model.encoder.blocks:
        for module in block.modules() if isinstance(block, EncoderBlock) else ():
            if isinstance(module, MultiHeadAttention):
                _join(module)
    if model.pool.query is None:
        model.pool.folded = model.pool.fold().detach()
    if weights == "fp32" and not (prepack and PREPACKED and device == "cpu"):
        return
    model.packed_output = _packed(model.output_weight, None, weights, prepack) or model.packed_output
    unread = model.pool.key if model.pool.query is None else None
    for module in list(model.modules()):
        for name, child in module.named_children():
            if isinstance(child, nn.Linear) and child is not model.output and child is not unread:
                setattr(module, name, _packed(child.weight, child.bias, weights, prepack) or child)


@torch.no_grad()
def _join(attention: MultiHeadAttention) -> None:
    """Let a layer of self-attention get its queries, keys and values by one product."""
    parts = [attention.query, attention.key, attention.value]
    biased, place = attention.query.bias is not None, attention.query.weight.device
    joined = nn.Linear(attention.query.in_features, sum(attention.widths), bias=biased, device=place)
    joined.weight.copy_(torch.cat([part.weight for part in parts]))
    if biased:
        joined.bias.copy_(torch.cat([part.bias for part in parts]))
    attention.joined = joined
    del attention.query, attention.key, attention.value


def _packed(weight: Tensor, bias: Tensor | None, weights: str, prepack: bool) -> nn.Module | None:
    """The layer with these weights in the form wanted; None where they stay as they are."""
    if weights == "fp32":
        return BatchLinear(weight, bias) if weight.numel() >= BIG else None
    if weights == "int8" and weight.shape[1] > 1:
        return Int8Linear(weight, bias)
    return NarrowLinear(weight, bias, torch.float16 if weights == "fp16" else torch.bfloat16, prepack=prepack)
