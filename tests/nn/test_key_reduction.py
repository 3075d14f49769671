"""Attention to fewer keys than tokens, against a loop over queries, and in steps."""

import pytest
import torch
from torch import Tensor

from lmtrain.nn.blocks import EncoderBlock, FeedForward
from lmtrain.nn.key_reduction import CompressedAttention, Compression, LinformerAttention
from lmtrain.nn.kv_cache import CachePosition
from lmtrain.nn.positions import Rotation, rotation


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


def compressed_loop(layer: CompressedAttention, x: Tensor, by: Rotation | None = None) -> Tensor:
    """Query by query over a list of the keys that it attends to."""
    query, key, value = layer.projections.project(x, by)
    far_keys, far_values = compress(layer.compress_key, key), compress(layer.compress_value, value)
    pooled = []
    for t in range(x.shape[1]):
        block = t // layer.stride
        near = range(block * layer.stride, t + 1) if layer.causal else ()
        far = range(block if layer.causal else len(far_keys))
        keys = torch.stack([far_keys[j] for j in far] + [key[:, :, i] for i in near], dim=2)
        values = torch.stack([far_values[j] for j in far] + [value[:, :, i] for i in near], dim=2)
        scores = (query[:, :, t].unsqueeze(2) * keys).sum(-1) / query.shape[-1] ** 0.5
        pooled.append((scores.softmax(-1).unsqueeze(-1) * values).sum(2).flatten(1))
    result: Tensor = layer.projections.output(torch.stack(pooled, dim=1))
    return result


def scrambled(layer: CompressedAttention) -> CompressedAttention:
    """With kernels that differ in every entry, as after training."""
    with torch.no_grad():
        layer.compress_key.weight.normal_()
        layer.compress_value.weight.normal_()
    return layer


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("length", "stride"), [(1, 4), (8, 4), (11, 3), (5, 1), (3, 7)])
def test_compressed_equals_loop_with_gradients(length: int, stride: int, causal: bool) -> None:
    torch.manual_seed(0)
    layer = scrambled(CompressedAttention(8, 2, stride=stride, causal=causal, bias=True, qk_norm=True))
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


def test_causal_compressed_does_not_depend_on_the_future() -> None:
    torch.manual_seed(0)
    x, by = torch.randn(1, 14, 8), rotation(torch.arange(14), 4)
    for causal in (True, False):
        layer = scrambled(CompressedAttention(8, 2, stride=4, causal=causal))
        for t in range(12):
            changed = x.clone()
            changed[:, t + 1] += 1
            before, after = layer(x, rotation=by), layer(changed, rotation=by)
            assert torch.equal(before[:, : t + 1], after[:, : t + 1]) is causal
            assert (before[:, t + 1 :] - after[:, t + 1 :]).abs().amax(-1).gt(1e-6).all()


