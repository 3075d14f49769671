"""Packed weights for decoding, which reads every matrix for each token: layouts and dtypes that are read faster, and
layers of fewer operators, because for one token the call of an operator costs most of its time.

Shapes: ... any leading axes, K inputs, N outputs; B rows, H heads, T positions, W the width, D features per head.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lmtrain.model.language_model import TiedOutput
from lmtrain.nn.attention import SelfAttention
from lmtrain.nn.blocks import EncoderBlock
from lmtrain.nn.norms import EPSILON, RMSNorm
from lmtrain.nn.pooling import AttentionPooling
from lmtrain.system.device import DTYPES, cpu_info

PREPACKED = hasattr(torch.ops.mkldnn, "_linear_pointwise") and torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
"""Whether matrices can be stored in oneDNN's own layout. A plain bf16 matrix is converted to it by every call."""

PREPACKED_BF16 = PREPACKED and torch.ops.mkldnn._is_mkldnn_bf16_supported()
"""The same for bf16 matrices, which need a CPU with AVX-512 or a comparable extension."""

PREPACKED_FP32 = PREPACKED and cpu_info("vendor_id") != "GenuineIntel"
"""The same for float32 matrices. On an Intel CPU the plain product of one row is faster, on an AMD CPU far slower."""

MIN_PREPACKED = 2**17
"""From this many elements on, a float32 matrix gains from oneDNN's layout: below, the call costs more than it saves."""


class PackedLinear(nn.Module):
    """x W^T + b: (..., K) -> (..., N), computed in `dtype`, which W is stored in; the result has x's dtype.

    W is stored in oneDNN's layout if there is one for the dtype and CPU, which is faster above all for few rows.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None, dtype: torch.dtype) -> None:
        super().__init__()
        available = {torch.float32: PREPACKED_FP32, torch.bfloat16: PREPACKED_BF16}.get(dtype, False)
        self.prepacked = available and weight.device.type == "cpu"
        weight = weight.detach().to(dtype)
        if self.prepacked:  # for products of about this many rows
            weight = torch.ops.mkldnn._reorder_linear_weight(weight, 16 if dtype == torch.float32 else 1)
        self.weight = weight
        self.bias = None if bias is None else bias.detach().to(dtype)

    def forward(self, x: Tensor) -> Tensor:
        """(..., K) -> (..., N)."""
        narrow = x.to(self.weight.dtype)
        if self.prepacked:
            result: Tensor = torch.ops.mkldnn._linear_pointwise(narrow, self.weight, self.bias, "none", [], "none")
        else:
            result = F.linear(narrow, self.weight, self.bias)
        return result.to(x.dtype)


class PackedNorm(nn.Module):
    """`RMSNorm` as x g sqrt(D) / sqrt(||x||^2 + D eps), in four passes: on a CPU, torch has no fused kernel for it.

    The gain g (..., D) may differ between vectors.
    """

    def __init__(self, gain: Tensor) -> None:
        super().__init__()
        width = gain.shape[-1]
        self.gain = gain.detach() * width**0.5
        self.floor = gain.new_tensor((width * EPSILON) ** 0.5)  # on the device of the gain

    def forward(self, x: Tensor) -> Tensor:
        """(..., D) -> (..., D)."""
        return x * self.gain / torch.hypot(torch.linalg.vector_norm(x, 2, -1, True), self.floor)


class FusedSelfAttention(SelfAttention):
    """A trained `SelfAttention` whose queries, keys and values come from one product.

    Queries and keys also share one call of the norm, and are rotated as complex numbers: a head's features are
    reordered so that the two of a pair are neighbors, which changes no product of a query and a key. Norm and rotation
    are computed in float32; the results, and so the cache, have the dtype `dtype`.
    """

    def __init__(self, trained: SelfAttention, dtype: torch.dtype) -> None:
        nn.Module.__init__(self)
        self.dtype = dtype
        self.heads, self.pattern = trained.heads, trained.pattern
        self.scale, self.dropout = trained.scale, trained.dropout
        width = trained.query.out_features // self.heads
        pairs = sorted(range(width), key=lambda feature: feature % ((width + 1) // 2))
        rows = torch.arange(len(trained.query.weight)).view(self.heads, width)[:, pairs].flatten()
        weight = torch.cat([trained.query.weight[rows], trained.key.weight[rows], trained.value.weight]).detach()
        self.query_key_value = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
        self.query_key_value.weight = nn.Parameter(weight)
        self.output = trained.output
        self.query_key_norm: nn.Module = nn.Identity()
        if isinstance(trained.query_norm, RMSNorm) and isinstance(trained.key_norm, RMSNorm):
            gains = [part.weight[pairs].expand(self.heads, 1, -1) for part in (trained.query_norm, trained.key_norm)]
            self.query_key_norm = PackedNorm(torch.cat(gains))
        self.train(trained.training)

    def project(self, x: Tensor, rotation: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """(B, T, W) -> queries, keys and values, each (B, H, T, D)."""
        joined = self.query_key_value(x.to(self.dtype))
        joined = joined.unflatten(-1, (3 * self.heads, -1)).transpose(1, 2)
        rotated = self.query_key_norm(joined[:, : 2 * self.heads].float())
        if rotation is not None:
            pairs = torch.view_as_complex(rotated.unflatten(-1, (-1, 2)).contiguous())
            rotated = torch.view_as_real(pairs * torch.complex(*rotation)).flatten(-2)
        query, key = rotated.to(self.dtype).chunk(2, dim=1)
        return query, key, joined[:, 2 * self.heads :]


def pack_for_decoding(model: nn.Module, precision: str) -> None:
    """Replace the layers of `model` by packed ones in `precision`, in place. The model can then predict and decode, but
    no longer score, be trained or saved.

    fp32 changes numbers by rounding only. bf16 and fp16 round the inputs, weights and results of every product, as
    autocast does, and keys and queries once more, for the cache. Everything else stays float32.
    """
    dtype = DTYPES[precision]
    for module in model.modules():  # they include those of a layer that has just been replaced
        for name, child in module.named_children():
            # Other kinds of attention use the projections of one inside them, whose features they rotate or mix
            # themselves.
            if isinstance(module, EncoderBlock) and isinstance(child, SelfAttention):
                setattr(module, name, FusedSelfAttention(child, dtype))
            elif isinstance(child, RMSNorm) and child.weight.device.type == "cpu":
                setattr(module, name, PackedNorm(child.weight))
            elif isinstance(module, AttentionPooling) and child is module.key:
                continue  # it is not applied to the input; see `AttentionPooling._project`
            elif isinstance(child, nn.Linear | TiedOutput) and (
                dtype != torch.float32 or child.weight.numel() >= MIN_PREPACKED
            ):
                bias = child.bias if isinstance(child, nn.Linear) else None
                setattr(module, name, PackedLinear(child.weight, bias, dtype))
