"""Pictures of how the pooling heads weigh the words of a text, drawn with Pillow.

Shapes: H heads, T words, N generated words.
"""

import io
import math
import unicodedata
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFont

_CELL_WIDTH, _CELL_HEIGHT = 46, 34
_SMALL_WIDTH, _SMALL_HEIGHT, _ROW_COLUMN, _TITLE_HEIGHT = 24, 20, 120, 26
_MOST_PANELS = 8
_WORDS_IN_BAND = 24
_LONGEST_WORD = 14
_MARGIN = 24
_HEAD_COLUMN = 70
_SCALE_HEIGHT, _SCALE_WIDTH = 14, 300
_INK, _FAINT_INK, _PAPER, _GRID = (38, 38, 38), (120, 120, 120), (255, 255, 255), (226, 226, 226)
# A sequential map from almost white to dark blue, even in lightness, so that it also reads in grey.
_COLOURS = np.array(
    [(250, 251, 253), (214, 228, 242), (164, 199, 226), (104, 163, 208), (54, 121, 182), (20, 78, 138), (8, 40, 86)],
    dtype=np.float64,
)


def heatmap(words: list[str], weights: np.ndarray) -> np.ndarray:
    """Heads by words, each cell coloured by its weight and marked with it in percent: RGB, uint8 (height, width, 3).

    `weights` (H, T), each row a distribution over the T `words`. Long texts break into bands, one below the other. The
    colour follows the square root of the weight, so that small weights show beside large ones; the scale says so.
    Raises ValueError when the shapes disagree.
    """
    heads, count = weights.shape
    if count != len(words) or not words:
        raise ValueError(f"weights {weights.shape} do not fit {len(words)} words")
    labels = [_label(word) for word in words]
    label_height = max(label.height for label in labels)
    label_width = max(label.width for label in labels)
    bands = math.ceil(count / _WORDS_IN_BAND)
    band_height = label_height + heads * _CELL_HEIGHT + _MARGIN
    columns = min(count, _WORDS_IN_BAND)
    # A slanted label leans out to the right of its column.
    width = max(_HEAD_COLUMN + columns * _CELL_WIDTH + label_width, _HEAD_COLUMN + _SCALE_WIDTH) + 2 * _MARGIN
    height = _MARGIN + bands * band_height + _SCALE_HEIGHT + 24 + _MARGIN
    picture = Image.new("RGB", (width, height), _PAPER)
    draw = ImageDraw.Draw(picture)
    for band in range(bands):
        columns_here = slice(band * _WORDS_IN_BAND, (band + 1) * _WORDS_IN_BAND)
        top = _MARGIN + band * band_height + label_height
        _draw_labels(picture, labels[columns_here], top)
        _draw_cells(draw, weights[:, columns_here], top)
    _draw_scale(draw, height - _MARGIN - _SCALE_HEIGHT - 18)
    return np.asarray(picture)


def word_map(rows: list[str], columns: list[str], weights: np.ndarray) -> np.ndarray:
    """Generated words by the words before them, coloured by weight: the mean of the heads, and below it each head.

    `weights` (H, N, T) for N `rows` and T `columns`. More than eight heads are shown as their mean alone.
    Returns RGB, uint8 (height, width, 3). Raises ValueError when the shapes disagree.
    """
    if weights.shape[1:] != (len(rows), len(columns)) or not weights.size:
        raise ValueError(f"weights {weights.shape} do not fit {len(rows)} rows and {len(columns)} columns")
    panels = [("mean of the heads", weights.mean(0))]
    if 1 < len(weights) <= _MOST_PANELS:
        panels += [(f"head {head + 1}", weights[head]) for head in range(len(weights))]
    labels = [_label(word) for word in columns]
    label_height, label_width = max(label.height for label in labels), max(label.width for label in labels)
    panel_height = _TITLE_HEIGHT + label_height + len(rows) * _SMALL_HEIGHT + _MARGIN
    width = max(_ROW_COLUMN + len(columns) * _SMALL_WIDTH + label_width, _HEAD_COLUMN + _SCALE_WIDTH) + 2 * _MARGIN
    height = _MARGIN + len(panels) * panel_height + _SCALE_HEIGHT + 24 + _MARGIN
    picture = Image.new("RGB", (width, height), _PAPER)
    draw = ImageDraw.Draw(picture)
    for number, (title, values) in enumerate(panels):
        top = _MARGIN + number * panel_height
        draw.text((_MARGIN, top), title, font=ImageFont.load_default(16), fill=_INK)
        _draw_map(picture, rows, labels, values, top + _TITLE_HEIGHT + label_height)
    _draw_scale(draw, height - _MARGIN - _SCALE_HEIGHT - 18)
    return np.asarray(picture)


def save(picture: np.ndarray, path: Path) -> None:
    """Write RGB, uint8 (height, width, 3) as a PNG file. Raises OSError when it can't be written."""
    content = io.BytesIO()
    Image.fromarray(picture).save(content, format="PNG")
    path.write_bytes(content.getvalue())


