"""The image of attention weights: darkness follows the weights, and long texts and unusual tokens fit."""

import numpy as np
import pytest

from lmtrain.generation.picture import heatmap


def cell_colours(picture: np.ndarray, heads: int, words: int) -> np.ndarray:
    """The brightness near the corner of each cell, found from the grid lines' own colour: (heads, words)."""
    grid = (picture == 226).all(axis=2)
    rows = np.flatnonzero(grid.sum(axis=1) > 40 * words)[: heads + 1]
    columns = np.flatnonzero(grid[rows[0] : rows[-1]].sum(axis=0) > 30 * heads)[: words + 1]
    return np.array([[int(picture[y + 3, x + 3].sum()) for x in columns[:-1]] for y in rows[:-1]])


def test_larger_weights_are_darker() -> None:
    weights = np.array([[0.0, 0.1, 0.2, 0.7], [0.4, 0.3, 0.25, 0.05]])
    colours = cell_colours(heatmap(["one", "two", "three", "four"], weights), 2, 4)
    order = np.argsort(weights.ravel())
    assert (np.diff(colours.ravel()[order]) < 0).all()


def test_long_texts_and_unusual_tokens_fit() -> None:
    words = ["w" * 200, "", "\n", "日本", "\u2013", "café"] + ["word"] * 60
    weights = np.full((3, len(words)), 1 / len(words))
    one_band = heatmap(words[:24], weights[:, :24])
    picture = heatmap(words, weights)
    assert picture.dtype == np.uint8
    assert picture.shape[1] == one_band.shape[1] < 1500
    assert picture.shape[0] > 2 * (one_band.shape[0] - 100)
    border = np.concatenate(
        [picture[:8].ravel(), picture[-8:].ravel(), picture[:, :8].ravel(), picture[:, -8:].ravel()]
    )
    assert (border == 255).all()  # nothing exceeds the edge
    with pytest.raises(ValueError, match="words"):
        heatmap(["a"], np.ones((1, 2)))
