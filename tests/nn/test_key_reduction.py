"""Attention to fewer keys than tokens, against a loop over queries."""

import pytest
import torch
from torch import Tensor

from lmtrain.nn.attention import SelfAttention
from lmtrain.nn.key_reduction import CompressedAttention, Compression, LinformerAttention
from lmtrain.nn.patterns import Pattern
from lmtrain.nn.positions import rotation
from tests.nn.patterns import compressed


def compress(blocks: Compression, x: Tensor) -> list[Tensor]:
    """One vector (B, H, D) for each block: the sum over its tokens of the token times the matrix of its offset."""
    heads, stride, width, _ = blocks.weight.shape
    found = []
    for start in range(0, x.shape[2], stride):
        total = torch.zeros(x.shape[0], heads, width)
        for offset in range(min(stride, x.shape[2] - start)):
            for h in range(heads):
                total[:, h] = total[:, h] + x[:, h, start + offset] @ blocks.weight[h, offset]
        found.append(total)
    return found


def compressed_loop(layer: CompressedAttention, x: Tensor, by: Tensor | None) -> Tensor:
    """Query by query over a list of the keys that it attends to."""
    query, key, value = layer.projections.project(x, by)
    far_keys, far_values = compress(layer.compress_key, key), compress(layer.compress_value, value)
    pooled, scale = [], layer.projections.scale or query.shape[-1] ** -0.5
    for t in range(x.shape[1]):
        block = t // layer.stride
        near = range(block * layer.stride, t + 1) if layer.projections.pattern.causal else ()
        far = range(block if layer.projections.pattern.causal else len(far_keys))
        keys = torch.stack([far_keys[j] for j in far] + [key[:, :, i] for i in near], dim=2)
        values = torch.stack([far_values[j] for j in far] + [value[:, :, i] for i in near], dim=2)
        scores = scale * (query[:, :, t].unsqueeze(2) * keys).sum(-1)
        pooled.append((scores.softmax(-1).unsqueeze(-1) * values).sum(2).flatten(1))
    result: Tensor = layer.projections.output(torch.stack(pooled, dim=1))
    return result


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    ("length", "stride", "scale"), [(1, 4, None), (8, 4, None), (11, 3, None), (5, 1, None), (3, 7, None), (11, 3, 1.0)]
)
def test_compressed_equals_loop_with_gradients(length: int, stride: int, scale: float | None, causal: bool) -> None:
    torch.manual_seed(0)
    layer = compressed(stride, Pattern(causal), scale=scale)
    x, weight = torch.randn(2, length, 8), torch.randn(2, length, 8)
    for by in (None, rotation(torch.arange(length), 4)):
        out, expected = layer(x, rotation=by), compressed_loop(layer, x, by)
        torch.testing.assert_close(out, expected)
        wanted = [p for p in layer.parameters() if not (causal and length <= stride and p.dim() == 4)]
        gradients = torch.autograd.grad((expected * weight).sum(), wanted)
        torch.testing.assert_close(torch.autograd.grad((out * weight).sum(), wanted), gradients, atol=1e-5, rtol=1e-4)


def test_compression_starts_as_the_mean_of_a_block() -> None:
    x = torch.arange(24.0).view(1, 2, 6, 2)
    out = Compression(2, 2, 3)(x)
    torch.testing.assert_close(out, torch.stack((x[:, :, :3].mean(2), x[:, :, 3:].mean(2)), dim=2))
    torch.testing.assert_close(Compression(2, 2, 4)(x)[:, :, 1], x[:, :, 4:].sum(2) / 4)


def linformer_loop(layer: LinformerAttention, x: Tensor, by: Tensor | None) -> Tensor:
    query, key, value = layer.projections.project(x, by)
    length, pooled = x.shape[1], []
    keys, values = [], []
    for e, f in zip(layer.mix_key, layer.mix_value, strict=True):  # the last weight belongs to the last position
        keys.append(sum((e[i - length] * key[:, :, i] for i in range(length)), torch.zeros(())))
        values.append(sum((f[i - length] * value[:, :, i] for i in range(length)), torch.zeros(())))
    for t in range(length):
        scores = (query[:, :, t].unsqueeze(2) * torch.stack(keys, 2)).sum(-1) / query.shape[-1] ** 0.5
        pooled.append((scores.softmax(-1).unsqueeze(-1) * torch.stack(values, 2)).sum(2).flatten(1))
    result: Tensor = layer.projections.output(torch.stack(pooled, dim=1))
    return result


@pytest.mark.parametrize("length", [1, 6, 9])
def test_linformer_equals_loop_with_gradients(length: int) -> None:
    torch.manual_seed(0)
    layer = LinformerAttention(SelfAttention(8, 2, qk_norm=True), context=9, projected=3)
    x, weight = torch.randn(2, length, 8), torch.randn(2, length, 8)
    for by in (None, rotation(torch.arange(length), 4)):
        out, expected = layer(x, rotation=by), linformer_loop(layer, x, by)
        torch.testing.assert_close(out, expected)
        gradients = torch.autograd.grad((expected * weight).sum(), list(layer.parameters()))
        found = torch.autograd.grad((out * weight).sum(), list(layer.parameters()))
        torch.testing.assert_close(found, gradients, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("pattern", [Pattern(causal=True), Pattern(window=2)])
def test_linformer_rejects_a_pattern_because_its_keys_mix_the_whole_row(pattern: Pattern) -> None:
    with pytest.raises(ValueError, match="can't hide keys"):
        LinformerAttention(SelfAttention(8, 2, pattern=pattern), context=9, projected=3)


def test_linformer_projections_keep_the_scale_of_keys_and_values() -> None:
    torch.manual_seed(0)
    layer, tokens = LinformerAttention(SelfAttention(8, 2), context=400, projected=100), torch.randn(400, 50)
    for mix in (layer.mix_key, layer.mix_value):
        assert (mix @ tokens).std().item() == pytest.approx(1, abs=0.05)
    assert not torch.equal(layer.mix_key, layer.mix_value)
