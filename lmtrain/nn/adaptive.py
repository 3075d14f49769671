"""The adaptive softmax: a rare word's cluster is predicted first, and the words of a cluster only for its own targets.

The words below the first cutoff, the shortlist, are predicted together with one class for each cluster of the others.
It is exact whatever the order of the ids, and saves work where they fall in frequency.

Shapes: ... any leading axes, N rows, E their width, V words, S of them in the shortlist, K clusters of the others.
"""

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, library, nn

from lmtrain.errors import LmtrainError
from lmtrain.nn import output_loss
from lmtrain.nn.output_loss import Chunk, rows_at_once


class AdaptiveSoftmax(nn.Module):
    """p(w) = p(class w) in the shortlist, p(class k) p(w | cluster k) in a tail (Grave et al., 2017).

    Both factors are softmaxes over logits of full width, so that the words' (V, E) matrix and bias stay whole, and are
    given to the methods. This module holds what the clusters' own classes take, which count as their words together.

    `cutoffs` are the ids at which the clusters begin; None = a sixteenth and a quarter of V. Raises LmtrainError where
    V is too small for them. The share of the targets that lies in each tail is kept for the count of operations alone.
    """

    def __init__(self, width: int, vocab_size: int, cutoffs: tuple[int, ...] | None) -> None:
        super().__init__()
        self.cutoffs = cutoffs or (vocab_size // 16, vocab_size // 4)
        if self.cutoffs[-1] >= vocab_size:
            raise LmtrainError(
                f"model.output_cutoffs={self.cutoffs}: the last cluster would be empty, with {vocab_size} words; "
                "lower the last cutoff"
            )
        if self.cutoffs[0] < 1:
            raise LmtrainError(
                f"model.output=adaptive with {vocab_size} words: give model.output_cutoffs, or use softmax"
            )
        ends = (*self.cutoffs[1:], vocab_size)
        self.shortlist = self.cutoffs[0]
        self.sizes = [end - start for start, end in zip(self.cutoffs, ends, strict=True)]
        self.shares = [1.0 for _ in self.sizes]  # more than any tail's, until `set_shares`
        self.clusters = nn.Linear(width, len(self.sizes), bias=False)
        self.bias = nn.Parameter(torch.tensor([math.log(size) for size in self.sizes]))

    @property
    def classes(self) -> int:
        """S + K: what is predicted first."""
        return self.shortlist + len(self.sizes)

    @property
    def logits_per_target(self) -> float:
        """How many logits the loss of a target takes on average."""
        return self.classes + sum(share * size for share, size in zip(self.shares, self.sizes, strict=True))

    def set_shares(self, counts: Tensor) -> None:
        """Learn from counts (V,) of the training tokens which share of the targets each tail has."""
        _, *tails = torch.split(counts, [self.shortlist, *self.sizes])
        self.shares = [float(tail.sum() / counts.sum()) for tail in tails]

    @torch.no_grad()
    def set_bias(self, output_bias: Tensor) -> None:
        """Let each cluster be as probable as its words are together, by a bias (V,) alone."""
        _, *tails = torch.split(output_bias, [self.shortlist, *self.sizes])
        self.bias.copy_(torch.stack([tail.logsumexp(0) for tail in tails]))

    def forward(self, logits: Tensor, hidden: Tensor) -> Tensor:
        """The words' logits (..., V) and the states that they come from (..., E) to such (..., V) whose softmax is p.

        A tail's are moved as a whole, so that its exponentials sum to that of its cluster.
        """
        own = self.clusters(hidden) + self.bias  # (..., K)
        first, *tails = torch.split(logits, [self.shortlist, *self.sizes], -1)
        sums = torch.stack([tail.logsumexp(-1) for tail in tails], -1)
        moves = torch.split(own.to(logits.dtype) - sums, 1, -1)
        return torch.cat([first, *(tail + move for tail, move in zip(tails, moves, strict=True))], -1)

    def nats(self, hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, chunk: Chunk) -> Tensor:
        """-log p of each target: hidden (N, E), weight (V, E), bias (V,), targets (N,) -> (N,), float32 at least.

        `chunk` is for the first classes and for each tail alike.
        """
        rest = sum(self.sizes)
        first, others = torch.split(weight, [self.shortlist, rest])
        first_bias, other_bias = torch.split(bias, [self.shortlist, rest]) if bias is not None else (None, None)
        beyond = targets - self.shortlist  # ids among the others' words
        cluster = torch.stack([targets >= cutoff for cutoff in self.cutoffs]).sum(0) - 1
        classes = torch.where(beyond < 0, targets, self.shortlist + cluster)
        if first_bias is None:
            first_bias = self.bias.new_zeros(self.shortlist)
        by_class = output_loss.target_nats(
            hidden, torch.cat([first, self.clusters.weight]), torch.cat([first_bias, self.bias]), classes, chunk
        )
        rows = rows_at_once(chunk, len(targets), max(self.sizes)) or len(targets)
        return by_class + tail_cross_entropy(hidden, others, other_bias, beyond, self.sizes, rows)


def tail_cross_entropy(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, sizes: Sequence[int], rows: int
) -> Tensor:
    """-log p of each target within its cluster, in nats; 0 where a target is negative, and in none.

    hidden (N, E), weight (V - S, E) and bias (V - S,) of clusters of these `sizes` one after the other, targets (N,)
    int64 ids of those -> (N,). Only a cluster's own targets' logits are made, of `rows` at once, and in the backward
    pass again: see `output_loss.linear_cross_entropy`.
    """
    nats: Tensor = _forward(hidden, weight, bias, targets, sizes, rows, output_loss.product_type(hidden))[0]
    return nats


def _clusters(targets: Tensor, sizes: Sequence[int]) -> Iterator[tuple[slice, Tensor]]:
    """Each cluster's words, and the rows whose targets they are."""
    start = 0
    for size in sizes:
        yield slice(start, start + size), ((targets >= start) & (targets < start + size)).nonzero().squeeze(-1)
        start += size


def forward(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    sizes: Sequence[int],
    rows: int,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor]:
    """As `output_loss.forward`; 0 in the rows of no cluster."""
    results = tuple(vector.zero_() for vector in output_loss.vectors(hidden, dtype))
    for words, places in _clusters(targets, sizes):
        if len(places):
            own_bias = None if bias is None else bias[words]
            own = targets[places] - words.start
            found = output_loss.forward(hidden[places], weight[words], own_bias, own, rows, dtype)
            for result, values in zip(results, found, strict=True):
                result[places] = values
    nats, largest, log_sums = results
    return nats, largest, log_sums


def backward(
    upstream: Tensor,
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    largest: Tensor,
    log_sums: Tensor,
    sizes: Sequence[int],
    rows: int,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor]:
    """As `output_loss.backward`."""
    grad_hidden, grad_weight = torch.zeros_like(hidden), torch.zeros_like(weight)
    grad_bias = weight.new_zeros(0) if bias is None else torch.zeros_like(bias)
    for words, places in _clusters(targets, sizes):
        if len(places):
            own_bias = None if bias is None else bias[words]
            own = targets[places] - words.start
            found = output_loss.backward(
                upstream[places],
                hidden[places],
                weight[words],
                own_bias,
                own,
                largest[places],
                log_sums[places],
                rows,
                dtype,
            )
            grad_hidden[places], grad_weight[words] = found[:2]
            if bias is not None:
                grad_bias[words] = found[2]
    return grad_hidden, grad_weight, grad_bias


_forward = library.custom_op("lmtrain::tail_cross_entropy", forward, mutates_args=())
_backward = library.custom_op("lmtrain::tail_cross_entropy_backward", backward, mutates_args=())


@_forward.register_fake
def _(hidden: Tensor, weight: Any, bias: Any, targets: Any, sizes: Any, rows: int, dtype: torch.dtype) -> Any:
    return output_loss.vectors(hidden, dtype)


@_backward.register_fake
def _(upstream: Tensor, hidden: Tensor, weight: Tensor, bias: Tensor | None, *_: Any) -> tuple[Tensor, ...]:
    grad_bias = weight.new_empty(0) if bias is None else torch.empty_like(bias)
    return torch.empty_like(hidden), torch.empty_like(weight), grad_bias


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    hidden, weight, bias, targets, ctx.sizes, ctx.rows, ctx.dtype = inputs
    ctx.save_for_backward(hidden, weight, bias, targets, *output[1:])


def _gradients(ctx: Any, upstream: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
    hidden, weight, bias = _backward(upstream, *ctx.saved_tensors, ctx.sizes, ctx.rows, ctx.dtype)
    return hidden, weight, bias if ctx.needs_input_grad[2] else None, None, None, None, None


_forward.register_autograd(_gradients, setup_context=_save)
