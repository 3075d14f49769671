"""Norms against their formulas."""

import math

import torch

from lmtrain.nn.norms import ScaleNorm, norm


def test_scale_norm_is_gain_times_unit_vector() -> None:
    x = torch.tensor([[3.0, 4.0], [0.0, -2.0]])
    layer = ScaleNorm(2)
    torch.testing.assert_close(layer(x), math.sqrt(2) * torch.tensor([[0.6, 0.8], [0.0, -1.0]]))
    with torch.no_grad():
        layer.length.fill_(5.0)
    torch.testing.assert_close(layer(x).norm(dim=-1), torch.tensor([5.0, 5.0]))


def test_scale_norm_of_zero_is_zero() -> None:
    x = torch.zeros(2, 4, requires_grad=True)
    (gradient,) = torch.autograd.grad(ScaleNorm(4)(x).sum(), x)
    assert gradient.isfinite().all()


def test_rms_and_layer_norm_formulas() -> None:
    torch.manual_seed(0)
    x = torch.randn(5, 8) * 3 + 1
    torch.testing.assert_close(norm("rms", 8)(x), x / x.square().mean(-1, keepdim=True).sqrt())
    centred = x - x.mean(-1, keepdim=True)
    expected = centred / (centred.square().mean(-1, keepdim=True) + 1e-5).sqrt()
    torch.testing.assert_close(norm("layer", 8)(x), expected)
