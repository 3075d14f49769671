"""Norms against their formulas."""

import math

import pytest
import torch

from lmtrain.nn.norms import NormKind, ScaleNorm, norm

every_kind = pytest.mark.parametrize("kind", ["layer", "rms", "scale"])


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


@every_kind
def test_size_of_the_input_does_not_matter_and_its_mean_only_where_it_is_kept(kind: NormKind) -> None:
    torch.manual_seed(0)
    x, layer = torch.randn(5, 64, dtype=torch.float64), norm(kind, 64).double()
    torch.testing.assert_close(layer(100 * x), layer(x), atol=1e-4, rtol=0)
    assert torch.allclose(layer(x + 1), layer(x), atol=1e-4) is (kind == "layer")


@every_kind
def test_a_fresh_norm_gives_unit_mean_square(kind: NormKind) -> None:
    torch.manual_seed(0)
    out = norm(kind, 64)(3 * torch.randn(5, 64))
    torch.testing.assert_close(out.square().mean(-1), torch.ones(5), atol=1e-4, rtol=0)


@pytest.mark.parametrize(("kind", "shapes"), [("layer", [(8,), (8,)]), ("rms", [(8,)]), ("scale", [()])])
def test_what_is_learned(kind: NormKind, shapes: list[tuple[int, ...]]) -> None:
    assert [tuple(parameter.shape) for parameter in norm(kind, 8).parameters()] == shapes


@every_kind
def test_gradients_equal_finite_differences(kind: NormKind) -> None:
    torch.manual_seed(0)
    x, layer = torch.randn(3, 6, dtype=torch.float64, requires_grad=True), norm(kind, 6).double()
    assert torch.autograd.gradcheck(lambda x, *parameters: layer(x), (x, *layer.parameters()))


@every_kind
def test_bf16_keeps_eight_bits_of_a_wide_vector(kind: NormKind) -> None:
    torch.manual_seed(0)
    x, layer = torch.randn(2, 4096), norm(kind, 4096)
    with torch.autocast("cpu", torch.bfloat16):
        out = layer(x.bfloat16())
    torch.testing.assert_close(out.float(), layer(x.bfloat16().float()), atol=0.004, rtol=2**-8)
