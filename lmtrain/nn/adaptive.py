"""The adaptive softmax: a rare word's cluster is predicted first, and the words of a cluster only for its own targets.

The words below the first cutoff, the shortlist, are predicted together with one class per cluster. The loss is exact
for any order of the ids, and saves work where ids are sorted by frequency.

Shapes: ... any leading axes, N rows, E their width, V words, S of them in the shortlist, K clusters of the others.
"""

import math

import torch
from torch import Tensor, nn

from lmtrain.nn.chunked_loss import linear_cross_entropy
from lmtrain.nn.output_loss import Chunk, rows_at_once, target_nats


class AdaptiveSoftmax(nn.Module):
    """p(w) = p(class w) in the shortlist, p(class k) p(w | cluster k) in a tail (Grave et al., 2017).

    Both factors are softmaxes over logits of full width: the words' (V, E) matrix and bias stay whole, and are
    arguments of the methods. This module holds the weights of the cluster classes.

    `cutoffs` are the ids at which the clusters begin; None = a sixteenth and a quarter of V. Raises ValueError where V
    is too small for them.
    """

    def __init__(self, width: int, vocab_size: int, cutoffs: tuple[int, ...] | None) -> None:
        super().__init__()
        self.cutoffs = cutoffs or (vocab_size // 16, vocab_size // 4)
        if not 0 < self.cutoffs[0] <= self.cutoffs[-1] < vocab_size:
            raise ValueError(f"the shortlist or the last cluster would be empty: {self.cutoffs}, {vocab_size} words")
        ends = (*self.cutoffs[1:], vocab_size)
        self.shortlist = self.cutoffs[0]
        self.sizes = [end - start for start, end in zip(self.cutoffs, ends, strict=True)]
        self.shares = [1.0 for _ in self.sizes]
        self.clusters = nn.Linear(width, len(self.sizes), bias=False)
        self.bias = nn.Parameter(torch.tensor([math.log(size) for size in self.sizes]))

    @property
    def classes(self) -> int:
        """S + K: the shortlist and the clusters."""
        return self.shortlist + len(self.sizes)

    @property
    def tail_logits_per_target(self) -> float:
        """Logits of tails computed for the loss of a target, on average; before `set_shares`, an upper bound."""
        return sum(share * size for share, size in zip(self.shares, self.sizes, strict=True))

    def set_shares(self, counts: Tensor) -> None:
        """Set each tail's share of the targets from counts (V,) of the training tokens."""
        _, *tails = torch.split(counts, [self.shortlist, *self.sizes])
        self.shares = [float(tail.sum() / counts.sum()) for tail in tails]

    @torch.no_grad()
    def set_bias(self, output_bias: Tensor) -> None:
        """Make each cluster as probable as its words together, as far as their bias (V,) determines it."""
        _, *tails = torch.split(output_bias, [self.shortlist, *self.sizes])
        self.bias.copy_(torch.stack([tail.logsumexp(0) for tail in tails]))

    def forward(self, logits: Tensor, hidden: Tensor) -> Tensor:
        """log p (..., V), from the words' logits (..., V) and the states (..., E) behind them."""
        own = (self.clusters(hidden) + self.bias).to(logits.dtype)  # (..., K)
        first, *tails = torch.split(logits, [self.shortlist, *self.sizes], -1)
        first, *shares = torch.split(
            torch.cat([first, own], -1).log_softmax(-1), [self.shortlist, *([1] * len(tails))], -1
        )
        return torch.cat(
            [first, *(tail.log_softmax(-1) + share for tail, share in zip(tails, shares, strict=True))], -1
        )

    def nats(self, hidden: Tensor, weight: Tensor, bias: Tensor, targets: Tensor, chunk: Chunk) -> Tensor:
        """-log p of each target: hidden (N, E), weight (V, E), bias (V,), targets (N,) -> (N,), float32 at least.

        `chunk` applies to the shortlist and to each tail.
        """
        rest = sum(self.sizes)
        first, others = torch.split(weight, [self.shortlist, rest])
        first_bias, other_bias = torch.split(bias, [self.shortlist, rest])
        beyond = targets - self.shortlist  # ids among the clusters' words
        cluster = torch.stack([targets >= cutoff for cutoff in self.cutoffs]).sum(0) - 1
        classes = torch.where(beyond < 0, targets, self.shortlist + cluster)
        by_class = target_nats(
            hidden, torch.cat([first, self.clusters.weight]), torch.cat([first_bias, self.bias]), classes, chunk
        )
        rows = rows_at_once(chunk, len(targets), max(self.sizes)) or len(targets)
        return by_class + linear_cross_entropy(hidden, others, other_bias, beyond, rows, self.sizes)
