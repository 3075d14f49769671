"""Dropout's masks: those of a compiled graph on a CPU, which are hashed, against definition and chance."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from lmtrain.nn.dropout import drop, hashed_keep_mask, locked_dropout
from tests.helpers import compiles

RATE = 0.3


@pytest.fixture(scope="module")
def compiled() -> Callable[[Tensor], Tensor]:
    return torch.compile(lambda x: drop(x, RATE), dynamic=False)


def lowbias32(x: int) -> int:
    x = (x ^ (x >> 16)) * 0x7FEB352D % 2**32
    x = (x ^ (x >> 15)) * 0x846CA68B % 2**32
    return x ^ (x >> 16)


def signed(x: int) -> int:
    return x - 2**32 if x >= 2**31 else x


def test_the_hash_is_the_one_it_is_called_in_plain_integers() -> None:
    torch.manual_seed(5)
    mask = hashed_keep_mask(torch.Size((40, 25)), RATE)
    assert mask.dtype == torch.int8
    kept = mask.flatten().tolist()
    torch.manual_seed(5)
    first, second = torch.randint(-(2**31), 2**31, (2,)).tolist()
    threshold = round(RATE * 2**31) - 2**30
    for index, keep in enumerate(kept):
        inner = lowbias32(index ^ first % 2**32)
        assert keep == int(signed(lowbias32((inner + second) % 2**32)) >> 1 >= threshold)
    assert 200 < kept.count(0) < 400


@compiles
def test_a_compiled_graph_drops_as_often_as_asked_and_scales_the_rest(compiled: Callable[[Tensor], Tensor]) -> None:
    x = torch.randn(400, 500) + 3.0 * torch.sign(torch.randn(400, 500))
    y = compiled(x)
    dropped = y == 0
    torch.testing.assert_close(y[~dropped], (x / (1 - RATE))[~dropped])
    deviation = (RATE * (1 - RATE) / x.numel()) ** 0.5
    assert abs(float(dropped.float().mean()) - RATE) < 5 * deviation
    assert float((dropped.float().mean(0) - RATE).abs().max()) < 6 * deviation * 500**0.5  # no column differs
    assert float((dropped.float().mean(1) - RATE).abs().max()) < 6 * deviation * 400**0.5


@pytest.mark.parametrize("shift", [1, 2, 64, 500])
def test_hashed_masks_are_independent_of_shifts_and_of_each_other(shift: int) -> None:
    size = torch.Size((250_000,))
    one, other = (hashed_keep_mask(size, 0.5).float() - 0.5 for _ in range(2))
    limit = 5 * 0.25 / size.numel() ** 0.5
    assert abs(float((one[shift:] * one[:-shift]).mean())) < limit
    assert abs(float((one[shift:] * other[:-shift]).mean())) < limit
    assert abs(float((one * other).mean())) < limit


@compiles
def test_a_gradient_passes_where_its_element_did_and_nowhere_else(compiled: Callable[[Tensor], Tensor]) -> None:
    x = torch.ones(400, 500, requires_grad=True)
    y = compiled(x)
    y.sum().backward()  # type: ignore[no-untyped-call]
    assert x.grad is not None
    torch.testing.assert_close(x.grad, y.detach())


@compiles
def test_a_seed_repeats_a_mask_and_another_seed_changes_it(compiled: Callable[[Tensor], Tensor]) -> None:
    def of(seed: int) -> Tensor:
        torch.manual_seed(seed)
        return compiled(torch.ones(400, 500))

    assert torch.equal(of(1), of(1))
    same = float((of(1) == of(2)).float().mean())
    assert abs(same - (RATE**2 + (1 - RATE) ** 2)) < 0.006


@pytest.mark.parametrize("rate", [0.0, 0.4])
def test_outside_training_nothing_is_dropped(rate: float) -> None:
    x = torch.randn(3, 4, 5)
    assert drop(x, rate, training=False) is x
    assert locked_dropout(x, rate, training=False) is x
    assert drop(x, 0.0) is x


def test_locked_dropout_has_one_mask_for_all_positions_and_keeps_the_mean() -> None:
    torch.manual_seed(0)
    out = locked_dropout(torch.ones(50, 6, 80), 0.4, training=True)
    assert torch.equal(out, out[:, :1].expand_as(out))
    torch.testing.assert_close(out, (out > 0) / 0.6)
    assert (out == 0).float().mean().item() == pytest.approx(0.4, abs=0.03)
    assert len({tuple(row) for row in out[:, 0].tolist()}) == 50


@compiles
def test_a_compiled_graph_that_drops_everything_has_gradients_of_zero() -> None:
    x = torch.ones(4, 5, requires_grad=True)
    y: Tensor = torch.compile(lambda x: drop(x, 1.0), dynamic=False)(x)
    y.sum().backward()  # type: ignore[no-untyped-call]
    assert torch.equal(y, torch.zeros(4, 5))
    assert x.grad is not None
    assert torch.equal(x.grad, torch.zeros(4, 5))
