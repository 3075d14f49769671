"""Blocks for sets, whose elements have no order, and their induced and pooled forms (Lee et al., 2019).

    MAB(Q, V)  = O + ReLU(O W_O),  O = [O_1 .. O_H],  O_i = Attention(Q W_i^Q, V W_i^K, V W_i^V)      `PlainBlock`
               = attention and feed-forward, each with a residual and a norm                      `CrossAttentionBlock`
    SAB(X)     = MAB(X, X)                  every element attends to every other: quadratic in their number
    ISAB(X)    = MAB(X, MAB(I, X))          through m inducing points I: linear
    PMA(X)     = MAB(S, X)                  k seeds S attend: k vectors, for any order of the elements

`PlainBlock` is the block of later implementations; the paper's MAB is `CrossAttentionBlock` with the options
`norm_position="post"` and `norm_kind="layer"`, and ReLU in its feed-forward layer. With both, PMA pools the elements
themselves, without the paper's feed-forward layer before it.

Learned points start with unit variance, like a normalized element: at any width, their scores start at the scale of
scores between elements, so that the points can specialize.

Shapes: B sets, T elements (Tq of queries), m inducing points, k seeds or queries, H heads, D the block's width.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lmtrain.nn.attention import join_heads, padding_mask, split_heads
from lmtrain.nn.cross_attention import CrossAttention
from lmtrain.nn.dot_product import attend


class PlainBlock(nn.Module):
    """O + ReLU(O W_O) of the joined heads O: no residual from the queries, no norm."""

    def __init__(self, attention: CrossAttention) -> None:
        super().__init__()
        self.attention = attention

    def forward(self, x: Tensor, memory: Tensor, *, mask: Tensor | None = None) -> Tensor:
        """x (B, Tq, D), memory (B, T, D) -> (B, Tq, D). `mask` is as for `attend`."""
        pooled, _ = self.attention.pooled(x, memory, mask=mask)
        return pooled + F.relu(self.attention.output(pooled))


class MAB(nn.Module):
    """Multi-head attention block: a `PlainBlock` or a `CrossAttentionBlock`, for sets that may be padded."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, query: Tensor, values: Tensor, *, valid: Tensor | None = None) -> Tensor:
        """query (B, Tq, D), values (B, T, D) -> (B, Tq, D). `valid` (B, T) bool: False = padding, never attended to."""
        return self.block(query, values, mask=None if valid is None else padding_mask(valid))


class SAB(nn.Module):
    """Set attention block: MAB(X, X)."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = MAB(block)

    def forward(self, x: Tensor, *, valid: Tensor | None = None) -> Tensor:
        """(B, T, D) -> (B, T, D). `valid` (B, T) bool: False = padding, whose own results mean nothing."""
        return self.block(x, x, valid=valid)


class ISAB(nn.Module):
    """Induced set attention block: MAB(X, MAB(I, X)), with `inducing` learned points I; `gather` is the inner block."""

    def __init__(self, dim: int, inducing: int, gather: nn.Module, spread: nn.Module) -> None:
        super().__init__()
        self.inducing = nn.Parameter(torch.empty(inducing, dim))
        nn.init.normal_(self.inducing)
        self.gather = MAB(gather)
        self.spread = MAB(spread)

    def forward(self, x: Tensor, *, valid: Tensor | None = None) -> Tensor:
        """(B, T, D) -> (B, T, D). `valid` (B, T) bool: False = padding, whose own results mean nothing."""
        points = self.gather(self.inducing.expand(len(x), -1, -1), x, valid=valid)  # (B, m, D)
        return self.spread(x, points)


class PMA(nn.Module):
    """Pooling by multi-head attention: MAB(S, X), with `seeds` learned vectors S."""

    def __init__(self, dim: int, seeds: int, block: nn.Module) -> None:
        super().__init__()
        self.seeds = nn.Parameter(torch.randn(seeds, dim))
        self.block = MAB(block)

    def forward(self, x: Tensor, *, valid: Tensor | None = None) -> Tensor:
        """(B, T, D) -> (B, k, D). `valid` (B, T) bool: False = padding, never attended to."""
        return self.block(self.seeds.expand(len(x), -1, -1), x, valid=valid)


class LearnedQueryAttention(nn.Module):
    """Multi-head attention whose queries are `queries` learned vectors, not projected (Ji, Gao & Xie, 2019).

    It is [softmax(Q_i (X W_i^K)^T) X W_i^V] W_O, joined over the heads i; the source has no W_O.
    """

    def __init__(self, queries: int, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.queries = nn.Parameter(torch.randn(queries, dim))
        self.key = nn.Linear(dim, dim, bias=False)
        self.value = nn.Linear(dim, dim, bias=False)
        self.output = nn.Linear(dim, dim, bias=False)

    def forward(self, x: Tensor, *, valid: Tensor | None = None) -> Tensor:
        """(B, T, D) -> (B, k, D). `valid` (B, T) bool: False = padding, never attended to."""
        key, value = split_heads(self.key(x), self.heads), split_heads(self.value(x), self.heads)
        queries = split_heads(self.queries.to(key.dtype).expand(len(x), -1, -1), self.heads)
        mask = None if valid is None else padding_mask(valid)
        return self.output(join_heads(attend(queries, key, value, mask, scale=1.0)))
