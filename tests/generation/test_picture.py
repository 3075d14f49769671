"""The map of words by words: every weight in its cell, in its color."""

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from lmtrain.generation.picture import _color, save_png, word_map


def cells(picture: np.ndarray, panel: int, panels: int, rows: int, columns: int) -> np.ndarray:
    """The color in the middle of each cell of a panel, found only by the cells' size: (rows, columns, 3)."""
    grid = (picture == (226, 226, 226)).all(-1)
    lines = [y for y in range(len(grid)) if grid[y].sum() >= columns * 24]  # the lines between rows
    del lines[-2:]  # the scale
    assert len(lines) == panels * (rows + 1)
    tops = lines[panel * (rows + 1) :][:rows]
    left = int(grid[tops[0]].argmax())
    return np.array([[picture[top + 10, left + 24 * column + 12] for column in range(columns)] for top in tops])


def test_the_mean_and_each_head_have_their_panels() -> None:
    rng = np.random.default_rng(0)
    weights = rng.dirichlet(np.ones(5), size=(3, 4)).astype(np.float32)
    picture = word_map([f"row{row}" for row in range(4)], ["<eos>", "a", "caf\u00e9", "x" * 40, "?"], weights)
    for panel, values in enumerate([weights.mean(0), *weights]):
        expected = [[_color(weight) for weight in row] for row in values]
        np.testing.assert_array_equal(cells(picture, panel, 4, 4, 5), expected)


@pytest.mark.parametrize("heads", [1, 9])
def test_one_head_or_too_many_are_one_panel(heads: int) -> None:
    picture = word_map(["a", "b"], ["c"], np.full((heads, 2, 1), 0.5))
    assert cells(picture, 0, 1, 2, 1).shape == (2, 1, 3)


def test_a_picture_is_written_as_png(tmp_path: Path) -> None:
    picture = word_map(["a"], ["b"], np.ones((1, 1, 1)))
    save_png(picture, tmp_path / "map.png")
    with Image.open(tmp_path / "map.png") as read:
        assert read.format == "PNG"
        np.testing.assert_array_equal(np.asarray(read), picture)


@pytest.mark.parametrize("shape", [(1, 2, 1), (1, 1, 2), (0, 1, 1)])
def test_shapes_that_disagree_are_rejected(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="do not fit"):
        word_map(["a"], ["b"], np.ones(shape))
