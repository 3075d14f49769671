"""Linear attention against a loop over queries and keys; `test_self_attention` has its steps."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lmtrain.nn.attention import SelfAttention
from lmtrain.nn.linear_attention import LinearAttention, causal_linear_attention, linear_attention
from lmtrain.nn.patterns import Pattern
from lmtrain.nn.positions import rotate, rotation


def loop(query: Tensor, key: Tensor, value: Tensor, causal: bool, by: Tensor | None) -> Tensor:
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


@pytest.mark.parametrize("rotated", [False, True])
@pytest.mark.parametrize("length", [1, 4, 11])
def test_all_forms_equal_the_loop_with_their_gradients(
    length: int, rotated: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    query, key = torch.randn(2, 2, 2, length, 4, dtype=torch.float64, requires_grad=True)
    value = torch.randn(2, 2, length, 3, dtype=torch.float64, requires_grad=True)
    by = rotation(torch.arange(length), 4).double() if rotated else None
    inputs, weight = (query, key, value), torch.randn(2, 2, length, 3, dtype=torch.float64)
    for causal, form, chunks in ((False, linear_attention, [64]), (True, causal_linear_attention, [1, 3, 4, 64])):
        expected = loop(*inputs, causal, by)
        gradients = torch.autograd.grad((expected * weight).sum(), inputs)
        for chunk in chunks:
            monkeypatch.setattr("lmtrain.nn.linear_attention.CHUNK", chunk)
            found = form(*inputs, rotation=by)
            torch.testing.assert_close(found, expected)
            torch.testing.assert_close(torch.autograd.grad((found * weight).sum(), inputs), gradients)


def test_sums_stay_exact_under_autocast_and_far_negative_features_stay_finite() -> None:
    torch.manual_seed(0)
    query, key = torch.zeros(2, 1, 1, 3000, 4)
    value = torch.arange(3000.0).view(1, 1, -1, 1) % 2
    with torch.autocast("cpu", torch.bfloat16):
        out = causal_linear_attention(query, key, value)
        whole = linear_attention(query, key, value)
    torch.testing.assert_close(out, value.cumsum(2) / torch.arange(1, 3001).view(1, 1, -1, 1))
    torch.testing.assert_close(whole, torch.full_like(whole, 0.5))
    for feature, mean in ((-30.0, 1.0), (-200.0, 0.0)):  # the second is zero in float32
        key = torch.full((1, 1, 5, 4), feature, requires_grad=True)
        out = linear_attention(key, key, torch.ones(1, 1, 5, 2))
        torch.testing.assert_close(out, torch.full_like(out, mean))
        assert torch.autograd.grad(out.sum(), key)[0].isfinite().all()


@pytest.mark.parametrize("causal", [False, True])
def test_layer_equals_the_loop_over_its_projections(causal: bool) -> None:
    torch.manual_seed(0)
    layer = LinearAttention(SelfAttention(8, 2, pattern=Pattern(causal), qk_norm=True))
    x = torch.randn(2, 7, 8)
    for by in (None, rotation(torch.arange(7), 4)):
        query, key, value = layer.projections.project(x)
        pooled = loop(query, key, value, causal, by).transpose(1, 2).flatten(-2)
        torch.testing.assert_close(layer(x, rotation=by), layer.projections.output(pooled))
