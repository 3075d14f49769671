"""Beam search over many prompts at once, with a length penalty and a choice of when to stop.

Shapes: P prompts, W places that the state holds for each prompt's texts, R = P W its rows, V vocabulary.
"""

import math
from bisect import insort
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal, get_args

import numpy as np
import torch
from torch import Tensor

from lmtrain.generation.extensions import best_extensions
from lmtrain.generation.search import Hypothesis, Rules, S, Step

Stopping = Literal["exact", "first", "never"]


@torch.no_grad()
def beam_search(
    log_probs: Tensor,
    state: S,
    step: Step[S],
    rules: Rules,
    *,
    beams: int,
    results: int = 1,
    alpha: float = 0.0,
    stopping: Stopping = "exact",
    prompts: Sequence[Sequence[int]] | None = None,
) -> list[list[Hypothesis]]:
    """The best texts that a beam of width `beams` finds for each prompt, best first, all different.

    `log_probs` (P, V) and `state` are the model's after reading P prompts; `prompts` are their ids, which
    `rules.no_repeat` looks at.

    The beam: a prompt's live texts begin with the empty one. At every step the `beams` best one-token extensions of
    them all are kept, by their sum of log p + `rules.bias`; of equals, those of the better text, then the lowest id.
    Those that are over by the rules are finished, the others are the live texts of the next step. A text which nothing
    may follow ends there, and what lives at `max_tokens` is cut; both compete with the rest, and say `finished=False`.
    With one beam this is greedy search; with as many beams as there are texts, it is exhaustive.

    The score: sum of (log p + bias) / length ** alpha, with length = number of generated ids, the one that ended the
    text included. alpha = 0: the plain sum, which favours short texts; alpha = 1: the mean; above: longer ones yet;
    below 0: shorter ones yet. (Where a positive bias makes sums positive, the other way round.) A text without ids has
    score 0. Of equal scores, the text that ended first wins, then the one that was better in the beam.
    `token_log_probs` are the model's own, without bias.

    When to stop:
    - "exact": a text is given up when it provably can't enter the best `results`, and the search of a prompt ends with
      its last live text. No id being worth more than g = max(0, the highest bias), a text of sum s and length t comes
      to a sum of at most u = s + (max_tokens - t) g, and so to a score of at most u / t ** alpha or
      u / max_tokens ** alpha, whichever is more. Nothing is lost: what is given up could have pushed nothing out of
      the beam that counts, so the result is that of "never". A positive bias lets little be given up.
    - "first": the search of a prompt ends with the step in which the number of its finished texts reaches `results`.
      Quicker, and may miss a better text.
    - "never": it ends when nothing lives, or at `max_tokens`.

    Returns at most `results` hypotheses per prompt (fewer only when there are no more).
    Raises LmtrainError when the model's probabilities are not numbers, and ValueError for wrong arguments.

    Other programs differ. The penalty: here, in fairseq and in transformers a higher alpha favours longer texts (sums
    being negative); Wu et al. (2016) and OpenNMT divide by ((5 + length) / 6) ** alpha, others add a reward per token.
    Whether the ending token counts in the length varies (in transformers by version); here it does. Early stopping: in
    transformers `True` is "first" with as many results as beams, `"never"` is closest to "exact" here, and `False` a
    guess between them. They and fairseq draw 2 * beams candidates, so that `beams` texts go on beside those that
    finish; here a finished text takes a place of its step, and the next step fills the beam again.
    """
    _check(beams, results, alpha, stopping)
    prompts = [()] * len(log_probs) if prompts is None else prompts
    ended = [_Ended(results, alpha) for _ in range(len(log_probs))]
    live = [[_Text(row)] for row in range(len(log_probs))]
    layout = _Layout(list(range(len(log_probs))), width=1)
    for length in range(1, rules.max_tokens + 1):
        if not any(live):
            break
        if length > 1:
            layout, source = _arrange(live, layout)
            if source != list(range(len(log_probs))):
                state = state.select(torch.tensor(source, device=log_probs.device))
            tokens = [ids[-1] for ids in layout.texts(live)]
            log_probs, state = step(state, torch.tensor(tokens, device=log_probs.device))
        row_prompts = [prompts[prompt] for prompt in layout.prompts for _ in range(layout.width)]
        scores = rules.scores(log_probs, row_prompts, layout.texts(live))
        extended, stuck = _extend(log_probs, scores, live, beams)
        for prompt, text in stuck:
            ended[prompt].add(text, finished=False)
        live = [[] for _ in ended]
        for prompt, text in extended:
            over = rules.over(text.ids)
            if over or length == rules.max_tokens:
                ended[prompt].add(text, finished=over)
            else:
                live[prompt].append(text)
        if stopping == "first":
            live = [[] if end.finished >= results else beam for beam, end in zip(live, ended, strict=True)]
        if stopping == "exact":
            best = _highest_score(rules, alpha, length)
            live = [[text for text in beam if best(text) > end.worst] for beam, end in zip(live, ended, strict=True)]
    return [end.hypotheses for end in ended]


