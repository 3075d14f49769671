"""Beam search over many prompts at once, with a length penalty and an exact stopping rule.

Shapes: P prompts, W rows of the state for each prompt's texts, R = P W, V vocabulary.
"""

import heapq
import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lmtrain.generation.options import Options
from lmtrain.generation.search import Hypothesis, IsEnd, S, Step, block, never


@torch.no_grad()
def beam_search(
    log_probs: Tensor,
    state: S,
    step: Step[S],
    options: Options,
    *,
    is_end: IsEnd = never,
    blocked: Collection[int] = (),
) -> list[list[Hypothesis]]:
    """Return the best `results` texts that a beam of width `beams` finds for each prompt, best first.

    `log_probs` (P, V) and `state` are the model's after reading P prompts; both are overwritten. The `blocked` ids are
    never generated; at least one id must be allowed.

    The beam: a prompt starts with the empty text. Each step extends the live texts by one token, and keeps the `beams`
    extensions with the highest sum of log p. Extensions for which `is_end` holds are finished, as all are at
    `max_tokens`; the others are the live texts of the next step. One beam is greedy search; with as many beams as there
    are texts, the search is exhaustive.

    The score: sum of log p / length ** length_penalty, where length is the number of generated ids, including the one
    that ended the text. 0 is the plain sum, which favors short texts; 1 is the mean. Ties: the text that ended first,
    then the one that ranked higher in the beam.

    Stopping is exact: a text is dropped when it provably can't enter the best `results`, and a prompt's search ends
    with its last live text. No later token raises a sum s <= 0 of length t, so the score of any extension is at most
    s / t ** length_penalty or s / max_tokens ** length_penalty, whichever is higher. The bound also holds for the texts
    that replace a dropped one in the beam, so the result is that of a search to full length.

    Returns fewer than `results` hypotheses only if no more texts exist.
    Raises LmtrainError when the model's probabilities are NaN.

    Other programs: fairseq and transformers also favor longer texts with a higher penalty; Wu et al. (2016) and
    OpenNMT divide by ((5 + length) / 6) ** alpha. transformers' `early_stopping="never"` is closest to the stopping
    rule here. Both consider 2 * beams candidates, so that `beams` texts continue alongside those that finish; here a
    finished text counts among the `beams` of its step, and the next step fills the beam again.
    """
    best: list[list[Hypothesis]] = [[] for _ in range(len(log_probs))]
    live = [[_Text(row)] for row in range(len(log_probs))]
    prompts = list(range(len(log_probs)))  # each has as many rows of the state as the others, one after the other
    for length in range(1, options.max_tokens + 1):
        if not any(live):
            break
        if length > 1:
            prompts, source = _assign_rows(live, prompts, len(log_probs))
            if source != list(range(len(log_probs))):
                state = state.select(torch.tensor(source, device=log_probs.device))
            last = {text.row: text.ids[-1] for beam in live for text in beam}
            anything = next(iter(last.values()))  # what an idle row reads; its predictions are ignored
            tokens = [last.get(row, anything) for row in range(len(source))]
            log_probs, state = step(state, torch.tensor(tokens, device=log_probs.device))
        live = _extend(block(log_probs, blocked), live, options.beams)
        for prompt, beam in enumerate(live):
            unfinished = []
            for text in beam:
                if length == options.max_tokens or is_end(text.ids):
                    best[prompt] = _with_ended(best[prompt], text, options)
                else:
                    unfinished.append(text)
            live[prompt] = [text for text in unfinished if _can_enter(text, best[prompt], options)]
    return best


@dataclass(slots=True)
class _Text:
    """A text of the beam. The state's row `row` has read it, or, if the text is new, all but its last token."""

    row: int
    ids: tuple[int, ...] = ()
    token_log_probs: tuple[float, ...] = ()
    total: float = 0.0


def _with_ended(best: list[Hypothesis], text: _Text, options: Options) -> list[Hypothesis]:
    """Return the best results of a prompt, best first, now that a text has ended."""
    score = text.total / len(text.ids) ** options.length_penalty
    ended = [*best, Hypothesis(text.ids, text.token_log_probs, score)]
    return sorted(ended, key=lambda end: -end.score)[: options.returned]


def _can_enter(text: _Text, best: list[Hypothesis], options: Options) -> bool:
    """Return whether the text or an extension of it can score higher than the worst result; see `beam_search`."""
    if len(best) < options.returned:
        return True
    lengths = len(text.ids), options.max_tokens
    bound: float = max(text.total / length**options.length_penalty for length in lengths)
    return bound > best[-1].score


def _assign_rows(live: Sequence[list[_Text]], prompts: list[int], rows: int) -> tuple[list[int], list[int]]:
    """Set every text's new `row`. Return the prompts that have rows now, and the old row that each is copied from.

    Until now, `prompts` had the `rows`. Copying a row of the state may cost as much as several steps of the model.
    Hence a text stays in its parent's row if it can, and rows that no text needs stay idle until at most half of them
    are needed: a beam that lost texts because they finished is as wide again after the next step.
    """
    width = rows // len(prompts)
    searching = [prompt for prompt in prompts if live[prompt]]
    widest = max(len(live[prompt]) for prompt in searching)
    if widest > width or 2 * len(searching) * widest <= rows:
        source = []
        for prompt in searching:
            beam = live[prompt]
            source += [text.row for text in beam] + [beam[0].row] * (widest - len(beam))
            for row, text in enumerate(beam, start=len(source) - widest):
                text.row = row
        return searching, source
    source = list(range(rows))
    for i, prompt in enumerate(prompts):
        staying = {text.row: text for text in reversed(live[prompt])}  # the best of each row
        moving = [text for text in live[prompt] if staying[text.row] is not text]
        free = [row for row in range(i * width, (i + 1) * width) if row not in staying]
        for row, text in zip(free, moving, strict=False):
            source[row], text.row = text.row, row
    return prompts, source


def _extend(log_probs: Tensor, live: Sequence[list[_Text]], beams: int) -> list[list[_Text]]:
    """Return the `beams` best one-token extensions of each prompt's texts, best first.

    They are ranked by total + log p, from log_probs (R, V), in float64.
    """
    values, tokens = (top.tolist() for top in log_probs.topk(min(beams, log_probs.shape[-1])))
    extended = []
    for beam in live:
        candidates = (
            (-(text.total + value), rank, token, value)
            for rank, text in enumerate(beam)
            for value, token in zip(values[text.row], tokens[text.row], strict=True)
            if value > -math.inf
        )
        best = heapq.nsmallest(beams, candidates)
        extended.append(
            [
                _Text(beam[rank].row, (*beam[rank].ids, token), (*beam[rank].token_log_probs, value), -minus_sum)
                for minus_sum, rank, token, value in best
            ]
        )
    return extended
