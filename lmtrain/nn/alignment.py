"""Cross-attention in which a query's weights depend on those of the previous query: monotonic and location-aware.

Shapes: B rows, H heads, Tq positions of queries, Tk of keys, D features per head, W the width of an input or output, R
the width of a filter.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lmtrain.nn.cross_attention import CrossAttention
from lmtrain.nn.kv_cache import RecurrentState


@dataclass
class AlignedMemory(RecurrentState):
    """Keys and values, each (B, H, Tk, D), and the weights of the last query that has read them."""

    key: Tensor
    value: Tensor
    alignment: Tensor
    """(B, H, Tk), in float32 at least."""


class AlignedAttention(CrossAttention, ABC):
    """The base of cross-attention that is a recurrence over the queries.

    Masks are those of `padding_mask`, (B, 1, 1, Tk) bool: False gets no weight.
    """

    def project_memory(self, key: Tensor, value: Tensor | None = None) -> AlignedMemory:
        """Return the keys and values of (B, Tk, W), with the weights of no query."""
        memory = super().project_memory(key, value)
        wide = torch.promote_types(memory.key.dtype, torch.float32)
        none = torch.zeros(memory.key.shape[:-1], dtype=wide, device=key.device)
        return AlignedMemory(memory.key, memory.value, none)

    def pooled(self, query: Tensor, memory: AlignedMemory, *, mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """The joined heads of the next queries (B, Tq, W), and their weights (B, H, Tq, Tk). `memory.alignment` becomes
        that of the last one."""
        mask = memory.key.new_ones(1, 1, 1, memory.key.shape[-2], dtype=torch.bool) if mask is None else mask
        if not query.shape[1]:  # a text whose length is predicted may be empty
            return query, memory.key.new_zeros(*memory.key.shape[:2], 0, memory.key.shape[2])
        weights = self.align(self._queries(query), memory, mask)
        memory.alignment = weights[:, :, -1]
        return self._join_heads(weights.to(memory.value.dtype) @ memory.value), weights

    @abstractmethod
    def align(self, query: Tensor, memory: AlignedMemory, mask: Tensor) -> Tensor:
        """Return the weights of queries after the query of `memory.alignment`: (B, H, Tq, D) -> (B, H, Tq, Tk)."""


class MonotonicAttention(AlignedAttention):
    """Attention to one key, at or after that of the previous query (Raffel et al., 2017).

    From where the previous query stopped, a query inspects one key after the other, and stops at a key with the
    probability sigmoid(e), where e is a scaled dot product plus a learned offset (for every head, as in Ma et al.,
    2020). In training mode the weights are the expected alignments, and standard normal noise on e favors probabilities
    near 0 and 1. In evaluation mode, in `forward` as by steps, a query stops at the first key where e > 0. A query that
    passes the last key attends to nothing, as do all after it.
    """

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__(dim, heads)
        self.offset = nn.Parameter(torch.full((heads, 1, 1), -1.0))  # below zero: at first, no key stops every query

    def project_memory(self, key: Tensor, value: Tensor | None = None) -> AlignedMemory:
        """Return the keys and values of (B, Tk, W); the first query begins at the first key."""
        memory = super().project_memory(key, value)
        memory.alignment[..., :1] = 1
        return memory

    def align(self, query: Tensor, memory: AlignedMemory, mask: Tensor) -> Tensor:
        """Return the weights of queries after the query of `memory.alignment`: (B, H, Tq, D) -> (B, H, Tq, Tk)."""
        scores = (query * query.shape[-1] ** -0.5) @ memory.key.transpose(-2, -1)
        energy = scores.to(memory.alignment.dtype) + self.offset
        if not self.training:
            return hard_alignment((energy > 0) & mask, memory.alignment)
        probability = (energy + torch.randn_like(energy)).sigmoid() * mask
        return expected_alignment(probability, memory.alignment)


def expected_alignment(probability: Tensor, previous: Tensor) -> Tensor:
    """Return the expected alignments (B, H, Tq, Tk) of monotonic attention: how probable it is that query i stops at
    key j.

    probability (B, H, Tq, Tk): that query i stops at key j, given that it inspects j. previous (B, H, Tk): the
    alignment of the query that precedes query 0.

    This is a walk through pairs (i, j): a stop leads to (i + 1, j), anything else to (i, j + 1). All pairs of equal
    i + j are computed together, from those before. Raffel et al. (2017) divide by a product of probabilities, which
    underflows; here nothing but probabilities is added and multiplied.
    """
    queries, keys = probability.shape[-2:]
    entering = F.pad(previous.unsqueeze(-2), (0, queries, 0, queries - 1))  # the first query's, (B, H, Tq, Tk + Tq)
    # Each row shifted to the right by its number: [i, i + j] is the probability of (i, j).
    shifted = F.pad(probability, (0, queries + 1)).flatten(-2)[..., : queries * (queries + keys)].view_as(entering)
    stopped = passed = torch.zeros_like(entering[..., 0])
    columns = []
    for probable, entered in zip(shifted.unbind(-1), entering.unbind(-1), strict=True):
        reached = passed + F.pad(stopped, (1, 0))[..., :queries] + entered
        stopped = reached * probable
        passed = reached - stopped
        columns.append(stopped)
    back = F.pad(torch.stack(columns, dim=-1).flatten(-2), (0, queries))
    return back.view(*probability.shape[:-1], queries + keys + 1)[..., :keys]


def hard_alignment(stops: Tensor, previous: Tensor) -> Tensor:
    """Return the alignments for probabilities of 0 and 1: (B, H, Tq, Tk), with a one where a query stops.

    stops (B, H, Tq, Tk) bool: whether query i stops at key j, given that it inspects j. previous (B, H, Tk): the
    alignment of the query that precedes query 0, with a one, or only zeros if that query has passed the last key.
    """
    alignments = []
    for stop in stops.unbind(2):
        candidates = stop & (previous.cumsum(-1) > 0)
        previous = (candidates & (candidates.cumsum(-1) == 1)).to(previous.dtype)
        alignments.append(previous)
    return torch.stack(alignments, dim=2)


class LocationAwareAttention(AlignedAttention):
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

    def align(self, query: Tensor, memory: AlignedMemory, mask: Tensor) -> Tensor:
        """Return the weights of queries after the query of `memory.alignment`: (B, H, Tq, D) -> (B, H, Tq, Tk)."""
        keys, mask, weights = memory.key.mT, mask.squeeze(2), memory.alignment
        alignments = []
        for one in query.unbind(2):
            padded = F.pad(weights.to(keys.dtype), self.around)
            location = self.location(padded)[..., :-1].view(keys.shape)  # (B, H, D, Tk)
            features = (one.unsqueeze(-1) + keys + location).tanh()
            energy = (features * self.energy).sum(-2, dtype=weights.dtype)
            scores = energy.masked_fill(~mask, torch.finfo(energy.dtype).min)
            weights = scores.softmax(-1) * mask  # where all is masked, nothing has a weight
            alignments.append(weights)
        return torch.stack(alignments, dim=2)