@pytest.mark.parametrize("precision", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("stride", [1, 3, 4])
def test_prefill_and_steps_equal_forward_for_rows_of_different_length(stride: int, precision: torch.dtype) -> None:
    torch.manual_seed(0)
    layer = scrambled(CompressedAttention(8, 2, stride=stride, causal=True, qk_norm=True, dropout=0.5))
    block = EncoderBlock(8, layer, FeedForward(8, 16)).eval()
    x, lengths = torch.randn(6, 18, 8), torch.tensor([0, 1, 3, 4, 7, 8])
    positions, noise = torch.arange(18), torch.randn(6, 8, 8) * 100
    padded = torch.where((positions[:8] >= lengths.unsqueeze(-1)).unsqueeze(-1), noise, x[:, :8])
    tolerance = 1e-5 if precision == torch.float32 else 0.1
    with torch.no_grad():
        full = block(x, rotation=rotation(positions, 4))
        with torch.autocast("cpu", precision, enabled=precision != torch.float32):
            out, cache = block.prefill(padded, lengths, 18, rotation=rotation(positions[:8], 4))
            torch.testing.assert_close(out[-1].float(), full[-1, :8], atol=tolerance, rtol=tolerance)
            for i in range(10):
                position = lengths + i
                new = x.take_along_dim(position[:, None, None], dim=1)
                out = block.step(
                    new,
                    cache,
                    CachePosition(position, int(position.max()) + 1, rotation=rotation(position[:, None, None], 4)),
                )
                expected = full.take_along_dim(position[:, None, None], dim=1)
                torch.testing.assert_close(out.float(), expected, atol=tolerance, rtol=tolerance)


def test_compressed_empty_prefill_and_selected_rows() -> None:
    torch.manual_seed(0)
    layer, x = scrambled(CompressedAttention(8, 2, stride=2, causal=True)), torch.randn(3, 6, 8)
    out, cache = layer.prefill(x[:, :0], torch.zeros(3, dtype=torch.long), 6)
    assert out.shape == (3, 0, 8)
    for t in range(3):
        layer.step(x[:, t : t + 1], cache, CachePosition(torch.full((3,), t), t + 1))
    rows = torch.tensor([2, 0, 2])
    chosen = cache.select(rows)
    for t in range(3, 6):
        out = layer.step(x[rows, t : t + 1], chosen, CachePosition(torch.full((3,), t), t + 1))
        torch.testing.assert_close(out, layer(x)[rows, t : t + 1])


@pytest.mark.parametrize("causal", [False, True])
def test_compressed_bf16_autocast_is_close(causal: bool) -> None:
    torch.manual_seed(0)
    x, by = torch.randn(2, 21, 16), rotation(torch.arange(21), 4)
    layer = CompressedAttention(16, 4, stride=4, causal=causal, qk_norm=True)
    with torch.autocast("cpu", torch.bfloat16):
        out = layer(x, rotation=by)
        out.float().square().mean().backward()
    torch.testing.assert_close(out.float(), layer(x, rotation=by), atol=0.03, rtol=0.03)
    assert all(p.grad is not None and p.grad.isfinite().all() for p in layer.parameters())


@pytest.mark.parametrize("causal", [False, True])
def test_compressed_dropout_keeps_the_mean_and_is_off_in_eval(causal: bool) -> None:
    torch.manual_seed(0)
    layer, x = CompressedAttention(8, 2, stride=4, causal=causal, dropout=0.3), torch.randn(1, 16, 8)
    assert not torch.equal(layer(x), layer(x))
    mean = layer(x.expand(4000, -1, -1)).mean(0, keepdim=True)
    layer.eval()
    torch.testing.assert_close(mean, layer(x), atol=0.05, rtol=0)
    torch.testing.assert_close(layer(x), compressed_loop(layer, x))


def linformer_loop(layer: LinformerAttention, x: Tensor, by: Rotation | None = None) -> Tensor:
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
    layer = LinformerAttention(8, 2, context=9, projected=3, bias=True, qk_norm=True)
    x, weight = torch.randn(2, length, 8), torch.randn(2, length, 8)
    for by in (None, rotation(torch.arange(length), 4)):
        out, expected = layer(x, rotation=by), linformer_loop(layer, x, by)
        torch.testing.assert_close(out, expected)
        gradients = torch.autograd.grad((expected * weight).sum(), list(layer.parameters()))
        found = torch.autograd.grad((out * weight).sum(), list(layer.parameters()))
        torch.testing.assert_close(found, gradients, atol=1e-5, rtol=1e-4)


def test_linformer_projections_keep_the_scale_of_keys_and_values() -> None:
    torch.manual_seed(0)
    layer, tokens = LinformerAttention(8, 2, context=400, projected=100), torch.randn(400, 50)
    for mix in (layer.mix_key, layer.mix_value):
        assert (mix @ tokens).std().item() == pytest.approx(1, abs=0.05)
    assert not torch.equal(layer.mix_key, layer.mix_value)


def test_linformer_bf16_autocast_is_close_and_dropout_is_off_in_eval() -> None:
    torch.manual_seed(0)
    layer, x = LinformerAttention(16, 4, context=20, projected=5, qk_norm=True, dropout=0.5), torch.randn(2, 13, 16)
    assert not torch.equal(layer(x), layer(x))
    layer.eval()
    with torch.autocast("cpu", torch.bfloat16):
        out = layer(x)
    torch.testing.assert_close(out.float(), linformer_loop(layer, x), atol=0.03, rtol=0.03)


def test_wrong_arguments_are_rejected() -> None:
    x, mask, lengths = torch.randn(1, 3, 8), torch.zeros(3, 3), torch.tensor([3])
    compressed = CompressedAttention(8, 2, stride=2, causal=True)
    linformer = LinformerAttention(8, 2, context=4, projected=2)
    _, cache = compressed.prefill(x, lengths, 4)
    with pytest.raises(ValueError, match="stride=0"):
        CompressedAttention(8, 2, stride=0)
    with pytest.raises(ValueError, match="compressed attention has no score"):
        compressed(x, mask=mask)
    with pytest.raises(ValueError, match="use rotary positions"):
        compressed.prefill(x, lengths, 4, mask=mask)
    with pytest.raises(ValueError, match=r"\(2,\)"):
        compressed.step(x[:, :1], cache, CachePosition(lengths, 4, slopes=torch.zeros(2)))
    with pytest.raises(ValueError, match="linformer attention has no score"):
        linformer(x, mask=mask)
    with pytest.raises(ValueError, match="5 positions are more than the context of 4"):
        linformer(torch.randn(1, 5, 8))