def _check(beams: int, results: int, alpha: float, stopping: str) -> None:
    if not 1 <= results <= beams:
        raise ValueError(f"results={results} must lie between 1 and beams={beams}")
    if not abs(alpha) <= 10:
        raise ValueError(f"alpha={alpha} must lie between -10 and 10")
    if stopping not in get_args(Stopping):
        raise ValueError(f"stopping={stopping!r} must be one of {', '.join(get_args(Stopping))}")


@dataclass(slots=True)
class _Text:
    """A text of the beam; `row` is where the state lies that has read it, or for a new one all but its last token."""

    row: int
    ids: tuple[int, ...] = ()
    token_log_probs: tuple[float, ...] = ()
    total: float = 0.0


@dataclass
class _Ended:
    """The best of a prompt's texts that have ended, best first, and how many came to an end by the rules."""

    results: int
    alpha: float
    finished: int = 0
    hypotheses: list[Hypothesis] = field(default_factory=list)

    @property
    def worst(self) -> float:
        """The score to exceed."""
        return self.hypotheses[-1].score if len(self.hypotheses) == self.results else -math.inf

    def add(self, text: _Text, finished: bool) -> None:
        self.finished += finished
        score = text.total / len(text.ids) ** self.alpha if text.ids else 0.0
        if score > self.worst:
            hypothesis = Hypothesis(text.ids, text.token_log_probs, score, finished)
            insort(self.hypotheses, hypothesis, key=lambda other: -other.score)
            del self.hypotheses[self.results :]


def _highest_score(rules: Rules, alpha: float, length: int) -> Callable[[_Text], float]:
    """The score that a text of this length can come to at the most, by ending here or later.

    The bound falls from a text to its extensions, and from a text to a worse one of its length: so what takes the place
    of a text that was given up is given up as well.
    """
    gain = max(0.0, *(float(np.float32(bias)) for bias in rules.bias.values())) if rules.bias else 0.0
    here, last = length**alpha, rules.max_tokens**alpha

    def bound(text: _Text) -> float:
        total = text.total + gain * (rules.max_tokens - length)
        return float(max(total / here, total / last))

    return bound


@dataclass(frozen=True)
class _Layout:
    """Whose the rows of the state are: prompt `prompts[i]` has those from i * width on, `width` in number.

    Some may be idle: they are stepped with the others, and nobody looks at them.
    """

    prompts: list[int]
    width: int

    def texts(self, live: list[list[_Text]]) -> list[tuple[int, ...]]:
        """The ids that each row has read or is to read; for an idle one, some other row's."""
        texts = [text for beam in live for text in beam]
        found = [texts[0].ids] * (len(self.prompts) * self.width)
        for text in texts:
            found[text.row] = text.ids
        return found


def _arrange(live: list[list[_Text]], layout: _Layout) -> tuple[_Layout, list[int]]:
    """Find a row for every text, and set its `row`; also returns which old row each new one is to be taken from.

    Copying a row of a model's state may cost as much as several steps of it. Hence a text stays in its parent's row
    where it can, and rows are given up only when no more than half are needed: a beam that narrows by the texts that
    finish is as wide again at the next step.
    """
    going = [prompt for prompt in layout.prompts if live[prompt]]
    most = max(len(live[prompt]) for prompt in going)
    if most > layout.width or 2 * len(going) * most <= len(layout.prompts) * layout.width:
        source = []
        for prompt in going:
            beam = live[prompt]
            source += [text.row for text in beam] + [beam[0].row] * (most - len(beam))
            for row, text in enumerate(beam, start=len(source) - most):
                text.row = row
        return _Layout(going, most), source
    source = list(range(len(layout.prompts) * layout.width))
    for i, prompt in enumerate(layout.prompts):
        free = dict.fromkeys(range(i * layout.width, (i + 1) * layout.width))
        moving = []
        for text in live[prompt]:
            if text.row in free:
                del free[text.row]
            else:
                moving.append(text)
        for row, text in zip(free, moving, strict=False):
            source[row], text.row = text.row, row
    return layout, source


def _extend(
    log_probs: Tensor, scores: Tensor, live: list[list[_Text]], beams: int
) -> tuple[list[tuple[int, _Text]], list[tuple[int, _Text]]]:
    """The best extensions of each prompt's texts, best first, and the texts that have none; each with its prompt.

    `log_probs` and `scores` (R, V) are the model's, and those to choose by.
    """
    texts = [(prompt, text) for prompt, beam in enumerate(live) for text in beam]
    rows = np.array([text.row for _, text in texts])
    totals = np.array([text.total for _, text in texts])
    found = best_extensions(scores, rows, totals, np.array([prompt for prompt, _ in texts]), beams)
    places = torch.from_numpy(np.stack((rows[found.parents], found.tokens))).to(log_probs.device)
    numbers = log_probs[places[0], places[1]].tolist()
    extended = []
    columns = (found.parents.tolist(), found.tokens.tolist(), found.totals.tolist(), numbers)
    for parent, token, total, number in zip(*columns, strict=True):
        prompt, text = texts[parent]
        longer = _Text(text.row, (*text.ids, token), (*text.token_log_probs, number), total)
        extended.append((prompt, longer))
    return extended, [texts[i] for i in np.flatnonzero(found.stuck).tolist()]
