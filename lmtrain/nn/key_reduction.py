"""Self-attention over fewer keys than tokens: one key per block of tokens, or a fixed number of mixtures of all keys.

Shapes: B rows, H heads, T positions, D features per head, K blocks of S positions, W the layer's width, P projected
keys.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lmtrain.nn.attention import SelfAttention, join_heads
from lmtrain.nn.dot_product import to_blocks
from lmtrain.nn.dropout import drop
from lmtrain.nn.kv_cache import CachePosition, KeyValueCache, Rows
from lmtrain.nn.patterns import FULL


class Compression(nn.Module):
    """One vector for each block of S successive vectors, head by head: a convolution of width and stride S.

    It starts as the mean of the block, which is similar to its keys (or values), so that a query can match it from the
    first step. A random map would start with unrelated vectors.
    """

    def __init__(self, heads: int, head_dim: int, stride: int) -> None:
        super().__init__()
        self.weight = nn.Parameter((torch.eye(head_dim) / stride).repeat(heads, stride, 1, 1))  # (H, S, D, D)

    def forward(self, x: Tensor) -> Tensor:
        """(B, H, T, D) -> (B, H, K, D) with K = T / S, rounded up: the last block is padded with zeros."""
        return torch.einsum("bhksd,hsde->bhke", to_blocks(x, self.weight.shape[1]), self.weight.to(x.dtype))


@dataclass
class CompressedCache(KeyValueCache):
    """A `KeyValueCache` in which a cache position is not a token's position; see `CompressedAttention.prefill`."""

    stride: int

    def extend(self, tokens: int) -> None:
        """Add capacity for this many tokens, in new memory: one cache position per block."""
        super().extend(-(-tokens // self.stride))

    def select(self, rows: Rows, _same: int = 0, _unused: int = 0) -> None:
        """Keep these rows. They are copied whole, since equal tokens do not have equal cache positions here."""
        super().select(rows)


class CompressedAttention(nn.Module):
    """Multi-head attention to one key and value per block of `stride` tokens: memory-compressed (Liu et al., 2018).

    A query attends to every block or, if the pattern of the `projections` is causal, in one softmax to the blocks that
    end before its own and to the tokens of its own block up to itself, in time O(T^2 / S + T S). The rest of the
    pattern is ignored. Scale and dropout rate are those of the `projections`. Rotation comes before the compression.
    It takes no mask and no attention bias, since tokens have no keys of their own.
    """

    def __init__(self, projections: SelfAttention, *, stride: int) -> None:
        super().__init__()
        self.stride = stride
        self.projections = projections
        head_dim = projections.query.out_features // projections.heads
        self.compress_key = Compression(projections.heads, head_dim, stride)
        self.compress_value = Compression(projections.heads, head_dim, stride)

    def forward(self, x: Tensor, *, rotation: Tensor | None = None) -> Tensor:
        """(B, T, W) -> (B, T, W)."""
        query, key, value = self.projections.project(x, rotation)
        far_key, far_value = self.compress_key(key), self.compress_value(value)
        if self.projections.pattern.causal:
            attended = self._attend_causal(query, key, value, far_key, far_value)
            return self.projections.output(join_heads(attended))
        return self.projections.attend(query, far_key, far_value)

    def prefill(self, x: Tensor, lengths: Tensor, *, rotation: Tensor | None = None) -> tuple[Tensor, CompressedCache]:
        """Attend causally over x (B, T, W); also return the cache of its rows' first `lengths` (B,) tokens, for `step`.

        The first S cache positions hold the tokens of the row's unfinished block, the others one key per block.
        """
        query, key, value = self.projections.project(x, rotation)
        far_key, far_value = self.compress_key(key), self.compress_value(value)
        attended = self._attend_causal(query, key, value, far_key, far_value)
        keys = torch.cat((self._unfinished(key, lengths), far_key), dim=2)
        values = torch.cat((self._unfinished(value, lengths), far_value), dim=2)
        return self.projections.output(join_heads(attended)), CompressedCache(keys, values, self.stride)

    def step(self, x: Tensor, cache: CompressedCache, at: CachePosition) -> Tensor:
        """One token per row, (B, 1, W) -> (B, 1, W), at its row's position."""
        query, key, value = self.projections.project(x, at.rotation)
        block, within, blocks = at.position // self.stride, at.position % self.stride, (at.kv_len - 1) // self.stride
        cache.write(key, value, within)
        # The block's key is masked until its last token is written.
        near_key, near_value = cache.key[:, :, : self.stride], cache.value[:, :, : self.stride]
        cache.write(self.compress_key(near_key), self.compress_value(near_value), self.stride + block)
        near = torch.arange(self.stride, device=x.device) <= within.unsqueeze(-1)
        far = torch.arange(blocks, device=x.device) < block.unsqueeze(-1)
        allowed = torch.cat((near, far), dim=-1)  # (B, S + K)
        used = allowed.shape[-1]
        keys, values = cache.key[:, :, :used], cache.value[:, :, :used]
        return self.projections.attend(query, keys, values, allowed[:, None, None])

    def _attend_causal(self, query: Tensor, key: Tensor, value: Tensor, far_key: Tensor, far_value: Tensor) -> Tensor:
        """Queries, keys and values (B, H, T, D) and compressed ones (B, H, K, D) -> (B, H, T, D)."""
        length, blocks, scale = query.shape[2], far_key.shape[2], self.projections.scale
        query = query * (query.shape[-1] ** -0.5 if scale is None else scale)
        query, key, value = (to_blocks(x, self.stride) for x in (query, key, value))
        far = query.flatten(2, 3) @ far_key.transpose(-2, -1)  # (B, H, K S, K)
        near = query @ key.transpose(-2, -1)  # (B, H, K, S, S)
        order, offset = (torch.arange(size, device=query.device) for size in (blocks, self.stride))
        far = far.view(*near.shape[:-1], blocks).masked_fill(order >= order.view(-1, 1, 1), float("-inf"))
        near = near.masked_fill(offset > offset.unsqueeze(-1), float("-inf"))
        weights = torch.cat((far, near), dim=-1).softmax(-1).to(value.dtype)  # (B, H, K, S, K + S)
        weights = drop(weights, self.projections.dropout, self.training)
        attended = weights[..., :blocks].flatten(2, 3) @ far_value + (weights[..., blocks:] @ value).flatten(2, 3)
        return attended[:, :, :length]

    def _unfinished(self, x: Tensor, lengths: Tensor) -> Tensor:
        """Return the block to which each row's next token belongs: (B, H, T, D), (B,) -> (B, H, S, D)."""
        x = F.pad(x, (0, 0, 0, self.stride))  # for a block that begins at the end
        index = (lengths // self.stride * self.stride).unsqueeze(-1) + torch.arange(self.stride, device=x.device)
        return x.take_along_dim(index[:, None, :, None], dim=2)


class LinformerAttention(nn.Module):
    """Multi-head attention to `projected` learned mixtures of the keys and of the values (Wang et al., 2020).

    The mixtures, E of keys and F of values, both (projected, context), are shared by the heads; in a shorter row they
    are those of the last T of `context` positions. Each mixes the whole row, so no key can be hidden from a query:
    there is no causal form, no mask, and a pattern of the `projections` raises ValueError. Scale and dropout
    rate are those of the `projections`.
    """

    def __init__(self, projections: SelfAttention, *, context: int, projected: int) -> None:
        super().__init__()
        if projections.pattern != FULL:
            raise ValueError(f"linformer attention can't hide keys, as {projections.pattern} would")
        self.projections = projections
        # A sum of `context` independent keys, each with this weight, has the mean square of one: the scores, and what
        # the softmax makes of them, start as large as in attention to the tokens themselves.
        self.mix_key = nn.Parameter(torch.empty(projected, context))
        self.mix_value = nn.Parameter(torch.empty(projected, context))
        nn.init.normal_(self.mix_key, std=context**-0.5)
        nn.init.normal_(self.mix_value, std=context**-0.5)

    def forward(self, x: Tensor, *, rotation: Tensor | None = None) -> Tensor:
        """(B, T, W) -> (B, T, W), for 1 to `context` positions."""
        query, key, value = self.projections.project(x, rotation)
        mix_key, mix_value = (mix[:, -x.shape[1] :].to(key.dtype) for mix in (self.mix_key, self.mix_value))
        return self.projections.attend(query, mix_key @ key, mix_value @ value)  # P keys
