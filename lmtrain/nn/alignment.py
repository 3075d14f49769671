"""Cross-attention in which a query's weights depend on those of the previous query: monotonic and location-aware.

Masks are those of `padding_mask`, (B, 1, 1, Tk) bool: False gets no weight.

Shapes: B rows, H heads, Tq positions of queries, Tk of keys, D features per head, W the width of an input or output, R
the width of a filter.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lmtrain.nn.cross_attention import CrossAttention
from lmtrain.nn.precision import at_least_float32


class MonotonicAttention(CrossAttention):
    """Attention to one key, at or after that of the previous query (Raffel et al., 2017).

    From where the previous query stopped, a query inspects one key after the other, and stops at a key with the
    probability sigmoid(e), where e is a scaled dot product plus a learned offset (for every head, as in Ma et al.,
    2020). In training mode the weights are the expected alignments, and standard normal noise on e favors probabilities
    near 0 and 1. In evaluation mode these are 0 and 1: a query stops at the first key where e > 0. A query that passes
    the last key attends to nothing, as do all after it.
    """

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__(dim, heads)
        self.offset = nn.Parameter(torch.full((heads, 1, 1), -1.0))  # below zero: at first, no key stops every query

    def weights(self, query: Tensor, key: Tensor, mask: Tensor | None) -> Tensor:
        """Queries (B, H, Tq, D), keys (B, H, Tk, D) -> (B, H, Tq, Tk), float32 at least."""
        energy = at_least_float32((query * query.shape[-1] ** -0.5) @ key.transpose(-2, -1)) + self.offset
        mask = torch.ones_like(energy, dtype=torch.bool) if mask is None else mask
        probability = (energy + torch.randn_like(energy)).sigmoid() if self.training else (energy > 0).to(energy.dtype)
        return expected_alignment(probability * mask)


def expected_alignment(probability: Tensor) -> Tensor:
    """Return the expected alignments (B, H, Tq, Tk) of monotonic attention: how probable it is that query i stops at
    key j, if query 0 begins at key 0.

    probability (B, H, Tq, Tk): that query i stops at key j, given that it inspects j.

    This is a walk through pairs (i, j): a stop leads to (i + 1, j), anything else to (i, j + 1). All pairs of equal
    i + j are computed together, from those before. Raffel et al. (2017) divide by a product of probabilities, which
    underflows; here nothing but probabilities is added and multiplied.
    """
    queries, keys = probability.shape[-2:]
    # Each row shifted to the right by its number: [i, i + j] is the probability of (i, j).
    shifted = F.pad(probability, (0, queries + 1)).flatten(-2)[..., : queries * (queries + keys)]
    shifted = shifted.view(*probability.shape[:-1], queries + keys)
    stopped = torch.zeros_like(shifted[..., 0])  # (B, H, Tq)
    passed = (torch.arange(queries, device=stopped.device) == 0).to(stopped.dtype)  # as if query 0 came from key -1
    columns = []
    for probable in shifted.unbind(-1):
        reached = passed + F.pad(stopped, (1, 0))[..., :queries]
        stopped = reached * probable
        passed = reached - stopped
        columns.append(stopped)
    back = F.pad(torch.stack(columns, dim=-1).flatten(-2), (0, queries))
    return back.view(*probability.shape[:-1], queries + keys + 1)[..., :keys]


class LocationAwareAttention(CrossAttention):
    """Attention that depends on where the previous query attended (Chorowski et al., 2015).

    The energy of a key is w . tanh(q + k + f + b), where f are the features of a convolution over the weights of the
    previous query, around the key, and the weights are the softmax of the energies. A head has its own w, b and
    filters, one for each feature, R keys wide, where R is odd; before the first query all weights are zero.
    """

    def __init__(self, dim: int, heads: int, *, width: int = 15) -> None:
        super().__init__(dim, heads)
        self.around = (width // 2, width // 2 + 1)  # one too many: Conv1d rejects an empty result
        self.location = nn.Conv1d(heads, dim, width, groups=heads)
        self.energy = nn.Parameter(torch.empty(heads, dim // heads, 1).uniform_(-1, 1) * (dim // heads) ** -0.5)

    def weights(self, query: Tensor, key: Tensor, mask: Tensor | None) -> Tensor:
        """Queries (B, H, Tq, D), keys (B, H, Tk, D) -> (B, H, Tq, Tk), float32 at least."""
        keys, weights = key.mT, torch.zeros_like(at_least_float32(key[..., 0]))  # (B, H, D, Tk), (B, H, Tk)
        mask = torch.ones_like(weights, dtype=torch.bool) if mask is None else mask.squeeze(2)
        alignments = [weights.unsqueeze(2)[:, :, :0]]  # a text whose length is predicted may have no query
        for one in query.unbind(2):
            padded = F.pad(weights.to(keys.dtype), self.around)
            location = self.location(padded)[..., :-1].view(keys.shape)  # (B, H, D, Tk)
            features = (one.unsqueeze(-1) + keys + location).tanh()
            energy = (features * self.energy).sum(-2, dtype=weights.dtype)
            weights = energy.masked_fill(~mask, torch.finfo(energy.dtype).min).softmax(-1)
            alignments.append(weights.unsqueeze(2))
        return torch.cat(alignments, dim=2)
