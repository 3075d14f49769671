"""Multi-head self-attention with its key-value cache (Vaswani et al., 2017).

Shapes: B rows, H heads, T positions (Tk of keys), D features per head, W = H D the width (in `blocks` and `model`: D).
"""

from torch import Tensor, nn

from lmtrain.nn.dot_product import attend
from lmtrain.nn.kv_cache import CachePosition, KeyValueCache
from lmtrain.nn.norms import RMSNorm
from lmtrain.nn.patterns import FULL, Pattern
from lmtrain.nn.positions import rotate


class ResidualProjection(nn.Linear):
    """The last layer of a sublayer, whose output is added to the residual stream.

    Its type is a marker: a deep model initializes these layers with smaller weights.
    """


def split_heads(x: Tensor, heads: int) -> Tensor:
    """(B, T, H D) -> (B, H, T, D)."""
    return x.view(*x.shape[:-1], heads, x.shape[-1] // heads).transpose(1, 2)


def join_heads(x: Tensor) -> Tensor:
    """(B, H, T, D) -> (B, T, H D)."""
    return x.transpose(1, 2).flatten(-2)


class SelfAttention(nn.Module):
    """Multi-head attention of a sequence to itself, for any pattern of positions.

    `qk_norm` gives queries and keys unit mean square per head, with learned gains (after Henry et al., 2020, who have
    one gain in place of `scale`). The scores are products of queries and keys times `scale`: by default 1 / sqrt(D), in
    plain dot-product attention 1 (Luong et al., 2015). `heads` must divide `dim`.
    """

    def __init__(
        self,
        dim: int,
        heads: int,
        *,
        pattern: Pattern = FULL,
        qk_norm: bool = False,
        scale: float | None = None,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.heads, self.pattern, self.scale, self.dropout = heads, pattern, scale, dropout
        self.query, self.key, self.value = (nn.Linear(dim, dim, bias=False) for _ in range(3))
        self.output = ResidualProjection(dim, dim, bias=False)
        self.query_norm = RMSNorm(dim // heads) if qk_norm else nn.Identity()
        self.key_norm = RMSNorm(dim // heads) if qk_norm else nn.Identity()

    def forward(self, x: Tensor, *, mask: Tensor | None = None, rotation: Tensor | None = None) -> Tensor:
        """(B, T, W) -> (B, T, W). `mask`, as for `attend`, applies in addition to the pattern; see `padding_mask`."""
        return self.attend(*self.project(x, rotation), mask, self.pattern)

    def prefill(
        self, x: Tensor, lengths: Tensor, *, mask: Tensor | None = None, rotation: Tensor | None = None
    ) -> tuple[Tensor, KeyValueCache]:
        """Do the same as `forward` for x (B, T, W), and also return the cache for `step`.

        Only the first `lengths` (B,) tokens of a row count. `lengths` is not used here, since `step` overwrites or
        masks the other tokens; other kinds of attention use it.
        """
        query, key, value = self.project(x, rotation)
        return self.attend(query, key, value, mask, self.pattern), KeyValueCache(key, value)

    def step(self, x: Tensor, cache: KeyValueCache, at: CachePosition) -> Tensor:
        """One token per row, (B, 1, W) -> (B, 1, W): it is written to the cache, and attends to what is cached."""
        query, key, value = self.project(x, at.rotation)
        cache.write(key, value, at.position)
        keys, values = cache.key[:, :, : at.kv_len], cache.value[:, :, : at.kv_len]
        return self.attend(query, keys, values, at.mask(self.pattern))

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None, pattern: Pattern = FULL
    ) -> Tensor:
        """`dot_product.attend` with this layer's dropout and scale, then `output`: (B, H, T, D) each -> (B, T, W)."""
        dropout = self.dropout if self.training else 0.0
        attended = attend(query, key, value, mask, pattern=pattern, dropout=dropout, scale=self.scale)
        return self.output(join_heads(attended))

    def project(self, x: Tensor, rotation: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """(B, T, W) -> queries, keys and values, each (B, H, T, D)."""
        query, key, value = (part(x).unflatten(-1, (self.heads, -1)) for part in (self.query, self.key, self.value))
        # Normalized before the transpose: after it, torch.compile makes two GPU kernels of a norm.
        query, key, value = (part.transpose(1, 2) for part in (self.query_norm(query), self.key_norm(key), value))
        return rotate(query, rotation), rotate(key, rotation), value


def padding_mask(valid: Tensor) -> Tensor:
    """Which keys are real, (B, Tk) bool, as a mask for every head and query: (B, 1, 1, Tk)."""
    return valid[:, None, None]