def _draw_map(picture: Image.Image, rows: list[str], labels: list[Image.Image], weights: np.ndarray, top: int) -> None:
    """The cells (N, T) from `top` on, words on their left and the `labels` above."""
    draw, font = ImageDraw.Draw(picture), ImageFont.load_default(14)
    start = _MARGIN + _ROW_COLUMN
    for column, label in enumerate(labels):
        picture.paste(label, (start + column * _SMALL_WIDTH + _SMALL_WIDTH // 2 - 12, top - label.height), label)
    for row, word in enumerate(rows):
        middle = top + row * _SMALL_HEIGHT + _SMALL_HEIGHT // 2
        draw.text((start - 8, middle), _shortened(word), font=font, fill=_INK, anchor="rm")
    for (row, column), weight in np.ndenumerate(weights):
        left, upper = start + column * _SMALL_WIDTH, top + row * _SMALL_HEIGHT
        draw.rectangle((left, upper, left + _SMALL_WIDTH, upper + _SMALL_HEIGHT), fill=_colour(weight), outline=_GRID)


def _colour(weight: float) -> tuple[int, int, int]:
    """The colour of a weight between 0 and 1."""
    place = math.sqrt(min(max(weight, 0.0), 1.0)) * (len(_COLOURS) - 1)
    red, green, blue = (np.interp(place, range(len(_COLOURS)), channel) for channel in _COLOURS.T)
    return round(red), round(green), round(blue)


def _label(word: str) -> Image.Image:
    """A word on transparent ground, slanted upwards to the right."""
    shown = _shortened(word)
    font = ImageFont.load_default(16)
    left, _, right, _ = font.getbbox(shown)
    flat = Image.new("RGBA", (math.ceil(right - left) + 2, 22), (*_INK, 0))
    ImageDraw.Draw(flat).text((1 - left, 1), shown, font=font, fill=(*_INK, 255))
    return flat.rotate(45, resample=Image.Resampling.BICUBIC, expand=True)


def _shortened(word: str) -> str:
    """The word as it is drawn."""
    shown = _drawable(word)
    return shown if len(shown) <= _LONGEST_WORD else shown[: _LONGEST_WORD - 1] + "\N{HORIZONTAL ELLIPSIS}"


def _drawable(word: str) -> str:
    """The word in the characters that Pillow's own font has: accents and typographic signs become their ASCII kin."""
    for sign, kin in (
        ("\u2013", "-"),
        ("\u2014", "-"),
        ("\u2018", "'"),
        ("\u2019", "'"),
        ("\u201c", '"'),
        ("\u201d", '"'),
    ):
        word = word.replace(sign, kin)
    bare = (character for character in unicodedata.normalize("NFKD", word) if not unicodedata.combining(character))
    return "".join(character if " " <= character <= "~" else "?" for character in bare)


def _draw_labels(picture: Image.Image, labels: list[Image.Image], top: int) -> None:
    for column, label in enumerate(labels):
        left = _MARGIN + _HEAD_COLUMN + column * _CELL_WIDTH + _CELL_WIDTH // 2 - 12
        picture.paste(label, (left, top - label.height), label)


def _draw_cells(draw: ImageDraw.ImageDraw, weights: np.ndarray, top: int) -> None:
    head_font, cell_font = ImageFont.load_default(15), ImageFont.load_default(13)
    for head in range(len(weights)):
        middle = top + head * _CELL_HEIGHT + _CELL_HEIGHT // 2
        draw.text((_MARGIN, middle), f"head {head + 1}", font=head_font, fill=_INK, anchor="lm")
    for (head, column), weight in np.ndenumerate(weights):
        left, upper = _MARGIN + _HEAD_COLUMN + column * _CELL_WIDTH, top + head * _CELL_HEIGHT
        colour = _colour(weight)
        draw.rectangle((left, upper, left + _CELL_WIDTH, upper + _CELL_HEIGHT), fill=colour, outline=_GRID)
        if weight >= 0.005:
            centre = (left + _CELL_WIDTH / 2, upper + _CELL_HEIGHT / 2)
            ink = _INK if sum(colour) > 450 else _PAPER
            draw.text(centre, f"{100 * weight:.0f}", font=cell_font, fill=ink, anchor="mm")


def _draw_scale(draw: ImageDraw.ImageDraw, top: int) -> None:
    font = ImageFont.load_default(13)
    left = _MARGIN + _HEAD_COLUMN
    draw.text((_MARGIN, top + _SCALE_HEIGHT / 2), "weight", font=font, fill=_FAINT_INK, anchor="lm")
    for x in range(_SCALE_WIDTH):
        draw.line((left + x, top, left + x, top + _SCALE_HEIGHT), fill=_colour((x / (_SCALE_WIDTH - 1)) ** 2))
    draw.rectangle((left, top, left + _SCALE_WIDTH, top + _SCALE_HEIGHT), outline=_GRID)
    for percent in (0, 1, 5, 10, 25, 50, 100):
        tick = left + _SCALE_WIDTH * math.sqrt(percent / 100)
        draw.line((tick, top + _SCALE_HEIGHT, tick, top + _SCALE_HEIGHT + 4), fill=_FAINT_INK)
        draw.text((tick, top + _SCALE_HEIGHT + 6), f"{percent}%", font=font, fill=_FAINT_INK, anchor="ma")
