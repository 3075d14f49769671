"""One text for each row, token after token: the likeliest one, or one drawn at random.

Shapes: R rows, V vocabulary.
"""

import hashlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from lmtrain.generation.search import Hypothesis, Rules, S, Step

SORTED_FIRST = 1024
"""Words to sort for `top_p` before more are: mostly enough, at a tenth of the cost of sorting all."""

BRANCHES, LEVELS = 64, 5
"""`draw` looks a token up in at most so many levels, each of so many branches: enough for a billion tokens."""

Watch = Callable[[int, int], None]
"""`watch(row, token)` hears of every token as it is generated."""


@dataclass(frozen=True)
class Sampling:
    """How a token is drawn from the model's distribution.

    In this order: the log-probability of a token that prompt or text already holds is multiplied by
    `repetition_penalty` (divided, where a bias made it positive; Keskar et al., 2019, who have it on logits; above 1 it
    makes such tokens rarer); all are divided by `temperature`; the `top_k` likeliest are left (0: all; Fan et al.,
    2018); of these, renormalised, the fewest that together have the probability `top_p` (Holtzman et al., 2020); of
    these, those with at least `min_p` times the probability of the likeliest (Nguyen et al., 2024). What is as likely
    as the last token that is left is left too. At temperature 0 the likeliest is taken, of equals the lowest id.

    Raises ValueError for a number out of its range.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0

    def __post_init__(self) -> None:
        if not (self.temperature == 0 or 1e-6 <= self.temperature <= 1e6):
            raise ValueError(f"temperature={self.temperature} must be 0 or lie between 1e-6 and 1e6")
        if self.top_k < 0:
            raise ValueError(f"top_k={self.top_k} must be at least 0")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p={self.top_p} must lie above 0 and at most at 1")
        if not 0 <= self.min_p <= 1:
            raise ValueError(f"min_p={self.min_p} must lie between 0 and 1")
        if not 1e-6 <= self.repetition_penalty <= 1e6:
            raise ValueError(f"repetition_penalty={self.repetition_penalty} must lie between 1e-6 and 1e6")


GREEDY = Sampling(temperature=0.0)


@torch.no_grad()
def sample(
    log_probs: Tensor,
    state: S,
    step: Step[S],
    rules: Rules,
    sampling: Sampling = GREEDY,
    *,
    streams: Sequence[str] | None = None,
    prompts: Sequence[Sequence[int]] | None = None,
    watch: Watch | None = None,
) -> list[Hypothesis]:
    """Continue each row by one token at a time until it is over; by default greedily, of equals the lowest id.

    `log_probs` (R, V) and `state` are the model's after reading R prompts, and are used up; `prompts` are their ids,
    which `no_repeat` and `repetition_penalty` look at. What is drawn at place t of a row depends on its stream's name,
    on t and on the distribution alone, not on the other rows; the names default to "0", "1", ...

    Returns a hypothesis per row; its score is the sum of its log-probabilities. Raises as `Rules.scores` does.
    """
    count = len(log_probs)
    prompts = [()] * count if prompts is None else prompts
    streams = [str(row) for row in range(count)] if streams is None else streams
    if not len(prompts) == len(streams) == count:
        raise ValueError(f"{count} rows need as many prompts (not {len(prompts)}) and streams (not {len(streams)})")
    penalty = sampling.repetition_penalty
    penalties = _penalties(prompts, log_probs, penalty) if penalty != 1 else None
    texts: list[list[int]] = [[] for _ in range(count)]
    token_log_probs: list[list[float]] = [[] for _ in range(count)]
    finished = [False] * count
    rows = list(range(count))  # the text that each row of the state belongs to
    while rows:
        scores = rules.scores(log_probs, [prompts[row] for row in rows], [texts[row] for row in rows])
        if penalties is not None:
            scores = _penalise(scores, penalties[rows])
        if sampling.temperature:
            names = [f"{streams[row]} {len(texts[row])}" for row in rows]
            tokens = draw(scores, sampling, _uniform(names).to(scores.device))
        else:
            tokens = _likeliest(scores)
        if penalties is not None:
            penalties[rows, tokens] = penalty
        allowed = _at(scores, tokens) > -math.inf  # False: there is nothing but minus infinity
        found = zip(rows, tokens.tolist(), _at(log_probs, tokens).tolist(), allowed.tolist(), strict=True)
        going = []
        for i, (row, token, number, able) in enumerate(found):
            if not able:
                continue
            texts[row].append(token)
            token_log_probs[row].append(number)
            finished[row] = rules.over(texts[row])
            if watch is not None:
                watch(row, token)
            if not finished[row] and len(texts[row]) < rules.max_tokens:
                going.append(i)
        if not going:
            break
        if len(going) < len(rows):
            index = torch.tensor(going, device=tokens.device)
            rows, tokens, state = [rows[i] for i in going], tokens[index], state.select(index)
        log_probs, state = step(state, tokens)
    return [
        Hypothesis(tuple(text), tuple(numbers), sum(numbers), end)
        for text, numbers, end in zip(texts, token_log_probs, finished, strict=True)
    ]


def _at(table: Tensor, tokens: Tensor) -> Tensor:
    """Each row's entry for its token: (R, V), (R,) -> (R,)."""
    return table.gather(-1, tokens.unsqueeze(-1)).squeeze(-1)


