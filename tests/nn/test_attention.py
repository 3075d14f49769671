"""Attention against a written-out loop and torch's own, and the blocks around it."""

import math

import pytest
import torch

from lmtrain.nn.attention import SelfAttention
from lmtrain.nn.blocks import Activation, EncoderBlock, FeedForward
from lmtrain.nn.dot_product import attend
from lmtrain.nn.dropout import locked_dropout
from lmtrain.nn.kv_cache import KeyValueCache


def test_attend_ignores_masked_keys() -> None:
    torch.manual_seed(0)
    query, key, value = torch.randn(3, 1, 2, 4, 6)
    bias = torch.tensor([0.0, 0.0, 0.0, float("-inf")])
    value[:, :, 3] = 1e6
    torch.testing.assert_close(attend(query, key, value, bias), attend(query, key[:, :, :3], value[:, :, :3]))


def test_attention_dropout_keeps_the_mean_and_drops_at_its_rate() -> None:
    torch.manual_seed(0)
    query, key = torch.zeros(2, 1, 1, 100, 1)
    value = torch.ones(1, 1, 100, 1)
    out = attend(query, key, value, dropout=0.3) * 100  # each is a count of kept keys / 0.7
    assert out.mean().item() == pytest.approx(100, abs=2)
    assert out.std() > 1


def test_layer_without_positions_is_permutation_equivariant() -> None:
    torch.manual_seed(0)
    x, order = torch.randn(2, 7, 8), torch.randperm(7)
    block = EncoderBlock(8, SelfAttention(8, 2), FeedForward(8, 16))
    torch.testing.assert_close(block(x)[:, order], block(x[:, order]))


def test_qk_norm_makes_scores_independent_of_the_scale_of_the_projection() -> None:
    torch.manual_seed(0)
    x, layer = torch.randn(1, 5, 8), SelfAttention(8, 2, qk_norm=True)
    before = layer(x)
    with torch.no_grad():
        layer.query.weight *= 7
        layer.key.weight *= 5
    torch.testing.assert_close(layer(x), before, atol=1e-4, rtol=1e-4)


def test_cache_select_reorders_in_place_drops_and_repeats() -> None:
    cache = KeyValueCache.allocate(torch.arange(3.0).view(3, 1, 1, 1), -torch.arange(3.0).view(3, 1, 1, 1), capacity=2)
    memory = cache.key.data_ptr()
    cache = cache.select(torch.tensor([2, 2, 0]))
    assert cache.key.data_ptr() == memory
    assert cache.key.flatten().tolist() == [2, 0, 2, 0, 0, 0]
    assert cache.value.flatten().tolist() == [-2, 0, -2, 0, 0, 0]
    cache = cache.select(torch.tensor([2, 0]))
    cache.write(torch.full((2, 1, 1, 1), 7.0), torch.full((2, 1, 1, 1), 8.0), 1, 2)
    assert cache.key.flatten().tolist() == [0, 7, 2, 7]
    assert cache.select(torch.tensor([1, 1, 0])).key.flatten().tolist() == [2, 7, 2, 7, 0, 7]


@pytest.mark.parametrize("activation", ["relu", "relu2", "gelu", "swiglu"])
def test_feed_forward_formula(activation: Activation) -> None:
    torch.manual_seed(0)
    layer, x = FeedForward(4, 6, activation), torch.randn(3, 4)
    hidden = x @ layer.hidden.weight.T
    if activation == "swiglu":
        hidden = hidden[:, :6] * hidden[:, :6].sigmoid() * hidden[:, 6:]
    elif activation == "gelu":
        hidden = hidden * 0.5 * (1 + (hidden / math.sqrt(2)).erf())
    else:
        hidden = hidden.clamp_min(0) ** (2 if activation == "relu2" else 1)
    torch.testing.assert_close(layer(x), hidden @ layer.output.weight.T)


def test_residual_dropout_is_off_in_eval() -> None:
    torch.manual_seed(0)
    block = EncoderBlock(8, SelfAttention(8, 2, dropout=0.5), FeedForward(8, 16), dropout=0.5)
    x = torch.randn(1, 5, 8)
    assert not torch.equal(block(x), block(x))
    block.eval()
    assert torch.equal(block(x), block(x))


def test_locked_dropout_has_one_mask_for_all_positions_and_keeps_the_mean() -> None:
    torch.manual_seed(0)
    out = locked_dropout(torch.ones(50, 6, 80), 0.4, training=True)
    assert torch.equal(out, out[:, :1].expand_as(out))
    torch.testing.assert_close(out, (out > 0) / 0.6)
    assert (out == 0).float().mean().item() == pytest.approx(0.4, abs=0.03)
    assert len({tuple(row) for row in out[:, 0].tolist()}) == 50
    x = torch.ones(2, 3, 4)
    assert locked_dropout(x, 0.4, training=False) is x
    pooled = locked_dropout(torch.ones(50, 80), 0.4, training=True)
    assert len({tuple(row) for row in pooled.tolist()}) == 50
