"""The feed-forward layer against its formulas, and the blocks' dropout; `test_against_torch` has the whole blocks."""

import math
from typing import get_args

import pytest
import torch

from lmtrain.nn.blocks import Activation, FeedForward, Residual


@pytest.mark.parametrize("activation", get_args(Activation))
def test_feed_forward_formula(activation: Activation) -> None:
    torch.manual_seed(0)
    layer, x = FeedForward(4, 6, activation), torch.randn(3, 4)
    hidden = x @ layer.hidden.weight.T
    if activation == "swiglu":
        hidden = hidden[:, :6] * hidden[:, :6].sigmoid() * hidden[:, 6:]
    elif activation == "gelu":
        hidden = hidden * 0.5 * (1 + (hidden / math.sqrt(2)).erf())
    else:
        assert activation == "relu"
        hidden = hidden.clamp_min(0)
    torch.testing.assert_close(layer(x), hidden @ layer.output.weight.T)


def test_the_hidden_layer_is_four_times_as_wide_by_default() -> None:
    assert FeedForward(4).hidden.out_features == 16


def test_dropout_is_on_the_result_and_not_on_the_residual_stream() -> None:
    x = torch.randn(3, 8)
    assert torch.equal(Residual(8, dropout=1.0)(x, torch.exp), x)