def draw(scores: Tensor, sampling: Sampling, uniform: Tensor) -> Tensor:
    """A token for each row by its numbers from [0, 1): scores (R, V) in nats, uniform (R, LEVELS) -> (R,) int64.

    `scores` need not be normalised; minus infinity is never drawn. A row of nothing else gives 0.

    The token is looked up in a tree of sums of weights, downwards, with a number of its own at each level. One number
    and one cumulative sum over the vocabulary would be slower, and less steady: the last digits of the scores, which
    a model computes otherwise in another batch, move each of its V steps, and one in thousands of draws falls between.
    """
    weights = weigh(scores, sampling)
    levels = []
    while weights.shape[-1] > 1:
        padded = F.pad(weights, (0, -weights.shape[-1] % BRANCHES))
        levels.append(padded.view(len(padded), BRANCHES, -1))  # (R, BRANCHES, N): node n's branch b is token b N + n
        weights = levels[-1].sum(-2)
    node = torch.zeros_like(uniform[:, 0], dtype=torch.long)
    for number, level in zip(uniform.unbind(-1), reversed(levels), strict=False):
        index = node.view(-1, 1, 1).expand(-1, BRANCHES, 1)
        reached = level.gather(-1, index).squeeze(-1).cumsum(-1, dtype=torch.float64)  # (R, BRANCHES)
        branch = (reached <= number.unsqueeze(-1) * reached[:, -1:]).sum(-1)
        node = branch * level.shape[-1] + node
    return node


def weigh(scores: Tensor, sampling: Sampling) -> Tensor:
    """What each token's probability is proportional to, 0 for what is left out: (R, V) -> (R, V)."""
    probs = (scores / sampling.temperature).softmax(-1)
    if 0 < sampling.top_k < scores.shape[-1]:
        probs *= _at_least(scores, _highest(scores, sampling.top_k)[:, -1:])
    if sampling.top_p < 1:
        wanted = sampling.top_p * probs.sum(-1, keepdim=True, dtype=torch.float64)
        probs *= _at_least(probs, _nucleus(probs, wanted, SORTED_FIRST))
    if sampling.min_p:
        probs *= _at_least(probs, sampling.min_p * probs.amax(-1, keepdim=True))
    return probs


def _at_least(values: Tensor, least: Tensor) -> Tensor:
    """1.0 where values (R, V) >= least (R, 1), else 0.0: several times as fast to make and use as booleans."""
    return values.clone().ge_(least)


def _nucleus(probs: Tensor, wanted: Tensor, count: int) -> Tensor:
    """The least of the fewest of `probs` (R, V) that together reach `wanted` (R, 1) float64: (R, 1).

    Looks among the `count` highest, and among all where those don't reach it.
    """
    count = min(count, probs.shape[-1])
    values = _highest(probs, count)
    needed = (values.cumsum(-1, dtype=torch.float64) < wanted).sum(-1, keepdim=True)  # and one more, which reaches it
    least = values.gather(-1, needed.clamp_max(count - 1))
    short = needed.squeeze(-1) == count
    if count < probs.shape[-1] and bool(short.any()):
        least[short] = _nucleus(probs[short], wanted[short], probs.shape[-1])
    return least


def _highest(values: Tensor, count: int) -> Tensor:
    """The `count` highest of each row, highest first: (R, V) -> (R, count). On a CPU, NumPy is quicker."""
    if not values.is_cpu:
        return values.topk(count).values
    highest = np.partition(values.detach().numpy(), -count, axis=-1)[:, -count:]
    return torch.from_numpy(np.sort(highest, axis=-1)[:, ::-1].copy())


def _likeliest(scores: Tensor) -> Tensor:
    """Where each row is highest, of equals the lowest id: (R, V) -> (R,). On a CPU, NumPy is quicker."""
    if not scores.is_cpu:
        return scores.max(-1).indices
    return torch.from_numpy(scores.detach().numpy().argmax(-1))


def _uniform(names: Sequence[str]) -> Tensor:
    """Numbers from [0, 1) with 32 random bits that depend on a name alone: (R, LEVELS) float64.

    Times any total they stay below it, also in what rounding leaves of the product.
    """
    digests = b"".join(hashlib.blake2b(name.encode(), digest_size=4 * LEVELS).digest() for name in names)
    return torch.from_numpy(np.frombuffer(digests, dtype="<u4").reshape(-1, LEVELS) / 2**32)


def _penalties(prompts: Sequence[Sequence[int]], like: Tensor, penalty: float) -> Tensor:
    """The penalty for the tokens that each prompt holds, 1 for the others: (R, V), of the device of `like` (R, V)."""
    penalties = torch.ones_like(like)
    for row, prompt in zip(penalties, prompts, strict=True):
        row[list(prompt)] = penalty
    return penalties


def _penalise(scores: Tensor, penalties: Tensor) -> Tensor:
    """The scores (R, V) made smaller by their penalties (R, V): multiplied below 0, divided above."""
    return scores.clamp(max=0) * penalties + scores.clamp(min=0) / penalties
