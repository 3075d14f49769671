"""Monotonic and location-aware cross-attention against loops, alone and in an encoder-decoder."""

import itertools
import math

import pytest
import torch
from torch import Tensor

from lmtrain.nn.alignment import LocationAwareAttention, MonotonicAttention, expected_alignment
from lmtrain.nn.attention import padding_mask, split_heads
from lmtrain.nn.cross_attention import CrossAttention

B, H, TQ, TK, WIDTH = 2, 3, 4, 5, 12
D = WIDTH // H
VALID = torch.arange(TK) < torch.tensor([[TK], [3]])
LAYERS: tuple[type[CrossAttention], ...] = (MonotonicAttention, LocationAwareAttention)
every_layer = pytest.mark.parametrize("kind", LAYERS)


def inputs() -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    return torch.randn(B, TQ, WIDTH, dtype=torch.float64), torch.randn(B, TK, WIDTH, dtype=torch.float64)


def by_definition(probability: Tensor) -> Tensor:
    """For one head: the sum over where the previous query stopped, times the product of passing all keys up to here."""
    queries, keys = probability.shape
    before, rows = [1.0, *[0.0] * (keys - 1)], []
    for i in range(queries):
        p = probability[i].tolist()
        before = [
            p[j] * sum(before[k] * math.prod(1 - p[m] for m in range(k, j)) for k in range(j + 1)) for j in range(keys)
        ]
        rows.append(before)
    return torch.tensor(rows, dtype=probability.dtype)


@pytest.mark.parametrize(("queries", "keys"), [(4, 5), (5, 2), (1, 4), (3, 1)])
def test_expected_alignment_equals_its_definition(queries: int, keys: int) -> None:
    torch.manual_seed(0)
    probability = torch.rand(B, H, queries, keys, dtype=torch.float64)
    result = expected_alignment(probability)
    for b, h in itertools.product(range(B), range(H)):
        torch.testing.assert_close(result[b, h], by_definition(probability[b, h]))
    assert (result.sum(-1) <= 1 + 1e-12).all()


def test_expected_alignment_is_exact_where_the_closed_form_divides_by_zero() -> None:
    """In float32 the probability of passing 60 keys underflows, and that of passing a certain one is zero."""
    probability = torch.full((1, 1, 3, 60), 0.9)
    probability[0, 0, 1, :30] = 0
    probability[0, 0, 2, 40] = 1
    probability.requires_grad_()
    result = expected_alignment(probability)
    torch.testing.assert_close(result[0, 0], by_definition(probability[0, 0]))
    (gradient,) = torch.autograd.grad(result[..., 30:].sum(), probability)
    assert gradient.isfinite().all()


def left_to_right(stops: Tensor) -> list[int]:
    """For one head: the key where each query stops, as the paper writes it; TK if it passes the last."""
    places, start = [], 0
    for row in stops.tolist():
        while start < len(row) and not row[start]:
            start += 1
        places.append(start)
    return places


@pytest.mark.parametrize("training", [True, False], ids=["expected", "hard"])
def test_monotonic_attention_equals_a_loop(training: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    noise = torch.randn(B, H, TQ, TK, dtype=torch.float64)
    monkeypatch.setattr(torch, "randn_like", lambda _: noise)
    query, key = inputs()
    layer = MonotonicAttention(WIDTH, H).double().train(training)
    layer.query.weight.data.mul_(4)
    layer.offset.data += torch.tensor([0.0, 0.5, 1.0]).view(H, 1, 1)
    result, weights = layer(query, key, mask=padding_mask(VALID))
    queries, keys, values = (split_heads(x, H) for x in (layer.query(query), layer.key(key), layer.value(key)))
    pooled = torch.zeros(B, TQ, WIDTH, dtype=torch.float64)
    for b, h in itertools.product(range(B), range(H)):
        energy = torch.stack(
            [torch.stack([q @ k / D**0.5 + layer.offset[h, 0, 0] for k in keys[b, h]]) for q in queries[b, h]]
        )
        if training:
            stop = (energy + noise[b, h]).sigmoid() * VALID[b]
            expected = by_definition(stop)
        else:
            places = left_to_right((energy > 0) & VALID[b])
            expected = torch.eye(TK + 1, dtype=torch.float64)[places, :TK]
        torch.testing.assert_close(weights[b, h], expected)
        pooled[b, :, h * D : (h + 1) * D] = expected @ values[b, h]
    torch.testing.assert_close(result, layer.output(pooled))
    assert 0.2 < weights.sum() / (B * H * TQ) < 0.98


def test_location_aware_attention_equals_a_loop() -> None:
    query, key = inputs()
    layer = LocationAwareAttention(WIDTH, H, width=3).double()
    layer.location.weight.data.mul_(5)
    filters, bias = (parameter.view(H, D, -1) for parameter in layer.location.parameters())
    result, weights = layer(query, key, mask=padding_mask(VALID))
    queries, keys, values = (split_heads(x, H) for x in (layer.query(query), layer.key(key), layer.value(key)))
    pooled = torch.zeros(B, TQ, WIDTH, dtype=torch.float64)
    for b, h in itertools.product(range(B), range(H)):
        before = [0.0] * (TK + 2)  # a key of zeros at both ends
        for i in range(TQ):
            energies = []
            for j in range(int(VALID[b].sum())):
                around = sum(before[j + r] * filters[h, :, r] for r in range(3))
                features = queries[b, h, i] + keys[b, h, j] + around + bias[h, :, 0]
                energies.append((layer.energy[h, :, 0] @ features.tanh()).item())
            shares = [math.exp(energy) for energy in energies] + [0.0] * (TK - len(energies))
            expected = torch.tensor(shares, dtype=torch.float64) / sum(shares)
            before = [0.0, *expected.tolist(), 0.0]
            torch.testing.assert_close(weights[b, h, i], expected)
            pooled[b, i, h * D : (h + 1) * D] = expected @ values[b, h]
    torch.testing.assert_close(result, layer.output(pooled))


@every_layer
@pytest.mark.parametrize("training", [True, False])
def test_padded_keys_get_no_weight(kind: type[CrossAttention], training: bool) -> None:
    query, key = inputs()
    layer = kind(WIDTH, H).double().train(training)
    layer.query.weight.data.mul_(6)
    _, weights = layer(query, key, mask=padding_mask(VALID))
    assert not weights.masked_select(~VALID[:, None, None].expand_as(weights)).any()
    assert weights[0].any(-2).any(0).sum() > 2


@every_layer
def test_weights_are_in_float32_under_autocast(kind: type[CrossAttention]) -> None:
    query, key = (x.float() for x in inputs())
    layer = kind(WIDTH, H)
    with torch.autocast("cpu", torch.bfloat16):
        result, weights = layer(query, key)
    assert (result.dtype, weights.dtype) == (torch.bfloat16, torch.float32)
