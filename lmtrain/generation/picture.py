"""Pictures of the pool's attention weights, drawn with Pillow.

Shapes: H heads, T words, N generated words.
"""

import io
import math
import unicodedata
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFont

_MARGIN, _TITLE_HEIGHT = 20, 26
_SCALE_HEIGHT, _SCALE_WIDTH = 14, 300
_MAX_HEADS, _MAX_LETTERS = 8, 14
_INK, _FAINT_INK, _PAPER, _GRID = (38, 38, 38), (120, 120, 120), (255, 255, 255), (226, 226, 226)
# A sequential map from almost white to dark blue, even in lightness, so that it also reads in gray.
_COLORS = np.array(
    [(250, 251, 253), (214, 228, 242), (164, 199, 226), (104, 163, 208), (54, 121, 182), (20, 78, 138), (8, 40, 86)],
    dtype=np.float64,
)
_ASCII = str.maketrans("\u2013\u2014\u2018\u2019\u201c\u201d", "--''\"\"")


@dataclass(frozen=True)
class _Panel:
    """A grid of cells: weights (rows, columns) with labels; each cell is `size` (width, height) pixels, and the rows'
    labels are `label_width` pixels wide."""

    title: str
    rows: list[str]
    columns: list[str]
    weights: np.ndarray
    size: tuple[int, int]
    label_width: int


def heatmap(words: list[str], weights: np.ndarray) -> np.ndarray:
    """Heads by words, each cell colored by its weight and labeled with it in percent: RGB, uint8 (height, width, 3).

    `weights` (H, T), each row a distribution over the T `words`. Eight words are legible on a card of TensorBoard.
    """
    rows = [f"head {head + 1}" for head in range(len(weights))]
    return _draw([_Panel("", rows, words, weights, (40, 28), 52)], percent=True)


def word_map(rows: list[str], columns: list[str], weights: np.ndarray) -> np.ndarray:
    """Generated words by the words before them, colored by weight: the mean of the heads, and below it each head.

    `weights` (H, N, T) for N `rows` and T `columns`. More than eight heads are shown only as their mean.
    Returns RGB, uint8 (height, width, 3).
    """
    named = [("mean of the heads", weights.mean(0))]
    if 1 < len(weights) <= _MAX_HEADS:
        named += [(f"head {head + 1}", weights[head]) for head in range(len(weights))]
    return _draw([_Panel(title, rows, columns, values, (24, 20), 120) for title, values in named], percent=False)


def save_png(picture: np.ndarray, path: Path) -> None:
    """Write RGB, uint8 (height, width, 3) as a PNG file. Raises OSError when it can't be written."""
    content = io.BytesIO()
    Image.fromarray(picture).save(content, format="PNG")
    path.write_bytes(content.getvalue())


def _draw(panels: list[_Panel], *, percent: bool) -> np.ndarray:
    """The panels one below the other, above the scale; with `percent`, weights are written into the cells instead.

    The color follows the square root of the weight, so that small weights show beside large ones; the scale says so.
    """
    left = _MARGIN + panels[0].label_width
    labels = [[_slanted(word) for word in panel.columns] for panel in panels]
    label_height = max(label.height for row in labels for label in row)
    label_width = max(label.width for row in labels for label in row)  # slanted labels extend to the right
    heights = [
        _TITLE_HEIGHT * bool(panel.title) + label_height + len(panel.rows) * panel.size[1] + _MARGIN for panel in panels
    ]
    grid_width = max(len(panel.columns) * panel.size[0] for panel in panels) + label_width
    width = left + (grid_width if percent else max(grid_width, _SCALE_WIDTH)) + _MARGIN
    scale_height = 0 if percent else _SCALE_HEIGHT + 24 + _MARGIN
    picture = Image.new("RGB", (width, _MARGIN + sum(heights) + scale_height), _PAPER)
    draw = ImageDraw.Draw(picture)
    top = _MARGIN
    for panel, panel_labels, height in zip(panels, labels, heights, strict=True):
        draw.text((_MARGIN, top), panel.title, font=ImageFont.load_default(16), fill=_INK)
        grid_top = top + _TITLE_HEIGHT * bool(panel.title) + label_height
        for column, label in enumerate(panel_labels):
            center = left + column * panel.size[0] + panel.size[0] // 2
            picture.paste(label, (center - 12, grid_top - label.height), label)
        _draw_cells(draw, panel, left, grid_top, percent=percent)
        top += height
    if not percent:
        _draw_scale(draw, left, top)
    return np.asarray(picture)


