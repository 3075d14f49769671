"""The encoder of a language model: a stack of blocks, with the positions and patterns of their attention.

Shapes: B rows, T positions, D the model's width, H heads.
"""

from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lmtrain.config.schema import ModelConfig
from lmtrain.nn.attention import SelfAttention
from lmtrain.nn.blocks import Cache, EncoderBlock, FeedForward
from lmtrain.nn.key_reduction import CompressedAttention, LinformerAttention
from lmtrain.nn.kv_cache import CachePosition
from lmtrain.nn.linear_attention import LinearAttention
from lmtrain.nn.patterns import Pattern
from lmtrain.nn.positions import Rotation, alibi_bias, alibi_slopes, rotation
from lmtrain.nn.sets import ISAB


class Encoder(nn.Module):
    """The blocks of a configuration, one for each of its `layer_attention`.

    With `recompute_blocks` the backward pass computes the activations inside a block again (Chen et al., 2016), with
    the same random numbers.
    """

    def __init__(self, config: ModelConfig, *, recompute_blocks: bool = False) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(encoder_block(config, kind) for kind in config.layer_attention)
        self.recompute_blocks = recompute_blocks
        positions, rotary = torch.arange(config.context), config.position == "rotary"
        cosines, sines = rotation(positions, config.dim // config.heads) if rotary else (None, None)
        self.cosines: Tensor | None
        self.sines: Tensor | None
        self.slopes: Tensor | None
        # Fixed tables of the `context` positions: computed, so never saved.
        self.register_buffer("cosines", cosines, persistent=False)
        self.register_buffer("sines", sines, persistent=False)
        slopes = alibi_slopes(config.heads) if config.position == "alibi" else None
        self.register_buffer("slopes", slopes, persistent=False)

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        """Embedded tokens (B, T, D) at positions (T,) -> states (B, T, D)."""
        bias, rotated_by = self._bias(positions), self._rotation(positions)
        for block in self.blocks:
            forward = partial(block, mask=bias, rotation=rotated_by) if isinstance(block, EncoderBlock) else block
            recompute = self.recompute_blocks and torch.is_grad_enabled()
            x = checkpoint(forward, x, use_reentrant=False) if recompute else forward(x)
        return x

    def prefill(self, x: Tensor, positions: Tensor, lengths: Tensor, capacity: int) -> tuple[Tensor, list[Cache]]:
        """`forward`, and each layer's cache of the rows' first `lengths` (B,) tokens, with space for `capacity`."""
        bias, rotated_by, caches = self._bias(positions), self._rotation(positions), []
        for block in self._causal_blocks():
            x, cache = block.prefill(x, lengths, capacity, mask=bias, rotation=rotated_by)
            caches.append(cache)
        return x, caches

    def cache_position(self, position: Tensor, kv_len: int, *, uniform_length: bool) -> CachePosition:
        """The cache position of each row's next token (B,), with its rotation or slopes."""
        shared = position[:1] if uniform_length else position.view(-1, 1, 1)  # over rows, heads and the one position
        return CachePosition(position, kv_len, uniform_length, self._rotation(shared), self.slopes)

    def step(self, x: Tensor, caches: list[Cache], at: CachePosition) -> Tensor:
        """One token per row, (B, 1, D) -> (B, 1, D)."""
        for block, cache in zip(self._causal_blocks(), caches, strict=True):
            x = block.step(x, cache, at)
        return x

    def _causal_blocks(self) -> list[EncoderBlock]:
        return [block for block in self.blocks if isinstance(block, EncoderBlock)]

    def _bias(self, positions: Tensor) -> Tensor | None:
        return alibi_bias(self.slopes, positions, positions) if self.slopes is not None else None  # (H, T, T)

    def _rotation(self, positions: Tensor) -> Rotation | None:
        if self.cosines is None or self.sines is None:
            return None
        return self.cosines[positions], self.sines[positions]


def encoder_block(config: ModelConfig, kind: str) -> EncoderBlock | ISAB:
    """A block with attention of this kind: (B, T, D) -> (B, T, D)."""
    dim, heads, ff_dim = config.dim, config.heads, config.ff_dim or 4 * config.dim
    if kind == "induced":
        return ISAB(
            dim,
            heads,
            config.inducing_points,
            form="residual",
            ff_dim=ff_dim,
            activation=config.activation,
            norm_kind=config.norm,
            norm_position=config.norm_position,
            qk_norm=config.qk_norm,
            dropout=config.dropout,
            attention_dropout=config.attention_dropout,
        )
    return EncoderBlock(
        dim,
        attention_layer(config, kind),
        FeedForward(dim, ff_dim, config.activation),
        norm_kind=config.norm,
        norm_position=config.norm_position,
        dropout=config.dropout,
    )


def attention_layer(config: ModelConfig, kind: str) -> nn.Module:
    """The self-attention layer of this kind: one of `schema.ATTENTION` except `induced`, or a union of masks."""
    dim, heads, causal = config.dim, config.heads, config.mode == "causal"
    if kind == "linear":
        return LinearAttention(dim, heads, causal=causal, qk_norm=config.qk_norm)
    if kind == "compressed":
        return CompressedAttention(
            dim,
            heads,
            stride=config.compression,
            causal=causal,
            qk_norm=config.qk_norm,
            dropout=config.attention_dropout,
        )
    if kind == "linformer":
        return LinformerAttention(
            dim,
            heads,
            context=config.context,
            projected=config.projected_length,
            qk_norm=config.qk_norm,
            dropout=config.attention_dropout,
        )
    return SelfAttention(
        dim, heads, pattern=mask_pattern(config, kind), qk_norm=config.qk_norm, dropout=config.attention_dropout
    )


def mask_pattern(config: ModelConfig, kind: str) -> Pattern:
    """The pattern of `full`, `local`, `strided`, `global` or a union such as `local+global`."""
    parts = kind.split("+")
    return Pattern(
        causal=config.mode == "causal",
        window=config.attention_window if "local" in parts else None,
        stride=config.attention_stride if "strided" in parts else None,
        global_tokens=config.attention_globals if "global" in parts else None,
    )
