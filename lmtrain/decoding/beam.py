"""Beam search over many prompts at once, with a length penalty and a stopping rule that loses nothing.

Shapes: P prompts, R rows (the live beams of all prompts, prompt after prompt), V vocabulary.
"""

from collections.abc import Collection
from dataclasses import dataclass

import torch
from torch import Tensor

from lmtrain.decoding.search import Hypothesis, IsEnd, S, Step, ban, check_arguments, check_numbers


@dataclass(frozen=True)
class _Beam:
    """A text that may go on; `row` is where the state of its parent lies."""

    ids: tuple[int, ...] = ()
    token_log_probs: tuple[float, ...] = ()
    total: float = 0.0
    row: int = 0


@torch.no_grad()
def beam_search(
    log_probs: Tensor,
    state: S,
    step: Step[S],
    *,
    beams: int,
    results: int = 1,
    alpha: float = 0.0,
    max_tokens: int,
    is_end: IsEnd,
    banned: Collection[int] = (),
) -> list[list[Hypothesis]]:
    """The best texts that a beam of width `beams` finds for each prompt, best first, all different.

    `log_probs` (P, V) and `state` are the model's after reading P prompts. At every step the `beams` likeliest
    one-token extensions of a prompt's live texts are kept (of equals, that of the better text, then the lowest id).
    Those for which `is_end` holds are finished, the others go on. With one beam this is greedy search; with at least
    as many beams as there are texts, it is exhaustive. The ids in `banned` are never taken.

    score = sum of log p / length ** alpha, with length = number of generated ids, the one that ended the text
    included. alpha = 0: the plain sum, which favours short texts; alpha = 1: the mean; above: longer ones yet.
    A text cut at `max_tokens` competes by the same score, and says `finished=False`.

    A live text is given up, and with the last one the search of its prompt, only when it provably can't enter the best
    `results`: log-probabilities being at most 0, a text of sum s and length t ends with a sum of at most s and a length
    from t + 1 to `max_tokens`, so it scores at most s / max((t + 1) ** alpha, max_tokens ** alpha). What is given up
    could have displaced nothing, so the best text is the same for any `results`.

    Returns at most `results` hypotheses per prompt (fewer only when there are no more).
    Raises LmtrainError when the model's probabilities are not numbers.
    """
    check_arguments(log_probs, max_tokens, banned)
    if not 1 <= results <= beams:
        raise ValueError(f"results={results} must lie between 1 and beams={beams}")
    live = [[_Beam()] for _ in range(len(log_probs))]
    kept: list[list[Hypothesis]] = [[] for _ in range(len(log_probs))]
    for length in range(1, max_tokens + 1):
        longest = max((length + 1) ** alpha, max_tokens**alpha)
        allowed = ban(log_probs, banned)
        check_numbers(allowed.amax(dim=-1))
        first_row = 0
        for prompt, parents in enumerate(live):
            if not parents:
                continue
            extended = _extend(allowed[first_row : first_row + len(parents)], parents, first_row, beams)
            first_row += len(parents)
            going = []
            for text in extended:
                ended = is_end(text.ids)
                if ended or length == max_tokens:
                    score = text.total / length**alpha
                    kept[prompt].append(Hypothesis(text.ids, text.token_log_probs, score, ended))
                else:
                    going.append(text)
            kept[prompt] = sorted(kept[prompt], key=lambda hypothesis: -hypothesis.score)[:results]
            worst = kept[prompt][-1].score if len(kept[prompt]) == results else -torch.inf
            live[prompt] = [text for text in going if text.total / longest > worst]
        texts = [text for rows in live for text in rows]
        if not texts:
            break
        index = torch.tensor([text.row for text in texts], device=log_probs.device)
        tokens = torch.tensor([text.ids[-1] for text in texts], device=log_probs.device)
        log_probs, state = step(state.select(index), tokens)
    return kept


def _extend(log_probs: Tensor, parents: list[_Beam], first_row: int, count: int) -> list[_Beam]:
    """The `count` likeliest one-token extensions of `parents`, whose predictions are `log_probs` (len(parents), V)."""
    totals = torch.tensor([parent.total for parent in parents], dtype=torch.float64, device=log_probs.device)
    chosen = _best((log_probs + totals[:, None]).flatten(), count)
    rows, tokens = chosen // log_probs.shape[1], chosen % log_probs.shape[1]
    found = zip(rows.tolist(), tokens.tolist(), log_probs[rows, tokens].tolist(), strict=True)
    return [
        _Beam(
            (*parents[row].ids, token),
            (*parents[row].token_log_probs, log_prob),
            parents[row].total + log_prob,
            first_row + row,
        )
        for row, token, log_prob in found
    ]


def _best(scores: Tensor, count: int) -> Tensor:
    """Indices of the `count` highest of `scores` (N,), highest first, of equals the lowest index; never -inf.

    `topk` alone leaves open which of equal values it takes.
    """
    smallest = scores.topk(min(count, len(scores))).values[-1]
    (candidates,) = torch.nonzero((scores >= smallest) & (scores > -torch.inf), as_tuple=True)
    order = scores[candidates].sort(descending=True, stable=True).indices
    return candidates[order[:count]]
