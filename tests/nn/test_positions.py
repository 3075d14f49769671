"""Positions against the formulas and identities that define them."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lmtrain.nn.positions import alibi_bias, alibi_slopes, rotate, rotation, sinusoidal

POSITION = st.integers(0, 100_000)
OFFSET = st.integers(-1_000, 1_000)
EVEN = st.integers(1, 32).map(lambda half: 2 * half)
properties = settings(max_examples=60)


def test_sinusoids_against_the_formula() -> None:
    table = sinusoidal(torch.arange(300), 12)
    for position in (0, 1, 7, 299):
        for i in range(6):
            angle = position / 10_000 ** (2 * i / 12)
            assert table[position, 2 * i].item() == pytest.approx(math.sin(angle), abs=1e-6)
            assert table[position, 2 * i + 1].item() == pytest.approx(math.cos(angle), abs=1e-6)


@properties
@given(POSITION, POSITION, st.integers(0, 1_000), EVEN)
def test_sinusoids_have_one_norm_and_their_distance_and_product_depend_only_on_the_offset(
    first: int, second: int, offset: int, dim: int
) -> None:
    # sin(a + k) - sin a and cos(a + k) - cos a have the squares' sum 2 - 2 cos k = 4 sin^2(k / 2), whatever a.
    frequencies = [10_000 ** (-2 * i / dim) for i in range(dim // 2)]
    distance = math.sqrt(sum(4 * math.sin(offset * frequency / 2) ** 2 for frequency in frequencies))
    product = sum(math.cos(offset * frequency) for frequency in frequencies)
    for position in (first, second):
        here, there = sinusoidal(torch.tensor([position, position + offset]), dim).double()
        assert here.norm().item() == pytest.approx(math.sqrt(dim / 2), rel=1e-5)
        assert (here - there).norm().item() == pytest.approx(distance, abs=1e-5)
        assert (here @ there).item() == pytest.approx(product, abs=1e-5)


def test_rotation_is_two_by_two_rotation_of_the_documented_pairs() -> None:
    x = torch.tensor([1.0, 2.0, 3.0, 4.0])
    rotated = rotate(x[None], rotation(torch.tensor([5]), 4))[0]
    for i, angle in enumerate((5.0, 5.0 / 100)):
        pair = complex(x[i], x[i + 2]) * complex(math.cos(angle), math.sin(angle))
        assert rotated[i].item() == pytest.approx(pair.real, abs=1e-5)
        assert rotated[i + 2].item() == pytest.approx(pair.imag, abs=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rotation_keeps_the_order_in_memory(dtype: torch.dtype) -> None:
    inner_heads = torch.randn(2, 5, 3, 8).to(dtype).transpose(1, 2)  # as a linear layer writes its heads
    rotated = rotate(inner_heads, rotation(torch.arange(5), 8))
    assert rotated.stride() == inner_heads.stride() != rotated.contiguous().stride()


def matrix(position: int, dim: int) -> Tensor:
    """R(position), so that R x is x rotated: what the rotation makes of the unit vectors, as columns."""
    return rotate(torch.eye(dim, dtype=torch.float64), rotation(torch.full((dim,), position), dim)).T


@properties
@given(POSITION, OFFSET, EVEN, st.integers(0, 1_000))
def test_rotations_add_up_and_scores_depend_only_on_the_offset(position: int, offset: int, dim: int, seed: int) -> None:
    here, there, further = matrix(position, dim), matrix(position + offset, dim), matrix(offset, dim)
    torch.testing.assert_close(here.T, matrix(-position, dim), atol=1e-6, rtol=0)
    torch.testing.assert_close(here.T @ here, torch.eye(dim, dtype=torch.float64), atol=1e-6, rtol=0)
    torch.testing.assert_close(here @ further, there, atol=1e-6, rtol=0)
    query, key = torch.randn(2, dim, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    rotated = [
        rotate(x[None], rotation(torch.tensor([at]), dim)) for x, at in ((query, position), (key, position + offset))
    ]
    torch.testing.assert_close((rotated[0] @ rotated[1].T).squeeze(), query @ further @ key, atol=1e-4, rtol=0)


@pytest.mark.parametrize("heads", [1, 2, 3, 4, 8, 12, 16])
def test_alibi_slopes_are_a_geometric_series_down_to_one_256th(heads: int) -> None:
    slopes = alibi_slopes(heads).double()
    assert slopes[-1].item() == pytest.approx(2**-8)
    torch.testing.assert_close(slopes[1:] / slopes[:-1], torch.full((heads - 1,), 2 ** (-8 / heads)).double())
    assert slopes[0].item() == pytest.approx(2 ** (-8 / heads))


def test_alibi_of_rows_at_positions_of_their_own() -> None:
    queries, keys = torch.tensor([[3], [0]]), torch.arange(4)
    bias = alibi_bias(torch.tensor([1.0, 0.5]), queries, keys)
    assert bias.shape == (2, 2, 1, 4)
    assert bias[0, 1, 0].tolist() == [-1.5, -1.0, -0.5, 0.0]
    assert bias[1, 0, 0].tolist() == [0.0, -1.0, -2.0, -3.0]
    shared = alibi_bias(torch.tensor([1.0, 0.5]), torch.arange(3), torch.arange(3))
    assert shared[1].tolist() == [[0.0, -0.5, -1.0], [-0.5, 0.0, -0.5], [-1.0, -0.5, 0.0]]
