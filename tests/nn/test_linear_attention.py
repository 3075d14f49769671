"""Linear attention's three forms against a loop over queries and keys, and the layer in steps."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lmtrain.nn.blocks import EncoderBlock, FeedForward
from lmtrain.nn.kv_cache import CachePosition
from lmtrain.nn.linear_attention import LinearAttention, LinearState, causal_linear_attention, linear_attention
from lmtrain.nn.positions import Rotation, rotate, rotation


def loop(query: Tensor, key: Tensor, value: Tensor, causal: bool, by: Rotation | None) -> Tensor:
    """The mean of values with weights phi(q) . phi(k), rotated only in the numerator, one head and query at a time."""
    query, key = F.elu(query) + 1, F.elu(key) + 1
    rotated_query, rotated_key = (query, key) if by is None else (rotate(query, by), rotate(key, by))
    out = torch.zeros_like(value)
    for b, h, t in torch.cartesian_prod(*(torch.arange(size) for size in query.shape[:3])).tolist():
        upper, lower = torch.zeros_like(value[b, h, 0]), torch.zeros_like(value[b, h, 0, 0])
        for i in range(t + 1 if causal else key.shape[2]):
            upper = upper + (rotated_query[b, h, t] @ rotated_key[b, h, i]) * value[b, h, i]
            lower = lower + query[b, h, t] @ key[b, h, i]
        out[b, h, t] = upper / lower
    return out


def recurrence(query: Tensor, key: Tensor, value: Tensor, by: Rotation | None) -> Tensor:
    state, read = LinearState.of(key[:, :, :0], value[:, :, :0]), []
    for t in range(query.shape[2]):
        now = slice(t, t + 1)
        part = None if by is None else (by[0][now], by[1][now])
        state.add(key[:, :, now], value[:, :, now], rotation=part)
        read.append(state.read(query[:, :, now], rotation=part))
    return torch.cat(read, dim=2)


@pytest.mark.parametrize("rotated", [False, True])
@pytest.mark.parametrize("length", [1, 4, 11])
def test_all_forms_equal_the_loop_with_their_gradients(length: int, rotated: bool) -> None:
    torch.manual_seed(0)
    query, key = torch.randn(2, 2, 2, length, 4, dtype=torch.float64, requires_grad=True)
    value = torch.randn(2, 2, length, 3, dtype=torch.float64, requires_grad=True)
    cos, sin = rotation(torch.arange(length), 4)
    by = (cos.double(), sin.double()) if rotated else None
    inputs, weight = (query, key, value), torch.randn(2, 2, length, 3, dtype=torch.float64)
    for causal, forms in (
        (False, [linear_attention(*inputs, rotation=by)]),
        (True, [causal_linear_attention(*inputs, rotation=by, chunk=chunk) for chunk in (1, 3, 4, 64)]),
    ):
        expected = loop(*inputs, causal, by)
        gradients = torch.autograd.grad((expected * weight).sum(), inputs)
        for form in forms:
            torch.testing.assert_close(form, expected)
            torch.testing.assert_close(torch.autograd.grad((form * weight).sum(), inputs), gradients)
    with torch.no_grad():  # the state is written in place, for decoding only
        torch.testing.assert_close(recurrence(*inputs, by), loop(*inputs, True, by))


def test_sums_stay_exact_under_autocast_and_far_negative_features_stay_finite() -> None:
    torch.manual_seed(0)
    query, key = torch.zeros(2, 1, 1, 3000, 4)
    value = torch.arange(3000.0).view(1, 1, -1, 1) % 2
    with torch.autocast("cpu", torch.bfloat16):
        out = causal_linear_attention(query, key, value)
        whole = linear_attention(query, key, value)
    torch.testing.assert_close(out, value.cumsum(2) / torch.arange(1, 3001).view(1, 1, -1, 1))
    torch.testing.assert_close(whole, torch.full_like(whole, 0.5))
    key = torch.full((1, 1, 5, 4), -30.0, requires_grad=True)
    out = linear_attention(key, key, torch.ones(1, 1, 5, 2))
    torch.testing.assert_close(out, torch.ones_like(out))
    assert torch.autograd.grad(out.sum(), key)[0].isfinite().all()


@pytest.mark.parametrize("causal", [False, True])
def test_layer_equals_the_loop_over_its_projections(causal: bool) -> None:
    torch.manual_seed(0)
    layer, x, by = LinearAttention(8, 2, causal=causal, bias=True, qk_norm=True), torch.randn(2, 7, 8), None
    for by in (None, rotation(torch.arange(7), 4)):
        query, key, value = layer.projections.project(x)
        pooled = loop(query, key, value, causal, by).transpose(1, 2).flatten(-2)
        torch.testing.assert_close(layer(x, rotation=by), layer.projections.output(pooled))


def test_causal_layer_does_not_depend_on_the_future() -> None:
    torch.manual_seed(0)
    x, by = torch.randn(1, 130, 8), rotation(torch.arange(130), 4)
    for causal in (True, False):
        layer = LinearAttention(8, 2, causal=causal)
        for t in (3, 63, 64, 100):
            changed = x.clone()
            changed[:, t + 1] += 1
            before, after = layer(x, rotation=by), layer(changed, rotation=by)
            assert torch.equal(before[:, : t + 1], after[:, : t + 1]) is causal
            assert not torch.equal(before[:, t + 1 :], after[:, t + 1 :])


@pytest.mark.parametrize("precision", [torch.float32, torch.bfloat16])
def test_prefill_and_steps_equal_forward_for_rows_of_different_length(precision: torch.dtype) -> None:
    torch.manual_seed(0)
    block = EncoderBlock(8, LinearAttention(8, 2, causal=True, qk_norm=True), FeedForward(8, 16)).eval()
    x, lengths = torch.randn(4, 72, 8), torch.tensor([0, 63, 64, 66])
    positions, noise = torch.arange(72), torch.randn(4, 66, 8) * 100
    padded = torch.where((positions[:66] >= lengths.unsqueeze(-1)).unsqueeze(-1), noise, x[:, :66])
    tolerance = 1e-5 if precision == torch.float32 else 0.05
    with torch.no_grad():
        full = block(x, rotation=rotation(positions, 4))
        with torch.autocast("cpu", precision, enabled=precision != torch.float32):
            _, cache = block.prefill(padded, lengths, 72, rotation=rotation(positions[:66], 4))
            for i in range(6):
                position = lengths + i
                new = x.take_along_dim(position[:, None, None], dim=1)
                out = block.step(
                    new,
                    cache,
                    CachePosition(position, int(position.max()) + 1, rotation=rotation(position[:, None, None], 4)),
                )
                expected = full.take_along_dim(position[:, None, None], dim=1)
                torch.testing.assert_close(out.float(), expected, atol=tolerance, rtol=tolerance)


@torch.no_grad()
def test_empty_prefill_then_steps_and_selected_rows() -> None:
    torch.manual_seed(0)
    layer, x = LinearAttention(8, 2, causal=True), torch.randn(3, 4, 8)
    out, cache = layer.prefill(x[:, :0], torch.zeros(3, dtype=torch.long), 4)
    assert out.shape == (3, 0, 8)
    position = torch.zeros(3, dtype=torch.long)
    layer.step(x[:, :1], cache, CachePosition(position, 1))
    rows = torch.tensor([2, 0, 2])
    chosen = cache.select(rows)
    torch.testing.assert_close(layer.step(x[rows, 1:2], chosen, CachePosition(position + 1, 2)), layer(x)[rows, 1:2])


def test_bf16_autocast_is_close() -> None:
    torch.manual_seed(0)
    x, by = torch.randn(2, 100, 16), rotation(torch.arange(100), 4)
    for causal in (True, False):
        layer = LinearAttention(16, 4, causal=causal, qk_norm=True)
        with torch.autocast("cpu", torch.bfloat16):
            out = layer(x, rotation=by)
            out.float().square().mean().backward()
        torch.testing.assert_close(out.float(), layer(x, rotation=by), atol=0.03, rtol=0.03)
        assert all(p.grad is not None and p.grad.isfinite().all() for p in layer.parameters())


def test_a_mask_is_rejected() -> None:
    layer, x, mask = LinearAttention(8, 2, causal=True), torch.randn(1, 3, 8), torch.zeros(3, 3)
    lengths = torch.tensor([3])
    _, cache = layer.prefill(x, lengths, 4)
    with pytest.raises(ValueError, match="linear attention has no score"):
        layer(x, mask=mask)
    with pytest.raises(ValueError, match="use rotary positions"):
        layer.prefill(x, lengths, 4, mask=mask)
    with pytest.raises(ValueError, match=r"\(2,\)"):
        layer.step(x[:, :1], cache, CachePosition(lengths, 4, slopes=torch.zeros(2)))
