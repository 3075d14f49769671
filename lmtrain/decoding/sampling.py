"""One text for each row, token after token: the likeliest one, or one drawn at random.

Shapes: R rows, V vocabulary, C candidates.
"""

import hashlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lmtrain.decoding.search import Hypothesis, Rules, S, Step

SORTED_FIRST = 1024
"""Words to sort for `top_p` before all are: they hold nearly all of the probability, at a tenth of the cost."""

Watch = Callable[[int, int], None]
"""`watch(row, token)` hears of every token as it is generated."""


@dataclass(frozen=True)
class Sampling:
    """How a token is drawn from the model's distribution.

    In this order: the log-probability of a token that prompt or text already holds is multiplied by
    `repetition_penalty` (Keskar et al., 2019, who have it on logits; above 1 it makes such tokens rarer); all are
    divided by `temperature`; the `top_k` likeliest are left (0: all; Fan et al., 2018); of these, renormalised, the
    fewest that together have the probability `top_p` (Holtzman et al., 2020); of these, those with at least `min_p`
    times the probability of the likeliest (Nguyen et al., 2024). At temperature 0 the likeliest is taken.

    Raises ValueError for a number out of its range.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0

    def __post_init__(self) -> None:
        if not (self.temperature >= 0 and math.isfinite(self.temperature)):
            raise ValueError(f"temperature={self.temperature} must be at least 0")
        if self.top_k < 0:
            raise ValueError(f"top_k={self.top_k} must be at least 0")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p={self.top_p} must lie above 0 and at most at 1")
        if not 0 <= self.min_p <= 1:
            raise ValueError(f"min_p={self.min_p} must lie between 0 and 1")
        if not (self.repetition_penalty > 0 and math.isfinite(self.repetition_penalty)):
            raise ValueError(f"repetition_penalty={self.repetition_penalty} must be above 0")


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

    `log_probs` (R, V) and `state` are the model's after reading R prompts; `prompts` are their ids, which
    `no_repeat` and `repetition_penalty` look at. What is drawn at place t of a row depends on its stream's name, on t
    and on the distribution alone, not on the other rows; the names default to "0", "1", ...

    Returns a hypothesis per row; its score is the sum of its log-probabilities.
    """
    count = len(log_probs)
    prompts = [()] * count if prompts is None else prompts
    streams = [str(row) for row in range(count)] if streams is None else streams
    texts: list[list[int]] = [[] for _ in range(count)]
    token_log_probs: list[list[float]] = [[] for _ in range(count)]
    finished = [False] * count
    rows = list(range(count))  # the text that each row of the state belongs to
    while True:
        scores = rules.scores(log_probs, [prompts[row] for row in rows], [texts[row] for row in rows])
        able = (scores.amax(-1) > -torch.inf).tolist()
        tokens = _choose(scores, sampling, [(streams[row], prompts[row], texts[row]) for row in rows])
        log_prob = log_probs.gather(-1, tokens.unsqueeze(-1)).squeeze(-1)
        going = []
        for i, (token, number) in enumerate(zip(tokens.tolist(), log_prob.tolist(), strict=True)):
            if not able[i]:
                continue
            row = rows[i]
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


def draw(scores: Tensor, sampling: Sampling, uniform: Tensor) -> Tensor:
    """A token for each row by its number from [0, 1): scores (R, V) in nats, uniform (R,) float64 -> (R,) int64.

    The number is looked up in the cumulative sum of the probabilities that are left, taken in float64. `scores` need
    not be normalised; minus infinity is never drawn.
    """
    scores = scores / sampling.temperature
    weights, ids = _candidates(scores, sampling)
    reached = weights.cumsum(-1, dtype=torch.float64)
    total = reached[:, -1:]
    drawn = torch.minimum(uniform.unsqueeze(-1) * total, total.nextafter(torch.zeros_like(total)))
    place = torch.searchsorted(reached, drawn, right=True)
    return (place if ids is None else ids.gather(-1, place)).squeeze(-1)


def _candidates(scores: Tensor, sampling: Sampling) -> tuple[Tensor, Tensor | None]:
    """What may be drawn: weights (R, C), zero for what is left out, and their ids (R, C), or None for 0 .. V - 1."""
    ids = None
    if sampling.top_k:
        scores, ids = scores.topk(min(sampling.top_k, scores.shape[-1]))
    probs = scores.softmax(-1)
    if sampling.top_p < 1:
        if ids is None:
            probs, ids = _nucleus(probs, sampling.top_p)
        before = probs.cumsum(-1, dtype=torch.float64) - probs
        probs = probs.masked_fill(before >= sampling.top_p, 0.0)
    if sampling.min_p:
        probs = probs.masked_fill(probs < sampling.min_p * probs.amax(-1, keepdim=True), 0.0)
    return probs, ids


def _nucleus(probs: Tensor, top_p: float) -> tuple[Tensor, Tensor]:
    """The likeliest first, as many as it takes for every row to reach `top_p`: (R, V) -> (R, C) and their ids."""
    values, ids = probs.topk(min(SORTED_FIRST, probs.shape[-1]))
    if bool((values.sum(-1) < top_p).any()):
        values, ids = probs.sort(-1, descending=True, stable=True)
    return values, ids


def _choose(scores: Tensor, sampling: Sampling, rows: Sequence[tuple[str, Sequence[int], Sequence[int]]]) -> Tensor:
    """A token for each row of scores (R, V), given its stream, prompt and text."""
    if sampling.repetition_penalty != 1:
        scores = scores.clone()
        for row, (_, prompt, text) in zip(scores, rows, strict=True):
            if seen := {*prompt, *text}:
                row[list(seen)] *= sampling.repetition_penalty
    if not sampling.temperature:
        return scores.max(-1).indices
    uniform = [_uniform(stream, len(text)) for stream, _, text in rows]
    return draw(scores, sampling, torch.tensor(uniform, dtype=torch.float64).to(scores.device))


def _uniform(stream: str, place: int) -> float:
    """A number from [0, 1) with 53 random bits that depend on the stream's name and the place alone."""
    digest = hashlib.blake2b(f"{stream} {place}".encode(), digest_size=8).digest()
    return (int.from_bytes(digest, "little") >> 11) / 2**53
