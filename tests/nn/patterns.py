"""Attention patterns of every kind, and inputs for the tests of what computes them."""

from itertools import product

import pytest
import torch
from torch import Tensor

from lmtrain.nn import dot_product
from lmtrain.nn.patterns import CAUSAL, FULL, Pattern
from lmtrain.nn.positions import alibi_bias, alibi_slopes

SPARSE = [
    {"window": 3},
    {"stride": 4},
    {"global_tokens": 2},
    {"window": 2, "stride": 5},
    {"window": 2, "global_tokens": 1},
    {"stride": 3, "global_tokens": 2},
    {"window": 2, "stride": 5, "global_tokens": 1},
]
PATTERNS = [Pattern(causal=causal, **parts) for causal, parts in product((False, True), [{}, *SPARSE])]
LONG = dot_product.LONG + 45
"""Long enough to skip keys on a CPU, and not a multiple of a block."""

every_pattern = pytest.mark.parametrize("pattern", PATTERNS, ids=str)
every_sparse_pattern = pytest.mark.parametrize("pattern", [p for p in PATTERNS if p not in (FULL, CAUSAL)], ids=str)


def random_qkv(length: int, *, rows: int = 1, heads: int = 2, dim: int = 4) -> list[Tensor]:
    """Queries, keys and values that require gradients."""
    torch.manual_seed(0)
    return [torch.randn(rows, heads, length, dim, dtype=torch.float64, requires_grad=True) for _ in range(3)]


def alibi(length: int) -> Tensor:
    """The bias of two heads."""
    positions = torch.arange(length)
    return alibi_bias(alibi_slopes(2), positions, positions).double()
