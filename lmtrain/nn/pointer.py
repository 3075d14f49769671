"""Pointer attention: a distribution over the positions of an input, and its mixture with one over a vocabulary.

Shapes: B rows, Tq positions of queries, Tk of keys, T of a decoder, D features, V words, W the width of an input.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lmtrain.nn.precision import at_least_float32
from lmtrain.nn.prefix_mean import MASKED


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

    `mask` bool broadcasts to (B, Tq, Tk): False is never pointed to and gets -inf. A query without a key gets -inf
    everywhere: its probabilities sum to zero, and it has no gradient.
    """
    scores = at_least_float32((query * query.shape[-1] ** -0.5) @ key.transpose(-2, -1))
    if mask is None:
        return scores.log_softmax(-1)
    nothing = ~mask.any(-1, keepdim=True)  # rows whose softmax would be 0 / 0
    return scores.masked_fill(~(mask | nothing), -torch.inf).log_softmax(-1).masked_fill(~mask, -torch.inf)


def copy_log_probs(log_vocab: Tensor, log_pointer: Tensor, tokens: Tensor, gate_logit: Tensor) -> Tensor:
    """log[(1 - g) p_vocab(w) + g sum of p_pointer(i) over tokens_i = w] for every word w, with g = sigmoid(gate_logit).

    The pointer-generator mixture (See et al., 2017; Merity et al., 2017), computed in float32, and in logarithms if
    gradients are enabled. Otherwise the pointer's part is a sum of probabilities: it is faster, and zero below 1e-45.

    log_vocab (B, T, V), log_pointer (B, T, Tk), tokens (B, Tk) int, gate_logit (B, T) -> (B, T, V). If a position's
    pointer is -inf everywhere, its g is 0, so that all probabilities sum to one.
    """
    log_vocab, log_pointer = at_least_float32(log_vocab), at_least_float32(log_pointer)
    words = tokens.unsqueeze(1).expand_as(log_pointer)  # (B, T, Tk)
    keep, copy = (gate.unsqueeze(-1) for gate in _gates(log_pointer, gate_logit))  # (B, T, 1)
    generated = log_vocab + keep
    if not torch.is_grad_enabled():  # log-sums only for the tokens, additions for the other words
        copied = torch.zeros_like(log_vocab).scatter_add_(-1, words, (log_pointer + copy).exp()).gather(-1, words)
        return generated.scatter_(-1, words, torch.logaddexp(generated.gather(-1, words), copied.log()))
    never = torch.full_like(log_vocab, -torch.inf)
    # Per word, the exponents are relative to the largest of its own pointers, against underflow.
    peak = never.scatter_reduce(-1, words, log_pointer.detach(), "amax")
    absent = peak == -torch.inf
    peak = peak.masked_fill(absent, 0.0)
    # A word without a pointer starts at one instead of zero, whose logarithm has no gradient.
    total = absent.to(peak.dtype).scatter_add(-1, words, (log_pointer - peak.gather(-1, words)).exp())
    copied = (total.log() + peak).masked_fill(absent, -torch.inf)
    return _log_sum(generated, copied + copy)


def copy_target_log_prob(
    log_vocab_target: Tensor, log_pointer: Tensor, tokens: Tensor, gate_logit: Tensor, targets: Tensor
) -> Tensor:
    """Return `copy_log_probs` at each position's target word, without a tensor over the vocabulary.

    log_vocab_target (B, T), the target's log-probability under the vocabulary; log_pointer (B, T, Tk),
    tokens (B, Tk) int, gate_logit (B, T), targets (B, T) int -> (B, T).
    """
    log_vocab_target, log_pointer = at_least_float32(log_vocab_target), at_least_float32(log_pointer)
    # MASKED instead of -inf: the logarithm of a sum over nothing has no gradient. Added instead of filled in: code that
    # is compiled for a CPU reads a bool tensor element by element.
    others = (tokens.unsqueeze(1) != targets.unsqueeze(-1)).to(log_pointer.dtype)  # (B, T, Tk)
    copied = (log_pointer.clamp_min(MASKED) + MASKED * others).logsumexp(-1)
    copied = copied.masked_fill(copied < MASKED / 2, -torch.inf)
    keep, copy = _gates(log_pointer, gate_logit)
    return _log_sum(log_vocab_target + keep, copied + copy)


def _log_sum(x: Tensor, y: Tensor) -> Tensor:
    """log(e^x + e^y). Where both are -inf, the gradient is zero; that of logaddexp would be NaN."""
    impossible = (x == -torch.inf) & (y == -torch.inf)
    return torch.logaddexp(x.masked_fill(impossible, 0.0), y).masked_fill(impossible, -torch.inf)


def _gates(log_pointer: Tensor, gate_logit: Tensor) -> tuple[Tensor, Tensor]:
    """log(1 - g) and log g: (B, T) each."""
    gate = at_least_float32(gate_logit)
    empty = (log_pointer == -torch.inf).all(-1)  # (B, T)
    return F.logsigmoid(-gate).masked_fill(empty, 0.0), F.logsigmoid(gate)
