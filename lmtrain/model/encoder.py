"""The encoder of a language model: a stack of blocks, with the positions and patterns of their attention.

Shapes: B rows, T tokens, G global tokens before them, D the model's width, H heads.
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lmtrain.config.schema import ModelConfig
from lmtrain.nn.attention import SelfAttention
from lmtrain.nn.blocks import Cache, EncoderBlock, FeedForward, ResidualOptions
from lmtrain.nn.cross_attention import CrossAttention, CrossAttentionBlock
from lmtrain.nn.key_reduction import CompressedAttention, LinformerAttention
from lmtrain.nn.kv_cache import CachePosition
from lmtrain.nn.linear_attention import LinearAttention
from lmtrain.nn.patterns import Pattern
from lmtrain.nn.positions import alibi_bias, alibi_slopes, rotation
from lmtrain.nn.sets import ISAB


class Encoder(nn.Module):
    """The blocks of a configuration, one for each of its `layer_attention`.

    If a layer has global attention, learned global tokens come before the sequence (Ainslie et al., 2020), and are
    dropped after the last block. In layers with global attention all tokens attend to the global tokens. If windowed,
    global tokens attend to all tokens, which makes them a memory of the window. If causal, each global token attends
    only to the global tokens up to itself: otherwise a token could learn of later ones through it.

    If `activation_checkpointing` is set, the backward pass recomputes the activations inside a block (Chen et al.,
    2016), with the same random numbers.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.blocks: Any = nn.ModuleList(encoder_block(config, kind) for kind in config.layer_attention)
        self.activation_checkpointing = False
        self.global_count = count = config.global_tokens
        self.global_tokens = nn.Parameter(torch.empty(count, config.dim)) if count else None
        positions, rotary = torch.arange(count + config.context), config.position == "rotary"
        rotations = rotation(positions, config.dim // config.heads) if rotary else None
        slopes = alibi_slopes(config.heads) if config.position == "alibi" else None
        self.rotations: Tensor | None
        self.slopes: Tensor | None
        # Computed, so never saved.
        self.register_buffer("rotations", rotations, persistent=False)
        self.register_buffer("slopes", slopes, persistent=False)

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        """Embedded tokens (B, T, D) at positions (T,) -> (B, T, D)."""
        x, arguments = self._enter(x, positions)
        for block in self.blocks:
            if self.activation_checkpointing and torch.is_grad_enabled():
                x = checkpoint(partial(block, **arguments), x, use_reentrant=False)
            else:
                x = block(x, **arguments)
        return x[:, self.global_count :]

    def prefill(self, x: Tensor, positions: Tensor, lengths: Tensor) -> tuple[Tensor, list[Cache]]:
        """Do the same as `forward`, and also return a cache per layer of each row's first `lengths` (B,) tokens."""
        x, arguments = self._enter(x, positions)
        caches = []
        for block in self.blocks:
            x, cache = block.prefill(x, lengths + self.global_count, **arguments)
            caches.append(cache)
        return x[:, self.global_count :], caches

    def step(self, x: Tensor, caches: list[Cache], position: Tensor, kv_len: int) -> Tensor:
        """One token per row, (B, 1, D) -> (B, 1, D), each at its position (B,), with `kv_len` tokens to attend to."""
        position = position + self.global_count
        # The rotation is the same for all heads, and for one query.
        rotation = None if self.rotations is None else self.rotations[:, position.view(-1, 1, 1)]
        at = CachePosition(position, kv_len + self.global_count, rotation, self.slopes)
        for block, cache in zip(self.blocks, caches, strict=True):
            x = block.step(x, cache, at)
        return x

    def _enter(self, x: Tensor, positions: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """x (B, T, D) at positions (T,) -> the global tokens followed by x (B, G + T, D), and the blocks' argument
        for positions: ALiBi's `mask` (H, G + T, G + T), or `rotation` (2, G + T, D / (2 H)), or none.

        The schema has no ALiBi and no rotary positions for kinds of attention that do not take them.
        """
        if self.global_tokens is not None:
            first = self.global_tokens.to(x.dtype).expand(len(x), -1, -1)
            first_positions = torch.arange(self.global_count, device=x.device)
            x, positions = torch.cat((first, x), dim=1), torch.cat((first_positions, positions + self.global_count))
        if self.slopes is not None:
            return x, {"mask": alibi_bias(self.slopes, positions, positions)}
        return x, {"rotation": self.rotations[:, positions]} if self.rotations is not None else {}


def encoder_block(config: ModelConfig, kind: str) -> EncoderBlock | ISAB:
    """A block with attention of this kind: (B, T, D) -> (B, T, D)."""
    residual: ResidualOptions = {
        "norm_kind": config.norm,
        "norm_position": config.norm_position,
        "dropout": config.dropout,
    }
    feed_forward = partial(FeedForward, config.dim, config.ff_dim, config.activation)
    if kind == "induced":
        attention = partial(
            CrossAttention, config.dim, config.heads, qk_norm=config.qk_norm, dropout=config.attention_dropout
        )
        gather, spread = (CrossAttentionBlock(config.dim, attention(), feed_forward(), **residual) for _ in range(2))
        return ISAB(config.dim, config.inducing_points, gather, spread)
    return EncoderBlock(config.dim, attention_layer(config, kind), feed_forward(), **residual)


def attention_layer(config: ModelConfig, kind: str) -> nn.Module:
    """The self-attention layer of this kind: one of `schema.ATTENTION` except `induced`, or a union of masks."""
    parts = kind.split("+")
    pattern = Pattern(
        causal=config.mode == "causal",
        window=config.attention_window if "local" in parts else None,
        stride=config.attention_stride if "strided" in parts else None,
        global_tokens=config.attention_globals if "global" in parts else None,
    )
    attention = SelfAttention(
        config.dim, config.heads, pattern=pattern, qk_norm=config.qk_norm, dropout=config.attention_dropout
    )
    if kind == "linear":
        return LinearAttention(attention)
    if kind == "compressed":
        return CompressedAttention(attention, stride=config.compression)
    if kind == "linformer":
        return LinformerAttention(attention, context=config.context, projected=config.projected_length)
    return attention
