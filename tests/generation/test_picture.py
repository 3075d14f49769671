"""Pictures of attention weights: every weight in its cell, in its color, whatever the words."""

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from lmtrain.generation.picture import _color, heatmap, save_png, word_map


def cells(picture: np.ndarray, panel: int, shape: tuple[int, int, int], width: int) -> np.ndarray:
    """The color near the corner of each cell of a panel, of (panels, rows, columns) in all: (rows, columns, 3)."""
    panels, rows, columns = shape
    grid = (picture == (226, 226, 226)).all(-1)
    lines = [y for y in range(len(grid)) if grid[y].sum() >= columns * width]  # the lines between rows
    lines = lines[: panels * (rows + 1)]  # without the scale's
    tops = lines[panel * (rows + 1) :][:rows]
    left = int(grid[tops[0]].argmax())
    return np.array([[picture[top + 3, left + width * column + 3] for column in range(columns)] for top in tops])


def colors(weights: np.ndarray) -> list[list[tuple[int, int, int]]]:
    return [[_color(weight) for weight in row] for row in weights]


def test_the_mean_and_each_head_have_their_panels() -> None:
    rng = np.random.default_rng(0)
    weights = rng.dirichlet(np.ones(5), size=(3, 4)).astype(np.float32)
    picture = word_map([f"row{row}" for row in range(4)], ["<eos>", "a", "caf\u00e9", "x" * 40, "?"], weights)
    for panel, values in enumerate([weights.mean(0), *weights]):
        np.testing.assert_array_equal(cells(picture, panel, (4, 4, 5), 24), colors(values))


@pytest.mark.parametrize("heads", [1, 9])
def test_one_head_or_too_many_are_one_panel(heads: int) -> None:
    picture = word_map(["a", "b"], ["c"], np.full((heads, 2, 1), 0.5))
    assert picture.shape == word_map(["a", "b"], ["c"], np.full((1, 2, 1), 0.5)).shape
    np.testing.assert_array_equal(cells(picture, 0, (1, 2, 1), 24), colors(np.full((2, 1), 0.5)))


def test_heads_by_words() -> None:
    weights = np.random.default_rng(0).dirichlet(np.ones(8), size=3)
    words = ["w" * 200, "", "\n", "日本", "\u2013", "café", "word", "w" * 200]
    picture = heatmap(words, weights)
    np.testing.assert_array_equal(cells(picture, 0, (1, 3, 8), 40), colors(weights))
    border = [picture[:8].ravel(), picture[-8:].ravel(), picture[:, :8].ravel(), picture[:, -8:].ravel()]
    assert (np.concatenate(border) == 255).all()  # nothing exceeds the edge


def test_larger_weights_are_darker() -> None:
    assert (np.diff([sum(_color(weight)) for weight in np.linspace(0, 1, 20)]) < 0).all()


def test_a_picture_is_written_as_png(tmp_path: Path) -> None:
    picture = word_map(["a"], ["b"], np.ones((1, 1, 1)))
    save_png(picture, tmp_path / "map.png")
    with Image.open(tmp_path / "map.png") as read:
        assert read.format == "PNG"
        np.testing.assert_array_equal(np.asarray(read), picture)
