"""Draw the language model of `lmtrain.model`: embedding, encoder blocks, attention pooling, logits.

    python scripts/examples/model.py

Writes model.png: on the left the whole model, in the middle one encoder block, on the right the pool with which each
position reads all positions up to itself.
"""

from example import Results, parse, report
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Circle, FancyBboxPatch

WORDS = ("The", "Sarn", "is", "a", "quiet", "river")
"""Tokens; each is predicted from those before it."""
WIDTH, HEIGHT = 13.0, 8.4
BLUE, GREEN, ORANGE, GREY, WHITE = "#cfe0f3", "#d5ead3", "#fbdcb8", "#f3f3f3", "#ffffff"
LINE, BRIGHT, PALE = "#444444", "#d9731a", "#c4c4c4"
SHARES = (0.2, 0.5, 0.3, 0.0, 0.0)
"""The weights of the highlighted mean, which reads three positions."""


def box(axes: Axes, x: float, y: float, width: float, height: float, text: str, colour: str) -> None:
    """A rounded box around (x, y) with a text."""
    corner = (x - width / 2, y - height / 2)
    shape = "round,pad=0,rounding_size=0.09"
    axes.add_patch(FancyBboxPatch(corner, width, height, shape, facecolor=colour, edgecolor=LINE, linewidth=1.2))
    axes.text(x, y, text, ha="center", va="center", fontsize=15, linespacing=1.3)


def panel(axes: Axes, left: float, right: float, title: str) -> None:
    """The background of a detail."""
    shape = "round,pad=0,rounding_size=0.2"
    axes.add_patch(
        FancyBboxPatch((left, 0.1), right - left, HEIGHT - 0.2, shape, facecolor=GREY, edgecolor="none", zorder=0)
    )
    axes.text((left + right) / 2, HEIGHT - 0.4, title, ha="center", va="center", fontsize=17, fontweight="bold")


def path(axes: Axes, *points: tuple[float, float], colour: str = LINE, width: float = 1.5, style: str = "-") -> None:
    """A line through points, with an arrow's head at the last one."""
    *_, before, last = points
    axes.plot(*zip(*points[:-1], strict=True), color=colour, linewidth=width, linestyle=style)
    arrow = {"arrowstyle": "-|>", "color": colour, "linewidth": width, "linestyle": style, "shrinkA": 0, "shrinkB": 0}
    axes.annotate("", last, before, arrowprops=arrow)


def plus(axes: Axes, x: float, y: float) -> None:
    """A sum."""
    axes.add_patch(Circle((x, y), 0.17, facecolor=WHITE, edgecolor=LINE, linewidth=1.2, zorder=3))
    axes.text(x, y - 0.015, "+", ha="center", va="center", fontsize=17, zorder=4)


def sublayer(axes: Axes, x: float, bottom: float, names: tuple[str, ...], colour: str) -> float:
    """Boxes one above the other, and the residual connection around them; the height of the sum."""
    y = bottom
    for name in names:
        path(axes, (x, y), (x, y + 0.4))
        box(axes, x, y + 0.7, 2.1, 0.6, name, WHITE if name == "norm" else colour)
        y += 1.0
    total = y + 0.45
    path(axes, (x, y), (x, total - 0.17))
    path(axes, (x, bottom + 0.12), (x + 1.35, bottom + 0.12), (x + 1.35, total), (x + 0.17, total))
    plus(axes, x, total)
    return total


