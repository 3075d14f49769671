"""Linear attention: the kernel phi(q) . phi(k) in place of exp(q . k), so that time is linear in the length.

One computation in three forms: over all keys, over every prefix in chunks, and token by token with a fixed state.

Shapes: B rows, H heads, T positions, D features per head (Dv of values), K chunks of C positions, W the layer's width.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lmtrain.nn.attention import SelfAttention, join_heads
from lmtrain.nn.dot_product import to_blocks
from lmtrain.nn.kv_cache import CachePosition, RecurrentState
from lmtrain.nn.positions import rotate
from lmtrain.nn.precision import at_least_float32

CHUNK = 64


def feature_map(x: Tensor) -> Tensor:
    """phi(x) = elu(x) + 1 (Katharopoulos et al., 2020), (...) -> (...), in float32 at least.

    Written as max(x, 0) + exp(min(x, 0)), which is the same and does not round exp(x) to a multiple of epsilon.
    """
    x = at_least_float32(x)
    return F.relu(x) + x.clamp_max(0).exp()


@dataclass
class LinearState(RecurrentState):
    """The state of linear attention: two sums over all keys k and values v read so far.

    total (B, H, D, Dv) is the sum of R phi(k) v^T, where R is the rotation, if any; normalizer (B, H, D) the sum of
    phi(k). Both are float32 at least, also under autocast: bf16 can't add one to 256, and fp16 ends at 65504.
    """

    total: Tensor
    normalizer: Tensor

    @classmethod
    def of(
        cls, key: Tensor, value: Tensor, *, rotation: Tensor | None = None, lengths: Tensor | None = None
    ) -> "LinearState":
        """Return the state after keys (B, H, T, D) and values (B, H, T, Dv), or each row's first `lengths` (B,)."""
        key = feature_map(key)
        if lengths is not None:
            padding = torch.arange(key.shape[-2], device=key.device) >= lengths.unsqueeze(-1)  # (B, T)
            key = key.masked_fill(padding[:, None, :, None], 0.0)
        with torch.autocast(key.device.type, enabled=False):
            return cls(rotate(key, rotation).transpose(-2, -1) @ value.to(key.dtype), key.sum(-2))

    def add(self, key: Tensor, value: Tensor, *, rotation: Tensor | None = None) -> None:
        """Add further keys (B, H, T, D) and values (B, H, T, Dv)."""
        new = LinearState.of(key, value, rotation=rotation)
        self.total += new.total
        self.normalizer += new.normalizer

    def read(self, query: Tensor, *, rotation: Tensor | None = None) -> Tensor:
        """Attend with queries (B, H, T, D) to all keys added so far -> (B, H, T, Dv)."""
        query = feature_map(query)
        with torch.autocast(query.device.type, enabled=False):
            return _quotient(rotate(query, rotation) @ self.total, query @ self.normalizer.unsqueeze(-1))


def linear_attention(query: Tensor, key: Tensor, value: Tensor, *, rotation: Tensor | None = None) -> Tensor:
    """sum_i w_ti v_i / sum_i w_ti over all i, with w_ti = phi(q_t) . phi(k_i) (Katharopoulos et al., 2020), in O(T).

    query and key (B, H, T, D), value (B, H, T, Dv) -> (B, H, T, Dv), in float32 at least. `rotation` rotates the
    features phi in the numerator only: the denominator must stay positive (Su et al., 2021, section 3.3).
    """
    return LinearState.of(key, value, rotation=rotation).read(query, rotation=rotation)


def causal_linear_attention(query: Tensor, key: Tensor, value: Tensor, *, rotation: Tensor | None = None) -> Tensor:
    """Do the same as `linear_attention`, over the keys i <= t only, in O(T): one weight per pair of positions inside a
    chunk, and one sum over the chunks before it."""
    query, key = feature_map(query), feature_map(key)
    with torch.autocast(query.device.type, enabled=False):
        denominator = (query * key.cumsum(-2)).sum(-1, keepdim=True)
        query, key = rotate(query, rotation), rotate(key, rotation)
        return _quotient(_prefix_products(query, key, value.to(key.dtype)), denominator)


def _prefix_products(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """sum over i <= t of (q_t . k_i) v_i: (B, H, T, D), (B, H, T, D), (B, H, T, Dv) -> (B, H, T, Dv)."""
    length = query.shape[2]
    query, key, value = (to_blocks(x, CHUNK) for x in (query, key, value))  # (B, H, K, C, D)
    own = key.transpose(-2, -1) @ value  # (B, H, K, D, Dv)
    # Shifted by one before the sum: subtracting a sum's last term would keep that term's rounding error.
    before = F.pad(own, (0, 0, 0, 0, 1, 0)).cumsum(2)[:, :, :-1]
    inside = (query @ key.transpose(-2, -1)).tril() @ value  # (B, H, K, C, Dv)
    return (inside + query @ before).flatten(2, 3)[:, :, :length]


def _quotient(numerator: Tensor, denominator: Tensor) -> Tensor:
    """numerator / denominator, which may underflow to zero: the bound is far below any other sum of features."""
    return numerator / denominator.clamp_min(1e-30)


class LinearAttention(nn.Module):
    """Self-attention with the weights of `linear_attention` (Katharopoulos et al., 2020) and these `projections`.

    It is causal if their pattern is; the rest of it, and their scale and dropout rate, are ignored. It takes no mask
    and no attention bias, since no score per pair of tokens is computed.
    """

    def __init__(self, projections: SelfAttention) -> None:
        super().__init__()
        self.projections = projections

    def forward(self, x: Tensor, *, rotation: Tensor | None = None) -> Tensor:
        """(B, T, W) -> (B, T, W)."""
        query, key, value = self.projections.project(x)
        attention = causal_linear_attention if self.projections.pattern.causal else linear_attention
        return self.projections.output(join_heads(attention(query, key, value, rotation=rotation).to(value.dtype)))

    def prefill(self, x: Tensor, lengths: Tensor, *, rotation: Tensor | None = None) -> tuple[Tensor, LinearState]:
        """Attend causally over x (B, T, W); also return the state after its rows' first `lengths` (B,) tokens."""
        query, key, value = self.projections.project(x)
        attended = causal_linear_attention(query, key, value, rotation=rotation)
        state = LinearState.of(key, value, rotation=rotation, lengths=lengths)
        return self.projections.output(join_heads(attended.to(value.dtype))), state

    def step(self, x: Tensor, cache: LinearState, at: CachePosition) -> Tensor:
        """One token per row, (B, 1, W) -> (B, 1, W), which is added to the cache."""
        query, key, value = self.projections.project(x)
        cache.add(key, value, rotation=at.rotation)
        return self.projections.output(join_heads(cache.read(query, rotation=at.rotation).to(value.dtype)))
