"""Norms against their formulas."""

import math

import pytest
import torch
from torch import nn

from lmtrain.nn.norms import NORMS, NormKind, ScaleNorm

every_kind = pytest.mark.parametrize("kind", NORMS)


@pytest.mark.parametrize("fresh", [True, False])
@every_kind
def test_every_norm_follows_its_formula(kind: NormKind, fresh: bool) -> None:
    torch.manual_seed(0)
    x, layer = torch.randn(5, 8) * 3 + 1, NORMS[kind](8)
    if not fresh:
        for parameter in layer.parameters():
            nn.init.normal_(parameter)
    learned = list(layer.parameters())
    if kind == "scale":
        expected = x / x.norm(dim=-1, keepdim=True) * learned[0]
        assert not fresh or learned[0].item() == pytest.approx(math.sqrt(8))
    elif kind == "rms":
        expected = x / x.square().mean(-1, keepdim=True).sqrt() * learned[0]
    else:
        centered = x - x.mean(-1, keepdim=True)
        expected = centered / (centered.square().mean(-1, keepdim=True) + 1e-5).sqrt() * learned[0] + learned[1]
    torch.testing.assert_close(layer(x), expected)
    if fresh:
        torch.testing.assert_close(layer(x).square().mean(-1), torch.ones(5), atol=1e-4, rtol=0)


def test_the_gradient_of_scale_norm_at_zero_is_finite() -> None:
    x = torch.zeros(2, 4, requires_grad=True)
    (gradient,) = torch.autograd.grad(ScaleNorm(4)(x).sum(), x)
    assert gradient.isfinite().all()


@every_kind
def test_gradients_equal_finite_differences(kind: NormKind) -> None:
    torch.manual_seed(0)
    x, layer = torch.randn(3, 6, dtype=torch.float64, requires_grad=True), NORMS[kind](6).double()
    assert torch.autograd.gradcheck(lambda x, *parameters: layer(x), (x, *layer.parameters()))


@every_kind
def test_under_autocast_only_the_result_is_rounded(kind: NormKind) -> None:
    torch.manual_seed(0)
    x, layer = torch.randn(2, 4096).bfloat16(), NORMS[kind](4096)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(layer(x), layer(x.float()).bfloat16())
