"""The picture of attention weights: every weight in its cell, in its color, whatever the words."""

import numpy as np

from lmtrain.training.heatmap import _color, heatmap


def cells(picture: np.ndarray, rows: int, columns: int) -> np.ndarray:
    """The color near the corner of each cell: (rows, columns, 3)."""
    grid = (picture == (226, 226, 226)).all(-1)
    tops = [y for y in range(len(grid)) if grid[y].sum() >= columns * 40]  # the lines above the rows
    left = int(grid[tops[0]].argmax())
    return np.array([[picture[top + 3, left + 40 * column + 3] for column in range(columns)] for top in tops[:rows]])


def test_heads_by_words() -> None:
    weights = np.random.default_rng(0).dirichlet(np.ones(8), size=3)
    words = ["w" * 200, "", "\n", "日本", "\u2013", "café", "word", "w" * 200]
    picture = heatmap(words, weights)
    colors = [[_color(weight) for weight in row] for row in weights]
    np.testing.assert_array_equal(cells(picture, 3, 8), colors)
    border = [picture[:8].ravel(), picture[-8:].ravel(), picture[:, :8].ravel(), picture[:, -8:].ravel()]
    assert (np.concatenate(border) == 255).all()  # nothing exceeds the edge


def test_larger_weights_are_darker() -> None:
    assert (np.diff([sum(_color(weight)) for weight in np.linspace(0, 1, 20)]) < 0).all()
