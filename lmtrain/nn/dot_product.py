"""Scaled dot-product attention: one function, with the kernel that suits the device and the pattern.

Shapes: B rows, H heads, Tq positions of queries, Tk of keys, D features per head (Dv of values), N blocks of C
positions.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from lmtrain.nn.dropout import drop
from lmtrain.nn.patterns import CAUSAL, FULL, Pattern
from lmtrain.nn.precision import at_least_float32

LONG = 256
"""In longer rows, of at least two windows, local attention without a mask skips keys outside the window."""
BLOCK = 64
"""Positions in a block of queries or keys of local attention."""


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None = None,
    *,
    pattern: Pattern = FULL,
    dropout: float = 0.0,
    scale: float | None = None,
) -> Tensor:
    """softmax(scale query key^T) value, where `scale` is 1 / sqrt(D) by default (Vaswani et al., 2017).

    query (B, H, Tq, D), key (B, H, Tk, D), value (B, H, Tk, Dv) -> (B, H, Tq, Dv).

    `mask` broadcasts to (B, H, Tq, Tk). A bool mask is True where the query may attend to the key; what a query gets
    that may attend to no key means nothing, but is finite. A float mask is added to the scores, and must leave every
    query a key. `pattern` masks further keys by position, where there are as many queries as keys. `dropout` is the
    rate on the weights.

    | case                                              | computation                                              |
    | ------------------------------------------------- | -------------------------------------------------------- |
    | local, no mask, Tq > LONG and at least 2 windows  | each block of queries with the blocks of keys near it    |
    | otherwise on a GPU                                | torch's fused kernels, in the dtype of an added mask     |
    | on a CPU, one query, no pattern, no gradients     | torch's fused kernel, in float32                         |
    | otherwise on a CPU                                | plain; compiled, it is faster than the fused bf16 kernel |
    """
    window, length = pattern.local_window, query.shape[-2]
    if window is not None and mask is None and length > LONG and 2 * window <= length:
        return _attend_local(query, key, value, pattern, window, dropout, scale)
    if query.is_cuda:
        if pattern == CAUSAL and mask is None:
            return F.scaled_dot_product_attention(query, key, value, dropout_p=dropout, is_causal=True, scale=scale)
        mask = _with_pattern(mask, pattern, query, key)
        return _attend_fused(query, key, value, mask, dropout, scale)
    if length == 1 and pattern == FULL and not dropout and not torch.is_grad_enabled():
        # On a CPU, torch's kernel for one query is several times as fast in float32.
        with torch.autocast("cpu", enabled=False):
            query, key, wide = (at_least_float32(x) for x in (query, key, value))
            mask = mask.to(query.dtype) if mask is not None and mask.is_floating_point() else mask
            return F.scaled_dot_product_attention(query, key, wide, mask, scale=scale).to(value.dtype)
    weights = attention_weights(query, key, _with_pattern(mask, pattern, query, key), scale)
    return drop(weights.to(value.dtype), dropout) @ value


def _attend_fused(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, dropout: float, scale: float | None
) -> Tensor:
    """Attend by torch's kernels, in the dtype of an added mask: bf16 can't tell position 257 from 256."""
    if mask is None or not mask.is_floating_point() or mask.dtype == query.dtype:
        return F.scaled_dot_product_attention(query, key, value, mask, dropout, scale=scale)
    with torch.autocast(query.device.type, enabled=False):
        query, key, wide = (x.to(mask.dtype) for x in (query, key, value))
        return F.scaled_dot_product_attention(query, key, wide, mask, dropout, scale=scale).to(value.dtype)


def _attend_local(
    query: Tensor, key: Tensor, value: Tensor, pattern: Pattern, window: int, dropout: float, scale: float | None
) -> Tensor:
    """Attend with each block of queries to the blocks of keys in its windows, all in one product (Tq = Tk)."""
    length, before = query.shape[-2], -(-(window - 1) // BLOCK)
    count, after = -(-length // BLOCK), 0 if pattern.causal else before

    def near(x: Tensor) -> Tensor:  # (B, H, N, (before + 1 + after) C, D)
        padded = to_blocks(F.pad(x, (0, 0, before * BLOCK, after * BLOCK)), BLOCK)
        return torch.cat([padded[:, :, first : first + count] for first in range(before + 1 + after)], dim=-2)

    first = torch.arange(count, device=query.device).view(-1, 1, 1) * BLOCK
    queries = first + torch.arange(BLOCK, device=query.device).unsqueeze(-1)
    keys = first + torch.arange(-before * BLOCK, (1 + after) * BLOCK, device=query.device)
    allowed = pattern(queries, keys) & (keys >= 0) & (keys < length)
    weights = attention_weights(to_blocks(query, BLOCK), near(key), allowed, scale)
    attended = drop(weights.to(value.dtype), dropout) @ near(value)
    return attended.flatten(-3, -2)[..., :length, :]


def to_blocks(x: Tensor, size: int) -> Tensor:
    """(B, H, T, D) -> (B, H, N, C, D) for N blocks of C = `size` positions, the last one padded with zeros."""
    blocks = -(-x.shape[2] // size)
    return F.pad(x, (0, 0, 0, blocks * size - x.shape[2])).view(*x.shape[:2], blocks, size, x.shape[-1])


def attention_weights(query: Tensor, key: Tensor, mask: Tensor | None, scale: float | None) -> Tensor:
    """Return the attention weights of `attend`: (B, H, Tq, D), (B, H, Tk, D) -> (B, H, Tq, Tk)."""
    query, key = query * (query.shape[-1] ** -0.5 if scale is None else scale), key.transpose(-2, -1)
    # No cast to float32: softmax sums in float32 whatever its input, and bf16 halves what is saved for the gradient.
    # A float32 mask makes the sum float32, as it must: bf16 can't tell position 257 from 256.
    if mask is None:
        return (query @ key).softmax(-1)
    if mask.is_floating_point():
        return (query @ key + mask).softmax(-1)
    return _masked_product(query, key, mask).softmax(-1)


def _masked_product(query: Tensor, key: Tensor, mask: Tensor) -> Tensor:
    """query key where the bool `mask` is True, else a very low number: (..., Tq, D), (..., D, Tk) -> (..., Tq, Tk)."""
    # Finite, so that softmax has no 0 / 0: half the lowest, since a sum with that, or a cast to bf16, may overflow.
    lowest = torch.finfo(query.dtype).min / 2
    if not query.is_cpu:
        return (query @ key).masked_fill(~mask, lowest)
    # On a CPU the product adds the mask. A mask between product and softmax keeps the compiler from fusing softmax with
    # dropout, and compiled code reads a bool tensor element by element, once more for the gradient.
    shape = *query.shape[:-1], key.shape[-1]
    added = torch.zeros(mask.shape, dtype=query.dtype).masked_fill(~mask, lowest).expand(shape)
    return torch.baddbmm(*(x.flatten(0, -3) for x in (added, query, key))).view(shape)


def _with_pattern(mask: Tensor | None, pattern: Pattern, query: Tensor, key: Tensor) -> Tensor | None:
    if pattern == FULL:
        return mask
    allowed = pattern.mask(query.shape[-2], query.device)
    return allowed if mask is None else restrict(mask, allowed)


def restrict(mask: Tensor, allowed: Tensor) -> Tensor:
    """Return `mask` (..., Tq, Tk), bool or additive, with the keys that are not `allowed` (..., Tq, Tk) masked too."""
    return mask.masked_fill(~allowed, float("-inf")) if mask.is_floating_point() else mask & allowed
