"""The best extensions of many texts against a sort of all of them."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lmtrain.generation.extensions import best_extensions, top

thorough = settings(deadline=None, max_examples=300, derandomize=True)

grids = st.sampled_from([0.0, 0.25, 2.0, 1000.0])
"""Scores are rounded to a multiple of it: few ties, some, many, or all equal."""


def random_scores(rng: np.random.Generator, rows: int, vocab: int, grid: float) -> torch.Tensor:
    """(rows, vocab) float32, some of it minus infinity, in some rows nearly all."""
    scores = torch.from_numpy(rng.normal(-8.0, 2.0, (rows, vocab))).float()
    if grid:
        scores = (scores / grid).round() * grid
    forbidden = torch.from_numpy(rng.random((rows, vocab)) < rng.choice([0.0, 0.5, 0.999, 1.0], (rows, 1)))
    return scores.masked_fill(forbidden, -torch.inf)


@thorough
@given(st.integers(0, 10**6), st.sampled_from([2, 6, 40, 600, 1500]), st.sampled_from([1, 2, 4, 20, 90, 700]), grids)
def test_they_are_those_of_a_full_sort(seed: int, vocab: int, beams: int, grid: float) -> None:
    rng = np.random.default_rng(seed)
    counts = rng.integers(0, 5, 4)  # of the texts of four prompts
    counts[1] += 1
    owners = np.repeat(np.arange(4), counts)
    rows = rng.permutation(len(owners) + 2)[: len(owners)]  # two rows are idle
    scores = random_scores(rng, len(owners) + 2, vocab, grid)
    totals = rng.integers(-12, 0, len(owners)) / 4
    found = best_extensions(scores, rows, totals, owners, beams)
    expected = []
    for prompt in range(4):
        all_of_them = [
            (-(totals[text] + score), text, token)
            for text in np.flatnonzero(owners == prompt).tolist()
            for token, score in enumerate(scores[rows[text]].tolist())
            if score > -np.inf
        ]
        expected += sorted(all_of_them)[:beams]
    columns = ((-found.totals).tolist(), found.parents.tolist(), found.tokens.tolist())
    assert list(zip(*columns, strict=True)) == expected
    assert found.stuck.tolist() == [bool((scores[row] == -np.inf).all()) for row in rows]


@pytest.mark.parametrize("vocab", [5, 511, 512, 513, 1024, 5000])
@pytest.mark.parametrize("grid", [0.0, 2.0])
def test_top_has_the_highest_values_and_their_columns(vocab: int, grid: float) -> None:
    scores = random_scores(np.random.default_rng(vocab), 16, vocab, grid)
    for count in {1, 3, 5, min(64, vocab), min(65, vocab)}:
        values, columns = top(scores, count)
        assert torch.equal(values, scores.sort(dim=-1, descending=True).values[:, :count])
        assert torch.equal(values, scores.gather(1, columns))
        assert all(len(set(row)) == count for row in columns.tolist())
