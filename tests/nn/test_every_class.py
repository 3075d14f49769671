"""Every public layer of `lmtrain.nn` can be made and called as its docstring says."""

import importlib
import inspect
import pkgutil
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import lmtrain.nn
from lmtrain.nn import (
    adaptive,
    attention,
    blocks,
    dropout,
    encoder_decoder,
    key_reduction,
    linear_attention,
    non_autoregressive,
    norms,
    patterns,
    pointer,
    pooling,
    seq2seq,
    sets,
)

X = torch.randn(2, 6, 8, generator=torch.Generator().manual_seed(0))
MEMORY = torch.randn(2, 5, 4, generator=torch.Generator().manual_seed(1))
TOKENS = torch.arange(12).view(2, 6)
VALID = torch.ones(2, 6, dtype=torch.bool)
SIZES = encoder_decoder.Sizes(source_vocab=12, target_vocab=12, dim=8, heads=2, ff_dim=16, max_length=6)


def self_attention() -> attention.SelfAttention:
    return attention.SelfAttention(8, 2)


def feed_forward() -> blocks.FeedForward:
    return blocks.FeedForward(8, 16)


CASES: dict[type[nn.Module], tuple[Callable[[], Tensor], tuple[int, ...]]] = {
    adaptive.AdaptiveSoftmax: (lambda: adaptive.AdaptiveSoftmax(8, 12, (2, 5))(torch.ones(2, 6, 12), X), (2, 6, 12)),
    attention.SelfAttention: (lambda: self_attention()(X), (2, 6, 8)),
    attention.CrossAttention: (lambda: attention.CrossAttention(8, 2, key_dim=4, output_dim=3)(X, MEMORY), (2, 6, 3)),
    attention.ResidualProjection: (lambda: attention.ResidualProjection(8, 3)(X), (2, 6, 3)),
    blocks.FeedForward: (lambda: feed_forward()(X), (2, 6, 8)),
    blocks.Residual: (lambda: blocks.Residual(8, norm_position="post")(X, feed_forward()), (2, 6, 8)),
    blocks.EncoderBlock: (lambda: blocks.EncoderBlock(8, self_attention(), feed_forward())(X), (2, 6, 8)),
    blocks.CrossAttentionBlock: (
        lambda: blocks.CrossAttentionBlock(8, attention.CrossAttention(8, 2, key_dim=4), feed_forward(), memory_dim=4)(
            X, MEMORY
        ),
        (2, 6, 8),
    ),
    blocks.DecoderBlock: (
        lambda: blocks.DecoderBlock(8, self_attention(), attention.CrossAttention(8, 2, key_dim=4), feed_forward())(
            X, MEMORY
        ),
        (2, 6, 8),
    ),
    dropout.Dropout: (lambda: dropout.Dropout(0.5)(X), (2, 6, 8)),
    encoder_decoder.PositionedEmbedding: (
        lambda: encoder_decoder.PositionedEmbedding(12, SIZES)(TOKENS),
        (2, 6, 8),
    ),
    encoder_decoder.SourceEncoder: (lambda: encoder_decoder.SourceEncoder(SIZES)(TOKENS)[0], (2, 6, 8)),
    encoder_decoder.Decoder: (
        lambda: encoder_decoder.Decoder(SIZES, patterns.FULL)(X[:, :3], X, VALID),
        (2, 3, 8),
    ),
    encoder_decoder.Prediction: (
        lambda: encoder_decoder.Prediction(SIZES)(X[:, :3], X, TOKENS, VALID),
        (2, 3, 12),
    ),
    key_reduction.Compression: (lambda: key_reduction.Compression(2, 4, 3)(attention.split_heads(X, 2)), (2, 2, 2, 4)),
    key_reduction.CompressedAttention: (
        lambda: key_reduction.CompressedAttention(8, 2, stride=4, causal=True)(X),
        (2, 6, 8),
    ),
    key_reduction.LinformerAttention: (
        lambda: key_reduction.LinformerAttention(8, 2, context=9, projected=3)(X),
        (2, 6, 8),
    ),
    linear_attention.LinearAttention: (lambda: linear_attention.LinearAttention(8, 2, causal=True)(X), (2, 6, 8)),
    non_autoregressive.NonAutoregressive: (
        lambda: non_autoregressive.NonAutoregressive(SIZES, "fixed").decode(TOKENS)[0],
        (2, 6),
    ),
    norms.RMSNorm: (lambda: norms.RMSNorm(8)(X), (2, 6, 8)),
    norms.ScaleNorm: (lambda: norms.ScaleNorm(8)(X), (2, 6, 8)),
    pointer.PointerAttention: (lambda: pointer.PointerAttention(8, 4, 16)(X, MEMORY), (2, 6, 5)),
    pooling.AttentionPooling: (lambda: pooling.AttentionPooling(8, 2, 16)(X), (2, 6, 8)),
    seq2seq.Seq2Seq: (lambda: seq2seq.Seq2Seq(SIZES)(TOKENS, TOKENS), (2, 6, 12)),
    sets.PlainBlock: (lambda: sets.PlainBlock(attention.CrossAttention(8, 2))(X, X[:, :3]), (2, 6, 8)),
    sets.MAB: (lambda: sets.MAB(8, 2, memory_dim=4)(X, MEMORY), (2, 6, 8)),
    sets.SAB: (lambda: sets.SAB(8, 2, form="residual")(X), (2, 6, 8)),
    sets.ISAB: (lambda: sets.ISAB(8, 2, 3)(X), (2, 6, 8)),
    sets.PMA: (lambda: sets.PMA(8, 2, 3, memory_dim=4)(MEMORY), (2, 3, 8)),
    sets.LearnedQueryAttention: (lambda: sets.LearnedQueryAttention(3, 8, 2, memory_dim=4)(MEMORY), (2, 3, 8)),
}


def public_layers() -> set[type[nn.Module]]:
    modules = [
        importlib.import_module(f"lmtrain.nn.{found.name}") for found in pkgutil.iter_modules(lmtrain.nn.__path__)
    ]
    return {
        layer
        for module in modules
        for name, layer in inspect.getmembers(module, inspect.isclass)
        if issubclass(layer, nn.Module) and layer.__module__ == module.__name__ and not name.startswith("_")
    }


def test_every_public_layer_is_here() -> None:
    assert public_layers() == set(CASES)


@pytest.mark.parametrize("layer", CASES, ids=lambda layer: layer.__name__)
def test_made_and_called(layer: type[nn.Module]) -> None:
    torch.manual_seed(0)
    call, shape = CASES[layer]
    result = call()
    assert result.shape == shape
    assert result.isfinite().all()