def draw_model(axes: Axes, x: float) -> None:
    """The whole model, from tokens to logits."""
    places = [x + 0.85 * (index - 2) for index in range(5)]
    for place, word, following in zip(places, WORDS, WORDS[1:], strict=False):
        axes.text(place, 0.55, word, ha="center", va="center", fontsize=15)
        path(axes, (place, 0.8), (place, 1.15))
        path(axes, (place, 7.0), (place, 7.35))
        axes.text(place, 7.6, following, ha="center", va="center", fontsize=15, style="italic")
    axes.text(x, 0.2, "tokens", ha="center", va="center", fontsize=13, color=LINE)
    axes.text(x, 8.0, "logits of every next token", ha="center", va="center", fontsize=13, color=LINE)
    box(axes, x, 1.45, 3.9, 0.6, "embedding", BLUE)
    path(axes, (x, 1.75), (x, 2.9))
    for offset in (0.2, 0.1, 0.0):
        box(axes, x + offset, 3.5 + offset, 3.0, 1.2, "" if offset else "encoder block", GREEN)
    axes.text(x + 1.85, 3.6, "\N{MULTIPLICATION SIGN} N", ha="left", va="center", fontsize=17, fontweight="bold")
    path(axes, (x, 4.3), (x, 4.7))
    box(axes, x, 5.15, 3.0, 0.9, "attention pool", ORANGE)
    path(axes, (x, 5.6), (x, 6.1))
    box(axes, x, 6.55, 3.9, 0.9, "norm\noutput layer", BLUE)
    edge = x - 2.25
    axes.plot((x - 1.95, edge, edge, x - 1.95), (1.45, 1.45, 6.4, 6.4), color=LINE, linewidth=1.5, linestyle="--")
    axes.text(edge - 0.05, 3.9, "tied weights", rotation=90, ha="right", va="center", fontsize=13, color=LINE)


def draw_block(axes: Axes, x: float) -> None:
    """One encoder block."""
    middle = sublayer(axes, x, 1.2, ("norm", "causal attention\n(rotary positions)"), GREEN)
    top = sublayer(axes, x, middle + 0.17, ("norm", "feed-forward"), GREEN)
    path(axes, (x, top + 0.17), (x, top + 0.75))


def draw_pool(axes: Axes, x: float) -> None:
    """The pool: one query's scores, their softmax means over prefixes, and a residual feed-forward layer."""
    places = [x + 0.62 * (index - 2) for index in range(5)]
    shown = 2  # its place is the middle, where the layers above it stand
    for last, end in enumerate(places):
        for start, share in zip(places[: last + 1], SHARES, strict=False):
            colour, width = (BRIGHT, 12 * share) if last == shown else (PALE, 1.2)
            axes.plot((start, end), (1.9, 3.4), color=colour, linewidth=width, zorder=0.7 if last == shown else 0.6)
    for index, place in enumerate(places):
        box(axes, place, 0.75, 0.5, 0.5, f"$x_{index + 1}$", GREEN)
        path(axes, (place, 1.0), (place, 1.5))
        box(axes, place, 3.55, 0.5, 0.5, f"$O_{index + 1}$", ORANGE if index == shown else WHITE)
    box(axes, 9.13, 1.75, 0.9, 0.7, "learned\nquery $s$", ORANGE)
    path(axes, (9.58, 1.75), (x - 1.47, 1.75))
    box(axes, x, 1.75, 2.94, 0.5, r"scores $s \cdot k_i - m\,(t-i)$", ORANGE)
    axes.text(9.3, 2.75, "softmax\nmean over\n$i \\leq t$", ha="center", va="center", fontsize=13, color=LINE)
    path(axes, (x, 3.8), (x, 4.33))
    plus(axes, x, 4.5)
    path(axes, (x - 0.9, 4.5), (x - 0.17, 4.5))
    axes.text(x - 0.95, 4.5, f"$x_{shown + 1}$", ha="right", va="center", fontsize=15)
    top = sublayer(axes, x, 4.67, ("norm", "feed-forward"), ORANGE)
    path(axes, (x, top + 0.17), (x, top + 0.6))


def draw() -> Figure:
    figure = Figure(figsize=(WIDTH, HEIGHT), layout="constrained")
    axes = figure.subplots()
    axes.set(xlim=(0, WIDTH), ylim=(0, HEIGHT), aspect="equal")
    axes.set_axis_off()
    panel(axes, 4.95, 8.35, "encoder block")
    panel(axes, 8.6, WIDTH, "attention pool")
    draw_model(axes, 2.5)
    draw_block(axes, 6.45)
    draw_pool(axes, 11.32)
    return figure


def main(argv: list[str] | None = None) -> Results:
    """Draw."""
    return report("model", {}, draw(), parse(__doc__, argv))


if __name__ == "__main__":
    main()
