"""The order of samples: a permutation of each epoch, a function of the seed and the step."""

from collections import Counter
from itertools import pairwise, permutations
from math import factorial, sqrt

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lmtrain.data.order import SampleOrder, permute
from lmtrain.errors import LmtrainError

ORDERS = st.builds(
    lambda targets, more_context, more, seed: SampleOrder(
        targets + more_context + more, targets + more_context, targets, seed
    ),
    st.integers(1, 12),
    st.integers(0, 12),
    st.integers(1, 120),
    st.integers(0, 2**31 - 1),
)


def _excess(observed: np.ndarray, expected: float) -> float:
    """How far the chi-square statistic of equally likely cells lies above its mean, in standard deviations."""
    freedom = observed.size - 1
    return float((((observed - expected) ** 2 / expected).sum() - freedom) / sqrt(2 * freedom))


@given(st.integers(1, 3_000), st.integers(0, 2**64 - 1))
def test_permute_is_a_bijection(size: int, key: int) -> None:
    assert sorted(permute(np.arange(size), size, key).tolist()) == list(range(size))


@given(st.integers(1, 2**48), st.integers(0, 2**64 - 1), st.data())
def test_permute_of_large_ranges_is_injective_and_in_range(size: int, key: int, data: st.DataObject) -> None:
    index = data.draw(st.lists(st.integers(0, size - 1), min_size=1, max_size=50, unique=True))
    result = permute(np.array(index), size, key)
    assert result.dtype == np.int64
    assert len(set(result.tolist())) == len(index)
    assert 0 <= result.min() <= result.max() < size


@pytest.mark.parametrize("size", [3, 4])
def test_every_permutation_of_a_few_is_equally_likely(size: int) -> None:
    keys = 1_200
    counts = Counter(tuple(permute(np.arange(size), size, key).tolist()) for key in range(keys))
    observed = np.array([counts[order] for order in permutations(range(size))])
    assert _excess(observed, keys / factorial(size)) < 5


def test_orders_do_not_change_between_versions() -> None:
    assert permute(np.arange(5), 5, 1).tolist() == [0, 1, 2, 4, 3]
    assert SampleOrder(100, 4, 4, 1).starts(0, 6).tolist() == [28, 36, 44, 40, 52, 84]
    assert SampleOrder(100, 4, 1, 1).starts(94, 4).tolist() == [59, 72, 34, 16]


@pytest.mark.parametrize("size", [2**17 + 1, 10**6, 10**9])
@pytest.mark.parametrize("lag", [1, 2, 64, 65_536])
def test_pairs_within_one_order_are_uniform(size: int, lag: int) -> None:
    position = permute(np.arange(100_000), size, 1) / size
    pairs, _, _ = np.histogram2d(position[:-lag], position[lag:], bins=20, range=[[0, 1], [0, 1]])
    assert _excess(pairs, (len(position) - lag) / 400) < 5


@given(ORDERS, st.integers(0, 5))
def test_an_epoch_takes_each_window_once_and_stays_in_bounds(order: SampleOrder, epoch: int) -> None:
    size = order.per_epoch()
    starts = np.sort(order.starts(epoch * size, size))
    assert np.diff(starts).tolist() == [order.targets] * (size - 1)
    assert 0 <= starts[0] < order.targets
    assert starts[-1] + order.context < order.tokens
    assert (size + 1) * order.targets > order.tokens - order.context, "one more fits at every offset"


@settings(max_examples=50)
@given(ORDERS, st.integers(0, 300), st.lists(st.integers(0, 8), max_size=4))
def test_any_split_into_parts_gives_the_same_samples(order: SampleOrder, first: int, counts: list[int]) -> None:
    parts, at = [np.empty(0, np.int64)], first
    for count in counts:
        parts.append(order.starts(at, count))
        at += count
    assert np.concatenate(parts).tolist() == order.starts(first, at - first).tolist()


@given(st.integers(0, 2**31 - 2))
def test_epochs_and_seeds_differ(seed: int) -> None:
    order, other = SampleOrder(4_000, 16, 16, seed), SampleOrder(4_000, 16, 16, seed + 1)
    size = order.per_epoch()
    epochs = [order.starts(epoch * size, size) // 16 for epoch in range(3)]
    assert not any(np.array_equal(first, second) for first, second in pairwise(epochs))
    assert not np.array_equal(epochs[0], other.starts(0, size) // 16)


def test_windows_begin_at_other_places_in_each_epoch() -> None:
    order = SampleOrder(4_000, 16, 16, 1)
    size = order.per_epoch()
    assert len({int(order.starts(epoch * size, size).min()) for epoch in range(20)}) > 5


@pytest.mark.parametrize("targets", [1, 8])
def test_the_shortest_split_is_one_window_and_a_shorter_one_is_rejected(targets: int) -> None:
    assert SampleOrder(9, 8, targets, 1).starts(0, 3).tolist() == [0, 0, 0]
    with pytest.raises(LmtrainError, match=r"8 tokens where model\.context=8 needs at least 9"):
        SampleOrder(8, 8, targets, 1)


@pytest.mark.parametrize("dtype", [np.uint16, np.uint32])
def test_batches_hold_windows_and_what_follows_them(
    dtype: type[np.uint16 | np.uint32], monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = np.arange(1_000, 1_100).astype(dtype)
    monkeypatch.setattr(SampleOrder, "starts", lambda *_: np.array([0, 95, 40]))
    inputs, targets = SampleOrder(100, 4, 4, 1).batch(ids, 0, 3)
    assert inputs.tolist() == [[1000, 1001, 1002, 1003], [1095, 1096, 1097, 1098], [1040, 1041, 1042, 1043]]
    assert torch.equal(targets, inputs + 1)
    windows, following = SampleOrder(100, 4, 1, 1).batch(ids, 0, 3)
    assert torch.equal(windows, inputs)
    assert following.tolist() == [[1004], [1099], [1044]]
    for tensor in (inputs, targets, windows, following):
        assert tensor.dtype == torch.int64
        assert tensor.is_contiguous()
