"""Pictures of perplexity against minutes, where matplotlib is installed."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple


class Curve(NamedTuple):
    """Word perplexities at some minutes; `style` is matplotlib's format, as in "C0-" and "C0o"."""

    style: str
    minutes: Sequence[float]
    perplexities: Sequence[float]
    label: str | None = None


def draw(picture: Path, title: str, curves: Sequence[Curve]) -> None:
    """Draw them with a logarithmic axis of perplexity."""
    try:
        from matplotlib.figure import Figure
        from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter
    except ImportError:
        print(f"{picture.name} is not drawn: it needs the extra `examples` (matplotlib)", file=sys.stderr)
        return

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    for curve in curves:
        axes.plot(curve.minutes, curve.perplexities, curve.style, label=curve.label, alpha=0.8)
    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 1.5, 2.0, 3.0, 5.0, 7.0)))
    axes.yaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.set(title=title, xlabel="minutes", ylabel="word perplexity", xlim=(0, None))
    axes.grid(alpha=0.3, which="both")
    axes.legend()
    figure.savefig(picture, dpi=110)
