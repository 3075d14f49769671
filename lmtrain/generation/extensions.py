"""The best one-token extensions of many texts, for beam search.

Shapes: L live texts, C candidates listed of each, N extensions, R rows of the model's predictions, V vocabulary.
"""

import math
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

LISTED = 8
"""Candidates to list of each text for every one that it contributes on average: more are seldom needed."""

SMALLEST_BLOCK = 8
"""Columns: with smaller blocks, `topk` of a whole row is as quick; see `top`."""

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass(frozen=True)
class Extensions:
    """The chosen ones (N,), prompt after prompt, best first: the text extended, the token added, the sum of scores."""

    parents: Ints
    tokens: Ints
    totals: Floats
    stuck: NDArray[np.bool_]
    """(L,): which texts nothing may follow."""


def best_extensions(scores: Tensor, rows: Ints, totals: Floats, owners: Ints, beams: int) -> Extensions:
    """The `beams` best extensions of each prompt's texts, by total + score in float64; never one of minus infinity.

    `scores` (R, V) float32 are those of the next tokens, minus infinity where not allowed; text i (of L) has its own in
    row `rows[i]`, a total so far, and belongs to prompt `owners[i]`, which never falls from one text to the next. Of
    equal extensions, those of the earlier text come first, then the lowest token.

    A few candidates of each text are listed. Only a text whose last listed one may still be among the best, which
    includes all ties across the end of its list, is looked at in full.
    """
    vocab = scores.shape[-1]
    most = int(np.bincount(owners).max())
    size = min(vocab, beams + 1, LISTED * -(-beams // most))
    values, ids = top(scores, size)
    listed = totals[:, None] + values.cpu().numpy().astype(np.float64)[rows]  # (L, C)
    parents = np.repeat(np.arange(len(rows)), size)
    tokens = ids.cpu().numpy()[rows].ravel()
    found = listed.ravel()
    order, cutoffs = _merge(owners[parents], parents, tokens, found, beams)
    unclear = (listed[:, -1] >= cutoffs[owners]) & (size < vocab)
    if unclear.any():
        clear = ~unclear[parents]
        parts = [(parents[clear], tokens[clear], found[clear])]
        for text in np.flatnonzero(unclear):
            total = totals[text] + scores[rows[text]].cpu().numpy().astype(np.float64)  # (V,)
            chosen = np.flatnonzero(total >= cutoffs[owners[text]])
            parts.append((np.full(len(chosen), text), chosen, total[chosen]))
        parents, tokens, found = (np.concatenate(columns) for columns in zip(*parts, strict=True))
        order, _ = _merge(owners[parents], parents, tokens, found, beams)
    return Extensions(parents[order], tokens[order], found[order], listed[:, 0] == -np.inf)


def top(scores: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The `count` highest values of each row and their columns: (R, V) -> two of (R, count); which of equals is open.

    A long row is cut into blocks first: the `count` blocks with the highest maxima hold `count` highest values, and a
    maximum is found several times quicker than `topk` reads as many values.
    """
    vocab = scores.shape[-1]
    size = math.isqrt(vocab // (count + 1))  # about the fewest values to sort: maxima, then the chosen blocks'
    if size < SMALLEST_BLOCK:
        return scores.topk(count)
    blocks = vocab // size
    whole = blocks * size
    # Block b has the columns b, b + blocks, b + 2 blocks, ...: memory is then read in order for all blocks at once.
    maxima = scores[:, :whole].reshape(len(scores), size, blocks).amax(1)
    highest = maxima.topk(count, sorted=False).indices  # (R, count)
    places = torch.arange(size, device=scores.device).unsqueeze(-1) * blocks
    columns = (highest.unsqueeze(1) + places).flatten(1)  # (R, size * count)
    rest = torch.arange(whole, vocab, device=scores.device).expand(len(scores), -1)
    columns = torch.cat((columns, rest), dim=1)
    values, chosen = scores.gather(1, columns).topk(count)
    return values, columns.gather(1, chosen)


def _merge(owners: Ints, parents: Ints, tokens: Ints, totals: Floats, beams: int) -> tuple[Ints, Floats]:
    """Which candidates (N,) are among the `beams` best of their prompt, in order; and each prompt's last one's total.

    That total is the lowest finite number where a prompt has fewer candidates.
    """
    order = np.lexsort((tokens, parents, -totals, owners))
    order = order[totals[order] > -np.inf]
    sorted_owners = owners[order]
    place = np.arange(len(order)) - np.searchsorted(sorted_owners, sorted_owners)
    cutoffs = np.full(int(owners.max()) + 1, np.finfo(np.float64).min)
    last = order[place == beams - 1]
    cutoffs[owners[last]] = totals[last]
    return order[place < beams], cutoffs
