"""One text for each row, token by token: greedy search and sampling.

Shapes: R rows, V vocabulary.
"""

import hashlib
from collections.abc import Callable, Collection, Sequence

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from lmtrain.generation.options import Options
from lmtrain.generation.search import Hypothesis, IsEnd, S, Step, block, never

SORTED_FIRST = 4096
"""Tokens to sort for `top_p` before the whole vocabulary is sorted: usually enough."""

BRANCHES, LEVELS = 64, 5
"""The tree of `sample_tokens`: branches of a node, and levels at most. It is enough for a billion tokens."""

OnToken = Callable[[int, int], None]
"""`on_token(row, token)`, called with every token as it is generated."""


@torch.no_grad()
def sample(
    log_probs: Tensor,
    state: S,
    step: Step[S],
    options: Options,
    *,
    is_end: IsEnd = never,
    blocked: Collection[int] = (),
    seeds: Sequence[str] | None = None,
    prompts: Sequence[Sequence[int]] | None = None,
    on_token: OnToken | None = None,
) -> list[Hypothesis]:
    """Continue each row until it ends, and return a hypothesis per row.

    `log_probs` (R, V) and `state` are the model's after reading R prompts; both are overwritten. The `blocked` ids are
    never generated; at least one id must be allowed. `prompts` are the ids of the prompts, which `repetition_penalty`
    applies to. The token sampled at position t of a row depends only on the row's seed, on t, and on the distribution,
    not on the other rows; the default seeds are "0", "1", ...

    Raises LmtrainError when the model's probabilities are NaN.
    """
    count = len(log_probs)
    seeds = [str(row) for row in range(count)] if seeds is None else seeds
    penalty = options.repetition_penalty
    penalties = _penalties(prompts or [()] * count, log_probs, penalty) if penalty != 1 else None
    texts: list[list[int]] = [[] for _ in range(count)]
    token_log_probs: list[list[float]] = [[] for _ in range(count)]
    rows = list(range(count))  # the text that each row of the state belongs to
    while rows:
        scores = block(log_probs, blocked)
        if penalties is not None:
            scores = scores * penalties[rows]
        if options.temperature:
            keys = [f"{seeds[row]} {len(texts[row])}" for row in rows]
            tokens = sample_tokens(scores, options, _uniform(keys).to(scores.device))
        else:
            tokens = scores.max(-1).indices  # ties: the lowest
        if penalties is not None:
            penalties[rows, tokens] = penalty
        chosen = log_probs.gather(-1, tokens.unsqueeze(-1)).squeeze(-1)
        unfinished = []
        for i, (row, token, log_prob) in enumerate(zip(rows, tokens.tolist(), chosen.tolist(), strict=True)):
            texts[row].append(token)
            token_log_probs[row].append(log_prob)
            if on_token is not None:
                on_token(row, token)
            if len(texts[row]) < options.max_tokens and not is_end(texts[row]):
                unfinished.append(i)
        if not unfinished:
            break
        if len(unfinished) < len(rows):
            index = torch.tensor(unfinished, device=tokens.device)
            rows, tokens, state = [rows[i] for i in unfinished], tokens[index], state.select(index)
        log_probs, state = step(state, tokens)
    return [
        Hypothesis(tuple(text), tuple(numbers), sum(numbers) / len(text) ** options.length_penalty)
        for text, numbers in zip(texts, token_log_probs, strict=True)
    ]


def sample_tokens(scores: Tensor, options: Options, uniform: Tensor) -> Tensor:
    """Sample a token for each row: scores (R, V) in nats, random numbers (R, LEVELS) in [0, 1) -> (R,) int64.

    `scores` need not be normalized; a token at minus infinity is never sampled.

    The token is found in a tree of sums of probabilities, from the root, with a random number for each level. With one
    number and one cumulative sum over the vocabulary, the sample would depend more on rounding: the last digits of the
    scores differ between batches, and they would move each of the V steps of the cumulative sum.
    """
    probs = filtered_probs(scores, options)
    levels = []
    while probs.shape[-1] > 1:
        padded = F.pad(probs, (0, -probs.shape[-1] % BRANCHES))
        levels.append(padded.view(len(padded), BRANCHES, -1))  # (R, BRANCHES, N): node n's branch b is token b N + n
        probs = levels[-1].sum(-2)
    node = torch.zeros_like(uniform[:, 0], dtype=torch.long)
    for number, level in zip(uniform.unbind(-1), reversed(levels), strict=False):
        index = node.view(-1, 1, 1).expand(-1, BRANCHES, 1)
        reached = level.gather(-1, index).squeeze(-1).cumsum(-1, dtype=torch.float64)  # (R, BRANCHES)
        branch = (reached <= number.unsqueeze(-1) * reached[:, -1:]).sum(-1)
        node = branch * level.shape[-1] + node
    return node


def filtered_probs(scores: Tensor, options: Options) -> Tensor:
    """Return the tokens' probabilities, not renormalized, with 0 for filtered tokens: (R, V) -> (R, V)."""
    probs = (scores / options.temperature).softmax(-1)
    if 0 < options.top_k < scores.shape[-1]:
        probs *= _at_least(scores, _highest(scores, options.top_k)[:, -1:])
    if options.top_p < 1:
        mass = options.top_p * probs.sum(-1, keepdim=True, dtype=torch.float64)
        probs *= _at_least(probs, _nucleus_threshold(probs, mass))
    return probs


def _at_least(values: Tensor, threshold: Tensor) -> Tensor:
    """Return 1.0 where values (R, V) >= threshold (R, 1), else 0.0: faster than booleans, also to multiply by."""
    return values.clone().ge_(threshold)


def _nucleus_threshold(probs: Tensor, mass: Tensor) -> Tensor:
    """Return the lowest of the fewest `probs` (R, V) whose sum reaches `mass` (R, 1) float64: (R, 1)."""
    vocab = probs.shape[-1]
    for count in (min(SORTED_FIRST, vocab), vocab):
        values = _highest(probs, count)
        sums = values.cumsum(-1, dtype=torch.float64)
        if bool((sums[:, -1:] >= mass).all()):
            break
    # The sums that do not reach the mass; the next one does, and its index is their number.
    short = (sums < mass).sum(-1, keepdim=True)
    return values.gather(-1, short.clamp_max(vocab - 1))


def _highest(values: Tensor, count: int) -> Tensor:
    """Return the `count` highest of each row, highest first: (R, V) -> (R, count). On a CPU, NumPy is faster."""
    if not values.is_cpu:
        return values.topk(count).values
    highest = np.partition(values.detach().numpy(), -count)[:, -count:]
    return torch.from_numpy(np.sort(highest)[:, ::-1].copy())


def _uniform(keys: Sequence[str]) -> Tensor:
    """Return numbers in [0, 1) with 32 random bits, a function of the row's key only: (R, LEVELS) float64.

    The product of such a number and any total, even rounded, is below the total.
    """
    digests = b"".join(hashlib.blake2b(key.encode(), digest_size=4 * LEVELS).digest() for key in keys)
    return torch.from_numpy(np.frombuffer(digests, dtype="<u4").reshape(-1, LEVELS) / 2**32)


def _penalties(prompts: Sequence[Sequence[int]], like: Tensor, penalty: float) -> Tensor:
    """Return each token's factor, `penalty` if it is in the prompt, else 1: (R, V), as `like`."""
    penalties = torch.ones_like(like)
    for row, prompt in zip(penalties, prompts, strict=True):
        row[list(prompt)] = penalty
    return penalties