def _draw_cells(draw: ImageDraw.ImageDraw, panel: _Panel, start: int, top: int, *, percent: bool) -> None:
    font, (width, height) = ImageFont.load_default(14), panel.size
    for row, word in enumerate(panel.rows):
        middle = top + row * height + height // 2
        draw.text((start - 8, middle), _shortened(word), font=font, fill=_INK, anchor="rm")
    for (row, column), weight in np.ndenumerate(panel.weights):
        left, upper = start + column * width, top + row * height
        color = _color(weight)
        draw.rectangle((left, upper, left + width, upper + height), fill=color, outline=_GRID)
        if percent and weight >= 0.005:
            ink = _INK if sum(color) > 450 else _PAPER
            center = (left + width / 2, upper + height / 2)
            draw.text(center, f"{100 * weight:.0f}", font=font, fill=ink, anchor="mm")


def _color(weight: float) -> tuple[int, int, int]:
    """The color of a weight between 0 and 1."""
    position = math.sqrt(min(max(weight, 0.0), 1.0)) * (len(_COLORS) - 1)
    red, green, blue = (np.interp(position, range(len(_COLORS)), channel) for channel in _COLORS.T)
    return round(red), round(green), round(blue)


def _slanted(word: str) -> Image.Image:
    """A word on a transparent ground, rotated by 45 degrees."""
    shown, font = _shortened(word), ImageFont.load_default(16)
    left, _, right, _ = font.getbbox(shown)
    flat = Image.new("RGBA", (math.ceil(right - left) + 2, 22), (*_INK, 0))
    ImageDraw.Draw(flat).text((1 - left, 1), shown, font=font, fill=(*_INK, 255))
    return flat.rotate(45, resample=Image.Resampling.BICUBIC, expand=True)


def _shortened(word: str) -> str:
    """The word in characters that Pillow's own font has, at most 14: without accents, `?` for other scripts."""
    decomposed = unicodedata.normalize("NFKD", word.translate(_ASCII))
    plain = "".join(char if " " <= char <= "~" else "?" for char in decomposed if not unicodedata.combining(char))
    return plain if len(plain) <= _MAX_LETTERS else plain[: _MAX_LETTERS - 1] + "\N{HORIZONTAL ELLIPSIS}"


def _draw_scale(draw: ImageDraw.ImageDraw, left: int, top: int) -> None:
    font = ImageFont.load_default(13)
    draw.text((_MARGIN, top + _SCALE_HEIGHT / 2), "weight", font=font, fill=_FAINT_INK, anchor="lm")
    for x in range(_SCALE_WIDTH):
        draw.line((left + x, top, left + x, top + _SCALE_HEIGHT), fill=_color((x / (_SCALE_WIDTH - 1)) ** 2))
    draw.rectangle((left, top, left + _SCALE_WIDTH, top + _SCALE_HEIGHT), outline=_GRID)
    for percent in (0, 1, 5, 10, 25, 50, 100):
        tick = left + _SCALE_WIDTH * math.sqrt(percent / 100)
        draw.line((tick, top + _SCALE_HEIGHT, tick, top + _SCALE_HEIGHT + 4), fill=_FAINT_INK)
        draw.text((tick, top + _SCALE_HEIGHT + 6), f"{percent}%", font=font, fill=_FAINT_INK, anchor="ma")
