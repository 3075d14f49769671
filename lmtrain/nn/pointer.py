"""Pointer attention: a distribution over the positions of an input, and its mixture with one over a vocabulary.

Shapes: B rows, Tq positions of queries, Tk of keys, T of a decoder, D features, V words, W the width of an input.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lmtrain.nn.precision import at_least_float32
from lmtrain.nn.prefix_mean import MASKED

NEGLIGIBLE = 1e-30
"""A probability whose logarithm still has a finite gradient in float32."""


class PointerAttention(nn.Module):
    """Attention whose result is its weights: pointer networks (Vinyals et al., 2015), with scaled dot products.

    Queries of width `query_dim` and keys of width `key_dim` meet in `dim` features.
    """

    def __init__(self, query_dim: int, key_dim: int, dim: int) -> None:
        super().__init__()
        self.query = nn.Linear(query_dim, dim, bias=False)
        self.key = nn.Linear(key_dim, dim, bias=False)

    def forward(self, query: Tensor, key: Tensor, *, mask: Tensor | None = None) -> Tensor:
        """Log-probabilities over the keys: (B, Tq, W), (B, Tk, W) -> (B, Tq, Tk); see `point`."""
        return point(self.query(query), self.key(key), mask)


def point(query: Tensor, key: Tensor, mask: Tensor | None) -> Tensor:
    """Return log softmax(q.k / sqrt(D)) over the keys: (B, Tq, D), (B, Tk, D) -> (B, Tq, Tk), float32 at least.

    `mask` bool broadcasts to (B, Tq, Tk): False is never pointed to and gets about MASKED. For a query without a key
    the result means nothing.
    """
    scores = at_least_float32((query * query.shape[-1] ** -0.5) @ key.transpose(-2, -1))
    return (scores if mask is None else scores.masked_fill(~mask, MASKED)).log_softmax(-1)


def copy_log_probs(log_vocab: Tensor, log_pointer: Tensor, tokens: Tensor, gate_logit: Tensor) -> Tensor:
    """log[(1 - g) p_vocab(w) + g sum of p_pointer(i) over tokens_i = w] for every word w, with g = sigmoid(gate_logit).

    The pointer-generator mixture (See et al., 2017; Merity et al., 2017), computed in float32. The pointer's part is a
    sum of probabilities, which is zero below 1e-45, or if gradients are enabled below NEGLIGIBLE.

    log_vocab (B, T, V), log_pointer (B, T, Tk), tokens (B, Tk) int, gate_logit (B, T) -> (B, T, V).
    """
    log_vocab, log_pointer = at_least_float32(log_vocab), at_least_float32(log_pointer)
    gate = at_least_float32(gate_logit).unsqueeze(-1)  # (B, T, 1)
    words = tokens.unsqueeze(1).expand_as(log_pointer)  # (B, T, Tk)
    generated = log_vocab + F.logsigmoid(-gate)
    copied = torch.zeros_like(log_vocab).scatter_add(-1, words, (log_pointer + F.logsigmoid(gate)).exp())
    if not torch.is_grad_enabled():  # faster: log-sums only for the tokens, additions for the other words
        log_sums = torch.logaddexp(generated.gather(-1, words), copied.gather(-1, words).log())
        return generated.scatter_(-1, words, log_sums)
    absent = copied < NEGLIGIBLE
    return torch.logaddexp(generated, copied.masked_fill(absent, 1.0).log().masked_fill(absent, -torch.inf))


def copy_target_log_prob(
    log_vocab_target: Tensor, log_pointer: Tensor, tokens: Tensor, gate_logit: Tensor, targets: Tensor
) -> Tensor:
    """Return `copy_log_probs` at each position's target word, in logarithms, without a tensor over the vocabulary.

    log_vocab_target (B, T), the target's log-probability under the vocabulary; log_pointer (B, T, Tk),
    tokens (B, Tk) int, gate_logit (B, T), targets (B, T) int -> (B, T).
    """
    log_vocab_target, log_pointer = at_least_float32(log_vocab_target), at_least_float32(log_pointer)
    gate = at_least_float32(gate_logit)
    # MASKED instead of -inf: the logarithm of a sum over nothing has no gradient. Added instead of filled in: code that
    # is compiled for a CPU reads a bool tensor element by element.
    others = (tokens.unsqueeze(1) != targets.unsqueeze(-1)).to(log_pointer.dtype)  # (B, T, Tk)
    copied = (log_pointer + MASKED * others).logsumexp(-1)
    return torch.logaddexp(log_vocab_target + F.logsigmoid(-gate), copied + F.logsigmoid(gate))
