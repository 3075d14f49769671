"""A model's matrices in the form in which decoding reads them fastest: every one is read whole for each token.

Shapes: ... any leading axes (R rows in all), K inputs, N outputs.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lmtrain.nn.language_model import LanguageModel

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

    def __init__(self, weight: Tensor, bias: Tensor | None, dtype: torch.dtype, *, prepack: bool = True) -> None:
        super().__init__()
        self.dtype = dtype
        self.prepacked = prepack and PREPACKED and weight.device.type == "cpu" and dtype == torch.bfloat16
        weight = weight.detach().to(dtype)
        self.weight = torch.ops.mkldnn._reorder_linear_weight(weight, 1) if self.prepacked else weight
        self.bias = None if bias is None else bias.detach().to(dtype)

    def forward(self, x: Tensor) -> Tensor:
        """(..., K) -> (..., N)."""
        narrow = x.to(self.dtype)
        if self.prepacked:
            result: Tensor = torch.ops.mkldnn._linear_pointwise(narrow, self.weight, self.bias, "none", [], "")
        else:
            result = F.linear(narrow, self.weight, self.bias)
        return result.to(x.dtype)


class Int8Linear(nn.Module):
    """x W^T + b with each row of W as 8-bit integers and one scale (Dettmers et al., 2022, without their outliers).

    The scale is the row's largest absolute value / 127; inputs and results are rounded to bf16. (..., K) -> (..., N)
    of x's own type. Raises ValueError where K is no multiple of 16: torch's kernel would read past the row's end.
    """

    WIDTH = 16

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        if weight.shape[1] % self.WIDTH:
            raise ValueError(f"{weight.shape[1]} inputs are not a multiple of {self.WIDTH}")
        weight = weight.detach().float()
        self.scale = (weight.abs().amax(1) / 127).clamp_min(torch.finfo(torch.bfloat16).tiny).bfloat16()  # (N,)
        self.weight = (weight / self.scale.float().unsqueeze(-1)).round().clamp(-127, 127).to(torch.int8)
        self.bias = None if bias is None else bias.detach().bfloat16()

    def forward(self, x: Tensor) -> Tensor:
        """(..., K) -> (..., N)."""
        rows = x.to(torch.bfloat16).flatten(0, -2).contiguous()  # the kernel takes a matrix
        result = torch._weight_int8pack_mm(rows, self.weight, self.scale).view(*x.shape[:-1], -1)
        return (result if self.bias is None else result + self.bias).to(x.dtype)


def pack(model: LanguageModel, weights: str, *, prepack: bool = True) -> None:
    """Put every matrix of the model into the form `weights`, for good: it can no longer be trained or saved.

    fp32 keeps every number as it is, and on a CPU a second copy of the big matrices. bf16 and fp16 round the inputs,
    weights and results of every product, as autocast does; int8 rounds the weights further, to half the bytes, but for
    matrices of a width that has no kernel, which become bf16. All else stays float32. Without `prepack` the layout is
    left to a compiler. Raises ValueError for int8 on another device than a CPU.
    """
    if weights == "fp32" and not (prepack and PREPACKED and model.output_weight.device.type == "cpu"):
        return
    if weights == "int8" and model.output_weight.device.type != "cpu":
        raise ValueError("int8 weights are for a CPU")
    model.packed_output = _packed(model.output_weight, None, weights, prepack) or model.packed_output
    scores = model.pool.key if model.pool.query is None else None  # read as a vector, not as a matrix
    for module in list(model.modules()):
        for name, child in module.named_children():
            if isinstance(child, nn.Linear) and child is not model.output and child is not scores:
                setattr(module, name, _packed(child.weight, child.bias, weights, prepack) or child)


def _packed(weight: Tensor, bias: Tensor | None, weights: str, prepack: bool) -> nn.Module | None:
    """The layer with these weights in the form wanted; None where they stay as they are."""
    if weights == "fp32":
        return BatchLinear(weight, bias) if weight.numel() >= BIG else None
    if weights == "int8" and weight.shape[1] % Int8Linear.WIDTH == 0:
        return Int8Linear(weight, bias)
    return NarrowLinear(weight, bias, torch.float16 if weights == "fp16" else torch.bfloat16, prepack=prepack)
