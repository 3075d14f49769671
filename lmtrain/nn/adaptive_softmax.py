"""The adaptive softmax (Grave et al., 2017): frequent words are predicted directly, rare ones in two steps.

    ids      0 .. cutoffs[0] .. cutoffs[1] .. V
             shortlist | cluster 0  | cluster 1 ..
    step 1   a softmax over the words of the shortlist and one class per cluster
    step 2   for targets in a cluster only, a softmax over the words of that cluster

The loss is exact for any order of the ids, and saves work if ids are sorted by frequency.

Shapes: ... any leading axes, N rows, E their width, V words, S of them in the shortlist, K clusters.
"""

import math
from itertools import pairwise

import torch
from torch import Tensor, nn

from lmtrain.nn.chunked_loss import linear_cross_entropy
from lmtrain.nn.output_loss import Chunk, rows_at_once, target_nats


class AdaptiveSoftmax(nn.Module):
    """p(w) = p(class w) in the shortlist, p(class k) p(w | cluster k) in cluster k.

    The words' matrix (V, E) and bias are those of the model's output layer, and arguments of the methods: all words
    have the full width E. This module holds the weights of the clusters' classes.

    `cutoffs` are the ids at which the clusters begin; None = a sixteenth and a quarter of V. Raises ValueError if V is
    too small for them.
    """

    def __init__(self, width: int, vocab_size: int, cutoffs: tuple[int, ...] | None) -> None:
        super().__init__()
        self.cutoffs = cutoffs or (vocab_size // 16, vocab_size // 4)
        self.shortlist, *self.sizes = (end - start for start, end in pairwise((0, *self.cutoffs, vocab_size)))
        if min(self.shortlist, *self.sizes) < 1:
            raise ValueError(f"the shortlist or a cluster would be empty: {self.cutoffs}, {vocab_size} words")
        self.clusters = nn.Linear(width, len(self.sizes), bias=False)
        self.bias = nn.Parameter(torch.tensor([math.log(size) for size in self.sizes]))

    def tail_logits_per_target(self, counts: Tensor) -> float:
        """Return how many logits of clusters the loss computes per target, on average over targets with counts (V,)."""
        _, *tails = torch.split(counts, [self.shortlist, *self.sizes])
        return sum(float(tail.sum() / counts.sum()) * len(tail) for tail in tails)

    @torch.no_grad()
    def set_bias(self, output_bias: Tensor) -> None:
        """Set the bias of each cluster's class to the logsumexp of its words' biases, of `output_bias` (V,)."""
        _, *tails = torch.split(output_bias, [self.shortlist, *self.sizes])
        self.bias.copy_(torch.stack([tail.logsumexp(0) for tail in tails]))

    def forward(self, logits: Tensor, hidden: Tensor) -> Tensor:
        """The words' logits (..., V), and the output layer's input `hidden` (..., E) -> log p (..., V)."""
        of_clusters = (self.clusters(hidden) + self.bias).to(logits.dtype)  # (..., K)
        shortlist, *tails = torch.split(logits, [self.shortlist, *self.sizes], -1)
        classes = torch.cat([shortlist, of_clusters], -1).log_softmax(-1)  # (..., S + K)
        log_shortlist, *log_clusters = torch.split(classes, [self.shortlist, *([1] * len(tails))], -1)
        in_clusters = [tail.log_softmax(-1) + log_p for tail, log_p in zip(tails, log_clusters, strict=True)]
        return torch.cat([log_shortlist, *in_clusters], -1)

    def nats(self, hidden: Tensor, weight: Tensor, bias: Tensor, targets: Tensor, chunk: Chunk) -> Tensor:
        """Return -log p of each target (N,), float32 at least: hidden (N, E), weight (V, E), bias (V,), targets (N,).

        `chunk` applies to the shortlist and to each cluster.
        """
        rest = sum(self.sizes)
        first, others = torch.split(weight, [self.shortlist, rest])
        first_bias, other_bias = torch.split(bias, [self.shortlist, rest])
        in_clusters = targets - self.shortlist  # ids among the clusters' words; negative in the shortlist
        classes = targets.clamp_max(self.shortlist) + sum(targets >= cutoff for cutoff in self.cutoffs[1:])
        by_class = target_nats(
            hidden, torch.cat([first, self.clusters.weight]), torch.cat([first_bias, self.bias]), classes, chunk
        )
        rows = rows_at_once(chunk, len(targets), max(self.sizes))
        return by_class + linear_cross_entropy(hidden, others, other_bias, in_clusters, rows, self.sizes)
