"""Draw how positions are encoded: sinusoids, rotations and ALiBi, each by position and by the offset of two positions.

    python scripts/examples/positions.py

Writes positions.png and prints how far each encoding is from its laws: sinusoids have the norm sqrt(D / 2), and their
distances depend on the offset alone (Vaswani et al., 2017); rotations obey R(a)^T = R(-a) and R(a) R(b) = R(a + b), so
that scores depend on the offset alone (Su et al., 2021).

Shapes: T positions, D features, H heads.
"""

import math

import torch
from example import Results, parse, report
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor

from lmtrain.nn.positions import alibi_bias, alibi_slopes, rotate, rotation, sinusoidal

T, D, H = 96, 64, 8
STARTS = (0, 17, 40)
"""Positions from which offsets are drawn: their curves coincide."""


def by_offset(pairs: Tensor) -> Tensor:
    """Values for pairs of positions (T, T) -> the same values by position and offset (T / 2, T / 2)."""
    places = torch.arange(len(pairs) // 2)
    return pairs[places.unsqueeze(-1), places.unsqueeze(-1) + places]


def spread(pairs: Tensor) -> float:
    """Return the largest difference between values of pairs with the same offset."""
    table = by_offset(pairs)
    return (table.amax(0) - table.amin(0)).max().item()


def rotations(positions: Tensor) -> Tensor:
    """The matrices R(p) of positions (T,): (T, D, D)."""
    unit = torch.eye(D, dtype=torch.float64).unsqueeze(1).expand(D, len(positions), D)  # e_j at every position
    return rotate(unit, rotation(positions, D)).permute(1, 2, 0)


def rotary_scores() -> Tensor:
    """The score of one query and one key, all ones, at every pair of positions: (T, T)."""
    turned = rotate(torch.ones(T, D, dtype=torch.float64), rotation(torch.arange(T), D))
    return turned @ turned.T / D


def figures() -> Results:
    """The deviations from the laws."""
    places = torch.arange(T)
    table, turns = sinusoidal(places, D).double(), rotations(places)
    first, second = places[: T // 4], places[-T // 4 :]
    sums = rotations((first.unsqueeze(-1) + second).flatten()).view(len(first), len(second), D, D)
    return {
        "sinusoidal_norm_deviation": (table.norm(dim=-1) - math.sqrt(D / 2)).abs().max().item(),
        "sinusoidal_distance_deviation": spread(torch.linalg.vector_norm(table[:, None] - table, dim=-1)),
        "sinusoidal_product_deviation": spread(table @ table.T),
        "rotary_transpose_deviation": (turns.mT - rotations(-places)).abs().max().item(),
        "rotary_sum_deviation": (turns[first, None] @ turns[second] - sums).abs().max().item(),
        "rotary_score_deviation": spread(rotary_scores()),
        "alibi_deviation": spread(alibi_bias(alibi_slopes(H), places, places).sum(0)),
    }


def matrix(axes: Axes, table: Tensor, title: str, across: str, colors: str, limits: tuple[float, float]) -> None:
    """Draw a table (T, ...) as colors, positions downwards."""
    image = axes.imshow(table.numpy(), cmap=colors, vmin=limits[0], vmax=limits[1], aspect="auto")
    axes.set(title=title, xlabel=across, ylabel="position")
    axes.figure.colorbar(image, ax=axes)


def curves(axes: Axes, pairs: Tensor, title: str, upwards: str) -> None:
    """Draw pairs (T, T) by offset, from several positions."""
    for width, start in zip((7, 4, 1.5), STARTS, strict=True):
        axes.plot(by_offset(pairs)[start].numpy(), linewidth=width, label=f"from position {start}")
    axes.set(title=title, xlabel="offset", ylabel=upwards)
    axes.legend()
    axes.grid(alpha=0.3)


def draw() -> Figure:
    figure = Figure(figsize=(13, 7.5), layout="constrained")
    (first, second, third), (fourth, fifth, sixth) = figure.subplots(2, 3)
    places = torch.arange(T)
    table = sinusoidal(places, D)
    matrix(first, table, "sinusoids", "feature", "RdBu", (-1, 1))
    matrix(second, 2 * table @ table.T / D, "products of sinusoids", "position", "RdBu", (-1, 1))
    curves(third, torch.cdist(table, table), "distances of sinusoids", "distance")
    cosines, sines = rotation(places, D)
    angles = torch.atan2(sines, cosines)
    matrix(fourth, angles, "rotary angles", "pair of features", "twilight", (-math.pi, math.pi))
    curves(fifth, rotary_scores(), "scores of a rotated query and key", "score")
    slopes = alibi_slopes(H)
    for head, bias in enumerate(alibi_bias(slopes, places[:1], places).squeeze(1)):
        sixth.plot(bias.numpy(), label=f"1/{1 / slopes[head]:.0f}", color=colormaps["viridis"](head / H))
    sixth.set(title="ALiBi", xlabel="offset", ylabel="bias of the score", ylim=(-12, 0.5))
    sixth.legend(title="slope", loc="center left", bbox_to_anchor=(1.01, 0.5))
    sixth.grid(alpha=0.3)
    return figure


def main() -> None:
    """Draw, and print the deviations."""
    options = parse(__doc__)
    report("positions", figures(), draw(), options)


if __name__ == "__main__":
    main()
