"""The encoder of a language model: a stack of blocks, with what positions and patterns do inside attention.

Shapes: B rows, T positions, D the model's width, H heads.
"""

from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lmtrain.config.schema import ModelConfig
from lmtrain.nn.attention import MultiHeadAttention
from lmtrain.nn.blocks import Cache, EncoderBlock, FeedForward
from lmtrain.nn.key_reduction import CompressedAttention, LinformerAttention
from lmtrain.nn.linear_attention import LinearAttention
from lmtrain.nn.patterns import Pattern
from lmtrain.nn.place import Place
from lmtrain.nn.positions import Rotation, alibi_bias, alibi_slopes, rotation
from lmtrain.nn.sets import ISAB


class Encoder(nn.Module):
    """The blocks of a configuration, one for each of its `layer_attention`."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(encoder_block(config, kind) for kind in config.layer_attention)
        self.recompute = False  # what the backward pass needs of a block: train.activation_checkpointing
        places, rotary = torch.arange(config.context), config.position == "rotary"
        cosines, sines = rotation(places, config.dim // config.heads) if rotary else (None, None)
        self.cosines: Tensor | None
        self.sines: Tensor | None
        self.slopes: Tensor | None
        # Fixed tables of the `context` positions: computed, so never saved.
        self.register_buffer("cosines", cosines, persistent=False)
        self.register_buffer("sines", sines, persistent=False)
        slopes = alibi_slopes(config.heads) if config.position == "alibi" else None
        self.register_buffer("slopes", slopes, persistent=False)

    def forward(self, x: Tensor, places: Tensor) -> Tensor:
        """Embedded tokens (B, T, D) at positions (T,) -> states (B, T, D)."""
        bias, turn = self._bias(places), self._rotation(places)
        for block in self.blocks:
            read = partial(block, mask=bias, rotation=turn) if isinstance(block, EncoderBlock) else block
            # Computed again, a block draws the random numbers that it drew before (Chen et al., 2016).
            recompute = self.recompute and torch.is_grad_enabled()
            x = checkpoint(read, x, use_reentrant=False) if recompute else read(x)
        return x

    def prefill(self, x: Tensor, places: Tensor, lengths: Tensor, columns: int) -> tuple[Tensor, list[Cache]]:
        """`forward`, and each layer's cache of the rows' first `lengths` (B,) tokens, with room for `columns`."""
        bias, turn, caches = self._bias(places), self._rotation(places), []
        for block in self._causal_blocks():
            x, cache = block.prefill(x, lengths, columns, mask=bias, rotation=turn)
            caches.append(cache)
        return x, caches

    def place(self, column: Tensor, seen: int, *, level: bool) -> Place:
        """Where the next token of each row goes, with what positions do there; see `Place`."""
        turn = self._rotation(column[:1] if level else column.view(-1, 1, 1))  # over rows, heads and the one position
        return Place(column, seen, level, turn, self.slopes)

    def step(self, x: Tensor, caches: list[Cache], place: Place) -> Tensor:
        """One token per row, (B, 1, D) -> (B, 1, D)."""
        for block, cache in zip(self._causal_blocks(), caches, strict=True):
            x = block.step(x, cache, place)
        return x

    def _causal_blocks(self) -> list[EncoderBlock]:
        return [block for block in self.blocks if isinstance(block, EncoderBlock)]

    def _bias(self, places: Tensor) -> Tensor | None:
        return alibi_bias(self.slopes, places, places) if self.slopes is not None else None  # (H, T, T)

    def _rotation(self, places: Tensor) -> Rotation | None:
        if self.cosines is None or self.sines is None:
            return None
        return self.cosines[places], self.sines[places]


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
    """The self-attention layer of this kind: one of `schema.ATTENTION` but `induced`, or a union of masks."""
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
    return MultiHeadAttention(
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
