"""Ids in several arrays read as those of one."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from lmtrain.data.ids import Ids

LENGTHS = st.lists(st.integers(0, 9), max_size=6)


def cut(lengths: list[int]) -> tuple[np.ndarray, Ids]:
    whole = np.arange(sum(lengths), dtype=np.uint16)
    return whole, Ids(np.split(whole, np.cumsum(lengths)[:-1]) if lengths else [])


@given(LENGTHS, st.integers(-3, 60) | st.none(), st.integers(-3, 60) | st.none())
def test_a_stretch_is_that_of_one_array(lengths: list[int], first: int | None, last: int | None) -> None:
    whole, ids = cut(lengths)
    assert len(ids) == len(whole)
    assert ids[first:last].tolist() == whole[first:last].tolist()
    assert ids[first:last].dtype == np.uint16


@given(LENGTHS, st.integers(1, 12), st.data())
def test_windows_are_those_of_one_array(lengths: list[int], length: int, data: st.DataObject) -> None:
    whole, ids = cut([*lengths, length])
    starts = np.array(data.draw(st.lists(st.integers(0, len(whole) - length))), np.int64)
    for wanted in (length, 1):
        assert ids.windows(starts, wanted).tolist() == [whole[start : start + wanted].tolist() for start in starts]
    assert ids.counts(70).tolist() == [1] * len(ids) + [0] * (70 - len(ids))


def test_a_stretch_inside_one_array_is_no_copy() -> None:
    whole, ids = cut([5, 5])
    assert np.shares_memory(ids[1:4], whole)
