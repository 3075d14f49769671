"""Attention patterns against masks and softmaxes written out pair by pair.

Shapes: B rows, H heads, T positions, D features per head.
"""

import math
from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lmtrain.nn.attention import SelfAttention, join_heads, padding_mask, split_heads
from lmtrain.nn.cross_attention import CrossAttention
from lmtrain.nn.dot_product import attend
from lmtrain.nn.patterns import Pattern
from tests.nn.patterns import alibi, every_pattern, loop, random_qkv

size = st.none() | st.integers(1, 6)


def attends(pattern: Pattern, query: int, key: int) -> bool:
    """The definition, pair by pair."""
    if pattern.causal and key > query:
        return False
    if pattern.window is None and pattern.stride is None and pattern.global_tokens is None:
        return True
    if pattern.window is not None and query - pattern.window < key < query + pattern.window:
        return True
    if pattern.stride is not None and any(key + n * pattern.stride == query for n in range(-query - key, query + 1)):
        return True
    return pattern.global_tokens is not None and min(query, key) < pattern.global_tokens


def written_out(pattern: Pattern, length: int) -> Tensor:
    return torch.tensor([[attends(pattern, query, key) for key in range(length)] for query in range(length)])


@settings(max_examples=200)
@given(st.booleans(), size, size, size, st.integers(1, 12))
def test_mask_equals_the_definition(
    causal: bool, window: int | None, stride: int | None, global_tokens: int | None, length: int
) -> None:
    pattern = Pattern(causal, window, stride, global_tokens)
    assert torch.equal(pattern.mask(length), written_out(pattern, length))


def test_one_query_has_dropout_without_gradients_too() -> None:
    query, key, value = (x.detach() for x in random_qkv(50))
    with torch.no_grad():
        assert not attend(query[:, :, :1], key, value, dropout=1.0).any()


@every_pattern
@pytest.mark.parametrize(("biased", "scale"), [(False, None), (True, 0.9)])
def test_attend_equals_a_loop_of_softmaxes(pattern: Pattern, biased: bool, scale: float | None) -> None:
    query, key, value = (x.detach() for x in random_qkv(9, rows=2))
    bias = alibi(9) if biased else None
    expected = loop(query, key, value, written_out(pattern, 9), bias, scale)
    torch.testing.assert_close(attend(query, key, value, bias, pattern=pattern, scale=scale), expected)


@every_pattern
def test_bool_mask_and_pattern_combine(pattern: Pattern) -> None:
    leaves = query, key, value = random_qkv(9, rows=2)
    valid = torch.tensor([[False] * 4 + [True] * 5, [False] * 9])  # padding on the left, and a row without tokens
    allowed = written_out(pattern, 9) & padding_mask(valid)
    result = attend(query, key, value, padding_mask(valid), pattern=pattern)
    expected, has_key = loop(query.detach(), key.detach(), value.detach(), allowed), allowed.any(-1, keepdim=True)
    torch.testing.assert_close(result * has_key, expected)
    assert all(gradient.isfinite().all() for gradient in torch.autograd.grad(result.sum(), leaves))


@pytest.mark.parametrize("padded", [False, True])
def test_cross_attention_of_any_widths_equals_a_loop(padded: bool) -> None:
    torch.manual_seed(0)
    widths = {"key_dim": 5, "value_dim": 6, "output_dim": 9, "head_dim": 7, "value_head_dim": 3}
    layer = CrossAttention(8, 2, **widths, qk_norm=True).double()
    assert (layer.query.out_features, layer.value.out_features) == (2 * 7, 2 * 3)
    query, key, value = (torch.randn(2, n, w, dtype=torch.float64) for n, w in ((4, 8), (7, 5), (7, 6)))
    mask = padding_mask(torch.arange(7) < torch.tensor([[7], [3]])) if padded else None
    keep = torch.ones(2, 1, 1, 7, dtype=torch.bool) if mask is None else mask
    queries, keys, values = (split_heads(x, 2) for x in (layer.query(query), layer.key(key), layer.value(value)))
    expected = layer.output(join_heads(loop(layer.query_norm(queries), layer.key_norm(keys), values, keep)))
    torch.testing.assert_close(layer(query, key, value, mask=mask)[0], expected)


def test_without_a_scale_attention_is_softmax_of_plain_products() -> None:
    torch.manual_seed(0)
    x, memory = torch.randn(2, 5, 8, dtype=torch.float64), torch.randn(2, 7, 8, dtype=torch.float64)
    self_attention = SelfAttention(8, 2, scale=1.0).double()
    cross_attention = CrossAttention(8, 2, scale=1.0).double()
    for layer, keys_of, found in (
        (self_attention, x, self_attention(x)),
        (cross_attention, memory, cross_attention(x, memory)[0]),
    ):
        projected = (layer.query(x), layer.key(keys_of), layer.value(keys_of))
        query, key, value = (split_heads(part, 2) for part in projected)
        expected = loop(query, key, value, torch.ones(5, keys_of.shape[1], dtype=torch.bool), scale=1.0)
        torch.testing.assert_close(found, layer.output(join_heads(expected)))
    weights = cross_attention(x, memory)[1] @ value
    torch.testing.assert_close(weights, expected)


@pytest.mark.parametrize("padded", [False, True])
def test_heads_whose_values_differ_in_width_equal_a_loop_with_matrices_of_each_head(padded: bool) -> None:
    torch.manual_seed(0)
    widths = [3, 1, 5]
    layer = CrossAttention(6, 3, value_head_dim=widths, output_dim=4).double()
    x, memory = torch.randn(2, 4, 6, dtype=torch.float64), torch.randn(2, 7, 6, dtype=torch.float64)
    lengths = [7, 3] if padded else [7, 7]
    valid = torch.arange(7) < torch.tensor(lengths).unsqueeze(-1)
    found, _ = layer(x, memory, mask=padding_mask(valid) if padded else None)
    assert layer.output.weight.shape == (4, sum(widths))
    for b, t in product(range(2), range(4)):
        heads, first = [], 0
        for h, width in enumerate(widths):
            w_query, w_key = (part.weight[2 * h : 2 * h + 2] for part in (layer.query, layer.key))
            w_value = layer.value.weight[first : first + width]
            first += width
            scores = torch.stack([(w_query @ x[b, t]) @ (w_key @ key) for key in memory[b, : lengths[b]]])
            weights = (scores / math.sqrt(2)).softmax(0)
            heads.append(sum(weight * (w_value @ key) for weight, key in zip(weights, memory[b], strict=False)))
        torch.testing.assert_close(found[b, t], layer.output.weight @ torch.cat(heads))


def test_weights_of_attention_to_a_memory_are_those_before_dropout() -> None:
    layer, x, memory = CrossAttention(6, 3, dropout=1.0), torch.randn(2, 4, 6), torch.randn(2, 7, 6)
    result, weights = layer(x, memory)
    torch.testing.assert_close(weights.sum(-1), torch.ones(2, 3, 4))
    assert not result.any()
