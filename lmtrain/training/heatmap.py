"""A picture of the pool's attention weights for TensorBoard, drawn with Pillow.

Shapes: H heads, T words.
"""

import math
import unicodedata

import numpy as np
from PIL import Image, ImageDraw, ImageFont

_MARGIN, _LEFT = 20, 72
_WIDTH, _HEIGHT = 40, 28
"""Pixels of a cell."""
_MAX_LETTERS = 14
_INK, _PAPER, _GRID = (38, 38, 38), (255, 255, 255), (226, 226, 226)
# A sequential map from almost white to dark blue, even in lightness, so that it also reads in gray.
_COLORS = np.array(
    [(250, 251, 253), (214, 228, 242), (164, 199, 226), (104, 163, 208), (54, 121, 182), (20, 78, 138), (8, 40, 86)],
    dtype=np.float64,
)
_ASCII = str.maketrans("\u2013\u2014\u2018\u2019\u201c\u201d", "--''\"\"")


def heatmap(words: list[str], weights: np.ndarray) -> np.ndarray:
    """Return a picture of heads by words, each cell colored by its weight and labeled with it in percent.

    `weights` (H, T), each row a distribution over the T `words` -> RGB, uint8 (height, width, 3). Eight words are
    legible on a card of TensorBoard. The color follows the square root of the weight, so that small weights are visible
    beside large ones.
    """
    labels = [_slanted(word) for word in words]
    top = _MARGIN + max(label.height for label in labels)
    overhang = max(label.width for label in labels)  # slanted labels extend to the right
    size = _LEFT + len(words) * _WIDTH + overhang + _MARGIN, top + len(weights) * _HEIGHT + _MARGIN
    picture, font = Image.new("RGB", size, _PAPER), ImageFont.load_default(14)
    draw = ImageDraw.Draw(picture)
    for column, label in enumerate(labels):
        picture.paste(label, (_LEFT + column * _WIDTH + _WIDTH // 2 - 12, top - label.height), label)
    for row in range(len(weights)):
        middle = top + row * _HEIGHT + _HEIGHT // 2
        draw.text((_LEFT - 8, middle), f"head {row + 1}", font=font, fill=_INK, anchor="rm")
    for (row, column), weight in np.ndenumerate(weights):
        x, y, color = _LEFT + column * _WIDTH, top + row * _HEIGHT, _color(weight)
        draw.rectangle((x, y, x + _WIDTH, y + _HEIGHT), fill=color, outline=_GRID)
        if weight >= 0.005:
            ink = _INK if sum(color) > 450 else _PAPER
            draw.text((x + _WIDTH / 2, y + _HEIGHT / 2), f"{100 * weight:.0f}", font=font, fill=ink, anchor="mm")
    return np.asarray(picture)


def _color(weight: float) -> tuple[int, int, int]:
    """Return the color of a weight between 0 and 1."""
    position = math.sqrt(min(max(weight, 0.0), 1.0)) * (len(_COLORS) - 1)
    red, green, blue = (np.interp(position, range(len(_COLORS)), channel) for channel in _COLORS.T)
    return round(red), round(green), round(blue)


def _slanted(word: str) -> Image.Image:
    """Return a picture of a word on a transparent ground, rotated by 45 degrees."""
    shown, font = _shortened(word), ImageFont.load_default(16)
    left, _, right, _ = font.getbbox(shown)
    flat = Image.new("RGBA", (math.ceil(right - left) + 2, 22), (*_INK, 0))
    ImageDraw.Draw(flat).text((1 - left, 1), shown, font=font, fill=(*_INK, 255))
    return flat.rotate(45, resample=Image.Resampling.BICUBIC, expand=True)


def _shortened(word: str) -> str:
    """Return the word in at most 14 characters that Pillow's own font has: without accents, `?` for other scripts."""
    decomposed = unicodedata.normalize("NFKD", word.translate(_ASCII))
    plain = "".join(char if " " <= char <= "~" else "?" for char in decomposed if not unicodedata.combining(char))
    return plain if len(plain) <= _MAX_LETTERS else plain[: _MAX_LETTERS - 1] + "\N{HORIZONTAL ELLIPSIS}"
