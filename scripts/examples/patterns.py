"""Draw which keys each query may attend to under the attention patterns, and how many they are as texts grow.

    python scripts/examples/patterns.py

Writes patterns.png and prints the share of pairs of a query and a key that each pattern allows. Compressed attention
and Linformer mask no key; they attend to fewer keys, which the lowest picture counts.

Shapes: T positions of queries and of keys.
"""

import math
from dataclasses import replace

from example import parse, report
from matplotlib.axes import Axes
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator, StrMethodFormatter

from lmtrain.nn.patterns import Pattern

T = 32
PATTERNS = {
    "full": Pattern(),
    "local": Pattern(window=4),
    "strided": Pattern(stride=6),
    "global": Pattern(global_tokens=2),
    "local + strided": Pattern(window=4, stride=6),
    "local + global": Pattern(window=4, global_tokens=2),
}
"""They are drawn in two rows, the lower one causal."""
LENGTHS = [2**power for power in range(5, 12)]
WINDOW, STRIDE, GLOBAL, COMPRESSION, PROJECTED = 32, 32, 16, 8, 16
"""The sizes in the curves over lengths."""

COLORS = ListedColormap(["white", "#2b5c8a"])


def share(pattern: Pattern, length: int) -> float:
    """Return the fraction of all pairs of a query and a key that the pattern allows."""
    return pattern.mask(length).double().mean().item()


def keys_per_query() -> dict[str, list[float]]:
    """Return the mean number of keys that a query may attend to, at each length."""
    patterns = {
        "full": Pattern(),
        "full, causal": Pattern(causal=True),
        f"strided ({STRIDE}) + local ({WINDOW})": Pattern(stride=STRIDE, window=WINDOW),
        f"global ({GLOBAL}) + local ({WINDOW})": Pattern(global_tokens=GLOBAL, window=WINDOW),
        f"local ({WINDOW})": Pattern(window=WINDOW),
    }
    counts = {name: [share(pattern, length) * length for length in LENGTHS] for name, pattern in patterns.items()}
    counts[f"compressed ({COMPRESSION} to one)"] = [math.ceil(length / COMPRESSION) for length in LENGTHS]
    counts[f"Linformer ({PROJECTED} keys)"] = [PROJECTED for _ in LENGTHS]
    return counts


def draw_pattern(axes: Axes, name: str, pattern: Pattern) -> None:
    axes.imshow(pattern.mask(T).numpy(), cmap=COLORS, vmin=0, vmax=1)
    axes.set_title(f"{share(pattern, T):.0%}" if pattern.causal else f"{name}\n{share(pattern, T):.0%}")
    axes.set_xticks([0, 10, 20, 30])
    axes.set_yticks([0, 10, 20, 30])


def draw_counts(axes: Axes) -> None:
    for (name, counts), style in zip(keys_per_query().items(), ["-", "--", "-", "-", "-", "-.", ":"], strict=True):
        axes.plot(LENGTHS, counts, style, marker="o", markersize=4, label=name)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(StrMethodFormatter("{x:.0f}"))
        axis.set_minor_locator(NullLocator())
    axes.set(title="keys that a query may attend to, on average", xlabel="length", ylabel="keys")
    axes.grid(alpha=0.3)
    axes.legend(loc="center left", bbox_to_anchor=(1.01, 0.5))


def draw() -> Figure:
    figure = Figure(figsize=(12, 8.5), layout="constrained")
    above, below = figure.subfigures(2, 1, squeeze=False, height_ratios=[5, 4]).flat
    grid = above.subplots(2, len(PATTERNS), sharex=True, sharey=True)
    for causal, row in zip((False, True), grid, strict=True):
        for axes, (name, pattern) in zip(row, PATTERNS.items(), strict=True):
            draw_pattern(axes, name, replace(pattern, causal=causal))
    grid[0, 0].set_ylabel("both directions\n\nquery")
    grid[1, 0].set_ylabel("causal\n\nquery")
    for axes in grid[1]:
        axes.set_xlabel("key")
    draw_counts(below.subplots())
    return figure


def main() -> None:
    """Draw, and print the shares."""
    options = parse(__doc__)
    shares = {name: share(pattern, T) for name, pattern in PATTERNS.items()}
    causal = {name: share(replace(pattern, causal=True), T) for name, pattern in PATTERNS.items()}
    rows = [{"pattern": name, "share": shares[name], "share_causal": causal[name]} for name in PATTERNS]
    report("patterns", {"rows": rows}, draw(), options)


if __name__ == "__main__":
    main()
