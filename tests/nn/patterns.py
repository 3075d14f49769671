"""Attention patterns of every kind, inputs and a layer for the tests of what computes them, and attention as a loop."""

import math
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from lmtrain.nn import dot_product
from lmtrain.nn.attention import SelfAttention
from lmtrain.nn.key_reduction import CompressedAttention
from lmtrain.nn.patterns import CAUSAL, FULL, Pattern
from lmtrain.nn.positions import alibi_bias, alibi_slopes

PARTS: list[dict[str, int]] = [{}, {"window": 3}, {"window": 2, "stride": 5, "global_tokens": 1}]
PATTERNS = [Pattern(causal=causal, **parts) for causal, parts in product((False, True), PARTS)]
LONG = dot_product.LONG + 45
"""Long enough to skip keys on a CPU, and not a multiple of a block."""

every_pattern = pytest.mark.parametrize("pattern", PATTERNS, ids=str)
every_sparse_pattern = pytest.mark.parametrize("pattern", [p for p in PATTERNS if p not in (FULL, CAUSAL)], ids=str)


def random_qkv(length: int, *, rows: int = 1, dim: int = 4) -> list[Tensor]:
    """Queries, keys and values of two heads that require gradients."""
    torch.manual_seed(0)
    return [torch.randn(rows, 2, length, dim, dtype=torch.float64, requires_grad=True) for _ in range(3)]


def compressed(stride: int, pattern: Pattern, **options: Any) -> CompressedAttention:
    """A layer whose kernels differ in every entry, as after training."""
    projections = SelfAttention(8, 2, pattern=pattern, qk_norm=True, **options)
    layer = CompressedAttention(projections, stride=stride)
    with torch.no_grad():
        layer.compress_key.weight.normal_(std=0.4)
        layer.compress_value.weight.normal_(std=0.4)
    return layer


def alibi(length: int) -> Tensor:
    """The bias of two heads."""
    positions = torch.arange(length)
    return alibi_bias(alibi_slopes(2), positions, positions).double()


def loop(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor, bias: Tensor | None = None, scale: float | None = None
) -> Tensor:
    """One softmax per query, over the keys that the bool mask (B, H, T, T) names; zeros where it names none."""
    out = torch.zeros(*query.shape[:-1], value.shape[-1], dtype=value.dtype)
    mask = mask.expand(*query.shape[:-1], key.shape[-2])
    scale = scale or 1 / math.sqrt(query.shape[-1])
    for b, h, t in product(*map(range, query.shape[:-1])):
        keys = mask[b, h, t].nonzero().flatten().tolist()
        scores = [scale * (query[b, h, t] @ key[b, h, k]).item() for k in keys]
        if bias is not None:
            scores = [score + bias[h, t, k].item() for score, k in zip(scores, keys, strict=True)]
        weights = [math.exp(score) for score in scores]
        for k, weight in zip(keys, weights, strict=True):
            out[b, h, t] += weight / sum(weights) * value[b, h, k]
    return out
