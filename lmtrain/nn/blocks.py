"""The residual block of encoders: attention and a feed-forward layer, each with its norm and addition.

Shapes: B rows, T positions, D the model's width, F the hidden width of the feed-forward layer.
"""

from collections.abc import Callable
from typing import Any, Literal, TypedDict, Unpack

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lmtrain.nn.attention import ResidualProjection
from lmtrain.nn.dropout import drop
from lmtrain.nn.kv_cache import CachePosition
from lmtrain.nn.norms import NORMS, NormKind

Activation = Literal["relu", "gelu", "swiglu"]
NormPosition = Literal["pre", "post"]

Cache = Any
"""What an attention layer stores of the tokens read so far: a `KeyValueCache` or `RecurrentState`."""


class ResidualOptions(TypedDict, total=False):
    """The options of every `Residual` in a block."""

    norm_kind: NormKind
    norm_position: NormPosition
    dropout: float


def relu(x: Tensor) -> Tensor:
    """max(x, 0). In a compiled graph on a CPU it is x times 0 or 1, since PyTorch's own stores a bool tensor for its
    gradient, which compiled code writes element by element."""
    if torch.compiler.is_compiling() and x.device.type == "cpu":
        return x * x.detach().relu().sign()
    return F.relu(x)


def swiglu(x: Tensor) -> Tensor:
    """A SiLU gate times a second projection (Shazeer, 2020): (..., 2 F) -> (..., F)."""
    gate, content = x.chunk(2, dim=-1)
    return F.silu(gate) * content


ACTIVATIONS: dict[Activation, Callable[[Tensor], Tensor]] = {"relu": relu, "gelu": F.gelu, "swiglu": swiglu}


class FeedForward(nn.Module):
    """output(activation(hidden x)), position by position; for `swiglu`, `hidden` has twice the outputs.

    The hidden width `ff_dim` is 4 `dim` by default (Vaswani et al., 2017).
    """

    def __init__(self, dim: int, ff_dim: int | None = None, activation: Activation = "gelu") -> None:
        super().__init__()
        ff_dim = ff_dim or 4 * dim
        self.activate = ACTIVATIONS[activation]
        self.hidden = nn.Linear(dim, 2 * ff_dim if activation == "swiglu" else ff_dim, bias=False)
        self.output = ResidualProjection(ff_dim, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """(..., D) -> (..., D)."""
        return self.output(self.activate(self.hidden(x)))


class Residual(nn.Module):
    """The residual connection around a sublayer f, called as `residual(x, f)`, with a norm, and dropout on f's result.

    `pre` is x + f(norm(x)) (Xiong et al., 2020), `post` is norm(x + f(x)), the original (Vaswani et al., 2017).
    """

    def __init__(
        self, dim: int, *, norm_kind: NormKind = "rms", norm_position: NormPosition = "pre", dropout: float = 0.0
    ) -> None:
        super().__init__()
        self.norm = NORMS[norm_kind](dim)
        self.pre = norm_position == "pre"
        self.dropout = dropout

    def forward(self, x: Tensor, sublayer: Callable[[Tensor], Tensor]) -> Tensor:
        """(..., D) -> (..., D)."""
        return self.leave(x, sublayer(self.enter(x)))

    def enter(self, x: Tensor) -> Tensor:
        """The input of the sublayer."""
        return self.norm(x) if self.pre else x

    def leave(self, x: Tensor, result: Tensor) -> Tensor:
        """The output, given the sublayer's `result` for `enter(x)`."""
        x = x + drop(result, self.dropout, self.training)
        return x if self.pre else self.norm(x)


class EncoderBlock(nn.Module):
    """Self-attention, then feed-forward, each in a residual (Vaswani et al., 2017).

    `attention` is `SelfAttention` or another layer with `forward` and, for decoding, `prefill` and `step`, for a text
    of any length from 0. Its `step` writes to the cache in place, and never synchronizes with the host, so that a CUDA
    graph can capture it. `arguments` are those of its `forward`: `rotation` and, only in `SelfAttention`, `mask`.
    `options` are those of `Residual`.
    """

    def __init__(self, dim: int, attention: nn.Module, feed_forward: FeedForward, **options: Unpack[ResidualOptions]):
        super().__init__()
        self.attention: Any = attention
        self.attention_residual = Residual(dim, **options)
        self.feed_forward = feed_forward
        self.feed_forward_residual = Residual(dim, **options)

    def forward(self, x: Tensor, **arguments: Tensor) -> Tensor:
        """(B, T, D) -> (B, T, D)."""
        x = self.attention_residual(x, lambda y: self.attention(y, **arguments))
        return self.feed_forward_residual(x, self.feed_forward)

    def prefill(self, x: Tensor, lengths: Tensor, **arguments: Tensor) -> tuple[Tensor, Cache]:
        """Do the same as `forward` with causal attention; also return the cache of the rows' first `lengths` (B,)
        tokens."""
        normed = self.attention_residual.enter(x)
        attended, cache = self.attention.prefill(normed, lengths, **arguments)
        result = self.feed_forward_residual(self.attention_residual.leave(x, attended), self.feed_forward)
        return result, cache

    def step(self, x: Tensor, cache: Cache, at: CachePosition) -> Tensor:
        """One token per row, (B, 1, D) -> (B, 1, D); see `SelfAttention.step`."""
        x = self.attention_residual(x, lambda y: self.attention.step(y, cache, at))
        return self.feed_forward_residual(x, self.feed_forward)
