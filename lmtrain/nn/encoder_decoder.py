"""The parts of an encoder-decoder (Vaswani et al., 2017): embedding, encoder, decoder and prediction.

Shapes: B rows, T positions of the decoder, Ts positions of the source, D the model's width, H heads, L layers of the
decoder, V target words.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lmtrain.nn.attention import SelfAttention, padding_mask
from lmtrain.nn.blocks import EncoderBlock, FeedForward, NormPosition, ResidualOptions
from lmtrain.nn.cross_attention import CrossAttention, DecoderBlock
from lmtrain.nn.norms import NORMS, NormKind
from lmtrain.nn.patterns import Pattern
from lmtrain.nn.pointer import PointerAttention, copy_log_probs
from lmtrain.nn.positions import sinusoidal
from lmtrain.nn.precision import at_least_float32


@dataclass(frozen=True, kw_only=True)
class EncoderDecoderConfig:
    """The configuration of an encoder-decoder.

    The last two of the `target_vocab` ids are END and BEGIN. With `copy`, source and target must share their ids: a
    copied source id becomes a target id. `max_length` bounds sources and targets; in `Seq2Seq` END counts, in
    `NonAutoregressive` it does not. The original (Vaswani et al., 2017) has `norm_kind="layer"` and
    `norm_position="post"`. `cross_attention` makes a decoder block's from `dim` and `heads`; `alignment` has two other
    classes for it.
    """

    source_vocab: int
    target_vocab: int
    dim: int = 128
    heads: int = 4
    ff_dim: int = 512
    encoder_layers: int = 2
    decoder_layers: int = 2
    max_length: int = 128
    norm_kind: NormKind = "rms"
    norm_position: NormPosition = "pre"
    copy: bool = False
    cross_attention: Callable[[int, int], CrossAttention] = CrossAttention

    @property
    def end_id(self) -> int:
        """END, the id after a target's last word."""
        return self.target_vocab - 2

    @property
    def begin_id(self) -> int:
        """BEGIN, the decoder's first input."""
        return self.target_vocab - 1

    @property
    def residual(self) -> ResidualOptions:
        """The options of every block's residuals."""
        return {"norm_kind": self.norm_kind, "norm_position": self.norm_position}

    def last_norm(self) -> nn.Module:
        """Return the norm that ends a stack of blocks, or the identity if each block already ends with a norm."""
        return NORMS[self.norm_kind](self.dim) if self.norm_position == "pre" else nn.Identity()

    def feed_forward(self) -> FeedForward:
        """Return a block's feed-forward layer."""
        return FeedForward(self.dim, self.ff_dim)


class PositionedEmbedding(nn.Module):
    """Word embedding plus sinusoids."""

    def __init__(self, vocab: int, config: EncoderDecoderConfig) -> None:
        super().__init__()
        self.words = nn.Embedding(vocab, config.dim)
        self.sinusoids: Tensor
        # Computed, so never saved.
        self.register_buffer("sinusoids", sinusoidal(torch.arange(config.max_length), config.dim), persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Tokens (B, T) -> (B, T, D). Raises ValueError for more than `max_length`."""
        if tokens.shape[1] > len(self.sinusoids):
            raise ValueError(f"{tokens.shape[1]} tokens are too many: max_length={len(self.sinusoids)}")
        embedded: Tensor = self.words(tokens)
        return embedded + self.sinusoids[: tokens.shape[1]]


class SourceEncoder(nn.Module):
    """Embedding and encoder blocks, followed by a norm if pre-norm. Every source has a word."""

    def __init__(self, config: EncoderDecoderConfig) -> None:
        super().__init__()
        self.embedding = PositionedEmbedding(config.source_vocab, config)
        self.blocks = nn.ModuleList(
            EncoderBlock(config.dim, SelfAttention(config.dim, config.heads), config.feed_forward(), **config.residual)
            for _ in range(config.encoder_layers)
        )
        self.norm = config.last_norm()

    def forward(self, source: Tensor, valid: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Source (B, Ts) -> the memory (B, Ts, D), and `valid` (B, Ts) bool: True on words, by default everywhere."""
        valid = torch.ones_like(source, dtype=torch.bool) if valid is None else valid
        x = self.embedding(source)
        for block in self.blocks:
            x = block(x, mask=padding_mask(valid))
        return self.norm(x), valid


class Decoder(nn.Module):
    """Decoder blocks, whose self-attention has this pattern, followed by a norm if pre-norm."""

    def __init__(self, config: EncoderDecoderConfig, pattern: Pattern) -> None:
        super().__init__()
        self.blocks: Any = nn.ModuleList(
            DecoderBlock(
                config.dim,
                SelfAttention(config.dim, config.heads, pattern=pattern),
                config.cross_attention(config.dim, config.heads),
                config.feed_forward(),
                **config.residual,
            )
            for _ in range(config.decoder_layers)
        )
        self.norm = config.last_norm()

    def forward(self, x: Tensor, memory: Tensor, valid: Tensor, mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Inputs (B, T, D), memory (B, Ts, D) -> (B, T, D), and the cross-attention weights of every layer
        (L, B, H, T, Ts). `valid` (B, Ts) masks the memory, `mask` the inputs."""
        per_layer = []
        for block in self.blocks:
            x, weights = block(x, memory, mask=mask, memory_mask=padding_mask(valid))
            per_layer.append(weights)
        return self.norm(x), torch.stack(per_layer)


class Prediction(nn.Module):
    """The distribution over target words; with `copy` it is mixed with a pointer to the source (See et al., 2017)."""

    def __init__(self, config: EncoderDecoderConfig) -> None:
        super().__init__()
        self.vocabulary = nn.Linear(config.dim, config.target_vocab)
        self.pointer = PointerAttention(config.dim, config.dim, config.dim) if config.copy else None
        self.gate = nn.Linear(config.dim, 1) if config.copy else None

    def forward(self, decoded: Tensor, memory: Tensor, source: Tensor, valid: Tensor) -> Tensor:
        """The decoder's output (B, T, D), memory (B, Ts, D), source, valid (B, Ts) -> log p (B, T, V) float32."""
        log_vocabulary = F.log_softmax(at_least_float32(self.vocabulary(decoded)), -1)
        if self.pointer is None or self.gate is None:
            return log_vocabulary
        log_pointer = self.pointer(decoded, memory, mask=valid.unsqueeze(1))
        return copy_log_probs(log_vocabulary, log_pointer, source, self.gate(decoded).squeeze(-1))
