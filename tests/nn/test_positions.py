"""Positions against the formulas and identities that define them."""

import math

import pytest
import torch

from lmtrain.nn.positions import alibi_bias, alibi_slopes, rotate, rotation, sinusoidal


def test_sinusoids_against_the_formula() -> None:
    table = sinusoidal(torch.arange(300), 12)
    for position in (0, 1, 7, 299):
        for i in range(6):
            angle = position / 10_000 ** (2 * i / 12)
            assert table[position, 2 * i].item() == pytest.approx(math.sin(angle), abs=1e-6)
            assert table[position, 2 * i + 1].item() == pytest.approx(math.cos(angle), abs=1e-6)


def test_sinusoids_have_constant_norm_and_distances_that_depend_on_the_difference() -> None:
    table = sinusoidal(torch.arange(64), 16)
    torch.testing.assert_close(table.norm(dim=-1), torch.full((64,), math.sqrt(8)))
    distance = torch.cdist(table, table)
    torch.testing.assert_close(distance[3, 10], distance[40, 47], atol=1e-4, rtol=0)


def test_rotation_is_two_by_two_rotation_of_the_documented_pairs() -> None:
    x = torch.tensor([1.0, 2.0, 3.0, 4.0])
    turned = rotate(x[None], rotation(torch.tensor([5]), 4))[0]
    for i, angle in enumerate((5.0, 5.0 / 100)):
        pair = complex(x[i], x[i + 2]) * complex(math.cos(angle), math.sin(angle))
        assert turned[i].item() == pytest.approx(pair.real, abs=1e-5)
        assert turned[i + 2].item() == pytest.approx(pair.imag, abs=1e-5)


def test_rotated_products_depend_on_the_difference_alone_and_norms_stay() -> None:
    torch.manual_seed(0)
    query, key = torch.randn(8), torch.randn(8)

    def product(at: int, other: int) -> torch.Tensor:
        turned = [rotate(x[None], rotation(torch.tensor([p]), 8))[0] for x, p in ((query, at), (key, other))]
        return turned[0] @ turned[1]

    torch.testing.assert_close(product(9, 4), product(105, 100), atol=1e-4, rtol=0)
    torch.testing.assert_close(product(3, 3), query @ key, atol=1e-5, rtol=0)
    assert (product(9, 4) - product(4, 9)).abs() > 1e-2
    turned = rotate(query[None], rotation(torch.tensor([31]), 8))
    torch.testing.assert_close(turned.norm(), query.norm())


def test_alibi_slopes_and_bias() -> None:
    torch.testing.assert_close(alibi_slopes(8), torch.tensor([2.0**-i for i in range(1, 9)]))
    bias = alibi_bias(torch.tensor([1.0, 0.5]), torch.arange(3), torch.arange(3))
    assert bias.shape == (2, 3, 3)
    assert bias[1].tolist() == [[0.0, -0.5, -1.0], [-0.5, 0.0, -0.5], [-1.0, -0.5, 0.0]]
